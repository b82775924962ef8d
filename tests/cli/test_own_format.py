"""A format of images that another package adds in one file is known to every command."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from calls import Call
from PIL import Image

from paceline.data.image.sets.packed import read_manifest
from paceline.plugins import dataset_registry
from paceline.plugins.installed_packages import entry_points

pyarrow = pytest.importorskip("pyarrow", reason="packing needs pyarrow")

CODE = """
from paceline.data.image.sets import TABLE
from paceline.data.image.tables import ImageTable
from paceline.data.tables import TableFile
from paceline.plugins.dataset_registry import dataset


@dataset("path_list", endings=(".paths",), keys=TABLE)
def path_list(request):
    return ImageTable(request.path, [TableFile(request.path, "jsonl")], request).open_paths()
"""


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A list of pictures in the format of an installed package."""
    (tmp_path / "site" / "lists-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "path_lists.py").write_text(CODE)
    (tmp_path / "site" / "lists-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: lists\nVersion: 1.0\n"
    )
    (tmp_path / "site" / "lists-1.0.dist-info" / "entry_points.txt").write_text(
        "[paceline.datasets]\npath_list = path_lists:path_list\n"
    )
    rows = []
    for number in range(20):
        pixels = np.random.default_rng(number).integers(0, 256, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number:02}.png")
        rows.append(json.dumps({"file": f"{number:02}.png", "label": ("cat", "dog")[number % 2]}))
    (tmp_path / "pets.paths").write_text("\n".join(rows))
    dataset_registry.entries()
    monkeypatch.setattr(dataset_registry, "_entries", dict(dataset_registry._entries))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "path_lists", raising=False)
    entry_points.cache_clear()
    yield tmp_path
    entry_points.cache_clear()


def test_every_command_knows_it(pictures: Path, paceline_here: Call, tiny: tuple[str, ...]) -> None:
    short = ("train.duration=2 steps", "model.name=small_resnet", "data.image_size=8", *tiny)
    trained = paceline_here("train", "pets.paths", *short, "--run-dir", "run").ended(0)
    assert "data.dataset=path_list" in trained.out + trained.err
    assert paceline_here("evaluate", "run", "--json").ended(0).document["samples"] == 4
    checked = paceline_here("check-data", "pets.paths", "--workers", "1", "--json")
    assert (checked.document["dataset"], checked.document["splits"]["train"]["checked"]) == ("path_list", 16)
    paceline_here("pack", "pets.paths", "packed", "--workers", "1").ended(0)
    manifest = read_manifest(pictures / "packed")
    assert (manifest.origin.kind, dict(manifest.samples)) == ("path_list", {"train": 20})
    assert "path_list" in paceline_here("explain", "data.dataset").ended(0).out
    paceline_here("train", "digits", "data.dataset=path_lst", "data.path=pets.paths").refused("mean 'path_list'")
    refused = paceline_here("train", "pets.paths", *short, "data.split_column=is", "--run-dir", "other")
    refused.refused("'data.split_column' has no effect with data.dataset=path_list")


ORC = """
from pyarrow import orc

from paceline.data.image.sets import TABLE
from paceline.data.image.tables import ImageTable
from paceline.data.tables import TableFile
from paceline.plugins.dataset_registry import dataset


@dataset("orc", endings=(".orc",), keys=TABLE)
def path_list(request):
    return ImageTable(request.path, [TableFile(request.path, orc.read_table)], request).open_paths()
"""


def test_a_function_may_read_the_table(pictures: Path, paceline_here: Call, tiny: tuple[str, ...]) -> None:
    orc = pytest.importorskip("pyarrow.orc", reason="this pyarrow reads no ORC")
    (pictures / "site" / "path_lists.py").write_text(ORC)
    entries = pictures / "site" / "lists-1.0.dist-info" / "entry_points.txt"
    entries.write_text("[paceline.datasets]\norc = path_lists:path_list\n")
    orc.write_table(
        pyarrow.Table.from_pylist(list(map(json.loads, (pictures / "pets.paths").read_text().splitlines()))), "pets.orc"
    )
    short = ("train.duration=2 steps", "model.name=small_resnet", "data.image_size=8", *tiny)
    paceline_here("train", "pets.orc", *short, "--run-dir", "run").ended(0)
    Path("pets.orc").write_bytes(b"ORC of no use")
    paceline_here("train", "pets.orc", *short, "--run-dir", "other").refused("pets.orc' cannot be read (")


def test_a_package_that_cannot_be_imported_stops_only_what_needs_it(pictures: Path, paceline_here: Call) -> None:
    (pictures / "site" / "path_lists.py").write_text("1 / 0\n")
    refused = paceline_here("train", "pets.paths", "--plan-only")
    refused.refused("the installed data set 'path_list' cannot be imported (")
    for name in ("cat", "dog"):
        (pictures / "photos" / name).mkdir(parents=True)
        for number in range(0, 20, 2):
            image = f"{number + (name == 'dog'):02}.png"
            (pictures / "photos" / name / image).write_bytes((pictures / image).read_bytes())
    paceline_here("check-data", "photos", "--workers", "1").ended(0)
