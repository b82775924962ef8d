"""What a step's storages become under accumulation, DDP and FSDP: worked out by hand on a step of a few storages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline_advisor.memory.allocations import COPIES, ROOM, Allocation
from paceline_advisor.memory.allocator import MIB, AllocatorSettings
from paceline_advisor.memory.job import fits, peak_of
from paceline_advisor.memory.trace import EVALUATION, FIRST, REHEARSAL, START, STEP, Steps, StepTrace
from paceline_advisor.memory.variants import (
    Sharding,
    accumulated,
    buckets,
    front,
    in_16_bits,
    under_fsdp,
    update_start,
    with_gradients,
    with_permanent,
    with_temporary,
    with_warm_up,
)

PASSES = (3, 4, 5, 6, ~4, 7, ~5, 8, ~3, ~7)


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
    parts = {START: (0, 1, 2), STEP: (*PASSES, ~6, ~8)}
    return StepTrace(micro_batch=samples, allocations=tuple(made), parts=parts)


def run(samples: int = 1, evaluation: int = 0) -> StepTrace:
    """The same from its first step on, whose update makes the optimizer's state, with an evaluation of some MiB."""
    plain = step(samples)
    state = replace(plain.allocations[2], phase="update")
    scored = Allocation(evaluation * MIB, "activations", EVALUATION, "first", "mm")
    allocations = (*plain.allocations[:2], state, *plain.allocations[3:], scored)
    parts = {START: (0, 1), FIRST: (*PASSES, 2, ~6, ~8), STEP: plain.parts[STEP], EVALUATION: (9, ~9)}
    return StepTrace(micro_batch=samples, allocations=allocations, parts=parts)


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
        micro_batch=1, allocations=(Allocation(100, "weights"), Allocation(700, "weights")), parts={START: (0, 1)}
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


def test_the_state_that_the_first_step_makes_is_there_from_then_on() -> None:
    """A larger batch than the state leaves room for fits the first step, and no other."""
    large = run(8)
    peak = peak_of(large, caching=False)
    assert peak.parts[FIRST] == (10 + 3 * 24 + 4) * MIB
    assert peak.parts[STEP] == peak.allocated == (30 + 3 * 24 + 4) * MIB
    assert fits(large, peak.allocated, caching=False)
    assert not fits(large, peak.parts[STEP] - 1, caching=False)


def test_an_evaluation_can_be_the_highest_point() -> None:
    peak = peak_of(run(1, evaluation=50), caching=False)
    assert (peak.allocated, peak.phase) == ((30 + 50) * MIB, EVALUATION)
    assert peak.parts[STEP] == (30 + 3 + 4 + 3 + 6) * MIB
    assert not fits(run(1, evaluation=50), 79 * MIB, caching=False)


def test_what_an_evaluation_leaves_behind_is_no_use_to_the_next_step() -> None:
    """Its segments are given back before anything is refused, but until then they are PyTorch's."""
    peak, without = peak_of(run(16, evaluation=60), caching=True), peak_of(run(16), caching=True)
    assert peak.allocated == without.allocated
    assert (peak.reserved or 0) > (without.reserved or 0)
    assert fits(run(16, evaluation=60), (peak.reserved or 0) - 10 * MIB, caching=True)


def test_the_first_batch_goes_through_twice_where_processes_rehearse() -> None:
    requested = with_warm_up(run(2))
    assert [name for name, _ in requested.played] == [START, REHEARSAL, FIRST, STEP, EVALUATION, STEP]
    peak = peak_of(requested, caching=False)
    # No state yet, as its last gradient comes.
    assert peak.parts[REHEARSAL] == (10 + 6 + 6 + 4 + 6) * MIB
    assert 2 not in requested.parts[REHEARSAL]


def test_what_is_made_again_takes_its_own_place() -> None:
    again = StepTrace(micro_batch=1, allocations=(Allocation(MIB, "other"),), parts={STEP: (0,), EVALUATION: ()})
    assert peak_of(again, caching=False).allocated == MIB


def test_room_for_kernels_is_reserved_and_not_allocated() -> None:
    plain = step()
    count = len(plain.allocations)
    more = replace(plain, allocations=(*plain.allocations, Allocation(100 * MIB, ROOM, "forward")))
    more = replace(more, parts={**more.parts, STEP: (3, count, ~count, *more.parts[STEP][1:])})
    without, peak = peak_of(plain, caching=True), peak_of(more, caching=True)
    assert (peak.allocated, peak.causes) == (without.allocated, without.causes)
    assert (peak.reserved or 0) >= 100 * MIB
    assert fits(plain, 100 * MIB, caching=True)
    assert not fits(more, 100 * MIB, caching=True)


def test_accumulated_gradients_are_there_in_the_second_micro_batch() -> None:
    plain, added = peak_of(step(8), caching=False), peak_of(accumulated(step(8)), caching=False)
    # At the plain peak both layers' activations and one gradient's share are there; with accumulation 10 MiB more of
    # the first micro-batch, and a new gradient only until it is added.
    assert plain.allocated == (30 + 3 * 24 + 4) * MIB
    assert added.allocated == (30 + 3 * 24 + 4 + 10) * MIB
    assert added.causes["gradients"] == 10 * MIB
    # Of one sample: the highest point is where the second layer's new gradient has come, and it is gone by the next.
    assert peak_of(accumulated(step(1)), caching=False).allocated == (30 + 10 + 3 * 3 + 4) * MIB
    # They go with the step.
    assert peak_of(accumulated(run(1)), caching=False).parts[FIRST] == (10 + 10 + 20) * MIB


