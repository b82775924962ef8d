"""The kind of a source of images, from its files."""

from __future__ import annotations

from glob import has_magic
from pathlib import Path

from paceline.errors import DataError, data_error
from paceline.parsing.files import refuse_archive, refuse_special_inputs
from paceline.plugins.dataset_registry import dataset_at, entries


def detect(path: str) -> str:
    """Detect the kind of a source, by the name of the data set that opens it.

    Raises:
        DataError: If the path does not exist, or is of an unknown kind.
    """
    root = Path(path).expanduser()
    if not root.exists() and "{" not in path and not has_magic(path):
        raise DataError(f"there is no {str(root)!r}: correct the path.")
    if (entry := dataset_at(root)) is not None:
        return entry.name
    if not root.exists():
        return "webdataset"
    refuse_special_inputs(root)
    refuse_archive(root)
    endings = ", ".join(dict.fromkeys(ending for each in entries("images") for ending in each.endings))
    raise data_error(
        path,
        f"is a file whose name does not tell what it holds (known: {endings}): name a folder, or give the data set, "
        "with data.dataset or with `pack --kind`.",
    )
