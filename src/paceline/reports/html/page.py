"""The report: one page about a run or a comparison of several, from their run directories alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from paceline.errors import RunDirectoryError
from paceline.pages.page import Block, Marked, Page, Section, Table, Text, Tile, Tiles, write_page
from paceline.pages.shown import Shown
from paceline.parsing.files import refuse_special_outputs
from paceline.parsing.units import counted, format_bytes, format_count, format_seconds, metric_title, metric_unit
from paceline.records.reader import read_summary
from paceline.records.run_directory import RunDirectory, file_operation
from paceline.reports.html.forks import forks
from paceline.reports.html.predictions import predictions
from paceline.reports.html.runs import Event, RunRecord, flattened, read_runs
from paceline.reports.html.speed import findings, ledger_counts, memory, scaling, speed, steps_in_words, timeline
from paceline.reports.html.training import training


@dataclass(frozen=True, kw_only=True)
class WrittenReport:
    """A written report.

    Attributes:
        path: The file.
        runs: The runs it covers.
    """

    path: Path
    runs: Sequence[RunRecord]

    def to_json(self) -> dict[str, Any]:
        """Return it as one JSON object."""
        return {
            "report": str(self.path),
            "size_bytes": self.path.stat().st_size,
            "runs": [summary_of(run) for run in self.runs],
        }

    def __paceline__(self) -> Shown:
        """Show the page's path."""
        return Shown(blocks=(f"{self.path} ({format_bytes(self.path.stat().st_size)})",))


# Size of events that takes half a second to read. A signalled run may have little time left.
_MOST_BYTES_AFTER_SIGNAL = 8_000_000

_PAGE_START = b"<!doctype html>"


def report_at_the_end(directory: RunDirectory) -> None:
    """Write the report of a run that has just ended, unless a signal stopped it and writing would take long.

    Raises:
        RunDirectoryError: If it is not written; the message says what to do instead.
    """
    was_signalled = directory.summary.is_file() and read_summary(directory).details.get("ending") == "signal"
    if was_signalled and directory.events.stat().st_size > _MOST_BYTES_AFTER_SIGNAL:
        raise RunDirectoryError(
            f"a stopped run may have little time left, and its records are many; `paceline report "
            f"{directory.root}` writes it."
        )
    write_report([directory.root], directory.report)


def write_report(run_dirs: Sequence[Path], output: Path | None = None) -> WrittenReport:
    """Write the report of one run or the comparison of several.

    Args:
        run_dirs: The run directories, each once.
        output: The file; None: ``report.html`` in the run directory, or in the current directory for several runs.

    Raises:
        RunDirectoryError: If one of them is not a run, or the file cannot be written.
    """
    if output is not None:
        refuse_special_outputs(output)
        start = b""
        with file_operation("read", output), contextlib.suppress(FileNotFoundError), output.open("rb") as file:
            start = file.read(len(_PAGE_START))
        if start and start.lower() != _PAGE_START:
            raise RunDirectoryError(f"'{output}' exists, is not an HTML page, and is not replaced: give another name.")
    runs = read_runs(run_dirs)
    if output is None:
        output = runs[0].path / "report.html" if len(runs) == 1 else Path("report.html")
    return WrittenReport(path=write_page(output, page_of(runs)), runs=runs)


def page_of(runs: Sequence[RunRecord]) -> Page:
    """Return the page; empty sections are left out."""
    order = list(_SECTIONS)
    if len(runs) > 1:
        # A comparison starts with differences, and curves compare better than pictures of separate runs.
        order.remove("Recipe")
        order.insert(order.index("Events"), "Predictions")
        order[1] = "Recipe"
    sections = ((title, _blocks(_SECTIONS[title], runs)) for title in order)
    title, subtitle = f"{len(runs)} runs compared", ", ".join(run.name for run in runs[:8]) + ", …" * (len(runs) > 8)
    if len(runs) == 1:
        run, title = runs[0], runs[0].name
        network, data = run.recipe.get("model.name"), run.recipe.get("data.dataset")
        subtitle = f"{network or 'A network'} on {data or 'its data'}, {steps_in_words(run)}, in {run.path}"
    return Page(
        title=title,
        subtitle=subtitle,
        sections=tuple(Section(title=name, blocks=blocks) for name, blocks in sections if blocks),
    )


