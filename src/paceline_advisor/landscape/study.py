"""Study of the loss around a run's weights and between two runs, for ``paceline landscape``, and its result."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.command import Log
from paceline.distributed.collectives import Collectives, join, leave
from paceline.distributed.environment import read_launch
from paceline.errors import PacelineError
from paceline.models.precision import set_float32_matmul
from paceline.pages.page import Block, Chart, Table, Text
from paceline.pages.shown import Shown
from paceline.plan.rates import lr_factor
from paceline.trainer.process_settings import restore_torch_settings
from paceline_advisor import Json, frozen, picked
from paceline_advisor.commands import Landscape
from paceline_advisor.formulas.network import loss_barrier
from paceline_advisor.landscape import measures
from paceline_advisor.landscape.loss_surface import (
    SPLITS,
    NoSecondDerivativeError,
    OpenedRun,
    Split,
    check_alike,
    open_run,
    read_trajectory,
)
from paceline_advisor.landscape.measures import (
    STARTS,
    Curve,
    DividedWork,
    Eigenvalue,
    Sharpness,
    Surface,
    along_axes,
    normal_vector,
    positions,
)
from paceline_advisor.traces import trace

_NORMS = {
    "recomputed": "BatchNorm normalises each batch by its own statistics, as in training",
    "stored": "BatchNorm has the statistics that were stored with the weights",
    "none": "There is no BatchNorm",
}
# Colour by the logarithm if the largest loss is this many times the smallest: otherwise one corner dominates.
_WIDE = 50.0


@frozen
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


@frozen
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


@frozen
class WeightInterpolation:
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


@frozen
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
    line: WeightInterpolation | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> Json:
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
    if metric is not None:
        heading += ["train %", "test %", "gap (points)"] if is_share else [f"train {metric}", f"test {metric}", "gap"]
    heading += [f"sharpness {each.epsilon:g} (%)" for each in first.sharpness]
    heading += ["top eigenvalue"] if first.curvature is not None else []
    rows = []
    for run in report.runs:
        results = [run.results[split] for split in SPLITS]
        row: list[object] = [str(run.run), run.batch_size, f"{run.peak_lr:g}", run.steps]
        row += [_short_number(each[loss]) for each in results]
        if metric is not None:
            figures = (*(each[metric] for each in results), run.gap or 0.0)
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
        points = trace(
            "lines+markers",
            "checkpoints",
            way.coordinates,
            text=[f"step {step}" for step in way.steps],
            line={"color": "var(--series-2)", "dash": "solid"},
            showlegend=False,
        )
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
                trace("lines+markers", on, zip(curve.positions, curve.values[name], strict=True))
                for on, curve in curves.items()
            ],
            layout={"xaxis": {"title": "position"}, "yaxis": {"title": titled}},
            description=f"{name} at {len(some.positions)} points; the weights are at 0.",
        )


def _contour(surface: Surface, title: str, axes: tuple[str, str], *over: Mapping[str, Any]) -> Chart:
    heights, name = _heights(surface)
    contour = {"type": "contour", "name": name, **heights, "ncontours": 24, "colorbar": {"title": {"text": name}}}
    return Chart(
        title=title,
        traces=[contour, *over],
        layout={"height": 460, "xaxis": {"title": axes[0]}, "yaxis": {"title": axes[1]}},
        description=f"Lines of equal {name} on a plane through the weights, which are at (0, 0).",
    )


def _surface_chart(surface: Surface, title: str, axes: tuple[str, str]) -> Chart:
    heights, name = _heights(surface)
    eye = {"eye": {"x": 1.6, "y": 1.6, "z": 1.0}, "center": {"x": 0, "y": 0, "z": -0.15}}
    scene = {"xaxis": {"title": axes[0]}, "yaxis": {"title": axes[1]}, "zaxis": {"title": name}, "camera": eye}
    return Chart(
        title=title,
        traces=[{"type": "surface", **heights, "showscale": False}],
        layout={"height": 460, "scene": scene},
        description=f"The same {name} as a surface.",
    )


def _heights(surface: Surface) -> tuple[Json, str]:
    """Return the loss for Plotly, or its logarithm if the range is too large, and its name."""
    name, rows = next(iter(surface.values.items()))
    losses = np.array(rows)
    finite = losses[np.isfinite(losses)]
    if finite.size and finite.min() > 0 and finite.max() > _WIDE * finite.min():
        losses, name = np.log10(losses, where=np.isfinite(losses), out=losses), f"log10 of the {name}"
    values = [[each if math.isfinite(each) else None for each in row] for row in losses.tolist()]
    return {**picked(surface, "x", "y"), "z": values, "colorscale": "Viridis"}, name


# Half the distance beyond each of the two networks, as in Goodfellow et al.
_LINE = (-0.5, 1.5)
# Margin on each side, as a fraction of the trajectory's width.
_MARGIN = 0.25
_EIGENVECTOR_NUMBER = 3000
# A process that has finished its part waits for the others.
_PATIENCE_SECONDS = 7 * 24 * 3600


def explore(request: Landscape, _: Log) -> LandscapeReport:
    """Measure the landscape of runs, whose directories are only read. Collective: every rank must call this.

    Raises:
        PacelineError: If a target, the overrides or the data are unusable, or a requested measurement is not
        possible.
    """
    launch = read_launch(os.environ)
    with contextlib.ExitStack() as opened:
        opened.enter_context(restore_torch_settings())
        set_float32_matmul("highest")
        runs = [open_run(target, request, launch.world) for target in request.targets]
        for run in runs:
            if request.subspace is not None and request.subspace > run.subject.size:
                raise PacelineError(
                    f"--subspace {request.subspace} is more than the {run.subject.size:,} dimensions that the weights "
                    f"of {run.target} have; give fewer, or leave it out to search all of them."
                )
        opened.callback(leave)
        collectives = join(launch, runs[0].subject.device, timeout_seconds=_PATIENCE_SECONDS)
        notes: list[str] = []
        found = tuple(_measure_run(run, request, collectives, notes) for run in runs)
        line = _line(runs, request, collectives, notes)
    subject = runs[0].subject
    return LandscapeReport(
        split=request.split,
        samples={split: subject.count(split) for split in SPLITS},
        batch_norm=subject.batch_norm if any(run.subject.has_batch_norm for run in runs) else "none",
        seed=request.seed,
        runs=found,
        line=line,
        notes=(*notes, *_gaps(found, line)),
    )


def _measure_run(run: OpenedRun, request: Landscape, collectives: Collectives, notes: list[str]) -> RunLandscape:
    subject, weights = run.subject, run.subject.current_weights()
    found = measures.run_jobs(dict(_jobs(run, weights, request, notes)), collectives)
    results = dict(zip(SPLITS, found["results"], strict=True))
    curvature, *why_not = found.get("curvature", (None,))
    notes += why_not
    loss_name = subject.task.metrics[0].name
    loss = found["here"][0][loss_name]
    measured = {each.name for each in subject.task.metrics} - {loss_name}
    metric = subject.task.headline if subject.task.headline in measured else None
    batch = min(run.recipe.batch.global_size, run.train_samples)
    return RunLandscape(
        run=run.target,
        path=run.saved.path,
        weights=run.saved.weights,
        steps=run.steps,
        parameters=subject.size,
        batch_size=batch,
        peak_lr=run.recipe.optimizer.lr * lr_factor(run.recipe, batch),
        results=results,
        gap=None if metric is None else results["train"][metric] - results["validation"][metric],
        gap_metric=metric,
        **{name: found.get(name) for name in ("curve", "surface", "trajectory")},
        sharpness=tuple(
            measures.sharpness(loss, found[f"sharpness {epsilon}"], epsilon, request.subspace)
            for epsilon in request.epsilon
            if request.asks_for("sharpness")
        ),
        curvature=curvature,
    )


def _jobs(run: OpenedRun, weights: Tensor, request: Landscape, notes: list[str]) -> Iterator[tuple[str, DividedWork]]:
    """Yield the jobs of a run, longest first, so that the processes end together."""
    subject, asks, split = run.subject, request.asks_for, request.split
    if asks("curvature"):
        yield "curvature", DividedWork([partial(_curvature, run, weights, request)], lambda found: found[0])
    if asks("sharpness"):
        climb = partial(measures.climb, iterations=request.iterations, subspace=request.subspace, seed=request.seed)
        for epsilon in request.epsilon:
            parts = [partial(climb, subject, weights, split, epsilon, start) for start in STARTS]
            yield f"sharpness {epsilon}", DividedWork(parts)
    yield "results", DividedWork([partial(subject.measure, weights, on, batch_norm="stored") for on in SPLITS])
    yield "here", DividedWork([partial(subject.measure, weights, split)])
    reach, axes = request.reach, list[Tensor]()
    if asks("curve") or asks("surface"):
        drawn = [normal_vector(request.seed, number, weights) for number in range(2)]
        axes = [measures.filter_normalised(each, weights, subject.shapes) for each in drawn]
    if asks("curve"):
        along = along_axes(subject, weights, axes[:1], split)
        yield "curve", measures.curve(positions(-reach, reach, request.points), along)
    if asks("surface"):
        side = positions(-reach, reach, request.grid)
        yield "surface", measures.surface(side, side, along_axes(subject, weights, axes, split))
    if asks("trajectory") and (job := _trajectory(run, weights, request, notes)) is not None:
        yield "trajectory", job


def _curvature(run: OpenedRun, weights: Tensor, request: Landscape) -> tuple[Any, ...]:
    """Return the largest eigenvalue, or None with the reason if it was not requested by name and is unavailable."""
    start = normal_vector(request.seed, _EIGENVECTOR_NUMBER, weights)
    apply = run.subject.curvature(weights, request.split)
    try:
        return (measures.top_eigenvalue(apply, start, tolerance=request.tolerance, most=request.products),)
    except NoSecondDerivativeError as error:
        if request.measure:
            raise
        return None, f"no curvature: {error}"


def _trajectory(run: OpenedRun, weights: Tensor, request: Landscape, notes: list[str]) -> DividedWork | None:
    """Measure on the plane of a run's checkpoints; if it was not requested by name and is unavailable, note why."""
    try:
        steps, saved = read_trajectory(run)
        plane = measures.principal_plane(saved)
    except (PacelineError, ValueError) as error:
        if not request.measure:
            notes.append(f"no trajectory: {error}")
            return None
        if isinstance(error, ValueError):
            raise PacelineError(f"{run.target} has no trajectory: {error}; leave it out of --measure.") from None
        raise
    ranges = [(min(values), max(values)) for values in zip(*plane.coordinates, strict=True)]
    widest = max(last - first for first, last in ranges)

    def around(first: float, last: float) -> tuple[float, ...]:
        margin = _MARGIN * (last - first or widest)
        return positions(first - margin, last + margin, request.grid)

    x, y = (around(*each) for each in ranges)
    job = measures.surface(x, y, along_axes(run.subject, weights, plane.axes, request.split))

    def assemble(found: list[Any]) -> Trajectory:
        on_plane = picked(plane, "coordinates", "explained")
        return Trajectory(steps=tuple(steps), surface=job.assemble(found), **on_plane)

    return DividedWork(job.parts, assemble)


