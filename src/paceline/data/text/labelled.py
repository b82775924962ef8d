"""Texts with a class each: tables, and paragraphs of Python's documentation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.tables import find_column, number_rows
from paceline.data.text.corpus import StoredCorpus, TextDataset, split_by_name, stored
from paceline.data.text.datasets import python_documentation
from paceline.data.text.tables import Row, TextTable, read_table
from paceline.data.text.tokenizer import open_tokenizer, text_digest
from paceline.errors import DataError
from paceline.files import SkippedItems
from paceline.recipe.data import Data
from paceline.registry import open_dataset

# Topics of `help()` by what they explain.
_KINDS = {
    "statements": "assert assignment async augassign break class compound continue del else for function global if "
    "import nonlocal pass raise return simple try while with yield",
    "expressions": "atom-identifiers atom-literals attribute-references await binary bitwise booleans calls "
    "comparisons conversions dict exprlists floating id-classes identifiers imaginary in integers lambda lists numbers "
    "operator-summary power shifting slicings strings subscriptions unary",
    "special methods": "attribute-access callable-types context-managers customization numeric-types sequence-types "
    "specialnames",
    "types": "bltin-code-objects bltin-ellipsis-object bltin-null-object bltin-type-objects formatstrings objects "
    "specialattrs string-methods truth types typesfunctions typesmapping typesmethods typesmodules typesseq "
    "typesseq-mutable",
    "debugger": "debugger",
}
_FEWEST_WORDS = 8  # in a paragraph


@dataclass(frozen=True, kw_only=True)
class LabelledTexts(TextDataset):
    """Texts in two splits, as tokens, each with a class.

    Attributes:
        labels: Class of each training text and of each held-out one, int64 [texts].
        classes: Class names.
    """

    labels: tuple[NDArray[np.int64], NDArray[np.int64]]
    classes: tuple[str, ...]


def open_labelled(data: Data) -> LabelledTexts:
    """Open the labelled texts named in the recipe's `data` section.

    Raises:
        DataError: If they do not exist or cannot be read.
    """
    return open_dataset(data.dataset, _OPENERS, LabelledTexts, data)


def from_rows(data: Data, table: TextTable, left_out: SkippedItems, label: str = "") -> LabelledTexts:
    """Build a data set from rows of (text, label); texts are cut to ``data.text.context`` tokens.

    Args:
        data: The recipe's section.
        table: The rows.
        left_out: Receives rows without text, and the ends of texts.
        label: The label column's name in the table's metadata.

    Raises:
        DataError: If a cell is not a text or a label, or there is only one class.
    """
    tokenizer, context = open_tokenizer(data.text.tokenizer), data.text.context
    splits = list[StoredCorpus]()
    names, values = list[str](), list[Any]()
    for rows in (table.train, table.held_out):
        documents = []
        for name, (text, value) in rows:
            if not isinstance(text, str | None):
                raise DataError(f"{name} has the text {text!r:.80}; name a column of text (data.text.column).")
            ids = tokenizer.encode_whole(text or "", context)
            if not text or not len(ids):
                left_out.add("rows without text", name)
                continue
            if len(ids) == context < len(tokenizer.encode_whole(text, context + 1)):
                left_out.add("ends of texts beyond data.text.context", name)
            documents.append((name, ids))
            names.append(name)
            values.append(value)
        splits.append(stored(documents, tokenizer))
    begins = len(splits[0].lengths)
    if not begins:
        raise DataError("; ".join([f"data.path={data.path} has no text to learn from", *left_out.summaries()]) + ".")
    parts = [np.arange(begins), np.arange(begins, len(names))]
    where = str(data.path or data.dataset)
    classes, labels = number_rows(values, parts, names.__getitem__, where, table.features.get(label))
    content = (tokenizer.digest, *(each.digest() for each in splits), *classes)
    return LabelledTexts(
        name=data.dataset,
        train=splits[0],
        validation=splits[1],
        labels=(labels[0], labels[1]),
        classes=classes,
        tokenizer=tokenizer,
        digest=text_digest(*map(str.encode, content), *(each.tobytes() for each in labels)),
        reason=table.reason,
        left_out=left_out.summaries(),
    )


def _open_table(data: Data) -> LabelledTexts:
    found = ""

    def choose(columns: Sequence[str], features: Mapping[str, Any], where: str) -> Sequence[str]:
        nonlocal found
        label = find_column("label", data.label_column, columns, where, features)
        if data.text.column not in columns or label is None:
            key = f"data.text.column={data.text.column}" if label else f"data.label_column={data.label_column}"
            raise DataError(f"{where} has no column for {key}: it has {', '.join(columns)}.")
        found = label
        return [data.text.column, label]

    left_out = SkippedItems()
    table = read_table(data, choose, left_out)
    return from_rows(data, table, left_out, found)


def _open_docs(data: Data) -> LabelledTexts:
    """Return paragraphs of Python's documentation, each with the kind of its topic; of equal ones the first."""
    kinds = {topic: kind for kind, topics in _KINDS.items() for topic in topics.split()}
    rows: dict[str, Row] = {}
    left_out = SkippedItems()
    for topic, text in python_documentation():
        if topic not in kinds:
            left_out.add("topics of other kinds", topic)
            continue
        for number, paragraph in enumerate(text.split("\n\n")):
            words = " ".join(paragraph.split())
            if words.count(" ") + 1 >= _FEWEST_WORDS:
                rows.setdefault(words, Row(f"{topic}, paragraph {number}", (words, kinds[topic])))
    train, held_out = split_by_name(list(rows.values()), data.validation_fraction)
    return from_rows(data, TextTable(train, held_out, None, {}), left_out)


_OPENERS: dict[str, Callable[[Data], LabelledTexts]] = {"docs": _open_docs, "text_table": _open_table}
