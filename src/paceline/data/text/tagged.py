"""Texts with a tag for each word: tables, and Python's documentation with its code marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from paceline.data.image.tables import find_column, number_rows
from paceline.data.text.corpus import split_by_name, stored
from paceline.data.text.datasets import python_documentation
from paceline.data.text.labelled import LabelledTexts
from paceline.data.text.pipeline import NOTHING
from paceline.data.text.tables import Row, TextTable, read_table
from paceline.data.text.tokenizer import open_tokenizer, text_digest
from paceline.errors import DataError, did_you_mean
from paceline.files import LeftOut
from paceline.plain_json import load_json
from paceline.recipe.data import Data
from paceline.registry import open_dataset


def open_tagged(data: Data) -> LabelledTexts:
    """Open the tagged texts named in the recipe's `data` section.

    Raises:
        DataError: If they do not exist or cannot be read.
    """
    return open_dataset(data.dataset, {"docs": _open_docs, "text_table": _open_table}, LabelledTexts, data)


def _from_rows(data: Data, table: TextTable, left_out: LeftOut, feature: object = None) -> LabelledTexts:
    """Build a data set from rows of (words, tags); texts are cut to ``data.text.context`` tokens."""
    tokenizer = open_tokenizer(data.text.tokenizer)
    corpora, starts, tags, names = [], [], list[Any](), list[str]()
    for rows in (table.train, table.held_out):
        documents = []
        for row in rows:
            words, tagged = _lists(row)
            ids, places = tokenizer.encode_words(words, data.text.context)
            known = np.count_nonzero(places >= 0)
            if not known:
                left_out.add("rows without words", row.name)
                continue
            if known < len(words):
                left_out.add("texts with words beyond data.text.context, or without a token", row.name)
            documents.append((row.name, ids))
            starts.append(np.where(places < 0, -1, places + len(tags)))
            tags += tagged
            names += [row.name] * len(tagged)
        corpora.append(stored(documents, tokenizer))
    train, validation = corpora
    if not len(train.lengths):
        raise DataError("; ".join([f"data.path={data.path} has no words to learn from", *left_out.told()]) + ".")
    where = str(data.path or data.dataset)
    # A tag of held-out words alone is a class, too.
    classes, (numbers,) = number_rows(tags, [np.arange(len(tags))], names.__getitem__, where, feature)
    labels = np.append(numbers, NOTHING)[np.concatenate(starts)]
    content = (tokenizer.digest, train.digest(), validation.digest(), *classes)
    return LabelledTexts(
        name=data.dataset,
        train=train,
        validation=validation,
        labels=(labels[: len(train.tokens)], labels[len(train.tokens) :]),
        classes=classes,
        tokenizer=tokenizer,
        digest=text_digest(*map(str.encode, content), labels.tobytes()),
        reason=table.reason,
        left_out=left_out.told(),
    )


def _lists(row: Row) -> tuple[list[str], list[Any]]:
    """Return a row's words and tags; in CSV, cells are JSON lists."""
    try:
        words, tags = (load_json(cell) if isinstance(cell, str) else cell for cell in row.cells)
    except ValueError:
        words, tags = row.cells
    if not (isinstance(words, list) and isinstance(tags, list) and all(isinstance(word, str) for word in words)):
        raise DataError(
            f"{row.name} must have a list of words and a list of tags, found {words!r:.80} and {tags!r:.80}."
        )
    if len(words) != len(tags):
        raise DataError(f"{row.name} has {len(words)} words and {len(tags)} tags: give each word one tag.")
    return words, tags


def _open_table(data: Data) -> LabelledTexts:
    # The default is a column of whole texts.
    column = "tokens" if data.text.column == "text" else data.text.column
    wanted = "tags" if data.label_column == "auto" else data.label_column

    def choose(columns: Sequence[str], _: Mapping[str, Any], where: str) -> Sequence[str]:
        if column not in columns:
            raise DataError(
                f"{where} has no column {column!r} (data.text.column), but {', '.join(columns)}."
                f"{did_you_mean(column, columns)}"
            )
        find_column("label", wanted, columns, where)
        return [column, wanted]

    left_out = LeftOut()
    table = read_table(data, choose, left_out)
    feature = table.features.get(wanted)
    return _from_rows(data, table, left_out, feature.get("feature") if isinstance(feature, Mapping) else None)


def _open_docs(data: Data) -> LabelledTexts:
    """Return paragraphs of Python's documentation without the quotes around code, and which words are code."""
    rows = []
    for topic, text in python_documentation():
        for number, paragraph in enumerate(text.split("\n\n")):
            pieces = [piece.split() for piece in paragraph.split('"')]
            if len(pieces) % 2 and len(pieces) > 1:
                tags = [
                    ("I-code" if at else "B-code") if place % 2 else "O"
                    for place, piece in enumerate(pieces)
                    for at in range(len(piece))
                ]
                rows.append(Row(f"{topic}, paragraph {number}", ([*chain.from_iterable(pieces)], tags)))
    train, held_out = split_by_name(rows, data.validation_fraction)
    return _from_rows(data, TextTable(train, held_out, None, {}), LeftOut())
