"""Texts with a class, or words with a tag each: tables, and paragraphs of Python's documentation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from reprlib import repr as shortened
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from paceline.data.labels import are_unlabelled, number_rows, odd_class_names
from paceline.data.tables import find_column
from paceline.errors import DataError
from paceline.parsing.files import SkippedItems
from paceline.parsing.plain_text import load_json, one_form, utf8
from paceline.plugins.dataset_registry import dataset, open_registered
from paceline.recipe.data import Data
from paceline_text.corpus import (
    IGNORED_TARGET,
    Split,
    StoredCorpus,
    TextDataset,
    split_by_class,
    split_by_name,
    stored,
)
from paceline_text.sets.documents import python_documentation
from paceline_text.tables import ENDINGS, NamedRow, TextTable, read_table
from paceline_text.tokenizer import TokenIds, Tokenizer, open_tokenizer, text_digest

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
_SEVERAL = "a text has one class; if it is a list, keep one name of it"
_FEWEST_WORDS = 8  # in a paragraph


@dataclass(frozen=True, kw_only=True)
class LabelledTexts(TextDataset):
    """Texts in two splits, as tokens, each text or word with a class.

    Attributes:
        labels: Class of each training text and of each held-out one, int64 [texts]. For token classification that of
            each token, int64 [tokens]: a word's first token has the word's tag, and others -100.
        classes: Class names.
        first_rows: The first row with each class, in the rows' order.
        words: For token classification, the words of each held-out text that have tags here.
    """

    labels: tuple[NDArray[np.int64], NDArray[np.int64]]
    classes: tuple[str, ...]
    first_rows: Mapping[str, str] = field(default_factory=dict)
    words: Sequence[Sequence[str]] = ()

    def with_classes(self, names: Sequence[str]) -> Self:
        """Return the same texts with labels as numbered in other class names, which include those of the texts."""
        spelled = list(one_form(self.classes, names).values())
        numbers = np.array([*map(names.index, spelled), IGNORED_TARGET])
        train, held_out = (numbers[np.where(each < 0, -1, each)] for each in self.labels)
        missing = [name for name in names if name not in spelled]
        named = ", ".join(missing[:6]) + ", …" * (len(missing) > 6)
        note = f"{len(missing)} of the {len(names)} classes of the weights are not in the data: {named}"
        left_out = (*self.left_out, *([note] if missing else []))
        return replace(self, classes=tuple(names), labels=(train, held_out), left_out=left_out)


def open_labelled(data: Data, *, per_word: bool = False) -> LabelledTexts:
    """Open the labelled texts named in the recipe's `data` section.

    Args:
        data: The section.
        per_word: Whether each word has a class, its tag.

    Raises:
        DataError: If they do not exist or cannot be read.
    """
    return open_registered(data.dataset, {"tagged texts" if per_word else "labelled texts": LabelledTexts}, data)


Encoded = tuple[TokenIds, list[Any], TokenIds, list[str]]
"""A text's tokens, its labels, the label of each token or of the text (its place among them, or -1), labelled words."""


