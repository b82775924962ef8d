"""Conversion between text and token ids: bytes, or a tokenizer.json of Hugging Face `tokenizers`.

A tokenizer is saved as JSON (`to_tree`) in the weights file. For a tokenizer.json this is the whole file, compressed,
since weights are useless without it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError
from paceline.parsing.files import refuse_special_inputs
from paceline.parsing.plain_text import load_json
from paceline.storage.hub import model_files

TokenIds = NDArray[np.int64]
MASK_WORDS = ("[MASK]", "<mask>")
"""Text of the mask token in a prompt."""


class ByteTokenizer:
    """Each byte of the text's UTF-8 is a token; end of document, mask and padding are three more.

    Attributes:
        vocabulary: Ids are in [0, vocabulary).
        end: End token of each document.
        mask: Mask token; None if there is none.
        pad: Padding token; None if there is none, in which case the end token is used.
        digest: Identifies the tokenizer.
    """

    vocabulary: int = 259
    end: int = 256
    mask: int | None = 257
    pad: int | None = 258
    digest: str = "bytes"

    def encode(self, text: str) -> TokenIds:
        """Return the token ids of a text, int64 [tokens], without an end token."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def encode_whole(self, text: str, max_length: int) -> TokenIds:
        """Return a text's token ids between two end tokens, cut to ``max_length`` in all, int64 [tokens]."""
        return np.concatenate([[self.end], self.encode(text)[: max_length - 2], [self.end]]).astype(np.int64)

    def encode_words(self, words: Sequence[str], max_length: int) -> tuple[TokenIds, TokenIds]:
        """Encode words, separated by spaces, as :meth:`encode_whole`; return the ids and :func:`word_starts`."""
        ids = self.encode_whole(" ".join(words), max_length)
        ends = np.concatenate([[0], np.arange(1, len(ids) - 1), [0]])
        return ids, word_starts([len(word.encode("utf-8")) for word in words], ends)

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """Return the text of ids; special tokens are dropped; invalid bytes become replacement characters."""
        valid = np.asarray(ids, dtype=np.int64)
        return valid[valid < self.end].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def bytes_of(self, ids: Sequence[int] | TokenIds) -> int:
        """Return the UTF-8 bytes that ids represent; 0 for special tokens."""
        return int((np.asarray(ids, dtype=np.int64) < self.end).sum())

    def to_tree(self) -> dict[str, Any]:
        """Return the complete tokenizer as JSON values; `kind` identifies its type."""
        return {"kind": "bytes"}


def open_tokenizer(name: str) -> Tokenizer:
    """Open the tokenizer of ``data.text.tokenizer``: `bytes`, a JSON file, or a folder with a tokenizer.json.

    The folder may be ``OWNER/NAME``, a repository on the Hugging Face hub.

    Raises:
        DataError: If the file does not exist or is not a tokenizer.
        StorageError: If the repository is neither in the cache nor available from the hub.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name)
    if path.suffix != ".json":
        path = model_files(name, key=f"data.text.tokenizer={name}", files=[_FILE], optional=[*_BESIDE, _TEMPLATE])
    if path.is_dir():
        return _open_huggingface(path)
    refuse_special_inputs(path)
    try:
        tree = load_json(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"data.text.tokenizer={name} is neither 'bytes' nor a JSON file that can be read ({type(error).__name__}: "
            f"{error}); correct it.",
            key="data.text.tokenizer",
            value=name,
        ) from error
    if isinstance(tree, dict) and "kind" not in tree:
        if "added_tokens" in tree:
            return _open_huggingface(path)
        raise DataError(
            f"data.text.tokenizer={name} is not a tokenizer: neither one that Paceline wrote nor a tokenizer.json of "
            "Hugging Face `tokenizers`; give another file.",
            key="data.text.tokenizer",
            value=name,
        )
    return tokenizer_from(tree, where=name)


def tokenizer_from(tree: Mapping[str, Any], where: str) -> Tokenizer:
    """Build a tokenizer from JSON values; this runs no code from them.

    Raises:
        DataError: If they do not describe a tokenizer.
    """
    kind = tree.get("kind") if isinstance(tree, Mapping) else None
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "huggingface":
        return HuggingFaceTokenizer.from_tree(tree, where)
    raise DataError(f"{where}: found a tokenizer of kind {kind!r}; known are 'bytes' and 'huggingface'.")


def refuse_other_tokenizer(tokenizer: Tokenizer, trained: Mapping[str, Any], where: str, *, name: str) -> None:
    """Refuse text that was encoded, or chats that were written, otherwise than in training.

    Args:
        tokenizer: What encoded the text.
        trained: The description of the weights, with their tokenizer.
        where: The weights, for the message.
        name: The tokenizer's name in the recipe, for the message.

    Raises:
        DataError: If they differ.
    """
    own, now = trained.get("tokenizer"), tokenizer.to_tree()
    if own is None or own == now:
        return
    templates = [each.get("special", {}).get("chat_template") for each in (own, now)]
    if tokenizer_from(own, where).digest != tokenizer.digest or (templates[0] is not None and len({*templates}) > 1):
        raise DataError(
            f"data.text.tokenizer={name} is not the tokenizer that the weights in {where} were trained with, or its "
            "chat template has changed; set it to a copy of the original.",
            key="data.text.tokenizer",
            value=name,
        )


def text_digest(*parts: bytes) -> str:
    """Return SHA-256 over parts with their lengths, as 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


