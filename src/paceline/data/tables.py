"""Tables in files of any format: where their files are, and their cells, columns, splits and row names."""

from __future__ import annotations

import codecs
import csv
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.data.splits import SPLIT_NAMES, TRAIN, UNREAD_SPLITS, held_out_among, split_of, unread_splits
from paceline.errors import DataError, data_error, did_you_mean
from paceline.parsing.files import SkippedItems, has_extension, list_files, refuse_archive, refuse_special_inputs
from paceline.parsing.plain_text import load_json, utf8

Format = Literal["csv", "jsonl", "parquet", "arrow"]
FORMATS: dict[str, Format] = {"csv": "csv", "tsv": "csv", "tab": "csv", "jsonl": "jsonl", "parquet": "parquet"}
"""Tables by the ending of their names; compressed ones are refused (:class:`TableFile`)."""
CSV_ENDINGS = tuple(f".{each}" for each in FORMATS if FORMATS[each] == "csv")
PLAIN_TEXTS = ("csv", "tsv", "tab", "jsonl")


def require_pyarrow() -> ModuleType:
    """Return the pyarrow library, which is an optional dependency.

    Raises:
        DataError: If it is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.compute
        import pyarrow.csv
        import pyarrow.ipc
        import pyarrow.json
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            "Packing, parquet tables and Hugging Face datasets need pyarrow, which "
            f"cannot be imported ({error}): run `pip install 'paceline[pack]'`."
        ) from error
    found: ModuleType = pa
    return found


def mapped(path: str | Path) -> Any:
    """Open a memory-mapped file for pyarrow; unlike pyarrow's functions this accepts names of any bytes."""
    return require_pyarrow().memory_map(os.fsencode(path))


