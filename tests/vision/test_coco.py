"""COCO's annotations: what is read of them, and which fault of them is named."""

from __future__ import annotations

import copy
import itertools
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies
from PIL import Image

from paceline.data.image.datasets import content_of_files
from paceline.errors import DataError
from paceline.recipe.data import Boxes, Data
from paceline_vision.detection.annotations import AnnotatedSet, annotations_of
from paceline_vision.detection.dataset import BoxDataset
from paceline_vision.detection.outlines import mask_of, outline_fault
from paceline_vision.sets.coco import open_coco

# pycocotools' own, of NumPy 2.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)
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


def write(root: Path, split: str = "train", **changes: Any) -> None:
    (root / split / "annotations.json").write_text(json.dumps(annotations(**changes)))


def opened(root: Path, *, masks: bool = False, keep_empty: bool = True) -> BoxDataset:
    boxes = Boxes(masks=masks, keep_empty=keep_empty)
    return open_coco(Data(dataset="coco", path=str(root), detection=boxes))


def test_categories_become_classes_in_the_order_of_their_numbers(root: Path) -> None:
    found = opened(root)
    assert found.classes == ("dog", "cat")
    first = found.train.objects(0, masks=False)  # of image 10: the numbers' order, not the file's
    assert first.boxes.tolist() == [[1.5, 0, 21.5, 4], [1.5, 0, 1.5, 4]]
    assert first.labels.tolist() == [0, 0]
    assert found.train.objects(2, masks=False).labels.tolist() == [1]
    assert found.train.path(2).endswith("c.png")
    assert found.train.read(2).shape == (12, 16, 3)


def test_what_cannot_be_learned_is_left_out_of_training_alone(root: Path) -> None:
    found = opened(root, keep_empty=False)
    assert len(found.train) == 2  # not the crowd's picture
    assert len(found.validation) == 3
    crowd = found.validation.objects(1, masks=False)
    assert crowd.crowd.tolist() == [True]
    assert not len(crowd.trainable(12, 16).labels)
    learnable = found.train.objects(0, masks=False).trainable(12, 16)
    assert learnable.boxes.tolist() == [[1.5, 0, 16, 4]]  # cut at the edge; the one without width is gone


def test_what_is_left_out_is_counted(root: Path) -> None:
    assert opened(root, keep_empty=False).facts == {
        "pictures_without_objects_left_out": 1,
        "boxes_without_extent_left_out": 1,
    }
    for name in ("train/d.png", "train/sub/c.png", "val/a (1).png", "val/.hidden.png", "val/Thumbs.db"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).touch()
    assert opened(root, keep_empty=False).left_out == (
        "pictures without objects: 1 left out of training",
        "boxes without extent: 1 left out of training",
        *(
            f"{split}/annotations.json: {1 + ('around' in fault)} of 4 boxes {fault}, first annotations[{first}]"
            for split in ("train", "val")
            for fault, first in (
                ("reach beyond their picture", 2),
                ("have no width or no height", 3),
                ("are not around their outlines", 2),
            )
        ),
        "files that the annotations do not name: 3 left out ('train/d.png', 'train/sub/c.png', 'val/a (1).png')",
    )
    # One that lies outside its picture has no extent within it.
    write(root, annotations=[BOX, BOX | {"image_id": 20, "bbox": [100, 200, 30, 40]}])
    found = opened(root, keep_empty=False)
    assert (len(found.train), found.facts["boxes_without_extent_left_out"]) == (1, 1)
    assert "pictures_without_objects_left_out" not in opened(root).facts
    write(root, annotations=[])
    with pytest.raises(DataError, match=r"none of its 3 pictures has an object.*keep_empty"):
        opened(root, keep_empty=False)


def test_polygons_and_run_lengths_are_drawn(root: Path) -> None:
    pytest.importorskip("pycocotools")
    found = opened(root, masks=True)
    polygon, crowd = (found.train.objects(number, masks=True).masks for number in (2, 1))
    assert polygon is not None
    assert crowd is not None
    assert polygon.shape == (1, 12, 16)
    rows, columns = np.nonzero(polygon[0])
    assert (rows.min(), columns.min(), rows.max(), columns.max(), len(rows)) == (2, 2, 7, 5, 24)
    assert crowd[0, :, :2].all()  # run lengths go down the columns
    assert crowd.sum() == 24