def test_what_gradients_are_added_to_is_there_all_along() -> None:
    added = peak_of(with_gradients(step(8), [Allocation(10 * MIB, "gradients")]), caching=False)
    assert added.allocated == (30 + 3 * 24 + 4 + 10) * MIB
    assert added.parts[START] == 40 * MIB


def sizes(trace: StepTrace, cap_mb: int) -> list[float]:
    return [bucket.size / MIB for bucket, _ in buckets(trace, cap_mb)]


def test_buckets_hold_all_gradients_in_the_order_they_come() -> None:
    assert sizes(step(), 25) == [4, 6]
    assert [numbers for _, numbers in buckets(step(), 25)] == [[6], [8]]
    many = StepTrace(
        micro_batch=1, allocations=tuple([Allocation(MIB // 2, "gradients")] * 60), parts={STEP: tuple(range(60))}
    )
    assert sizes(many, 25) == [1.0, 25.0, 4.0]


def test_what_is_compressed_is_there_until_the_update() -> None:
    """Each bucket's 16 bits lie beside it until all were sent; the network's last gradient finds them there."""
    complete = [bucket for bucket, _ in buckets(run(), 25)]
    sent = peak_of(with_gradients(in_16_bits(run(), 25), complete), caching=False)
    # As the last gradient comes: weights, state and buckets, an activation and its gradient, half of the first bucket.
    assert sent.allocated == (40 + 3 + 3 + 2 + 6) * MIB


def test_what_comes_before_a_part_or_an_update_goes_at_once() -> None:
    large = [Allocation(90 * MIB, "gradients")]
    updating = with_temporary(run(), large, FIRST, STEP, begin=update_start, end=update_start)
    assert peak_of(updating, caching=False).parts == {
        START: 10 * MIB,
        FIRST: (10 + 10 + 90) * MIB,
        STEP: (30 + 3 + 3 + 10 + 90) * MIB,  # its update makes nothing: after the last gradient, to be sure
        EVALUATION: 30 * MIB,
    }
    scoring = with_temporary(run(), large, EVALUATION, begin=front, end=front)
    assert peak_of(scoring, caching=False).parts[EVALUATION] == 120 * MIB


def test_an_allocator_that_is_set_otherwise_is_played_so() -> None:
    odd = StepTrace(micro_batch=1, allocations=(Allocation(33 * MIB, "weights"),), parts={START: (0,)})
    assert peak_of(odd, caching=True, allocator=AllocatorSettings(divisions=(2,) * 16)).allocated == 48 * MIB
    assert not fits(odd, 40 * MIB, caching=True, allocator=AllocatorSettings(divisions=(2,) * 16))


def test_fsdp_leaves_each_process_its_part() -> None:
    requested = Sharding(shards=4, gathered=18 * MIB, gradients=12 * MIB, shares={4 * MIB: 2 * MIB})
    spread = under_fsdp(step(), requested)
    stack = {
        cause: sum(each.size for each in spread.allocations if each.cause == cause)
        for cause in ("weights", "optimizer", "gradients", "gathered weights")
    }
    assert stack == {
        "weights": 6 * MIB // 4 + 2 * MIB,
        "optimizer": 20 * MIB // 4,
        "gradients": 6 * MIB // 4 + 2 * MIB,
        "gathered weights": 30 * MIB,
    }


@pytest.mark.parametrize("is_cast", [False, True])
def test_fsdp_keeps_no_16_bit_copies(is_cast: bool) -> None:
    """A copy lives until the next allocation, and not until the backward pass; gathered in 16 bits, there is none."""
    forward, backward = Allocation(4 * MIB, "activations", "forward"), Allocation(MIB, "temporary", "backward")
    copy = Allocation(6 * MIB, COPIES, "forward")
    events = (0, 1, 2, 3, 4, ~4, ~3, ~2, ~1, ~0)
    allocations = (copy, forward, copy, forward, backward)
    kept = StepTrace(micro_batch=1, allocations=allocations, parts={START: (), STEP: events})
    shared = under_fsdp(kept, Sharding(shards=2, gathered=0, gradients=0, is_cast=is_cast))
    assert peak_of(kept, caching=False).allocated == 21 * MIB
    assert peak_of(shared, caching=False).allocated == (9 if is_cast else 10) * MIB


@pytest.mark.parametrize("samples", [3, 7, 64])
def test_steps_of_all_sizes_follow_from_two(samples: int) -> None:
    def done(size: int) -> StepTrace:
        raise AssertionError(size)

    steps = Steps(step(2), step(4), done)
    assert steps.is_linear
    assert steps(samples) == step(samples)


def test_steps_that_do_different_things_are_done_each() -> None:
    requested: list[int] = []

    def done(size: int) -> StepTrace:
        requested.append(size)
        return step(size)

    steps = Steps(step(2), with_permanent(step(4), [Allocation(1, "temporary", "forward")]), done)
    assert not steps.is_linear
    assert (steps(8), steps(8)) == (step(8), step(8))
    assert requested == [8]


def test_a_step_that_is_done_and_differs_is_gone_by() -> None:
    """Its activations are half as large again as the line through two others has it: the line is another then."""

    def done(size: int) -> StepTrace:
        grown = step(size)
        more = tuple(
            replace(each, size=3 * each.size // 2) if each.cause == "activations" else each
            for each in grown.allocations
        )
        return replace(grown, allocations=more)

    steps = Steps(step(2), step(4), done)
    assert steps(20) == step(20)
    assert not steps.confirm(20)
    assert steps(20) == done(20)
    assert step(11).allocations[3].size < steps(11).allocations[3].size <= done(11).allocations[3].size
    assert Steps(step(2), step(4), step).confirm(20)
