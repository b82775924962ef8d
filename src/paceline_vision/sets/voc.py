"""Pascal VOC's annotations: an XML file for each picture, with boxes.

The published sets have `JPEGImages/`, `Annotations/` and, for splits, names without ending in
`ImageSets/Main/{train,val,trainval,test}.txt`; LabelImg and Roboflow write files next to the pictures, Roboflow in
`{train,valid,test}/`. The first pixel is 1, and xmax and ymax are the last pixels of a box (Everingham et al. 2010).
Pictures without a file are left out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

from paceline.data.image.source import EXTENSIONS
from paceline.data.splits import TEST, TRAIN, VALIDATION, split_of
from paceline.parsing.files import SkippedItems, has_extension, list_files
from paceline.plugins.dataset_registry import Place, dataset
from paceline.recipe.data import Data
from paceline_vision.detection.annotations import (
    AnnotationCollector,
    begins_with,
    existing_folder,
    first_files,
    read_content,
    read_xml,
)
from paceline_vision.detection.dataset import BoxDataset
from paceline_vision.inspection import WITH_BOXES

_RULE = "VOC's numbers are pixels of the picture, from 1"
_START = (b"<", b"<annotation>", b"<annotation ")
_TRIED = 8  # files
_FOLDERS = {"Annotations": "JPEGImages"}
_LISTS = PurePath("ImageSets/Main")
_UNLISTED = "pictures that no list in ImageSets/Main names"


def _is_voc(place: Place) -> bool:
    """Whether a folder, or a folder in it, has files as VOC has them."""
    files = first_files(place.path, ".xml") if place.is_folder else ()
    return any(begins_with(each, *_START) for each in islice(files, _TRIED))


@dataset(
    "voc",
    kind="boxes",
    sniff=_is_voc,
    keys=("path", "validation_fraction", "detection"),
    pictures=WITH_BOXES,
)
def open_voc(data: Data) -> BoxDataset:
    """Open a folder of pictures with VOC's files.

    Raises:
        DataError: If files are missing or malformed; names the first ones and their number.
    """
    root, left_out = existing_folder(data, "JPEGImages/ and Annotations/"), SkippedItems()
    files = list_files(root, left_out)
    pictures = {each for each in files if has_extension(each, EXTENSIONS)}
    collector, found = AnnotationCollector(root, root, _RULE), dict[str, tuple[str, Any]]()
    collector.own_files |= {each for each in files if PurePath(each).is_relative_to(_LISTS.parent)}
    listed = _listed(root)
    for name in files:
        if not name.endswith(".xml"):
            continue
        tree = read_xml(root / name, "VOC") if begins_with(root / name, *_START) else None
        if tree is None or tree.tag != "annotation":
            left_out.add("XML files without an annotation", name)
            continue
        collector.own_files.add(name)
        picture = _picture(name, tree.findtext("filename"), pictures)
        if picture is None:
            collector.faults.append(f"{name} names the picture {tree.findtext('filename')!r:.80}, which is not there")
        elif picture in found:
            collector.faults.append(f"{name} and {found[picture][0]} name the same picture, {picture}")
        elif listed and PurePath(name).stem not in listed:
            left_out.add(_UNLISTED, picture)
            collector.own_files.add(picture)
        else:
            found[picture] = name, tree

    def split(picture: str) -> str:
        return listed[PurePath(found[picture][0]).stem] if listed else split_of(PurePath(picture).parent) or ""

    return collector.read(found, partial(_add_objects, collector), data, left_out, split)


def _listed(root: Path) -> Mapping[str, str]:
    """Return the split of each name in the lists of splits; nothing if there are none."""
    lists = {TRAIN: ("train", "trainval"), VALIDATION: ("val",), TEST: ("test",)}
    found: dict[str, str] = {}
    for split, names in lists.items():
        file = next((file for each in names if (file := root / _LISTS / f"{each}.txt").is_file()), None)
        for line in () if file is None else read_content(file).decode("utf-8-sig", "replace").splitlines():
            if words := line.split():
                found.setdefault(PurePath(words[0]).name, split)
    return found if TRAIN in found.values() else {}


def _picture(name: str, said: str | None, pictures: set[str]) -> str | None:
    """Return the picture of a file: with the name in it or the file's own, next to it or in JPEGImages/."""
    folder, stem = os.path.split(os.path.splitext(name)[0])
    folders = [folder, os.path.join(*(_FOLDERS.get(each, each) for each in PurePath(folder).parts), "")]
    names = [os.path.basename((said or "").replace("\\", "/")), *(f"{stem}.{ending}" for ending in EXTENSIONS)]
    paths = (os.path.join(each, name) for name in names for each in folders)
    return next((each for each in paths if each in pictures), None)


def _add_objects(collector: AnnotationCollector, split: str, name: str, tree: Any, size: tuple[int, int]) -> None:
    """Add the objects of a file."""
    texts = [tree.findtext(f"size/{key}", "") for key in ("height", "width")]
    said = tuple(int(each) if each.isdecimal() and len(each) < 10 else 0 for each in texts)
    if all(said) and said not in (size, size[::-1]):
        collector.faults.append(f"{name} says {said[1]}x{said[0]} pixels, and the picture has {size[1]}x{size[0]}")
        return
    for position, each in enumerate(tree.iterfind("object")):
        place, label = f"{name} object {position + 1}", (each.findtext("name") or "").strip()
        try:
            edges = [float(each.findtext(f"bndbox/{key}", "")) for key in ("xmin", "ymin", "xmax", "ymax")]
        except ValueError:
            collector.faults.append(f"{place} must have a bndbox with the numbers xmin, ymin, xmax and ymax")
            continue
        if not label:
            collector.faults.append(f"{place} has no name")
            continue
        # Some tools write 0 for the first pixel.
        firsts = [min(edge, max(edge - 1, 0)) for edge in edges[:2]]
        collector.add_object(split, place, label, box=(*firsts, *edges[2:]))
