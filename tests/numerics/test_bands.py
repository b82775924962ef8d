"""Bugs that let a training go on: are they seen by the band of the recipe, and is a further seed left in peace?"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.insight.bands.judge import Verdict, check_run

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from planted import BUGS, Bug, train_with  # the benchmarks are no package


def _trained(folder: Path, seed: int, until: str | None = None, bug: str = "") -> Verdict:
    return check_run(train_with(BUGS[bug] if bug else Bug(), seed, folder, until))


def test_a_wrong_mean_is_seen_after_two_epochs(tmp_path: Path) -> None:
    found = _trained(tmp_path / "run", 7, until="46 steps", bug="wrong mean")
    assert {"mean of the inputs", "spread of the inputs"} <= {each.curve for each in found.departures}
    # The network normalises inside, and learns as if nothing were wrong.
    assert "training loss" not in {each.curve for each in found.departures}
    assert "The recipe is theirs" in found.note


def test_a_missing_warm_up_is_seen_after_two_epochs(tmp_path: Path) -> None:
    found = _trained(tmp_path / "run", 7, until="46 steps", bug="no warm-up")
    assert {"learning rate", "training loss"} <= {each.curve for each in found.departures}
    assert found.note.endswith("schedule.warmup differs from the recipe whose band this is.")


@pytest.mark.thorough
def test_one_label_in_a_hundred_that_is_wrong_is_seen(tmp_path: Path) -> None:
    found = _trained(tmp_path / "run", 7, bug="wrong labels")
    assert "training loss" in {each.curve for each in found.departures}
    assert "The recipe is theirs" in found.note


@pytest.mark.thorough
def test_a_further_seed_stays_inside(tmp_path: Path) -> None:
    found = _trained(tmp_path / "run", 1004)
    assert found.departures == ()
    assert found.points == 46


@pytest.mark.thorough
def test_two_processes_and_other_threads_stay_inside(tmp_path: Path) -> None:
    """Bits differ, and statistics of batches are over half as many images; curves hardly do."""
    from paceline.cli.main import run

    asked = ["digits", "seed=1001", "telemetry.report=false", "telemetry.trackers=[]", "telemetry.log_every=5 steps"]
    assert run(["train", *asked, "--processes", "2", "--run-dir", str(tmp_path / "run")]) == 0
    found = check_run(tmp_path / "run")
    assert found.points == 40
    # The band is of runs of one process: with half the images in each statistic of BatchNorm a curve may touch its
    # edge, as this seed's does, by 2 % of half its width. What is wrong leaves it by far more.
    assert [each for each in found.departures if each.excess >= 1.25] == []


@pytest.mark.thorough
def test_a_run_that_was_stopped_is_judged_as_a_whole(tmp_path: Path) -> None:
    """And another further seed stays inside."""
    first = _trained(tmp_path / "run", 1001, until="100 steps")
    whole = _trained(tmp_path / "run", 1001)
    assert (first.departures, whole.departures) == ((), ())
    assert first.points < whole.points == 46
