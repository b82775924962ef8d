"""Into which directions are the weights moved?

Random ones are functions of (seed, number), by the counter-based generator that everything else draws from, so that
every process has the same. They are scaled filter by filter (Li et al. 2018): otherwise a network with large weights
looks flat only because a step of one length means less to it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri
from torch import Tensor

from paceline.data.random_draws import uniforms

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
