"""Prompts with answers, and chats: what a fine-tuned language model learns is the answers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError
from paceline.parsing.files import SkippedItems
from paceline.plugins.dataset_registry import dataset
from paceline.recipe.data import Data
from paceline_text.corpus import StoredCorpus, TextDataset, stored
from paceline_text.sets.documents import ASSUMED
from paceline_text.tables import NamedRow, read_table
from paceline_text.tokenizer import HuggingFaceTokenizer, TokenIds, Tokenizer, open_tokenizer, text_digest

BoolArray = NDArray[np.bool_]
_COLUMNS = (("messages",), ("prompt", "answer"), ("prompt", "completion"))


@dataset(
    "chat",
    kind="texts",
    keys=("path", "validation_fraction", "split_column", "text"),
    stand_in=ASSUMED,
)
def open_chat(data: Data) -> TextDataset:
    """Open a table with the column `messages`, or `prompt` and `answer`; only answers are predicted.

    A prompt and its answer are encoded one after the other, followed by the end token. Messages become text by the
    tokenizer's chat template, as in Transformers, and the answers are what the template adds for each message of the
    assistant. Samples are cut to ``data.text.context`` tokens to predict from.

    Raises:
        DataError: If the table cannot be read, or a row has no such cells.
    """
    tokenizer, left_out, context = open_tokenizer(data.text.tokenizer), SkippedItems(), data.text.context
    if data.text.rows == "chunked":
        raise DataError(
            f"data.dataset={data.dataset} keeps samples apart: set data.text.rows to single or packed (found chunked).",
            key="data.dataset",
            value=data.dataset,
        )
    table = read_table(data, _columns, left_out)
    corpora = list[StoredCorpus]()
    for rows in (table.train, table.held_out):
        if corpora and rows is table.train:  # all rows are scored
            corpora *= 2
            break
        names, documents = list[str](), list[tuple[TokenIds, BoolArray]]()
        for row in rows:
            ids, is_target = _encoded(row, tokenizer)
            if not is_target[1 : context + 1].any():
                why = "without an answer" if not is_target[1:].any() else "whose answer begins beyond data.text.context"
                left_out.add(f"rows {why}", row.name)
                continue
            if len(ids) > context + 1:
                left_out.add("ends of rows beyond data.text.context", row.name)
            names.append(row.name)
            documents.append((ids[: context + 1], is_target[: context + 1]))
        corpus = stored(zip(names, (ids for ids, _ in documents), strict=True), tokenizer)
        corpus.is_target = np.concatenate([np.empty(0, bool), *(asked for _, asked in documents)])
        corpora.append(corpus)
    train, validation = corpora
    if not len(train.lengths):
        raise DataError("; ".join([f"data.path={data.path} has no answer to learn from", *left_out.summaries()]) + ".")
    return TextDataset(
        name=data.dataset,
        train=train,
        validation=validation,
        tokenizer=tokenizer,
        digest=text_digest(tokenizer.digest.encode(), train.digest().encode(), validation.digest().encode()),
        reason=table.reason,
        left_out=left_out.summaries(),
        is_chat=len(table.train[0].cells) == 1,
    )


def _columns(columns: Sequence[str], _: Mapping[str, Any], where: str) -> Sequence[str]:
    for names in _COLUMNS:
        if set(names) <= set(columns):
            return names
    raise DataError(
        f"{where} has the columns {', '.join(columns)}: expected messages, or prompt and answer; rename its columns."
    )


def _encoded(row: NamedRow, tokenizer: Tokenizer) -> tuple[TokenIds, BoolArray]:
    """Return a row's tokens, and whether each belongs to an answer."""
    if len(row.cells) == 1:
        return _encoded_chat(row, tokenizer)
    prompt, answer = row.cells
    if not (isinstance(prompt, str) and isinstance(answer, str)):
        raise DataError(f"{row.name}: prompt and answer must be texts, found {prompt!r:.80} and {answer!r:.80}.")
    before, after = tokenizer.encode(prompt), np.append(tokenizer.encode(answer), tokenizer.end)
    if not answer:
        after = after[:0]
    return np.concatenate([before, after]), np.arange(len(before) + len(after)) >= len(before)


def _encoded_chat(row: NamedRow, tokenizer: Tokenizer) -> tuple[TokenIds, BoolArray]:
    (messages,) = row.cells
    is_chat = isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages)
    if not (is_chat and all("role" in each for each in messages)):
        raise DataError(f"{row.name}: messages must be a list of {{role, content}}, found {messages!r:.80}.")
    if not (isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.has_chat_template):
        raise DataError(
            "a column of messages needs a tokenizer with a chat template: set data.text.tokenizer to a folder with a "
            "tokenizer.json and a chat_template.jinja, or give columns prompt and answer."
        )
    messages = [{key: value for key, value in each.items() if value is not None} for each in messages]
    try:
        text = tokenizer.chat(messages)
        ids, characters = tokenizer.encode_chat(text)
        is_target = np.zeros(len(ids), dtype=bool)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = tokenizer.chat(messages[:number], asks=True), tokenizer.chat(messages[: number + 1])
            if not (after.startswith(before) and text.startswith(after)):
                raise DataError(
                    "the chat template writes earlier messages differently once others follow; give one answer per row"
                )
            is_target |= (characters[:, 0] >= len(before)) & (characters[:, 0] < len(after))
    except DataError as error:
        raise DataError(f"{row.name}: {error}.") from error
    return ids, is_target