def from_rows(
    data: Data, table: TextTable, left_out: SkippedItems, feature: object = None, *, per_word: bool = False
) -> LabelledTexts:
    """Build a data set from rows of (text, label); texts are cut to ``data.text.context`` tokens.

    Args:
        data: The recipe's section.
        table: The rows.
        left_out: Receives rows without text, and the ends of texts.
        feature: Metadata of the labels in the table.
        per_word: Whether rows are (words, tags).

    Raises:
        DataError: If a cell is not a text or a label, or there is only one class.
    """
    tokenizer, encode = open_tokenizer(data.text.tokenizer), _encode_words if per_word else _encode_text
    splits = list[StoredCorpus]()
    names, values, places, counts = list[str](), list[Any](), list[TokenIds](), list[int]()
    words, texts = list[list[str]](), list[int]()  # words of the last rows there are; hashes
    for rows in (table.train, table.held_out):
        if splits and rows is table.train:  # all rows are scored
            splits, counts, places = splits * 2, counts * 2, places * 2
            break
        documents, words = [], list[list[str]]() if rows else words
        for row in rows:
            if (found := encode(row, tokenizer, data.text.context, left_out)) is None:
                left_out.add("rows without text", row.name)
                continue
            ids, labelled, at, named = found
            words.append(named)
            documents.append((row.name, ids))
            places.append(np.where(at < 0, -1, at + len(values)))
            names += [row.name] * len(labelled)
            values += labelled
            texts += [] if per_word else [hash(row.cells[0].strip())]
        splits.append(stored(documents, tokenizer))
        counts.append(len(values))
    if not (begins := len(splits[0].lengths)):
        raise DataError("; ".join([f"data.path={data.path} has no text to learn from", *left_out.summaries()]) + ".")
    # A rare tag may be among held-out words alone.
    parts = [np.arange(counts[1])] if per_word else [np.arange(counts[0]), np.arange(*counts)]
    classes, numbers = number_rows(
        values, parts, names.__getitem__, str(data.path or data.dataset), feature, one_class=data.score_all
    )
    present, firsts = np.unique(np.concatenate(numbers), return_index=True)
    found_labels = np.append(np.concatenate(numbers), IGNORED_TARGET)[np.concatenate(places)]
    labels = tuple(np.split(found_labels, [sum(map(len, places[:begins]))]))
    content = (tokenizer.digest, *(each.digest() for each in splits), *classes)
    return LabelledTexts(
        name=data.dataset,
        train=splits[0],
        validation=splits[1],
        labels=(labels[0], labels[1]),
        classes=classes,
        first_rows={classes[present[at]]: names[firsts[at]] for at in np.argsort(firsts)},
        words=words if table.held_out or data.score_all else (),
        tokenizer=tokenizer,
        digest=text_digest(*map(str.encode, content), *(each.tobytes() for each in labels)),
        reason=table.reason,
        left_out=(
            *left_out.summaries(),
            *([] if per_word else _copies(texts, names, np.concatenate(numbers), classes, counts[0])),
            *([] if per_word else odd_class_names(classes, _SEVERAL)),
        ),
    )


def _copies(
    texts: Sequence[int], names: Sequence[str], labels: TokenIds, classes: Sequence[str], train: int
) -> list[str]:
    """Return notes about texts with several classes, and in both splits, of which the first ``train`` are one.

    Compares hashes of the texts, which take less memory.
    """
    first: dict[int, int] = {}
    found: dict[str, list[tuple[int, int]]] = {"are in two classes": [], "are held out and in training": []}
    contradicting, leaked = found.values()
    for at, text in enumerate(texts):
        before = first.setdefault(text, at)
        if labels[before] != labels[at]:
            contradicting.append((before, at))
        elif before < train <= at:
            leaked.append((before, at))
    return [
        f"texts that {what}: {len(pairs):,}, first "
        + " and ".join(f"{names[at]} ({classes[labels[at]]})" for at in pairs[0])
        for what, pairs in found.items()
        if pairs
    ]


def _encode_text(row: NamedRow, tokenizer: Tokenizer, context: int, left_out: SkippedItems) -> Encoded | None:
    text, value = row.cells
    if not isinstance(text, str | None):
        raise DataError(f"{row.name} has the text {text!r:.80}; name a column of text (data.text.column).")
    ids = tokenizer.encode_whole(text or "", context)
    if not text or not len(ids):
        return None
    if len(ids) == context < len(tokenizer.encode_whole(text, context + 1)):
        left_out.add("ends of texts beyond data.text.context", row.name)
    return ids, [value.strip() if isinstance(value, str) else value], np.zeros(1, dtype=np.int64), []


def _encode_words(row: NamedRow, tokenizer: Tokenizer, context: int, left_out: SkippedItems) -> Encoded | None:
    try:  # in CSV, cells are JSON lists
        words, tags = (load_json(cell) if isinstance(cell, str) else cell for cell in row.cells)
    except ValueError:
        words, tags = row.cells
    if not (isinstance(words, list) and isinstance(tags, list) and all(isinstance(word, str) for word in words)):
        fix = "give both, or leave the row out"
        if isinstance(words, str) or isinstance(tags, str):
            fix = 'in CSV, write JSON lists, such as ["Ada"] (in pandas, to_json(FILE, orient="records", lines=True))'
        found = f"{shortened(words)} and {shortened(tags)}"
        raise DataError(f"{row.name} needs a list of words and a list of tags, found {found}: {fix}.")
    if odd := [word for word in words if utf8(word) != word]:
        raise DataError(f"{row.name} has the word {odd[0]!r}, which is not valid text: correct it.")
    if len(words) != len(tags):
        raise DataError(f"{row.name} has {len(words)} words and {len(tags)} tags: give each word one tag.")
    ids, starts = tokenizer.encode_words(words, context)
    if 0 < (known := np.count_nonzero(starts >= 0)) < len(words):
        without = np.setdiff1d(np.arange(len(words)), tokenizer.encode_words(words, sys.maxsize)[1])
        for word in without.tolist():
            left_out.add("words without a token", f"word {word + 1} of {row.name}")
        if cut := len(words) - len(without) - known:
            left_out.add("ends of texts beyond data.text.context", row.name, f"{cut:,} of {len(words):,} words")
    return (ids, tags, starts, [words[each] for each in starts.tolist() if each >= 0]) if known else None


