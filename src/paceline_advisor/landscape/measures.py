"""Measures of a loss landscape: lines, planes, filter-normalised directions, sharpness, curvature."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import Bounds, minimize
from scipy.special import ndtri
from torch import Tensor

from paceline.data.random_draws import uniforms
from paceline.distributed.collectives import Collectives
from paceline_advisor import frozen
from paceline_advisor.formulas.network import keskar_sharpness
from paceline_advisor.landscape.loss_surface import LossSurface, Split

Numbers = NDArray[np.float64]

# --------------------------------------------------------------------------------------------- points and processes


@frozen
class Curve:
    """Metrics along a line.

    Attributes:
        positions: Positions, in units of the direction's length.
        values: Each metric at these positions; not finite where the loss is not.
    """

    positions: tuple[float, ...]
    values: Mapping[str, tuple[float, ...]]


@frozen
class Surface:
    """Metrics on a plane.

    Attributes:
        x: Positions along the first direction.
        y: Positions along the second one.
        values: Each metric, row by row: ``values[name][i][j]`` is at ``(x[j], y[i])``.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    values: Mapping[str, tuple[tuple[float, ...], ...]]


@dataclass(frozen=True)
class DividedWork:
    """Work that is divided among processes.

    Attributes:
        parts: Each is done by one process, and returns plain numbers.
        assemble: Combines the parts' return values, in order.
    """

    parts: Sequence[Callable[[], Any]]
    assemble: Callable[[list[Any]], Any] = list


def positions(first: float, last: float, count: int) -> tuple[float, ...]:
    """Return evenly spaced numbers; the middle of an odd number of them between -r and r is exactly 0."""
    return tuple(np.linspace(first, last, count).tolist())


def curve(at: Sequence[float], measure: Callable[[float], dict[str, float]]) -> DividedWork:
    """Measure along a line."""

    def assemble(found: list[dict[str, float]]) -> Curve:
        return Curve(positions=tuple(at), values={name: tuple(each[name] for each in found) for name in found[0]})

    return DividedWork([partial(measure, position) for position in at], assemble)


def surface(x: Sequence[float], y: Sequence[float], measure: Callable[[float, float], dict[str, float]]) -> DividedWork:
    """Measure on a grid, row by row."""

    def assemble(found: list[dict[str, float]]) -> Surface:
        rows = [found[begin : begin + len(x)] for begin in range(0, len(found), len(x))]
        values = {name: tuple(tuple(each[name] for each in row) for row in rows) for name in found[0]}
        return Surface(x=tuple(x), y=tuple(y), values=values)

    return DividedWork([partial(measure, across, up) for up, across in product(y, x)], assemble)


def along_axes(
    subject: LossSurface, weights: Tensor, axes: Sequence[Tensor], on: Split
) -> Callable[..., dict[str, float]]:
    """Return a function of a point, given by its distances along the axes, [size] each."""

    def measure(*distances: float) -> dict[str, float]:
        point = weights.clone()
        for distance, axis in zip(distances, axes, strict=True):
            point.add_(axis, alpha=distance)
        return subject.measure(point, on)

    return measure


