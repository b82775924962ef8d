"""COCO annotations: the published folders, one file for each split, or one file anywhere.

The published sets are `annotations/instances_train2017.json` with `train2017/`. CVAT exports
`annotations/instances_SUBSET.json` with `images/SUBSET/`, where SUBSET is `default` if the project has none; Roboflow
`train/_annotations.coco.json` next to the pictures; Label Studio `result.json` with `images/`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

from paceline.data.splits import TEST, TRAIN, VALIDATION, split_folders, split_of
from paceline.errors import DataError
from paceline.parsing.files import SkippedItems
from paceline.plugins.dataset_registry import Place, StandIn, dataset
from paceline.recipe.data import Data
from paceline_vision.detection.annotations import (
    AnnotatedSet,
    annotation_file,
    begins_with,
    box_dataset,
    existing_folder,
    read_content,
    read_json,
)
from paceline_vision.detection.dataset import BoxDataset
from paceline_vision.inspection import WITH_BOXES
from paceline_vision.sets.shapes import assumed_shapes

_FILES = ("annotations.json", "_annotations.coco.json")  # in a split's folder; the second is Roboflow's
_WORDS = {TRAIN: "train", VALIDATION: "val", TEST: "test"}  # with which the names of published sets begin
_START = "instances_"
_READ = ("categories", "annotations")
_TRIED = 100  # pictures


def _of_a_split(root: Path, split: str) -> list[Path]:
    """Return the annotation files of a split by their places."""
    named = [file for file in sorted((root / "annotations").glob(f"{_START}*.json")) if _split(file) == split]
    folder = root / split_folders(root, nested=False).get(split, split)
    return named or [folder / each for each in _FILES if (folder / each).is_file()][:1]


def _split(file: Path) -> str | None:
    name = file.stem.removeprefix(_START)
    return next((each for each, word in _WORDS.items() if name.startswith(word)), None) or split_of(PurePath(name))


def _others(root: Path) -> list[Path]:
    """Return annotation files of other names: of `annotations/` those that hold instances, if any."""
    inside = sorted((root / "annotations").glob("*.json"))
    inside = [each for each in inside if each.stem.startswith(_START)] or inside
    return [
        each
        for each in (*sorted(root.glob("*.json")), *inside)
        if begins_with(each, b"{", b'"file_name"', b'"category_id"', b'"supercategory"')
    ]


def _annotation_files(root: Path, left_out: SkippedItems) -> dict[str, Path]:
    """Return the annotation file of each split, or of all pictures under an empty name.

    Raises:
        DataError: If there are none, or several of one split.
    """
    found = {split: files for split in (TRAIN, VALIDATION, TEST) if (files := _of_a_split(root, split))}
    if not found:
        for file in _others(root):
            found.setdefault(_split(file) or "", []).append(file)
    chosen = {}
    for split, files in found.items():
        if len(files) == 1:
            chosen[split] = files[0]
            continue
        if split == TEST and VALIDATION in found:
            for file in files:
                left_out.add("files of splits that are not read", os.path.relpath(file, root))
            continue
        names = ", ".join(file.name for file in files)
        many = f"several sets for '{_WORDS[split]}'" if split else "several annotation files"
        raise DataError(
            f"{files[0].parent} holds {many} ({names}); leave one there, or name one: data.annotations=FILE.", path=root
        )
    lacking = TRAIN if not {TRAIN, ""} & chosen.keys() else None
    if TRAIN in chosen and not {VALIDATION, TEST} & chosen.keys() and VALIDATION in split_folders(root, nested=False):
        lacking = VALIDATION
    if lacking:
        name = _WORDS[lacking]
        raise DataError(
            f"{root} holds neither annotations/instances_{name}2017.json nor {name}/annotations.json, nor Roboflow's "
            f"{name}/_annotations.coco.json, nor one file in COCO's format for all pictures: convert the annotations "
            "to COCO's format, name their file (data.annotations=FILE), or point data.path at their folder.",
            path=root,
        )
    return chosen


def _picture_folder(root: Path, file: Path, tree: Any) -> Path:
    """Return the folder in which the most of the first pictures are; if none is found, the usual one."""
    name, parent = file.stem.removeprefix(_START), file.parent
    usual = [root / name, root / "images" / name] if parent.name == "annotations" else [parent, parent / "images"]
    images = tree.get("images") if isinstance(tree, dict) else None
    entries = [each for each in images[:_TRIED] if isinstance(each, dict)] if isinstance(images, list) else []
    names = [str(each.get("file_name")).replace("\\", "/") for each in entries]

    def present(folder: Path) -> int:
        return sum(os.path.isfile(folder / name) for name in names)

    bases = (root, parent, parent.parent) if parent.name == "annotations" else (root, parent)
    others = [folder for base in bases for folder in (base / "images", base, *sorted(base.glob("images/*/")))]
    return max(dict.fromkeys([*usual, *others]), key=present)


def _without_groups(trees: Sequence[Any]) -> None:
    """Remove categories that only group others, as Roboflow exports one: others name them, and no object has them."""
    if not all(isinstance(tree, dict) and all(isinstance(tree.get(key), list) for key in _READ) for tree in trees):
        return
    entries = [[each for each in tree[key] if isinstance(each, dict)] for tree in trees for key in _READ]
    groups = {str(each.get("supercategory")) for each in chain(*entries[::2])}
    used = {str(each.get("category_id")) for each in chain(*entries[1::2])}
    for tree in trees:
        tree["categories"] = [
            each
            for each in tree["categories"]
            if not isinstance(each, dict)
            or each.get("supercategory") != "none"
            or str(each.get("name")) not in groups
            or str(each.get("id")) in used
        ]


def _is_folder_of_coco(place: Place) -> bool:
    root = place.path
    return place.is_folder and bool(any(_of_a_split(root, each) for each in (TRAIN, VALIDATION)) or _others(root))


@dataset(
    "coco",
    kind="boxes",
    sniff=_is_folder_of_coco,
    keys=("path", "annotations", "validation_fraction", "detection"),
    stand_in=StandIn(assumed_shapes),
    pictures=WITH_BOXES,
)
def open_coco(data: Data) -> BoxDataset:
    """Open COCO's folders, ``PATH/{train,val or test}/`` with pictures and their annotations, or one file.

    Raises:
        DataError: If they are missing, or the annotations are malformed.
    """
    left_out, digest = SkippedItems(), hashlib.sha256()
    if data.annotations is None:
        root = existing_folder(data, "annotations/ and train2017/")
        files = _annotation_files(root, left_out)
    else:
        root, file = annotation_file(data)
        files = {"": file}
    sets = {}
    for split, file in files.items():
        content = read_content(file)
        if split != TEST or VALIDATION not in files:
            digest.update(content)
        tree = read_json(file, content, "COCO's annotations")
        folder = _picture_folder(root, file, tree)
        own = {*_FILES, *([os.path.relpath(file, folder)] if file.is_relative_to(folder) else [])}
        sets[split] = AnnotatedSet(file=file, folder=folder, tree=tree, own_files=frozenset(own))
    _without_groups([each.tree for each in sets.values()])
    return box_dataset(data, sets, left_out, digest.hexdigest())
