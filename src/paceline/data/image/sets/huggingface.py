"""Local Hugging Face datasets: folders written by ``save_to_disk``, and the hub's parquet files.

These are plain Arrow files: the ``datasets`` library is not needed, and no code of a dataset is run.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.image.dataset import DatasetRequest, StoredImages, probe
from paceline.data.image.sets import IMAGENET, TABLE
from paceline.data.image.sets.parquet import ImageTable, StreamSource, names_images, open_parquet, read_schema
from paceline.data.image.source import Names
from paceline.data.image.tables import explain_errors, files_ending_in, require_pyarrow, splits_of_files
from paceline.data.splits import UNREAD_SPLITS, held_out_among, unread_splits
from paceline.dataset_registry import Place, dataset
from paceline.errors import DataError
from paceline.escaping import utf8
from paceline.files import SkippedItems, list_files
from paceline.plain_json import load_json

_STATE, _INFO, _DICT = "state.json", "dataset_info.json", "dataset_dict.json"


@dataclass(frozen=True, kw_only=True)
class HuggingFaceFiles:
    """A dataset's local files and their column metadata.

    Attributes:
        root: Their folder.
        splits: Arrow or parquet files of each split, in order.
        is_parquet: Whether they are parquet files.
        features: Metadata of each column, in the library's format.
    """

    root: Path
    splits: Mapping[str, Sequence[Path]]
    is_parquet: bool
    features: Mapping[str, Any]


def find_files(path: str | Path, left_out: SkippedItems | None = None) -> HuggingFaceFiles | None:
    """Find the files of such a dataset in a folder; None if it is not one.

    Args:
        path: The folder, or a parquet file.
        left_out: Receives files that do not belong to the data set.

    Raises:
        DataError: If its metadata cannot be read, or pyarrow is missing.
    """
    root, left_out = Path(path).expanduser(), SkippedItems() if left_out is None else left_out
    if (root / _DICT).is_file():
        names = [str(name) for name in _read_json(root / _DICT, "splits", list)]
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
    for file, split in zip(parquet, splits_of_files(parquet, root if root.is_dir() else root.parent), strict=True):
        splits.setdefault(split, []).append(file)
    return HuggingFaceFiles(root=root, splits=splits, is_parquet=True, features=features)


def _saved(root: Path, folders: Mapping[str, Path], left_out: SkippedItems) -> HuggingFaceFiles:
    splits: dict[str, list[Path]] = {}
    features: dict[str, Any] = {}
    for split, folder in folders.items():
        with explain_errors(folder / _STATE):
            names = [Path(each["filename"]).name for each in _read_json(folder / _STATE, "_data_files", list)]
            if odd := [
                name for name, times in Counter(names).items() if times > 1 or "\0" in name or utf8(name) != name
            ]:
                raise ValueError(f"it lists {odd[0]!r}, which is listed twice or is not a file name")
            splits[split] = [folder / name for name in names]
        features = features or _read_json(folder / _INFO, "features", dict)
    known = {root / _DICT, *(folder / name for folder in folders.values() for name in (_STATE, _INFO))}
    known.update(file for files in splits.values() for file in files)
    for name in list_files(root, left_out):
        if root / name not in known:
            left_out.add("files that no state.json names", name)
    return HuggingFaceFiles(root=root, splits=splits, is_parquet=False, features=features)


def _read_json(path: Path, key: str, kind: Callable[[Any], Any]) -> Any:
    with explain_errors(path):
        return kind(load_json(path.read_bytes())[key])


def choose_splits(files: HuggingFaceFiles, left_out: SkippedItems, *, score_all: bool) -> tuple[str, str | None, str]:
    """Return the training split, the held-out split if any, and the origin of held-out images.

    Args:
        files: The dataset's files.
        left_out: Receives the files of splits that are not read, unless the origin names these.
        score_all: Whether the held-out split may be the only one; it is then returned as the training split.

    Raises:
        DataError: If there is no training split.
    """
    held_out = held_out_among(files.splits)
    is_alone = score_all and held_out is not None and "train" not in files.splits
    if "train" not in files.splits and not is_alone:
        raise DataError(
            f"{str(files.root)!r} has the splits {', '.join(files.splits)}, but none called train: save it again with "
            "one."
        )
    unread = [name for name in files.splits if name not in ("train", held_out)]
    if held_out is None:
        for file in (file for name in unread for file in files.splits[name]):
            left_out.add(UNREAD_SPLITS, file.name)
        return "train", None, ""
    origin = "; ".join(each for each in (f"the split {held_out}", unread_splits(unread)) if each)
    return (held_out, None, origin) if is_alone else ("train", held_out, origin)


def _is_described(place: Place) -> bool:
    """Whether ``save_to_disk`` wrote a folder, or it holds parquet files with the metadata of images and labels."""
    if not {".json", ".parquet"} & place.endings or (found := find_files(place.path)) is None:
        return False
    return not found.is_parquet or names_images(found.features)


@dataset("huggingface", sniff=_is_described, keys=TABLE, size=IMAGENET)
def open_huggingface(request: DatasetRequest) -> StoredImages:
    """Open a ``save_to_disk`` folder or the hub's parquet files, and probe the headers of a few images.

    Raises:
        DataError: If there is no such dataset, or it does not support random access.
    """
    left_out = SkippedItems()
    files = find_files(request.path, left_out)
    if files is None:
        raise _missing(request.path)
    data = replace(request.data, split_column=None)
    train_split, held_out_split, held_out = choose_splits(files, left_out, score_all=data.score_all)
    if files.is_parquet:
        return open_parquet(replace(request, data=data))
    splits = {train_split: files.splits[train_split]}
    if held_out_split is not None:
        splits[held_out_split] = files.splits[held_out_split]
    paths = [file for each in splits.values() for file in each]
    named = [split for split, each in splits.items() for _ in each]
    table = ImageTable(files.root, paths, replace(request, data=data), files.features, named)
    if len(table.parts.splits) < len(splits):
        raise DataError(f"The split {held_out_split} of {str(files.root)!r} is empty.")
    table.parts = table.parts._replace(description=held_out)
    classes, labels = table.labels()
    source = StreamSource(table.paths, table.column, labels, table.names(list(splits)))
    table.check_present(source)
    digest = hashlib.sha256(json.dumps([table.columns.image, table.columns.labels[0], classes]).encode())
    binary_length = require_pyarrow().compute.binary_length
    images = (source.rows_of(number) for number in range(len(source.groups)))
    lengths = np.concatenate([binary_length(each).to_numpy().astype(np.int64) for each in images])
    for rows in table.parts.splits:
        names = Names.of(source.names[row] for row in rows.tolist())
        for part in (lengths[rows], labels[rows], names.ends, names.blob):
            digest.update(np.ascontiguousarray(part).tobytes())
    probed = probe(source, table.parts.train.tolist())
    return table.opened(source, classes, probed, digest.hexdigest(), left_out=left_out.summaries())


def _missing(path: Path) -> DataError:
    """Return the error for a missing dataset; paths, including hub names, are absolute by now."""
    said = f"{str(path)!r} is not a local Hugging Face dataset: expected a folder written by save_to_disk"
    name = "OWNER/NAME"
    if not path.exists():
        name = path.name if path.parent == Path.cwd() else f"{path.parent.name}/{path.name}"
    return DataError(
        f"{said}, or one of parquet files. One from the hub is data.path=hf://datasets/{name}, if it is stored as "
        f"parquet; another is saved with `datasets.load_dataset({name!r}).save_to_disk('FOLDER')` in Python."
    )
