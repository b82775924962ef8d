"""Section Outcome: how a run ended, in a few figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

from paceline.pages.page import Block, Table, Text, Tile, Tiles
from paceline.report.html.runs import Event, RunRecord
from paceline.units import format_bytes, format_count, format_seconds, metric_title, metric_unit

_STATUS = {
    "completed": "completed",
    "stopped": "stopped on request",
    "failed": "failed",
    "unfinished": "not finished",
    "not begun": "not begun",
}


def outcome(runs: Sequence[RunRecord]) -> Iterator[Block]:
    """The section's blocks."""
    for run in runs:
        yield from _status(run, len(runs) > 1)
    if len(runs) == 1:
        yield Tiles(tuple(_tiles(runs[0])))
        return
    facts = [_facts(run) for run in runs]
    names = list(dict.fromkeys(name for each in facts for name in each))
    yield Table(
        columns=("run", *names),
        rows=[
            (run.name, *(each[name].partition(" · ")[0] if name in each else None for name in names))
            for run, each in zip(runs, facts, strict=True)
        ],
        caption="Outcome of each run",
    )


def facts_of(run: RunRecord) -> dict[str, Any]:
    """The outcome as JSON values."""
    steps, evaluations = run.of("step"), run.of("evaluation")
    return {
        "run_dir": str(run.path),
        "name": run.name,
        "status": run.status,
        "step": run.step,
        "records": len(steps),
        "evaluations": len(evaluations),
        "incidents": len(run.of("incident")),
        "resumes": len(run.of("resume")),
    }


def _status(run: RunRecord, is_one_of_many: bool) -> Iterator[Block]:
    who = f"{run.name}: " if is_one_of_many else ""
    if run.status == "failed":
        message = (run.finish or {}).get("message") or "the processes ended without saying why; see their output."
        yield Text(f"{who}{message}", kind="bad")
    elif run.status == "stopped":
        stops = run.of("stop")
        why = f" ({stops[-1]['reason']})" if stops else ""
        yield Text(f"{who}The run was stopped{why}; the same command goes on with it.", kind="warning")
    elif run.status == "unfinished":
        yield Text(
            f"{who}No end is recorded: the run is under way, or was killed. The same command goes on with it.",
            kind="warning",
        )
    elif run.status == "not begun":
        yield Text(f"{who}The run has not begun to train.", kind="warning")
    for complaint in run.complaints:
        yield Text(f"{who}{complaint}", kind="warning")


def _tiles(run: RunRecord) -> Iterator[Tile]:
    total = run.total_steps
    notes = {"status": _ending(run), "steps": f"of {format_count(total)}" if total else ""}
    for label, fact in _facts(run).items():
        value, _, note = fact.partition(" · ")
        yield Tile(label, value, note or notes.get(label, ""))


def _ending(run: RunRecord) -> str:
    resumes = len(run.of("resume"))
    return f"resumed {resumes} time{'s' * (resumes > 1)}" if resumes else ""


def _facts(run: RunRecord) -> dict[str, str]:
    """By label a value, and after a dot a few more words."""
    facts = {"status": _STATUS.get(run.status, run.status), **_headline(run), "steps": format_count(run.step)}
    steps, summary = run.of("step"), run.summary
    if steps:
        facts["samples"] = f"{format_count(steps[-1]['samples'])} · in training, with repeats"
    if summary is not None:
        facts["training time"] = (
            f"{format_seconds(summary.train_seconds)} · {format_seconds(summary.total_seconds)} in all"
        )
        if summary.throughput_samples_per_second:
            facts["throughput"] = (
                f"{format_count(summary.throughput_samples_per_second)}/s · samples, over all processes"
            )
        if summary.throughput_tokens_per_second:
            facts["tokens"] = f"{format_count(summary.throughput_tokens_per_second)}/s · padding left out"
        if summary.data_wait_fraction is not None:
            facts["waiting for data"] = f"{100 * summary.data_wait_fraction:.1f} % · of the steps"
        if summary.mfu is not None:
            facts["MFU"] = f"{100 * summary.mfu:.1f} % · of the devices' peak"
        if summary.peak_memory_bytes is not None:
            facts["peak memory"] = f"{format_bytes(summary.peak_memory_bytes)} · of the first process"
    if run.plan.get("parameters"):
        facts["parameters"] = f"{format_count(run.plan['parameters'])} · trainable"
    return {**facts, "hardware": _hardware(run)}


def _headline(run: RunRecord) -> dict[str, str]:
    """The last and the best evaluation of what one looks at first: accuracy, say, else the loss."""
    evaluations = run.of("evaluation")
    for metric in dict.fromkeys((run.headline, "loss")):
        label = "held-out loss" if metric == "loss" else metric_title(metric)
        unit, choose = f" {metric_unit(metric)}".rstrip(), max if run.higher_is_better(metric) else min
        known = [event for event in evaluations if event.get(metric) is not None]
        if known:
            last = [event for event in known if event["step"] == known[-1]["step"]]
            best: Event = choose(known, key=itemgetter(metric))
            where = f"{best['weights']} weights, after step {format_count(best['step'])}"
            told = ", ".join(f"{event['weights']} {_figure(event[metric])}{unit}" for event in last)
            return {
                f"best {label}": f"{_figure(best[metric])}{unit} · {where}",
                f"last {label}": f"{_figure(last[-1][metric])}{unit} · {told}",
            }
    return {}


def _figure(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.4f}"


def _hardware(run: RunRecord) -> str:
    count = run.world_size
    name = run.plan.get("device_name") or run.environment.get("device") or "unknown"
    processes = f"{count} process{'es' * (count > 1)}"
    return f"{name} · {processes}, {run.plan.get('precision', 'unknown precision')}"
