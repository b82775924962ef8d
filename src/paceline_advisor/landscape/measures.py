"""Measures of a loss landscape: lines, planes, filter-normalised directions, sharpness, curvature."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import Bounds, minimize
from scipy.special import ndtri
from torch import Tensor

from paceline.data.random_draws import uniforms
from paceline.distributed.collectives import Collectives
from paceline_advisor.formulas.network import keskar_sharpness
from paceline_advisor.landscape.subject import Split, Subject

Point = dict[str, float]
Work = Callable[[], Any]
"""Something that one process computes; what it gives back is made of plain numbers."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Metrics along a line.

    Attributes:
        positions: Where, in lengths of the direction.
        values: Each metric at these positions; not finite where the loss was not.
    """

    positions: tuple[float, ...]
    values: Mapping[str, tuple[float, ...]]

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
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

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def positions(first: float, last: float, count: int) -> tuple[float, ...]:
    """So many evenly spaced numbers; the middle of an odd number of them between -r and r is exactly 0."""
    return tuple(float(each) for each in np.linspace(first, last, count))


def along(
    subject: Subject, weights: Tensor, directions: Sequence[Tensor], at: Sequence[Sequence[float]], on: Split
) -> list[Work]:
    """The work of measuring at some points.

    Args:
        subject: The network and its samples.
        weights: The origin, [size].
        directions: The axes, [size] each.
        at: For each point, how far it is along each axis.
        on: The split that is scored.
    """

    def measure(point: Sequence[float]) -> Point:
        moved = weights.clone()
        for share, direction in zip(point, directions, strict=True):
            moved.add_(direction, alpha=share)
        return subject.measure(moved, on)

    return [partial(measure, point) for point in at]


def on_grid(x: Sequence[float], y: Sequence[float]) -> list[tuple[float, float]]:
    """The points of a grid, row by row."""
    return [(across, up) for up, across in product(y, x)]


def curve_of(at: Sequence[float], found: Sequence[Point]) -> Curve:
    """Put the points of a line together."""
    return Curve(positions=tuple(at), values={name: tuple(each[name] for each in found) for name in found[0]})


def surface_of(x: Sequence[float], y: Sequence[float], found: Sequence[Point]) -> Surface:
    """Put the points of :func:`on_grid` together."""
    rows = [found[begin : begin + len(x)] for begin in range(0, len(found), len(x))]
    values = {name: tuple(tuple(each[name] for each in row) for row in rows) for name in found[0]}
    return Surface(x=tuple(x), y=tuple(y), values=values)


def share_out(work: Sequence[Work], collectives: Collectives) -> list[Any]:
    """What each piece of work gives, in order; a collective.

    An error for the user in one process is raised in all of them.

    Args:
        work: The same list on every process; process r does every world-size-th piece, from the r-th on.
        collectives: The processes.
    """
    world = collectives.world
    mine = collectives.on_all(lambda: [each() for each in work[world.rank :: world.world_size]])
    parts = collectives.gather(mine)
    return [parts[number % world.world_size][number // world.world_size] for number in range(len(work))]


_PER_BLOCK = 4
# Half a step of the draws: the quantile of 0 is no number.
_HALF = 2.0**-33


def random_numbers(seed: int, number: int, count: int) -> NDArray[np.float64]:
    """So many numbers in (0, 1): the ``number``-th vector of a seed."""
    blocks = np.arange(-(-count // _PER_BLOCK), dtype=np.int64)
    return uniforms(seed, number, blocks, _PER_BLOCK).reshape(-1)[:count] + _HALF


def normal_vector(seed: int, number: int, like: Tensor) -> Tensor:
    """A vector of standard normal numbers, with the length, dtype and device of another."""
    drawn = ndtri(random_numbers(seed, number, like.numel()))
    return torch.from_numpy(drawn).to(device=like.device, dtype=like.dtype)


def filter_normalised(direction: Tensor, weights: Tensor, shapes: Mapping[str, torch.Size]) -> Tensor:
    """Give each filter of a direction the norm of the weights' filter.

    A filter is what makes one output: an index of the first axis. Parameters of one axis (biases, and the scale and
    shift of norms) do not move, as in the authors' plots (``xignore=biasbn`` in their code).

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
            mine, theirs = direction[begin:end].view(shape[0], -1), weights[begin:end].view(shape[0], -1)
            lengths = theirs.norm(dim=1, keepdim=True) / mine.norm(dim=1, keepdim=True).clamp_min(1e-10)
            scaled[begin:end] = (mine * lengths).view(-1)
        begin = end
    return scaled


