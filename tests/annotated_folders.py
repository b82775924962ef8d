"""The same annotated pictures in folders as annotation tools export them.

Layouts: CVAT's "COCO 1.0", "CVAT for images 1.1", "YOLO 1.1" and "Ultralytics YOLO Detection 1.0" (docs.cvat.ai,
formats), Label Studio's JSON, JSON-MIN, COCO and YOLO exports (labelstud.io/guide/export, and its converter), labelme's
files next to the pictures, Roboflow's COCO and YOLOv8 exports, Ultralytics' data sets (docs.ultralytics.com/datasets).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 64, 48
CLASSES = ("bolt", "nut")
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Picture:
    """A picture with its boxes (left, top, right, bottom); outlines are their corners, cut at two of them."""

    name: str
    objects: tuple[tuple[str, Box], ...] = ()
    polygons: bool = field(default=False, kw_only=True)


def outline(box: Box) -> list[float]:
    """Return a six-cornered outline that touches all sides of a box."""
    left, top, right, bottom = box
    x, y = (left + right) / 2, (top + bottom) / 2
    return [left, y, x, top, right, top, right, y, x, bottom, left, bottom]


def drawn(numbers: Sequence[int], *, polygons: bool = False) -> list[Picture]:
    """Return pictures with two objects each; every fifth has none."""
    found = []
    for number in numbers:
        left, top = 4 + number % 7, 3 + number % 5
        boxes = [(CLASSES[number % 2], (left, top, left + 20, top + 12)), ("nut", (32, 16, 32 + 16, 16 + 24))]
        objects: Any = () if number % 5 == 4 else tuple(boxes)
        found.append(Picture(f"picture_{number:02}.png", objects, polygons=polygons))
    return found


def write_picture(path: Path, number: int = 0) -> None:
    """Write noise that differs by number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def _write_pictures(folder: Path, pictures: Sequence[Picture], name: Callable[[str], str] = str) -> None:
    for each in pictures:
        write_picture(folder / name(each.name), int(each.name[8:10]))


def coco(pictures: Sequence[Picture], *, first_id: int = 1, prefix: str = "") -> dict[str, Any]:
    """Return COCO's lists; CVAT and Roboflow number from 1 or 0."""
    annotations: list[dict[str, Any]] = []
    for number, picture in enumerate(pictures):
        for label, box in picture.objects:
            left, top, right, bottom = box
            annotations.append(
                {
                    "id": first_id + len(annotations),
                    "image_id": first_id + number,
                    "category_id": first_id + CLASSES.index(label),
                    "segmentation": [outline(box)] if picture.polygons else [],
                    "area": (right - left) * (bottom - top),
                    "bbox": [left, top, right - left, bottom - top],
                    "iscrowd": 0,
                }
            )
    images = [
        {"id": first_id + number, "width": WIDTH, "height": HEIGHT, "file_name": prefix + each.name}
        for number, each in enumerate(pictures)
    ]
    categories = [{"id": first_id + number, "name": name, "supercategory": ""} for number, name in enumerate(CLASSES)]
    return {"licenses": [], "info": {}, "categories": categories, "images": images, "annotations": annotations}


def _write_json(path: Path, tree: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree))


def cvat_coco(root: Path, pictures: Sequence[Picture]) -> None:
    """Write a task: its subset is called default."""
    _write_json(root / "annotations/instances_default.json", coco(pictures))
    _write_pictures(root / "images/default", pictures)


def cvat_coco_flat(root: Path, pictures: Sequence[Picture]) -> None:
    """Write a task as older versions do."""
    _write_json(root / "annotations/instances_default.json", coco(pictures))
    _write_pictures(root / "images", pictures)


def label_studio_coco(root: Path, pictures: Sequence[Picture]) -> None:
    """Write result.json as exported on Windows."""
    _write_json(root / "result.json", coco(pictures, first_id=0, prefix="images\\"))
    _write_pictures(root / "images", pictures)


def one_coco_file(root: Path, pictures: Sequence[Picture]) -> None:
    """Write a file of any name next to the pictures."""
    _write_json(root / "labels_export.json", coco(pictures))
    _write_pictures(root, pictures)


