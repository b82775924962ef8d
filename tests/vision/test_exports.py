"""Folders as annotation tools export them: found by their files, read alike, and refused with one sentence."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from annotated_folders import (
    CLASSES,
    HEIGHT,
    ONE_SET,
    WIDTH,
    Picture,
    coco,
    cvat,
    cvat_coco,
    drawn,
    label_studio,
    label_studio_yolo,
    labelimg,
    labelme,
    outline,
    roboflow_coco,
    roboflow_yolo,
    ultralytics,
    voc,
    write_picture,
)
from PIL import Image

from paceline.errors import DataError
from paceline.plugins.dataset_registry import Place, entries, find_dataset
from paceline.recipe.data import Boxes, Data
from paceline_vision.detection.dataset import BoxDataset, BoxSource

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"  # pycocotools' own, of NumPy 2
)


def opened(root: Path, name: str, *, masks: bool = False, **keys: Any) -> BoxDataset:
    """The data set of a folder; keep_empty, so that each picture is there."""
    entry = find_dataset(name, "boxes")
    assert entry is not None
    data = Data(dataset=name, path=str(root), detection=Boxes(masks=masks, keep_empty=True), **keys)
    found = entry.open(data)
    assert isinstance(found, BoxDataset)
    return found


def read(source: BoxSource, classes: tuple[str, ...]) -> dict[str, list[tuple[str, list[float]]]]:
    """The objects of each picture by its name, without an upload's prefix; the picture is as large as it says."""
    found = {}
    for sample in range(len(source)):
        assert source.read(sample).shape[:2] == tuple(source.sizes[sample])
        objects = source.objects(sample, masks=False)
        boxes = np.round(objects.boxes, 1).tolist()
        name = re.sub(r"^[0-9a-f]{8}-", "", os.path.basename(source.path(sample)))
        found[name] = sorted(zip([classes[each] for each in objects.labels], boxes, strict=True))
    return found


def expected(pictures: list[Picture]) -> dict[str, list[tuple[str, list[float]]]]:
    return {each.name: sorted((label, list(map(float, box))) for label, box in each.objects) for each in pictures}


@pytest.mark.parametrize(
    ("form", "polygons"),
    [(form, polygons) for form, (name, _) in ONE_SET.items() for polygons in (False, True)[: 1 + (name != "voc")]],
)
def test_exports_are_found_by_their_files_and_read_alike(tmp_path: Path, form: str, polygons: bool) -> None:
    name, write = ONE_SET[form]
    pictures = drawn(range(10), polygons=polygons)
    write(tmp_path / "data", pictures)
    assert [each.name for each in entries() if each.pictures is not None and each.reads(Place(tmp_path / "data"))] == [
        name
    ]
    found = opened(tmp_path / "data", name)
    assert found.classes == CLASSES
    # JSON-MIN has no key for the label of a picture without objects, so such a picture counts as not annotated.
    seen = read(found.train, found.classes) | read(found.validation, found.classes)
    assert seen == {key: value for key, value in expected(pictures).items() if value or form != "label_studio_min"}
    assert len(found.train) + len(found.validation) == len(seen)
    assert len(found.validation) in (2, 3)  # of each rarest class, and of the pictures without objects, at least one
    assert "20% of the pictures" in found.split
    if polygons:
        pytest.importorskip("pycocotools")
        masks = opened(tmp_path / "data", name, masks=True)
        drawn_masks = masks.train.objects(0, masks=True).masks
        assert drawn_masks is not None
        assert 0.4 * 20 * 12 < drawn_masks[0].sum() < 20 * 12


@pytest.mark.parametrize("write", [ultralytics, labelme, cvat, voc, labelimg])
def test_splits_of_an_export_are_kept(tmp_path: Path, write: Callable[..., None]) -> None:
    write(tmp_path, drawn(range(6)), drawn(range(6, 9)))
    name = {"ultralytics": "yolo", "labelimg": "voc"}.get(write.__name__, write.__name__)
    found = opened(tmp_path, name)
    assert read(found.train, found.classes) == expected(drawn(range(6)))
    assert read(found.validation, found.classes) == expected(drawn(range(6, 9)))
    assert not found.is_split_off


