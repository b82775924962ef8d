"""What do a CPU's convolutions take inside, for a moment?

oneDNN computes with blocked or channels-last tensors. What it is given in another layout it copies, and so are filters
and their gradients. Found by watching torch's allocator (`benchmarks/estimate.py` holds the whole against real steps)
on processors with AVX-512; on others, and in another version of oneDNN, kernels differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

# A filter with one channel that no kernel of its own is there for is padded to blocks of 16 by 16 channels.
_PADDED = 256
_LARGEST_OWN_KERNEL = 4


def unknown_kernels(network: nn.Module) -> str:
    """In words, that convolutions may take other memory on this processor; empty if there are none, or it is known."""
    if "AVX512" in torch.backends.cpu.get_cpu_capability():
        return ""
    if not any(isinstance(each, _ConvNd) for each in network.modules()):
        return ""
    return (
        "what convolutions take inside was watched on processors with AVX-512 only, which this one does not report: "
        "the estimate may be too low or too high; `paceline find-batch` measures"
    )


def workspace(operation: str, args: tuple[Any, ...], answer: Any) -> tuple[int, str]:
    """Bytes that an operation takes beside what it is given and returns, and for what; none of those not known."""
    return _taken(operation, args, answer), "workspace"


def _taken(operation: str, args: tuple[Any, ...], answer: Any) -> int:
    if operation == "convolution.default":
        images, weight, output = args[0], args[1], answer
        copies = 1
    elif operation == "convolution_backward.default":
        output, images, weight = args[:3]
        copies = 2
    else:
        return 0
    if weight.ndim != 4 or images.device.type != "cpu":
        return 0
    filters = copies * _size(weight)
    if not _is_channels_last(images, weight):
        return filters + _size(output) + (_size(images) if copies > 1 else 0)
    return max(filters, _padded(weight, output)) if copies > 1 else filters


def _padded(weight: Tensor, output: Tensor) -> int:
    """A depthwise filter's gradient, where it is computed as any group's is."""
    side = max(weight.shape[2:])
    is_depthwise = weight.shape[1] == 1 and weight.shape[0] > 1
    if not is_depthwise or (side <= _LARGEST_OWN_KERNEL and side <= min(output.shape[2:])):
        return 0
    return _PADDED * weight.numel() * 4


def _is_channels_last(images: Tensor, weight: Tensor) -> bool:
    return any(each.is_contiguous(memory_format=torch.channels_last) for each in (images, weight))


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
