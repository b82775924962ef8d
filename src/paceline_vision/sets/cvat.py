"""CVAT's own format for images, version 1.1: `annotations.xml` with `images/`; boxes, polygons, masks and ellipses.

A project's pictures have subsets, which are splits if they are called so; their pictures are in `images/SUBSET/`.
Coordinates are pixels of the picture after its EXIF rotation.
"""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from paceline.data.image.pillow_pixels import LARGEST_PIXELS
from paceline.data.splits import split_of
from paceline.errors import DataError, data_error
from paceline.parsing.files import SkippedItems
from paceline.plugins.dataset_registry import dataset
from paceline.recipe.data import Data
from paceline_vision.detection.annotations import (
    AnnotationCollector,
    annotation_file,
    begins_with,
    box_dataset,
    ellipse,
    existing_folder,
    read_xml,
)
from paceline_vision.detection.dataset import BoxDataset
from paceline_vision.inspection import WITH_BOXES

_FILE = "annotations.xml"
_RULE = "CVAT's numbers are pixels of the picture"


@dataset(
    "cvat",
    kind="boxes",
    sniff=lambda place: place.is_folder and begins_with(place.path / _FILE, b"<", b"<annotations"),
    keys=("path", "annotations", "validation_fraction", "detection"),
    pictures=WITH_BOXES,
)
def open_cvat(data: Data) -> BoxDataset:
    """Open a folder of pictures with CVAT's annotations.xml.

    Raises:
        DataError: If they are missing or malformed; names the first faults and their number.
    """
    left_out = SkippedItems()
    if data.annotations is None:
        root = existing_folder(data, f"images/ and {_FILE}")
        file = root / _FILE
    else:
        root, file = annotation_file(data)
    if not file.is_file():
        raise DataError(
            f"{root} holds no {_FILE}: export 'CVAT for images 1.1', or name the file (data.annotations=FILE).",
            path=root,
        )
    tree = read_xml(file, "CVAT")
    if tree.find("track") is not None:
        raise data_error(file, "holds the tracks of a video: export 'CVAT for images 1.1' instead.")
    folder = root / "images" if (root / "images").is_dir() else root
    names = [str(each.text) for each in tree.iterfind("meta//labels/label/name")]
    collector = AnnotationCollector(folder, file, _RULE, list(dict.fromkeys(names)) or None)
    if file.parent == folder:
        collector.own_files.add(file.name)
    for position, image in enumerate(tree.iterfind("image")):
        _add_image(collector, folder, f"image {position}", image, set(names), left_out)
    return box_dataset(data, collector.sets(), left_out)


def _add_image(
    collector: AnnotationCollector, folder: Path, place: str, image: Any, names: set[str], left_out: SkippedItems
) -> None:
    """Add a picture with its objects."""
    name, subset = image.get("name", ""), image.get("subset") or ""
    sides = [image.get(key, "") for key in ("height", "width")]
    are_numbers = all(side.isascii() and side.isdigit() and len(side) < 10 for side in sides)
    if not name or not are_numbers or int(sides[0]) * int(sides[1]) > LARGEST_PIXELS:
        collector.faults.append(f"{place} must have name, width and height, with at most {LARGEST_PIXELS:,} pixels")
        return
    inside = f"{subset}/{name}"
    split = split_of(PurePath(subset)) or ""
    name = inside if subset and os.path.isfile(folder / inside) else name
    collector.add_picture(split, name, (int(sides[0]), int(sides[1])))
    for each in image:
        where = f"{each.tag} of {name}"
        label = each.get("label")
        if each.tag not in ("box", "polygon", "mask", "ellipse"):
            left_out.add(f"shapes that are not read ({each.tag})", name)
        elif label is None or (names and label not in names):
            collector.faults.append(f"{where} has the label {label!r}, which is not among the file's labels")
        else:
            _add_shape(collector, split, where, each, (int(sides[0]), int(sides[1])))


def _add_shape(collector: AnnotationCollector, split: str, place: str, shape: Any, size: tuple[int, int]) -> None:
    """Add an object, or a fault."""
    try:
        if shape.tag == "polygon":
            points = (point.split(",") for point in shape.get("points", "").split(";"))
            flat = [float(each) for x, y in points for each in (x, y)]  # ValueError, too, unless they are pairs
            collector.add_object(split, place, shape.get("label"), polygons=[flat])
        elif shape.tag == "box":
            box = [float(shape.get(key, "")) for key in ("xtl", "ytl", "xbr", "ybr")]
            turned = math.radians(float(shape.get("rotation") or 0))
            outline = _turned(box, turned) if turned else []
            collector.add_object(
                split, place, shape.get("label"), **({"polygons": [outline]} if turned else {"box": box})
            )
        elif shape.tag == "ellipse":
            numbers = [float(shape.get(key, "")) for key in ("cx", "cy", "rx", "ry")]
            collector.add_object(split, place, shape.get("label"), polygons=[ellipse(*numbers)])
        else:
            _add_mask(collector, split, place, shape, size)
    except ValueError:
        collector.faults.append(f"{place} has coordinates that are not numbers, or points that are not x,y")


def _turned(box: list[float], angle: float) -> list[float]:
    """Return the corners of a box that is rotated around its centre."""
    x, y, w, h = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2, (box[2] - box[0]) / 2, (box[3] - box[1]) / 2
    cosine, sine = math.cos(angle), math.sin(angle)
    corners = ((-w, -h), (w, -h), (w, h), (-w, h))
    return [each for a, b in corners for each in (x + a * cosine - b * sine, y + a * sine + b * cosine)]


def _add_mask(collector: AnnotationCollector, split: str, place: str, shape: Any, size: tuple[int, int]) -> None:
    """Add a mask: run lengths in row order within a box, which become COCO's, of the picture in column order."""
    left, top, width, height = (int(shape.get(key, "")) for key in ("left", "top", "width", "height"))
    counts = [int(each) for each in shape.get("rle", "").split(",")]
    fits = min(left, top) >= 0 and min(width, height) > 0 and left + width <= size[1] and top + height <= size[0]
    if not fits or min(counts) < 0 or sum(counts) != width * height:
        collector.faults.append(f"{place} has a mask that does not fill its box, or leaves the picture")
        return
    pixels = np.zeros(size, dtype=np.uint8)
    pixels[top : top + height, left : left + width] = np.repeat(np.arange(len(counts)) % 2, counts).reshape(
        height, width
    )
    column = pixels.T.ravel()
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(column)) + 1, [column.size]])
    runs = {"size": list(size), "counts": [0] * int(column[0]) + np.diff(bounds).tolist()}
    collector.add_object(split, place, shape.get("label"), box=(left, top, left + width, top + height), runs=runs)
