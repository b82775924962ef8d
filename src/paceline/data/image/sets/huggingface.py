"""Local Hugging Face datasets: folders written by ``save_to_disk``, and the hub's parquet files.

These are plain Arrow files: the ``datasets`` library is not needed, and no code of a dataset is run.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from paceline.data.image.dataset import DatasetRequest, StoredImages, probe
from paceline.data.image.sets import IMAGENET, TABLE
from paceline.data.image.sets.parquet import StoredTable, StreamSource, names_images, open_parquet
from paceline.data.image.source import NameArray
from paceline.data.tables import TableFile, choose_splits, find_files, require_pyarrow
from paceline.errors import DataError
from paceline.parsing.files import SkippedItems
from paceline.plugins.dataset_registry import Place, dataset


def _is_described(place: Place) -> bool:
    """Whether ``save_to_disk`` wrote a folder, or it holds parquet files with the metadata of images and labels."""
    if not {".json", ".parquet"} & place.endings or (found := find_files(place.path)) is None:
        return False
    return found.format != "parquet" or names_images(found.features)


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
    if files.format == "parquet":
        return open_parquet(replace(request, data=data))
    splits = {train_split: files.splits[train_split]}
    if held_out_split is not None:
        splits[held_out_split] = files.splits[held_out_split]
    opened = [TableFile(path, "arrow") for each in splits.values() for path in each]
    named = [split for split, each in splits.items() for _ in each]
    table = StoredTable(files.root, opened, replace(request, data=data), files.features, named)
    if len(table.parts.splits) < len(splits):
        raise DataError(f"The split {held_out_split} of {str(files.root)!r} is empty.")
    table.parts = table.parts._replace(description=held_out)
    classes, labels = table.row_labels()
    source = StreamSource([file.path for file in opened], table.column, labels, table.names(list(splits)))
    table.check_present(source)
    digest = hashlib.sha256(json.dumps([table.image_column, table.label_columns[0], classes]).encode())
    binary_length = require_pyarrow().compute.binary_length
    images = (source.rows_of(number) for number in range(len(source.groups)))
    lengths = np.concatenate([binary_length(each).to_numpy().astype(np.int64) for each in images])
    for rows in table.parts.splits:
        names = NameArray.of(source.names[row] for row in rows.tolist())
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
