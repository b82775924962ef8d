"""The memory format of a network's weights."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn


def lay_out(network: nn.Module, *, channels_last: bool) -> nn.Module:
    """Give the filters of images the batches' memory format, in place.

    torch has channels-last for tensors of four axes; those of others, Conv3d's say, stay as they are.
    """
    if not channels_last:
        return network.to(memory_format=torch.contiguous_format)
    for tensor in chain(network.parameters(), network.buffers()):
        if tensor.ndim == 4:
            tensor.data = tensor.data.to(memory_format=torch.channels_last)
    return network