@pytest.mark.parametrize("outline", [{"counts": [192], "size": [12, 16]}, [[2] * 6], [[-9, -9, -5, -9, -5, -5]]])
def test_a_mask_without_pixels_is_left_out_and_counted(root: Path, outline: Any) -> None:
    pytest.importorskip("pycocotools")
    write(root, annotations=[BOX | {"segmentation": each} for each in (SQUARE, SQUARE, outline)])
    found = opened(root, masks=True, keep_empty=False)
    assert "masks without pixels: 1 left out of training" in found.left_out
    assert len(found.train.objects(0, masks=True).trainable(12, 16).labels) == 2


def test_the_published_folders_are_found_too(root: Path) -> None:
    (root / "annotations").mkdir()
    for split in ("train", "val"):
        (root / split / "annotations.json").rename(root / "annotations" / f"instances_{split}2017.json")
        (root / split).rename(root / f"{split}2017")
    assert len(opened(root).train) == 3


@pytest.mark.parametrize(
    ("file", "held_out", "unread"),
    [
        ("{}/annotations.json", "valid", None),
        ("{}/_annotations.coco.json", "valid", "test"),  # Roboflow's
        ("{}/_annotations.coco.json", "test", None),
        ("annotations/instances_{}.json", "Validation", None),  # CVAT's
    ],
)
def test_splits_are_found_as_other_tools_name_them(root: Path, file: str, held_out: str, unread: str | None) -> None:
    (root / "annotations").mkdir()
    for old, new in (("train", "train"), ("val", held_out)):
        (root / old).rename(root / new)
        (root / new / "annotations.json").rename(root / file.format(new))
    if unread:
        shutil.copytree(root / held_out, root / unread)
    if held_out == "Validation":
        (root / "images").mkdir()
        (root / held_out).rename(root / "images" / held_out)
    found = opened(root)
    assert Path(found.validation.path(0)).parent.name == held_out
    assert (len(found.train), found.validation.read(0).shape) == (3, (12, 16, 3))
    said = "files of splits that are not read: 1 left out ('test/_annotations.coco.json')"
    assert (said in found.left_out) == bool(unread)


def test_sets_for_several_tests_are_no_hindrance(root: Path) -> None:
    (root / "annotations").mkdir()
    for name, old in (("trainval2012", "train"), ("val2012", "val"), ("test-dev", "val"), ("test2017", "val")):
        shutil.copytree(root / old, root / name)
        shutil.copy(root / old / "annotations.json", root / f"annotations/instances_{name}.json")
    found = opened(root)
    assert [Path(each.path(0)).parent.name for each in (found.train, found.validation)] == ["trainval2012", "val2012"]
    (root / "annotations/instances_val2012.json").unlink()
    for each in ("val", "val2012"):
        shutil.rmtree(root / each)
    with pytest.raises(DataError, match=r"several sets for 'test' \(instances_test-dev.json, instances_test2017.json"):
        opened(root)


def test_pictures_that_are_not_there_are_named_before_a_run(root: Path) -> None:
    (root / "train/a.png").rename(root / "a.png")
    told = "pictures that are not there and stop a run: 1 left out ('train/a.png')"
    assert told in opened(root).left_out
    (root / "train/b.png").unlink()
    with pytest.raises(DataError, match=r"2 of the 3 pictures that the annotations name are not in .*'a\.png'"):
        opened(root)


def test_the_digest_is_that_of_the_annotations(root: Path) -> None:
    before = opened(root).digest
    (root / "val" / "annotations.json").write_text(json.dumps(annotations(), indent=1))
    assert opened(root).digest != before


def test_pictures_have_a_digest_of_their_own(root: Path) -> None:
    def found() -> str | None:
        coco = opened(root)
        return content_of_files(coco.files, coco.digest)[0]

    before = found()
    Image.new("RGB", (16, 12), "blue").save(root / "val" / "b.png")
    assert found() not in (None, before)
    (root / "val" / "b.png").unlink()
    assert found() is None


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
    write(root, images=[IMAGE | {"file_name": f"lies.{ending}"}], annotations=[BOX])
    found = opened(root).train
    assert found.read(0).shape == (12, 16, 3)
    assert found.read(0)[:8, :8].min() > 200
    assert found.read(0)[8:].max() < 50
    assert found.read(0)[:, 8:].max() < 50


