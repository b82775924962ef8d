"""Result of a study of loss landscapes, and its page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.pages.page import Block, Chart, Table, Text
from paceline.pages.shown import Shown
from paceline_advisor.landscape.measures import Curve, Eigenvalue, Sharpness, Surface


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """A run's way, in the plane that holds most of it.

    Attributes:
        steps: Of the checkpoints, in order.
        coordinates: Where each is in the plane, the last at (0, 0); in the weights' own lengths.
        explained: Share of the squared distances from the last weights that lies along each axis.
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
        run: What was named.
        path: The weights.
        weights: ``model`` or ``ema``.
        steps: Optimizer steps behind them.
        parameters: Numbers among them.
        batch_size: Samples per step.
        peak_lr: Peak learning rate.
        results: By split, each metric as evaluation has it (with stored statistics).
        gap: What the task is judged by (accuracy in points, say) on the training samples less that on the validation
            samples; the metric is ``gap_metric``. None where that is the loss.
        gap_metric: The task's headline.
        curve: Along the first random direction.
        surface: Along the first two.
        trajectory: If there was one to draw.
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
    """The straight way from the first run's weights (0) to the second's (1).

    Attributes:
        curves: By split.
        barrier: How far the loss rises above the line between the two losses, by split; NaN where a loss is none.
    """

    curves: Mapping[str, Curve]
    barrier: Mapping[str, float]

    def in_words(self) -> str:
        """The barrier as one sentence."""
        known = ", ".join(f"{rise:.4g} ({on})" for on, rise in self.barrier.items() if not math.isnan(rise))
        odd = " and ".join(on for on, rise in self.barrier.items() if math.isnan(rise))
        said = [f"the loss rises above the line between the two by {known}"] if known else []
        said += [f"how far it rises is not known for {odd}: the loss is no number somewhere on the way"] if odd else []
        return "; ".join(said)


@dataclass(frozen=True, kw_only=True)
class LandscapeReport:
    """Everything.

    Attributes:
        split: Whose loss the curves, surfaces, sharpness and curvature are of.
        samples: Samples of each split.
        batch_norm: Where BatchNorm's statistics came from: ``recomputed``, ``stored``, or ``none``.
        seed: Of directions, starts and samples.
        runs: One for each.
        line: Between two runs.
        notes: What else the user should know.
    """

    split: str
    samples: Mapping[str, int]
    batch_norm: str
    seed: int
    runs: tuple[RunLandscape, ...]
    line: Line | None = None
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def __paceline__(self) -> Shown:
        """Show all runs side by side, what was found of each, and the way between two; on the page, with charts."""
        names = [str(run.run) for run in self.runs]
        norms = {
            "recomputed": "BatchNorm normalises each batch by its own statistics, as in training",
            "stored": "BatchNorm has the statistics that were stored with the weights",
            "none": "There is no BatchNorm",
        }[self.batch_norm]
        blocks: list[Block | str] = [f"{norms}; seed {self.seed}.", table_of(self)]
        for run in self.runs:
            blocks += [*_found(run), *_charts(run, self.split)]
        if self.line is not None:
            blocks += _line_charts(self.line, names)
        blocks += [f"note: {note}" for note in self.notes]
        return Shown(
            title=f"Loss landscape: {', '.join(names)}",
            subtitle=f"loss over {self.samples[self.split]:,} {self.split} samples, without augmentation or dropout",
            blocks=blocks,
        )


