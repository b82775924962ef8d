"""The slowest process is told by its own work, not by the time it waits for others."""

from __future__ import annotations

import pytest

from paceline.telemetry.meter import PHASES
from paceline.trainer.recorder import Slowest, SlowRanks, find_slowest, summarize_ranks


def seconds(**phases: float) -> list[float]:
    return [phases.get(phase, 0.0) for phase in PHASES]


# Rank 1 is late, so the others wait for it: in the reduction, and in the backward pass if that hides it.
QUICK, LATE = (seconds(forward=f, backward=1.0, communication=c, optimizer=0.1) for f, c in ((1.0, 3.0), (3.0, 1.0)))
IN_FORWARD = [QUICK, LATE, QUICK]
HIDDEN = [seconds(forward=1.0, backward=4.0), seconds(forward=3.0, backward=2.0), seconds(forward=1.0, backward=4.0)]
IN_BACKWARD = [seconds(forward=1.0, backward=b, communication=c) for b, c in ((2.0, 3.0), (5.0, 0.0), (2.0, 3.0))]
IN_DATA = [
    seconds(data_wait=0.5, forward=1.0, backward=1.0, communication=6.0),
    seconds(data_wait=6.5, forward=1.0, backward=1.0),
]


@pytest.mark.parametrize(
    ("measured", "waits_in", "expected"),
    [
        (IN_FORWARD, (), Slowest(1, "forward", 4.1 / 2.1, 4.1 - 2.1)),
        (HIDDEN, ("backward",), Slowest(1, "forward", 5 / 3, 2.0)),
        (IN_DATA, (), Slowest(1, "data_wait", 8.5 / 2.5, 6.0)),
        # Not in passes in which all wait.
        (HIDDEN, ("forward", "backward"), Slowest(0, "data_wait", 1.0, 0.0)),
        (IN_DATA, ("forward", "backward"), Slowest(1, "data_wait", 8.5 / 2.5, 6.0)),
        (IN_BACKWARD, (), Slowest(1, "backward", 2.0, 3.0)),
        ([seconds(forward=1.0)], ("backward",), None),
        ([seconds(), seconds()], ("backward",), None),
    ],
)
def test_the_slowest_is_found(measured: list[list[float]], waits_in: tuple[str, ...], expected: Slowest | None) -> None:
    assert find_slowest(measured, blocking=waits_in) == expected


@pytest.mark.parametrize("phase", ["h2d", "optimizer", "ema", "host"])
def test_in_any_part_that_is_its_own(phase: str) -> None:
    quick = seconds(forward=1.0, communication=1.0, logging=2.0)
    assert find_slowest([quick, seconds(forward=1.0, **{phase: 1.0})], blocking=()) == Slowest(1, phase, 2.0, 1.0)


def test_how_much_they_differ() -> None:
    found = summarize_ranks(IN_FORWARD, excluded=("h2d",))
    assert list(found) == [phase for phase in PHASES if phase != "h2d"]
    assert found["forward"] == {"minimum": 1.0, "median": 1.0, "maximum": 3.0, "least_rank": 0, "most_rank": 1}
    assert found["communication"] == {"minimum": 1.0, "median": 3.0, "maximum": 3.0, "least_rank": 1, "most_rank": 0}


def test_told_once_when_it_stays_so() -> None:
    slow, fast = Slowest(1, "forward", 1.6, 1.0), Slowest(1, "forward", 1.4, 1.0)
    other = Slowest(2, "forward", 1.6, 1.0)
    ranks = SlowRanks()
    heard = [ranks.is_new(each, n) for n, each in enumerate((slow, slow, fast, slow, slow, slow, slow, fast, slow))]
    assert heard == [False] * 5 + [True] + [False] * 3
    asked = (other, slow, other, other, fast, other, other, other)
    assert [ranks.is_new(each, 10 + n) for n, each in enumerate(asked)] == [False] * 7 + [True]


def test_a_short_run_is_no_evidence() -> None:
    # Eight steps of a quarter of a second, in which the others wait for less than two seconds; then a longer run, whose
    # first record after a resume counts for no steps.
    slow, ranks = Slowest(1, "forward", 9.0, 0.2), SlowRanks()
    assert not any(ranks.is_new(slow, step) for step in range(8))
    resumed = SlowRanks()
    assert [resumed.is_new(slow, step) for step in (1000, 1004, 1008, 1012)] == [False, False, False, True]
