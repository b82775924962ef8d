"""The slowest process is told by its own work, not by the time it waits for others."""

from __future__ import annotations

import pytest

from paceline.trainer.slow_ranks import Slowest, SlowRanks, find_slowest

# Seconds in data_wait, forward, backward, optimizer. Rank 1 is late, so the others wait for it, here in the reduction.
IN_FORWARD = [[0.0, 1.0, 4.0, 0.1], [0.0, 3.0, 2.0, 0.1], [0.0, 1.0, 4.0, 0.1]]
IN_DATA = [[0.5, 1.0, 7.0, 0.1], [6.5, 1.0, 1.0, 0.1]]


def test_in_the_forward_pass() -> None:
    assert find_slowest(IN_FORWARD, waits_in=("backward",)) == Slowest(1, "forward", 5 / 3)


def test_in_waiting_for_data() -> None:
    assert find_slowest(IN_DATA, waits_in=("backward",)) == Slowest(1, "data_wait", 8.5 / 2.5)


def test_not_in_passes_in_which_all_wait() -> None:
    assert find_slowest(IN_FORWARD, waits_in=("forward", "backward")) == Slowest(0, "data_wait", 1.0)
    assert find_slowest(IN_DATA, waits_in=("forward", "backward")) == Slowest(1, "data_wait", 8.5 / 2.5)


def test_in_the_backward_pass_where_nobody_waits_in_it() -> None:
    seconds = [[0.0, 1.0, 2.0, 5.0], [0.0, 1.0, 5.0, 2.0], [0.0, 1.0, 2.0, 5.0]]
    assert find_slowest(seconds, waits_in=()) == Slowest(1, "backward", 2.0)


@pytest.mark.parametrize("seconds", [[[1.0] * 4], [[0.0] * 4, [0.0] * 4]], ids=["alone", "nothing measured"])
def test_nobody(seconds: list[list[float]]) -> None:
    assert find_slowest(seconds, waits_in=("backward",)) is None


def test_told_once_when_it_stays_so() -> None:
    slow, fast = Slowest(1, "forward", 1.6), Slowest(1, "forward", 1.4)
    other = Slowest(2, "forward", 1.6)
    ranks = SlowRanks()
    heard = [ranks.is_news(each) for each in (slow, slow, fast, slow, slow, slow, slow, fast, slow, slow, slow)]
    assert heard == [False] * 5 + [True] + [False] * 5
    assert [ranks.is_news(each) for each in (other, slow, other, other, None, other, other, other)] == [False] * 7 + [
        True
    ]
