"""Temporary memory inside convolutions and attention, on CPUs and GPUs.

CPU: oneDNN computes with blocked or channels-last tensors. It copies inputs in another layout, and also filters and
their gradients. This was found by observing torch's allocator on processors with AVX-512 (`benchmarks/estimate.py`
compares the total with real steps); on others, and in another version of oneDNN, kernels differ.

GPU: attention's backward pass sums in fp32 (Dao 2023, FlashAttention-2, section 3.2). cuDNN uses a faster convolution
kernel only if the kernel's memory is free. Therefore only the memory of the kernel that always works is set aside; it
copies images that are not channels-last. This memory decides what fits, but does not count as allocated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from paceline_advisor.memory.allocations import NO_MEMORY

# A one-channel filter without a dedicated kernel is padded to blocks of 16 by 16 channels.
_PADDED = 256
_LARGEST_OWN_KERNEL = 4


def unknown_kernels(network: nn.Module) -> str:
    """Return a warning that convolutions may use more or less memory on this processor; empty if none applies."""
    if "AVX512" in torch.backends.cpu.get_cpu_capability():
        return ""
    if not any(isinstance(each, _ConvNd) for each in network.modules()):
        return ""
    return (
        "the internal memory of convolutions was measured only on processors with AVX-512, which this one does not "
        "report: the estimate may be too low or too high; `paceline find-batch` measures"
    )


def cpu_workspace(operation: str, args: tuple[Any, ...], answer: Any) -> tuple[int, str]:
    """Return the bytes that an operation uses in addition to inputs and outputs, and their purpose; 0 if unknown."""
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
    if not any(each.is_contiguous(memory_format=torch.channels_last) for each in (images, weight)):
        return filters + _size(output) + (_size(images) if copies > 1 else 0)
    return max(filters, _padded(weight, output)) if copies > 1 else filters


def _padded(weight: Tensor, output: Tensor) -> int:
    """Return the bytes of a padded depthwise gradient; 0 if a dedicated kernel computes it without padding."""
    side = max(weight.shape[2:])
    is_depthwise = weight.shape[1] == 1 and weight.shape[0] > 1
    if not is_depthwise or (side <= _LARGEST_OWN_KERNEL and side <= min(output.shape[2:])):
        return 0
    return _PADDED * weight.numel() * 4


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


ROOM = "room for kernels"
"""Purpose of memory that a kernel may use, but does not need."""

_HALVES = (torch.float16, torch.bfloat16)
_FLASH_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward.default"
# Rows and columns of the kernel's tiles.
_ROWS, _COLUMNS = 128, 32
# Tensor cores process channels in groups of this size.
_CHANNELS = 8
_FP32_BYTES = 4


def gpu_workspace(operation: str, args: tuple[Any, ...], answer: Any) -> tuple[int, str]:
    """Return the bytes that an operation uses in addition to inputs and outputs, and their purpose; 0 if unknown."""
    if operation == _FLASH_BACKWARD:
        return _attention_backward(args[1]), "workspace"
    if operation == "convolution.default":
        return _convolution(args[0], args[1], answer), ROOM
    if operation == "convolution_backward.default":
        output, images, weight = args[:3]
        return _convolution(images, weight, output), ROOM
    return NO_MEMORY


def _attention_backward(query: Tensor) -> int:
    """Return the bytes of the queries' gradient in fp32, if the result has 16 bits, and of one number per row."""
    batch, heads, rows, columns = query.shape
    rows = -(-rows // _ROWS) * _ROWS
    columns = -(-columns // _COLUMNS) * _COLUMNS if query.dtype in _HALVES else 0
    return batch * heads * rows * (columns + 1) * _FP32_BYTES


def _convolution(images: Tensor, weight: Tensor, output: Tensor) -> int:
    filters = 2 * _FP32_BYTES * weight.numel()
    if images.ndim == 4 and images.is_contiguous(memory_format=torch.channels_last):
        channels = images.shape[1]
        is_padded = channels % _CHANNELS != 0 and images.dtype in _HALVES
        return filters + (_size(images) * -(-channels // _CHANNELS) * _CHANNELS // channels if is_padded else 0)
    return filters + _size(images) + _size(output)
