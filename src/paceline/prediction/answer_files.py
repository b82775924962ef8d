"""Prediction files, written in constant memory as predictions arrive.

Output goes to a file with the suffix ``.partial``, which is renamed after the last prediction: the file is complete or
absent. A killed command leaves the partial file with the lines of all complete batches (except Parquet, whose index is
written last); running it again overwrites the partial file.
"""

from __future__ import annotations

import csv
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from paceline.errors import DataError, PacelineError
from paceline.host.system import lock_file
from paceline.parsing.plain_text import csv_cell, utf8
from paceline.prediction.predictor import PLURALS, Predictor
from paceline.records.run_directory import encode_json, sync_directory

_AT_ONCE = 1024

Row = dict[str, Any]


class AnswerWriter(ABC):
    """Writes rows, one per image, to a text file; subclasses write other formats."""

    _file: TextIO

    @abstractmethod
    def write(self, rows: Iterable[Row]) -> None:
        """Append rows and flush them to the operating system."""

    def close(self) -> None:
        """Finish the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class _JsonLines(AnswerWriter):
    """One JSON object per image."""

    def __init__(self, path: Path, _: Predictor) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, rows: Iterable[Row]) -> None:
        self._file.writelines(f"{encode_json(row)}\n" for row in rows)
        self._file.flush()


class _Csv(AnswerWriter):
    """One line per label of an image, or of a part of it; one without a label if it has none.

    For numbers, and for multi-label images, one line per image with a column per number or class.
    """

    def __init__(self, path: Path, predictor: Predictor) -> None:
        self._file = path.open("w", encoding="utf-8", errors="backslashreplace", newline="")
        kind, self._csv = predictor.kind, csv.writer(self._file, lineterminator="\n")
        self._per_label, self._measures = kind.per_label, PLURALS[kind.measure]
        self._numbers = predictor.number_names
        self._multilabel = bool(self._numbers and predictor.classes)
        self._sides = [*itertools.chain.from_iterable(kind.per_label.values())]
        columns = list(map(csv_cell, self._numbers)) or ["rank", "label", kind.measure, *self._sides]
        self._csv.writerow(["path", *(["labels"] * self._multilabel), *columns, "error"])

    def write(self, rows: Iterable[Row]) -> None:
        for row in rows:
            path = csv_cell(str(row["path"]))
            if self._numbers:
                found = {} if row["error"] else row.get("numbers", row)
                numbers = (found.get(name, "") for name in self._numbers)
                labels = [csv_cell(";".join(row["labels"]))] if self._multilabel else []
                self._csv.writerow([path, *labels, *numbers, csv_cell(row["error"] or "")])
                continue
            more = (map(_cells, row[key]) for key in self._per_label)
            for rank, entry in enumerate(zip(row["labels"], row[self._measures], *more, strict=True), start=1):
                sides = itertools.chain.from_iterable(entry[2:])
                self._csv.writerow([path, rank, csv_cell(entry[0]), entry[1], *sides, ""])
            if not row["labels"]:
                self._csv.writerow([path, "", "", "", *[""] * len(self._sides), csv_cell(row["error"] or "")])
        self._file.flush()


def _cells(entry: Any) -> Sequence[Any]:
    """Return the cells of a text, or of several numbers."""
    return [csv_cell(entry)] if isinstance(entry, str) else entry


class _Parquet(AnswerWriter):
    """One row per image, with lists of labels and probabilities; needs the extra ``pack``."""

    def __init__(self, path: Path, predictor: Predictor) -> None:
        try:
            import pyarrow as pa
            from pyarrow import parquet
        except ImportError as error:
            raise DataError(
                "--output=….parquet needs pyarrow, which is not installed; pip install 'paceline[pack]', or write "
                ".jsonl or .csv."
            ) from error
        self._arrow = pa
        columns, kind = {"path": pa.string()}, predictor.kind
        if predictor.classes:
            columns |= {"labels": pa.list_(pa.string()), PLURALS[kind.measure]: pa.list_(pa.float64())}
        for key, names in kind.per_label.items():
            columns[key] = pa.list_(pa.list_(pa.float64(), len(names)) if len(names) > 1 else pa.string())
        if names := predictor.number_names:
            columns["numbers"] = pa.struct([(name, pa.float64()) for name in names])
        columns["error"] = pa.string()
        self._schema = pa.schema(list(columns.items()))
        self._writer = parquet.ParquetWriter(path, self._schema)
        self._rows: list[Row] = []
        self._texts = ["labels", *(key for key, names in kind.per_label.items() if len(names) == 1)]

    def write(self, rows: Iterable[Row]) -> None:
        # One row group per batch would make a slow file.
        self._rows += [
            {
                **row,
                "path": utf8(os.fspath(row["path"])),
                "numbers": {} if row["error"] else row.get("numbers", row),
                **{key: [*map(utf8, row.get(key, ()))] for key in self._texts},
            }
            for row in rows
        ]
        if len(self._rows) >= _AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(self._arrow.Table.from_pylist(self._rows, schema=self._schema))
            self._rows = []

    def close(self) -> None:
        self._flush()
        self._writer.close()


_WRITERS: dict[str, Callable[..., AnswerWriter]] = {".jsonl": _JsonLines, ".csv": _Csv, ".parquet": _Parquet}
ENDINGS = tuple(_WRITERS)


def check_output(path: Path) -> None:
    """Reject an unusable output name before any computation.

    Raises:
        DataError: If its extension is not supported, it exists, or its folder does not.
    """
    if path.suffix not in _WRITERS:
        raise DataError(
            f"--output={path}: the name must end in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}; change it.", path=path
        )
    if os.path.lexists(path):
        raise DataError(f"--output={path} already exists and is not overwritten; give another name.", path=path)
    if not path.parent.is_dir():
        raise DataError(f"--output={path}: there is no directory '{path.parent}'; create it first.", path=path)


@contextmanager
def answer_file(path: Path, predictor: Predictor) -> Iterator[AnswerWriter]:
    """Open a new prediction file in the format of its extension; it appears under its name when complete.

    Args:
        path: The new file.
        predictor: The predictor whose predictions are written.

    Raises:
        DataError: As in :func:`check_output`, or if writing fails.
    """
    check_output(path)
    partial = path.with_name(f"{path.name}.partial")
    try:
        with open(partial, "ab") as lock:
            try:
                lock_file(lock, wait=False)
            except BlockingIOError:
                raise DataError(
                    f"--output={path}: another command is writing it; give another name.", path=path
                ) from None
            except OSError:
                pass  # a file system without locks
            check_output(path)  # the other command may have completed it just now
            writer = _WRITERS[path.suffix](partial, predictor)
            try:
                yield writer
            except BaseException:
                with suppress(OSError):
                    writer.close()  # only complete output
                raise
            writer.close()
            partial.replace(path)
            sync_directory(path.parent)
    except (PacelineError, BrokenPipeError):
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(
            f"Cannot write the predictions to '{partial}': {reason}; check the path and the disk."
        ) from error
