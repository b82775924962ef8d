"""Loader processes are measured where it pays, by a process of its own, and a run goes on whatever comes of that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.data.image.feed_rates import remembered
from paceline.host.world import World
from paceline.recipe.load import load_recipe, stored_recipe, to_tree, to_yaml
from paceline.recipe.schema import Recipe
from paceline.tasks.task import build_task
from paceline.telemetry.display import Display
from paceline.trainer.feeding import measure_feeding
from paceline.trainer.process_settings import StopRequest
from paceline.trainer.subject import Subject


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Not the launcher's, should these tests be started by one.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def recipe(tmp_path: Path, make_photos: Callable[..., Path]) -> Callable[..., Recipe]:
    """A long run over a few photographs, of a network that takes no time."""
    make_photos(tmp_path / "photos", train=16, val=16, side=96, ending="jpg")

    def make(**changes: Any) -> Recipe:
        overrides = {
            "data.path": str(tmp_path / "photos"),
            "data.image_size": 64,
            "data.backend": "pytorch",
            "model.name": "small_resnet",
            "model.options": {"width": 4, "stages": 1, "depth": 1},
            "batch.global_size": 8,
            "train.duration": "50000 steps",
            "train.precision": "fp32",
            "parallel.device": "cpu",
            "parallel.threads": 1,
        }
        changed = {key.replace("__", "."): value for key, value in changes.items()}
        return load_recipe("image_folder", {**overrides, **changed}).recipe

    return make


class Said(list[str]):
    """What the user was told."""

    def ask(self, recipe: Recipe, world: World | None = None, *, stopped: bool = False) -> float:
        """Ask for a measurement; returns how long it took."""
        begun = time.monotonic()
        with Subject.open(recipe, world or World(), "task") as subject:
            subject.stop, shown = StopRequest(), SimpleNamespace(message=self.append)
            subject.stop.signal_name = "SIGTERM" if stopped else None
            subject.display = cast("Display", shown)
            measure_feeding(subject)
        return time.monotonic() - begun


@pytest.mark.parametrize(
    "changes",
    [
        {"data__workers": 1},
        {"train__duration": "100 steps"},
        {"train__until": "100 steps"},
        {"data__backend": "memory", "data__augment.crop": "pad"},
    ],
    ids=["asked for", "short", "stopped early", "in memory"],
)
def test_what_is_settled_or_short_is_not_measured(
    recipe: Callable[..., Recipe], cache: Path, changes: dict[str, Any]
) -> None:
    said = Said()
    said.ask(recipe(**changes))
    assert said == []
    assert not cache.exists()


@pytest.mark.parametrize("local", [1, 2])
def test_several_processes_are_not_measured(recipe: Callable[..., Recipe], cache: Path, local: int) -> None:
    said = Said()
    said.ask(recipe(), World(world_size=2, local_world_size=local))
    assert said == []
    assert not cache.exists()


def test_a_run_that_is_asked_to_stop_does_not_wait(recipe: Callable[..., Recipe], cache: Path) -> None:
    said = Said()
    assert said.ask(recipe(), stopped=True) < 5
    assert len(said) == 1
    # That was no failure to be remembered.
    assert not list((cache / "paceline" / "feeding").iterdir())


def test_why_it_failed_is_told(recipe: Callable[..., Recipe]) -> None:
    said = Said()
    wrong = recipe(model__name="no_such_network", model__options=None)
    said.ask(wrong)
    assert said[-1].startswith("not measured (unknown model 'no_such_network'"), said
    # What failed a moment ago is not tried again.
    said.clear()
    said.ask(wrong)
    assert said == []


def test_it_ends_if_the_run_was_killed_while_it_started(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(stored_recipe(to_tree(recipe()), "", {})))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    command = [sys.executable, "-P", "-m", "paceline.trainer.feeding", str(path), "1", str(gone.pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts loader processes")
def test_a_long_run_is_measured_once(recipe: Callable[..., Recipe], cache: Path) -> None:
    said = Said()
    said.ask(recipe())
    assert len(said) == 1, said
    found = remembered(recipe(), World())
    assert found is not None
    assert 0 in found.rates
    assert 1 in found.rates
    assert found.best in found.rates
    # Nobody reads faster than the model that waits for nothing trains, but for what the machine's other work takes.
    assert max(found.rates.values()) < 2 * found.alone
    (path,) = (cache / "paceline" / "feeding").glob("*.json")
    assert json.loads(path.read_text())["alone"] == found.alone
    assert said.ask(recipe()) < 2
    plan = build_task(recipe()).data_facts(World())
    assert plan.description["workers"] == found.best
    assert plan.reasons["data.workers"] == str(found)
