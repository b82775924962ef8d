"""Image tables: column detection, labels, splits, and rows that name image files.

Text labels stay text: they are numbers only if all of them read as ``0``, ``1``, ``2``, …; ``07`` and ``007`` are two
names.
"""

from __future__ import annotations

import ast
import codecs
import hashlib
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.dataset import NOT_IMAGES, DatasetRequest, Problems, StoredImages, file_splits, similar_names
from paceline.data.image.source import FileSource, Ids
from paceline.data.splits import SPLIT_NAMES, TRAIN, split_of
from paceline.errors import DataError, did_you_mean
from paceline.escaping import one_form, quoted, utf8
from paceline.files import SkippedItems, has_extension, list_files, special_kind
from paceline.plain_json import load_json
from paceline.recipe.data import Data


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


_TEXTS = ("csv", "tsv", "tab", "jsonl")
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
            problem = file_problem(path) if has_extension(path.name, _TEXTS) or not path.exists() else None
        reason = " ".join(str(error).split())
        raise DataError(problem or f"{str(path)!r} cannot be read ({reason}): download or write it again.") from error


_LARGEST_LABEL = 2**20
_CANONICAL = re.compile(r"0|[1-9][0-9]*")
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?")
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def _not_whole(number: str) -> str:
    fix = f': write {float(number):.0f} (in pandas, astype("Int64"))' * (
        float(number) >= 0 and float(number).is_integer()
    )
    fix = "; if -1 is a class, write a name; if it means unlabelled, leave those rows out" if number == "-1" else fix
    return f"but labels are whole numbers from 0, or names{fix}."


def as_label(value: object, name: str) -> int | str:
    """Parse a label as written: a number from 0 on, or text.

    Args:
        value: The value as written.
        name: Name of the sample, for the message.

    Raises:
        DataError: If it is neither.
    """
    if isinstance(value, float):
        raise DataError(f"{name!r} has the label {value!r}, {_not_whole(str(value))}")
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "" or utf8(str(value)) != str(value):
        raise DataError(f"{name!r} has the label {value!r}, which is neither a number nor a class name.")
    if isinstance(value, int) and not 0 <= value < _LARGEST_LABEL:
        raise DataError(f"{name!r} has the label {value}, but labels are numbers from 0 to {_LARGEST_LABEL - 1:,}.")
    return value


def number_classes(
    parts: list[list[int | str]], path: str, *, one_class: bool = False
) -> tuple[tuple[str, ...], list[Ids]]:
    """Return class names and numeric labels.

    Args:
        parts: Labels of the training images, and of any held-out ones.
        path: Path of the data, for the message.
        one_class: Whether there may be one class only.

    Raises:
        DataError: If numbers and names are mixed, a held-out label is not a training class, or there is only one class.
    """
    parts = in_one_form(parts)
    distinct = {label for labels in parts for label in labels}
    number: dict[int | str, int]
    if _are_numbers(distinct, path):
        number = {}
        for label in distinct:
            if len(str(label)) > len(str(_LARGEST_LABEL)) or int(label) >= _LARGEST_LABEL:
                raise DataError(
                    f"{path!r} has the label {str(label)[:40]}, but labels that are numbers go up to "
                    f"{_LARGEST_LABEL - 1:,}: write names, with a letter in one of them."
                )
            number[label] = int(label)
        classes = tuple(map(str, range(max(number.values()) + 1)))
    else:
        classes = tuple(sorted(map(str, set(parts[0]))))
        number = {name: index for index, name in enumerate(classes)}
        if unknown := sorted(map(str, distinct - number.keys())):
            raise DataError(
                f"{path!r} has held-out samples of the class {unknown[0]!r}, but none to train on: add "
                "some, or hold out others (data.validation_fraction, or a column 'split')."
            )
    _refuse_one_class({classes[number[label]] for label in parts[0]}, path, one_class=one_class)
    return classes, [np.array([number[label] for label in labels], dtype=np.int64) for labels in parts]


def _refuse_one_class(trained: set[str], path: str, *, one_class: bool) -> None:
    if len(trained) == 1 and not one_class:
        raise DataError(f"{path!r} has one class, {trained.pop()!r}, but a classifier needs at least two.")


def in_one_form(parts: list[list[int | str]], known: Iterable[str] = ()) -> list[list[int | str]]:
    """Return labels with one spelling for each name (:func:`one_form`)."""
    forms = one_form({label for labels in parts for label in labels if isinstance(label, str)}, known)
    changed: dict[int | str, str] = {name: form for name, form in forms.items() if name != form}
    return [[changed.get(label, label) for label in labels] for labels in parts] if changed else parts