def random_direction(weights: Tensor, shapes: Mapping[str, torch.Size], *, seed: int, number: int) -> Tensor:
    """The ``number``-th filter-normalised random direction of a seed, [size]."""
    return filter_normalised(normal_vector(seed, number, weights), weights, shapes)


Numbers = NDArray[np.float64]
Start = Literal["weights", "random"]
STARTS: tuple[Start, ...] = ("weights", "random")

# Beyond the numbers of a surface's directions.
_START_NUMBER, _SUBSPACE_NUMBER = 1000, 2000


@dataclass(frozen=True, kw_only=True)
class Box:
    """In which box the largest loss is sought, and how hard.

    Attributes:
        epsilon: Half its width, for a weight of 0; wider for larger ones.
        iterations: Of L-BFGS-B, from each start.
        subspace: Dimensions of a random subspace that the search is kept in; None for all of them.
        seed: Keys the random start and the subspace.
    """

    epsilon: float = 1e-3
    iterations: int = 10
    subspace: int | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Ascent:
    """One search.

    Attributes:
        start: Where it began.
        largest_loss: The largest loss it saw; infinite if one was no number.
        iterations: Of L-BFGS-B.
        gradients: Losses and gradients computed.
    """

    start: str
    largest_loss: float
    iterations: int
    gradients: int


@dataclass(frozen=True, kw_only=True)
class Sharpness:
    """Keskar's measure.

    Attributes:
        epsilon: See :class:`Box`.
        percent: By how much the loss can rise, in percent of one plus the loss.
        loss: At the weights.
        ascents: The searches; the best one counts.
        subspace: See :class:`Box`.
    """

    epsilon: float
    percent: float
    loss: float
    ascents: tuple[Ascent, ...]
    subspace: int | None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def climb(subject: Subject, weights: Tensor, on: Split, box: Box, start: Start) -> Ascent:
    """Search the box for the largest loss, from one start.

    Args:
        subject: The network and its samples.
        weights: The middle of the box, [size].
        on: The split whose loss it is.
        box: The box.
        start: ``weights`` or ``random``.
    """
    space = _whole(weights, box) if box.subspace is None else _subspace(weights, box, box.subspace)
    seen = _Seen(lambda at: subject.loss_and_gradient(at, on), weights, space)
    drawn = random_numbers(box.seed, _START_NUMBER, space.dimensions)
    begin = np.zeros(space.dimensions) if start == "weights" else 2 * drawn - 1
    try:
        slope = seen.slope(begin) or 1.0
        done = minimize(
            partial(seen, scale=slope),
            begin,
            jac=True,
            method="L-BFGS-B",
            bounds=Bounds(-np.ones(space.dimensions), np.ones(space.dimensions)),
            # It stops when its iterations are done, or nothing rises any more: the scale of a loss says nothing.
            options={"maxiter": box.iterations, "maxfun": 20 * (box.iterations + 1), "ftol": 0.0, "gtol": 0.0},
        )
        iterations, largest = int(done.nit), seen.largest
    except FloatingPointError:
        iterations, largest = 0, math.inf
    return Ascent(start=start, largest_loss=largest, iterations=iterations, gradients=seen.count)


def sharpness(loss: float, ascents: Sequence[Ascent], box: Box) -> Sharpness:
    """What searches of one box come to."""
    largest = max(each.largest_loss for each in ascents)
    # The weights are a point of the box themselves.
    percent = keskar_sharpness(max(largest, loss), loss) if math.isfinite(loss) else math.nan
    return Sharpness(epsilon=box.epsilon, percent=percent, loss=loss, ascents=tuple(ascents), subspace=box.subspace)


@dataclass(frozen=True)
class _Space:
    """How the search's numbers, in [-1, 1], move the weights, and how a gradient comes back to them."""

    dimensions: int
    move: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


def _whole(weights: Tensor, box: Box) -> _Space:
    half = box.epsilon * (weights.abs() + 1)
    return _Space(weights.numel(), lambda at: half * at, lambda gradient: half * gradient)


