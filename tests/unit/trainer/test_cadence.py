"""Checkpoints by the clock: every so often, as a save's cost and the failures ask for, and before a job ends."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
from run_directories import saved_steps

from paceline.checkpoint.publish import Cadence, job_end_time, young_interval
from paceline.parsing.units import Duration, TimeSpan
from paceline.recipe.running import Checkpoint


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def due_after(cadence: Cadence, clock: Clock, limit: int = 10_000) -> int:
    """Whole seconds until a save is due."""
    for seconds in range(limit):
        if cadence.is_due():
            clock.now -= seconds
            return seconds
        clock.now += 1
    return limit


def test_a_time_is_counted_from_the_save_before(clock: Clock) -> None:
    cadence = Cadence(Checkpoint(every=TimeSpan(2, "minutes")), clock=clock)
    assert due_after(cadence, clock) == 120
    clock.now += 500
    assert cadence.is_due()
    assert cadence.record_save(3.0) is None
    assert due_after(cadence, clock) == 120


@pytest.mark.parametrize("every", [Duration(3, "steps"), None])
def test_steps_and_off_are_never_due_by_the_clock(clock: Clock, every: Duration | None) -> None:
    assert due_after(Cadence(Checkpoint(every=every), clock=clock), clock, 5000) == 5000


def test_auto_is_youngs_optimum_of_what_the_save_before_cost(clock: Clock) -> None:
    cadence = Cadence(Checkpoint(every="auto", mtbf=TimeSpan(2, "hours")), clock=clock)
    assert due_after(cadence, clock) == 60
    news = cadence.record_save(0.5)
    assert news is not None
    assert "0.50 s" in news
    assert "1 min 25 s" in news
    assert due_after(cadence, clock) == math.ceil(math.sqrt(2 * 0.5 * 7200))
    assert cadence.record_save(2.0) is None
    assert due_after(cadence, clock) == math.ceil(math.sqrt(2 * 2.0 * 7200))


@pytest.mark.parametrize("cost", [0.01, 0.5, 10.0])
def test_youngs_interval_loses_least(cost: float) -> None:
    """Time lost per second: a save's cost, and half an interval at each failure."""
    mtbf = 7200.0

    def lost(interval: float) -> float:
        return cost / interval + interval / 2 / mtbf

    best = young_interval(cost, mtbf)
    assert all(lost(best) < lost(best * factor) for factor in (0.5, 0.9, 1.1, 2))


def test_auto_leaves_the_disk_as_much_time_as_it_takes(clock: Clock) -> None:
    cadence = Cadence(Checkpoint(every="auto", mtbf=TimeSpan(1, "minutes")), clock=clock)
    cadence.record_write(300.0)
    cadence.record_save(0.001)
    assert due_after(cadence, clock) == 600


@pytest.mark.parametrize("every", [Duration(1, "epochs"), TimeSpan(9, "hours"), "auto"])
def test_a_job_that_is_ended_at_a_known_time_saves_once_before(clock: Clock, every: Any) -> None:
    cadence = Cadence(
        Checkpoint(every=every, **({"mtbf": TimeSpan(9000, "hours")} if every == "auto" else {})),
        end_time=time.time() + 3600,
        clock=clock,
    )
    cadence.record_write(20.0)
    cadence.record_save(50.0)
    assert due_after(cadence, clock) == pytest.approx(3600 - 60 - 3 * 20, abs=2)
    clock.now += 3600 - 60
    cadence.record_save(50.0)
    assert not cadence.is_due()


def test_a_job_that_is_ended_saves_nothing_if_that_is_off(clock: Clock) -> None:
    cadence = Cadence(Checkpoint(every=None), end_time=time.time() + 100, clock=clock)
    assert due_after(cadence, clock, 500) == 500


def test_slurm_says_when_a_job_ends() -> None:
    assert job_end_time({"SLURM_JOB_END_TIME": "1767225600"}) == 1767225600
    assert job_end_time({"SLURM_JOB_END_TIME": "0"}) is None
    assert job_end_time({}) is None


def test_saving_by_the_clock_changes_nothing_else(train_tiny: Callable[..., Any]) -> None:
    long = {"train.duration": "120 steps", "evaluate.every": "off"}
    often = train_tiny("often", {**long, "checkpoint.every": "0.001 seconds", "checkpoint.keep": 99})
    never = train_tiny("never", {**long, "checkpoint.every": "off"})
    steps = saved_steps(often.run_dir)
    assert steps[0] == 1
    assert len(steps) > 2
    # A vote may be heard two steps late, and must not be heard twice; the last step is always saved.
    assert all(after - before > 2 for before, after in itertools.pairwise(steps[:-1]))
    assert often.summary.weights_sha256 == never.summary.weights_sha256
