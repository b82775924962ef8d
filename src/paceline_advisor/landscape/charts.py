"""How is a landscape drawn? Curves, contours, surfaces to turn, a run's way through them, and a table of all runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.pages.page import Block, Chart, Page, Section, Table, Text
from paceline_advisor.landscape.report import LandscapeReport, Line, RunLandscape, Trajectory
from paceline_advisor.landscape.surface import Curve, Surface

# Colours by the logarithm where the largest loss is so many times the smallest: else one corner outshines all.
_WIDE = 50.0


def page_of(report: LandscapeReport) -> Page:
    """The page of a report."""
    names = ", ".join(str(run.run) for run in report.runs)
    samples = f"{report.samples[report.split]:,} {report.split} samples"
    norms = {
        "recomputed": "BatchNorm normalises each batch by its own statistics, as in training",
        "stored": "BatchNorm has the statistics that were stored with the weights",
        "none": "There is no BatchNorm",
    }[report.batch_norm]
    return Page(
        title=f"Loss landscape: {names}",
        subtitle=f"Loss over {samples}, without augmentation or dropout. {norms}.",
        sections=tuple(_sections(report)),
    )


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


def _sections(report: LandscapeReport) -> Iterator[Section]:
    blocks: list[Block] = [table_of(report)]
    if report.notes:
        blocks.append(Text(*report.notes, kind="warning"))
    yield Section(title="Runs", blocks=blocks)
    for run in report.runs:
        if charts := list(_charts(run, report.split)):
            yield Section(title=str(run.run), blocks=charts)
    if report.line is not None:
        names = [str(run.run) for run in report.runs]
        yield Section(title="From one run to the other", blocks=list(_line_charts(report.line, names)))


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
    said = line.in_words()
    yield Text(f"0 is {names[0]}, 1 is {names[1]}. {said[0].upper()}{said[1:]}.")
    yield from _curve_charts(dict(line.curves), "from one run to the other")
