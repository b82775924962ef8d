"""Result of a study of loss landscapes: its numbers, and their display."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.pages.page import Block, Chart, Table, Text
from paceline.pages.shown import Shown
from paceline_advisor.landscape.measures import Curve, Eigenvalue, Sharpness, Surface

_NORMS = {
    "recomputed": "BatchNorm normalises each batch by its own statistics, as in training",
    "stored": "BatchNorm has the statistics that were stored with the weights",
    "none": "There is no BatchNorm",
}
# Colour by the logarithm if the largest loss is this many times the smallest: otherwise one corner dominates.
_WIDE = 50.0


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """A run's path, in the plane that captures most of it.

    Attributes:
        steps: Steps of the checkpoints, in order.
        coordinates: Position of each in the plane, with the last at (0, 0), in units of the weights.
        explained: Fraction of the squared distances from the last weights along each axis.
        surface: The loss on the plane.
    """

    steps: tuple[int, ...]
    coordinates: tuple[tuple[float, float], ...]
    explained: tuple[float, float]
    surface: Surface


@dataclass(frozen=True, kw_only=True)
class RunLandscape:
    """One run.

    Attributes:
        run: The named target.
        path: The weights.
        weights: ``model`` or ``ema``.
        steps: Optimizer steps of the weights.
        parameters: Number of parameters.
        batch_size: Samples per step.
        peak_lr: Peak learning rate.
        results: By split, each metric as in evaluation (with stored statistics).
        gap: The headline metric (such as accuracy, in points) on the training samples minus that on the validation
            samples; the metric is ``gap_metric``. None if that is the loss.
        gap_metric: The task's headline.
        curve: Along the first random direction.
        surface: Along the first two.
        trajectory: The trajectory, if available.
        sharpness: One for each epsilon.
        curvature: The largest eigenvalue of the Hessian.
    """

    run: Path
    path: Path
    weights: str
    steps: int
    parameters: int
    batch_size: int
    peak_lr: float
    results: Mapping[str, Mapping[str, float]]
    gap: float | None = None
    gap_metric: str | None = None
    curve: Curve | None = None
    surface: Surface | None = None
    trajectory: Trajectory | None = None
    sharpness: tuple[Sharpness, ...] = ()
    curvature: Eigenvalue | None = None


@dataclass(frozen=True, kw_only=True)
class Line:
    """The straight line from the first run's weights (0) to the second's (1).

    Attributes:
        curves: Curves by split.
        barrier: How far the loss rises above the line between the two losses, by split; NaN if one is not finite.
    """

    curves: Mapping[str, Curve]
    barrier: Mapping[str, float]

    def in_words(self) -> str:
        """Return the barrier as one sentence."""
        known = ", ".join(f"{rise:.4g} ({on})" for on, rise in self.barrier.items() if not math.isnan(rise))
        odd = " and ".join(on for on, rise in self.barrier.items() if math.isnan(rise))
        said = [f"the loss rises above the line between the two by {known}"] if known else []
        if odd:
            said.append(f"how far it rises is not known for {odd}: the loss is not finite somewhere on the path")
        return "; ".join(said)


@dataclass(frozen=True, kw_only=True)
class LandscapeReport:
    """The whole result.

    Attributes:
        split: The split whose loss is used for curves, surfaces, sharpness and curvature.
        samples: Number of samples of each split.
        batch_norm: Source of BatchNorm's statistics: ``recomputed``, ``stored``, or ``none``.
        seed: Seed of directions, starts and samples.
        runs: The result of each run.
        line: The line between two runs.
        notes: Additional notes.
    """

    split: str
    samples: Mapping[str, int]
    batch_norm: str
    seed: int
    runs: tuple[RunLandscape, ...]
    line: Line | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)

    def __paceline__(self) -> Shown:
        """Show all runs side by side, the results of each, and the line between two; on the page, with charts."""
        names = [str(run.run) for run in self.runs]
        # Distinguishes the table's losses from those of the curves.
        stored = "; losses and accuracies with BatchNorm's stored statistics" * (self.batch_norm == "recomputed")
        columns, rows = comparison(self)
        blocks: list[Block | str] = [
            f"{_NORMS[self.batch_norm]}; seed {self.seed}.",
            Table(columns=columns, rows=rows, caption=f"Results, generalisation gap and sharpness{stored}"),
        ]
        for run in self.runs:
            blocks += _of_run(run, self.split)
        if self.line is not None:
            blocks.append(Text(f"From {names[0]} (0) to {names[1]} (1): {self.line.in_words()}."))
            blocks += _curve_charts(self.line.curves, "from one run to the other")
        return Shown(
            title=f"Loss landscape: {', '.join(names)}",
            subtitle=f"loss over {self.samples[self.split]:,} {self.split} samples, without augmentation or dropout",
            blocks=[*blocks, *(f"note: {note}" for note in self.notes)],
        )


def not_finite(where: str, *parts: Curve | Surface | None) -> Iterator[str]:
    """Yield how many points of curves and surfaces have a non-finite loss, if any."""
    losses = [np.array(next(iter(part.values.values())), dtype=float) for part in parts if part is not None]
    odd = sum(int((~np.isfinite(each)).sum()) for each in losses)
    if odd:
        count = sum(each.size for each in losses)
        yield f"{where}: the loss is not finite at {odd} of {count} points, which charts omit"


def comparison(report: LandscapeReport) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Return a table of all runs: training, results and sharpness, without values that were not computed."""
    first = report.runs[0]
    metric, loss = first.gap_metric, next(iter(first.results["train"]))
    is_share = metric is not None and metric.endswith("accuracy")
    heading = ["run", "batch", "peak lr", "steps", f"train {loss}", f"test {loss}"]
    if is_share:
        heading += ["train %", "test %", "gap (points)"]
    elif metric is not None:
        heading += [f"train {metric}", f"test {metric}", "gap"]
    heading += [f"sharpness {each.epsilon:g} (%)" for each in first.sharpness]
    heading += ["top eigenvalue"] if first.curvature is not None else []
    rows = []
    for run in report.runs:
        train, test = run.results["train"], run.results["validation"]
        row = [
            str(run.run),
            run.batch_size,
            f"{run.peak_lr:g}",
            run.steps,
            _short_number(train[loss]),
            _short_number(test[loss]),
        ]
        if metric is not None:
            figures = (train[metric], test[metric], run.gap or 0.0)
            row += [f"{each:.2f}" if is_share else _short_number(each) for each in figures]
        row += [_short_number(each.percent) for each in run.sharpness]
        if run.curvature is not None:
            row.append(_short_number(run.curvature.value) + " (not converged)" * (not run.curvature.converged))
        rows.append(tuple(row))
    return tuple(heading), rows


