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
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.data.image.dataset import DatasetRequest, StoredImages, file_splits
from paceline.data.image.mapped import MappedBytes, MappedFile, MappedSource, PlacedNames, Places, mapped_files
from paceline.data.image.sets import IMAGENET, TABLE
from paceline.data.image.sets.parquet import open_parquet, read_schema
from paceline.data.image.source import Ids, Names
from paceline.data.image.tables import (
    Found,
    files_ending_in,
    find_columns,
    mapped,
    number_rows,
    require_pyarrow,
    splits_of_files,
)
from paceline.data.splits import held_out_among, unread_splits
from paceline.dataset_registry import dataset
from paceline.errors import DataError
from paceline.files import LeftOut, files_below
from paceline.plain_json import load_json

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
    held_out = held_out_among(files.splits)
    if held_out is None:
        return "train", None, ""
    unread = unread_splits([name for name in files.splits if name not in ("train", held_out)])
    return "train", held_out, "; ".join(each for each in (f"the split {held_out}", unread) if each)


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
    data = replace(request.data, split_column=None)
    train_split, held_out_split, held_out = choose_splits(files)
    if files.is_parquet:
        return open_parquet(replace(request, data=data))
    where, names = str(files.root), list(files.features)
    columns = find_columns(data, names, repr(where), files.features)
    (label,) = columns.labels
    splits = [_read_split(files, columns, name) for name in (train_split, held_out_split) if name is not None]
    ends = np.cumsum([0, *(len(each.values) for each in splits)])
    classes, labels = number_rows(
        [value for each in splits for value in each.values],
        [np.arange(begin, end) for begin, end in pairwise(ends.tolist())],
        PlacedNames(Names.of(name for each in splits for name in each.names), (where,)),
        where,
        files.features.get(label),
    )
    digest = hashlib.sha256(json.dumps([columns.image, label, classes]).encode())
    sources = []
    for each, numbers in zip(splits, labels, strict=True):
        placed = Names.of(each.names)
        for part in (each.places.length, numbers, placed.ends, placed.blob):
            digest.update(np.ascontiguousarray(part).tobytes())
        content = MappedBytes(each.files, each.places)
        sources.append(MappedSource(content, numbers, 3, PlacedNames(placed, (where,))))
    return file_splits(request, sources, held_out, classes=classes, digest=digest.hexdigest(), left_out=left_out.told())


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


class _Split(NamedTuple):
    """What the files of a split hold: where each image lies, what its row says of it, and what it is called."""

    files: Sequence[MappedFile]
    places: Places
    values: list[object]
    names: list[str]


def _read_split(files: HuggingFaceFiles, columns: Found, split: str) -> _Split:
    found = mapped_files(files.splits[split])
    rows = [_rows(Path(file.path), columns) for file in found]
    names = [name for each in rows for name in each[3]]
    if not names:
        raise DataError(f"The split {split} of {str(files.root)!r} is empty.")
    return _Split(
        files=found,
        places=Places(
            file=np.repeat(np.arange(len(rows)), [len(each[0]) for each in rows]),
            begin=np.concatenate([each[0] for each in rows]),
            length=np.concatenate([each[1] for each in rows]),
        ),
        values=[value for each in rows for value in each[2]],
        names=[name or f"{split}[{row}]" for row, name in enumerate(names)],
    )


def _rows(path: Path, columns: Found) -> tuple[Ids, Ids, list[object], list[str | None]]:
    """Where the images of a file lie in it (first byte, length), what the rows say of their labels, and their names."""
    arrow = require_pyarrow()
    nothing = np.zeros(0, dtype=np.int64)
    begin, length, labels, names = [nothing], [nothing], list[object](), list[str | None]()
    with mapped(path) as file:
        whole = file.read_buffer()
        for batch in arrow.ipc.open_stream(whole):
            images = batch.column(batch.schema.get_field_index(columns.image))
            if not arrow.types.is_struct(images.type) or images.type.get_field_index("bytes") < 0:
                raise DataError(
                    f"{str(path)!r}: column {columns.image!r} is of the type {images.type}, but images are a struct "
                    "with bytes and path: name another in data.image_column."
                )
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
            labels += batch.column(batch.schema.get_field_index(columns.labels[0])).to_pylist()
            names += images.field("path").to_pylist()
    return np.concatenate(begin), np.concatenate(length), labels, names
