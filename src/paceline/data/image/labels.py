"""What does a label that is written beside an image stand for? A class by its number, or by its name."""

from __future__ import annotations

import re

import numpy as np

from paceline.data.image.source import Ids
from paceline.errors import DataError

_LARGEST_LABEL = 2**20


def as_label(value: object, name: str) -> int | str:
    """A label as it is written somewhere: a number from 0 on, or a class name.

    Args:
        value: What is written.
        name: Of which sample, for the message.

    Raises:
        DataError: If it is neither.
    """
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?", value):
        raise DataError(f"{name!r} has the label {value}, but labels are whole numbers from 0 on, or names.")
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
    kinds = {type(label) for labels in parts for label in labels}
    if len(kinds) > 1:
        one = next(each for labels in parts for each in labels if isinstance(each, int))
        other = next(each for labels in parts for each in labels if isinstance(each, str))
        raise DataError(
            f"{path!r} has labels that are numbers ({one}) and labels that are names ({other!r}): make them all one or "
            "the other."
        )
    if kinds == {int}:
        count = max(int(label) for labels in parts for label in labels) + 1
        classes = tuple(str(number) for number in range(count))
        numbered = [np.array(labels, dtype=np.int64) for labels in parts]
    else:
        classes = tuple(sorted({str(label) for label in parts[0]}))
        number = {name: index for index, name in enumerate(classes)}
        unknown = sorted({str(label) for labels in parts[1:] for label in labels} - set(classes))
        if unknown:
            raise DataError(f"{path!r} has held-out images of the class {unknown[0]!r}, and none to train on.")
        numbered = [np.array([number[str(label)] for label in labels], dtype=np.int64) for labels in parts]
    if len(classes) < 2:
        raise DataError(f"{path!r} has one class, {classes[0]!r}, but a classifier needs at least two.")
    return classes, numbered
