"""Labels of a table's rows: class names and numbers.

Text labels stay text: they are numbers only if all of them read as ``0``, ``1``, ``2``, …; ``07`` and ``007`` are two
names.
"""

from __future__ import annotations

import ast
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError, data_error
from paceline.parsing.plain_text import load_json, one_form, quoted, utf8

Ids = NDArray[np.int64]

_LARGEST_LABEL = 2**20
_CANONICAL = re.compile(r"0|[1-9][0-9]*")
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?")


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
                raise data_error(
                    path,
                    f"has the label {str(label)[:40]}, but labels that are numbers go up to {_LARGEST_LABEL - 1:,}: "
                    "write names, with a letter in one of them.",
                )
            number[label] = int(label)
        classes = tuple(map(str, range(max(number.values()) + 1)))
    else:
        classes = tuple(sorted(map(str, set(parts[0]))))
        number = {name: index for index, name in enumerate(classes)}
        if unknown := sorted(map(str, distinct - number.keys())):
            raise data_error(
                path,
                f"has held-out samples of the class {unknown[0]!r}, but none to train on: add some, or hold out "
                "others (data.validation_fraction, or a column 'split').",
            )
    _refuse_one_class({classes[number[label]] for label in parts[0]}, path, one_class=one_class)
    return classes, [np.array([number[label] for label in labels], dtype=np.int64) for labels in parts]


def _refuse_one_class(trained: set[str], path: str, *, one_class: bool) -> None:
    if len(trained) == 1 and not one_class:
        raise data_error(path, f"has one class, {trained.pop()!r}, but a classifier needs at least two.")


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
        raise data_error(
            path,
            f"has labels that are numbers ({one}) and labels that are names ({names[0]!r}): use one kind for all.",
        )
    if all(map(_NUMBER.fullmatch, texts)) and (odd := [text for text in names if not text.isdecimal()]):
        raise data_error(path, f"has the label {odd[0]}, {_not_whole(odd[0])}")
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
        raise data_error(path, f"names its classes {str(named)[:80]!r}, but they must be a list of distinct strings.")
    numbered = []
    for part in in_one_form(found, classes):
        # A class may be given by name; other text is never a number.
        said = [numbers.get(label, label) for label in part]
        odd = next((each for each in said if isinstance(each, str) or each >= len(classes)), None)
        if odd is not None:
            raise data_error(
                path,
                f"has the label {odd!r}, but its classes are 0 … {len(classes) - 1}, or their names: write the table "
                "again.",
            )
        numbered.append(np.array(said, dtype=np.int64))
    _refuse_one_class({classes[each] for each in np.unique(numbered[0])}, path, one_class=one_class)
    return classes, numbered


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
        raise data_error(path, "has no label in any row to train on: name another column in data.label_column.")
    if unknown := sorted(set().union(*(each for part in found for each in part)).difference(classes)):
        raise data_error(path, f"has held-out images of the class {unknown[0]!r}, but none to train on.")
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


def similar_names(classes: Iterable[str]) -> list[tuple[str, str]]:
    """Return pairs of classes whose names differ only by case, spaces or invisible characters."""
    groups = defaultdict(list)
    for name in classes:
        shown = name if name.isascii() else unicodedata.normalize("NFC", name)
        visible = shown if shown.isprintable() else "".join(c for c in shown if unicodedata.category(c) != "Cf")
        groups["".join(visible.casefold().split())].append(name)
    return [(names[0], names[1]) for names in groups.values() if len(names) > 1]


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
