"""BatchNorm that normalises by small groups of samples inside a large micro-batch.

Ghost batch normalisation (Hoffer et al., "Train longer, generalize better", 2017, arXiv:1705.08741): each group has its
own statistics, as if it were a micro-batch, so that a large batch keeps the noise of a small one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.errors import ModelError
from paceline.models.factories import mix_in


class _Ghosts(nn.Module):
    """Mixed into a norm's class: parameters, buffers, names and copies stay as they are."""

    _ghost_samples = 0

    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Normalise ``inputs``, [N, C, ...], group by group in training, and as ever in evaluation.

        The running statistics take in one group after the other, each with the norm's own momentum: as they would from
        so many micro-batches, and as the paper weighs them.
        """
        groups = groups_of(len(inputs), self._ghost_samples)
        if not self.training or groups == 1:
            answer: Tensor = super().forward(inputs, *args, **kwargs)
            return answer
        normalise = super().forward
        # Slices along the samples keep the memory format, and so does putting them together.
        return torch.cat([normalise(group, *args, **kwargs) for group in inputs.tensor_split(groups)])


def groups_of(samples: int, group: int) -> int:
    """Into how many nearly equal groups so many samples are cut: none larger than asked, if each has two samples then.

    Only an epoch's last step, whose micro-batches are shorter, has groups that are not of the size asked for.
    """
    return max(1, min(-(-samples // group), samples // 2))


def normalise_in_groups(network: nn.Module, samples: int, *, name: str) -> None:
    """Let a network's BatchNorm layers normalise by groups of this many samples in training.

    Args:
        network: The network; its state_dict is the same afterwards.
        samples: Samples in a group, at least 2.
        name: The network's, for messages.

    Raises:
        ModelError: If it has no BatchNorm, or one whose statistics are the processes' in common.
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
            f"over "
            "all processes; remove one of the two."
        )
    mix_in((module for _, module in norms), _Ghosts, _ghost_samples=samples)
