"""Text to token ids and back: bytes, or a tokenizer.json of Hugging Face `tokenizers`.

A tokenizer describes itself as JSON (`to_tree`), which is all that a weights file carries of it. Of a tokenizer.json
that is the whole file, compressed: weights are useless without it.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError
from paceline.files import refuse_odd_kinds
from paceline.plain_json import load_json

TokenIds = NDArray[np.int64]
MASK_WORDS = ("[MASK]", "<mask>")
"""How a hidden token is written in a prompt."""


class ByteTokenizer:
    """Each byte of the text's UTF-8 is a token; the end of a document, a hidden token and padding are three more.

    Attributes:
        vocabulary: Ids are in [0, vocabulary).
        end: Stands after each document.
        mask: Stands for a hidden token; None if there is none.
        pad: Fills rows that are too short; None if there is none, and the end's then does.
        digest: Says whether two are the same.
    """

    vocabulary: int = 259
    end: int = 256
    mask: int | None = 257
    pad: int | None = 258
    digest: str = "bytes"

    def encode(self, text: str) -> TokenIds:
        """Token ids of a text, int64 [tokens], without an end."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """The text of ids; special ones give none; invalid bytes give replacement characters."""
        known = np.asarray(ids, dtype=np.int64)
        return known[known < self.end].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def bytes_of(self, ids: Sequence[int] | TokenIds) -> int:
        """Bytes of UTF-8 that ids stand for; special ones for none."""
        return int((np.asarray(ids, dtype=np.int64) < self.end).sum())

    def to_tree(self) -> dict[str, Any]:
        """All of it as JSON values; its `kind` says which it is."""
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
        return _open_huggingface(path)
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
            return _open_huggingface(path)
        raise DataError(
            f"data.text.tokenizer={name} is not a tokenizer: neither one that Paceline wrote nor a tokenizer.json of "
            "Hugging Face `tokenizers`; give another file."
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
        return HuggingFaceTokenizer.from_tree(tree, where)
    raise DataError(f"{where}: found a tokenizer of kind {kind!r}; known are 'bytes' and 'huggingface'.")


def text_digest(*parts: bytes) -> str:
    """SHA-256 over parts, each with its length, as 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