BOX = {"image_id": 10, "category_id": 7, "bbox": [0, 0, 4, 4]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"images": None}, "no list 'images'"),
        ({"images": [{"id": 1, "file_name": "../a.png", "height": 2, "width": 2}]}, "outside the folder"),
        ({"categories": [{"id": 1, "name": "x"}] * 2}, r"categories\[1\] has the id 1"),
        ({"images": [{"id": 1, "file_name": ".", "height": 2, "width": 2}]}, r"images\[0\] must have"),
        ({"categories": [{"id": 1, "name": "x"}, {"id": 2, "name": "x"}]}, r"categories\[1\] has the name 'x'"),
        ({"annotations": [BOX | {"image_id": 99}]}, r"annotations\[0\] has the image_id 99"),
        ({"annotations": [BOX, BOX | {"category_id": [1]}]}, r"annotations\[1\] has the category_id"),
        *(({"annotations": [BOX | {"bbox": said}]}, "bbox") for said in ([0, 0, -1, 4], "0 0 1 1")),
        ({"annotations": [BOX | {"bbox": [0, 0, float("nan"), 4]}]}, "bbox"),
        ({"annotations": [BOX | {"bbox": [0, 0, 10**400, 4]}]}, "bbox"),
        ({"annotations": [BOX | {"iscrowd": "0"}]}, r"annotations\[0\] has the iscrowd '0'"),
        ({"annotations": [3]}, "must be a mapping"),
        *(({"images": [IMAGE | {"file_name": x}]}, r"s\[0\] must have") for x in ("", "a\0.png", "\ud800.png", 3)),
        *(({"images": [IMAGE | each]}, r"images\[0\] must have") for each in ({"height": 10**30}, {"width": 0})),
        ({"images": [IMAGE, IMAGE | {"id": 11}]}, r"images\[1\] \(id 11\) has the file_name 'a.png'"),
        ({"images": [IMAGE, IMAGE | {"id": 11, "file_name": "./a.png"}]}, r"images\[1\] \(id 11\) has the file_name"),
        ({"categories": [{"id": 7, "name": "\ud800"}]}, r"categories\[0\] must have id and name"),
        ({"annotations": [BOX | {"id": 5, "bbox": None}]}, r"annotations\[0\] \(id 5\) has the bbox None"),
    ],
)
def test_a_fault_is_named(root: Path, changes: dict[str, Any], said: str) -> None:
    write(root, **changes)
    with pytest.raises(DataError, match=said) as caught:
        opened(root)
    assert "annotations.json" in str(caught.value)


RUNS = {"counts": [0, 24, 168], "size": [12, 16]}


@pytest.mark.parametrize(
    ("outline", "said"),
    [
        ([[2, 2, 6, 8]], "4 numbers"),
        ([SQUARE[0], [2, 2, 6, 2, 6, 8, 2]], "7 numbers"),
        ([[2, 2, 6, 2, 6, float("nan")]], "list of numbers"),
        ([[2, 2, 6, 2, 1e9, 8]], "far outside"),
        ([[2, 2, 6, 2, 6, 10**400, 1.5, 2]], "far outside"),
        ([[2, 2, 6, 2, 6, "8"]], "list of numbers"),
        (SQUARE[0], "list of numbers"),
        (RUNS | {"counts": [0, 24]}, "24 pixels"),
        (RUNS | {"counts": [0, 24, 190, -22]}, "counts"),
        (RUNS | {"counts": [0, 24, 168.0]}, "counts"),
        (RUNS | {"counts": [0, 24, 2**32 + 168]}, "pixels"),
        (RUNS | {"size": [16, 12]}, "size"),
        (RUNS | {"counts": ""}, "counts"),
        (RUNS | {"counts": "0"}, "0 pixels"),
        (RUNS | {"counts": "0h0X5" + "P"}, "counts"),  # the last number has no end
        (RUNS | {"counts": "\ud800"}, "counts"),
        ({}, "size"),
        *((each, "") for each in (None, [], [[]], {"counts": "04"}, {"size": [12, 16]}, "04", [3])),
    ],
)
def test_a_mask_that_cannot_be_drawn_is_named_before_training(root: Path, outline: Any, said: str) -> None:
    pytest.importorskip("pycocotools")
    write(root, annotations=[BOX | {"segmentation": SQUARE}, BOX | {"id": 314, "segmentation": outline}])
    with pytest.raises(DataError, match=rf"annotations\[1\] \(id 314\) has the segmentation.*{said}"):
        opened(root, masks=True)
    opened(root)


def test_faults_are_counted_and_the_first_few_named(root: Path) -> None:
    pytest.importorskip("pycocotools")
    faulty = [BOX | {"id": 100 + index, "segmentation": [[1, 1, 3, 3]]} for index in range(12)]
    write(root, "val", annotations=[BOX | {"id": 7, "segmentation": SQUARE}, *faulty])
    with pytest.raises(DataError, match=r"12 faults") as caught:
        opened(root, masks=True)
    assert [number for number in range(100, 112) if f"id {number}" in str(caught.value)] == list(range(100, 105))