_TABLE = ("path", "validation_fraction", "label_column", "split_column", "text")


@dataset("text_table", kind="tagged texts", endings=ENDINGS, keys=_TABLE)
def open_tagged(data: Data) -> LabelledTexts:
    """Open a table of words with tags."""
    return open_table(data, per_word=True)


@dataset("text_table", kind="labelled texts", endings=ENDINGS, keys=_TABLE)
def open_table(data: Data, *, per_word: bool = False) -> LabelledTexts:
    """Open a table of texts with labels, or of words with tags.

    Raises:
        DataError: If it cannot be read, or lacks a column.
    """
    text, wanted, found = data.text.column, data.label_column, ""
    if per_word:  # the defaults are those of whole texts
        text, wanted = "tokens" if text == "text" else text, "tags" if wanted == "auto" else wanted

    def choose(columns: Sequence[str], features: Mapping[str, Any], where: str) -> Sequence[str]:
        nonlocal found
        is_searched = wanted in (None, "auto", *columns)
        label = find_column("label", wanted, columns, where, features) if is_searched else None
        keys = {"data.text.column": text, "data.label_column": label or str(wanted)}
        missing = {key: name for key, name in keys.items() if name not in columns}
        if missing or label is None:
            others = [name for name in columns if name not in (text, label)]
            fix = (f"{key}={''.join(get_close_matches(name, others, 1)) or 'COLUMN'}" for key, name in missing.items())
            what = " and none for ".join(f"{key}={name}" for key, name in missing.items())
            raise DataError(f"{where} has no column for {what}, but {', '.join(columns)}: set {' '.join(fix)}.")
        found = label
        return [text, label]

    left_out = SkippedItems()
    # Tagged words of a text have several classes.
    split: Callable[[list[NamedRow], float], Split[NamedRow]] = partial(split_by_class, label=lambda row: row.cells[1])
    split = split_by_name if per_word else split
    table = read_table(data, choose, left_out, split)
    train, held_out = ([row.cells[1] for row in rows] for rows in (table.train, table.held_out))
    if table.reason is not None and not data.score_all and are_unlabelled(train, held_out):
        for row in table.held_out:
            left_out.add(f"rows without labels ({table.reason})", row.name)
        table = TextTable(*split(table.train, data.validation_fraction), None, table.features)
    feature = table.features.get(found)
    if per_word and isinstance(feature, Mapping):
        feature = feature.get("feature")
    return from_rows(data, table, left_out, feature, per_word=per_word)


@dataset("docs", kind="labelled texts", keys=("validation_fraction", "text"))
def open_docs(data: Data) -> LabelledTexts:
    """Return paragraphs of Python's documentation, each with the kind of its topic; of equal ones the first."""
    kinds = {topic: kind for kind, topics in _KINDS.items() for topic in topics.split()}
    rows: dict[str, NamedRow] = {}
    left_out = SkippedItems()
    for topic, text in python_documentation():
        if topic not in kinds:
            left_out.add("topics of other kinds", topic)
            continue
        for number, paragraph in enumerate(text.split("\n\n")):
            words = " ".join(paragraph.split())
            if words.count(" ") + 1 >= _FEWEST_WORDS:
                rows.setdefault(words, NamedRow(f"{topic}, paragraph {number}", (words, kinds[topic])))
    train, held_out = split_by_name(list(rows.values()), data.validation_fraction)
    return from_rows(data, TextTable(train, held_out, None, {}), left_out)
