"""How strongly does the loss curve, along the direction in which it curves most?

Lanczos' method: the Hessian is only ever multiplied by vectors, and what it does to the few that came up so far is a
small matrix, whose largest eigenvalue approaches the Hessian's from below. The vectors are kept orthogonal against all
before, since float32 would let them drift.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
