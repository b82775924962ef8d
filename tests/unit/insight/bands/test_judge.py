"""What is said of a run that left its band, and of one that did not?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.insight.bands import judge
from paceline.insight.bands.band import make_band, write_band
from paceline.insight.bands.judge import check_run, note_at_the_end

RunMaker = Callable[..., Path]


@pytest.fixture
def band(make_run: RunMaker, tmp_path: Path) -> Path:
    path = tmp_path / "b.json"
    write_band(make_band([make_run(seed) for seed in range(100, 108)]), path)
    return path


def _times(factor: float, key: str, after: int = 0) -> Callable[[int, dict[str, Any]], dict[str, Any]]:
    def change(step: int, record: dict[str, Any]) -> dict[str, Any]:
        return {**record, key: record[key] * factor} if key in record and step > after else record

    return change


def test_another_seed_is_inside(make_run: RunMaker, band: Path) -> None:
    found = check_run(make_run(7), band)
    assert (found.departures, found.note, found.differences, found.why_not) == ((), "", (), "")
    assert found.points == 6 * 5 + 4 * 2
    assert found.runs == 8


def test_the_first_point_outside_is_named(make_run: RunMaker, band: Path) -> None:
    found = check_run(make_run(7, change=_times(1.2, "loss", after=80)), band)
    assert found.departures[0].first_step == 81
    assert found.departures[0].excess > 1
    assert found.note.startswith("left the band of 8 runs of mine: ")
    assert "in steps 81 to 160, theirs 0." in found.note
    assert "The recipe is theirs" in found.note
    assert "\n" not in found.note


@pytest.mark.parametrize(
    ("key", "factor", "curve"), [("lr", 1.2, "learning rate"), ("input_std", 1.2, "spread of the inputs")]
)
def test_what_no_seed_decides_may_hardly_differ(
    make_run: RunMaker, band: Path, key: str, factor: float, curve: str
) -> None:
    found = check_run(make_run(7, change=_times(factor, key)), band)
    assert {each.curve for each in found.departures} == {curve}
    assert not check_run(make_run(8, change=_times(1.02, key)), band).departures


def test_what_differs_is_named_and_what_changes_no_curve_is_not(make_run: RunMaker, band: Path) -> None:
    asked = {"optimizer": {"lr": 2.0}, "train": {"precision": "bf16"}, "parallel": {"threads": 3}}
    found = check_run(make_run(7, change=_times(2.0, "loss"), **asked), band)
    assert found.differences == ("optimizer.lr",)
    assert found.note.endswith("optimizer.lr differs from the recipe whose band this is.")


def test_a_run_that_is_not_far_is_not_judged(make_run: RunMaker, band: Path) -> None:
    found = check_run(make_run(7, until=10, change=_times(5.0, "loss")), band)
    assert found.points == 0
    assert "too early" in found.why_not
    assert found.note == ""
    # A window on, it is.
    assert check_run(make_run(8, until=20, change=_times(5.0, "loss")), band).departures


def test_other_records_of_the_norm_are_not_compared(make_run: RunMaker, band: Path) -> None:
    asked = {"telemetry": {"log_every": "20 steps"}}
    found = check_run(make_run(7, log_every=20, change=_times(9.0, "grad_norm"), **asked), band)
    assert "gradient norm" not in {each.curve for each in found.departures}
    again = check_run(make_run(8, change=_times(9.0, "grad_norm")), band)
    assert "gradient norm" in {each.curve for each in again.departures}


def test_a_recipe_without_a_band_is_left_in_peace(make_run: RunMaker) -> None:
    run = make_run(7, change=_times(9.0, "loss"))
    assert note_at_the_end(run) == ""
    assert "no band is shipped for 'mine'" in check_run(run).why_not


def test_another_training_of_the_same_name_is_left_in_peace(
    make_run: RunMaker, band: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "shipped_band", lambda name: band)
    run = make_run(7, change=_times(9.0, "loss"), optimizer={"lr": 3.0})
    assert "optimizer.lr differs" in note_at_the_end(run)
    other = make_run(8, change=_times(9.0, "loss"))
    plan = (other / "plan.json").read_text()
    (other / "plan.json").write_text(plan.replace('"train_samples": 1000', '"train_samples": 999'))
    assert note_at_the_end(other) == ""
    assert "train_samples differs: it is another training" in check_run(other).why_not


def test_a_file_that_is_damaged_spoils_no_end(make_run: RunMaker, tmp_path: Path) -> None:
    run = make_run(7)
    (run / "plan.json").write_text("{")
    assert note_at_the_end(run) == ""
    assert note_at_the_end(tmp_path / "nowhere") == ""