def test_run_lengths_are_drawn_as_by_the_reference(root: Path) -> None:
    reference = pytest.importorskip("pycocotools.mask")
    draws = np.random.default_rng(5)
    for _ in range(200):
        height, width = draws.integers(1, 40, 2).tolist()
        drawn = (draws.random((height, width)) < draws.random()).astype(np.uint8)
        packed = reference.encode(np.asfortranarray(drawn))
        counts = [len(list(run)) for _, run in itertools.groupby([0, *drawn.T.ravel().tolist()])]
        counts[0] -= 1
        for each in (packed["counts"].decode(), counts):
            outline = {"counts": each, "size": [height, width]}
            assert outline_fault(outline, height, width) is None
            assert (mask_of(outline, height, width) == drawn).all()


def test_a_changed_file_is_refused_or_read_alike_twice(root: Path) -> None:
    """Whatever one value of the file is replaced with, nothing fails later, and no mask depends on what memory held."""
    reference = pytest.importorskip("pycocotools.mask")
    packed = reference.encode(np.asfortranarray(np.eye(12, 16, dtype=np.uint8)))["counts"].decode()
    junk = [None, True, -1, 0, 3, 2**40, 10**400, 1.5, 1e308, float("nan"), float("inf"), "", "07", packed, "o" * 40]
    containers: list[Any] = [[], {}, [[]], [1, 2, 3, 4], [[1, 2, 3, 4, 5, 6, 7]], RUNS, RUNS | {"counts": packed[:-1]}]
    draws = random.Random(3)
    outcomes = set()
    for _ in range(600):
        tree = copy.deepcopy(annotations())
        tree["annotations"].append(BOX | {"id": 5, "segmentation": {"counts": packed, "size": [12, 16]}})
        at: Any = draws.choice([tree, *tree["images"], *tree["annotations"] * 4])
        while True:
            key = draws.choice(list(at) if isinstance(at, dict) else range(len(at)))
            if not isinstance(at[key], dict | list) or not at[key] or draws.random() < 0.2:
                break
            at = at[key]
        at[key] = copy.deepcopy(draws.choice([*junk, *containers]))
        (root / "train" / "annotations.json").write_text(json.dumps(tree))
        try:
            found = opened(root, masks=True).train
        except DataError:
            outcomes.add("refused")
            continue
        outcomes.add("read")
        for sample in np.flatnonzero((found.sizes == (12, 16)).all(axis=1)).tolist():
            first, second = (found.objects(sample, masks=True) for _ in range(2))
            assert np.isfinite(first.boxes).all()
            assert first.masks is not None
            assert second.masks is not None
            assert first.masks.shape[1:] == (12, 16)
            assert first.masks.max(initial=0) <= 1
            assert first.masks.tobytes() == second.masks.tobytes()
    assert outcomes == {"refused", "read"}


def test_what_is_not_there_is_named(root: Path) -> None:
    with pytest.raises(DataError, match=r"needs data\.path"):
        open_coco(Data(dataset="coco"))
    (root / "val" / "annotations.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read as COCO's annotations"):
        opened(root)
    (root / "val" / "annotations.json").unlink()
    with pytest.raises(DataError, match="neither annotations/instances_val2017"):
        opened(root)


boxes_of_64x48 = strategies.tuples(
    strategies.integers(0, 63), strategies.integers(0, 47), strategies.integers(1, 64), strategies.integers(1, 48)
).map(lambda box: [box[0], box[1], min(box[2], 64 - box[0]), min(box[3], 48 - box[1])])


def told_of(folder: Path, boxes: list[Any], outlines: list[Any] | None = None, *, masks: bool = True) -> str:
    """What is said of some boxes in a picture of 64x48, and of their outlines."""
    entries = [
        {"id": 70 + at, "image_id": 1, "category_id": 1, "bbox": box, "segmentation": outline}
        for at, (box, outline) in enumerate(zip(boxes, outlines or boxes, strict=True))
    ]
    image = {"id": 1, "file_name": "a.png", "width": 64, "height": 48}
    tree = {"images": [image], "categories": [{"id": 1, "name": "bolt"}], "annotations": entries}
    try:
        found, _ = annotations_of(
            AnnotatedSet(file=folder / "annotations.json", folder=folder, tree=tree),
            masks=masks and outlines is not None,
        )
    except DataError as error:
        return f"refused: {error}"
    return " ".join(found.implausible)


