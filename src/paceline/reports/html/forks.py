"""Forks section: how forks differ from their parents, from their common step on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

from paceline.metrics.intervals import mean_interval
from paceline.pages.page import Block, Table
from paceline.parsing.units import counted, metric_title
from paceline.records.reader import read_identity
from paceline.records.run_directory import RunDirectory
from paceline.reports.html.runs import RunRecord
from paceline.reports.html.training import ChartLine, curves

# Keys in which forks with the same change may differ.
_NO_CHANGE = ("seed", "checkpoint.", "telemetry.", "parallel.", "data.path")
Pair = tuple[RunRecord, RunRecord, int]


def forks(runs: Sequence[RunRecord]) -> Iterator[Block]:
    """Return charts and a table of the held-out values of forks minus those of their parents, by what was changed."""
    rows = []
    for changed, pairs in _pairs(runs).items():
        metrics = dict.fromkeys(metric for _, fork, _ in pairs for metric in fork.metrics)
        kinds = dict.fromkeys(weights for _, fork, _ in pairs for weights in fork.evaluations)
        for metric, weights in product(metrics, kinds):
            points = [_differences(pair, metric, weights) for pair in pairs]
            steps = sorted(set.intersection(*(set(each) for each in points)))
            if not steps:
                continue
            found = [mean_interval([each[step] for each in points]) for step in steps]
            named = {"difference" if len(pairs) == 1 else "mean": [each.middle for each in found]}
            if len(pairs) > 1:
                named |= {"95 %, low": [each.low for each in found], "95 %, high": [each.high for each in found]}
            lines = [ChartLine(name=name, x=steps, y=y, style=3 * at) for at, (name, y) in enumerate(named.items())]
            title = f"Difference in {metric_title(metric)}, {weights} ({changed})"
            description = f"Fork minus parent, {counted(len(pairs), 'pair')}, on held-out samples."
            yield from curves(title, "difference", lines, [fork for _, fork, _ in pairs], description)
            last = found[-1]
            interval = f"{last.low:+.4g} to {last.high:+.4g}" if math.isfinite(last.low) else "one pair has none"
            rows.append(
                (changed, f"{metric_title(metric)}, {weights}", len(pairs), steps[-1], f"{last.middle:+.4g}", interval)
            )
    if rows:
        columns = (
            "changed",
            "metric, weights",
            "pairs",
            "after step",
            "mean difference",
            "95 % interval (Student's t)",
        )
        yield Table(columns=columns, rows=rows, caption="Forks minus their parents")


def _pairs(runs: Sequence[RunRecord]) -> dict[str, list[Pair]]:
    """Return the forks among runs with their parents and their common step, by the keys that differ."""
    identities = [read_identity(RunDirectory(run.path)) for run in runs]
    by_id = {each.id: run for each, run in zip(identities, runs, strict=True) if each is not None}
    found: dict[str, list[Pair]] = {}
    for own, fork in zip(identities, runs, strict=True):
        origin = own.parent if own is not None and own.parent else {}
        if (parent := by_id.get(str(origin.get("run_id")))) is not None:
            keys = [key for key in sorted({*fork.recipe, *parent.recipe}) if not key.startswith(_NO_CHANGE)]
            changed = [
                f"{key}={fork.recipe.get(key)}" for key in keys if fork.recipe.get(key) != parent.recipe.get(key)
            ]
            found.setdefault(", ".join(changed) or "nothing changed", []).append((parent, fork, int(origin["step"])))
    return found


def _differences(pair: Pair, metric: str, weights: str) -> dict[int, float]:
    """Return fork minus parent by step, where both were evaluated after their common step."""
    parent, fork, begin = pair
    values = [
        {each["step"]: each[metric] for each in run.evaluations.get(weights, ()) if metric in each}
        for run in (parent, fork)
    ]
    shared = sorted(step for step in values[0].keys() & values[1].keys() if step > begin)
    numbers = {step: (values[0][step], values[1][step]) for step in shared}
    return {step: new - old for step, (old, new) in numbers.items() if old is not None and new is not None}