def roboflow_coco(
    root: Path, pictures: Sequence[Picture], held_out: Sequence[Picture], tests: Sequence[Picture]
) -> None:
    """Write train, valid and test, and two texts; a first category, which no object has, groups the others."""
    for name, part in (("train", pictures), ("valid", held_out), ("test", tests)):
        tree = coco(part)
        for each in tree["categories"]:
            each["supercategory"] = "fasteners"
        tree["categories"].insert(0, {"id": 0, "name": "fasteners", "supercategory": "none"})
        _write_json(root / name / "_annotations.coco.json", tree)
        _write_pictures(root / name, part)
    for name in ("README.dataset.txt", "README.roboflow.txt"):
        (root / name).write_text("made by a tool\n")


def yolo_lines(picture: Picture) -> str:
    """Return the lines of a text file."""
    lines = []
    for label, box in picture.objects:
        left, top, right, bottom = box
        numbers = [
            (left + right) / 2 / WIDTH,
            (top + bottom) / 2 / HEIGHT,
            (right - left) / WIDTH,
            (bottom - top) / HEIGHT,
        ]
        if picture.polygons:
            numbers = [each / (WIDTH, HEIGHT)[at % 2] for at, each in enumerate(outline(box))]
        lines.append(" ".join([str(CLASSES.index(label)), *(f"{each:.8f}" for each in numbers)]))
    return "\n".join(lines)


