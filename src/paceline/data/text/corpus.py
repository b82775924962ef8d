"""Where do the tokens of documents lie? One array, in memory or in a file, and where in it each document ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.data.text.tokenizer import TokenIds, Tokenizer

Documents = list[tuple[str, str]]
"""Names and texts."""


class TokenCorpus(Protocol):
    """The documents of one split as tokens, each with its end."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, int64 [documents]."""
        ...

    def read(self, document: int, begin: int, end: int) -> TokenIds:
        """Tokens ``begin`` to ``end`` (excluded) of a document, int64 [end - begin]."""
        ...

    def name(self, document: int) -> str:
        """A document's name, for people."""
        ...


@dataclass(frozen=True, kw_only=True)
class TextDataset:
    """Text in two splits, as tokens.

    Attributes:
        name: What the recipe calls it.
        train: Documents to learn from.
        validation: Held-out documents.
        tokenizer: What made tokens of them.
        digest: Says whether two runs saw the same data.
        reason: Where the held-out documents come from, where ``validation_fraction`` has no say in it.
        left_out: What is there and not used, a sentence for each kind.
    """

    name: str
    train: TokenCorpus
    validation: TokenCorpus
    tokenizer: Tokenizer
    digest: str
    reason: str | None = None
    left_out: tuple[str, ...] = ()


class StoredCorpus:
    """Documents whose tokens lie one after the other in an array, which may be a memory-mapped file.

    Args:
        tokens: Ids, unsigned integers [tokens].
        lengths: Tokens of each document, int64 [documents].
        names: A name for each.
    """

    def __init__(self, tokens: NDArray[Any], lengths: NDArray[np.int64], names: Sequence[str]) -> None:
        self.lengths = lengths
        self._tokens = tokens
        self._begins = np.concatenate([[0], np.cumsum(lengths)])
        self._names = names

    def read(self, document: int, begin: int, end: int) -> TokenIds:
        """Some of a document's tokens, as a copy."""
        first = self._begins[document]
        return self._tokens[first + begin : first + end].astype(np.int64)

    def name(self, document: int) -> str:
        """The name it came with."""
        return self._names[document]


def encoded(documents: Iterable[tuple[str, str]], tokenizer: Tokenizer) -> StoredCorpus:
    """Named texts as tokens in memory, each followed by the tokenizer's end."""
    names: list[str] = []
    parts = []
    for name, text in documents:
        names.append(name)
        parts.append(np.append(tokenizer.encode(text), tokenizer.end).astype(smallest_type(tokenizer.vocabulary)))
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    kind = smallest_type(tokenizer.vocabulary)
    return StoredCorpus(np.concatenate(parts) if parts else np.empty(0, kind), lengths, names)


def smallest_type(vocabulary: int) -> type[np.unsignedinteger[Any]]:
    """In which numbers ids are stored: two bytes each, or four where there are more than 65,536."""
    return np.uint16 if vocabulary <= 2**16 else np.uint32