def _are_numbers(labels: set[int | str], path: str) -> bool:
    """Whether labels are class numbers; otherwise all are class names."""
    texts = sorted(label for label in labels if isinstance(label, str))
    names = [text for text in texts if not _CANONICAL.fullmatch(text)]
    if not names:
        return True
    if len(texts) < len(labels):
        one = next(label for label in labels if isinstance(label, int))
        raise DataError(
            f"{path!r} has labels that are numbers ({one}) and labels that are names ({names[0]!r}): use one kind for "
            "all."
        )
    if all(map(_NUMBER.fullmatch, texts)) and (odd := [text for text in names if not text.isdecimal()]):
        raise DataError(f"{path!r} has the label {odd[0]}, {_not_whole(odd[0])}")
    return False


def number_rows(
    values: Sequence[object],
    parts: Sequence[Ids],
    name: Callable[[int], str],
    path: str,
    feature: object = None,
    *,
    one_class: bool = False,
) -> tuple[tuple[str, ...], list[Ids]]:
    """Return the class names and the numeric labels of a table's rows.

    Args:
        values: Values of the label column, one per row.
        parts: Rows of the training images, and of any held-out ones.
        name: Returns a row's name, for messages.
        path: The table, for the message.
        feature: The column's Hugging Face metadata; it may contain class names.
        one_class: Whether there may be one class only.

    Raises:
        DataError: If a row has no label, or an unknown one.
    """

    def label(row: int) -> int | str:
        value = values[row]
        if value is None or value == "" or value == -1 or value != value:  # NaN
            raise DataError(
                f"{name(row)} has no label ({value!r}): give one, leave the row out, or name another column in "
                f"data.label_column{'; if -1 is a class, write a name' * (value == -1)}."
            )
        # Booleans are classes like any others.
        return str(value).lower() if isinstance(value, bool) else as_label(value, name(row))

    found = [list(map(label, part.tolist())) for part in parts]
    named = feature.get("names") if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" else None
    if not named:
        return number_classes(found, path, one_class=one_class)
    classes = tuple(named) if isinstance(named, list) else ()
    numbers: dict[int | str, int] = {utf8(str(name)): number for number, name in enumerate(classes)}
    if not classes or tuple(numbers) != classes:
        raise DataError(f"{path!r} names its classes {str(named)[:80]!r}, but they must be a list of distinct strings.")
    numbered = []
    for part in in_one_form(found, classes):
        # A class may be given by name; other text is never a number.
        said = [numbers.get(label, label) for label in part]
        odd = next((each for each in said if isinstance(each, str) or each >= len(classes)), None)
        if odd is not None:
            raise DataError(
                f"{path!r} has the label {odd!r}, but its classes are 0 … {len(classes) - 1}, or their names: write "
                "the table again."
            )
        numbered.append(np.array(said, dtype=np.int64))
    _refuse_one_class({classes[each] for each in np.unique(numbered[0])}, path, one_class=one_class)
    return classes, numbered


def read_numbers(
    values: Sequence[Any],
    rows: Ids,
    name: Callable[[int], str],
    request: DatasetRequest,
    problem: Callable[[str, str], None],
) -> NDArray[np.float64]:
    """Return the numbers of some rows of a table, [all rows, columns]; NaN for other rows and invalid cells.

    Args:
        values: Values of the columns, a tuple per row.
        rows: Rows to read.
        name: Returns a row's name, for messages.
        request: Gives the column names, and whether they hold labels: 0, 1, false or true.
        problem: Called for each row with an invalid label or a number that is not finite: a sentence and its subject.
    """
    columns, rule = request.data.target_columns, "a target is a finite number"
    if request.several_labels:
        rule = "a label is 0 or 1"
        words = {"true": 1, "false": 0}
        values = [
            tuple(words.get(str(cell).lower(), cell) if isinstance(cell, str | bool) else cell for cell in row)
            for row in values
        ]
    found = np.full((len(values), len(columns)), np.nan)
    for row in rows.tolist():
        found[row] = [_number_in(cell) for cell in values[row]]
        is_right = np.isin(found[row], (0, 1)) if request.several_labels else np.isfinite(found[row])
        pairs = zip(columns, values[row], is_right, strict=True)
        if wrong := [f"{cell!r} in the column {column!r}" for column, cell, is_number in pairs if not is_number]:
            found[row] = np.nan
            sentence = f"{{}}, but {rule}: correct it, or remove the line."
            problem(sentence, f"{name(row)} has {' and '.join(wrong)}")
    return found


