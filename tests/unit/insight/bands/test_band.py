"""Which runs make a band, what is kept of them, and are the shipped ones of the recipes as they are?"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import RunDirectoryError
from paceline.insight.bands.band import make_band, read_band, recipe_sha256, shipped_bands, write_band
from paceline.insight.bands.run import differing_keys
from paceline.insight.report.reading import flattened
from paceline.recipe.load import load_recipe, to_tree

RunMaker = Callable[..., Path]
SHIPPED = shipped_bands()


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_band_is_of_the_recipe_as_it_is(name: str) -> None:
    band = read_band(SHIPPED[name])
    tree = flattened(to_tree(load_recipe(name).recipe))
    assert differing_keys(band.recipe, tree) == [], f"make it anew: python benchmarks/bands.py {name}"
    assert band.made_with["recipe_sha256"] == recipe_sha256(band.recipe)
    assert band.count == len(set(band.made_with["seeds"])) >= 5
    assert SHIPPED[name].stat().st_size < 24_000


@pytest.mark.parametrize("name", SHIPPED)
def test_of_the_seeds_of_a_shipped_band_few_would_leave_that_of_the_others(name: str) -> None:
    band = read_band(SHIPPED[name])
    assert len(band.outsiders) <= 0.05 * band.count


def test_the_guide_names_the_recipes_that_bring_one() -> None:
    guide = (Path(__file__).parents[4] / "docs" / "guide" / "bands.md").read_text(encoding="utf-8")
    told = guide.partition("## Recipes that bring a band")[2].partition(" bring the curves")[0]
    assert set(re.findall(r"`([\w-]+)`", told)) == set(SHIPPED)


def test_digits_has_a_band_of_twenty_seeds_or_more() -> None:
    assert read_band(SHIPPED["digits"]).count >= 20


def test_a_band_is_kept_as_it_was(make_run: RunMaker, tmp_path: Path) -> None:
    band = make_band([make_run(seed) for seed in range(5)], "weekly")
    write_band(band, tmp_path / "b.json")
    again = read_band(tmp_path / "b.json")
    assert again == band
    assert again.limit == band.limit
    assert (again.name, again.made_with["seeds"]) == ("weekly", [0, 1, 2, 3, 4])
    names = {each.name for each in again.curves}
    assert {"training loss", "gradient norm", "learning rate", "held-out loss, model weights"} <= names
    assert {"top-1 accuracy, model weights", "mean of the inputs", "spread of the inputs"} <= names


def test_what_makes_no_band_is_refused(make_run: RunMaker) -> None:
    runs = [make_run(seed) for seed in range(5)]
    with pytest.raises(RunDirectoryError, match="found 4 runs, and a band takes 5 or more"):
        make_band(runs[:4])
    with pytest.raises(RunDirectoryError, match="has not come to its end"):
        make_band([*runs[:4], make_run(9, until=160)])
    with pytest.raises(RunDirectoryError, match=r"differs from .* in optimizer\.lr"):
        make_band([*runs[:4], make_run(10, optimizer={"lr": 0.5})])
    with pytest.raises(RunDirectoryError, match="seed 3 was used by more than one"):
        make_band([*runs, make_run(3, name="again")])


def test_what_is_no_band_is_refused(make_run: RunMaker, tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    write_band(make_band([make_run(seed) for seed in range(5)]), path)
    good = json.loads(path.read_text())
    for key, value, told in (
        ("band", 2, "format 2"),
        ("curves", [{"name": "x"}], "no band"),
        ("sizes", {}, "no band"),
    ):
        path.write_text(json.dumps({**good, key: value}))
        with pytest.raises(RunDirectoryError, match=told):
            read_band(path)
    good["curves"][0]["runs"][0] = good["curves"][0]["runs"][0][1:]
    path.write_text(json.dumps(good))
    with pytest.raises(RunDirectoryError, match="not a number for each window"):
        read_band(path)
    path.write_text("{}")
    with pytest.raises(RunDirectoryError, match="is no band"):
        read_band(path)