@pytest.mark.parametrize(("name", "write"), [("coco", roboflow_coco), ("yolo", roboflow_yolo)])
def test_roboflow_has_a_test_split_which_is_reported(tmp_path: Path, name: str, write: Callable[..., None]) -> None:
    write(tmp_path, drawn(range(6)), drawn(range(6, 9)), drawn(range(9, 11)))
    found = opened(tmp_path, name)
    assert read(found.train, found.classes) == expected(drawn(range(6)))
    assert read(found.validation, found.classes) == expected(drawn(range(6, 9)))
    assert any("test" in each for each in found.left_out)


def test_the_held_out_part_is_always_the_same_and_has_rare_classes(tmp_path: Path) -> None:
    pictures = [Picture(f"picture_{number:02}.png", (("bolt", (1, 1, 9, 9)),)) for number in range(40)]
    pictures[7] = Picture("picture_07.png", (("bolt", (1, 1, 9, 9)), ("nut", (20, 20, 30, 30))))
    pictures[31] = Picture("picture_31.png", (("nut", (20, 20, 30, 30)),))
    cvat_coco(tmp_path, pictures)
    first, again = opened(tmp_path, "coco"), opened(tmp_path, "coco")
    assert [first.validation.path(each) for each in range(8)] == [again.validation.path(each) for each in range(8)]
    for source in (first.train, first.validation):
        assert sum(1 in source.objects(each, masks=False).labels for each in range(len(source))) == 1
    assert len(opened(tmp_path, "coco", validation_fraction=0.5).validation) == 20
    assert len(opened(tmp_path, "coco", validation_fraction=0).validation) == 0
    every = opened(tmp_path, "coco", validation_fraction=1)
    assert len(every.train) == len(every.validation) == 40


@pytest.mark.parametrize("with_path", [False, True])
def test_an_annotation_file_may_be_anywhere(tmp_path: Path, with_path: bool) -> None:
    pictures = drawn(range(10))
    cvat_coco(tmp_path / "data", pictures)
    shutil.copy(tmp_path / "data/annotations/instances_default.json", tmp_path / "data/annotations/instances_old.json")
    with pytest.raises(DataError, match=r"several annotation files \(instances_default.json, instances_old.json\)"):
        opened(tmp_path / "data", "coco")
    file = tmp_path / "data/annotations/instances_old.json"
    if with_path:
        file = file.rename(tmp_path / "elsewhere.json")
    entry = find_dataset("coco", "boxes")
    assert entry is not None
    path = str(tmp_path / "data/images/default") if with_path else None
    found = entry.open(Data(dataset="coco", path=path, annotations=str(file)))
    assert len(found.train) + len(found.validation) == 9  # without one that has no object
    with pytest.raises(DataError, match=r"is not a file; there is '.*instances_default\.json'"):
        opened(tmp_path / "data", "coco", annotations=str(tmp_path / "instances_default.json"))