def name_rows(
    values: Sequence[Any], parts: Sequence[Ids], name: Callable[[int], str], path: str
) -> tuple[tuple[str, ...], list[NDArray[np.float32]]]:
    """Return the class names of multi-label rows, and each row's labels, 0 or 1 [rows, classes].

    A cell is a list, also one in Python's or JSON's notation, or text with names separated by ``;`` and optional
    spaces; an empty cell means no labels. The arguments are those of :func:`number_rows`.

    Raises:
        DataError: If a label is not a name, a held-out label is not a training class, or there are no labels.
    """

    def labels(row: int) -> set[str]:
        cell = "" if values[row] is None else values[row]
        listed: Any = cell if isinstance(cell, list) else [cell]
        if isinstance(cell, str) and (listed := _list_in(cell.strip())) is None:
            listed = cell.split(";")
        texts = (each.strip() if isinstance(each, str) else each for each in listed)
        return {str(as_label(each, name(row))) for each in texts if each != ""}

    read = [[labels(row) for row in part.tolist()] for part in parts]
    forms = one_form({name for part in read for names in part for name in names})
    found = [[{forms[name] for name in names} for names in part] for part in read]
    classes = tuple(sorted(set().union(*found[0])))
    if not classes:
        raise DataError(f"{path!r} has no label in any row to train on: name another column in data.label_column.")
    if unknown := sorted(set().union(*(each for part in found for each in part)).difference(classes)):
        raise DataError(f"{path!r} has held-out images of the class {unknown[0]!r}, but none to train on.")
    numbers = {name: number for number, name in enumerate(classes)}
    numbered = [np.zeros((len(part), len(classes)), dtype=np.float32) for part in found]
    for part, rows in zip(found, numbered, strict=True):
        for named, row in zip(part, rows, strict=True):
            row[[numbers[each] for each in named]] = 1
    return classes, numbered


# In Python's or JSON's notation, or numpy's, which has no commas.
_ITEM = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[0-9]+"""
_LIST = re.compile(rf"[\[({{]\s*(?:(?:{_ITEM})(?:[\s,]+(?:{_ITEM}))*)?,?\s*[\])}}]")


def _list_in(cell: str) -> list[str] | None:
    """Return the items of a list of quoted names or numbers that a cell's text shows; None if it shows none."""
    if cell == "set()":
        return []
    if not _LIST.fullmatch(cell):
        return None
    items = re.findall(_ITEM, cell)
    for read in (load_json, ast.literal_eval):
        with suppress(ValueError, SyntaxError):
            return [str(read(item)) for item in items]
    return None


_JOINT = re.compile(r"\s*(?:\band\b|[|,/+&_\s-])\s*")


def listed_names(classes: Sequence[str]) -> list[str]:
    """Return the names that look like lists of labels: by ``;``, brackets, or parts that are few or classes."""
    found = {name for name in classes if ";" in name or (name.startswith(("[", "{")) and name.endswith(("]", "}")))}
    every = set(classes)
    found.update(name for name in classes if name != (pieces := _JOINT.split(name))[0] and every.issuperset(pieces))
    # A name may hold a comma, as in WordNet, or a space.
    for separator, share in (("|", 1.0), (",", 1.0), ("/", 0.5), (" ", 0.5)):
        joined = [name for name in classes if separator in name]
        parts = {part.strip() for name in classes for part in name.split(separator)}
        found.update(joined if len(parts) <= share * len(classes) else ())
    return [name for name in classes if name in found]


def odd_class_names(classes: Sequence[str], fix: str) -> list[str]:
    """Return warnings about suspicious class names; ``fix`` says what to do about names that look like lists."""
    listed, similar = listed_names(classes), similar_names(classes)
    missing = [name for name in classes if name.lower() in ("-1", "nan", "null", "<na>")]
    notes = [f"{name!r} is taken for a class; if it means unlabelled, leave those rows out" for name in missing]
    if listed:
        count = f"{len(listed):,} of {len(classes):,}"
        notes.append(f"each name like {listed[0]!r} ({count}) is taken for one class: {fix}")
    if similar:
        more = f", and {len(similar) - 1:,} more pairs" if len(similar) > 1 else ""
        pair = " and ".join(map(quoted, similar[0]))
        notes.append(f"the classes {pair} differ by case, space or invisible characters only{more}")
    return notes


