"""labelme's annotations: NAME.json next to each picture, with polygons, rectangles and circles.

Folders such as `train/` and `val/` are splits. Points are pixels of the picture after its EXIF rotation. Shapes with
one `group_id` and label are one object. The picture that a file embeds is not read. Pictures without a file are left
out: labelme writes one also for a picture without objects.
"""

from __future__ import annotations

import os
from functools import partial
from itertools import islice
from typing import Any

from paceline.data.image.source import EXTENSIONS
from paceline.parsing.files import SkippedItems, has_extension, list_files
from paceline.plugins.dataset_registry import Place, dataset
from paceline.recipe.data import Data
from paceline_vision.detection.annotations import (
    AnnotationCollector,
    begins_with,
    ellipse,
    existing_folder,
    first_files,
    is_coordinate,
    read_content,
    read_json,
)
from paceline_vision.detection.dataset import BoxDataset
from paceline_vision.inspection import WITH_BOXES

_RULE = "labelme's points are pixels of the picture"
_TRIED = 8  # files


def _is_labelme(place: Place) -> bool:
    """Whether a folder, or a folder in it, has files as labelme writes them."""
    files = first_files(place.path, ".json") if place.is_folder else ()
    return any(begins_with(each, b"{", b'"shapes"') for each in islice(files, _TRIED))


@dataset(
    "labelme",
    kind="boxes",
    sniff=_is_labelme,
    keys=("path", "validation_fraction", "detection"),
    pictures=WITH_BOXES,
)
def open_labelme(data: Data) -> BoxDataset:
    """Open a folder of pictures and labelme's files.

    Raises:
        DataError: If files are missing or malformed; names the first ones and their number.
    """
    root, left_out = existing_folder(data, "pictures with labelme's JSON files"), SkippedItems()
    files = list_files(root, left_out)
    pictures = {each for each in files if has_extension(each, EXTENSIONS)}
    collector, found = AnnotationCollector(root, root, _RULE), dict[str, tuple[str, list[Any]]]()
    for name in files:
        if not name.endswith(".json"):
            continue
        tree = read_json(root / name, read_content(root / name), "labelme's annotations")
        shapes = tree.get("shapes") if isinstance(tree, dict) else None
        if not isinstance(shapes, list):
            left_out.add("JSON files without shapes", name)
            continue
        collector.own_files.add(name)
        picture = _picture(name, tree.get("imagePath"), pictures)
        if picture is None:
            collector.faults.append(f"{name} names the picture {str(tree.get('imagePath'))!r:.80}, which is not there")
        elif picture in found:
            collector.faults.append(f"{name} and {found[picture][0]} name the same picture, {picture}")
        else:
            found[picture] = name, shapes
    return collector.read(found, partial(_add_shapes, collector, left_out), data, left_out)


def _picture(name: str, said: Any, pictures: set[str]) -> str | None:
    """Return the picture of a file: the one it names, or the one next to it with that name or its own."""
    folder, stem = os.path.split(os.path.splitext(name)[0])
    said = said.replace("\\", "/") if isinstance(said, str) else ""
    named = [os.path.normpath(os.path.join(folder, each)) for each in (said, os.path.basename(said))]
    own = [os.path.join(folder, f"{stem}.{ending}") for ending in EXTENSIONS]
    return next((each for each in (*named, *own) if each in pictures), None)


def _add_shapes(
    collector: AnnotationCollector, left_out: SkippedItems, split: str, name: str, shapes: list[Any], _: tuple[int, int]
) -> None:
    """Add the objects of a file."""
    groups: dict[tuple[str, Any], tuple[str, list[list[float]]]] = {}
    for position, shape in enumerate(shapes):
        place = f"{name} shapes[{position}]"
        label, kind = (shape.get("label"), shape.get("shape_type")) if isinstance(shape, dict) else (None, None)
        points = shape.get("points") if isinstance(shape, dict) else None
        are_points = isinstance(points, list) and all(isinstance(each, list) and len(each) == 2 for each in points)
        if not isinstance(label, str) or points is None or not are_points:
            collector.faults.append(f"{place} must have a label, and points of x and y")
            continue
        if (outline := _outline(kind, points)) is None:
            left_out.add(f"shapes that are not read ({kind})", place)
            continue
        # Without a group, each shape is an object.
        group = shape.get("group_id")
        key = (label, position if group is None else str(group))
        groups.setdefault(key, (place, []))[1].append(outline)
    for (label, _), (place, polygons) in groups.items():
        collector.add_object(split, place, label, polygons=polygons)


def _outline(kind: Any, points: list[list[Any]]) -> list[Any] | None:
    """Return x and y of each point of a shape's outline; None for kinds without an area."""
    flat = [number for point in points for number in point]
    if kind in ("polygon", None):
        return flat
    if not all(map(is_coordinate, flat)):
        return flat  # which is a fault
    if kind == "rectangle" and len(points) >= 2:
        (left, right), (top, bottom) = ((min(flat[axis::2]), max(flat[axis::2])) for axis in (0, 1))
        return [left, top, right, top, right, bottom, left, bottom]
    if kind == "circle" and len(points) == 2:
        x, y, edge_x, edge_y = flat
        radius = ((edge_x - x) ** 2 + (edge_y - y) ** 2) ** 0.5
        return ellipse(x, y, radius, radius)
    return None
