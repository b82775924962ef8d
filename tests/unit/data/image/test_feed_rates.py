"""What was measured of loader processes is remembered for runs that are fed alike, and for no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.data.image import feed_rates
from paceline.data.image.feed_rates import FeedRates, needs_measuring, remember, remembered
from paceline.data.image.pipeline import choose_workers
from paceline.host.world import World
from paceline.recipe.data import Data
from paceline.recipe.load import load_recipe
from paceline.recipe.schema import Recipe

FOUND = FeedRates({0: 210.0, 1: 341.0, 2: 339.0, 4: 343.0}, alone=360.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "paceline" / "feeding"


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("image_folder", {"data.path": "photos"}).recipe


def test_the_fewest_that_are_as_good_as_any_are_chosen() -> None:
    assert FOUND.best == 1
    assert FeedRates({0: 210.0, 1: 300.0, 2: 341.0}, alone=360.0).best == 2
    count, reason = choose_workers(Data(), "pytorch", World(), FOUND)
    assert (count, reason) == (
        1,
        "measured here in images per second: 0: 210, 1: 341, 2: 339, 4: 343; the model alone: 360",
    )
    assert choose_workers(Data(workers=3), "pytorch", World(), FOUND) == (3, "as the recipe says")
    assert choose_workers(Data(), "memory", World(), FOUND)[0] == 0


def test_what_was_measured_is_found_again(recipe: Recipe) -> None:
    assert remembered(recipe, World()) is None
    assert needs_measuring(recipe)
    remember(recipe, FOUND)
    assert remembered(recipe, World()) == FOUND
    assert not needs_measuring(recipe)


def test_only_runs_that_are_fed_alike_share_it(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(recipe, FOUND)
    same = {"seed": 3, "train.duration": "3 epochs", "optimizer.lr": 0.3, "data.path": str(Path("photos").absolute())}
    assert remembered(load_recipe("image_folder", {"data.path": "photos", **same}).recipe, World()) == FOUND
    others = {
        "data.path": "pictures",
        "data.image_size": 96,
        "data.augment.flip": 0.1,
        "data.prefetch": 4,
        "model.name": "resnet18",
        "batch.global_size": 24,
        "train.precision": "fp32",
        "parallel.threads": 1,
        "parallel.device": "cpu",
    }
    for key, value in others.items():
        other = load_recipe("image_folder", {"data.path": "photos", key: value}).recipe
        assert remembered(other, World()) is None, key
    for world in (World(world_size=2, local_world_size=2), World(world_size=2, local_world_size=1)):
        assert remembered(recipe, world) is None  # they would have to agree
    monkeypatch.setattr(feed_rates, "available_cores", lambda: 1000)
    assert remembered(recipe, World()) is None


def test_a_failure_is_tried_again_after_a_while(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(recipe, None, reason="the model was away")
    assert remembered(recipe, World()) is None
    assert not needs_measuring(recipe)
    monkeypatch.setattr(feed_rates, "_FAILURE_SECONDS", 0.0)
    assert needs_measuring(recipe)


DAMAGED = (
    "",
    "[]",
    "{}",
    "not JSON",
    '{"rates": {}',
    '{"rates": []}',
    '{"rates": {"1": 3}}',
    '{"rates": {}, "alone": 3, "time": 3}',
)


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_is_as_none(recipe: Recipe, cache: Path, content: str) -> None:
    remember(recipe, FOUND)
    (path,) = cache.glob("*.json")
    path.write_text(content)
    assert remembered(recipe, World()) is None
    assert needs_measuring(recipe)


def test_where_nothing_can_be_written_nothing_is_remembered(recipe: Recipe, cache: Path) -> None:
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file")
    assert not needs_measuring(recipe)
    remember(recipe, FOUND)
    assert remembered(recipe, World()) is None


def test_the_recipe_of_another_world_is_another(recipe: Recipe) -> None:
    remember(recipe, FOUND)
    assert remembered(replace(recipe, task="distillation"), World()) is None