_KINDS = {str: "text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}


_OTHER_MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def file_problem(path: Path) -> str | None:
    """Return why a text file cannot be read, and the fix; None if it exists, is not empty, and is UTF-8 and valid JSON.

    Each key of JSON lines has values of one kind.

    Raises:
        OSError: If it cannot be opened.
    """
    if not path.exists():
        return f"{str(path)!r} does not exist: restore it, or correct data.path."
    if not path.stat().st_size:
        return f"{str(path)!r} is empty: write it again."
    is_json, kinds = has_extension(path.name, ("jsonl",)), dict[str, str]()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig").strip()
                row = load_json(text or "{}") if is_json else {}
                if not isinstance(row, dict):
                    raise ValueError
            except UnicodeDecodeError as error:
                encoding = next((name for mark, name in _OTHER_MARKS.items() if line.startswith(mark)), "latin1")
                return (
                    f"{str(path)!r} is not UTF-8: byte {error.start + 1} of line {number:,} is "
                    f"0x{line[error.start]:02x}. Convert it, for example with `iconv -f {encoding} -t utf-8`."
                )
            except ValueError as error:
                fault, fix = "is not a JSON object", "write one object per line, not an array"
                if text.startswith("{"):
                    fault = f"does not hold one whole JSON object ({error})"
                    fix = "if the file was cut off, copy it again; otherwise write each object on one line"
                return f"line {number:,} of {str(path)!r} {fault}: {fix}."
            for key, value in row.items():
                kind = "" if value is None else _KINDS[type(value)]
                if kind and kinds.setdefault(key, kind) != kind:
                    return (
                        f"line {number:,} of {str(path)!r} has {kind} as {key!r}, and lines before have {kinds[key]}: "
                        "write the same kind in all lines."
                    )
    return None


@contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Raise DataError for any error from a damaged file, non-UTF-8 text, or a missing or duplicate column."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, require_pyarrow().ArrowException) as error:
        problem = None
        with suppress(OSError):  # the first error is reported
            problem = file_problem(path) if has_extension(path.name, PLAIN_TEXTS) or not path.exists() else None
        reason = " ".join(str(error).split())
        raise DataError(problem or f"{str(path)!r} cannot be read ({reason}): download or write it again.") from error


class TableFile:
    """A file of a table, read on request.

    Attributes:
        path: Its path.
        format: Its format; ``arrow`` is an Arrow stream, which is memory-mapped; or a function that reads it as an
            Arrow table.
    """

    def __init__(self, path: Path, file_format: Format | Callable[[Path], Any]) -> None:
        self.path, self.format = path, file_format
        refuse_special_inputs(path)
        refuse_archive(path)

    @cached_property
    def _separated(self) -> tuple[list[str], list[list[str]], list[int]]:
        return read_csv(self.path)

    @cached_property
    def table(self) -> Any:
        """Arrow's table of JSON lines, of a stream, or of your function."""
        read = self.format if callable(self.format) else {"jsonl": read_json_lines, "arrow": read_stream}[self.format]
        with explain_errors(self.path):
            return read(self.path)

    @cached_property
    def schema(self) -> Any:
        """Arrow's schema; of CSV, it has only ``names``."""
        if self.format == "csv":
            return SimpleNamespace(names=self._separated[0], metadata=None)
        if self.format != "parquet":
            return self.table.schema
        with explain_errors(self.path):
            return require_pyarrow().parquet.read_schema(mapped(self.path))

    @property
    def features(self) -> Mapping[str, Any]:
        """Hugging Face's metadata of each column of a parquet file, if any."""
        try:
            written = load_json((self.schema.metadata or {}).get(b"huggingface", b"{}"))
            features = written.get("info", {}).get("features", {})
        except (ValueError, AttributeError):
            features = {}
        return features if isinstance(features, dict) else {}

    def read(self, columns: Sequence[str], field: str = "") -> Any:
        """Return columns as an Arrow table, not of CSV; ``field`` may be one of a struct (``.path``), to read it alone.

        Raises:
            DataError: If the file cannot be read, or a column does not exist.
        """
        if self.format != "parquet":
            return self.table.select(columns)
        with explain_errors(self.path), require_pyarrow().parquet.ParquetFile(mapped(self.path)) as opened:
            found = opened.read(columns=[name + field for name in columns], use_threads=False)
            found.validate(full=True)
            return found

    def rows(self, columns: Sequence[str]) -> list[tuple[Any, ...]]:
        """Return each row's cells of some columns; raises DataError as :meth:`read`."""
        if self.format == "csv":
            header, rows, _ = self._separated
            places = [header.index(name) for name in columns]
            return [tuple(row[each] for each in places) for row in rows]
        with explain_errors(self.path):
            found = self.read(columns)
            return list(zip(*(found.column(name).to_pylist() for name in columns), strict=True))

    def row_name(self, row: int) -> str:
        """Return a row's name for messages."""
        if self.format == "csv":
            return f"line {self._separated[2][row]} of {str(self.path)!r}"
        return f"row {row:,} (counted from 0) of {str(self.path)!r}"


def read_json_lines(path: Path) -> Any:
    """Return Arrow's table of JSON lines; raises Arrow's errors."""
    arrow = require_pyarrow()
    with mapped(path) as content:
        # A line must fit into a block, and a block's text into an array.
        block_size = min(max(2**20, content.size()), 2**30)
        read_json = partial(arrow.json.read_json, content, arrow.json.ReadOptions(block_size=block_size))
        table = read_json()
        if dates := [each for each in table.schema if arrow.types.is_timestamp(each.type)]:  # they are text
            content.seek(0)
            texts = arrow.schema([each.with_type(arrow.string()) for each in dates])
            table = read_json(arrow.json.ParseOptions(explicit_schema=texts)).select(table.schema.names)
        table.validate(full=True)
        return table


def read_stream(path: str | Path) -> Any:
    """Return an Arrow stream as a memory-mapped table; raises DataError and Arrow's errors."""
    refuse_special_inputs(path)
    ipc = require_pyarrow().ipc
    # Without threads, which do not exist in a forked loader process.
    table = ipc.open_stream(mapped(path), options=ipc.IpcReadOptions(use_threads=False)).read_all()
    table.validate(full=True)
    return table


_LARGEST_HEAD = 2**16


def read_csv(file: Path) -> tuple[list[str], list[list[str]], list[int]]:
    """Return the header of a CSV or TSV file, the rows, and the line in which each begins.

    Raises:
        DataError: If it cannot be read, has no rows, or a row does not fit the header.
    """
    csv.field_size_limit(sys.maxsize)
    try:
        with open(file, encoding="utf-8-sig", newline="") as opened:
            first = opened.readline(_LARGEST_HEAD)
            opened.seek(0)
            reader = csv.reader(opened, delimiter=_delimiter(file, first), strict=True)
            rows, lines, begin = [], [], 1
            header = [name.strip() for name in next(reader, [])]
            begin += reader.line_num
            for row in reader:
                if row:
                    rows.append(row)
                    lines.append(begin)
                begin = reader.line_num + 1
    except UnicodeDecodeError:
        raise DataError(file_problem(file)) from None
    except (OSError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else f"line {reader.line_num}: {error}"
        if isinstance(error, csv.Error) and begin < reader.line_num:
            reason = f"line {begin}: a quotation mark opens a field that does not end there; {reason}"
        raise DataError(f"the table {str(file)!r} cannot be read ({reason}): correct it, or the path.") from None
    if not rows:
        reason = "has no rows: expected a line of column names and one line for each sample."
        raise DataError(file_problem(file) or f"{str(file)!r} {reason}")
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise data_error(file, f"has two columns called {twice[0]!r}: rename one of them.")
    for row, line in zip(rows, lines, strict=True):
        if len(row) != len(header):
            raise DataError(
                f"line {line} of {str(file)!r} has {len(row)} fields, but its first line names {len(header)} columns "
                f"({', '.join(header)}): put a field that contains a separator in quotation marks."
            )
    return header, rows, lines


def _delimiter(file: Path, first: str) -> str:
    if first.startswith("sep="):
        raise data_error(file, f"begins with {first.strip()!r}, a line for Excel: remove it.")
    return "\t" if file.suffix.lower() in (".tsv", ".tab") else max(",;\t", key=first.count)


USUAL_COLUMNS = {
    "image": (
        *("image", "img", "images", "path", "file", "file_name", "filename", "filepath", "file_path"),
        *("image_path", "img_path", "image_file", "jpg", "png"),
    ),
    "label": ("label", "labels", "class", "target", "category", "class_name", "label_name", "fine_label", "class_id"),
    "split": ("split", "set", "subset", "partition"),
}


_TYPES = {"image": "Image", "label": "ClassLabel"}  # Hugging Face's names


def find_column(
    what: str,
    name: str | None,
    columns: Sequence[str],
    where: str,
    features: Mapping[str, Any] = MappingProxyType({}),
) -> str | None:
    """Return the column that the recipe names, or else the one of the right type, or of a usual name in any case.

    Args:
        what: ``image``, ``label`` or ``split``.
        name: The recipe's value: a name, ``auto``, or None for no column.
        columns: The table's columns.
        where: The table, for the message.
        features: Hugging Face metadata of each column, if its library wrote the table.

    Raises:
        DataError: If the named column is missing, or several have the type.
    """
    if name is None or name in columns:
        return name
    if name != "auto":
        raise DataError(
            f"{where} has no column {name!r} (data.{what}_column), but {', '.join(columns)}."
            f"{did_you_mean(name, columns)}"
        )
    lowered = {name.strip().lower(): name for name in reversed(columns)}
    kinds = {name: feature.get("_type") for name, feature in features.items() if isinstance(feature, dict)}
    typed = [each for each in columns if kinds.get(each) == _TYPES.get(what, "")]
    if len(typed) == 1:
        return typed[0]
    default = next((lowered[usual] for usual in USUAL_COLUMNS[what] if usual in lowered), None)
    if typed and (default is None or what == "image"):
        names = ", ".join(typed)
        raise DataError(f"{where} has {len(typed)} columns of {what}s ({names}): name one in data.{what}_column.")
    return default


class Parts(NamedTuple):
    """The rows of each split.

    Attributes:
        train: Rows of the training images, int64.
        held_out: Rows of the held-out images, or None if they are to be split off.
        description: Origin of held-out images, for people; empty if they are split off.
    """

    train: NDArray[np.int64]
    held_out: NDArray[np.int64] | None
    description: str

    @property
    def splits(self) -> list[NDArray[np.int64]]:
        """The rows of the training images, and of any held-out ones."""
        return [self.train] if self.held_out is None else [self.train, self.held_out]


def parts_of(splits: Sequence[str] | None, count: int, where: str, *, score_all: bool = False) -> Parts:
    """Return the rows of each split.

    Args:
        splits: Split name of each row, or None without such a column.
        count: Number of rows.
        where: The table, for the message.
        score_all: Whether no row needs to be for training; held-out rows are then the training rows too.

    Raises:
        DataError: If a row names an unknown split, or no row is for training.
    """
    if splits is None:
        return Parts(np.arange(count), None, "")
    normalised = np.array([each.strip().lower() for each in splits])
    known_words = [word for names in SPLIT_NAMES.values() for word in names]
    for word in np.unique(normalised).tolist():
        if word not in known_words:
            row = int(np.flatnonzero(normalised == word)[0])
            raise DataError(
                f"{where} has the split {word!r} in row {row + 1:,}, but a split is train, val or test: correct it, "
                f"or set data.split_column=off.{did_you_mean(word, known_words)}"
            )
    train, validation, test = (np.flatnonzero(np.isin(normalised, names)) for names in SPLIT_NAMES.values())
    if score_all and not len(train):
        train = validation if len(validation) else test
    if len(train) == 0:
        raise DataError(f"{where} has no row whose split is train: correct it, or set data.split_column=off.")
    if len(validation):
        unread = f"; {len(test):,} rows of test are not read" if len(test) else ""
        return Parts(train, validation, f"the rows of validation{unread}")
    return Parts(train, test, "the rows of test") if len(test) else Parts(train, None, "")


class DataTable:
    """The rows of a table's files.

    Attributes:
        name: The table, for messages.
        files: Its files.
        counts: Rows of each file.
        rows: The chosen cells of each row.
        parts: Rows of each split.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[TableFile],
        choose: Callable[[TableFile], Sequence[str]],
        *,
        split_column: str | None,
        splits: Sequence[str] = (),
        score_all: bool = False,
    ) -> None:
        """Read the chosen columns.

        Args:
            name: The table, for messages.
            files: Its files.
            choose: Chooses a file's columns.
            split_column: The column with each row's split, ``auto`` or None.
            splits: The split of each file, used without such a column.
            score_all: See :func:`parts_of`.

        Raises:
            DataError: If a file or a split cannot be read, or only some files have a column of splits.
        """
        self.name, self.files, self.counts = name, list(files), list[int]()
        self.rows, words = list[tuple[Any, ...]](), list[str]()
        for file in files:
            split = find_column("split", split_column, file.schema.names, repr(str(file.path)))
            rows = file.rows([*choose(file), *([] if split is None else [split])])
            if split is not None:
                words += ["" if row[-1] is None else str(row[-1]) for row in rows]
                rows = [row[:-1] for row in rows]
            self.counts.append(len(rows))
            self.rows += rows
        total = sum(self.counts)
        if 0 < len(words) < total:
            raise DataError(
                f"{name} has tables with a split column and tables without: give all of them one, or set "
                "data.split_column=off."
            )
        if not words and not set(splits) <= {TRAIN}:
            words = np.repeat(splits, self.counts).tolist()
        self.parts = parts_of(words or None, total, name, score_all=score_all)

    def row_name(self, row: int) -> str:
        """Return a row's name for messages."""
        ends = np.cumsum(self.counts)
        file = int(np.searchsorted(ends, row, side="right"))
        return self.files[file].row_name(row - int(ends[file] - self.counts[file]))


def files_ending_in(ending: str, root: Path, left_out: SkippedItems) -> list[Path]:
    """Return the files below a folder with these endings, in order; all others are counted in ``left_out``."""
    found = []
    for name in list_files(root, left_out):
        if has_extension(name, (ending,)):
            found.append(root / name)
        else:
            left_out.add(f"files that do not end in .{ending}", name)
    return sorted(found)


# The hub's names of shard files.
_OF_THE_HUB = re.compile(r"(.+)-\d{5}-of-\d{5}(-[0-9a-f]+)?\.parquet")


def splits_of_files(paths: Sequence[Path], base: Path) -> list[str]:
    """Return the split of each file: train, validation, test, or another split name of the hub, which is not read.

    Args:
        paths: The files.
        base: Their root folder; names of folders below it count, innermost first.

    Raises:
        DataError: If some are named train and another has no split name.
    """
    said = [split_of(path.relative_to(base)) for path in paths]
    if TRAIN not in said:
        return [split or TRAIN for split in said]
    found = []
    for path, split in zip(paths, said, strict=True):
        hub = _OF_THE_HUB.fullmatch(path.name)
        if split is None and hub is None:
            raise data_error(
                path,
                "is next to files called train, but its own name gives no split (train, val or test): rename it, or "
                "take it out of the folder.",
            )
        found.append(split or (hub[1] if hub else TRAIN))
    return found


@dataclass(frozen=True, kw_only=True)
class TableFiles:
    """The files of a table, and Hugging Face's metadata of their columns, if any.

    Attributes:
        root: Their folder.
        splits: Arrow or parquet files of each split, in order.
        format: Their format.
        features: Metadata of each column, in the library's format.
    """

    root: Path
    splits: Mapping[str, Sequence[Path]]
    format: Format
    features: Mapping[str, Any]


_STATE, _INFO, _DICT = "state.json", "dataset_info.json", "dataset_dict.json"


def find_files(path: str | Path, left_out: SkippedItems | None = None) -> TableFiles | None:
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
    features = TableFile(parquet[0], "parquet").features
    return TableFiles(root=root, splits=by_split(parquet, root), format="parquet", features=features)


def by_split(paths: Sequence[Path], root: Path) -> dict[str, list[Path]]:
    """Return the files of each split, by their names and those of the folders below ``root``."""
    splits: dict[str, list[Path]] = {}
    for path, split in zip(paths, splits_of_files(paths, root if root.is_dir() else root.parent), strict=True):
        splits.setdefault(split, []).append(path)
    return splits


def _saved(root: Path, folders: Mapping[str, Path], left_out: SkippedItems) -> TableFiles:
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
    return TableFiles(root=root, splits=splits, format="arrow", features=features)


def _read_json(path: Path, key: str, kind: Callable[[Any], Any]) -> Any:
    with explain_errors(path):
        return kind(load_json(path.read_bytes())[key])


def choose_splits(files: TableFiles, left_out: SkippedItems, *, score_all: bool) -> tuple[str, str | None, str]:
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
        raise data_error(
            files.root,
            f"has the splits {', '.join(files.splits)}, but none called train: save it again with one.",
        )
    unread = [name for name in files.splits if name not in ("train", held_out)]
    if held_out is None:
        for file in (file for name in unread for file in files.splits[name]):
            left_out.add(UNREAD_SPLITS, file.name)
        return "train", None, ""
    origin = "; ".join(each for each in (f"the split {held_out}", unread_splits(unread)) if each)
    return (held_out, None, origin) if is_alone else ("train", held_out, origin)