def _blocks(make: _SectionMaker, runs: Sequence[RunRecord]) -> tuple[Block, ...]:
    """Return a section's blocks; invalid files affect only their section."""
    try:
        return tuple(make(runs))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        message = f"a file in the run directory holds something unexpected ({type(error).__name__}: {error})."
        return (Text(message, kind="bad"),)


def recipe(runs: Sequence[RunRecord]) -> Iterator[Block]:
    """Return the recipe's keys, differing ones first."""
    yield from _side_by_side(runs, [run.recipe for run in runs], "recipe", folded=len(runs) > 1)
    reasons = [(key, str(why)) for run in runs[:1] for key, why in run.plan.get("reasons", {}).items()]
    if reasons and len(runs) == 1:
        yield Table(columns=("key", "reason"), rows=reasons, caption="Why each auto is what it is", folded=True)


def environment(runs: Sequence[RunRecord]) -> Iterator[Block]:
    """Return machines and versions, differing ones first."""
    environments = [{key: value for key, value in flattened(run.environment).items() if key != "time"} for run in runs]
    for each in environments:
        each |= {key: format_bytes(value) for key, value in each.items() if key.endswith("memory_bytes") and value}
    yield from _side_by_side(runs, environments, "environment", folded=True)


def _side_by_side(
    runs: Sequence[RunRecord], trees: Sequence[Mapping[str, Any]], noun: str, *, folded: bool
) -> Iterator[Block]:
    keys = list(dict.fromkeys(key for tree in trees for key in tree))
    if not keys:
        yield Text(f"No {noun} is recorded.")
        return
    columns = ("key", *(run.name if len(runs) > 1 else "value" for run in runs))
    differing = [key for key in keys if len({repr(tree.get(key)) for tree in trees}) > 1]
    rows = {}
    for key in keys:  # highlight values that differ from the first run
        values = [_written(tree[key]) if key in tree else "–" for tree in trees]
        marked = (Marked(each) if key in differing and each != values[0] else each for each in values)
        rows[key] = (key, *marked)
    if len(runs) > 1:
        if differing:
            yield Table(columns=columns, rows=[rows[key] for key in differing], caption=f"Where the {noun}s differ")
        else:
            yield Text(f"The {noun}s are the same.")
    yield Table(columns=columns, rows=[*rows.values()], caption=f"The whole {noun}", folded=folded)