KIND = "huggingface"
_FILE, _BESIDE = "tokenizer.json", ("tokenizer_config.json", "special_tokens_map.json")
# What is called so in published tokenizers; the first that there is.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]", "[EOS]")
_MASKS = ("[MASK]", "<mask>", "<|mask|>")
_PADS = ("[PAD]", "<pad>", "<|pad|>", "<|padding|>")
_SAID = {"end": "eos_token", "mask": "mask_token", "pad": "pad_token"}
_LARGEST_BYTES = 2**28
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer.

    Args:
        content: The JSON of its file.
        special: Which tokens are its ``end``, ``mask`` and ``pad``; those that are not said are found by their names.
        where: What the file is called, for messages.

    Raises:
        DataError: If the library is missing or does not know the file, or no token can stand at a document's end.
    """

    def __init__(self, content: str, special: Mapping[str, str], where: str) -> None:
        try:
            from tokenizers import Tokenizer as Library
        except ImportError as error:
            raise DataError(
                f"{where} needs tokenizers ({error}); install it with: pip install 'paceline[transformers]'."
            ) from error
        try:
            self._library = Library.from_str(content)
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"{where} is not a readable tokenizer ({error}).") from error
        self._content, self._special = content, dict(special)
        # The text is all there is: its length is for rows to cut, and what looks like a special token in it is text.
        self._library.no_truncation()
        self._library.no_padding()
        self._library.encode_special_tokens = True
        vocabulary: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        self.vocabulary: int = max(vocabulary.values(), default=-1) + 1
        end = _find(vocabulary, special.get("end"), _ENDS, where)
        if end is None:
            raise DataError(
                f"{where} has no end-of-document token ({', '.join(_ENDS)}); name it as "
                f"eos_token in {_BESIDE[0]} beside it."
            )
        self.end: int = end
        self.mask: int | None = _find(vocabulary, special.get("mask"), _MASKS, where)
        self.pad: int | None = _find(vocabulary, special.get("pad"), _PADS, where)
        self.digest: str = text_digest(content.encode(), f"{self.end} {self.mask} {self.pad}".encode())

    def encode(self, text: str) -> TokenIds:
        """Token ids of a text, int64 [tokens], without an end."""
        return np.array(self._library.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """The text that ids stand for; special ones for none."""
        known = [int(each) for each in np.asarray(ids, dtype=np.int64) if each not in self._unread]
        return str(self._library.decode(known, skip_special_tokens=True))

    def bytes_of(self, ids: Sequence[int] | TokenIds) -> int:
        """Bytes of UTF-8 that ids stand for; special ones for none.

        Exact for tokenizers that lose nothing: of bytes, as GPT-2's, or with a fallback to them, as Llama 2's, where
        a space that the tokenizer puts before each document counts as one byte more. Of one that changes case or leaves
        out spaces it is what its tokens spell.
        """
        return int(self._bytes[np.asarray(ids, dtype=np.int64)].sum())

    def to_tree(self) -> dict[str, Any]:
        """All of it: the file, compressed, and which tokens are special."""
        packed = base64.b64encode(zlib.compress(self._content.encode(), 9)).decode()
        return {"kind": KIND, "tokenizer_json": packed, "special": self._special}

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any], where: str) -> HuggingFaceTokenizer:
        """The one that :meth:`to_tree` described.

        Raises:
            DataError: If it is damaged.
        """
        try:
            unpacking = zlib.decompressobj()
            content = unpacking.decompress(base64.b64decode(tree["tokenizer_json"]), _LARGEST_BYTES).decode()
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise DataError(f"{where}: its tokenizer cannot be read ({type(error).__name__}: {error}).") from error
        return cls(content, tree.get("special", {}), where)

    @cached_property
    def _unread(self) -> frozenset[int]:
        """Ids that stand for no text."""
        added = self._library.get_added_tokens_decoder()
        special = {number for number, token in added.items() if token.special}
        return frozenset(special | {each for each in (self.end, self.mask, self.pad) if each is not None})

    @cached_property
    def _bytes(self) -> NDArray[np.int64]:
        """Bytes that each id stands for, int64 [vocabulary]."""
        counts = np.zeros(self.vocabulary, dtype=np.int64)
        added = self._library.get_added_tokens_decoder()
        decoder = load_json(self._content).get("decoder") or {}
        # Whether tokens are written in characters that stand for bytes.
        is_of_bytes = any(each.get("type") == "ByteLevel" for each in decoder.get("decoders", [decoder]))
        for token, number in self._library.get_vocab(with_added_tokens=True).items():
            if number in self._unread:
                continue
            if number in added:
                counts[number] = len(added[number].content.encode("utf-8"))
            elif is_of_bytes:
                counts[number] = len(token)  # each character stands for a byte
            elif _BYTE.fullmatch(token):
                counts[number] = 1
            else:
                counts[number] = len(token.removeprefix("##").replace("\u2581", " ").encode("utf-8"))
        return counts


Tokenizer = ByteTokenizer | HuggingFaceTokenizer
"""Text to token ids and back."""


def _open_huggingface(path: Path) -> HuggingFaceTokenizer:
    """The tokenizer of a file, or of a folder with a tokenizer.json.

    Raises:
        DataError: If there is none.
    """
    file = path / _FILE if path.is_dir() else path
    refuse_odd_kinds(file)
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"data.text.tokenizer={path}: {file} cannot be read ({error}); correct it.") from error
    return HuggingFaceTokenizer(content, _said_beside(file.parent), str(file))


def _said_beside(folder: Path) -> dict[str, str]:
    """Which tokens the files beside a tokenizer's call its end, mask and padding."""
    found: dict[str, str] = {}
    for name in _BESIDE:
        try:
            tree = load_json((folder / name).read_bytes())
        except (OSError, ValueError):
            continue
        for key, said in _SAID.items():
            value = tree.get(said) if isinstance(tree, Mapping) else None
            value = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(value, str):
                found.setdefault(key, value)
    return found


def _find(vocabulary: Mapping[str, int], said: str | None, usual: Sequence[str], where: str) -> int | None:
    if said is not None:
        if said not in vocabulary:
            raise DataError(f"{where} has no token {said!r}, which the file next to it names; correct one of them.")
        return vocabulary[said]
    return next((vocabulary[each] for each in usual if each in vocabulary), None)
