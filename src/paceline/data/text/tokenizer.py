"""Which numbers stand for a text?

A tokenizer says what it is as JSON (`to_tree`), which is all that a weights file carries of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError
from paceline.files import refuse_odd_kinds
from paceline.plain_json import load_json

TokenIds = NDArray[np.int64]
MASK_WORDS = ("[MASK]", "<mask>")
"""How a hidden token is written in a prompt."""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocabulary(self) -> int:
        """Ids are in [0, vocabulary)."""
        ...

    @property
    def end(self) -> int:
        """Stands after each document."""
        ...

    @property
    def mask(self) -> int | None:
        """Stands for a hidden token; None if there is none."""
        ...

    @property
    def pad(self) -> int | None:
        """Fills rows that are too short; None if there is none, and the end's then does."""
        ...

    @property
    def digest(self) -> str:
        """Says whether two are the same."""
        ...

    def encode(self, text: str) -> TokenIds:
        """Token ids of a text, int64 [tokens], without an end."""
        ...

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """The text that ids stand for; special ones for none."""
        ...

    def bytes_of(self, ids: Sequence[int] | TokenIds) -> int:
        """Bytes of UTF-8 that ids stand for; special ones for none."""
        ...

    def to_tree(self) -> dict[str, Any]:
        """All of it as JSON values; its `kind` says which it is."""
        ...


class ByteTokenizer:
    """Each byte of the text's UTF-8 is a token; the end of a document, a hidden token and padding are three more."""

    vocabulary = 259
    end = 256
    mask = 257
    pad = 258
    digest = "bytes"

    def encode(self, text: str) -> TokenIds:
        """Token ids of a text, int64 [bytes]."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """The text; bytes that are no UTF-8 become replacement characters."""
        known = np.asarray(ids, dtype=np.int64)
        return known[known < self.end].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def bytes_of(self, ids: Sequence[int] | TokenIds) -> int:
        """Ids that are bytes."""
        return int((np.asarray(ids, dtype=np.int64) < self.end).sum())

    def to_tree(self) -> dict[str, Any]:
        """Its kind says everything."""
        return {"kind": "bytes"}


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that ``data.text.tokenizer`` names: `bytes`, a JSON file, or a folder with a tokenizer.json.

    Raises:
        DataError: If there is no such file, or it holds none.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name)
    if path.is_dir():
        return _of_huggingface(path)
    refuse_odd_kinds(path)
    try:
        tree = load_json(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"data.text.tokenizer={name} is neither 'bytes' nor a JSON file that can be read "
            f"({type(error).__name__}: {error}); correct it."
        ) from error
    if isinstance(tree, dict) and "kind" not in tree:
        if "added_tokens" in tree:
            return _of_huggingface(path)
        raise DataError(
            f"data.text.tokenizer={name} holds no tokenizer: neither one that Paceline wrote, nor a tokenizer.json of "
            "Hugging Face's `tokenizers`; give another file."
        )
    return tokenizer_from(tree, where=name)


def tokenizer_from(tree: Mapping[str, Any], where: str) -> Tokenizer:
    """The tokenizer that JSON values describe; reading them runs no code.

    Raises:
        DataError: If they describe none.
    """
    kind = tree.get("kind") if isinstance(tree, Mapping) else None
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "huggingface":
        from paceline.data.text.huggingface_tokenizer import HuggingFaceTokenizer

        return HuggingFaceTokenizer.from_tree(tree, where)
    raise DataError(f"{where}: found a tokenizer of kind {kind!r}, but known are 'bytes' and 'huggingface'.")


def _of_huggingface(path: Path) -> Tokenizer:
    # It builds upon this file.
    from paceline.data.text.huggingface_tokenizer import open_huggingface_tokenizer

    return open_huggingface_tokenizer(path)


def write_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write a tokenizer to a JSON file."""
    path.write_text(json.dumps(tokenizer.to_tree()) + "\n", encoding="utf-8")


def text_digest(*parts: bytes) -> str:
    """SHA-256 over parts, each with its length, as 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]