def _number_in(cell: Any) -> float:
    """Return the number in a cell; NaN if there is none."""
    if isinstance(cell, bool) or cell is None or (isinstance(cell, str) and not _DECIMAL.fullmatch(cell.strip())):
        return math.nan
    try:
        return float(cell)
    except (TypeError, ValueError, OverflowError):
        return math.nan


_USUAL = {
    "image": (
        *("image", "img", "images", "path", "file", "file_name", "filename", "filepath", "file_path"),
        *("image_path", "img_path", "image_file", "jpg", "png"),
    ),
    "label": ("label", "labels", "class", "target", "category", "class_name", "label_name", "fine_label", "class_id"),
    "split": ("split", "set", "subset", "partition"),
}
_OF_COLUMNS = "If each class has a column of 0 and 1, set task=image_multilabel and data.target_columns."
_TYPES = {"image": "Image", "label": "ClassLabel"}  # Hugging Face's names
# The hub's names of shard files.
_OF_THE_HUB = re.compile(r"(.+)-\d{5}-of-\d{5}(-[0-9a-f]+)?\.parquet")


class ColumnMatch(NamedTuple):
    """The names of the columns in use; several label columns for numeric targets."""

    image: str
    labels: tuple[str, ...]
    split: str | None


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
    default = next((lowered[usual] for usual in _USUAL[what] if usual in lowered), None)
    if typed and (default is None or what == "image"):
        names = ", ".join(typed)
        raise DataError(f"{where} has {len(typed)} columns of {what}s ({names}): name one in data.{what}_column.")
    return default


def find_columns(
    data: Data, columns: Sequence[str], where: str, features: Mapping[str, Any] = MappingProxyType({})
) -> ColumnMatch:
    """Find the columns that the recipe names, or else those of the right type, or of a usual name in any case.

    Args:
        data: The recipe's section.
        columns: The table's columns.
        where: The table, for the message.
        features: Hugging Face metadata of each column, if its library wrote the table.

    Raises:
        DataError: If a column is missing or ambiguous.
    """
    image = find_column("image", data.image_column, columns, where, features)
    if unknown := [name for name in data.target_columns if name not in columns]:
        raise DataError(
            f"{where} has no column {unknown[0]!r} (data.target_columns), but {', '.join(columns)}."
            f"{did_you_mean(unknown[0], columns)}"
        )
    if data.target_columns:
        label: str | None = data.target_columns[0]
    else:
        label = find_column("label", data.label_column, columns, where, features)
    if image is None or label is None:
        what = "image" if image is None else "label"
        raise DataError(
            f"{where} has the columns {', '.join(columns)}, and none has a usual name for a column of {what}s "
            f"({', '.join(_USUAL[what][:4])}, …): name it in data.{what}_column. "
            + (NOT_IMAGES if what == "image" else _OF_COLUMNS)
        )
    labels = data.target_columns or (label,)
    if image in labels:
        key = "target_columns" if data.target_columns else "label_column"
        raise DataError(f"{where}: data.image_column and data.{key} are both {image!r}: name two columns.")
    return ColumnMatch(image, labels, find_column("split", data.split_column, columns, where, features))


class Parts(NamedTuple):
    """The rows of each split.

    Attributes:
        train: Rows of the training images, int64.
        held_out: Rows of the held-out images, or None if they are to be split off.
        description: Origin of held-out images, for people; empty if they are split off.
    """

    train: Ids
    held_out: Ids | None
    description: str

    @property
    def splits(self) -> list[Ids]:
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
        return Parts(train, validation, f"the rows whose split is val{unread}")
    return Parts(train, test, "the rows whose split is test") if len(test) else Parts(train, None, "")


def hold_out_labelled(parts: Parts, values: Sequence[Any], request: DatasetRequest) -> Parts:
    """Return the parts without the held-out rows, if these have no label at all, as in a competition's test split.

    Args:
        parts: The rows of each split.
        values: Values of the label column, one per row, or tuples for several columns.
        request: Says what is read; an empty cell is a label if there are several.
    """
    is_needed = request.data.score_all or (request.several_labels and not request.data.target_columns)
    labels = [[values[row] for row in each] for each in parts.splits]
    if len(labels) == 1 or is_needed or not are_unlabelled(*labels):
        return parts
    return Parts(parts.train, None, f"{len(labels[1]):,} rows without labels are not read ({parts.description})")


def are_unlabelled(train: Sequence[Any], held_out: Sequence[Any]) -> bool:
    """Whether all held-out labels are missing (null, empty or -1), and none in training."""
    return bool(held_out) and all(map(_is_missing, held_out)) and not any(map(_is_missing, train))


