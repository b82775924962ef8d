"""The memory inside of kernels is what torch's allocator reports while they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from paceline_advisor.memory.allocations import cpu_workspace

PLAIN, LAST = torch.contiguous_format, torch.channels_last
SLACK = 20_000  # descriptors and sums of a few rows


def images(channels: int, side: int, kind: torch.dtype, layout: torch.memory_format = LAST, samples: int = 8) -> Tensor:
    return torch.zeros(samples, channels, side, side, dtype=kind).contiguous(memory_format=layout)


def backward(
    channels: int, side: int, filter_side: int, kind: torch.dtype, *, groups: int, layout: torch.memory_format = LAST
) -> tuple[Any, ...]:
    read = images(channels, side, kind, layout)
    weight = torch.zeros(channels, channels // groups, filter_side, filter_side, dtype=kind)
    weight = weight.contiguous(memory_format=layout)
    options = ([1, 1], [filter_side // 2] * 2, [1, 1], False, [0, 0], groups)
    return (torch.zeros_like(read), read, weight, None, *options, [True, True, False])


def calls() -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    halves, singles = torch.bfloat16, torch.float32
    convolve = torch.ops.aten.convolution_backward.default
    for channels, side, filter_side in ((64, 32, 5), (240, 14, 5), (120, 7, 5), (80, 56, 7), (320, 7, 7)):
        yield convolve, backward(channels, side, filter_side, halves, groups=channels)
    yield convolve, backward(64, 32, 5, singles, groups=64)
    yield convolve, backward(320, 2, 7, singles, groups=320)
    yield convolve, backward(64, 32, 3, halves, groups=1)
    yield convolve, backward(64, 32, 3, singles, groups=1, layout=PLAIN)
    yield torch.ops.aten.sum.dim_IntList, (images(16, 32, torch.bool), [0, 2, 3])
    yield torch.ops.aten.mul.Tensor, (images(16, 32, singles), images(16, 32, torch.bool))
    yield torch.ops.aten._log_softmax.default, (images(16, 32, singles), 1, False)
    yield torch.ops.aten.upsample_bilinear2d.default, (images(16, 32, singles, PLAIN), [64, 64], False)
    part = images(32, 64, singles)[:, :16]
    yield torch.ops.aten.upsample_bilinear2d_backward.default, (part, [64, 64], [8, 16, 32, 32], False)


def test_kernels_take_what_is_expected() -> None:
    known = list(calls())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        answers = []
        for number, (operation, arguments) in enumerate(known):
            operation(*arguments)
            with record_function(f"kernel {number}"):
                answers.append(operation(*arguments))
    events = list(watched.profiler.kineto_results.events())
    changes = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]")
    for number, (operation, arguments) in enumerate(known):
        began, ended = next((e.start_ns(), e.end_ns()) for e in events if e.name() == f"kernel {number}")
        total = most = 0
        for moment, change in changes:
            if began <= moment <= ended:
                total += change
                most = max(most, total)
        name = f"{operation} {[each.shape for each in arguments if isinstance(each, Tensor)]}"
        expected, _ = cpu_workspace(operation.__name__, arguments, answers[number])
        assert expected == pytest.approx(most - total, rel=0.02, abs=SLACK), name
