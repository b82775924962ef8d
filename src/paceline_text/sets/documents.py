"""Open the text that a recipe names, and hold out a part of it.

Hugging Face's files (``save_to_disk``, parquet) are Arrow files, so the ``datasets`` library is not needed, and no code
of a dataset is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.splits import TEST, TRAIN, VALIDATION, split_folders
from paceline.data.tables import TableFile, choose_splits, file_problem, find_files, require_pyarrow
from paceline.errors import DataError, data_error, did_you_mean
from paceline.parsing.files import (
    SkippedItems,
    has_extension,
    is_folder,
    list_files,
    refuse_archive,
    refuse_special_inputs,
    visible_entries,
)
from paceline.parsing.plain_text import utf8
from paceline.plugins.dataset_registry import StandIn, dataset, open_registered
from paceline.recipe.data import Data, TextSection
from paceline_text.corpus import (
    MANIFEST,
    Documents,
    StoredCorpus,
    TextDataset,
    encoded,
    open_tokens,
    split_by_name,
)
from paceline_text.tokenizer import ByteTokenizer, TokenIds, Tokenizer, open_tokenizer, text_digest


def _texts_of(opened: TableFile, column: str) -> list[tuple[Any, ...]]:
    """Return the cells of the column, which must hold text."""
    arrow, schema, file = require_pyarrow(), opened.schema, opened.path
    if column not in schema.names:
        raise DataError(
            f"{file} has no column {column!r} (data.text.column), but {', '.join(schema.names)}: set it to one of "
            f"them.{did_you_mean(column, schema.names)}",
            path=file,
        )
    kind = schema.field(column).type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        raise DataError(
            f"{file}: the column {column!r} holds {kind}, not text; name another (data.text.column).", path=file
        )
    return opened.rows([column])


def open_text(data: Data) -> TextDataset:
    """Open the text named in the recipe's `data` section.

    Raises:
        DataError: If the text does not exist or cannot be read.
    """
    return open_registered(data.dataset, {"texts": TextDataset}, data)


def python_documentation() -> Documents:
    """Return the topics of Python's built-in documentation, as shown by `help()`, sorted by name.

    Raises:
        DataError: If this Python lacks them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "data.dataset=docs is the documentation that Python's help() shows, and this Python came without it "
            f"({error}); install one with its complete standard library, or choose another data.dataset.",
            key="data.dataset",
            value="docs",
        ) from error
    return sorted(topics.items())


def from_documents(
    name: str,
    train: Documents,
    validation: Documents,
    tokenizer: Tokenizer,
    reason: str | None = None,
    left_out: SkippedItems | None = None,
) -> TextDataset:
    """Build a dataset from texts in memory; its digest covers names, texts and tokenizer.

    Raises:
        DataError: If there is no training text.
    """
    check_some_text(f"data.dataset={name}", train, validation)
    texts = [[part.encode("utf-8") for document in split for part in document] for split in (train, validation)]
    digest = text_digest(tokenizer.digest.encode(), *texts[0], b"held out", *texts[1])
    corpus = encoded(train, tokenizer)
    return TextDataset(
        name=name,
        train=corpus,
        validation=corpus if validation is train else encoded(validation, tokenizer),
        tokenizer=tokenizer,
        digest=digest,
        reason=reason,
        left_out=() if left_out is None else left_out.summaries(),
    )


def check_some_text(
    source: str, train: Documents, validation: Documents, share: str = "data.validation_fraction"
) -> None:
    """Check that there is training text, and explain if there is none.

    Args:
        source: Name of the source, for people.
        train: Training documents.
        validation: Held-out documents.
        share: The setting that determines how many are held out.

    Raises:
        DataError: If no training document contains text.
    """
    if any(text for _, text in train):
        return
    if train or not any(text for _, text in validation):
        empty = f"{len(train):,} document(s) to learn from" if train else f"{len(validation):,} document(s)"
        raise DataError(f"{source} has no text to learn from: its {empty} are empty; check data.path.")
    raise DataError(
        f"{source} has no text to learn from: all {len(validation):,} document(s) fell into the held-out share "
        f"({share}), which is drawn by their names; choose yourself with train/ and val/, give more documents, or hold "
        f"out none with {share}=0.",
    )


def assumed_text(data: Data) -> tuple[Data, str]:
    """Return text without content in place of a data set whose path is not given, and a sentence that says so."""
    tokens = f"{_VOCABULARY:,} different tokens are assumed, as in GPT-2"
    if data.text.tokenizer != "bytes":
        tokens = "the tokens of data.text.tokenizer are assumed"
    return replace(data, dataset=_REFERENCE), f"data.path is not set: {tokens}"


ASSUMED = StandIn(assumed_text, is_plannable=True)


@dataset("docs", kind="texts", keys=("validation_fraction", "text"))
def open_docs(data: Data) -> TextDataset:
    """Open Python's documentation."""
    train, validation = split_by_name(python_documentation(), data.validation_fraction)
    return from_documents("docs", train, validation, open_tokenizer(data.text.tokenizer))


@dataset(
    "text_folder",
    kind="texts",
    keys=("path", "validation_fraction", "text"),
    stand_in=ASSUMED,
)
def open_folder(data: Data) -> TextDataset:
    """Open a folder of .txt files."""
    root, left_out = data.needed_path("PATH/{train,val}/*.txt, or a folder of .txt files"), SkippedItems()
    train, validation, reason = folder_splits(root, data.validation_fraction, left_out)
    return from_documents("text_folder", train, validation, open_tokenizer(data.text.tokenizer), reason, left_out)