def _subspace(weights: Tensor, box: Box, dimensions: int) -> _Space:
    columns = [normal_vector(box.seed, _SUBSPACE_NUMBER + each, weights) for each in range(dimensions)]
    basis = torch.stack(columns, dim=1)
    # The pseudo-inverse times the weights; random columns are far from dependent.
    inverse = torch.linalg.solve(basis.T @ basis, basis.T @ weights)
    half = box.epsilon * (inverse.abs() + 1)
    return _Space(dimensions, lambda at: basis @ (half * at), lambda gradient: half * (basis.T @ gradient))


class _Seen:
    """The negative loss for an algorithm that minimises, and the largest loss it has met."""

    def __init__(
        self, loss_and_gradient: Callable[[Tensor], tuple[float, Tensor]], weights: Tensor, space: _Space
    ) -> None:
        self._ask, self._weights, self._space = loss_and_gradient, weights, space
        self.largest, self.count = -math.inf, 0

    def __call__(self, at: Numbers, *, scale: float) -> tuple[float, Numbers]:
        loss, gradient = self._at(at)
        return -loss / scale, -gradient / scale

    def slope(self, at: Numbers) -> float:
        return float(np.abs(self._at(at)[1]).max())

    def _at(self, at: Numbers) -> tuple[float, Numbers]:
        moved = torch.from_numpy(np.array(at)).to(device=self._weights.device, dtype=self._weights.dtype)
        loss, gradient = self._ask(self._weights + self._space.move(moved))
        self.count += 1
        slopes = self._space.back(gradient).cpu().double().numpy()
        if not math.isfinite(loss) or not np.isfinite(slopes).all():
            raise FloatingPointError("a loss that is no number")
        self.largest = max(self.largest, loss)
        return loss, slopes


_NOTHING = 1e-10


@dataclass(frozen=True, kw_only=True)
class Eigenvalue:
    """The largest eigenvalue of a Hessian.

    Attributes:
        value: The eigenvalue; not a number where the loss is none.
        residual: Length of ``H v - value * v`` for its unit vector v, from one more product, as a share of the value:
            an eigenvalue lies within so much of it.
        tolerance: The residual that was asked for.
        products: Hessian-vector products taken.
        converged: Whether the residual is as small as that.
        lowest: The lowest eigenvalue that came up: above 0 only in a bowl; an upper bound, not converged.
    """

    value: float
    residual: float
    tolerance: float
    products: int
    converged: bool
    lowest: float

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def top_eigenvalue(
    apply: Callable[[Tensor], Tensor], start: Tensor, *, tolerance: float = 1e-2, most: int = 40
) -> Eigenvalue:
    """The algebraically largest eigenvalue of a symmetric operator.

    Args:
        apply: Multiplies a vector by it.
        start: Any vector that is not orthogonal to the one that is sought; a random one.
        tolerance: Largest residual, as a share of the eigenvalue.
        most: Most products; one more measures the residual.

    Source:
        Golub and Van Loan, Matrix Computations, 10.1, with full reorthogonalisation.
    """
    basis = [start / start.norm()]
    diagonal: list[float] = []
    beside: list[float] = []
    values, vectors = np.zeros(1), np.zeros((1, 1))
    while len(diagonal) < min(most, start.numel()):
        product = apply(basis[-1])
        diagonal.append(_dot(product, basis[-1]))
        if not math.isfinite(diagonal[-1]):
            return _none(tolerance, len(diagonal))
        product = _orthogonal(product, basis)
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
    return Eigenvalue(
        value=value,
        residual=share,
        tolerance=tolerance,
        products=len(diagonal) + 1,
        converged=share <= tolerance,
        lowest=float(values[0]),
    )


def _none(tolerance: float, products: int) -> Eigenvalue:
    return Eigenvalue(
        value=math.nan, residual=math.inf, tolerance=tolerance, products=products, converged=False, lowest=math.nan
    )


def _dot(first: Tensor, second: Tensor) -> float:
    exact = torch.float32 if first.device.type == "mps" else torch.float64
    return float(torch.dot(first.to(exact), second.to(exact)).item())


def _orthogonal(vector: Tensor, basis: list[Tensor]) -> Tensor:
    # Twice is enough (Kahan; Parlett, The Symmetric Eigenvalue Problem, 6.9).
    for _ in range(2):
        for each in basis:
            vector = vector - _dot(vector, each) * each
    return vector