def _short_number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "no number"


def _of_run(run: RunLandscape, split: str) -> Iterator[Block | str]:
    """Yield the results of one run, and its charts."""
    if run.curve is not None:
        name, values = next(iter(run.curve.values.items()))
        shown = range(0, len(values), max(1, (len(values) - 1) // 10))
        yield Table(
            columns=("at", name),
            rows=[(f"{run.curve.positions[at]:+.2f}", f"{values[at]:.4f}") for at in shown],
            caption=f"{run.run}: {name} along a random direction",
        )
    way = run.trajectory
    if way is not None:
        first, second = (f"{100 * share:.1f} %" for share in way.explained)
        yield (
            f"{run.run}: {len(way.steps)} checkpoints, steps {way.steps[0]} to {way.steps[-1]}; {first} of their path "
            f"lies along the first axis of the plane, {second} along the second"
        )
    if run.curvature is not None:
        yield (
            f"{run.run}: top eigenvalue {run.curvature.value:.4g}, residual {run.curvature.residual:.1e} of it after "
            f"{run.curvature.products} products; lowest seen {run.curvature.lowest:.4g}"
        )
    if run.curve is not None:
        yield from _curve_charts({split: run.curve}, "along a random direction, in filter norms")
    if run.surface is not None:
        axes = ("first direction", "second direction")
        yield _contour(run.surface, "Loss around the weights", axes)
        yield _surface_chart(run.surface, "Loss around the weights, rotatable", axes)
    if way is not None:
        points = {
            "mode": "lines+markers",
            "name": "checkpoints",
            "x": [x for x, _ in way.coordinates],
            "y": [y for _, y in way.coordinates],
            "text": [f"step {step}" for step in way.steps],
            "line": {"color": "var(--series-2)", "dash": "solid"},
            "showlegend": False,
        }
        axes = (f"first component ({first} of the way)", f"second component ({second})")
        yield _contour(way.surface, f"The run's path, steps {way.steps[0]} to {way.steps[-1]}", axes, points)


def _curve_charts(curves: Mapping[str, Curve], where: str) -> Iterator[Chart]:
    some = next(iter(curves.values()))
    loss, *others = some.values
    # The loss and the first accuracy: a second accuracy adds nothing.
    for name in (loss, *[other for other in others if other.endswith("accuracy")][:1]):
        titled = f"{name} (%)" if name.endswith("accuracy") else name
        yield Chart(
            title=f"{titled} {where}",
            traces=[
                {"mode": "lines+markers", "name": on, "x": curve.positions, "y": curve.values[name]}
                for on, curve in curves.items()
            ],
            layout={"xaxis": {"title": "position"}, "yaxis": {"title": titled}},
            description=f"{name} at {len(some.positions)} points; the weights are at 0.",
        )


def _contour(surface: Surface, title: str, axes: tuple[str, str], *over: Mapping[str, Any]) -> Chart:
    values, name = _height(surface)
    trace = {"type": "contour", "name": name, "x": surface.x, "y": surface.y, "z": values, "ncontours": 24}
    return Chart(
        title=title,
        traces=[{**trace, "colorscale": "Viridis", "colorbar": {"title": {"text": name}}}, *over],
        layout={"height": 460, "xaxis": {"title": axes[0]}, "yaxis": {"title": axes[1]}},
        description=f"Lines of equal {name} on a plane through the weights, which are at (0, 0).",
    )


def _surface_chart(surface: Surface, title: str, axes: tuple[str, str]) -> Chart:
    values, name = _height(surface)
    trace = {"type": "surface", "x": surface.x, "y": surface.y, "z": values, "colorscale": "Viridis"}
    eye = {"eye": {"x": 1.6, "y": 1.6, "z": 1.0}, "center": {"x": 0, "y": 0, "z": -0.15}}
    scene = {"xaxis": {"title": axes[0]}, "yaxis": {"title": axes[1]}, "zaxis": {"title": name}, "camera": eye}
    return Chart(
        title=title,
        traces=[{**trace, "showscale": False}],
        layout={"height": 460, "scene": scene},
        description=f"The same {name} as a surface.",
    )


def _height(surface: Surface) -> tuple[Sequence[Sequence[float | None]], str]:
    """Return the loss, or its logarithm if the range is too large, and its name; None where it is not finite."""
    name, rows = next(iter(surface.values.items()))
    losses = np.array(rows)
    finite = losses[np.isfinite(losses)]
    if finite.size and finite.min() > 0 and finite.max() > _WIDE * finite.min():
        losses, name = np.log10(losses, where=np.isfinite(losses), out=losses), f"log10 of the {name}"
    return [[each if math.isfinite(each) else None for each in row] for row in losses.tolist()], name
