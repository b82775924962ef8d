"""Label Studio's JSON export: tasks with rectangles, ellipses and polygons in per cent of the picture's sides.

The pictures are exported separately, so they are looked for by their names in `data.path`; an upload's name begins with
eight characters and a dash, with which the picture may be named or not. Of several annotations of a task the latest
that was not cancelled counts. Label Studio's exports to COCO and YOLO are read as those formats.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from paceline.data.image.source import EXTENSIONS
from paceline.errors import DataError
from paceline.parsing.files import SkippedItems, has_extension, list_files
from paceline.plugins.dataset_registry import dataset
from paceline.recipe.data import Data
from paceline_vision.detection.annotations import (
    AnnotationCollector,
    annotation_file,
    begins_with,
    ellipse,
    existing_folder,
    is_coordinate,
    read_content,
    read_json,
)
from paceline_vision.detection.dataset import BoxDataset
from paceline_vision.inspection import WITH_BOXES

_RULE = "Label Studio's numbers are per cent of the picture's sides"
_UPLOAD = re.compile(r"[0-9a-f]{8}-")
_LABELS = ("rectanglelabels", "polygonlabels", "ellipselabels", "labels")


def _exports(root: Path) -> list[Path]:
    files = sorted(root.glob("*.json")) if root.is_dir() else []
    return [
        each for each in files if begins_with(each, b"[", b'"annotations"', b'"rectanglelabels"', b'"polygonlabels"')
    ]


@dataset(
    "label_studio",
    kind="boxes",
    sniff=lambda place: place.is_folder and _exports(place.path),
    keys=("path", "annotations", "validation_fraction", "detection"),
    pictures=WITH_BOXES,
)
def open_label_studio(data: Data) -> BoxDataset:
    """Open a folder of pictures with Label Studio's JSON export.

    Raises:
        DataError: If they are missing, or tasks are malformed; names the first ones and their number.
    """
    left_out = SkippedItems()
    root, file = _located(data)
    tasks = read_json(file, read_content(file), "Label Studio's tasks")
    if not isinstance(tasks, list):
        raise DataError(f"{file} is not a list of tasks; export JSON from Label Studio.", path=file)
    collector = AnnotationCollector(root, file, _RULE)
    if file.is_relative_to(root):
        collector.own_files.add(str(file.relative_to(root)))
    pictures = [each for each in list_files(root, left_out) if has_extension(each, EXTENSIONS)]
    found = _annotated(tasks, pictures, collector, left_out)
    return collector.read(found, partial(_add_marks, collector, left_out), data, left_out, split=lambda _: "")


def _located(data: Data) -> tuple[Path, Path]:
    """Return the folder of the pictures, and the export.

    Raises:
        DataError: If there is not one export.
    """
    if data.annotations is not None:
        return annotation_file(data)
    root = existing_folder(data, "the pictures and Label Studio's JSON file")
    files = _exports(root)
    if len(files) != 1:
        names = f"{len(files)} of them ({', '.join(each.name for each in files)})" if files else "none"
        raise DataError(
            f"{root} must hold one JSON file as Label Studio exports it, and has {names}: add it, or name one "
            "(data.annotations=FILE).",
            path=root,
        )
    return root, files[0]


def _annotated(
    tasks: list[Any], pictures: list[str], collector: AnnotationCollector, left_out: SkippedItems
) -> dict[str, tuple[str, list[Any]]]:
    """Return place and regions of each picture that has been annotated."""
    counts = Counter(map(os.path.basename, pictures))
    by_name = {name: each for each in pictures if counts[name := os.path.basename(each)] == 1}
    known, found = set(pictures), dict[str, tuple[str, list[Any]]]()
    for position, item in enumerate(tasks):
        place, marks, address = f"[{position}]", _marks(item), _address(item)
        if isinstance(item, dict) and "id" in item:
            place = f"[{position}] (id {item['id']!r:.20})"
        if address is None:
            collector.faults.append(f"{place} names no picture")
        elif (picture := _picture(address, known, by_name)) is None:
            collector.faults.append(f"{place} names the picture {address!r:.120}, which is not in the folder")
        elif marks is None:
            left_out.add("tasks without annotations", picture)
        elif picture in found:
            collector.faults.append(f"{place} and {found[picture][0]} name the same picture, {picture}")
        else:
            found[picture] = place, marks
    return found


def _marks(item: Any) -> list[Any] | None:
    """Return the regions of a task; None if nobody has annotated it."""
    if not isinstance(item, dict):
        return None
    if isinstance(item.get("annotations"), list):
        valid = [each for each in item["annotations"] if isinstance(each, dict) and not each.get("was_cancelled")]
        results = [each.get("result") for each in sorted(valid, key=lambda each: str(each.get("updated_at")))]
        return results[-1] if results and isinstance(results[-1], list) else None
    # JSON-MIN: a list of regions under the name of the tag.
    lists = [each for each in item.values() if isinstance(each, list) and any(isinstance(one, dict) for one in each)]
    return [{"value": each, "type": "labels"} for each in lists[0]] if lists else None


def _address(item: Any) -> str | None:
    """Return the address of a task's picture."""
    values: Any = item.get("data", item) if isinstance(item, dict) else {}
    texts = [each for each in values.values() if isinstance(each, str)] if isinstance(values, dict) else []
    return next((each for each in texts if any(has_extension(name, EXTENSIONS) for name in _paths(each))), None)