KIND = "huggingface"
_FILE, _BESIDE = "tokenizer.json", ("tokenizer_config.json", "special_tokens_map.json")
# Common names in published tokenizers; the first existing one is used.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]", "[EOS]")
_MASKS = ("[MASK]", "<mask>", "<|mask|>")
_PADS = ("[PAD]", "<pad>", "<|pad|>", "<|padding|>")
_SPOKEN = {"begin": "bos", "end": "eos", "mask": "mask", "pad": "pad", "unknown": "unk"}
_SAID = {key: f"{name}_token" for key, name in _SPOKEN.items()} | {"chat_template": "chat_template"}
_TEMPLATE = "chat_template.jinja"
# Templates that write today's date would change a run's data from day to day.
_NO_CLOCK = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}"
_LARGEST_BYTES = 2**28
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer.

    Args:
        content: The JSON of its file.
        special: Its ``end``, ``mask`` and ``pad`` tokens, of which missing ones are found by common names; and what its
            chat template needs: ``chat_template``, ``begin`` and ``unknown``.
        where: Name of the file, for messages.

    Raises:
        DataError: If the library is missing or does not know the file, or there is no end token.
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
        except Exception as error:  # the library raises nothing more specific
            raise DataError(f"{where} is not a readable tokenizer ({error}).") from error
        self._content, self._special = content, dict(special)
        # Encode the text literally: no truncation, since rows cut it, and no parsing of special tokens.
        self._library.no_truncation()
        self._library.no_padding()
        self._library.encode_special_tokens = True
        vocabulary: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        self.vocabulary: int = max(vocabulary.values(), default=-1) + 1
        end = _find(vocabulary, special.get("end"), _ENDS, where)
        if end is None:
            raise DataError(
                f"{where} has no end-of-document token ({', '.join(_ENDS)}); name it as "
                f"eos_token in {_BESIDE[0]} next to it."
            )
        self.end: int = end
        self.mask: int | None = _find(vocabulary, special.get("mask"), _MASKS, where)
        self.pad: int | None = _find(vocabulary, special.get("pad"), _PADS, where)
        self.digest: str = text_digest(content.encode(), f"{self.end} {self.mask} {self.pad}".encode())

    def encode(self, text: str) -> TokenIds:
        """Return the token ids of a text, int64 [tokens], without an end token."""
        return np.array(self._library.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def encode_whole(self, text: str, max_length: int) -> TokenIds:
        """Return a text's ids with the special tokens around it, such as [CLS], cut to ``max_length``; int64 [tokens].

        Raises:
            DataError: If ``max_length`` leaves no room for text.
        """
        return np.array(self._whole(text, max_length).ids, dtype=np.int64)

    def encode_words(self, words: Sequence[str], max_length: int) -> tuple[TokenIds, TokenIds]:
        """Encode words, separated by spaces, as :meth:`encode_whole`; return the ids and :func:`word_starts`."""
        found = self._whole(" ".join(words), max_length)
        ends = np.array([end for _, end in found.offsets], dtype=np.int64)
        return np.array(found.ids, dtype=np.int64), word_starts(list(map(len, words)), ends)

    def _whole(self, text: str, max_length: int) -> Any:
        limit = max_length - self._library.num_special_tokens_to_add(is_pair=False)
        if limit < 1:
            raise DataError(
                f"data.text.context={max_length} leaves no room for text after the tokenizer's special tokens.",
                key="data.text.context",
                value=max_length,
            )
        encoding = self._library.encode(text, add_special_tokens=False)
        encoding.truncate(limit)
        return self._library.post_process(encoding)

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return "chat_template" in self._special

    def chat(self, messages: Sequence[Mapping[str, Any]], *, asks: bool = False) -> str:
        """Return a conversation as text, by the tokenizer's chat template.

        Args:
            messages: Mappings with ``role`` and ``content``.
            asks: Whether to add what comes before an answer.

        Raises:
            DataError: If Transformers is missing, or the template does not take these messages.
        """
        try:
            from transformers.utils.chat_template_utils import render_jinja_template

            names = {f"{name}_token": self._special[key] for key, name in _SPOKEN.items() if key in self._special}
            texts, _ = render_jinja_template(
                [list(messages)],
                chat_template=_NO_CLOCK + self._special["chat_template"],
                add_generation_prompt=asks,
                **names,
            )
        except ImportError as error:
            raise DataError(
                f"a chat template needs transformers ({error}): pip install 'paceline[transformers]'."
            ) from error
        except Exception as error:  # a template may raise anything
            raise DataError(f"the chat template cannot be applied: {' '.join(str(error).split())[:300]}") from error
        return str(texts[0])

    def encode_chat(self, text: str) -> tuple[TokenIds, NDArray[np.int64]]:
        """Return the ids of a chat's text, in which special tokens count, and the characters of each, int64 [T, 2]."""
        self._library.encode_special_tokens = False
        try:
            encoding = self._library.encode(text, add_special_tokens=False)
        finally:
            self._library.encode_special_tokens = True
        return np.array(encoding.ids, dtype=np.int64), np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)

    @cached_property
    def answer_ends(self) -> frozenset[int]:
        """Ids that end an answer in a chat: the end token, and the special token that the template writes after one."""
        answer = "answer"
        written = self.chat([{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}])
        after = self.encode_chat(written.rpartition(answer)[2].lstrip())[0][:1].tolist()
        return frozenset({self.end, *(each for each in after if each in self._unread)})

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """Return the text that ids represent; special tokens are dropped."""
        valid = [int(each) for each in np.asarray(ids, dtype=np.int64) if each not in self._unread]
        return str(self._library.decode(valid, skip_special_tokens=True))

    def bytes_of(self, ids: Sequence[int] | TokenIds) -> int:
        """Return the UTF-8 bytes that ids represent; 0 for special tokens.

        Exact for lossless tokenizers: byte-level ones such as GPT-2's, or with byte fallback such as Llama 2's (whose
        added leading space counts as one byte). For tokenizers that change case or drop spaces, it counts the bytes of
        the tokens' text.
        """
        return int(self._bytes[np.asarray(ids, dtype=np.int64)].sum())

    def to_tree(self) -> dict[str, Any]:
        """Return the complete tokenizer: the compressed file and its special tokens."""
        packed = base64.b64encode(zlib.compress(self._content.encode(), 9)).decode()
        return {"kind": KIND, "tokenizer_json": packed, "special": self._special}

    def write(self, folder: Path, max_length: int) -> None:
        """Write the files that Transformers' ``AutoTokenizer`` loads, cutting texts to ``max_length`` tokens."""
        said = {_SAID[key]: token for key, token in self._special.items() if key in _SPOKEN}
        used = {"eos_token": self.end, "mask_token": self.mask, "pad_token": self.pad}
        said |= {key: str(self._library.id_to_token(number)) for key, number in used.items() if number is not None}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length, **said}
        (folder / _FILE).write_text(self._content, encoding="utf-8")
        (folder / _BESIDE[0]).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if self.has_chat_template:
            (folder / _TEMPLATE).write_text(self._special["chat_template"], encoding="utf-8")

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any], where: str) -> HuggingFaceTokenizer:
        """Restore the tokenizer from :meth:`to_tree`.

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
        """Ids that represent no text."""
        special = {number for number, token in self._library.get_added_tokens_decoder().items() if token.special}
        return frozenset(special | {each for each in (self.end, self.mask, self.pad) if each is not None})

    @cached_property
    def _bytes(self) -> NDArray[np.int64]:
        """Number of bytes that each id represents, int64 [vocabulary]."""
        counts = np.zeros(self.vocabulary, dtype=np.int64)
        added = self._library.get_added_tokens_decoder()
        decoder = load_json(self._content).get("decoder") or {}
        # Whether token characters represent bytes.
        is_of_bytes = any(each.get("type") == "ByteLevel" for each in decoder.get("decoders", [decoder]))
        for token, number in self._library.get_vocab(with_added_tokens=True).items():
            if number in self._unread:
                continue
            if number in added:
                counts[number] = len(added[number].content.encode("utf-8"))
            elif is_of_bytes:
                counts[number] = len(token)  # each character represents a byte
            elif _BYTE.fullmatch(token):
                counts[number] = 1
            else:
                counts[number] = len(token.removeprefix("##").replace("\u2581", " ").encode("utf-8"))
        return counts


Tokenizer = ByteTokenizer | HuggingFaceTokenizer
"""Text to token ids and back."""


def word_starts(sizes: Sequence[int], ends: NDArray[np.int64]) -> TokenIds:
    """Return which word begins at each token, int64 [tokens]: its number, or -1 if none does.

    Args:
        sizes: Length of each word; they are separated by one space.
        ends: End of each token (excluded) in the text; 0 for tokens that represent no text.
    """
    # A token belongs to the word in which it ends, since some tokenizers put the space before a word into its token.
    words = np.searchsorted(np.cumsum(np.asarray(sizes, dtype=np.int64) + 1), ends - 1, side="right")
    words = np.where(ends > 0, words, -1)
    return np.where(np.diff(words, prepend=-1) != 0, words, -1)


def _open_huggingface(path: Path) -> HuggingFaceTokenizer:
    """Open the tokenizer of a file, or of a folder with a tokenizer.json.

    Raises:
        DataError: If it does not exist.
    """
    file = path / _FILE if path.is_dir() else path
    refuse_special_inputs(file)
    try:
        content = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise DataError(
            f"data.text.tokenizer={path}: {file} cannot be read ({error}); correct it.",
            key="data.text.tokenizer",
            value=path,
        ) from error
    return HuggingFaceTokenizer(content, _special_tokens_of(file.parent), str(file))


def _special_tokens_of(folder: Path) -> dict[str, str]:
    """Return the end, mask and padding tokens named in files next to a tokenizer."""
    special: dict[str, str] = {}
    for name in _BESIDE:
        try:
            tree = load_json((folder / name).read_bytes())
        except (OSError, ValueError):
            continue
        for key, said in _SAID.items():
            value = tree.get(said) if isinstance(tree, Mapping) else None
            value = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(value, str):
                special.setdefault(key, value)
    with contextlib.suppress(OSError, ValueError):
        special["chat_template"] = (folder / _TEMPLATE).read_text(encoding="utf-8")
    return special


def _find(vocabulary: Mapping[str, int], name: str | None, defaults: Sequence[str], where: str) -> int | None:
    if name is not None:
        if name not in vocabulary:
            raise DataError(f"{where} has no token {name!r}, which the file next to it names; correct one of them.")
        return vocabulary[name]
    return next((vocabulary[each] for each in defaults if each in vocabulary), None)