def _write_lines(folder: Path, pictures: Sequence[Picture]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for each in pictures:
        if each.objects:
            (folder / each.name).with_suffix(".txt").write_text(yolo_lines(each))


def ultralytics(root: Path, pictures: Sequence[Picture], held_out: Sequence[Picture]) -> None:
    """Write images/ and labels/ with splits in them."""
    for split, part in (("train", pictures), ("val", held_out)):
        _write_pictures(root / "images" / split, part)
        _write_lines(root / "labels" / split, part)
    names = "".join(f"  {number}: {name}\n" for number, name in enumerate(CLASSES))
    (root / "data.yaml").write_text(
        f"path: ../datasets/fasteners\ntrain: images/train\nval: images/val\nnames:\n{names}"
    )


def cvat_yolo(root: Path, pictures: Sequence[Picture]) -> None:
    """Write a task of CVAT: one subset, and its pictures' paths in a text file."""
    _write_pictures(root / "images/train", pictures)
    _write_lines(root / "labels/train", pictures)
    (root / "train.txt").write_text("".join(f"images/train/{each.name}\n" for each in pictures))
    names = "".join(f"  {number}: {name}\n" for number, name in enumerate(CLASSES))
    (root / "data.yaml").write_text(f"names:\n{names}path: .\ntrain: train.txt\n")


def roboflow_yolo(
    root: Path, pictures: Sequence[Picture], held_out: Sequence[Picture], tests: Sequence[Picture]
) -> None:
    """Write splits with images/ and labels/ in them; the paths in data.yaml lead out of the folder."""
    for split, part in (("train", pictures), ("valid", held_out), ("test", tests)):
        _write_pictures(root / split / "images", part)
        _write_lines(root / split / "labels", part)
    (root / "data.yaml").write_text(
        f"train: ../train/images\nval: ../valid/images\ntest: ../test/images\n\nnc: 2\nnames: {list(CLASSES)}\n\n"
        "roboflow:\n  workspace: tools\n  project: fasteners\n  version: 1\n"
    )


def label_studio_yolo(root: Path, pictures: Sequence[Picture]) -> None:
    """Write images/, labels/, classes.txt and notes.json."""
    _write_pictures(root / "images", pictures)
    _write_lines(root / "labels", pictures)
    (root / "classes.txt").write_text("\n".join(CLASSES))
    _write_json(
        root / "notes.json", {"categories": [{"id": number, "name": name} for number, name in enumerate(CLASSES)]}
    )


def darknet(root: Path, pictures: Sequence[Picture]) -> None:
    """Write CVAT's "YOLO 1.1": texts next to the pictures."""
    _write_pictures(root / "obj_train_data", pictures)
    _write_lines(root / "obj_train_data", pictures)
    (root / "obj.names").write_text("\n".join(CLASSES) + "\n")
    (root / "obj.data").write_text("classes = 2\ntrain = data/train.txt\nnames = data/obj.names\nbackup = backup/\n")


def labelme(root: Path, pictures: Sequence[Picture], held_out: Sequence[Picture] = ()) -> None:
    """Write a file for each picture, next to it."""
    for folder, part in ((root / "train" if held_out else root, pictures), (root / "val", held_out)):
        _write_pictures(folder, part)
        for picture in part:
            shapes = []
            for label, box in picture.objects:
                flat = outline(box) if picture.polygons else [*box[2:], *box[:2]]  # from any corner to the opposite one
                points = [flat[at : at + 2] for at in range(0, len(flat), 2)]
                kind = "polygon" if picture.polygons else "rectangle"
                shapes.append({"label": label, "points": points, "group_id": None, "shape_type": kind, "flags": {}})
            tree = {"version": "5.5.0", "flags": {}, "shapes": shapes, "imagePath": picture.name, "imageData": None}
            _write_json(
                (folder / picture.name).with_suffix(".json"), tree | {"imageHeight": HEIGHT, "imageWidth": WIDTH}
            )


def _percent(box: Box) -> dict[str, float]:
    left, top, right, bottom = box
    sides = {"width": 100 * (right - left) / WIDTH, "height": 100 * (bottom - top) / HEIGHT}
    return {"x": 100 * left / WIDTH, "y": 100 * top / HEIGHT, **sides, "rotation": 0}


def _value(picture: Picture, label: str, box: Box) -> dict[str, Any]:
    if not picture.polygons:
        return {**_percent(box), "rectanglelabels": [label]}
    flat = [100 * each / (WIDTH, HEIGHT)[at % 2] for at, each in enumerate(outline(box))]
    return {"points": [flat[at : at + 2] for at in range(0, len(flat), 2)], "polygonlabels": [label], "closed": True}


def label_studio(root: Path, pictures: Sequence[Picture]) -> None:
    """Write the JSON export; the pictures were uploaded, and are in the folder under their own names."""
    tasks = []
    for number, picture in enumerate(pictures):
        sides = {"original_width": WIDTH, "original_height": HEIGHT, "image_rotation": 0}
        kind = "polygonlabels" if picture.polygons else "rectanglelabels"
        result = [
            {
                "id": f"r{at}",
                "type": kind,
                "from_name": "label",
                "to_name": "image",
                **sides,
                "value": _value(picture, *each),
            }
            for at, each in enumerate(picture.objects)
        ]
        old = {"id": 1, "was_cancelled": False, "updated_at": "2026-01-01T00:00:00Z", "result": []}
        new = {"id": 2, "was_cancelled": False, "updated_at": "2026-02-01T00:00:00Z", "result": result}
        cancelled = {"id": 3, "was_cancelled": True, "updated_at": "2026-03-01T00:00:00Z", "result": []}
        image = f"/data/upload/7/{number:08x}-{picture.name}"
        tasks.append(
            {"id": 10 + number, "data": {"image": image}, "annotations": [new, old, cancelled], "predictions": []}
        )
    _write_json(root / "project-7-at-2026-02-01-12-00-abcdef12.json", tasks)
    _write_pictures(root, pictures)


def label_studio_min(root: Path, pictures: Sequence[Picture]) -> None:
    """Write the short JSON export; the pictures have the upload's prefix."""
    tasks: list[dict[str, Any]] = []
    for number, picture in enumerate(pictures):
        sides = {"original_width": WIDTH, "original_height": HEIGHT}
        label = [{**_value(picture, *each), **sides} for each in picture.objects]
        image = f"/data/local-files/?d=photos/{number:08x}-{picture.name}"
        tasks.append({"image": image, "id": number, **({"label": label} if label else {}), "annotator": 1})
        write_picture(root / f"{number:08x}-{picture.name}", int(picture.name[8:10]))
    _write_json(root / "project-7.json", tasks)


def cvat(root: Path, pictures: Sequence[Picture], held_out: Sequence[Picture] = ()) -> None:
    """Write "CVAT for images 1.1": a task, or a project with the subsets Train and Validation."""
    images = []
    for subset, part in (("Train" if held_out else "", pictures), ("Validation", held_out)):
        _write_pictures(root / "images" / subset, part)
        for picture in part:
            shapes = []
            for label, box in picture.objects:
                flat = outline(box)
                points = ";".join(f"{flat[at]:.2f},{flat[at + 1]:.2f}" for at in range(0, len(flat), 2))
                sides = " ".join(
                    f'{key}="{each:.2f}"' for key, each in zip(("xtl", "ytl", "xbr", "ybr"), box, strict=True)
                )
                kind, where = ("polygon", f'points="{points}"') if picture.polygons else ("box", sides)
                shapes.append(f'<{kind} label="{label}" source="manual" occluded="0" {where} z_order="0"></{kind}>')
            within = f" subset={quoteattr(subset)}" if subset else ""
            images.append(
                f'<image id="{len(images)}" name="{picture.name}"{within} width="{WIDTH}" height="{HEIGHT}">'
                f"{''.join(shapes)}</image>"
            )
    labels = "".join(f"<label><name>{name}</name><attributes></attributes></label>" for name in CLASSES)
    root.mkdir(parents=True, exist_ok=True)
    (root / "annotations.xml").write_text(
        '<?xml version="1.0" encoding="utf-8"?>\n<annotations><version>1.1</version><meta><task>'
        f"<labels>{labels}</labels></task></meta>{''.join(images)}</annotations>\n"
    )


def _voc_xml(picture: Picture) -> str:
    """Return the XML of a picture; the first pixel is 1."""
    objects = ""
    for label, (left, top, right, bottom) in picture.objects:
        edges = f"<xmin>{left + 1}</xmin><ymin>{top + 1}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax>"
        objects += f"<object><name>{label}</name><difficult>0</difficult><bndbox>{edges}</bndbox></object>"
    size = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height><depth>3</depth></size>"
    return f"<annotation><folder>any</folder><filename>{picture.name}</filename>{size}{objects}</annotation>\n"


def voc(root: Path, pictures: Sequence[Picture], held_out: Sequence[Picture] = ()) -> None:
    """Write a published set's folders; with held-out pictures also its lists."""
    _write_pictures(root / "JPEGImages", [*pictures, *held_out])
    (root / "Annotations").mkdir(parents=True)
    for each in (*pictures, *held_out):
        (root / "Annotations" / each.name).with_suffix(".xml").write_text(_voc_xml(each))
    lists = root / "ImageSets/Main"
    lists.mkdir(parents=True)
    for split, part in (("train", pictures), ("val", held_out)) if held_out else ():
        (lists / f"{split}.txt").write_text("".join(f"{each.name[:-4]}\n" for each in part))
        (lists / f"bolt_{split}.txt").write_text("".join(f"{each.name[:-4]}  1\n" for each in part))


def labelimg(root: Path, pictures: Sequence[Picture], held_out: Sequence[Picture] = ()) -> None:
    """Write a file next to each picture, as LabelImg does, and with held-out pictures Roboflow."""
    for folder, part in ((root / "train" if held_out else root, pictures), (root / "valid", held_out)):
        _write_pictures(folder, part)
        for each in part:
            text = _voc_xml(each).replace("<annotation>", '<annotation verified="yes">')
            (folder / each.name).with_suffix(".xml").write_text(text)


ONE_SET: dict[str, tuple[str, Callable[[Path, Sequence[Picture]], None]]] = {
    "cvat_coco": ("coco", cvat_coco),
    "cvat_coco_flat": ("coco", cvat_coco_flat),
    "label_studio_coco": ("coco", label_studio_coco),
    "one_coco_file": ("coco", one_coco_file),
    "cvat_yolo": ("yolo", cvat_yolo),
    "label_studio_yolo": ("yolo", label_studio_yolo),
    "darknet": ("yolo", darknet),
    "labelme": ("labelme", labelme),
    "label_studio": ("label_studio", label_studio),
    "label_studio_min": ("label_studio", label_studio_min),
    "cvat": ("cvat", cvat),
    "voc": ("voc", voc),
    "labelimg": ("voc", labelimg),
}
"""Exports without a held-out split: the data set's name, and what writes them."""
