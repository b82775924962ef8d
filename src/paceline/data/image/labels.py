"""Read the labels of images: each names its class by a number, or by a name.

Text stays text: it counts as numbers only where all of it reads as ``0``, ``1``, ``2``, …; ``07`` and ``007`` are two
names.
"""

from __future__ import annotations

import re

import numpy as np

from paceline.data.image.source import Ids
from paceline.errors import DataError

_LARGEST_LABEL = 2**20
_CANONICAL = re.compile(r"0|[1-9][0-9]*")
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?")


def as_label(value: object, name: str) -> int | str:
    """A label as it is written somewhere: a number from 0 on, or text.

    Args:
        value: What is written.
        name: Of which sample, for the message.

    Raises:
        DataError: If it is neither.
    """
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise DataError(f"{name!r} has the label {value!r}, which is neither a number nor a class name.")
    if isinstance(value, int) and not 0 <= value < _LARGEST_LABEL:
        raise DataError(f"{name!r} has the label {value}, but labels are numbers from 0 to {_LARGEST_LABEL - 1:,}.")
    return value


def number_classes(parts: list[list[int | str]], path: str) -> tuple[tuple[str, ...], list[Ids]]:
    """Name the classes, and number the labels.

    Args:
        parts: Labels of the training images, and of the held-out ones if there are any.
        path: Of the data, for the message.

    Raises:
        DataError: If some are numbers and some names, a held-out one is of a class that is not trained on, or there is
            one class.
    """
    written = {label for labels in parts for label in labels}
    number: dict[int | str, int]
    if _are_numbers(written, path):
        number = {label: _index(label, path) for label in written}
        classes = tuple(map(str, range(max(number.values()) + 1)))
    else:
        classes = tuple(sorted(map(str, set(parts[0]))))
        number = {name: index for index, name in enumerate(classes)}
        if unknown := sorted(map(str, written - number.keys())):
            raise DataError(f"{path!r} has held-out images of the class {unknown[0]!r}, and none to train on.")
    if len(classes) < 2:
        raise DataError(f"{path!r} has one class, {classes[0]!r}, but a classifier needs at least two.")
    return classes, [np.array([number[label] for label in labels], dtype=np.int64) for labels in parts]


def _are_numbers(written: set[int | str], path: str) -> bool:
    """Whether labels are the classes' numbers; else all are text, which names them."""
    texts = sorted(label for label in written if isinstance(label, str))
    names = [text for text in texts if not _CANONICAL.fullmatch(text)]
    if not names:
        return True
    if len(texts) < len(written):
        one = next(label for label in written if isinstance(label, int))
        raise DataError(
            f"{path!r} has labels that are numbers ({one}) and labels that are names ({names[0]!r}): make them all one "
            "or the other."
        )
    if all(map(_NUMBER.fullmatch, texts)) and (odd := [text for text in names if not text.isdecimal()]):
        raise DataError(f"{path!r} has the label {odd[0]}, but labels are whole numbers from 0 on, or names.")
    return False


def _index(label: int | str, path: str) -> int:
    if len(str(label)) > len(str(_LARGEST_LABEL)) or int(label) >= _LARGEST_LABEL:
        raise DataError(
            f"{path!r} has the label {str(label)[:40]}, but labels that are numbers go up to {_LARGEST_LABEL - 1:,}: "
            "write names, with a letter in one of them."
        )
    return int(label)
