"""Documents as tokens: one array in memory or in a file, and the end of each document in it.

A packed folder holds ``tokens.json`` and three files for each split: ``SPLIT.bin``, the concatenated tokens of all
documents, two or four bytes each, little-endian; ``SPLIT.lengths.npy``, tokens of each document; and
``SPLIT.names.txt``, a name in each line. The folder appears atomically. Its files are memory-mapped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.dataset import stratified_split
from paceline.errors import DataError
from paceline.parsing.files import refuse_special_inputs
from paceline.parsing.plain_text import load_json
from paceline_text.tokenizer import TokenIds, Tokenizer, text_digest, tokenizer_from

IGNORED_TARGET = -100
"""Target value that torch's cross-entropy ignores."""
Documents = list[tuple[str, str]]
"""Names and texts."""
Named = TypeVar("Named", bound=tuple[Any, ...])
"""A document or row, which begins with its name."""


def held_out(name: str, fraction: float) -> bool:
    """Whether a document is held out: depends on its name alone, so that added or removed documents have no effect."""
    return _hash_of(name) < fraction * 2**64


def _hash_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8")).digest()[:8], "big")


Split = tuple[list[Named], list[Named]]


def split_by_name(documents: Sequence[Named], fraction: float) -> Split[Named]:
    """Return the training documents and the held-out ones; with a fraction of 1, to score all, all documents twice."""
    if fraction == 1:
        return (everything := [*documents]), everything
    train = [each for each in documents if not held_out(each[0], fraction)]
    return train, [each for each in documents if held_out(each[0], fraction)]


def split_by_class(rows: Sequence[Named], fraction: float, label: Callable[[Named], object]) -> Split[Named]:
    """Return training rows and held-out ones: of each class the same share, at least one of two, chosen by name."""
    if fraction == 1:
        return split_by_name(rows, fraction)
    numbers: dict[str, int] = {}
    labels = np.array([numbers.setdefault(str(label(row)).strip(), len(numbers)) for row in rows], dtype=np.int64)
    hashes = np.array([_hash_of(row[0]) for row in rows], dtype=np.uint64)
    train, held_out = (part.tolist() for part in stratified_split(labels, fraction, hashes=hashes))
    return [rows[at] for at in train], [rows[at] for at in held_out]


class StoredCorpus:
    """The documents of one split: concatenated tokens with end tokens, in an array that may be a mapped file.

    Args:
        tokens: Ids, unsigned integers [tokens].
        lengths: Tokens of each document, int64 [documents].
        names: Name of each document.
        is_target: Whether each token is to be predicted from those before it, bool [tokens]; None: all are.

    Attributes:
        begins: First token of each document, and the end of the last, int64 [documents + 1].
    """

    def __init__(
        self,
        tokens: NDArray[Any],
        lengths: NDArray[np.int64],
        names: Sequence[str],
        is_target: NDArray[np.bool_] | None = None,
    ) -> None:
        self.lengths = lengths
        self.tokens = tokens
        self.names = names
        self.is_target = is_target
        self.begins = np.concatenate([[0], np.cumsum(lengths)])

    def part(self, documents: NDArray[np.int64]) -> StoredCorpus:
        """Return some of the documents."""
        places = [np.arange(*self.begins[each : each + 2]) for each in documents.tolist()]
        tokens = np.concatenate([np.empty(0, dtype=np.int64), *places])
        is_target = None if self.is_target is None else self.is_target[tokens]
        names = [self.names[each] for each in documents.tolist()]
        return StoredCorpus(self.tokens[tokens], self.lengths[documents], names, is_target)

    def read(self, document: int, begin: int, end: int) -> TokenIds:
        """Return a copy of some of a document's tokens."""
        first = self.begins[document]
        return self.tokens[first + begin : first + end].astype(np.int64)

    def target_mask(self, document: int, begin: int, end: int) -> NDArray[np.bool_]:
        """Return whether some of a document's tokens are to be predicted."""
        first = self.begins[document]
        return np.ones(end - begin, bool) if self.is_target is None else self.is_target[first + begin : first + end]

    def digest(self) -> str:
        """Return a digest of names, tokens and which of them are predicted."""
        targets = b"" if self.is_target is None else np.packbits(self.is_target).tobytes()
        return text_digest(self.tokens.tobytes(), self.lengths.tobytes(), targets, *map(str.encode, self.names))

    def name(self, document: int) -> str:
        """Return its name."""
        return self.names[document]


@dataclass(frozen=True, kw_only=True)
class TextDataset:
    """Text in two splits, as tokens.

    Attributes:
        name: Name in the recipe.
        train: Training documents.
        validation: Held-out documents.
        tokenizer: The tokenizer used.
        digest: Identifies the data.
        reason: Origin of the held-out documents, if ``validation_fraction`` has no effect.
        left_out: Unused data, one sentence per kind.
        is_chat: Whether it is written by the tokenizer's chat template.
    """

    name: str
    train: StoredCorpus
    validation: StoredCorpus
    tokenizer: Tokenizer
    digest: str
    reason: str | None = None
    left_out: tuple[str, ...] = ()
    is_chat: bool = False