@dataset(
    "huggingface_text",
    kind="texts",
    keys=("path", "validation_fraction", "text"),
    stand_in=ASSUMED,
)
def open_huggingface(data: Data) -> TextDataset:
    """Open a column of a local Hugging Face dataset."""
    root, left_out = data.needed_path("a folder that save_to_disk wrote, or parquet"), SkippedItems()
    files = find_files(root, left_out)
    if files is None:
        raise data_error(
            root,
            "is not a local Hugging Face dataset: expected a folder that save_to_disk wrote, or parquet files. One "
            "from the hub is data.path=hf://datasets/OWNER/NAME, if it is stored as parquet; another is saved with "
            "`datasets.load_dataset(NAME).save_to_disk(FOLDER)`.",
        )
    train, held_out, reason = choose_splits(files, left_out, score_all=data.score_all)
    documents: dict[str, Documents] = {}
    for split in (train, *(() if held_out is None else (held_out,))):
        documents[split] = []
        opened = (TableFile(path, files.format) for path in files.splits[split])
        for row, (text,) in enumerate(chain.from_iterable(map(partial(_texts_of, column=data.text.column), opened))):
            if text:
                documents[split].append((f"{split}[{row}]", text.removeprefix("\ufeff")))
            else:
                left_out.add("rows without text", f"{split}[{row}]")
    if held_out is None:
        parts = split_by_name(documents[train], data.validation_fraction)
    else:
        parts = documents[train], documents[held_out]
    return from_documents("huggingface_text", *parts, open_tokenizer(data.text.tokenizer), reason or None, left_out)


def folder_splits(root: Path, fraction: float, left_out: SkippedItems) -> tuple[Documents, Documents, str | None]:
    """Return the .txt files of a folder in two splits, and why ``fraction`` has no effect, if so.

    Args:
        root: The folder.
        fraction: Share of documents to hold out, if the folder has no splits.
        left_out: Receives unused data.

    Raises:
        DataError: If there are none, or one is not UTF-8.
    """
    refuse_archive(root)
    if not root.is_dir():
        raise DataError(
            f"data.path={root} is not a folder; give one with .txt files, or with train and val in it.",
            key="data.path",
            path=root,
        )
    if (root / MANIFEST).is_file():
        raise DataError(
            f"{root} holds tokens that `paceline pack` wrote; train on them with data.dataset=tokens.", path=root
        )
    splits = split_folders(root, nested=False)
    if TRAIN not in splits:
        return (*split_by_name(_texts(root, left_out), fraction), None)
    found = splits.get(VALIDATION, splits.get(TEST))
    for entry in visible_entries(root):
        if entry.name not in (splits[TRAIN], found):
            left_out.add(f"{'folders' if is_folder(entry) else 'files'} outside {splits[TRAIN]}/", entry.name)
    train = _texts(root / splits[TRAIN], left_out)
    if found is None:
        return (*split_by_name(train, fraction), None)
    return train, _texts(root / found, left_out), f"the folder has its own split: {found}"


def _texts(root: Path, left_out: SkippedItems) -> Documents:
    """Yield every .txt file below a folder by relative path, sorted."""
    texts = []
    for path in list_files(root, left_out):
        if has_extension(path, ("txt",)):
            texts.append((utf8(path), _text_of(root / path)))
        else:
            left_out.add("files that do not end in .txt", path)
    if not texts:
        raise DataError("; ".join([f"there is no .txt file in {root}", *left_out.summaries()]) + "; check data.path.")
    return texts


def _text_of(path: Path) -> str:
    refuse_special_inputs(path)
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; restore it, or remove it.", path=path) from error
    except UnicodeDecodeError as error:
        raise DataError(file_problem(path)) from error


@dataset("tokens", kind="texts", keys=("path", "text"), stand_in=ASSUMED)
def open_packed(data: Data) -> TextDataset:
    """Open tokens that ``paceline pack --text`` wrote."""
    root = data.needed_path("a folder that `paceline pack --text` wrote")
    if data.text.tokenizer != TextSection().tokenizer:
        raise DataError(
            f"data.text.tokenizer={data.text.tokenizer} has no effect with data.dataset=tokens, which has its own; "
            "leave it out.",
            key="data.text.tokenizer",
            value=data.text.tokenizer,
        )
    return open_tokens(root)


_REFERENCE = f"{__name__}:placeholder"
"""Value of ``data.dataset`` in this case."""
_VOCABULARY = 50_257
"""Vocabulary size of GPT-2."""
_TRAIN_DOCUMENTS, _VALIDATION_DOCUMENTS, _TOKENS = 10_000, 100, 1_000


class _PlaceholderText(ByteTokenizer):
    """A placeholder tokenizer with GPT-2's vocabulary size, for plans without training."""

    vocabulary = _VOCABULARY
    end = _VOCABULARY - 1
    mask = _VOCABULARY - 2
    pad = None
    digest = "stand-in"

    def bytes_of(self, ids: Sequence[int] | TokenIds) -> int:
        """Return about four bytes per token, as in English."""
        return 4 * len(ids)


def placeholder(data: Data) -> TextDataset:
    """Return ten million tokens for the recipe's tokenizer if it names a file, or else for GPT-2's vocabulary size."""
    tokenizer: Tokenizer = _PlaceholderText() if data.text.tokenizer == "bytes" else open_tokenizer(data.text.tokenizer)
    zeros = [
        StoredCorpus(
            np.broadcast_to(np.uint16(0), count * _TOKENS),
            np.full(count, _TOKENS, dtype=np.int64),
            [f"document {number}" for number in range(count)],
        )
        for count in (_TRAIN_DOCUMENTS, _VALIDATION_DOCUMENTS)
    ]
    return TextDataset(
        name="stand-in",
        train=zeros[0],
        validation=zeros[1],
        tokenizer=tokenizer,
        digest="stand-in",
        reason="nothing is read",
    )
