"""A search makes ordinary runs, stops bad ones early, and survives a kill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RecipeError, RunDirectoryError, TrainingError
from paceline.records.reader import read_events
from paceline.records.run_directory import RunDirectory
from paceline.trainer.run_lock import RunLock

pytest.importorskip("optuna")

from paceline_advisor.commands import Tune
from paceline_advisor.tuning import tune as module


@pytest.fixture
def requested(tiny_recipe: Path, tmp_path: Path) -> Callable[..., Tune]:
    """``asked("optimizer.lr: [0.1, 0.2]", trials=3)``; each evaluates twenty times."""

    def make(search: str, *overrides: str, **more: Any) -> Tune:
        (tmp_path / "search.yaml").write_text(search)
        words = ("train.duration=200 steps", "evaluate.every=10 steps", "checkpoint.every=off", *overrides)
        given = {"trials": 2, "output": tmp_path / "out", **more}
        return Tune(recipe=str(tiny_recipe), overrides=words, search=tmp_path / "search.yaml", **given)

    return make


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ("", "must map recipe keys"),
        ("- 1", "must map recipe keys"),
        ("optimizer.lr: 0.1", "found 0.1"),
        ("optimizer.lr: []", "a choice must be"),
        ("optimizer.lr: [[1]]", "a choice must be"),
        ("optimizer.lr: {low: 1}", "found {'low': 1}"),
        ("optimizer.lr: {low: 1, high: 2, by: 3}", "'by': 3"),
        ("optimizer.lr: {low: 2, high: 1}", "low must be below high"),
        ("optimizer.lr: {low: a, high: b}", "not numbers"),
        ("optimizer.lr: {low: 0, high: 1, log: true}", "low above 0"),
        ("optimizer.rate: [1]", "optimizer.rate"),
        ("optimizer.lr: {low: -1, high: 1}", "optimizer.lr: -1"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_wrong_search_is_refused_before_the_first_trial(
    requested: Callable[..., Tune], search: str, message: str
) -> None:
    with pytest.raises(RecipeError, match=r"search\.yaml") as raised:
        module.tune(requested(search), lambda _: None)
    assert message in str(raised.value)
    assert not requested(search).output.exists()


def test_a_bad_trial_is_stopped_and_another_search_is_refused(
    requested: Callable[..., Tune], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_UNPRUNED_TRIALS", 1)
    # Rates of the second kind learn nothing; a run of it is long enough to be stopped.
    search = requested("optimizer.lr: [0.05, 1.0e-12]", "train.duration=2000 steps", trials=4)
    report = module.tune(search, lambda _: None)
    states = [(each.params["optimizer.lr"], each.state.name) for each in report.trials]
    good = next(number for number, (rate, _) in enumerate(states) if rate == 0.05)
    assert {rate for rate, _ in states} == {0.05, 1e-12}
    assert all(state == ("COMPLETE" if rate == 0.05 else "PRUNED") for rate, state in states[good:]), states
    assert report.ranked[0].params == {"optimizer.lr": 0.05}
    assert report.to_json()["best"] == report.ranked[0].user_attrs["run"]
    with pytest.raises(RunDirectoryError, match="another search"):
        module.tune(requested("optimizer.lr: [0.1]", trials=9), lambda _: None)


def test_a_torn_record_of_the_journal_is_removed(requested: Callable[..., Tune]) -> None:
    short = ("train.duration=4 steps", "evaluate.every=2 steps")
    search, lines = requested("optimizer.lr: [0.1, 0.2]", *short, trials=1), list[str]()
    first = module.tune(search, lines.append)
    journal = search.output / module.JOURNAL
    records = journal.read_bytes()
    tails = (b'{"op_code": 6, "worker_id": "x", "tri', b'{"op_code": 6}', bytes(100), b'{"op_c\n', b"\0\n\0")
    for torn in (records[:-20], *(records + each for each in tails)):
        journal.write_bytes(torn)
        (search.output / "trials.log.lock").symlink_to(journal)  # of a search that was killed
        lines.clear()
        again = module.tune(search, lines.append)
        assert [each.value for each in again.trials] == [each.value for each in first.trials]
        assert "its last record was incomplete and is removed" in lines[0]
    journal.write_bytes(b"x" + records)
    with pytest.raises(RunDirectoryError, match=r"trials\.log' is damaged in line 1; give another --output"):
        module.tune(search, lines.append)


def test_two_searches_at_once_are_refused(requested: Callable[..., Tune]) -> None:
    search = requested("optimizer.lr: [0.1]")
    search.output.mkdir()
    other = RunLock(RunDirectory(search.output))
    with pytest.raises(RunDirectoryError, match=r"another process is training in '.*out'"):
        module.tune(search, lambda _: None)
    other.release()


def test_trials_are_compared_at_their_end_also_by_a_loss(requested: Callable[..., Tune]) -> None:
    short = ("evaluate.metric=loss", "train.duration=60 steps", "train.until=30 steps")
    search = requested("optimizer.lr: {low: 0.01, high: 0.1, log: true}", *short, trials=1)
    # What is edited or removed meanwhile is for the next search.
    report = module.tune(search, lambda _: search.search.unlink(missing_ok=True))
    (trial,) = report.trials
    events = list(read_events(search.output / "trial-000" / "events.jsonl", kinds={"evaluation"}))
    losses = {step: min(each["loss"] for each in events if each["step"] == step) for step in (10, 60)}
    assert trial.value == losses[60] != losses[10]
    (chart,) = report.__paceline__().on_page
    assert chart.layout["xaxis"]["type"] == "log"


def test_a_recipe_that_changes_meanwhile_ends_the_search(
    requested: Callable[..., Tune], tiny_recipe: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(tiny_recipe.read_text())

    def edited(line: str) -> None:
        if line.startswith("  "):  # the result of a trial
            mine.write_text(tiny_recipe.read_text() + "seed: 7\n")

    search = replace(requested("optimizer.lr: [0.05]", "train.duration=20 steps"), recipe=str(mine))
    with pytest.raises(RecipeError, match=r"mine\.yaml has changed"):
        module.tune(search, edited)
    assert [path.name for path in sorted(search.output.glob("trial-*"))] == ["trial-000"]


def test_a_search_without_held_out_samples_says_so(requested: Callable[..., Tune]) -> None:
    search = requested("optimizer.lr: [0.05]", trials=3)
    search = replace(search, overrides=("train.duration=4 steps", "data.validation_fraction=0"))
    with pytest.raises(TrainingError, match="the first 3 trials failed: it was never evaluated"):
        module.tune(search, lambda _: None)
