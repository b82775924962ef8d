"""What of the communication is hidden behind computing."""

from __future__ import annotations

import pytest

from paceline_advisor.formulas.parallel_step import Gradient, Unit, buckets, gather_around, reduce_behind

MIB = 2**20


def test_buckets_close_when_they_reach_their_cap_and_the_first_is_small() -> None:
    found = buckets([Gradient(MIB / 2, (index + 1) / 10) for index in range(10)], 2 * MIB)
    assert [each.size_bytes / MIB for each in found] == [1.0, 2.0, 2.0]
    assert [each.ready for each in found] == pytest.approx([0.2, 0.6, 1.0])


def test_a_large_gradient_is_not_cut() -> None:
    found = buckets([Gradient(MIB / 4, 0.1), Gradient(100 * MIB, 0.9), Gradient(MIB, 1.0)], 25 * MIB)
    assert [each.size_bytes / MIB for each in found] == [100.25, 1.0]


def test_buckets_lose_no_byte_and_follow_torch() -> None:
    # torch's own assignment, from its C++.
    import torch
    from torch.distributed import _DEFAULT_FIRST_BUCKET_BYTES, _compute_bucket_assignment_by_size

    sizes = [300, 70_000, 2_000_000, 12, 9_000_000, 4_000_000, 1_000_000, 40]
    tensors = [torch.empty(size, device="meta") for size in sizes]
    tensors = [torch.empty(size) for size in sizes] if tensors[0].is_meta else tensors
    cap = 25 * MIB
    assigned, _ = _compute_bucket_assignment_by_size(tensors, [_DEFAULT_FIRST_BUCKET_BYTES, cap])
    expected = [sum(sizes[index] * 4 for index in bucket) for bucket in assigned]
    found = buckets([Gradient(size * 4, (at + 1) / len(sizes)) for at, size in enumerate(sizes)], cap)
    assert [each.size_bytes for each in found] == expected


def test_what_fits_behind_the_backward_pass_is_hidden_but_for_the_last_bucket() -> None:
    messages = [Gradient(1, 0.25), Gradient(1, 0.5), Gradient(1, 1.0)]
    found = reduce_behind(messages, 8.0, lambda size: size)
    assert found.busy_seconds == 3
    assert found.exposed_seconds == pytest.approx(1)
    assert found.stretched_seconds == 0


def test_messages_that_take_longer_than_computing_queue_up() -> None:
    messages = [Gradient(1, 0.5), Gradient(1, 0.75), Gradient(1, 1.0)]
    found = reduce_behind(messages, 4.0, lambda _: 3.0)
    # The first begins at 2, the last ends at 11: 7 seconds after the pass.
    assert found.exposed_seconds == pytest.approx(7)


def test_a_message_under_way_slows_computing() -> None:
    messages = [Gradient(1, 0.5), Gradient(0, 1.0)]
    found = reduce_behind(messages, 8.0, lambda size: 2 * size, taken=0.25)
    # Two seconds at three quarters of the speed: half a second of work is left over.
    assert found.stretched_seconds == pytest.approx(0.5)
    assert found.exposed_seconds == 0


def test_where_sending_takes_all_of_the_device_nothing_is_hidden() -> None:
    messages = [Gradient(1, 0.25), Gradient(1, 0.5), Gradient(1, 1.0)]
    found = reduce_behind(messages, 8.0, lambda size: size, taken=1.0)
    assert found.exposed_seconds + found.stretched_seconds == pytest.approx(3, rel=0.01)


def test_fsdp_waits_for_its_first_weights_and_its_last_gradients() -> None:
    units = [Unit(1, 1, 0.5), Unit(1, 1, 0.5)]
    found = gather_around(units, 10, 20, lambda size: size)
    # Two gathers a pass, and two reductions: all hidden but the first gather of each pass and the last reduction.
    assert found.busy_seconds == 6
    assert found.exposed_seconds == pytest.approx(3)


def test_fsdp_that_keeps_its_weights_gathers_them_once() -> None:
    units = [Unit(1, 1, 0.5), Unit(1, 1, 0.5)]
    found = gather_around(units, 10, 20, lambda size: size, regathered=False)
    assert found.busy_seconds == 4
    assert found.exposed_seconds == pytest.approx(2)


def test_fsdp_on_a_slow_link_is_bound_by_it() -> None:
    units = [Unit(1, 1, 0.5), Unit(1, 1, 0.5)]
    found = gather_around(units, 1, 2, lambda size: 100 * size)
    assert found.busy_seconds == 600
    assert 3 + found.exposed_seconds == pytest.approx(600, rel=0.01)
