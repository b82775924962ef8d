"""YOLO labels: a text file for each picture, as Ultralytics, Roboflow, CVAT and Label Studio export it.

Ultralytics and CVAT have `images/{train,val}/` and `labels/{train,val}/`, Roboflow `{train,valid,test}/images/` and
`…/labels/`, Label Studio `images/`, `labels/` and `classes.txt`, Darknet and LabelImg text files next to the pictures.
Class names are in `data.yaml`, `classes.txt` or `obj.names`. A line is a class, and x, y, width and height of a box
whose x and y are its centre; or a class, and x and y of three points or more. All are shares of the picture's sides. A
picture without a text file has no object.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

import yaml

from paceline.data.image.source import EXTENSIONS
from paceline.data.splits import TEST, TRAIN, VALIDATION, split_of
from paceline.errors import DataError, data_error
from paceline.parsing.files import SkippedItems, has_extension, is_folder, list_files
from paceline.parsing.plain_yaml import load_plain
from paceline.plugins.dataset_registry import Place, dataset
from paceline.recipe.data import Data
from paceline_vision.detection.annotations import (
    AnnotationCollector,
    box_dataset,
    existing_folder,
    first_entries,
    first_files,
    read_content,
    sizes_of,
)
from paceline_vision.detection.dataset import BoxDataset
from paceline_vision.inspection import WITH_BOXES

_TRIED = 8  # files
_MOST_UNNAMED = 10_000  # classes
_NAMES = ("classes.txt", "obj.names")
_RULE = (
    "YOLO's numbers are shares of the picture's sides: x and y of a box's centre, its width and height, or x and y of "
    "each point of an outline"
)
_KEYS = {TRAIN: ("train",), VALIDATION: ("val", "valid", "validation"), TEST: ("test",)}  # of data.yaml


def _is_yolo(place: Place) -> bool:
    """Whether a folder has folders of images and of text files, or class names and text files next to pictures."""
    root = place.path
    if not place.is_folder:
        return False
    labels = [root / "labels", *(Path(each.path) / "labels" for each in first_entries(root) if is_folder(each))]
    if any((each.parent / "images").is_dir() and any(first_files(each, ".txt")) for each in labels):
        return True
    return any((root / each).is_file() for each in (*_NAMES, "data.yaml")) and any(
        each.with_suffix(f".{ending}").is_file()
        for each in islice(first_files(root, ".txt"), _TRIED)
        for ending in EXTENSIONS
    )


def _description(root: Path) -> tuple[Path | None, Mapping[str, Any]]:
    """Return the file data.yaml, under any name, and its content; nothing if there is none.

    Raises:
        DataError: If there are several.
    """
    found: list[tuple[Path, Mapping[str, Any]]] = []
    for file in sorted(each for ending in ("yaml", "yml") for each in root.glob(f"*.{ending}") if each.is_file()):
        try:
            tree = load_plain(file.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            if file.stem == "data":
                why = " ".join(str(error).split())
                raise data_error(file, f"cannot be read as YOLO's class names ({why}): correct it.") from error
            continue
        if isinstance(tree, dict) and isinstance(tree.get("names"), list | dict) and tree["names"]:
            found.append((file, tree))
    named = [each for each in found if each[0].stem == "data"] or found
    if len(named) > 1:
        raise data_error(root, f"has {' and '.join(each.name for each, _ in named)}, each with class names: keep one.")
    return named[0] if named else (None, {})


def _class_names(root: Path, file: Path | None, described: Any) -> list[str] | None:
    """Return the class names by number; None if no file has them."""
    if file is None:
        file = next((root / each for each in _NAMES if (root / each).is_file()), None)
        if file is None:
            return None
        lines = read_content(file).decode("utf-8-sig", "replace").splitlines()
        described = [line for line in lines if line.strip()]
    if isinstance(described, dict):
        numbers = {str(number): str(name) for number, name in described.items()}
        if set(numbers) != set(map(str, range(len(numbers)))):
            raise data_error(file, f"has class names for {', '.join(numbers)}; number them from 0 without a gap.")
        described = [numbers[str(number)] for number in range(len(numbers))]
    return [str(name).strip() for name in described]


def _split_folders(root: Path, described: Mapping[str, Any]) -> dict[str, str]:
    """Return the folder of each split that data.yaml names, relative to the root, if it is there."""
    found = {}
    base = str(described.get("path") or "")
    for split, keys in _KEYS.items():
        value = next((described[key] for key in keys if isinstance(described.get(key), str)), None)
        if value is None:
            continue
        # Roboflow's paths lead out of the folder in which data.yaml is; an absolute one is of another machine.
        parts = [each for each in PurePath(value).parts if each not in ("..", ".", "/")]
        for folder in (PurePath(base, *parts), *(PurePath(*parts[at:]) for at in range(len(parts)))):
            if parts and not folder.is_absolute() and ".." not in folder.parts and (root / folder).is_dir():
                found[split] = folder.as_posix()
                break
    return found


def _label_file(picture: PurePath) -> tuple[str, str]:
    """Return where a picture's labels may be: with `labels` in place of the last folder `images`, or next to it."""
    parts = list(picture.with_suffix(".txt").parts)
    same_folder = os.path.join(*parts)
    at = next((at for at in range(len(parts) - 2, -1, -1) if parts[at] == "images"), None)
    if at is not None:
        parts[at] = "labels"
    return os.path.join(*parts), same_folder


