"""Study of the loss around a run's weights and between two runs, for ``paceline landscape``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.command import Log
from paceline.distributed.collectives import Collectives, join, leave
from paceline.distributed.environment import read_launch
from paceline.errors import PacelineError
from paceline.plan.rates import lr_factor
from paceline.trainer.precision import set_float32_matmul
from paceline.trainer.process_settings import restore_torch_settings
from paceline_advisor.commands import Landscape
from paceline_advisor.formulas.network import loss_barrier
from paceline_advisor.landscape import measures
from paceline_advisor.landscape.measures import STARTS, Job, along_axes, normal_vector, positions
from paceline_advisor.landscape.report import LandscapeReport, Line, RunLandscape, Trajectory, not_finite
from paceline_advisor.landscape.subject import (
    NoSecondDerivativeError,
    OpenedRun,
    Split,
    check_alike,
    open_run,
    read_trajectory,
)

# Half the distance beyond each of the two networks, as in Goodfellow et al.
_LINE = (-0.5, 1.5)
# Margin on each side, as a fraction of the trajectory's width.
_MARGIN = 0.25
_EIGENVECTOR_NUMBER = 3000
# A process that has finished its part waits for the others.
_PATIENCE_SECONDS = 7 * 24 * 3600
_SPLITS: tuple[Split, ...] = ("train", "validation")


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
        samples={split: subject.count(split) for split in _SPLITS},
        batch_norm=subject.batch_norm if any(run.subject.has_batch_norm for run in runs) else "none",
        seed=request.seed,
        runs=found,
        line=line,
        notes=(*notes, *_gaps(found, line)),
    )


def _measure_run(run: OpenedRun, request: Landscape, collectives: Collectives, notes: list[str]) -> RunLandscape:
    subject, weights = run.subject, run.subject.current_weights()
    found = measures.run_jobs(dict(_jobs(run, weights, request, notes)), collectives)
    results = dict(zip(_SPLITS, found["results"], strict=True))
    curvature, *why_not = found.get("curvature", (None,))
    notes += why_not
    loss_name = subject.task.metrics[0].name
    loss = found["here"][0][loss_name]
    measured = {each.name for each in subject.task.metrics} - {loss_name}
    metric = subject.task.headline if subject.task.headline in measured else None
    return RunLandscape(
        run=run.target,
        path=run.saved.path,
        weights=run.saved.weights,
        steps=run.steps,
        parameters=subject.size,
        batch_size=run.recipe.batch.global_size,
        peak_lr=run.recipe.optimizer.lr * lr_factor(run.recipe, run.recipe.batch.global_size),
        results=results,
        gap=None if metric is None else results["train"][metric] - results["validation"][metric],
        gap_metric=metric,
        curve=found.get("curve"),
        surface=found.get("surface"),
        trajectory=found.get("trajectory"),
        sharpness=tuple(
            measures.sharpness(loss, found[f"sharpness {epsilon}"], epsilon, request.subspace)
            for epsilon in request.epsilon
            if request.asks_for("sharpness")
        ),
        curvature=curvature,
    )


def _jobs(run: OpenedRun, weights: Tensor, request: Landscape, notes: list[str]) -> Iterator[tuple[str, Job]]:
    """Yield the jobs of a run, longest first, so that the processes end together."""
    subject, asks, split = run.subject, request.asks_for, request.split
    if asks("curvature"):
        yield "curvature", Job([partial(_curvature, run, weights, request)], lambda found: found[0])
    if asks("sharpness"):
        climb = partial(measures.climb, iterations=request.iterations, subspace=request.subspace, seed=request.seed)
        for epsilon in request.epsilon:
            parts = [partial(climb, subject, weights, split, epsilon, start) for start in STARTS]
            yield f"sharpness {epsilon}", Job(parts)
    yield "results", Job([partial(subject.measure, weights, on, batch_norm="stored") for on in _SPLITS])
    yield "here", Job([partial(subject.measure, weights, split)])
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


def _trajectory(run: OpenedRun, weights: Tensor, request: Landscape, notes: list[str]) -> Job | None:
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
    margins = [_MARGIN * (last - first or widest) for first, last in ranges]
    x, y = (
        positions(first - margin, last + margin, request.grid)
        for (first, last), margin in zip(ranges, margins, strict=True)
    )
    job = measures.surface(x, y, along_axes(run.subject, weights, plane.axes, request.split))

    def assemble(found: list[Any]) -> Trajectory:
        return Trajectory(
            steps=tuple(steps), coordinates=plane.coordinates, explained=plane.explained, surface=job.assemble(found)
        )

    return Job(job.parts, assemble)


def _line(runs: list[OpenedRun], request: Landscape, collectives: Collectives, notes: list[str]) -> Line | None:
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
    curves = measures.run_jobs({on: measures.curve(at, partial(measure, on)) for on in _SPLITS}, collectives)
    loss = subject.task.metrics[0].name
    return Line(curves=curves, barrier={on: loss_barrier(at, curve.values[loss]) for on, curve in curves.items()})


def _gaps(runs: Sequence[RunLandscape], line: Line | None) -> Iterator[str]:
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
