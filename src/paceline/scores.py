"""Scores of held-out samples over all ranks, each sample once, whichever rank scored it."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from paceline.distributed.current import current_collectives
from paceline.errors import DataError
from paceline.metrics.accumulator import exact_sum
from paceline.parsing.arguments import tensor


class ExactMean:
    """The mean of one value per sample, over all ranks.

    A sample that several ranks scored, because a sampler padded its batches, counts once. The sum is correctly rounded,
    so the mean depends neither on the number of ranks, nor on the batches, nor on their order.

    Attributes:
        samples: Samples in the last :meth:`result`.

    Example:
        >>> accuracy = ExactMean()
        >>> for inputs, targets, ids in loader:
        ...     accuracy.add(model(inputs).argmax(dim=1) == targets, ids)
        >>> print(accuracy.result())
    """

    def __init__(self) -> None:
        self.samples = 0
        self._values: list[Tensor] = []
        self._ids: list[Tensor] = []

    def add(self, values: Tensor, ids: Tensor) -> None:
        """Add a batch; does not wait for the device.

        Args:
            values: One number or bool per sample, [N].
            ids: The samples' positions in the data set, integers [N].

        Raises:
            DataError: If the shapes differ.
        """
        values, ids = tensor("values", values, error=DataError), tensor("ids", ids, error=DataError)
        if values.ndim != 1 or values.shape != ids.shape:
            raise DataError(
                f"values are {list(values.shape)} and ids {list(ids.shape)}, but both must be [N]: give one value and "
                "one id per sample.",
                key="values",
            )
        self._values.append(values)
        self._ids.append(ids)

    def result(self) -> float:
        """Return the mean, the same on every rank; NaN without samples. Every rank must call this.

        Raises:
            DataError: If an id is negative.
        """
        empty = torch.empty(0)
        (values,) = collect(
            torch.cat([each.cpu() for each in self._ids] or [empty.long()]),
            torch.cat([each.cpu().double() for each in self._values] or [empty.double()]),
        )
        self.samples = len(values)
        return exact_sum(values.tolist()) / self.samples if self.samples else math.nan


def collect(ids: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """Gather values of all ranks' samples, each sample once, in order of the ids. Every rank must call this.

    For metrics that are not means, such as those of torchmetrics: compute them from the result, on any rank. If several
    ranks scored a sample, the first rank's values count.

    Args:
        ids: The samples' positions in the data set, integers [N]; N may differ between ranks and be 0.
        values: Values of the samples, [N, …] each; apart from N, the same shape on every rank.

    Returns:
        The values of all M different samples, [M, …] each, in host memory; the same on every rank.

    Raises:
        DataError: On every rank: if the shapes do not fit, or an id is negative.

    Example:
        >>> ids, scores, targets = evaluate(model, loader)  # tensors of this rank's samples
        >>> area = torchmetrics.AUROC(task="binary")(*collect(ids, scores, targets))
    """
    collectives = current_collectives()
    mine = collectives.on_all_ranks(lambda: _on_host(ids, *values))
    parts = collectives.gather(mine)
    shapes = sorted({str([list(each.shape[1:]) for each in part[1:]]) for part in parts if len(part[0])})
    if len(shapes) > 1:
        raise DataError(f"Ranks gave values of the shapes {' and '.join(shapes)} per sample: pad them to one shape.")
    filled = [part for part in parts if len(part[0])] or parts[:1]
    every = [torch.cat(each) for each in zip(*filled, strict=True)]
    first = torch.from_numpy(np.unique(every[0].numpy(), return_index=True)[1])
    return tuple(each[first] for each in every[1:])


def _on_host(*tensors: Tensor) -> list[Tensor]:
    names = ["ids", *["values"] * (len(tensors) - 1)]
    ids, *values = (tensor(*each, error=DataError).cpu() for each in zip(names, tensors, strict=True))
    is_whole = not ids.is_floating_point() and ids.dtype != torch.bool
    if ids.ndim != 1 or not is_whole or any(each.shape[:1] != ids.shape for each in values):
        raise DataError(
            f"ids are {ids.dtype} {list(ids.shape)} for values of {[list(each.shape) for each in values]}, but "
            "must be integers [N] for values [N, …]: give one id per sample.",
            key="ids",
        )
    if len(ids) and int(ids.min()) < 0:
        lowest = int(ids.min())
        message = f"Sample {lowest} is negative: give the samples' positions in the data set."
        raise DataError(message, key="ids", value=lowest)
    return [ids, *values]