def _split(picture: str, folders: Mapping[str, str]) -> str | None:
    """Return a picture's split: of the folder that data.yaml names, or of a folder's name; empty without splits."""
    if folders:
        return next((split for split, folder in folders.items() if picture.startswith(f"{folder}/")), None)
    return split_of(PurePath(picture).parent) or ""


@dataset(
    "yolo",
    kind="boxes",
    sniff=_is_yolo,
    keys=("path", "validation_fraction", "detection"),
    pictures=WITH_BOXES,
)
def open_yolo(data: Data) -> BoxDataset:
    """Open a folder of pictures and YOLO's text files.

    Raises:
        DataError: If files are missing, or lines are malformed; names the first ones and their number.
    """
    root, left_out = existing_folder(data, "images/ and labels/"), SkippedItems()
    file, described = _description(root)
    names, folders = _class_names(root, file, described.get("names")), _split_folders(root, described)
    files = list_files(root, left_out)
    pictures = [each for each in files if has_extension(each, EXTENSIONS)]
    texts = {each for each in files if each.endswith(".txt")}
    sizes = sizes_of(root, pictures, data, left_out)
    lines = {each: next((text for text in _label_file(PurePath(each)) if text in texts), None) for each in sizes}
    labels = {picture: list(_objects(root, text)) for picture, text in lines.items() if text is not None}
    if names is None:
        numbers = [entry[1] for entries in labels.values() for entry in entries if isinstance(entry[1], int)]
        if (highest := max(numbers, default=-1)) >= _MOST_UNNAMED:
            raise data_error(
                root,
                f"has labels of the class {highest}, and no file of class names: add classes.txt, or correct them.",
            )
        names = [str(number) for number in range(highest + 1)]
    collector = AnnotationCollector(root, root, _RULE, names)
    for picture, size in sizes.items():
        split = _split(picture, folders)
        if split is None:
            left_out.add("pictures outside the folders that the class names' file names", picture)
            continue
        collector.add_picture(split, picture, size)
        for place, number, values in labels.get(picture, ()):
            _add(collector, split, place, number, values, size, names)
    used = {text for text in lines.values() if text is not None}
    collector.own_files |= {*used, *_NAMES, "obj.data", "notes.json", *([] if file is None else [file.name])}
    if not used:
        raise DataError(
            f"{root} has {len(pictures):,} pictures, but no text file with labels: they belong in labels/, in place of "
            "images/, under the pictures' names.",
            path=root,
        )
    return box_dataset(data, collector.sets(), left_out)


def _objects(root: Path, name: str) -> Iterator[tuple[str, int | None, list[float] | str]]:
    """Return place, class and numbers of each line; the line itself where it is malformed."""
    content = read_content(root / name).decode("utf-8-sig", "replace")
    for number, line in enumerate(content.splitlines(), 1):
        words = line.split()
        if not words:
            continue
        try:
            values = [float(word) for word in words]
        except ValueError:
            values = []
        is_object = len(values) == 5 or (len(values) >= 7 and len(values) % 2)
        if not is_object or not values[0].is_integer():
            yield f"{name} line {number}", None, line
        else:
            yield f"{name} line {number}", int(values[0]), values[1:]


def _add(
    collector: AnnotationCollector,
    split: str,
    place: str,
    number: int | None,
    values: list[float] | str,
    size: tuple[int, int],
    names: list[str],
) -> None:
    """Add the object of a line, or a fault."""
    height, width = size
    if number is None or isinstance(values, str):
        collector.faults.append(
            f"{place} is {values[:40]!r}; it must be a class and x, y, width and height, or a class and x and y of "
            "three points or more"
        )
    elif not 0 <= number < len(names):
        collector.faults.append(f"{place} has the class {number}, but there are {len(names)} class names, from 0")
    elif len(values) == 4:
        x, y, w, h = (value * side for value, side in zip(values, (width, height) * 2, strict=True))
        if min(w, h) < 0:
            collector.faults.append(f"{place} has a negative width or height")
        else:
            collector.add_object(split, place, names[number], box=(x - w / 2, y - h / 2, x + w / 2, y + h / 2))
    else:
        points = [value * (width, height)[at % 2] for at, value in enumerate(values)]
        collector.add_object(split, place, names[number], polygons=[points])
