"""What do a GPU's kernels take inside, for a moment?

Of attention's backward pass that is known: sums in fp32 (Dao 2023, FlashAttention-2, section 3.2). What cuDNN's
convolutions take is not: it tries what is fastest with what is free, and takes another kernel where it is refused. So
room is kept for the way that always works, where images of another layout are copied; this room decides what fits, and
does not count as allocated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.telemetry.allocations import NOTHING

ROOM = "room for kernels"
"""What may be taken inside, and need not be."""

_HALVES = (torch.float16, torch.bfloat16)
_FLASH_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward.default"
# Rows and columns of the tiles that it works on.
_ROWS, _COLUMNS = 128, 32
# Tensor cores take channels in groups of so many.
_CHANNELS = 8
_FP32_BYTES = 4


def workspace(operation: str, args: tuple[Any, ...], answer: Any) -> tuple[int, str]:
    """Bytes that an operation takes beside what it is given and returns, and for what."""
    if operation == _FLASH_BACKWARD:
        return _attention_backward(args[1]), "workspace"
    if operation == "convolution.default":
        return _convolution(args[0], args[1], answer), ROOM
    if operation == "convolution_backward.default":
        output, images, weight = args[:3]
        return _convolution(images, weight, output), ROOM
    return NOTHING


def _attention_backward(query: Tensor) -> int:
    """The queries' gradient in fp32, if it is to be in 16 bits, and a number for each row."""
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


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