def _found(run: RunLandscape) -> Iterator[Block | str]:
    """Yield what a terminal shows of one run."""
    if run.curve is not None:
        name, values = next(iter(run.curve.values.items()))
        shown = range(0, len(values), max(1, (len(values) - 1) // 10))
        yield Table(
            columns=("at", name),
            rows=[(f"{run.curve.positions[at]:+.2f}", f"{values[at]:.4f}") for at in shown],
            caption=f"{run.run}: {name} along a random direction",
        )
    if run.trajectory is not None:
        first, second = (f"{100 * share:.1f} %" for share in run.trajectory.explained)
        yield (
            f"{run.run}: {len(run.trajectory.steps)} checkpoints, steps {run.trajectory.steps[0]} to "
            f"{run.trajectory.steps[-1]}; {first} of their way lies along the first axis of the plane, {second} along "
            "the second"
        )
    if run.curvature is not None:
        yield (
            f"{run.run}: top eigenvalue {run.curvature.value:.4g}, residual {run.curvature.residual:.1e} of it after "
            f"{run.curvature.products} products; lowest seen {run.curvature.lowest:.4g}"
        )


def not_finite(*parts: Curve | Surface | None) -> tuple[int, int]:
    """How many points of some curves and surfaces have a loss that is no number, and how many there are."""
    losses = [loss for part in parts if part is not None for loss in _losses(part)]
    return sum(not math.isfinite(loss) for loss in losses), len(losses)


def _losses(part: Curve | Surface) -> Iterator[float]:
    first = next(iter(part.values.values()))
    for each in first:
        yield from each if isinstance(each, tuple) else (each,)


# Colours by the logarithm where the largest loss is so many times the smallest: else one corner outshines all.
_WIDE = 50.0


def table_of(report: LandscapeReport) -> Table:
    """All runs side by side: what they were trained with, how well they do, and how sharp their minima are."""
    columns, rows = comparison(report)
    return Table(columns=columns, rows=rows, caption=f"Results, generalisation gap and sharpness{_stored(report)}")


def _stored(report: LandscapeReport) -> str:
    """What tells the table's losses from those of the curves, if anything does."""
    return "; losses and accuracies with BatchNorm's stored statistics" if report.batch_norm == "recomputed" else ""


def comparison(report: LandscapeReport) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """The heading and a row for each run; what was not computed is missing."""
    metric = report.runs[0].gap_metric
    loss = next(iter(report.runs[0].results["train"]))
    heading = ["run", "batch", "peak lr", "steps", f"train {loss}", f"test {loss}"]
    if metric is not None:
        heading += (
            ["train %", "test %", "gap (points)"] if _is_share(metric) else [f"train {metric}", f"test {metric}", "gap"]
        )
    epsilons = [each.epsilon for each in report.runs[0].sharpness]
    heading += [f"sharpness {epsilon:g} (%)" for epsilon in epsilons]
    heading += ["top eigenvalue"] if report.runs[0].curvature is not None else []
    return tuple(heading), [tuple(_row(run, loss, metric)) for run in report.runs]


def _is_share(metric: str) -> bool:
    return metric.endswith("accuracy")


def _row(run: RunLandscape, loss: str, metric: str | None) -> Iterator[object]:
    train, test = run.results["train"], run.results["validation"]
    yield from (str(run.run), run.batch_size, f"{run.peak_lr:g}", run.steps, _short(train[loss]), _short(test[loss]))
    if metric is not None:
        figures = (train[metric], test[metric], run.gap)
        yield from (f"{each:.2f}" if _is_share(metric) else _short(each or 0.0) for each in figures)
    yield from (_short(each.percent) for each in run.sharpness)
    if run.curvature is not None:
        yield _short(run.curvature.value) + ("" if run.curvature.converged else " (not converged)")


def _short(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "no number"


def _charts(run: RunLandscape, split: str) -> Iterator[Block]:
    if run.curve is not None:
        yield from _curve_charts({split: run.curve}, "along a random direction, in lengths of the filters")
    if run.surface is not None:
        axes = ("first direction", "second direction")
        yield _contour(run.surface, "Loss around the weights", axes, [])
        yield _turned(run.surface, "Loss around the weights, to turn", axes)
    if run.trajectory is not None:
        yield _way(run.trajectory)


def _curve_charts(curves: dict[str, Curve], where: str) -> Iterator[Chart]:
    loss, *others = next(iter(curves.values())).values
    # The loss and the first accuracy: a second one tells nothing else.
    for name in (loss, *[other for other in others if other.endswith("accuracy")][:1]):
        unit = " (%)" if name.endswith("accuracy") else ""
        traces = [
            {"type": "scatter", "mode": "lines+markers", "name": on, "x": curve.positions, "y": curve.values[name]}
            for on, curve in curves.items()
        ]
        yield Chart(
            title=f"{name}{unit} {where}",
            traces=traces,
            layout={"xaxis": {"title": "position"}, "yaxis": {"title": f"{name}{unit}"}},
            description=f"{name} at {len(next(iter(curves.values())).positions)} points; the weights are at 0.",
        )


def _contour(surface: Surface, title: str, axes: tuple[str, str], over: Sequence[dict[str, Any]]) -> Chart:
    values, said = _height(surface)
    trace = {
        "type": "contour",
        "name": said,
        "x": surface.x,
        "y": surface.y,
        "z": values,
        "ncontours": 24,
        "colorscale": "Viridis",
        "colorbar": {"title": {"text": said}},
    }
    return Chart(
        title=title,
        traces=[trace, *over],
        layout={"height": 460, "xaxis": {"title": axes[0]}, "yaxis": {"title": axes[1]}},
        description=f"Lines of equal {said} on a plane through the weights, which are at (0, 0).",
    )


def _turned(surface: Surface, title: str, axes: tuple[str, str]) -> Chart:
    values, said = _height(surface)
    trace = {
        "type": "surface",
        "x": surface.x,
        "y": surface.y,
        "z": values,
        "colorscale": "Viridis",
        "showscale": False,
    }
    eye = {"eye": {"x": 1.6, "y": 1.6, "z": 1.0}, "center": {"x": 0, "y": 0, "z": -0.15}}
    scene = {"xaxis": {"title": axes[0]}, "yaxis": {"title": axes[1]}, "zaxis": {"title": said}, "camera": eye}
    return Chart(
        title=title,
        traces=[trace],
        layout={"height": 460, "scene": scene},
        description=f"The same {said} as a surface.",
    )


def _height(surface: Surface) -> tuple[list[list[float | None]], str]:
    """The loss, or its logarithm where it spans too much; None where it is no number."""
    name, rows = next(iter(surface.values.items()))
    finite = [each for row in rows for each in row if math.isfinite(each)]
    logarithmic = bool(finite) and min(finite) > 0 and max(finite) > _WIDE * min(finite)
    shown = [
        [(math.log10(each) if logarithmic else each) if math.isfinite(each) else None for each in row] for row in rows
    ]
    return shown, f"log10 of the {name}" if logarithmic else name


def _way(trajectory: Trajectory) -> Chart:
    first, second = (f"{100 * share:.1f} %" for share in trajectory.explained)
    way = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "checkpoints",
        "x": [x for x, _ in trajectory.coordinates],
        "y": [y for _, y in trajectory.coordinates],
        "text": [f"step {step}" for step in trajectory.steps],
        "line": {"color": "var(--series-2)", "dash": "solid"},
        "showlegend": False,
    }
    title = f"The run's way, steps {trajectory.steps[0]} to {trajectory.steps[-1]}"
    axes = (f"first component ({first} of the way)", f"second component ({second})")
    return _contour(trajectory.surface, title, axes, [way])


def _line_charts(line: Line, names: Sequence[str]) -> Iterator[Block]:
    yield Text(f"From {names[0]} (0) to {names[1]} (1): {line.in_words()}.")
    yield from _curve_charts(dict(line.curves), "from one run to the other")
