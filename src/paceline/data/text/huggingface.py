"""Text of a Hugging Face dataset on the local disk: what ``save_to_disk`` wrote, or parquet.

The files are Arrow's own, so that the ``datasets`` library is not needed, and no code of a dataset is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.data.image.arrow import mapped, require_pyarrow
from paceline.data.image.huggingface import choose_splits, find_files
from paceline.data.text.corpus import Documents
from paceline.errors import DataError, did_you_mean
from paceline.files import LeftOut, refuse_odd_kinds


def read_huggingface_text(path: str | Path, column: str, left_out: LeftOut) -> tuple[Documents, Documents | None, str]:
    """The documents of a dataset to learn from, the held-out ones if it has such a split, and which split that is.

    Args:
        path: A folder that ``save_to_disk`` wrote, or parquet files.
        column: Which column is the text; each row is a document.
        left_out: Told of what is there and not read.

    Raises:
        DataError: If there is no such dataset, or it has no such column.
    """
    files = find_files(path, left_out)
    if files is None:
        raise DataError(
            f"{str(path)!r} is no dataset of Hugging Face's on the local disk: expected is a folder that save_to_disk "
            "wrote, or parquet files. One from the hub is saved with "
            "`datasets.load_dataset(NAME).save_to_disk(FOLDER)`."
        )
    train, held_out, why = choose_splits(files)
    documents = {
        split: list(
            _named(
                split,
                (text for file in files.splits[split] for text in _texts(file, column, is_parquet=files.is_parquet)),
                left_out,
            )
        )
        for split in (train, held_out)
        if split is not None
    }
    return documents[train], None if held_out is None else documents[held_out], why


def _named(split: str, texts: Iterator[str | None], left_out: LeftOut) -> Iterator[tuple[str, str]]:
    for row, text in enumerate(texts):
        if text:
            yield f"{split}[{row}]", text.removeprefix("\ufeff")
        else:
            left_out.add("rows without text", f"{split}[{row}]")


def _texts(file: Path, column: str, *, is_parquet: bool) -> Iterator[str | None]:
    """The rows of a column, of a parquet file or an Arrow stream."""
    arrow = require_pyarrow()
    refuse_odd_kinds(file)
    try:
        if is_parquet:
            with arrow.parquet.ParquetFile(mapped(file)) as opened:
                _check_column(opened.schema_arrow, column, file)
                for batch in opened.iter_batches(columns=[column]):
                    yield from batch.column(0).to_pylist()
        else:
            with mapped(file) as content, arrow.ipc.open_stream(content) as stream:
                _check_column(stream.schema, column, file)
                for batch in stream:
                    yield from batch.column(batch.schema.get_field_index(column)).to_pylist()
    except (OSError, arrow.ArrowInvalid) as error:
        raise DataError(f"{file} cannot be read ({error}); save the dataset again.") from error


def _check_column(schema: Any, column: str, file: Path) -> None:
    arrow = require_pyarrow()
    if column not in schema.names:
        raise DataError(
            f"{file} has no column {column!r} (data.text.column): it has {', '.join(schema.names)}."
            f"{did_you_mean(column, schema.names)}"
        )
    kind = schema.field(column).type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        raise DataError(f"{file}: the column {column!r} holds {kind}, and no text; name another (data.text.column).")