@pytest.mark.parametrize(
    ("boxes", "likely"),
    [
        ([[30, 20, 55, 40], [50, 4, 62, 34]], "corners"),
        ([[30 / 64, 20 / 48, 25 / 64, 20 / 48], [0, 0, 0.5, 1]], "fractions"),
        ([[42.5, 30, 25, 20], [56, 19, 12, 30]], "centres"),
    ],
)
def test_boxes_in_another_format_are_refused_with_the_likely_one(
    tmp_path: Path, boxes: list[list[float]], likely: str
) -> None:
    said = told_of(tmp_path, boxes)
    assert said.startswith("refused")
    assert f"look like {likely}" in said
    assert "annotations[0] (id 70)" in said


def test_some_implausible_boxes_are_told_with_their_number(tmp_path: Path) -> None:
    fine = [[30, 20, 25, 20]] * 6
    said = told_of(tmp_path, [*fine, [60, 40, 9, 4], [1, 1, 0.4, 9], [-3, 0, 9, 9]])
    assert "2 of 9 boxes reach beyond their picture, first annotations[6] (id 76)" in said
    assert "1 of 9 boxes are below a pixel, first annotations[7] (id 77)" in said
    assert "look like" not in said


def test_boxes_without_an_extent_are_not_called_fractions(tmp_path: Path) -> None:
    for boxes in ([[0, 0, 0, 0]] * 2, [[30, 20, 0, 9], [9, 9, 8, 0]]):
        said = told_of(tmp_path, boxes)
        assert "refused" in said
        assert "2 of 2 boxes have no width or no height, first annotations[0] (id 70)" in said
        assert "look like" not in said


def test_annotations_listed_twice_are_counted(tmp_path: Path) -> None:
    box, other = [30, 20, 25, 20], [30, 20, 25, 21]
    assert "2 of 4 boxes are copies of another box, first annotations[2] (id 72)" in told_of(
        tmp_path, [box, other, box, [30.0, 20.0, 25.0, 20.0]]
    )


@pytest.mark.parametrize(
    ("outline", "said"),
    [
        ([[x / 64, y / 48] for x, y in ((30, 20), (55, 20), (55, 40))], "refused.*look like fractions"),
        ([[30, 20], [70, 20], [55, 40]], "refused.*reach beyond their picture"),
    ],
)
def test_implausible_outlines_are_refused(tmp_path: Path, outline: list[list[float]], said: str) -> None:
    pytest.importorskip("pycocotools")
    assert re.search(said, told_of(tmp_path, [[30, 20, 25, 20]], [[list(itertools.chain(*outline))]]))


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("box", [[20, 30, 12, 15], [2, 3, 15, 12], [30, 20, 60, 28], [37, 26, 15, 12]])
def test_boxes_that_are_not_around_their_outlines_are_told(tmp_path: Path, box: list[float], masks: bool) -> None:
    pytest.importorskip("pycocotools")
    outline = [[30, 20, 45, 20, 45, 32, 30, 32]]
    said = told_of(tmp_path, [[30, 20, 15, 12], [29, 19, 17, 13], box], [outline] * 3, masks=masks)
    assert "1 of 3 boxes are not around their outlines, first annotations[2] (id 72)" in said


@settings(max_examples=40)
@given(strategies.lists(boxes_of_64x48, min_size=1, max_size=6, unique_by=tuple), strategies.floats(0, 0.9))
def test_what_lies_in_its_picture_is_never_called_implausible(
    tmp_path_factory: pytest.TempPathFactory, boxes: list[list[int]], rounding: float
) -> None:
    outlines = [[[x, y, x + width, y, x + width, y + height, x, y + height]] for x, y, width, height in boxes]
    rounded = [[x - rounding, y, width + 2 * rounding, height] for x, y, width, height in boxes]
    assert told_of(tmp_path_factory.getbasetemp(), rounded, outlines) == ""


@settings(max_examples=40)
@given(strategies.lists(boxes_of_64x48, min_size=2, max_size=6), strategies.data())
def test_what_leaves_its_picture_or_has_no_pixel_is_always_counted(
    tmp_path_factory: pytest.TempPathFactory, boxes: list[list[int]], data: strategies.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp()
    at = data.draw(strategies.integers(0, len(boxes) - 1))
    x, y, width, height = boxes[at]
    broken = [[x, y, 66 - x, height], [x, y, width, 50 - y], [-2, y, width, height]]
    broken += [[x, y, 0.5, height], [x, y, width, 0]]
    said = told_of(folder, [*boxes[:at], data.draw(strategies.sampled_from(broken)), *boxes[at + 1 :]])
    assert f"1 of {len(boxes)} boxes" in said
    assert f"annotations[{at}] (id {70 + at})" in said
