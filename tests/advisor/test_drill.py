"""What a drill asks of a recipe, and what it refuses, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import LaunchError, PacelineError, RecipeError
from paceline.recipe.load import load_recipe
from paceline_advisor.commands import Drill
from paceline_advisor.drill.context import DrillContext
from paceline_advisor.drill.faults import _copy_of_a_class, all_faults
from paceline_advisor.drill.study import SHORTEST, drill, shortened


def test_a_shortened_recipe_saves_often_and_keeps_its_own_warm_up_in_percent() -> None:
    recipe = load_recipe("digits", shortened(Drill(recipe="digits", steps=40))).recipe
    assert str(recipe.train.duration) == "40 steps"
    assert (recipe.checkpoint.every.value, recipe.checkpoint.keep) == (4, 3)
    assert str(recipe.evaluate.every) == "10 steps"
    assert recipe.telemetry.log_every.value == 1
    assert recipe.schedule.warmup.unit == "percent"
    assert not recipe.parallel.exact


def test_a_run_is_drilled_to_its_end() -> None:
    requested = Drill(recipe="digits", overrides=("train.until=10 steps",))
    assert load_recipe("digits", (*requested.overrides, *shortened(requested))).recipe.train.until is None


def test_a_warm_up_of_epochs_is_shortened_with_the_run() -> None:
    requested = Drill(recipe="digits", overrides=("schedule.warmup=5 epochs",), steps=40)
    warmup = load_recipe("digits", (*requested.overrides, *shortened(requested))).recipe.schedule.warmup
    assert (warmup.value, warmup.unit) == (4, "steps")


def test_what_the_recipe_switches_off_stays_off() -> None:
    requested = Drill(recipe="digits", overrides=("evaluate.every=off", "checkpoint.keep=7"))
    recipe = load_recipe("digits", (*requested.overrides, *shortened(requested))).recipe
    assert recipe.evaluate.every is None
    assert recipe.checkpoint.keep == 7


def test_several_processes_are_drilled_exactly() -> None:
    assert load_recipe("digits", shortened(Drill(recipe="digits", processes=2))).recipe.parallel.exact


def test_a_run_too_short_to_be_disturbed_is_refused() -> None:
    with pytest.raises(RecipeError, match=f"at least {SHORTEST} steps"):
        shortened(Drill(recipe="digits", steps=SHORTEST - 1))


def test_an_unknown_fault_is_refused_by_name() -> None:
    with pytest.raises(RecipeError, match=r"there is no fault 'kill-al'\. Did you mean 'kill-all'"):
        drill(Drill(recipe="digits", only=("kill-al",)), lambda _: None)


def test_a_rank_of_a_launch_cannot_drill(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="started as one of several"):
        drill(Drill(recipe="digits"), lambda _: None)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="a drill needs /proc to find its processes")
def test_a_run_that_is_refused_once_it_has_been_planned_is_a_mistake_too(tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    (tmp_path / "undisturbed" / "mine.txt").write_text("")
    context = DrillContext(
        recipe="digits", overrides=(), processes=1, steps=SHORTEST, every=2, scratch=tmp_path, limit_seconds=100
    )
    with pytest.raises(PacelineError, match=r"without a fault \(exit code 2\): .* is not empty") as caught:
        context.train_undisturbed(context.undisturbed)
    assert caught.value.exit_code == 2


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="a drill needs /proc to find its processes")
def test_a_run_that_never_resumes_is_a_failure_and_no_error_of_the_drill(tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "events.jsonl").write_text('{"event": "start", "step": 0, "time": 1}\n' * 4)
    context = DrillContext(
        recipe="no_such", overrides=(), processes=1, steps=SHORTEST, every=2, scratch=tmp_path, limit_seconds=100
    )
    _, perform = all_faults(1)["cut-events"]
    assert "the same command again ended with exit code 2" in perform(context, "cut-events").objections[0]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_every_fault_has_a_name_of_its_own_and_says_what_it_does(processes: int) -> None:
    faults = all_faults(processes)
    names = list(faults)
    assert len(names) == 38 + processes
    assert names[0] == "nothing"  # what does not repeat itself cannot be compared
    assert [name for name in names if name.startswith("kill-rank-")] == [f"kill-rank-{i}" for i in range(processes)]
    assert all(does and "\n" not in does for does, _ in faults.values())


@pytest.mark.parametrize("train", ["", "train/"])
def test_only_one_class_of_the_images_is_copied(tmp_path: Path, train: str) -> None:
    images = tmp_path / "photos"
    for place in [f"{train}cat", f"{train}dog", *(["val/cat", "val/dog"] if train else [])]:
        (images / place).mkdir(parents=True)
        (images / place / "a.png").write_text(place)
        (images / place / ".thumbnails").mkdir()  # not an image: it is ignored
    copies = _copy_of_a_class(images, tmp_path / "copy")
    assert [path.relative_to(tmp_path / "copy") for path in copies] == [Path(f"{train}dog/a.png")]
    found = {str(path.relative_to(images)) for path in images.rglob("*.png")}
    for name in found:
        assert (tmp_path / "copy" / name).read_text() == (images / name).read_text()
    copies[0].write_text("spoilt")
    assert (images / f"{train}dog/a.png").read_text() == f"{train}dog"
