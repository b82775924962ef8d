"""Section Training: loss, accuracy, learning rate and gradient over steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter

from paceline.pages.page import Block, Table, Text
from paceline.report.html.curves import Line, curves, of_events, of_runs
from paceline.report.html.runs import Event, RunRecord
from paceline.units import metric_title, metric_unit

_WEIGHTS = ("model", "ema")
# The rest of a step record's keys are told elsewhere, or are no figures of training.
_GRADIENT = {
    "grad_norm": ("Gradient norm", "L2 norm", "Before clipping, of the step that was recorded."),
    "grad_scale": ("Loss scale", "factor", "By which fp16 training keeps small gradients from vanishing."),
    "noise_scale": ("Gradient noise scale", "", "Batches that count for much less than this waste few samples."),
}


def training(runs: Sequence[RunRecord]) -> Iterator[Block]:
    """The section's blocks."""
    if not any(run.of("step") for run in runs):
        yield Text("No step record was written yet: `telemetry.log_every` says how often there is one.", kind="warning")
    elif len(runs) == 1 and (runs[0].of("resume") or runs[0].of("incident")):
        yield Text(
            "A dashed vertical line marks a step from which the run was resumed, a dotted one a step at which "
            "something went wrong; the section Events names them."
        )
    title = "Training loss" if len(runs) > 1 else "Loss"
    yield from curves(title, _unit_of_loss(runs), _losses(runs), runs, _told_of_loss(runs))
    for metric in _metrics(runs):
        unit = metric_unit(metric)
        title = metric_title(metric)
        name = "Held-out loss" if metric == "loss" else title[:1].upper() + title[1:]
        yield from curves(name, unit, _evaluated(runs, metric), runs, "Of held-out samples, each counted once.")
    yield from curves("Learning rate", "learning rate", of_runs(runs, "step", "lr", "learning rate"), runs)
    for key, (title, unit, told) in _GRADIENT.items():
        lines = of_runs(runs, "step", key, title.lower())
        # A scale that is always 1 is none.
        if key == "grad_scale" and all(value in (1, None) for line in lines for value in line.y):
            continue
        yield from curves(title, unit or _weight_units(runs), lines, runs, told)
    yield from _best(runs)


def _losses(runs: Sequence[RunRecord]) -> list[Line]:
    lines = of_runs(runs, "step", "loss", "training")
    return [*lines, *_evaluated(runs, "loss")] if len(runs) == 1 else lines


def _unit_of_loss(runs: Sequence[RunRecord]) -> str:
    if all(run.headline == "top1_accuracy" for run in runs):
        return "nats per sample"
    return f"mean over {_weight_units(runs)}"


def _weight_units(runs: Sequence[RunRecord]) -> str:
    return " or ".join(dict.fromkeys(run.weight_unit for run in runs))


def _told_of_loss(runs: Sequence[RunRecord]) -> str:
    if len(runs) > 1:
        return "In training, mean since the record before."
    return "Training: mean since the record before, with label smoothing if there is any. Held-out: without."


def _metrics(runs: Sequence[RunRecord]) -> list[str]:
    found = dict.fromkeys(metric for run in runs for metric in run.metrics)
    return [metric for metric in found if metric != "loss" or len(runs) > 1]


def _evaluated(runs: Sequence[RunRecord], metric: str) -> list[Line]:
    """One line for each set of weights, and of several runs for each of both.

    Of one run they look alike in all charts: the first colour is that of training.
    """
    lines = []
    for at, run in enumerate(runs):
        for which, weights in enumerate(_WEIGHTS):
            events = [event for event in run.of("evaluation") if event["weights"] == weights]
            name = f"held-out, {weights}" if len(runs) == 1 else f"{run.name}, {weights}"
            style = 1 + which if len(runs) == 1 else 2 * at + which
            line = of_events(name, events, metric, style)
            lines += [line] if line is not None else []
    return lines


def _best(runs: Sequence[RunRecord]) -> Iterator[Block]:
    rows = []
    for run in runs:
        for weights in _WEIGHTS:
            events = [event for event in run.of("evaluation") if event["weights"] == weights]
            for metric in run.metrics:
                known = [event for event in events if event.get(metric) is not None]
                if not known:
                    continue
                who = [run.name] * (len(runs) > 1)
                rows.append(
                    (*who, f"{metric_title(metric)}, {weights}", known[-1][metric], *_best_of(run, metric, known))
                )
    who = ["run"] * (len(runs) > 1)
    if rows:
        columns = (*who, "metric, weights", "last", "best", "best after step")
        is_usual = all(run.headline == "top1_accuracy" for run in runs)
        units = "accuracies in %, losses in nats" if is_usual else "accuracies in %, all else as the task gives it"
        yield Table(columns=columns, rows=rows, caption=f"Evaluations, {units}")
    else:
        over = all(run.status in ("completed", "failed") for run in runs)
        when = "was not evaluated" if over else "was not evaluated yet"
        yield Text(f"The run {when}, or has no held-out samples: `evaluate.every` says when it is.")


def _best_of(run: RunRecord, metric: str, known: Sequence[Event]) -> tuple[float, int] | tuple[str, str]:
    """The best value and its step; nothing where the records do not say which way a metric is better."""
    is_higher = run.higher_is_better(metric)
    if is_higher is None:
        return "", ""
    best = (max if is_higher else min)(known, key=itemgetter(metric))
    return best[metric], int(best["step"])
