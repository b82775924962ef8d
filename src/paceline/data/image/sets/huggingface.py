"""Datasets of Hugging Face's on the local disk: what ``save_to_disk`` wrote, and parquet files as on the hub.

The files are Arrow's own, so that the ``datasets`` library is not needed, and no code of a dataset is run. Images of
``save_to_disk`` lie in the files as they are and are read there, in any order; those of parquet are read with the row
group that they lie in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.data.image.dataset import DatasetRequest, StoredImages, file_splits
from paceline.data.image.mapped import MappedBytes, MappedSource, PlacedNames, Places, mapped_files
from paceline.data.image.sets import IMAGENET, TABLE
from paceline.data.image.sets.parquet import open_parquet, read_schema
from paceline.data.image.source import Ids, Names
from paceline.data.image.tables import files_ending_in, mapped, require_pyarrow, splits_of_files, told_unread
from paceline.dataset_registry import dataset
from paceline.errors import DataError, did_you_mean
from paceline.files import LeftOut, files_below
from paceline.plain_json import load_json

_HELD_OUT = ("validation", "val", "test")
_USUAL_LABELS = ("label", "labels", "fine_label")
_STATE, _INFO, _DICT = "state.json", "dataset_info.json", "dataset_dict.json"


@dataclass(frozen=True, kw_only=True)
class HuggingFaceFiles:
    """The files of a dataset on the local disk, and what they say of their columns.

    Attributes:
        root: Where they lie.
        splits: Arrow or parquet files of each split, in order.
        is_parquet: Which of the two.
        features: Of each column, as the library writes them.
    """

    root: Path
    splits: Mapping[str, Sequence[Path]]
    is_parquet: bool
    features: Mapping[str, Any]


class Columns(NamedTuple):
    """The columns in use, and the names of the classes that labels stand for."""

    image: str
    label: str
    classes: tuple[str, ...]


def find_files(path: str | Path, left_out: LeftOut | None = None) -> HuggingFaceFiles | None:
    """Look whether a folder is such a dataset; None if it is not.

    Args:
        path: The folder, or a parquet file.
        left_out: Told of files that are not the data set's.

    Raises:
        DataError: If it is one whose description cannot be read, or pyarrow is missing.
    """
    root, left_out = Path(path).expanduser(), LeftOut() if left_out is None else left_out
    if (root / _DICT).is_file():
        names = [str(name) for name in _read_json(root / _DICT).get("splits", [])]
        return _saved(root, {name: root / name for name in names}, left_out)
    if (root / _STATE).is_file() and (root / _INFO).is_file():
        return _saved(root, {"train": root}, left_out)
    if root.is_dir():
        parquet = files_ending_in("parquet", root, left_out)
    else:
        parquet = [root] if root.suffix.lower() == ".parquet" else []
    if not parquet:
        return None
    _, features = read_schema(parquet[0])
    splits: dict[str, list[Path]] = {}
    named = splits_of_files(parquet, root if root.is_dir() else root.parent)
    for file, split in zip(parquet, named, strict=True):
        splits.setdefault(split, []).append(file)
    return HuggingFaceFiles(root=root, splits=splits, is_parquet=True, features=features)


def _saved(root: Path, folders: Mapping[str, Path], left_out: LeftOut) -> HuggingFaceFiles:
    splits: dict[str, list[Path]] = {}
    features: dict[str, Any] = {}
    for split, folder in folders.items():
        names = [str(each["filename"]) for each in _read_json(folder / _STATE)["_data_files"]]
        splits[split] = [folder / Path(name).name for name in names]
        features = features or _read_json(folder / _INFO).get("features", {})
    known = {root / _DICT, *(folder / name for folder in folders.values() for name in (_STATE, _INFO))}
    known.update(file for files in splits.values() for file in files)
    for name in files_below(root, left_out):
        if root / name not in known:
            left_out.add("files that no state.json names", name)
    return HuggingFaceFiles(root=root, splits=splits, is_parquet=False, features=features)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = load_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{str(path)!r} cannot be read ({error}): save the dataset again.") from error
    if not isinstance(tree, dict):
        raise DataError(f"{str(path)!r} holds no JSON object: save the dataset again.")
    return tree


def choose_splits(files: HuggingFaceFiles) -> tuple[str, str | None, str]:
    """Return the split to train on, the held-out one if there is one, and where held-out images come from.

    Raises:
        DataError: If no split is for training.
    """
    if "train" not in files.splits:
        raise DataError(
            f"{str(files.root)!r} has the splits {', '.join(files.splits)}, but none that is called train: save it "
            "again with one."
        )
    held_out = next((name for name in _HELD_OUT if name in files.splits), None)
    if held_out is None:
        return "train", None, ""
    unread = told_unread([name for name in files.splits if name not in ("train", held_out)])
    return "train", held_out, "; ".join(each for each in (f"the split {held_out}", unread) if each)


def choose_columns(files: HuggingFaceFiles, label_column: str = "auto", image_column: str = "auto") -> Columns:
    """Find the columns with images and labels.

    Raises:
        DataError: If there is no such column, or more than one could be meant.
    """
    kinds = {name: said.get("_type") for name, said in files.features.items() if isinstance(said, dict)}
    images, labels = ([name for name, kind in kinds.items() if kind == each] for each in ("Image", "ClassLabel"))
    where, columns = repr(str(files.root)), ", ".join(kinds) or "none with a known type"
    for asked, found, kind in ((image_column, images, "Image"), (label_column, labels, "ClassLabel")):
        if asked != "auto" and asked not in found:
            raise DataError(
                f"{where} has no column {asked!r} of the type {kind} (columns: {columns}).{did_you_mean(asked, found)}"
            )
    if image_column != "auto":
        images = [image_column]
    if len(images) != 1:
        raise DataError(
            f"{where} has {len(images)} columns of images, and one is expected (columns: {columns}): save it again "
            "with one column of the type Image, or name one (data.image_column)."
        )
    if not labels:
        raise DataError(f"{where} has no column of the type ClassLabel (columns: {columns}): save it again with one.")
    usual = [name for name in _USUAL_LABELS if name in labels] or labels
    if label_column == "auto" and len(labels) > 1 and usual is labels:
        raise DataError(
            f"{where} has the labels {', '.join(labels)}: name the one to learn (data.label_column, --label-column)."
        )
    label = usual[0] if label_column == "auto" else label_column
    return Columns(images[0], label, tuple(str(name) for name in files.features[label].get("names", ())))


@dataset("huggingface", keys=TABLE, size=IMAGENET)
def open_huggingface(request: DatasetRequest) -> StoredImages:
    """Open a folder that ``save_to_disk`` wrote, or parquet files as on the hub; look at the heads of a few images.

    Raises:
        DataError: If there is no such dataset, or it cannot be read in any order.
    """
    left_out = LeftOut()
    files = find_files(request.path, left_out)
    if files is None:
        raise _not_there(request.path)
    columns = choose_columns(files, request.data.label_column, request.data.image_column)
    train_split, held_out_split, held_out = choose_splits(files)
    if files.is_parquet:
        named = replace(request.data, image_column=columns.image, label_column=columns.label, split_column=None)
        return open_parquet(replace(request, data=named))
    digest = hashlib.sha256(json.dumps([columns.image, columns.label, columns.classes]).encode())
    splits = [train_split] if held_out_split is None else [train_split, held_out_split]
    sources = [_read_split(files, columns, split, digest) for split in splits]
    return file_splits(
        request,
        sources,
        held_out,
        classes=columns.classes,
        digest=digest.hexdigest(),
        left_out=left_out.told(),
    )


def _not_there(path: Path) -> DataError:
    """Say what to do where there is no dataset; paths are absolute by now, also those that were names on the hub."""
    said = f"{str(path)!r} is no dataset of Hugging Face's on the local disk: expected is a folder by save_to_disk"
    name, hub = "NAME", "One from the hub"
    if not path.exists():
        name = path.name if path.parent == Path.cwd() else f"{path.parent.name}/{path.name}"
        hub = f"If {name!r} is its name on the hub, it is not fetched while training; it"
    return DataError(
        f"{said}, or one of parquet files. {hub} is saved with "
        f"`datasets.load_dataset({name!r}).save_to_disk('FOLDER')` in Python, where there is a "
        "network; then set data.path=FOLDER."
    )


def _read_split(files: HuggingFaceFiles, columns: Columns, split: str, digest: Any) -> MappedSource:
    """Read where the images of a split lie, and add that and their labels and names to a digest."""
    mapped_ones = mapped_files(files.splits[split])
    rows = [_rows(Path(file.path), columns) for file in mapped_ones]
    begin, length, labels = (np.concatenate([each[column] for each in rows]) for column in range(3))
    said = [name for each in rows for name in each[3]]
    names = Names.of(name or f"{split}[{row}]" for row, name in enumerate(said))
    where = f"The split {split} of {str(files.root)!r}"
    if len(labels) == 0:
        raise DataError(f"{where} is empty.")
    if labels.min() < 0 or labels.max() >= len(columns.classes):  # the library writes -1 for what is not known
        odd = int(labels.min()) if labels.min() < 0 else int(labels.max())
        raise DataError(
            f"{where} has the label {odd} in column {columns.label!r}, but its classes are "
            f"0 … {len(columns.classes) - 1}: save it again without that split, or with its labels."
        )
    for part in (length, labels, names.ends, names.blob):
        digest.update(np.ascontiguousarray(part).tobytes())
    places = Places(file=np.repeat(np.arange(len(rows)), [len(each[0]) for each in rows]), begin=begin, length=length)
    return MappedSource(MappedBytes(mapped_ones, places), labels, 3, PlacedNames(names, (str(files.root),)))


def _rows(path: Path, columns: Columns) -> tuple[Ids, Ids, Ids, list[str | None]]:
    """Where the images of a file lie in it (first byte, length), their labels (-1 for none) and their names."""
    arrow = require_pyarrow()
    nothing = np.zeros(0, dtype=np.int64)
    begin, length, labels, names = [nothing], [nothing], [nothing], list[str | None]()
    with mapped(path) as file:
        whole = file.read_buffer()
        for batch in arrow.ipc.open_stream(whole):
            images = batch.column(batch.schema.get_field_index(columns.image))
            content = images.field("bytes")
            if images.null_count:
                row = len(names) + images.is_null().to_numpy(zero_copy_only=False).argmax()
                raise DataError(
                    f"{str(path)!r} has no image in its row {row} (counted from 0): leave such rows out "
                    "(Dataset.filter), and save the dataset again."
                )
            if content.null_count:
                raise DataError(
                    f"{str(path)!r} names image files in place of holding them: save the dataset again, with "
                    "save_to_disk, which puts them in."
                )
            _, offsets, data = content.buffers()
            kind = "<i8" if arrow.types.is_large_binary(content.type) else "<i4"
            ends = np.frombuffer(offsets, dtype=kind)[content.offset : content.offset + len(content) + 1]
            ends = ends.astype(np.int64) + (0 if data is None else data.address - whole.address)
            if len(ends) > 1 and (ends[:-1].min() < 0 or ends[1:].max() > whole.size):  # a copy, out of compression
                raise DataError(
                    f"{str(path)!r} is compressed: pack it with `paceline pack`, or save the dataset again."
                )
            begin.append(ends[:-1])
            length.append(np.diff(ends))
            said = batch.column(batch.schema.get_field_index(columns.label)).to_numpy(zero_copy_only=False)
            # Arrow hands out integers of which some are missing as floats.
            labels.append((np.nan_to_num(said, nan=-1) if said.dtype.kind == "f" else said).astype(np.int64))
            names += images.field("path").to_pylist()
    return np.concatenate(begin), np.concatenate(length), np.concatenate(labels), names