def _is_missing(value: Any) -> bool:
    """Whether a label is null, empty or -1, which Hugging Face's library writes for unknown labels."""
    if isinstance(value, list):
        return all(map(_is_missing, value))
    if isinstance(value, tuple):  # numbers, of which -1 is one
        return all(each is None or each == "" or each != each for each in value)
    return value is None or value != value or value == -1 or (isinstance(value, str) and value.strip() in ("", "-1"))


def files_ending_in(ending: str, root: Path, left_out: SkippedItems) -> list[Path]:
    """Return the files below a folder with these endings, in order; all others are counted in ``left_out``."""
    found = []
    for name in list_files(root, left_out):
        if has_extension(name, (ending,)):
            found.append(root / name)
        else:
            left_out.add(f"files that do not end in .{ending}", name)
    return sorted(found)


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
            raise DataError(
                f"{str(path)!r} is next to files called train, but its own name gives no split (train, val or "
                f"test): rename it, or take it out of the folder."
            )
        found.append(split or (hub[1] if hub else TRAIN))
    return found


# Normalising a path, for example that of a table in a folder, removes one of the slashes.
_ADDRESS = re.compile(r"(\./)?[A-Za-z][A-Za-z0-9+.-]+:/")


def open_paths(
    root: Path,
    paths: Sequence[str],
    labels: Sequence[object],
    parts: Parts,
    where: Callable[[int], str],
    *,
    table: str,
    request: DatasetRequest,
) -> StoredImages:
    """Open the images named by a table's rows, and probe the headers of a few.

    Args:
        root: The folder that the paths are relative to.
        paths: Path of each row.
        labels: Labels as written. Multi-column labels and numbers are one tuple per row.
        parts: Rows of each split.
        where: Returns a row's name, for messages.
        table: The table's path, for messages.
        request: Its ``problems`` collect rows that name no file, or the same file as another row.

    Raises:
        DataError: If a label or a path is missing.
    """
    parts = hold_out_labelled(parts, labels, request)
    splits, data = parts.splits, request.data
    wanted = np.unique(np.concatenate(splits))
    sizes = _sizes(root, paths, labels, where, wanted, request.problems)
    numbers = None
    if data.target_columns:
        present = wanted[sizes[wanted] >= 0]
        numbers = read_numbers(labels, present, where, request, request.problems.add_row)
        sizes[np.isnan(numbers).any(axis=1)] = -1
    request.refuse_problems()
    splits = [rows[sizes[rows] >= 0] for rows in splits]
    if not all(map(len, splits)):
        raise DataError(f"{table!r} names no usable image: correct its rows.")
    classes, numbered = data.target_columns, list[NDArray[Any]]()
    if numbers is not None:
        numbered += [numbers[rows] for rows in splits]
    else:
        number = partial(number_rows, one_class=data.score_all)
        name_classes: Callable[..., Any] = name_rows if request.several_labels else number
        classes, numbered = name_classes(labels, splits, where, table)
    sources, digest = [], hashlib.sha256()
    for rows, targets in zip(splits, numbered, strict=True):
        names = [os.fsencode(paths[row]) for row in rows.tolist()]
        sources.append(FileSource(root, names, targets, 3))
        for name, row, label in zip(names, rows, targets.tolist(), strict=True):
            digest.update(b"%s\0%d\0%s\n" % (name, sizes[row], str(label).encode()))
        digest.update(b"\0")
    digest.update("\0".join(classes).encode())
    return file_splits(request, sources, parts.description, classes=classes, digest=digest.hexdigest())


def _sizes(
    root: Path,
    paths: Sequence[str],
    labels: Sequence[object],
    where: Callable[[int], str],
    wanted: Ids,
    problems: Problems,
) -> Ids:
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
                "{} names a URL, but a table names files: copy the images here, and give paths relative to the table."
            )
            details = ()
        elif full_path in seen:
            first, second = labels[seen[full_path]], labels[row]
            otherwise = "" if first == second else f", with the label {first!r} there and {second!r} here"
            sentence = "{} names {}, which {} names too{}: keep one of them."
            details = (repr(path), where(seen[full_path]), otherwise)
        elif size is not None:
            sizes[row], seen[full_path] = size, row
            continue
        elif kind := special_kind(full_path):
            sentence, details = "{} names {}, which is {}: correct it, or remove the line.", (repr(path), kind)
        else:
            sentence = "{} names {}, but there is no file {}: correct it, or remove the line."
            details = (repr(path), repr(full_path))
        problems.add_row(sentence, where(row), *details)
    return sizes
