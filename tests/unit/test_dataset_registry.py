"""Data sets are found by name, ours and other packages', without torch, and recipes know which keys they use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import dataset_registry as registry
from paceline.data.image.datasets import open_dataset
from paceline.dataset_registry import DatasetsUsing, dataset_names, find_dataset
from paceline.errors import DataError, RecipeError
from paceline.recipe.load import load_recipe
from paceline.registry import installed

SATELLITE = """
import numpy as np
from paceline.data.image.dataset import Probe, in_splits
from paceline.data.image.source import ArraySource
from paceline.dataset_registry import Size, dataset


@dataset("satellite", keys=("path", "options", "validation_fraction"), size=Size("Satellite", 1000, 2, 16))
def satellite(request):
    tiles = np.full((6, 16, 16, 3), request.data.options.get("grey", 0), dtype=np.uint8)
    whole = ArraySource(tiles, np.arange(6) % 2, "tile")
    return in_splits(
        [whole], "", request.data.validation_fraction, classes=("land", "sea"), digest=str(request.path), channels=3,
        probe=Probe(6, (16, 16), greyscale=False),
    )


def plain(request):
    return 3
"""


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package that offers two data sets."""
    (tmp_path / "satellites.py").write_text(SATELLITE)
    metadata = tmp_path / "satellites-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: satellites\nVersion: 1\n")
    points = "[paceline.datasets]\nsatellite = satellites:satellite\nnothing = satellites:plain\n"
    (metadata / "entry_points.txt").write_text(points)
    dataset_names()
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.syspath_prepend(tmp_path)
    installed.cache_clear()
    yield
    installed.cache_clear()


@pytest.mark.usefixtures("stranger")
def test_another_packages_data_set_is_one_of_ours() -> None:
    assert "satellite" in dataset_names()
    recipe = load_recipe("image_folder", ["data.dataset=satellite", "data.path=x", "data.options.grey=7"]).recipe
    found = open_dataset(recipe.data)
    assert (found.name, found.classes, found.native_size) == ("satellite", ("land", "sea"), (16, 16))
    assert found.train.read(0).max() == 7
    with pytest.raises(RecipeError, match=r"'data.image_column' has no effect with data.dataset=satellite"):
        load_recipe("image_folder", ["data.dataset=satellite", "data.path=x", "data.image_column=a"])
    with pytest.raises(DataError, match="its opener returned int"):
        open_dataset(load_recipe("image_folder", ["data.dataset=nothing", "data.path=x"]).recipe.data)


def test_keys_and_names() -> None:
    assert list(DatasetsUsing("split_column", "other")) == ["csv", "mixture", "parquet", "other"]
    assert "torchvision:EMNIST" in DatasetsUsing("options")
    assert "digits" not in DatasetsUsing("path")
    assert find_dataset("nobody") is None


def test_checking_a_recipe_loads_no_torch() -> None:
    code = (
        "import sys; from paceline.recipe.load import load_recipe; "
        "load_recipe('image_folder', ['data.dataset=csv', 'data.path=x', 'data.label_column=y']); "
        "assert 'paceline.data.image.sets.csv' in sys.modules; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