def run_jobs(jobs: Mapping[str, DividedWork], collectives: Collectives) -> dict[str, Any]:
    """Run jobs together. Collective: every rank must call this, with the same jobs.

    Rank r runs every world-size-th part, starting with the r-th. A PacelineError on one rank is raised on all.

    Returns:
        Each job's result, by name.
    """
    world = collectives.world
    parts = [part for job in jobs.values() for part in job.parts]
    results = collectives.on_all_ranks(lambda: [part() for part in parts[world.rank :: world.world_size]])
    gathered = collectives.gather(results)
    in_order = iter([gathered[number % world.world_size][number // world.world_size] for number in range(len(parts))])
    return {name: job.assemble([next(in_order) for _ in job.parts]) for name, job in jobs.items()}


# ------------------------------------------------------------------------------------------------------ directions

_PER_BLOCK = 4
# Half a step of the draws: the quantile of 0 is not finite.
_HALF = 2.0**-33


def random_numbers(seed: int, number: int, count: int) -> Numbers:
    """Return numbers in (0, 1): vector ``number`` of a seed."""
    blocks = np.arange(-(-count // _PER_BLOCK), dtype=np.int64)
    return uniforms(seed, number, blocks, _PER_BLOCK).reshape(-1)[:count] + _HALF


def normal_vector(seed: int, number: int, like: Tensor) -> Tensor:
    """Return a vector of standard normal numbers, with the length, dtype and device of another."""
    return torch.from_numpy(ndtri(random_numbers(seed, number, like.numel()))).to(like)


def filter_normalised(direction: Tensor, weights: Tensor, shapes: Mapping[str, torch.Size]) -> Tensor:
    """Give each filter of a direction the norm of the weights' filter.

    A filter produces one output: an index of the first axis. One-dimensional parameters (biases, and the scale and
    shift of norms) are not changed, as in the authors' plots (``xignore=biasbn`` in their code).

    Args:
        direction: Any direction, [size].
        weights: The weights, [size].
        shapes: The shape of each parameter, in the vector's order.

    Source:
        Li et al., Visualizing the Loss Landscape of Neural Nets, arXiv:1712.09913, section 4.
    """
    scaled = torch.zeros_like(direction)
    begin = 0
    for shape in shapes.values():
        end = begin + shape.numel()
        if len(shape) > 1 and shape.numel():
            direction_rows, weight_rows = direction[begin:end].view(shape[0], -1), weights[begin:end].view(shape[0], -1)
            lengths = weight_rows.norm(dim=1, keepdim=True) / direction_rows.norm(dim=1, keepdim=True).clamp_min(1e-10)
            scaled[begin:end] = (direction_rows * lengths).view(-1)
        begin = end
    return scaled


@frozen
class Plane:
    """The plane through the last weights that is closest to all others.

    Attributes:
        axes: Two orthogonal unit vectors, [size] each.
        coordinates: Position of each checkpoint, with the last one at (0, 0).
        explained: Fraction of the squared distances from the last weights along each axis.
    """

    axes: tuple[Tensor, Tensor]
    coordinates: tuple[tuple[float, float], ...]
    explained: tuple[float, float]


_AT_A_TIME = 2**20


def principal_plane(weights: Sequence[Tensor]) -> Plane:
    """Return the plane of a run's weights, at least three, in the order in which they were saved.

    Raises:
        ValueError: If the weights never changed.

    Source:
        Li et al., Visualizing the Loss Landscape of Neural Nets, arXiv:1712.09913, section 7.2.
    """
    last = weights[-1]
    moves = torch.stack([each - last for each in weights[:-1]])
    # One row per checkpoint: their products are a small matrix, whatever the network's size.
    gram = np.zeros((len(moves), len(moves)))
    for part in torch.split(moves, _AT_A_TIME, dim=1):
        exact = part.cpu().double()
        gram += (exact @ exact.T).numpy()
    squares, vectors = np.linalg.eigh(gram)
    squares = np.clip(squares, 0, None)
    total = float(squares.sum())
    if not np.isfinite(total) or total == 0:
        raise ValueError("the weights of all checkpoints are the same, or are not finite")
    axes = []
    for square, shares in zip(squares[:-3:-1], vectors.T[:-3:-1], strict=True):
        mixed = torch.from_numpy(shares.copy()).to(moves) @ moves
        # A straight trajectory has no second axis: only rounding errors remain.
        axes.append(mixed / float(np.sqrt(square)) if square > 0 else torch.zeros_like(mixed))
    x, y = ((vectors[:, -each] * np.sqrt(squares[-each])).tolist() for each in (1, 2))
    return Plane(
        axes=(axes[0], axes[1]),
        coordinates=(*zip(x, y, strict=True), (0.0, 0.0)),
        explained=(float(squares[-1] / total), float(squares[-2] / total)),
    )


# ------------------------------------------------------------------------------------------------------- sharpness

Start = Literal["weights", "random"]
STARTS: tuple[Start, ...] = get_args(Start)

# Vector numbers above those used for a surface's directions.
_START_NUMBER, _SUBSPACE_NUMBER = 1000, 2000


@frozen
class Ascent:
    """One search for the largest loss in a box.

    Attributes:
        start: Its starting point.
        largest_loss: The largest loss found; infinite if one was not finite.
        iterations: Iterations of L-BFGS-B.
        gradients: Losses and gradients computed.
    """

    start: str
    largest_loss: float
    iterations: int
    gradients: int


@frozen
class Sharpness:
    """Keskar's measure.

    Attributes:
        epsilon: Half the width of the search box for a weight of 0; it is wider for larger weights.
        percent: How much the loss can rise, in percent of one plus the loss.
        loss: Loss at the weights.
        ascents: The searches; the best one counts.
        subspace: Dimensions of the random subspace of the search; None for the full space.
    """

    epsilon: float
    percent: float
    loss: float
    ascents: tuple[Ascent, ...]
    subspace: int | None


def climb(
    subject: LossSurface,
    weights: Tensor,
    on: Split,
    epsilon: float,
    start: Start,
    *,
    iterations: int = 10,
    subspace: int | None = None,
    seed: int = 0,
) -> Ascent:
    """Search the box around the weights, [size], for the largest loss of a split, from one start.

    The search variables are in [-1, 1]. ``seed`` keys the random start and the subspace.
    """
    if subspace is None:
        half, basis = epsilon * (weights.abs() + 1), None
    else:
        basis = torch.stack([normal_vector(seed, _SUBSPACE_NUMBER + each, weights) for each in range(subspace)], dim=1)
        # The pseudo-inverse times the weights; random columns are almost never linearly dependent.
        half = epsilon * (torch.linalg.solve(basis.T @ basis, basis.T @ weights).abs() + 1)
    losses: list[float] = []

    def descent(place: Numbers, scale: float = 1.0) -> tuple[float, Numbers]:
        step = half * torch.from_numpy(np.array(place)).to(weights)
        loss, gradient = subject.loss_and_gradient(weights + (step if basis is None else basis @ step), on)
        losses.append(loss)
        slopes = (half * (gradient if basis is None else basis.T @ gradient)).cpu().double().numpy()
        if not math.isfinite(loss) or not np.isfinite(slopes).all():
            raise FloatingPointError("a non-finite loss")
        return -loss / scale, -slopes / scale

    dimensions = half.numel()
    begin = np.zeros(dimensions)
    if start == "random":
        begin = 2 * random_numbers(seed, _START_NUMBER, dimensions) - 1
    try:
        done = minimize(
            descent,
            begin,
            args=(float(np.abs(descent(begin)[1]).max()) or 1.0,),
            jac=True,
            method="L-BFGS-B",
            bounds=Bounds(-np.ones(dimensions), np.ones(dimensions)),
            # It stops after its iterations, or when the loss no longer rises: the scale of a loss is arbitrary.
            options={"maxiter": iterations, "maxfun": 20 * (iterations + 1), "ftol": 0.0, "gtol": 0.0},
        )
        most, iterations = max(losses), int(done.nit)
    except FloatingPointError:
        most, iterations = math.inf, 0
    return Ascent(start=start, largest_loss=most, iterations=iterations, gradients=len(losses))


def sharpness(loss: float, ascents: Sequence[Ascent], epsilon: float, subspace: int | None = None) -> Sharpness:
    """Return the sharpness from searches of one box."""
    # The weights themselves are a point of the box.
    largest = max(loss, *(each.largest_loss for each in ascents))
    percent = keskar_sharpness(largest, loss) if math.isfinite(loss) else math.nan
    return Sharpness(epsilon=epsilon, percent=percent, loss=loss, ascents=tuple(ascents), subspace=subspace)


# ------------------------------------------------------------------------------------------------------- curvature

_NOTHING = 1e-10


@frozen
class Eigenvalue:
    """The largest eigenvalue of a Hessian.

    Attributes:
        value: The eigenvalue; NaN if the loss is not finite.
        residual: Norm of ``H v - value * v`` for its unit vector v, from one more product, relative to the value: an
            eigenvalue is within that distance.
        tolerance: The requested residual.
        products: Hessian-vector products taken.
        converged: Whether the residual is within the tolerance.
        lowest: The lowest eigenvalue seen: above 0 only in a bowl; an upper bound, not converged.
    """

    value: float
    residual: float
    tolerance: float
    products: int
    converged: bool
    lowest: float


def top_eigenvalue(
    apply: Callable[[Tensor], Tensor], start: Tensor, *, tolerance: float = 1e-2, most: int = 40
) -> Eigenvalue:
    """Return the algebraically largest eigenvalue of a symmetric operator.

    Args:
        apply: Multiplies a vector by the operator.
        start: Any vector that is not orthogonal to the eigenvector; a random one.
        tolerance: Largest residual, relative to the eigenvalue.
        most: Maximum number of products; one more measures the residual.

    Source:
        Golub and Van Loan, Matrix Computations, 10.1, with full reorthogonalisation.
    """
    basis = [start / start.norm()]
    diagonal: list[float] = []
    beside: list[float] = []
    values, vectors = np.zeros(1), np.zeros((1, 1))
    found = partial(Eigenvalue, tolerance=tolerance)
    while len(diagonal) < min(most, start.numel()):
        product = apply(basis[-1])
        diagonal.append(_dot(product, basis[-1]))
        if not math.isfinite(diagonal[-1]):
            return found(value=math.nan, residual=math.inf, products=len(diagonal), converged=False, lowest=math.nan)
        for each in basis * 2:  # twice is enough (Kahan; Parlett, The Symmetric Eigenvalue Problem, 6.9)
            product = product - _dot(product, each) * each
        length = product.norm().item()
        values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
        if length * abs(vectors[-1, -1]) <= tolerance * abs(values[-1]) or length <= _NOTHING:
            break
        beside.append(length)
        basis.append(product / length)
    vector = sum((float(share) * each for share, each in zip(vectors[:, -1], basis, strict=False)), 0 * start)
    vector = vector / vector.norm()
    product = apply(vector)
    value = _dot(product, vector)
    residual = (product - value * vector).norm().item()
    share = residual / abs(value) if value else (0.0 if residual <= _NOTHING else math.inf)
    converged = share <= tolerance
    return found(value=value, residual=share, products=len(diagonal) + 1, converged=converged, lowest=float(values[0]))


def _dot(first: Tensor, second: Tensor) -> float:
    exact = torch.float32 if first.device.type == "mps" else torch.float64
    return float(torch.dot(first.to(exact), second.to(exact)).item())
