"""Names of data sets, and the keys that each has, known without torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.models.build import model_names
from paceline.plugins import dataset_registry
from paceline.plugins.dataset_registry import DatasetNames, dataset_names, find_dataset
from paceline.plugins.installed_packages import entry_points

CODE = """
from paceline.plugins.dataset_registry import dataset


@dataset("orchard", kind="images", endings=(".orchard",), keys=("path",))
def orchard(request):
    return None  # never opened
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with a package of data sets and names of networks, and one that cannot be imported."""
    for name, code in (("orchards", CODE), ("withered", "1 / 0\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "sets.py").write_text(code)
    (tmp_path / "orchards" / "networks.py").write_text("def names():\n    return ['apple_net']\n")
    metadata = tmp_path / "orchards-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: orchards\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[paceline.dataset_packages]\norchards = orchards\nwithered = withered\n"
        "[paceline.models]\norchards = orchards.networks:names\n"
    )
    dataset_names()
    monkeypatch.setattr(dataset_registry, "_entries", dict(dataset_registry._entries))
    monkeypatch.syspath_prepend(tmp_path)
    caches = (entry_points, dataset_registry._packages, dataset_registry._load)
    for each in caches[:2]:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


@pytest.mark.usefixtures("packages")
def test_packages_of_data_sets_and_networks_of_another_package() -> None:
    with pytest.warns(UserWarning, match="data sets of the installed package withered cannot be imported"):
        assert {"orchard", "digits"} <= set(dataset_names("images"))
    found = find_dataset("orchard")
    assert found is not None
    assert found.endings == (".orchard",)
    assert model_names("apple") == ["apple_net"]


def test_keys_and_names() -> None:
    assert list(DatasetNames("split_column")) == ["chat", "csv", "mixture", "parquet", "text_table"]
    assert "torchvision:EMNIST" in DatasetNames("options")
    assert "digits" not in DatasetNames("path")
    assert find_dataset("nobody") is None
    assert find_dataset("docs") is None
    assert find_dataset("docs", "texts") != find_dataset("docs", "labelled texts")
    assert {"digits", "docs", "coco", "masks", "criteo"} <= set(DatasetNames())


def test_checking_a_recipe_loads_no_torch() -> None:
    code = (
        "import sys; from paceline.recipe.load import load_recipe; "
        "load_recipe('image_folder', ['data.dataset=csv', 'data.path=x', 'data.label_column=y']); "
        "assert 'paceline.data.image.sets.csv' in sys.modules; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
