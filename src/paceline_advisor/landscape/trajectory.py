"""In which plane did a run move, and how much of its way lies in it?

Principal components of the moves from each checkpoint to the last one (Li et al. 2018, section 7). They are taken about
the last weights and not about the mean, since the plane that is drawn goes through them; two earlier checkpoints then
lie in it for certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LEAST = 3
"""Checkpoints that a trajectory needs."""

_AT_A_TIME = 2**20


@dataclass(frozen=True, kw_only=True)
class Plane:
    """The plane through the last weights that lies closest to all others.

    Attributes:
        axes: Two orthogonal unit vectors, [size] each.
        coordinates: Where each checkpoint is in it, the last one at (0, 0).
        explained: The share of the squared distances from the last weights that lies along each axis.
    """

    axes: tuple[Tensor, Tensor]
    coordinates: tuple[tuple[float, float], ...]
    explained: tuple[float, float]


def principal_plane(weights: Sequence[Tensor]) -> Plane:
    """The plane of a run's weights, in the order in which they were saved, at least three.

    Raises:
        ValueError: If they are fewer, or nothing moved.

    Source:
        Li et al., Visualizing the Loss Landscape of Neural Nets, arXiv:1712.09913, section 7.2.
    """
    if len(weights) < LEAST:
        raise ValueError(f"{len(weights)} sets of weights make no plane")
    last = weights[-1]
    moves = torch.stack([each - last for each in weights[:-1]])
    # As many rows as checkpoints: their products are a small matrix, whatever the network's size.
    gram = np.zeros((len(moves), len(moves)))
    for begin in range(0, moves.shape[1], _AT_A_TIME):
        part = moves[:, begin : begin + _AT_A_TIME].cpu().double()
        gram += (part @ part.T).numpy()
    squares, vectors = np.linalg.eigh(gram)
    total = float(np.clip(squares, 0, None).sum())
    if not np.isfinite(total) or total == 0:
        raise ValueError("the weights of all checkpoints are the same, or are no numbers")
    axes = tuple(_axis(moves, vectors[:, -each], float(squares[-each])) for each in (1, 2))
    along = np.stack([vectors[:, -each] * np.sqrt(max(squares[-each], 0.0)) for each in (1, 2)], axis=1)
    return Plane(
        axes=(axes[0], axes[1]),
        coordinates=(*((float(x), float(y)) for x, y in along), (0.0, 0.0)),
        explained=(float(max(squares[-1], 0) / total), float(max(squares[-2], 0) / total)),
    )


def _axis(moves: Tensor, shares: np.ndarray, square: float) -> Tensor:
    mixed = torch.from_numpy(shares).to(dtype=moves.dtype, device=moves.device) @ moves
    # A run along a straight line has no second axis: what is left over are rounding errors.
    return mixed / np.sqrt(square) if square > 0 else torch.zeros_like(mixed)
