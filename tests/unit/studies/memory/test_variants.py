"""What a step's storages become under accumulation, DDP and FSDP: worked out by hand on a step of a few storages."""

from __future__ import annotations

import pytest

from paceline.formulas.caching_allocator import MIB
from paceline.studies.memory.replay import fits, peak_of
from paceline.studies.memory.trace import Steps, StepTrace
from paceline.studies.memory.variants import Spread, buckets, fully_sharded, with_gradients, with_more
from paceline.telemetry.allocations import Allocation


def step(samples: int = 1) -> StepTrace:
    """Two layers of 6 and 4 MiB; each keeps 3 MiB for each sample, and a gradient of that size goes back."""
    made = [
        Allocation(6 * MIB, "weights"),
        Allocation(4 * MIB, "weights"),
        Allocation(20 * MIB, "optimizer"),
        Allocation(3 * MIB * samples, "activations", "forward", "first", "mm"),
        Allocation(3 * MIB * samples, "activations", "forward", "second", "mm"),
        Allocation(3 * MIB * samples, "temporary", "backward", "second", "mm"),
        Allocation(4 * MIB, "gradients", "backward", "second", "mm"),
        Allocation(3 * MIB * samples, "temporary", "backward", "first", "mm"),
        Allocation(6 * MIB, "gradients", "backward", "first", "mm"),
    ]
    events = (0, 1, 2, 3, 4, 5, 6, ~4, 7, ~5, 8, ~3, ~7, ~6, ~8)
    return StepTrace(micro_batch=samples, allocations=tuple(made), events=events)


def test_the_peak_is_found_with_its_causes_and_place() -> None:
    peak = peak_of(step(), caching=False)
    # Weights and state 30, then 3 + 3 + 3 + 4, less 3, and 3 more, less 3, and 6 more.
    assert peak.allocated == (30 + 3 + 4 + 3 + 6) * MIB
    assert peak.causes == {
        "weights": 10 * MIB,
        "optimizer": 20 * MIB,
        "activations": 3 * MIB,
        "gradients": 10 * MIB,
        "temporary": 3 * MIB,
    }
    assert (peak.phase, peak.layer, peak.reserved) == ("backward", "first", None)
    assert peak.largest == (("first", 3 * MIB),)


def test_a_gpu_s_allocator_rounds_and_reserves() -> None:
    small = StepTrace(
        micro_batch=1, allocations=(Allocation(100, "weights"), Allocation(700, "weights")), events=(0, 1)
    )
    peak = peak_of(small, caching=True)
    assert (peak.allocated, peak.reserved) == (512 + 1024, 2 * MIB)
    assert peak.causes == {"weights": 800, "rounding": 736}


def test_what_fits_is_what_the_allocator_can_place() -> None:
    needed = peak_of(step(4), caching=True).reserved
    assert needed is not None
    assert fits(step(4), needed, caching=True)
    assert not fits(step(4), needed // 2, caching=True)
    assert fits(step(4), peak_of(step(4), caching=False).allocated, caching=False)
    assert not fits(step(4), peak_of(step(4), caching=False).allocated - 1, caching=False)


def test_accumulated_gradients_are_there_all_along() -> None:
    plain, added = peak_of(step(8), caching=False), peak_of(with_gradients(step(8)), caching=False)
    # At the plain peak both layers' activations and one gradient's share are there; with accumulation 10 MiB more from
    # the beginning, and a new gradient only until it is added.
    assert plain.allocated == (30 + 3 * 24 + 4) * MIB
    assert added.allocated == (30 + 3 * 24 + 4 + 10) * MIB
    assert added.causes["gradients"] == 10 * MIB
    # Of one sample: the highest point is where the second layer's new gradient has come, and it is gone by the next.
    assert peak_of(with_gradients(step(1)), caching=False).allocated == (30 + 10 + 3 * 3 + 4) * MIB


def test_buckets_hold_all_gradients_in_the_order_they_come() -> None:
    assert [each.size for each in buckets(step(), 25)] == [4 * MIB, 6 * MIB]
    large = step()
    many = StepTrace(
        micro_batch=1,
        allocations=(*large.allocations[:6], *[Allocation(MIB // 2, "gradients")] * 60),
        events=large.events,
    )
    assert [each.size / MIB for each in buckets(many, 25)] == [1.0, 25.0, 4.0]


def test_fsdp_leaves_each_process_its_part() -> None:
    spread = fully_sharded(step(), Spread(ways=4, largest=6 * MIB, trained=6 * MIB))
    held = {
        cause: sum(each.size for each in spread.allocations if each.cause == cause)
        for cause in ("weights", "optimizer", "gradients", "gathered weights")
    }
    assert held == {
        "weights": 10 * MIB // 4,
        "optimizer": 20 * MIB // 4,
        "gradients": 10 * MIB // 4,
        "gathered weights": 5 * 6 * MIB,
    }


@pytest.mark.parametrize("samples", [3, 7, 64])
def test_steps_of_all_sizes_follow_from_two(samples: int) -> None:
    def done(size: int) -> StepTrace:
        raise AssertionError(size)

    steps = Steps(step(2), step(4), done)
    assert steps.is_linear
    assert steps(samples) == step(samples)


def test_steps_that_do_different_things_are_done_each() -> None:
    asked: list[int] = []

    def done(size: int) -> StepTrace:
        asked.append(size)
        return step(size)

    steps = Steps(step(2), with_more(step(4), [Allocation(1, "temporary", "forward")]), done)
    assert not steps.is_linear
    assert (steps(8), steps(8)) == (step(8), step(8))
    assert asked == [8]
