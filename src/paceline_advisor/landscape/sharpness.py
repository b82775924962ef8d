"""How much can the loss rise close to the weights? Keskar's sharpness, by projected L-BFGS-B.

The largest loss in a small box is sought, not found for certain: it is a lower bound, from the weights themselves and
from one random point of the box, with so many iterations as were asked for. Steps are measured in half-widths of the
box, and the loss in its largest slope along one of them, so that the first step is neither lost nor the whole box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import Bounds, minimize
from torch import Tensor

from paceline_advisor.formulas.landscape import keskar_sharpness
from paceline_advisor.landscape.directions import normal_vector, random_numbers
from paceline_advisor.landscape.subject import Split, Subject

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
