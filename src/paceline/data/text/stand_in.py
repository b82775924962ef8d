"""What stands for text that is not here, where only sizes matter?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.data.text.corpus import TextDataset
from paceline.data.text.tokenizer import TokenIds, Tokenizer, open_tokenizer
from paceline.recipe.data import Data

REFERENCE = f"{__name__}:stand_in"
"""What ``data.dataset`` is called then."""
VOCABULARY = 50_257
"""GPT-2's tokens."""
_TRAIN_DOCUMENTS, _VALIDATION_DOCUMENTS, _TOKENS = 10_000, 100, 1_000


class _NoWords:
    """As many tokens as GPT-2 has, which stand for nothing."""

    vocabulary = VOCABULARY
    end = VOCABULARY - 1
    mask = VOCABULARY - 2
    pad: int | None = None
    digest = "stand-in"

    def encode(self, text: str) -> TokenIds:
        """As many zeros as there are bytes."""
        return np.zeros(len(text.encode("utf-8")), dtype=np.int64)

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """Nothing."""
        return ""

    def bytes_of(self, ids: Sequence[int] | TokenIds) -> int:
        """About four to a token, as of English."""
        return 4 * len(ids)

    def to_tree(self) -> dict[str, Any]:
        """Nothing that could be read again: no weights are made with it."""
        return {"kind": "stand-in"}


class _Zeros:
    """Documents of equal length without content."""

    def __init__(self, documents: int) -> None:
        self.lengths = np.full(documents, _TOKENS, dtype=np.int64)

    def read(self, document: int, begin: int, end: int) -> TokenIds:
        """Zeros."""
        return np.zeros(end - begin, dtype=np.int64)

    def name(self, document: int) -> str:
        """Its number."""
        return f"document {document}"


def stand_in(data: Data) -> TextDataset:
    """Ten million tokens, of the recipe's tokenizer if it names a file, or else as many different ones as GPT-2's."""
    tokenizer: Tokenizer = _NoWords() if data.text.tokenizer == "bytes" else open_tokenizer(data.text.tokenizer)
    return TextDataset(
        name="stand-in",
        train=_Zeros(_TRAIN_DOCUMENTS),
        validation=_Zeros(_VALIDATION_DOCUMENTS),
        tokenizer=tokenizer,
        digest="stand-in",
        reason="nothing is read",
    )
