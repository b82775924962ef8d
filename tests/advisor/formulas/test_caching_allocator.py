"""The model of PyTorch's caching allocator, by its documented rules and on sequences worked out by hand."""

from __future__ import annotations

import itertools
import random

import pytest

from paceline_advisor.memory.allocator import (
    MIB,
    AllocatorSettings,
    CachingAllocator,
    DoesNotFitError,
    rounded,
    segment_size,
)


@pytest.mark.parametrize(("requested", "given"), [(0, 0), (1, 512), (512, 512), (513, 1024), (4 * 9600, 38400)])
def test_requests_are_rounded_up_to_512_bytes(requested: int, given: int) -> None:
    assert rounded(requested) == given


@pytest.mark.parametrize(
    ("requested", "used"),
    [(512, 2), (MIB, 2), (MIB + 512, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 512, 12), (33 * MIB, 34)],
)
def test_segments_are_of_2_or_20_mib_or_as_large_as_their_request(requested: int, used: int) -> None:
    assert segment_size(requested) == used * MIB


def test_the_lecture_s_network_takes_481_792_bytes() -> None:
    """Its 120,078 parameters in ten tensors, each rounded up; the lecture prints 0.481792 MB after `net.to`."""
    convolutions = [128 * 3 * 5 * 5, 128, 16 * 128 * 5 * 5, 16]
    linear = [120 * 400, 120, 84 * 120, 84, 10 * 84, 10]
    assert sum(convolutions + linear) == 120_078
    allocator = CachingAllocator()
    for numbers in convolutions + linear:
        allocator.allocate(4 * numbers)
    assert allocator.allocated == 481_792
    assert allocator.reserved == 2 * MIB


def test_a_freed_block_is_used_again_and_nothing_is_given_back() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB))
    assert (allocator.allocated, allocator.reserved) == (0, 30 * MIB)
    allocator.allocate(29 * MIB)
    # What is left, 1 MiB, is too little to be split off, and counts as in use.
    assert (allocator.allocated, allocator.reserved) == (30 * MIB, 30 * MIB)


def test_the_best_fit_is_taken_and_the_rest_split_off() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(24 * MIB)
    allocator.free(large)
    allocator.free(small)
    allocator.allocate(20 * MIB)
    assert allocator.reserved == 64 * MIB
    allocator.allocate(40 * MIB)  # the larger one is still whole
    assert allocator.reserved == 64 * MIB
    allocator.allocate(4 * MIB)  # what was left of the smaller one
    assert allocator.reserved == 64 * MIB


def test_neighbours_that_are_free_are_joined() -> None:
    allocator = CachingAllocator()
    parts = [allocator.allocate(4 * MIB) for _ in range(5)]
    assert allocator.reserved == 20 * MIB
    for part in (parts[1], parts[3], parts[2]):
        allocator.free(part)
    allocator.allocate(12 * MIB)
    assert allocator.reserved == 20 * MIB


def test_small_and_large_requests_and_streams_share_no_segments() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB))
    allocator.allocate(1024)
    assert allocator.reserved == 22 * MIB
    allocator.allocate(20 * MIB, stream=1)
    assert allocator.reserved == 42 * MIB


def test_a_full_device_gives_back_whole_segments_before_it_refuses() -> None:
    allocator = CachingAllocator(limit=52 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    kept = allocator.allocate(12 * MIB)  # cut from the 30
    allocator.allocate(20 * MIB)
    with pytest.raises(DoesNotFitError):
        allocator.allocate(32 * MIB)
    allocator.free(kept)
    allocator.allocate(31 * MIB)  # which the 30 are too small for
    assert allocator.reserved == 52 * MIB


def test_expandable_segments_leave_no_gaps_between_sizes() -> None:
    rigid, expandable = CachingAllocator(), CachingAllocator(settings=AllocatorSettings(expandable=True))
    for allocator in (rigid, expandable):
        for size in (30, 34, 38, 42):  # each larger than what was freed before
            allocator.free(allocator.allocate(size * MIB))
    assert rigid.reserved == (30 + 34 + 38 + 42) * MIB
    assert expandable.reserved == 60 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_whatever_happens_the_books_balance(expandable: bool) -> None:
    draw = random.Random(0)
    allocator, stack = CachingAllocator(settings=AllocatorSettings(expandable=expandable)), []
    for _ in range(3000):
        if stack and draw.random() < 0.48:
            allocator.free(stack.pop(draw.randrange(len(stack))))
        else:
            stack.append(allocator.allocate(int(2 ** draw.uniform(4, 25)), stream=draw.randrange(2)))
        assert allocator.allocated == sum(block.size for block in stack) <= allocator.reserved
    spans = sorted((block.address, block.address + block.size) for block in stack)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    for block in stack:
        allocator.free(block)
    assert allocator.allocated == 0


def test_large_blocks_are_not_split_where_that_is_asked_for() -> None:
    plain, requested = CachingAllocator(), CachingAllocator(settings=AllocatorSettings(max_split=64 * MIB))
    for allocator in (plain, requested):
        allocator.free(allocator.allocate(200 * MIB))
        allocator.allocate(30 * MIB)
    # A small request leaves the large block whole; one nearly as large takes it, and a much smaller large one does not.
    assert (plain.reserved, requested.reserved) == (200 * MIB, 230 * MIB)
    requested.allocate(100 * MIB)
    assert requested.reserved == 330 * MIB
    requested.allocate(190 * MIB)
    assert (requested.reserved, requested.allocated) == (330 * MIB, 330 * MIB)


@pytest.mark.parametrize(
    ("size", "given"),
    [(1200, 1536), (2**20, 2**20), (5 * MIB, 5 * MIB), (5 * MIB + 1, 6 * MIB), (33 * MIB, 40 * MIB), (1, 512)],
)
def test_requests_are_rounded_up_to_parts_of_powers_of_two_where_that_is_asked_for(size: int, given: int) -> None:
    """PyTorch's own example: 1200 with 4 divisions of 1024 to 2048 would be 1280; below 4 x 512 it stays at 512s."""
    assert AllocatorSettings(divisions=(4,) * 16).rounded(size) == given
    assert AllocatorSettings().rounded(size) == rounded(size)


def test_intervals_may_be_rounded_otherwise() -> None:
    requested = AllocatorSettings(divisions=(0, 0, 0, 0, 0, 2, *[0] * 10))
    assert requested.rounded(33 * MIB) == 48 * MIB
    assert requested.rounded(65 * MIB) == 65 * MIB
    assert requested.rounded(17 * MIB) == 17 * MIB
