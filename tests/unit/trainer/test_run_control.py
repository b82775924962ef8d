"""Training alone, without checkpoints on the way, and for some steps only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from run_directories import saved_steps

Make = Callable[..., Any]

ALONE = {"evaluate.every": "off", "checkpoint.every": "off"}
OFTEN = {"evaluate.every": "1 steps", "checkpoint.every": "off", "checkpoint.keep": 10}


def test_training_alone_evaluates_nothing_and_saves_its_end(train_tiny: Make, events: Any) -> None:
    run = train_tiny("run", ALONE)
    assert events(run.run_dir, "evaluation") == []
    assert run.summary.metrics == {}
    assert saved_steps(run.run_dir) == [8]


@pytest.mark.parametrize("keep_best", [False, True])
def test_without_checkpoints_the_best_is_saved_if_it_is_to_be_kept(keep_best: bool, train_tiny: Make) -> None:
    run = train_tiny("run", {**OFTEN, "checkpoint.keep_best": keep_best})
    saved = saved_steps(run.run_dir)
    assert {8, run.metrics["best"]["step"]} <= {*saved} if keep_best else saved == [8]


def test_some_steps_of_a_longer_run_take_its_schedule(train_tiny: Make, events: Any) -> None:
    falling = {**ALONE, "schedule.name": "linear", "telemetry.log_every": "1 steps"}
    whole = events(train_tiny("whole", falling).run_dir, "step")
    part = train_tiny("part", {**falling, "train.until": "3 steps"})
    assert (part.status, part.summary.step) == ("stopped", 3)
    assert [each["lr"] for each in events(part.run_dir, "step")] == [each["lr"] for each in whole[:3]]
