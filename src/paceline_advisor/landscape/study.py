"""Study of the loss around a run's weights and between two runs, for ``paceline landscape``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.command import Log
from paceline.distributed.collectives import Collectives, join, leave
from paceline.distributed.environment import read_launch
from paceline.errors import PacelineError
from paceline.trainer.precision import keeping_float32_matmul, set_float32_matmul
from paceline_advisor.commands import Landscape
from paceline_advisor.formulas.network import loss_barrier
from paceline_advisor.landscape.measures import (
    STARTS,
    Box,
    Eigenvalue,
    Work,
    along,
    climb,
    curve_of,
    normal_vector,
    on_grid,
    positions,
    random_direction,
    share_out,
    sharpness,
    surface_of,
    top_eigenvalue,
)
from paceline_advisor.landscape.report import LandscapeReport, Line, RunLandscape, Trajectory, not_finite
from paceline_advisor.landscape.subject import (
    NoSecondDerivativeError,
    Opened,
    Plane,
    Split,
    check_alike,
    open_run,
    principal_plane,
    read_trajectory,
)

# Half as much again on each side of two networks, as Goodfellow et al. look beyond them.
_LINE = (-0.5, 1.5)
# Of a trajectory's width, on each side of it.
_MARGIN = 0.25
_EIGENVECTOR_NUMBER = 3000
# A process that has done its part waits for the others.
_PATIENCE_SECONDS = 7 * 24 * 3600


def explore(request: Landscape, _: Log) -> LandscapeReport:
    """Look at some runs; a collective of all processes of the world this one finds itself in.

    The runs' directories are only read.

    Raises:
        PacelineError: If a target, the overrides or the data are not usable, or something asked for cannot be had.
    """
    launch = read_launch(os.environ)
    with contextlib.ExitStack() as opened:
        opened.enter_context(keeping_float32_matmul())
        set_float32_matmul("highest")
        runs = [open_run(target, request, launch.world) for target in request.targets]
        for run in runs:
            _check_subspace(run, request.subspace)
        opened.callback(leave)
        collectives = join(launch, runs[0].subject.device, timeout_seconds=_PATIENCE_SECONDS)
        notes: list[str] = []
        found = tuple(_look_at(run, request, collectives, notes) for run in runs)
        line = _line(runs, request, collectives, notes)
    subject = runs[0].subject
    return LandscapeReport(
        split=request.split,
        samples={"train": subject.count("train"), "validation": subject.count("validation")},
        batch_norm=subject.batch_norm if any(run.subject.has_batch_norm for run in runs) else "none",
        seed=request.seed,
        runs=found,
        line=line,
        notes=(*notes, *_gaps(found, line)),
    )


def _check_subspace(run: Opened, subspace: int | None) -> None:
    if subspace is not None and subspace > run.subject.size:
        raise PacelineError(
            f"--subspace {subspace} is more than the {run.subject.size:,} dimensions that the weights of "
            f"{run.target} have; give fewer, or leave it out to search all of them."
        )


def _look_at(run: Opened, request: Landscape, collectives: Collectives, notes: list[str]) -> RunLandscape:
    subject, weights = run.subject, run.subject.here()
    plane = _plane(run, request, notes)
    works: dict[str, list[Work]] = {
        # The longest first, so that the processes end together.
        "curvature": _curvature(run, weights, request),
        "sharpness": _ascents(run, weights, request),
        "results": [partial(subject.measure, weights, on, batch_norm="stored") for on in ("train", "validation")],
        "here": [partial(subject.measure, weights, request.split)],
        **_random_works(run, weights, request),
        **({} if plane is None else _plane_works(run, weights, plane[1], request)),
    }
    done = _together(works, collectives)
    curvature, *why_not = done["curvature"][0] if done["curvature"] else (None,)
    notes += why_not
    results = dict(zip(("train", "validation"), done["results"], strict=True))
    loss_name = subject.task.metrics[0].name
    measured = {each.name for each in subject.task.metrics} - {loss_name}
    metric = subject.task.headline if subject.task.headline in measured else None
    loss = done["here"][0][loss_name]
    boxes = _boxes(request)
    return RunLandscape(
        run=run.target,
        path=run.saved.path,
        weights=run.saved.weights,
        steps=run.steps,
        parameters=subject.size,
        batch_size=run.recipe.batch.global_size,
        peak_lr=run.peak_lr,
        results=results,
        gap=None if metric is None else results["train"][metric] - results["validation"][metric],
        gap_metric=metric,
        curve=curve_of(_reach(request, request.points), done["curve"]) if done.get("curve") else None,
        surface=(
            surface_of(_reach(request, request.grid), _reach(request, request.grid), done["surface"])
            if done.get("surface")
            else None
        ),
        trajectory=None if plane is None else _trajectory(*plane, done["trajectory"], request),
        sharpness=tuple(
            sharpness(loss, done["sharpness"][number * len(STARTS) : (number + 1) * len(STARTS)], box)
            for number, box in enumerate(boxes)
        ),
        curvature=curvature,
    )


def _together(works: Mapping[str, Sequence[Work]], collectives: Collectives) -> dict[str, list[Any]]:
    """Share out all work at once, and give it back by name."""
    done = share_out([each for part in works.values() for each in part], collectives)
    found, begin = dict[str, list[Any]](), 0
    for name, part in works.items():
        found[name] = done[begin : begin + len(part)]
        begin += len(part)
    return found


def _random_works(run: Opened, weights: Tensor, request: Landscape) -> dict[str, list[Work]]:
    subject, asks = run.subject, request.asks_for
    if not asks("curve") and not asks("surface"):
        return {}
    draw = partial(random_direction, weights, subject.shapes, seed=request.seed)
    first, second = draw(number=0), draw(number=1)
    grid = _reach(request, request.grid)
    line = [(each,) for each in _reach(request, request.points)]
    found: dict[str, list[Work]] = {}
    if asks("curve"):
        found["curve"] = along(subject, weights, [first], line, request.split)
    if asks("surface"):
        found["surface"] = along(subject, weights, [first, second], on_grid(grid, grid), request.split)
    return found


def _reach(request: Landscape, count: int) -> tuple[float, ...]:
    return positions(-request.reach, request.reach, count)


def _boxes(request: Landscape) -> list[Box]:
    if not request.asks_for("sharpness"):
        return []
    box = Box(iterations=request.iterations, subspace=request.subspace, seed=request.seed)
    return [replace(box, epsilon=each) for each in request.epsilon]


def _ascents(run: Opened, weights: Tensor, request: Landscape) -> list[Work]:
    return [
        partial(climb, run.subject, weights, request.split, box, start) for box in _boxes(request) for start in STARTS
    ]


def _curvature(run: Opened, weights: Tensor, request: Landscape) -> list[Work]:
    if not request.asks_for("curvature"):
        return []
    start = normal_vector(request.seed, _EIGENVECTOR_NUMBER, weights)
    apply = run.subject.curvature(weights, request.split)
    find = partial(top_eigenvalue, apply, start, tolerance=request.tolerance, most=request.products)
    return [partial(_unless_there_is_none, find, is_asked_for=bool(request.measure))]


def _unless_there_is_none(find: Callable[[], Eigenvalue], *, is_asked_for: bool) -> tuple[Any, ...]:
    """The eigenvalue; or, where nobody asked for it by name and there is none, None and why."""
    try:
        return (find(),)
    except NoSecondDerivativeError as error:
        if is_asked_for:
            raise
        return None, f"no curvature: {error}"


def _plane(run: Opened, request: Landscape, notes: list[str]) -> tuple[list[int], Plane] | None:
    if not request.asks_for("trajectory"):
        return None
    try:
        steps, weights = read_trajectory(run)
        return steps, principal_plane(weights)
    except (PacelineError, ValueError) as error:
        if not request.measure:
            notes.append(f"no trajectory: {error}")
            return None
        if isinstance(error, ValueError):
            raise PacelineError(f"{run.target} has no trajectory: {error}; leave it out of --measure.") from None
        raise


def _plane_works(run: Opened, weights: Tensor, plane: Plane, request: Landscape) -> dict[str, list[Work]]:
    x, y = _around(plane, request)
    return {"trajectory": along(run.subject, weights, plane.axes, on_grid(x, y), request.split)}


def _trajectory(steps: list[int], plane: Plane, done: list[Any], request: Landscape) -> Trajectory:
    return Trajectory(
        steps=tuple(steps),
        coordinates=plane.coordinates,
        explained=plane.explained,
        surface=surface_of(*_around(plane, request), done),
    )


def _around(plane: Plane, request: Landscape) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Positions along both axes that hold the whole way, and a margin."""
    ranges = [(min(values), max(values)) for values in zip(*plane.coordinates, strict=True)]
    widest = max(last - first for first, last in ranges)
    found = [
        positions(first - _MARGIN * (last - first or widest), last + _MARGIN * (last - first or widest), request.grid)
        for first, last in ranges
    ]
    return found[0], found[1]