def _paths(address: str) -> Iterator[str]:
    """Return the paths that an address may stand for, such as a/b.png for a local file served with ``d=a/b.png``."""
    try:
        parts = urlsplit(address.replace("\\", "/"))
    except ValueError:  # a text that begins as an address
        return
    yield from parse_qs(parts.query).get("d", [])
    yield unquote(parts.path)
    yield parts.path


def _picture(address: str, pictures: set[str], by_name: Mapping[str, str]) -> str | None:
    """Return the picture with the longest possible end of the address's path, with or without an upload's prefix."""
    for path in _paths(address):
        parts = [each for each in path.split("/") if each not in ("", ".", "..")]
        ends = ["/".join(parts[at:]) for at in range(len(parts))]
        name = parts[-1] if parts else ""
        for each in (*ends, *(by_name.get(short, "") for short in (name, _UPLOAD.sub("", name, count=1)))):
            if each in pictures:
                return each
    return None


def _add_marks(
    collector: AnnotationCollector, left_out: SkippedItems, _: str, place: str, marks: list[Any], size: tuple[int, int]
) -> None:
    """Add the objects of a task."""
    for mark in marks:
        _add_mark(collector, f"task {place}", mark, size, left_out)


def _add_mark(
    collector: AnnotationCollector, place: str, mark: Any, size: tuple[int, int], left_out: SkippedItems
) -> None:
    """Add the object of a region, or report it."""
    value = mark.get("value") if isinstance(mark, dict) else None
    labels: Any = next((value[key] for key in _LABELS if value.get(key)), None) if isinstance(value, dict) else None
    if value is None or not isinstance(labels, list) or not isinstance(labels[0], str):
        left_out.add("regions without a label of a box, a polygon or an ellipse", place)
        return
    height, width = size
    numbers = [value.get(key, 0) for key in ("x", "y", "width", "height", "radiusX", "radiusY", "rotation")]
    points = value.get("points")
    if isinstance(points, list) and all(isinstance(each, list) and len(each) == 2 for each in points):
        flat = [number for point in points for number in point]
        shares = [each / 100 * size[1 - at % 2] if is_coordinate(each) else each for at, each in enumerate(flat)]
        collector.add_object("", place, labels[0], polygons=[shares])
        return
    if not all(map(is_coordinate, numbers)):
        collector.faults.append(f"{place} has a region whose x, y, width and height must be numbers")
        return
    x, y, w, h, across, down, turned = (
        each * scale for each, scale in zip(numbers, [width / 100, height / 100] * 3 + [1], strict=True)
    )
    if across and down:
        collector.add_object("", place, labels[0], polygons=[ellipse(x, y, across, down, turned)])
    elif not turned:
        collector.add_object("", place, labels[0], box=(x, y, x + w, y + h))
    else:  # around its upper left corner
        cosine, sine = math.cos(math.radians(turned)), math.sin(math.radians(turned))
        corners = [(0.0, 0.0), (w, 0.0), (w, h), (0.0, h)]
        outline = [each for a, b in corners for each in (x + a * cosine - b * sine, y + a * sine + b * cosine)]
        collector.add_object("", place, labels[0], polygons=[outline])