def _replaced(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def _label_studio_file(root: Path) -> Path:
    return next(root.glob("project*.json"))


FAULTS: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "yolo class": (
        "yolo",
        lambda root: (root / "labels/picture_02.txt").write_text("0 .5 .5 .1 .1\n2 .5 .5 .1 .1\n"),
        r"labels/picture_02\.txt line 2 has the class 2, but there are 2 class names",
    ),
    "yolo words": (
        "yolo",
        lambda root: (root / "labels/picture_02.txt").write_text("bolt 0.5 0.5 0.1 0.1\n"),
        r"labels/picture_02\.txt line 1 is 'bolt 0\.5 0\.5 0\.1 0\.1'; it must be a class and x, y, width and height",
    ),
    "yolo nan": (
        "yolo",
        lambda root: (root / "labels/picture_02.txt").write_text("0 nan 0.5 0.1 0.1\n"),
        r"line 1 has \[nan, .*\], which must be numbers of at most",
    ),
    "yolo many classes": (
        "yolo",
        lambda root: (
            (root / "classes.txt").unlink(),
            (root / "labels/picture_02.txt").write_text("10000 .5 .5 .1 .1\n"),
        ),
        "labels of the class 10000, and no file of class names",
    ),
    "yolo negative": (
        "yolo",
        lambda root: (root / "labels/picture_02.txt").write_text("0 .5 .5 -.1 .1\n"),
        "line 1 has a negative width or height",
    ),
    "yolo pixels": (
        "yolo",
        lambda root: [each.write_text("0 30 20 10 12\n") for each in (root / "labels").iterdir()],
        r"8 of 8 boxes reach beyond their picture.*YOLO's numbers are shares",
    ),
    "yolo no labels": ("yolo", lambda root: shutil.rmtree(root / "labels"), "no text file with labels"),
    "yolo broken picture": (
        "yolo",
        lambda root: (root / "images/picture_01.png").write_bytes(b"no picture"),
        r"1 pictures that cannot be read \('images/picture_01.png'\)",
    ),
    "yolo names": (
        "yolo",
        lambda root: (root / "data.yaml").write_text("names: [a\n"),
        "cannot be read as YOLO's class",
    ),
    "yolo gap": ("yolo", lambda root: (root / "data.yaml").write_text("names: {0: a, 2: b}\n"), "number them from 0"),
    "labelme json": (
        "labelme",
        lambda root: (root / "picture_02.json").write_text('{"shapes": ['),
        r"picture_02\.json cannot be read as labelme's annotations",
    ),
    "labelme picture": (
        "labelme",
        lambda root: (root / "picture_02.png").unlink(),
        r"picture_02\.json names the picture 'picture_02\.png', which is not there",
    ),
    "labelme escape": (
        "labelme",
        lambda root: (
            (root / "picture_02.png").rename(root.parent / "outside.png"),
            _replaced(root / "picture_02.json", "picture_02.png", "../outside.png"),
        ),
        r"names the picture '\.\./outside\.png', which is not there",
    ),
    "labelme twice": (
        "labelme",
        lambda root: shutil.copy(root / "picture_02.json", root / "picture_02_copy.json"),
        r"picture_02_copy\.json and picture_02\.json name the same picture",
    ),
    "labelme points": (
        "labelme",
        lambda root: _replaced(root / "picture_02.json", '"points": [[', '"points": [["x", '),
        r"picture_02\.json shapes\[0\] must have a label, and points",
    ),
    "labelme circle": (
        "labelme",
        lambda root: (root / "picture_02.json").write_text(
            '{"imagePath": "picture_02.png", "shapes": [{"label": "bolt", "shape_type": "circle", '
            '"points": [[1e200, 0], [0, 0]]}]}'
        ),
        r"picture_02\.json shapes\[0\] has \[1e\+200, 0, 0, 0\], which must be numbers of at most",
    ),
    "label studio address": (
        "label_studio",
        lambda root: _replaced(_label_studio_file(root), "/data/upload/7/00000002-", "http://[00000002-"),
        r"\[2\] \(id 12\) names no picture",
    ),
    "label studio huge number": (
        "label_studio",
        lambda root: _replaced(_label_studio_file(root), '"x": 6.25', f'"x": 1{400 * "0"}'),
        "whose x, y, width and height must be numbers",
    ),
    "label studio json": (
        "label_studio",
        lambda root: _label_studio_file(root).write_text('[{"annotations": '),
        "cannot be read as Label Studio's tasks",
    ),
    "label studio picture": (
        "label_studio",
        lambda root: (root / "picture_02.png").unlink(),
        r"\[2\] \(id 12\) names the picture '/data/upload/7/00000002-picture_02\.png', which is not in the folder",
    ),
    "label studio numbers": (
        "label_studio",
        lambda root: _replaced(_label_studio_file(root), '"x": 6.25', '"x": "left"'),
        "whose x, y, width and height must be numbers",
    ),
    "label studio twice": (
        "label_studio",
        lambda root: _replaced(_label_studio_file(root), "00000003-picture_03", "00000003-picture_02"),
        "name the same picture, picture_02.png",
    ),
    "cvat xml": (
        "cvat",
        lambda root: _replaced(root / "annotations.xml", "</annotations>", ""),
        "cannot be read as CVAT's annotations",
    ),
    "cvat entities": (
        "cvat",
        lambda root: _replaced(
            root / "annotations.xml", "<annotations>", '<!DOCTYPE a [<!ENTITY b "c">]><annotations>'
        ),
        "declares entities",
    ),
    "cvat hidden entities": (
        "cvat",
        lambda root: (root / "annotations.xml").write_bytes(
            '<!DOCTYPE a [<!ENTITY b "c">]><annotations/>'.encode("utf-16")
        ),
        "cannot be read as CVAT's annotations",
    ),
    "cvat video": (
        "cvat",
        lambda root: _replaced(root / "annotations.xml", "</annotations>", "<track/></annotations>"),
        "tracks of a video",
    ),
    "cvat label": (
        "cvat",
        lambda root: _replaced(root / "annotations.xml", 'label="bolt"', 'label="screw"'),
        r"box of picture_00\.png has the label 'screw'",
    ),
    "cvat numbers": (
        "cvat",
        lambda root: _replaced(root / "annotations.xml", 'xtl="4.00"', 'xtl=""'),
        r"box of picture_00\.png has coordinates that are not numbers",
    ),
    "cvat points": (
        "cvat polygons",
        lambda root: _replaced(root / "annotations.xml", 'points="4.00,9.00;', 'points="4.00,9.00;7.00;'),
        r"polygon of picture_00\.png has coordinates that are not numbers, or points that are not x,y",
    ),
    "cvat points of three": (
        "cvat polygons",
        lambda root: _replaced(root / "annotations.xml", 'points="4.00,9.00;', 'points="4.00,9.00,7.00;1;'),
        r"polygon of picture_00\.png has coordinates that are not numbers, or points that are not x,y",
    ),
    "cvat nan": (
        "cvat polygons",
        lambda root: _replaced(root / "annotations.xml", 'points="4.00,9.00;', 'points="nan,9.00;'),
        r"polygon of picture_00\.png has \[nan, 9\.0, .*which must be numbers of at most",
    ),
    "voc xml": (
        "voc",
        lambda root: _replaced(root / "Annotations/picture_02.xml", "</annotation>", ""),
        r"picture_02\.xml' cannot be read as VOC's annotations",
    ),
    "voc entities": (
        "voc",
        lambda root: _replaced(
            root / "Annotations/picture_02.xml", "<annotation>", '<!DOCTYPE a [<!ENTITY b "c">]><annotation>'
        ),
        r"picture_02\.xml' declares entities, which VOC's files never do",
    ),
    "voc picture": (
        "voc",
        lambda root: (root / "JPEGImages/picture_02.png").unlink(),
        r"Annotations/picture_02\.xml names the picture 'picture_02\.png', which is not there",
    ),
    "voc escape": (
        "voc",
        lambda root: (
            (root / "JPEGImages/picture_02.png").rename(root.parent / "outside.png"),
            _replaced(root / "Annotations/picture_02.xml", "picture_02.png", "../../outside.png"),
        ),
        r"names the picture '\.\./\.\./outside\.png', which is not there",
    ),
    "voc twice": (
        "voc",
        lambda root: shutil.copy(root / "Annotations/picture_02.xml", root / "Annotations/picture_02_copy.xml"),
        r"picture_02_copy\.xml and Annotations/picture_02\.xml name the same picture",
    ),
    "voc numbers": (
        "voc",
        lambda root: _replaced(root / "Annotations/picture_02.xml", "<xmin>7</xmin>", "<xmin>left</xmin>"),
        r"Annotations/picture_02\.xml object 1 must have a bndbox with the numbers xmin, ymin, xmax and ymax",
    ),
    "voc nan": (
        "voc",
        lambda root: _replaced(root / "Annotations/picture_02.xml", "<xmax>26</xmax>", "<xmax>nan</xmax>"),
        r"picture_02\.xml object 1 has \[6\.0, .*nan.*\], which must be numbers of at most",
    ),
    "voc name": (
        "voc",
        lambda root: _replaced(root / "Annotations/picture_02.xml", "<name>bolt</name>", "<name> </name>"),
        r"Annotations/picture_02\.xml object 1 has no name",
    ),
    "voc size": (
        "voc",
        lambda root: _replaced(root / "Annotations/picture_02.xml", "<width>64</width>", "<width>640</width>"),
        r"Annotations/picture_02\.xml says 640x48 pixels, and the picture has 64x48",
    ),
    "voc nothing": (
        "voc",
        lambda root: [each.write_text("") for each in (root / "Annotations").iterdir()],
        "holds no picture with annotations",
    ),
    "cvat escape": (
        "cvat",
        lambda root: _replaced(root / "annotations.xml", 'name="picture_00.png"', 'name="../picture_00.png"'),
        r"images\[0\] is outside the folder of pictures: '\.\./picture_00\.png'",
    ),
    "cvat size": (
        "cvat",
        lambda root: _replaced(root / "annotations.xml", 'width="64"', 'width="6400000"'),
        "must have name, width and height, with at most",
    ),
    "cvat pictures": (
        "cvat",
        lambda root: [each.unlink() for each in list((root / "images").iterdir())[:6]],
        "6 of the 10 pictures that the annotations name are not in",
    ),
    "cvat boxes": (
        "cvat",
        lambda root: _replaced(root / "annotations.xml", 'xbr="24.00"', 'xbr="124.00"'),
        "",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_with_its_place(tmp_path: Path, fault: str) -> None:
    name, spoil, said = FAULTS[fault]
    writers = {"yolo": label_studio_yolo, "labelme": labelme, "label_studio": label_studio, "cvat": cvat, "voc": voc}
    root, (name, _, polygons) = tmp_path / "data", name.partition(" ")
    writers[name](root, drawn(range(10), polygons=bool(polygons)))
    spoil(root)
    if not said:
        (told,) = opened(root, name).implausible
        assert "1 of 16 boxes reach beyond their picture, first box of picture_00.png" in told
        return
    with pytest.raises(DataError, match=said) as caught:
        opened(root, name)
    assert "\n" not in str(caught.value)


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_vision.detection.annotations._MOST_BYTES", 100)
    cvat_coco(tmp_path, drawn(range(4)))
    with pytest.raises(DataError, match="and at most 100 are read: split it"):
        opened(tmp_path, "coco")


def test_what_is_not_read_is_reported(tmp_path: Path) -> None:
    labelme(tmp_path / "labelme", drawn(range(6)))
    shape = {"label": "bolt", "points": [[1, 2]], "shape_type": "point", "group_id": None}
    _replaced(tmp_path / "labelme/picture_01.json", '"shapes": [', f'"shapes": [{json.dumps(shape)}, ')
    write_picture(tmp_path / "labelme/unseen.png")
    said = " ".join(opened(tmp_path / "labelme", "labelme").left_out)
    assert "shapes that are not read (point): 1" in said
    assert "files that the annotations do not name: 1 left out ('labelme/unseen.png')" in said
    cvat(tmp_path / "cvat", drawn(range(6)))
    _replaced(tmp_path / "cvat/annotations.xml", "</image>", '<polyline label="bolt" points="1,1;2,2"/></image>')
    assert "shapes that are not read (polyline): 1" in " ".join(opened(tmp_path / "cvat", "cvat").left_out)


def test_parts_with_one_group_are_one_object(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    labelme(tmp_path, [Picture("picture_00.png", (("nut", (2, 2, 12, 12)), ("nut", (30, 20, 40, 40))), polygons=True)])
    text = (tmp_path / "picture_00.json").read_text()
    (tmp_path / "picture_00.json").write_text(text.replace('"group_id": null', '"group_id": 3'))
    found = opened(tmp_path, "labelme", masks=True, validation_fraction=0).train.objects(0, masks=True)
    assert found.boxes.tolist() == [[2, 2, 40, 40]]
    assert found.masks is not None
    assert found.masks[0, :, 14:28].sum() == 0


def test_cvats_masks_and_turned_boxes_are_read(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    cvat(tmp_path, [Picture("picture_00.png")])
    mask = '<mask label="nut" rle="0, 2, 2, 2" left="5" top="7" width="3" height="2"/>'
    box = '<box label="bolt" xtl="10" ytl="20" xbr="30" ybr="26" rotation="90"/>'
    round_one = '<ellipse label="bolt" cx="40" cy="24" rx="10" ry="4"/>'
    corner = '<mask label="nut" rle="0, 4" left="0" top="0" width="2" height="2"/>'
    _replaced(tmp_path / "annotations.xml", "</image>", f"{mask}{box}{round_one}{corner}</image>")
    found = opened(tmp_path, "cvat", masks=True, validation_fraction=0).train.objects(0, masks=True)
    assert found.masks is not None
    assert found.masks[0, 7:9, 5:8].tolist() == [[1, 1, 0], [0, 1, 1]]
    assert found.masks[0].sum() == 4
    assert np.round(found.boxes).tolist() == [[5, 7, 8, 9], [17, 13, 23, 33], [30, 20, 50, 28], [0, 0, 2, 2]]
    assert (found.masks[3, :2, :2].sum(), found.masks[3].sum()) == (4, 4)


def test_pictures_turn_as_their_labels_do(tmp_path: Path) -> None:
    """labelme and YOLO label the displayed picture; COCO labels the stored pixels."""
    labelme(tmp_path, [Picture("picture_00.png", (("nut", (2, 2, 12, 12)),))])
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / "picture_00.png", exif=exif)
    found = opened(tmp_path, "labelme", validation_fraction=0).train
    assert found.read(0).shape[:2] == tuple(found.sizes[0]) == (WIDTH, HEIGHT)


def test_an_unlabelled_folder_is_no_export(tmp_path: Path) -> None:
    for number in range(4):
        write_picture(tmp_path / f"class_{number % 2}" / f"{number}.png", number)
    (tmp_path / "package.json").write_text('{"version": "1.0", "images": 3}')
    (tmp_path / "notes.txt").write_text("hello")
    os.mkfifo(tmp_path / "pipe.json")  # which would block a reader for ever
    assert not [each.name for each in entries() if each.pictures is not None and each.reads(Place(tmp_path))]


def test_roboflows_outlines_and_empty_files(tmp_path: Path) -> None:
    label_studio_yolo(tmp_path, drawn(range(6), polygons=True))
    (tmp_path / "labels/picture_04.txt").write_text("")
    found = opened(tmp_path, "yolo", validation_fraction=0)
    assert found.train.objects(4, masks=False).boxes.shape == (0, 4)
    assert outline((0, 0, 4, 4))[:2] == [0, 2]
    assert coco([], first_id=0)["annotations"] == []


@pytest.mark.parametrize("name", ["labelme", "voc", "yolo"])
def test_only_the_first_entries_of_a_huge_folder_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def endless(_: Any) -> Any:
        for number in range(20_000):
            yield SimpleNamespace(name=f"{number}.png", path=f"{number}.png", is_dir=bool)
        pytest.fail("the folder was listed to its end")

    (tmp_path / "classes.txt").write_text("bolt\n")
    entry, place = find_dataset(name, "boxes"), Place(tmp_path)
    assert entry is not None
    monkeypatch.setattr("os.scandir", lambda folder: contextlib.closing(endless(folder)))
    assert not entry.reads(place)
