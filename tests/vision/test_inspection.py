"""`paceline check-data` looks at pictures with boxes and label maps through their data sets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from annotated_folders import drawn, label_studio_yolo
from PIL import Image

from paceline_data.inspect.check import DataReport, check_data


def check(source: str, *overrides: str) -> DataReport:
    return check_data(source, overrides, workers=2, limit=None)


def test_pictures_with_boxes_are_checked_with_their_annotations(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for split, names in (("train", "abcdef"), ("val", "gh")):
        (tmp_path / split).mkdir()
        for name in names:
            Image.fromarray(rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(tmp_path / split / f"{name}.png")
        images = [{"id": ord(name), "file_name": f"{name}.png", "width": 64, "height": 48} for name in names]
        kinds = [{"id": 1, "name": "bolt"}, {"id": 2, "name": "nut"}]
        objects = [{"image_id": ord(name), "category_id": 1 + (name in "cd"), "bbox": [9, 9, 20, 9]} for name in names]
        objects += objects[:1] if split == "train" else []
        tree = {"images": images, "categories": kinds, "annotations": objects}
        (tmp_path / split / "annotations.json").write_text(json.dumps(tree))
    shutil.copy(tmp_path / "train/a.png", tmp_path / "val/g.png")
    (tmp_path / "train/b.png").write_bytes(b"no picture")
    Image.new("RGB", (48, 64)).save(tmp_path / "train/c.png")
    found = check("shapes-maskrcnn", "data.dataset=coco", f"data.path={tmp_path}", "data.detection.masks=false")
    named = {each.kind.name: {Path(entry.name).name for entry in each.entries} for each in found.findings}
    assert named["unreadable"] == {"b.png", "c.png"}
    assert named["leak"] == {"g.png"}
    assert named["no_held_out"] == {"nut"}
    assert "1 of 7 boxes are copies of another box" in named["implausible"].pop()
    assert found.splits["train"] == {"samples": 6, "checked": 6, "broken": 2}
    assert found.classes["samples"]["nut"] == {"train": 2, "validation": 0}


def test_images_with_label_maps_are_checked(tmp_path: Path) -> None:
    for number in range(6):
        for kind, shape in (("images", (40, 40, 3)), ("masks", (40, 40))):
            (tmp_path / kind).mkdir(exist_ok=True)
            pixels = np.random.default_rng(number).integers(0, 2, shape, dtype=np.uint8)
            Image.fromarray(pixels * (99 if kind == "images" else 1)).save(tmp_path / kind / f"{number}.png")
    (tmp_path / "notes.txt").touch()
    found = check("shapes-segmentation", "data.dataset=masks", f"data.path={tmp_path}")
    assert found.passed
    assert {each.kind.name for each in found.findings} == {"unread"}
    shutil.copy(tmp_path / "images/0.png", tmp_path / "images/1.png")
    found = check("shapes-segmentation", "data.dataset=masks", f"data.path={tmp_path}")
    assert {"leak", "duplicate"} & {each.kind.name for each in found.findings}


def test_a_folder_of_boxes_is_checked_without_a_recipe(tmp_path: Path) -> None:
    root = tmp_path / "parts"
    label_studio_yolo(root, drawn(range(10)))
    (root / "labels/picture_01.txt").write_text(
        "0 0.5 0.5 0.2 0.2\n0 0.5 0.5 0.2 0.2\n0 0.9 0.5 0.6 0.2\n0 .5 .5 0 .2\n"
    )
    Image.open(root / "images/picture_02.png").resize((128, 96)).save(root / "images/picture_99.png")
    found = check(str(root))
    named = {each.kind.name: " ".join(entry.name for entry in each.entries) for each in found.findings}
    assert found.dataset == "yolo"
    assert "1 of 18 boxes reach beyond their picture, first labels/picture_01.txt line 3" in named["implausible"]
    assert "1 of 18 boxes are copies of another box, first labels/picture_01.txt line 2" in named["implausible"]
    assert "1 of 18 boxes have no width or no height, first labels/picture_01.txt line 4" in named["implausible"]
    assert Path(named["unlabelled"]).name == "picture_99.png"
    assert not found.passed


def test_a_folder_of_masks_is_checked_without_a_recipe(tmp_path: Path) -> None:
    for number in range(6):
        for kind, shape in (("images", (40, 40, 3)), ("masks", (40, 40))):
            (tmp_path / kind).mkdir(exist_ok=True)
            pixels = np.random.default_rng(number).integers(0, 2, shape, dtype=np.uint8)
            pixels = {1: 0 * pixels, 2: 0 * pixels + 255}.get(number, pixels) if kind == "masks" else 99 * pixels
            Image.fromarray(pixels).save(tmp_path / kind / f"{number}.png")
    said = {each.kind.name: [entry.name for entry in each.entries] for each in check(str(tmp_path)).findings}
    assert said["implausible"] == [
        "1 of 6 masks hold 255 alone, so that no pixel counts, first 'masks/2.png'",
        "1 of 6 masks hold the first class alone, '0', first 'masks/1.png'",
    ]
