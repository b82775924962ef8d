"""Parts of data sets as commands see them: trained on, audited, scored elsewhere, packed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from calls import Call
from PIL import Image

from paceline.data.image.sets.packed import read_manifest

pa = pytest.importorskip("pyarrow", reason="tables of images need pyarrow")


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Pictures of two classes, and tables of them: paths in CSV, and the pictures in parquet, in row groups of five."""
    import pyarrow.parquet as pq

    files, labels = [tmp_path / f"{number:02}.jpg" for number in range(28)], ["cat", "dog"] * 14
    for number, file in enumerate(files):
        pixels = np.random.default_rng(number).integers(0, 256, (17, 20 + number % 3, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file)
    write(tmp_path / "all.csv", list(range(28)))
    table = pa.table({"image": [file.read_bytes() for file in files], "label": labels})
    pq.write_table(table, tmp_path / "all.parquet", row_group_size=5)
    return tmp_path


def write(path: Path, numbers: list[int]) -> None:
    rows = [f"{number:02}.jpg,{('cat', 'dog')[number % 2]}" for number in numbers]
    path.write_text("\n".join(["path,label", *rows]))


def test_a_part_of_a_table_counts_each_image_once(
    paceline: Call, paceline_here: Call, tables: Path, tiny: tuple[str, ...]
) -> None:
    run = ["train", "digits", *tiny, "data.dataset=parquet", "data.path=all.parquet", "data.image_size=16"]
    run += ["batch.global_size=6", "train.duration=2 epochs", "evaluate.every=1 epochs", "checkpoint.every=1 epochs"]
    run += ["data.split_by=name", "data.backend=pytorch", "--run-dir=run"]
    paceline(*run, "data.subset=13", "--processes=2", cwd=tables).ended(0)
    summary = json.loads((tables / "run" / "summary.json").read_text())
    assert summary["details"]["data"]["subset"] == 13
    assert summary["ledger"] == {**summary["ledger"], "epochs_complete": 2, "duplicates": 0, "missing": 0}
    assert "Passed: over " in paceline_here("audit", "run").out
    paceline_here(*run, "data.subset=12").refused("data.subset was 13 and is now 12")
    # What is scored elsewhere need not have as many images as were trained on.
    write(tables / "few.csv", list(range(8)))
    where = ("data.dataset=csv", "data.path=few.csv", "data.validation_fraction=0.5")
    assert paceline_here("evaluate", "run", *where, "--json").ended(0).document["samples"] == 4


def test_a_part_of_a_table_is_packed(paceline_here: Call, tables: Path) -> None:
    requested = ("--subset", "50%", "--only-classes", "1,0")
    paceline_here("pack", "all.csv", "packed", *requested, "--workers", "1").ended(0)
    assert (read_manifest(tables / "packed").samples, read_manifest(tables / "packed").origin.kind) == (
        {"train": 14},
        "csv",
    )
    assert paceline_here("pack", "packed", "--verify").code == 0
    for options, message in (
        (("--subset", "x"), "--subset: found 'x', but it must be a number of images, a share such as 10%"),
        (("--only-classes", "cat,cow"), "--only-classes names 'cow'"),
        (("--label-column", "lable"), "has no column 'lable'"),
    ):
        paceline_here("pack", "all.csv", "other", *options).refused(message)
    assert not (tables / "other").exists()


def test_names_that_look_like_numbers_come_back_as_they_were(
    paceline_here: Call, write_images: Call, tmp_path: Path, tiny: tuple[str, ...]
) -> None:
    for name in ("01", "02", "1e3", "nan", "on"):
        write_images(tmp_path / "photos" / name, 8)
    run = ["train", "image_folder", *tiny, "model.name=small_resnet", "data.path=photos", "data.image_size=12"]
    requested = "data.only_classes=['01', nan, 'on', 1e3]"
    paceline_here(*run, requested, "batch.global_size=8", "train.duration=1 steps", "--run-dir=run").ended(0)
    answered = paceline_here("predict", "run", "photos/01/0.png", "--top-k=4", "--json")
    assert sorted(answered.document[0]["labels"]) == ["01", "1e3", "nan", "on"]


def test_a_plan_says_how_many_classes_have_no_image(paceline_here: Call, tables: Path) -> None:
    rows = [f"{number:02}.jpg,{2019 + number % 2}" for number in range(28)]
    (tables / "years.csv").write_text("\n".join(["path,label", *rows]))
    plan = ["train", "digits", "data.dataset=csv", "data.path=years.csv", "data.image_size=16", "--plan-only"]
    assert "2,019 of 2,021 classes have no image" in paceline_here(*plan).out
    found = paceline_here(*plan, "--json").document["plan"]["data"]
    assert (found["classes"], found["classes_without_images"]) == (2021, 2019)
