"""Tables of images: rows that hold images, or name image files."""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.dataset import NOT_IMAGES, DatasetRequest, StoredImages, file_splits
from paceline.data.image.source import FileSource, Ids
from paceline.data.labels import are_unlabelled, name_rows, number_rows
from paceline.data.splits import SPLIT_NAMES, TRAIN
from paceline.data.tables import (
    USUAL_COLUMNS,
    DataTable,
    Parts,
    TableFile,
    explain_errors,
    find_column,
    require_pyarrow,
    splits_of_files,
)
from paceline.errors import DataError, data_error, did_you_mean
from paceline.parsing.files import special_kind
from paceline.parsing.plain_text import text_of_cell

_OF_COLUMNS = "If each class has a column of 0 and 1, set task=image_multilabel and data.target_columns."
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def _number_in(cell: Any) -> float:
    """Return the number in a cell; NaN if there is none."""
    if isinstance(cell, bool) or cell is None or (isinstance(cell, str) and not _DECIMAL.fullmatch(cell.strip())):
        return math.nan
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return math.nan


# Normalising a path, for example that of a table in a folder, removes one of the slashes.
_ADDRESS = re.compile(r"(\./)?[A-Za-z][A-Za-z0-9+.-]+:/")


class ImageTable(DataTable):
    """A table of images, with all used columns read except the images."""

    def __init__(
        self,
        root: Path,
        files: Sequence[TableFile],
        request: DatasetRequest,
        features: Mapping[str, Any] | None = None,
        splits: Sequence[str] = (),
    ) -> None:
        """Read the files.

        Args:
            root: Their folder, for messages.
            files: The files.
            request: Gives the column names.
            features: For Arrow streams, Hugging Face metadata of each column.
            splits: For Arrow streams, the split of each file.

        Raises:
            DataError: If a file cannot be read, or a column is missing.
        """
        self.root, self.request, self.first, data = root, request, files[0], request.data
        self.features = self.first.features if features is None else features
        self._find_columns(repr(str(root)), self.first.schema.names if features is None else list(features))
        self.kind = self._kind()
        named: Sequence[str] = list(splits) or [TRAIN] * len(files)
        self.unread = list[Path]()
        if self.split_column is None and len(files) > 1 and not splits:
            # By file name; files of unused splits are removed.
            paths = [each.path for each in files]
            base = root if root.is_dir() else Path(os.path.commonpath([each.parent for each in paths]))
            pairs = list(zip(files, splits_of_files(paths, base), strict=True))
            self.unread = [file.path for file, split in pairs if split not in SPLIT_NAMES]
            files, named = zip(*(pair for pair in pairs if pair[1] in SPLIT_NAMES), strict=True)
        super().__init__(
            repr(str(root)),
            files,
            self._wanted,
            split_column=self.split_column,
            splits=named,
            score_all=data.score_all,
        )
        if not self.rows:
            raise DataError(f"{self.name} has no rows: write the table again.")
        if self.first.format == "csv":
            self.rows = [tuple(text_of_cell(cell.strip()) for cell in row) for row in self.rows]
        count = len(self.label_columns)
        # Values of the label column, one per row; tuples for numeric columns.
        self.values: list[Any] = [row[:count] if data.target_columns else row[0] for row in self.rows]

    def _find_columns(self, where: str, columns: Sequence[str]) -> None:
        """Find the columns that the recipe names, or else those of the right type, or of a usual name in any case.

        Raises:
            DataError: If a column is missing or ambiguous.
        """
        data = self.request.data
        image = find_column("image", data.image_column, columns, where, self.features)
        if unknown := [name for name in data.target_columns if name not in columns]:
            raise DataError(
                f"{where} has no column {unknown[0]!r} (data.target_columns), but {', '.join(columns)}."
                f"{did_you_mean(unknown[0], columns)}"
            )
        label: str | None = next(iter(data.target_columns), None)
        if label is None:
            label = find_column("label", data.label_column, columns, where, self.features)
        if image is None or label is None:
            what = "image" if image is None else "label"
            hint = NOT_IMAGES if image is None else _OF_COLUMNS
            raise DataError(
                f"{where} has the columns {', '.join(columns)}, and none has a usual name for a column of {what}s "
                f"({', '.join(USUAL_COLUMNS[what][:4])}, …): name it in data.{what}_column. {hint}"
            )
        self.image_column, self.label_columns = image, data.target_columns or (label,)
        if image in self.label_columns:
            key = "target_columns" if data.target_columns else "label_column"
            raise DataError(f"{where}: data.image_column and data.{key} are both {image!r}: name two columns.")
        self.split_column = find_column("split", data.split_column, columns, where, self.features)

    def _wanted(self, file: TableFile) -> list[str]:
        wanted = [*self.label_columns, *([self.image_column] if self.kind == "path" else [])]
        lacking = [name for name in wanted if name not in file.schema.names]
        if lacking and file is not self.first:
            raise data_error(file.path, f"lacks the column {lacking[0]!r}, which {str(self.first.path)!r} has.")
        return wanted

    def _kind(self) -> str:
        """Return the kind of the image column: ``bytes``, a ``struct`` with bytes, or a ``path``."""
        if self.first.format == "csv":
            return "path"
        schema, types, is_stream = self.first.schema, require_pyarrow().types, self.first.format == "arrow"
        with explain_errors(self.first.path):
            found = schema.field(self.image_column).type
        if types.is_binary(found) or types.is_large_binary(found):
            return "bytes"
        inner = found.field("bytes").type if types.is_struct(found) and found.get_field_index("bytes") >= 0 else None
        if inner is not None and (types.is_binary(inner) or types.is_large_binary(inner)):
            return "struct"
        if not is_stream and (types.is_string(found) or types.is_large_string(found)):
            return "path"
        others = [each.name for each in schema if types.is_struct(each.type) or types.is_binary(each.type)]
        raise DataError(
            f"{str(self.root)!r}: column {self.image_column!r} is of the type {found}, but images are bytes, a struct "
            f"with bytes and path{'' if is_stream else ', or paths'}: name another in data.image_column."
            f"{did_you_mean(self.image_column, others)}"
        )

    def hold_out_labelled(self) -> list[Ids]:
        """Return the rows of each split, without held-out rows that have no label, as in a competition's test split."""
        parts, data, several = self.parts, self.request.data, self.request.several_labels
        # With several labels, an empty cell is a label.
        is_needed = data.score_all or (several and not data.target_columns)
        labels = [[self.values[row] for row in each] for each in parts.splits]
        if len(labels) > 1 and not is_needed and are_unlabelled(*labels):
            told = f"{len(labels[1]):,} rows without labels are not read ({parts.description})"
            self.parts = Parts(parts.train, None, told)
        return self.parts.splits

    def read_numbers(self, rows: Ids, problem: Callable[[str, str], None]) -> NDArray[np.float64]:
        """Return the numbers of some rows, [all rows, columns]; NaN for other rows and invalid cells.

        Args:
            rows: Rows to read.
            problem: Called for each row with an invalid label (not 0, 1, false or true) or a number that is not finite:
                a sentence and its subject.
        """
        is_label, columns, values = self.request.several_labels, self.label_columns, self.values
        rule = "a label is 0 or 1" if is_label else "a target is a finite number"
        if is_label:
            words = {"true": 1, "false": 0}
            values = [
                tuple(words.get(str(cell).lower(), cell) if isinstance(cell, str | bool) else cell for cell in row)
                for row in values
            ]
        found = np.full((len(values), len(columns)), np.nan)
        for row in rows.tolist():
            found[row] = [_number_in(cell) for cell in values[row]]
            is_right = np.isin(found[row], (0, 1)) if is_label else np.isfinite(found[row])
            pairs = zip(columns, values[row], is_right, strict=True)
            if wrong := [f"{cell!r} in the column {column!r}" for column, cell, is_number in pairs if not is_number]:
                found[row] = np.nan
                sentence = f"{{}}, but {rule}: correct it, or remove the line."
                problem(sentence, f"{self.row_name(row)} has {' and '.join(wrong)}")
        return found

    def labels(self, parts: Sequence[Ids]) -> tuple[tuple[str, ...], Sequence[NDArray[Any]]]:
        """Return class names, and the labels of some rows.

        Raises:
            DataError: If a row lacks a label.
        """
        if self.request.several_labels:
            return name_rows(self.values, parts, self.row_name, str(self.root))
        feature = None if self.kind == "path" else self.features.get(self.label_columns[0])
        one_class = self.request.data.score_all
        return number_rows(self.values, parts, self.row_name, str(self.root), feature, one_class=one_class)

    def open_paths(self) -> StoredImages:
        """Open the images that the rows name, relative to their file, and probe the headers of a few.

        ``request.problems`` collects rows that name no file, or the same file as another row.

        Raises:
            DataError: If a label or a path is missing.
        """
        base = self.root if self.root.is_dir() else self.first.path.parent
        paths = ["" if row[-1] is None else row[-1] for row in self.rows]
        if self.first.format != "csv":
            folders = np.repeat([os.path.relpath(each.path.parent, base) for each in self.files], self.counts).tolist()
            pairs = zip(folders, paths, strict=True)
            paths = [path and os.path.normpath(os.path.join(folder, path)) for folder, path in pairs]
        request, splits = self.request, self.hold_out_labelled()
        wanted = np.unique(np.concatenate(splits))
        sizes = self._sizes(base.absolute(), paths, wanted)
        classes, numbers = request.data.target_columns, None
        if classes:
            numbers = self.read_numbers(wanted[sizes[wanted] >= 0], request.problems.add_row)
            sizes[np.isnan(numbers).any(axis=1)] = -1
        request.refuse_problems()
        splits = [rows[sizes[rows] >= 0] for rows in splits]
        if not all(map(len, splits)):
            raise data_error(self.root, "names no usable image: correct its rows.")
        numbered: Sequence[NDArray[Any]] = () if numbers is None else [numbers[rows] for rows in splits]
        if numbers is None:
            classes, numbered = self.labels(splits)
        sources, digest = [], hashlib.sha256()
        for rows, targets in zip(splits, numbered, strict=True):
            names = [os.fsencode(paths[row]) for row in rows.tolist()]
            sources.append(FileSource(base.absolute(), names, targets, 3))
            for name, row, label in zip(names, rows, targets.tolist(), strict=True):
                digest.update(b"%s\0%d\0%s\n" % (name, sizes[row], str(label).encode()))
            digest.update(b"\0")
        digest.update("\0".join(classes).encode())
        return file_splits(request, sources, self.parts.description, classes=classes, digest=digest.hexdigest())

    def _sizes(self, root: Path, paths: Sequence[str], wanted: Ids) -> Ids:
        """Return the size in bytes of the file that each row names; -1 for skipped rows."""
        sizes = np.full(len(paths), -1, dtype=np.int64)
        seen: dict[str, int] = {}
        for row in np.sort(wanted).tolist():
            path = paths[row]
            full_path = os.path.normpath(os.path.join(root, path))
            try:
                status = os.stat(full_path)
                size = status.st_size if stat.S_ISREG(status.st_mode) else None
            except (OSError, ValueError):  # a name with a null byte
                size = None
            details: tuple[str, ...] = (repr(path),)
            if not path:
                sentence, details = "{} names no image: give its path, or remove the line.", ()
            elif _ADDRESS.match(path):
                # Not repeated: an address may contain a password.
                sentence = (
                    "{} names a URL, but a table names files: copy the images here, and give paths relative to the "
                    "table."
                )
                details = ()
            elif full_path in seen:
                first, second = self.values[seen[full_path]], self.values[row]
                otherwise = "" if first == second else f", with the label {first!r} there and {second!r} here"
                sentence = "{} names {}, as does {}{}: keep one of the two."
                details = (repr(path), self.row_name(seen[full_path]), otherwise)
            elif size is not None:
                sizes[row], seen[full_path] = size, row
                continue
            elif kind := special_kind(full_path):
                sentence, details = "{} names {}, which is {}: correct it, or remove the line.", (repr(path), kind)
            else:
                sentence = "{} names {}, but there is no file {}: correct it, or remove the line."
                details = (repr(path), repr(full_path))
            self.request.problems.add_row(sentence, self.row_name(row), *details)
        return sizes