def _line(
    runs: list[OpenedRun], request: Landscape, collectives: Collectives, notes: list[str]
) -> WeightInterpolation | None:
    if not request.asks_for("line") or len(runs) != 2:
        return None
    try:
        check_alike(*runs)
    except PacelineError as error:
        if request.measure:
            raise
        notes.append(f"no line: {error}")
        return None
    subject = runs[0].subject
    first, second = (run.subject.current_weights() for run in runs)
    first_norms, second_norms = (run.subject.statistics() for run in runs)

    def measure(on: Split, share: float) -> dict[str, float]:
        """Measure at a fraction of the line, with BatchNorm's statistics interpolated likewise."""
        subject.move_to(first, torch.lerp(first_norms, second_norms, share))
        try:
            return subject.measure(torch.lerp(first, second, share), on)
        finally:
            subject.move_to(first, first_norms)

    at = sorted({*positions(*_LINE, request.points), 0.0, 1.0})
    curves = measures.run_jobs({on: measures.curve(at, partial(measure, on)) for on in SPLITS}, collectives)
    loss = subject.task.metrics[0].name
    return WeightInterpolation(
        curves=curves, barrier={on: loss_barrier(at, curve.values[loss]) for on, curve in curves.items()}
    )


def _gaps(runs: Sequence[RunLandscape], line: WeightInterpolation | None) -> Iterator[str]:
    """Yield notes on missing values in curves and surfaces, and on eigenvalues that did not converge."""
    for run in runs:
        trajectory = None if run.trajectory is None else run.trajectory.surface
        yield from not_finite(str(run.run), run.curve, run.surface, trajectory)
        if run.curvature is not None and not run.curvature.converged:
            yield (
                f"{run.run}: the eigenvalue did not converge in {run.curvature.products} products (residual "
                f"{run.curvature.residual:.2g}, tolerance {run.curvature.tolerance:g}); raise --products or --tolerance"
            )
    if line is not None:
        yield from not_finite("the line", *line.curves.values())
