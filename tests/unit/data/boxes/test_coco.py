"""COCO's annotations: what is read of them, and which fault of them is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.data.boxes.coco import open_coco
from paceline.errors import DataError

SQUARE = [[2, 2, 6, 2, 6, 8, 2, 8]]


def annotations(**changes: Any) -> dict[str, Any]:
    """Three pictures, in no order; the second has no object but a crowd."""
    tree: dict[str, Any] = {
        "images": [
            {"id": 30, "file_name": "c.png", "height": 12, "width": 16},
            {"id": 10, "file_name": "a.png", "height": 12, "width": 16},
            {"id": 20, "file_name": "b.png", "height": 12, "width": 16},
        ],
        "categories": [{"id": 90, "name": "cat"}, {"id": 7, "name": "dog"}],
        "annotations": [
            {"image_id": 30, "category_id": 90, "bbox": [2, 2, 4, 6], "segmentation": SQUARE, "iscrowd": 0},
            {
                "image_id": 20,
                "category_id": 7,
                "bbox": [0, 0, 16, 12],
                "iscrowd": 1,
                "segmentation": {"counts": [0, 24, 168], "size": [12, 16]},
            },
            {"image_id": 10, "category_id": 7, "bbox": [1.5, 0, 20, 4], "segmentation": SQUARE},
            {"image_id": 10, "category_id": 7, "bbox": [1.5, 0, 0, 4], "segmentation": SQUARE},
        ],
    }
    return tree | changes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        for name in ("a.png", "b.png", "c.png"):
            Image.new("RGB", (16, 12), "red").save(tmp_path / split / name)
        (tmp_path / split / "annotations.json").write_text(json.dumps(annotations()))
    return tmp_path


def test_categories_become_classes_in_the_order_of_their_numbers(root: Path) -> None:
    found = open_coco(str(root), masks=False, keep_empty=True)
    assert found.classes == ("dog", "cat")
    first = found.train.objects(0, masks=False)  # of image 10: the numbers' order, not the file's
    assert first.boxes.tolist() == [[1.5, 0, 21.5, 4], [1.5, 0, 1.5, 4]]
    assert first.labels.tolist() == [0, 0]
    assert found.train.objects(2, masks=False).labels.tolist() == [1]
    assert found.train.path(2).endswith("c.png")
    assert found.train.image(2).shape == (12, 16, 3)


def test_what_cannot_be_learned_is_left_out_of_training_alone(root: Path) -> None:
    found = open_coco(str(root), masks=False, keep_empty=False)
    assert len(found.train) == 2  # not the crowd's picture
    assert len(found.validation) == 3
    crowd = found.validation.objects(1, masks=False)
    assert crowd.crowd.tolist() == [True]
    assert not len(crowd.learnable(12, 16).labels)
    learnable = found.train.objects(0, masks=False).learnable(12, 16)
    assert learnable.boxes.tolist() == [[1.5, 0, 16, 4]]  # cut at the edge; the one without width is gone


def test_what_is_left_out_is_counted(root: Path) -> None:
    assert open_coco(str(root), masks=False, keep_empty=False).facts == {
        "pictures_without_objects_left_out": 1,
        "boxes_without_extent_left_out": 1,
    }
    # One that lies outside its picture has no extent within it.
    tree = annotations(annotations=[BOX, BOX | {"image_id": 20, "bbox": [100, 200, 30, 40]}])
    (root / "train" / "annotations.json").write_text(json.dumps(tree))
    found = open_coco(str(root), masks=False, keep_empty=False)
    assert (len(found.train), found.facts["boxes_without_extent_left_out"]) == (1, 1)
    assert "pictures_without_objects_left_out" not in open_coco(str(root), masks=False, keep_empty=True).facts
    (root / "train" / "annotations.json").write_text(json.dumps(annotations(annotations=[])))
    with pytest.raises(DataError, match=r"none of its 3 pictures has an object.*keep_empty"):
        open_coco(str(root), masks=False, keep_empty=False)


# pycocotools' own, of NumPy 2.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
def test_polygons_and_run_lengths_are_drawn(root: Path) -> None:
    pytest.importorskip("pycocotools")
    found = open_coco(str(root), masks=True, keep_empty=True)
    polygon, crowd = (found.train.objects(number, masks=True).masks for number in (2, 1))
    assert polygon is not None
    assert crowd is not None
    assert polygon.shape == (1, 12, 16)
    rows, columns = np.nonzero(polygon[0])
    assert (rows.min(), columns.min(), rows.max(), columns.max(), len(rows)) == (2, 2, 7, 5, 24)
    assert crowd[0, :, :2].all()  # run lengths go down the columns
    assert crowd.sum() == 24


def test_the_published_folders_are_found_too(root: Path) -> None:
    (root / "annotations").mkdir()
    for split in ("train", "val"):
        (root / split / "annotations.json").rename(root / "annotations" / f"instances_{split}2017.json")
        (root / split).rename(root / f"{split}2017")
    assert len(open_coco(str(root), masks=False, keep_empty=True).train) == 3


def test_the_digest_is_that_of_the_annotations(root: Path) -> None:
    before = open_coco(str(root), masks=False, keep_empty=True).digest
    (root / "val" / "annotations.json").write_text(json.dumps(annotations(), indent=1))
    assert open_coco(str(root), masks=False, keep_empty=True).digest != before


IMAGE = {"id": 10, "file_name": "a.png", "height": 12, "width": 16}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("ending", ["jpg", "png"])
def test_pictures_are_read_as_they_lie_since_boxes_are_of_stored_pixels(
    root: Path, orientation: int, ending: str
) -> None:
    pixels = np.zeros((12, 16, 3), dtype=np.uint8)
    pixels[:, :8] = 255
    pixels[8:] = 0
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(root / "train" / f"lies.{ending}", exif=exif, quality=95)
    tree = annotations(images=[IMAGE | {"file_name": f"lies.{ending}"}], annotations=[BOX])
    (root / "train" / "annotations.json").write_text(json.dumps(tree))
    found = open_coco(str(root), masks=False, keep_empty=True).train
    assert found.image(0).shape == (12, 16, 3)
    assert found.image(0)[:8, :8].min() > 200
    assert found.image(0)[8:].max() < 50
    assert found.image(0)[:, 8:].max() < 50


BOX = {"image_id": 10, "category_id": 7, "bbox": [0, 0, 4, 4]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"images": None}, "no list 'images'"),
        ({"images": [{"id": 1}]}, r"images\[0\] must have"),
        ({"images": [{"id": 1, "file_name": "../a.png", "height": 2, "width": 2}]}, "outside the folder"),
        ({"categories": [{"id": 1, "name": "x"}] * 2}, r"categories\[1\] has the id 1"),
        ({"annotations": [BOX | {"image_id": 99}]}, r"annotations\[0\] has the image_id 99"),
        ({"annotations": [BOX, BOX | {"category_id": [1]}]}, r"annotations\[1\] has the category_id"),
        ({"annotations": [BOX | {"bbox": [0, 0, -1, 4]}]}, "bbox"),
        ({"annotations": [BOX | {"bbox": [0, 0, float("nan"), 4]}]}, "bbox"),
        ({"annotations": [BOX | {"bbox": "0 0 1 1"}]}, "bbox"),
        ({"annotations": [BOX | {"bbox": [0, 0, 10**400, 4]}]}, "bbox"),
        ({"annotations": [BOX | {"bbox": [1e308, 0, 1e308, 4]}]}, "bbox"),
        ({"annotations": [BOX | {"iscrowd": "0"}]}, r"annotations\[0\] has the iscrowd '0'"),
        ({"annotations": [3]}, "no mapping"),
        ({"images": [IMAGE | {"file_name": ""}]}, r"images\[0\] must have"),
        ({"images": [IMAGE | {"file_name": "a\0.png"}]}, r"images\[0\] must have"),
        ({"images": [IMAGE | {"file_name": "\ud800.png"}]}, r"images\[0\] must have"),
        ({"images": [IMAGE | {"file_name": 3}]}, r"images\[0\] must have"),
        ({"images": [IMAGE | {"height": 10**30}]}, r"images\[0\] must have"),
        ({"images": [IMAGE | {"width": 0}]}, r"images\[0\] must have"),
    ],
)
def test_a_fault_is_named(root: Path, changes: dict[str, Any], said: str) -> None:
    (root / "train" / "annotations.json").write_text(json.dumps(annotations(**changes)))
    with pytest.raises(DataError, match=said) as caught:
        open_coco(str(root), masks=False, keep_empty=True)
    assert "annotations.json" in str(caught.value)


@pytest.mark.parametrize("outline", [None, [], [[]], {"counts": "04"}, {"size": [12, 16]}, "04", [3]])
def test_an_object_without_a_mask_to_draw_is_named_before_training(root: Path, outline: Any) -> None:
    pytest.importorskip("pycocotools")
    tree = annotations(annotations=[BOX | {"segmentation": SQUARE}, BOX | {"segmentation": outline}])
    (root / "val" / "annotations.json").write_text(json.dumps(tree))
    with pytest.raises(DataError, match=r"annotations\[1\] has the segmentation"):
        open_coco(str(root), masks=True, keep_empty=True)
    open_coco(str(root), masks=False, keep_empty=True)


def test_what_is_not_there_is_named(root: Path) -> None:
    with pytest.raises(DataError, match=r"needs data\.path"):
        open_coco(None, masks=False, keep_empty=True)
    (root / "val" / "annotations.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read as COCO's annotations"):
        open_coco(str(root), masks=False, keep_empty=True)
    (root / "val" / "annotations.json").unlink()
    with pytest.raises(DataError, match="neither annotations/instances_val2017"):
        open_coco(str(root), masks=False, keep_empty=True)
