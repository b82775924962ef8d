"""BatchNorm that normalises by small groups of samples inside a large micro-batch.

Ghost batch normalisation (Hoffer et al., "Train longer, generalize better", 2017, arXiv:1705.08741): each group is
normalised separately, like a micro-batch, so that a large batch keeps the noise of a small one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.errors import ModelError
from paceline.models.factories import mix_in


class _GhostBatchNorm(nn.Module):
    """Mixed into a norm's class: parameters, buffers, names and copies stay unchanged."""

    _ghost_samples = 0

    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Normalise ``inputs``, [N, C, ...], group by group in training, and normally in evaluation.

        The running statistics are updated once per group with the norm's momentum: as from separate micro-batches, and
        as weighted in the paper.
        """
        groups = groups_of(len(inputs), self._ghost_samples)
        if not self.training or groups == 1:
            answer: Tensor = super().forward(inputs, *args, **kwargs)
            return answer
        normalise = super().forward
        # Slicing and concatenating along the samples keep the memory format.
        return torch.cat([normalise(group, *args, **kwargs) for group in inputs.tensor_split(groups)])


def groups_of(samples: int, group: int) -> int:
    """Return the number of nearly equal groups: none larger than requested, but each with at least two samples.

    Only the shorter micro-batches of an epoch's last step have groups of another size.
    """
    return max(1, min(-(-samples // group), samples // 2))


def normalise_in_groups(network: nn.Module, samples: int, *, name: str) -> None:
    """Make a network's BatchNorm layers normalise by groups of this many samples in training.

    Args:
        network: The network; its state_dict is unchanged.
        samples: Samples in a group, at least 2.
        name: Name of the network, for messages.

    Raises:
        ModelError: If it has no BatchNorm, or one with statistics synchronised across ranks.
    """
    norms = [(path, module) for path, module in network.named_modules() if isinstance(module, _BatchNorm)]
    if not norms:
        raise ModelError(
            f"model.ghost_batch_norm={samples} has no effect: model.name={name} has no BatchNorm; leave it out."
        )
    synced = [path for path, module in norms if isinstance(module, nn.SyncBatchNorm)]
    if synced:
        raise ModelError(
            f"model.ghost_batch_norm={samples}: model.name={name} has SyncBatchNorm ({synced[0]}), which normalises "
            "over all processes; remove one of the two."
        )
    mix_in((module for _, module in norms), _GhostBatchNorm, _ghost_samples=samples)