def _line(runs: list[Opened], request: Landscape, collectives: Collectives, notes: list[str]) -> Line | None:
    if not request.asks_for("line") or len(runs) != 2:
        return None
    first, second = runs
    try:
        check_alike(first, second)
    except PacelineError as error:
        if request.measure:
            raise
        notes.append(f"no line: {error}")
        return None
    at = sorted({*positions(*_LINE, request.points), 0.0, 1.0})
    splits: tuple[Split, ...] = ("train", "validation")
    done = _together({on: _between(first, second, at, on) for on in splits}, collectives)
    loss = first.subject.task.metrics[0].name
    curves = {str(on): curve_of(at, done[on]) for on in splits}
    return Line(curves=curves, barrier={on: loss_barrier(at, curve.values[loss]) for on, curve in curves.items()})


def _between(first: Opened, second: Opened, at: Sequence[float], on: Split) -> list[Work]:
    mine, theirs = (run.subject.here() for run in (first, second))
    my_norms, their_norms = (run.subject.statistics() for run in (first, second))

    def measure(share: float) -> dict[str, float]:
        with _statistics(first, torch.lerp(my_norms, their_norms, share)):
            return first.subject.measure(torch.lerp(mine, theirs, share), on)

    return [partial(measure, share) for share in at]


@contextlib.contextmanager
def _statistics(run: Opened, statistics: Tensor) -> Iterator[None]:
    before, weights = run.subject.statistics(), run.subject.here()
    run.subject.move_to(weights, statistics)
    try:
        yield
    finally:
        run.subject.move_to(weights, before)


def _gaps(runs: Sequence[RunLandscape], line: Line | None) -> Iterator[str]:
    for run in runs:
        trajectory = None if run.trajectory is None else run.trajectory.surface
        yield from _said(str(run.run), *not_finite(run.curve, run.surface, trajectory))
        if run.curvature is not None and not run.curvature.converged:
            yield (
                f"{run.run}: the eigenvalue did not converge in {run.curvature.products} products (residual "
                f"{run.curvature.residual:.2g}, asked {run.curvature.tolerance:g}); raise --products, or --tolerance"
            )
    if line is not None:
        yield from _said("the line", *not_finite(*line.curves.values()))


def _said(where: str, odd: int, count: int) -> Iterator[str]:
    if odd:
        yield f"{where}: the loss is no number at {odd} of {count} points, which charts leave out"