def _written(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list():
            return ", ".join(map(_written, value)) or "none"
        case _:
            return str(value)


_STATUS = {
    "completed": "completed",
    "stopped": "stopped on request",
    "failed": "failed",
    "unfinished": "not finished",
    "not begun": "not begun",
}


def outcome(runs: Sequence[RunRecord]) -> Iterator[Block]:
    """Return the section's blocks."""
    for run in runs:
        yield from _status(run, len(runs) > 1)
    if len(runs) == 1:
        tiles = ((label, *fact.partition(" · ")) for label, fact in _tiles(runs[0]).items())
        yield Tiles([Tile(label, value, note) for label, value, _, note in tiles])
        return
    facts = [_tiles(run) for run in runs]
    names = dict.fromkeys(name for each in facts for name in each)
    yield Table(
        columns=("outcome", *(run.name for run in runs)),
        rows=[(name, *(each.get(name, "–").partition(" · ")[0] for each in facts)) for name in names],
        caption="Outcome of each run",
    )


def summary_of(run: RunRecord) -> dict[str, Any]:
    """Return the outcome as JSON values."""
    return {
        "run_dir": str(run.path),
        "name": run.name,
        "status": run.status,
        "step": run.step,
        "records": len(run.of("step")),
        "evaluations": len(run.of("evaluation")),
        "incidents": len(run.of("incident")),
        "resumes": len(run.of("resume")),
    }


def _status(run: RunRecord, is_comparison: bool) -> Iterator[Block]:
    prefix = f"{run.name}: " if is_comparison else ""
    if run.status == "failed":
        message = (run.finish or {}).get("message") or "the processes gave no reason; see their output."
        yield Text(f"{prefix}{message}", kind="bad")
    elif run.status == "stopped":
        stops = run.of("stop")
        reason = f" ({stops[-1]['reason']})" if stops else ""
        yield Text(f"{prefix}The run was stopped{reason}; the same command resumes it.", kind="warning")
    elif run.status == "unfinished":
        yield Text(
            f"{prefix}No end is recorded: the run is in progress, or was killed. The same command resumes it.",
            kind="warning",
        )
    elif run.status == "not begun":
        yield Text(f"{prefix}The run has not begun to train.", kind="warning")
    if run.judgement:
        yield Text(f"{prefix}{run.judgement}", kind="warning")
    for problem in run.left_out:
        yield Text(f"{prefix}{problem}", kind="warning")


def _tiles(run: RunRecord) -> dict[str, str]:
    """Return a value by label; a dot separates a note."""
    resumes, total = len(run.of("resume")), run.total_steps
    facts = {
        "status": _STATUS.get(run.status, run.status) + (f" · resumed {counted(resumes, 'time')}" if resumes else ""),
        **_headline(run),
        "steps": format_count(run.step) + (f" · of {format_count(total)}" if total else ""),
    }
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
            facts["tokens"] = f"{format_count(summary.throughput_tokens_per_second)}/s · without padding"
        if summary.data_wait_fraction is not None:
            facts["waiting for data"] = f"{100 * summary.data_wait_fraction:.1f} % · of the steps"
        if summary.mfu is not None:
            facts["MFU"] = f"{100 * summary.mfu:.1f} % · of the devices' peak"
        if summary.peak_memory_bytes is not None:
            facts["peak memory"] = f"{format_bytes(summary.peak_memory_bytes)} · of the first process"
    if run.plan.get("parameters"):
        facts["parameters"] = f"{format_count(run.plan['parameters'])} · trainable"
    name = run.plan.get("device_name") or run.environment.get("device") or "unknown"
    setup = f"{counted(run.world_size, 'process')}, {run.plan.get('precision', 'unknown precision')}"
    return {**facts, "hardware": f"{name} · {setup}"}


def _headline(run: RunRecord) -> dict[str, str]:
    """Return the last and the best value of the headline metric (such as accuracy), else of the loss."""
    evaluations = run.of("evaluation")
    for metric in dict.fromkeys((run.headline, "loss")):
        label = "held-out loss" if metric == "loss" else metric_title(metric)
        unit, choose = f"\u00a0{metric_unit(metric)}".rstrip(), max if run.higher_is_better(metric) else min
        evaluated = [event for event in evaluations if event.get(metric) is not None]
        if evaluated:
            last = [event for event in evaluated if event["step"] == evaluated[-1]["step"]]
            best: Event = choose(evaluated, key=itemgetter(metric))
            origin = f"{best['weights']} weights, after step {format_count(best['step'])}"
            values = ", ".join(f"{event['weights']} {_figure(event[metric])}{unit}" for event in last)
            return {
                f"best {label}": f"{_figure(best[metric])}{unit} · {origin}",
                f"last {label}": f"{_figure(last[-1][metric])}{unit} · {values}",
            }
    return {}


def _figure(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.4f}"


_SectionMaker = Callable[[Sequence[RunRecord]], Iterator[Block]]
_SECTIONS: dict[str, _SectionMaker] = {
    "Outcome": outcome,
    "Predictions": predictions,
    "Training": training,
    "Forks": forks,
    "Speed": speed,
    "Memory": memory,
    "Scaling": scaling,
    "Events": timeline,
    "Samples": ledger_counts,
    "Doctor": findings,
    "Recipe": recipe,
    "Environment": environment,
}