def without_text(described: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the arguments of a data set without text, with the tokenizer in a description of trained weights.

    Args:
        described: The description.
        where: The weights, for messages.
    """
    tokenizer = tokenizer_from(described["tokenizer"], where)
    nothing = encoded((), tokenizer)
    splits = {"train": nothing, "validation": nothing}
    return {"name": described["dataset"], "digest": described["digest"], "tokenizer": tokenizer, **splits}


def encoded(documents: Iterable[tuple[str, str]], tokenizer: Tokenizer) -> StoredCorpus:
    """Encode named texts as tokens in memory, each followed by the tokenizer's end token."""
    return stored(((name, np.append(tokenizer.encode(text), tokenizer.end)) for name, text in documents), tokenizer)


def stored(documents: Iterable[tuple[str, TokenIds]], tokenizer: Tokenizer) -> StoredCorpus:
    """Store named documents of tokens in memory.

    Tokens take two bytes each, or four for more than 65,536 ids; little-endian.
    """
    kind = np.dtype("<u2" if tokenizer.vocabulary <= 2**16 else "<u4")
    names: list[str] = []
    parts = [np.empty(0, dtype=kind)]
    for name, ids in documents:
        names.append(name)
        parts.append(ids.astype(kind))
    return StoredCorpus(np.concatenate(parts), np.array([len(part) for part in parts[1:]], dtype=np.int64), names)


MANIFEST = "tokens.json"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class PackedText:
    """Result of writing: documents and tokens by split, total bytes, and a digest of everything."""

    documents: dict[str, int]
    tokens: dict[str, int]
    size_bytes: int
    digest: str


def write_tokens(splits: dict[str, Documents], tokenizer: Tokenizer, destination: Path) -> PackedText:
    """Write documents as tokens, each followed by the tokenizer's end token, and verify them.

    Args:
        splits: Documents by split, ``train`` and ``validation``.
        tokenizer: The tokenizer.
        destination: A folder that does not exist yet.

    Raises:
        DataError: If it exists or cannot be written, or the verification fails.
    """
    hidden = destination.parent / f".{destination.name}.{os.getpid()}"
    try:
        if destination.exists():
            raise DataError(f"'{destination}' exists; give another folder, or remove it first.", path=destination)
        hidden.mkdir(parents=True)
        corpora = {split: encoded(documents, tokenizer) for split, documents in splits.items()}
        packed = _write_all(corpora, tokenizer, hidden)
        for split, corpus in corpora.items():
            read = _open_split(hidden, split, len(corpus.tokens), corpus.tokens.dtype)
            if not np.array_equal(read.tokens, corpus.tokens):
                raise DataError(f"{hidden}: '{split}' differs from what was written when read back: try another disk.")
        hidden.rename(destination)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise DataError(
            f"'{destination}' cannot be written: {error.strerror or error}{where}; give another folder, or free some "
            "space.",
            path=destination,
        ) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return packed


def _write_all(corpora: dict[str, StoredCorpus], tokenizer: Tokenizer, folder: Path) -> PackedText:
    for split, corpus in corpora.items():
        corpus.tokens.tofile(folder / f"{split}.bin")
        np.save(folder / f"{split}.lengths.npy", corpus.lengths)
        names = "".join(name.replace("\n", " ") + "\n" for name in corpus.names)
        (folder / f"{split}.names.txt").write_text(names, encoding="utf-8")
    digests = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as content:
            digests[path.name] = hashlib.file_digest(content, "sha256").hexdigest()
    digest = text_digest(tokenizer.digest.encode(), *(each.encode() for each in digests.values()))
    counts: dict[str, Any] = {
        "documents": {split: len(corpus.lengths) for split, corpus in corpora.items()},
        "tokens": {split: len(corpus.tokens) for split, corpus in corpora.items()},
    }
    tree = {
        "version": _VERSION,
        "tokenizer": tokenizer.to_tree(),
        "bytes_per_token": corpora["train"].tokens.itemsize,
        **counts,
        "files": digests,
        "digest": digest,
    }
    (folder / MANIFEST).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return PackedText(**counts, size_bytes=sum(path.stat().st_size for path in folder.iterdir()), digest=digest)


def open_tokens(root: Path) -> TextDataset:
    """Open the result of :func:`write_tokens`: tokens stay in their files until used.

    Raises:
        DataError: If it is not such a folder, or a file has the wrong length.
    """
    path = root / MANIFEST
    refuse_special_inputs(path)
    try:
        tree = load_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{root} holds no {MANIFEST}; write it with `paceline pack --text SOURCE {root}`.", path=root
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); write the folder again.", path=path) from error
    needed = {"version", "tokenizer", "bytes_per_token", "tokens", "files", "digest"}
    if not isinstance(tree, dict) or not needed <= tree.keys() or tree["version"] != _VERSION:
        raise DataError(
            f"{path} has a format that this version of Paceline cannot read; write the folder again.", path=path
        )
    kind = np.dtype(f"<u{tree['bytes_per_token']}")
    corpora = {split: _open_split(root, split, count, kind) for split, count in tree["tokens"].items()}
    return TextDataset(
        name="tokens",
        train=corpora["train"],
        validation=corpora["validation"],
        tokenizer=tokenizer_from(tree["tokenizer"], where=str(root / MANIFEST)),
        digest=tree["digest"],
    )


def _open_split(root: Path, split: str, count: int, kind: np.dtype[Any]) -> StoredCorpus:
    path = root / f"{split}.bin"
    try:
        lengths = np.load(root / f"{split}.lengths.npy", allow_pickle=False)
        names = (root / f"{split}.names.txt").read_bytes().decode("utf-8").split("\n")
        size = path.stat().st_size
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{root}: the files of the split '{split}' cannot be read ({error}); write it again.", path=root
        ) from error
    if size != count * kind.itemsize or int(lengths.sum()) != count:
        raise DataError(
            f"{path} has {size:,} bytes, and {count:,} tokens of {kind.itemsize} bytes were written; restore the "
            "file, or write the folder again.",
            path=path,
        )
    # An empty file cannot be mapped.
    tokens = np.memmap(path, dtype=kind, mode="r") if count else np.empty(0, dtype=kind)
    return StoredCorpus(tokens, lengths, names)
