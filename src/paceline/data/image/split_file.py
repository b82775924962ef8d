"""Which images did an earlier run hold out? A file keeps the names, so that no image changes sides when others come.

It is text: a line that describes it, then a line ``train`` or ``validation``, a tab and a name for each image. The
first run writes it; what it says is believed as long as it has the digest that its first line gives.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.sample_names import Hashes
from paceline.errors import DataError, RecipeError
from paceline.files import refuse_odd_kinds
from paceline.plain_json import load_json

_HEAD = "paceline split 1"
_SIDES = ("train", "validation")


class KeptSplit:
    """What a split file says."""

    def __init__(
        self, path: Path, fraction: float, held_out: dict[bytes, bool], sha256: str, *, is_new: bool = False
    ) -> None:
        self.path = path
        self.fraction = fraction
        self.sha256 = sha256
        self._is_new = is_new
        self._held_out = held_out

    @property
    def holds_out(self) -> bool:
        """Whether it holds any image out."""
        return any(self._held_out.values())

    def places(self, names: Sequence[bytes], hashes: Hashes) -> tuple[NDArray[np.bool_], str]:
        """Say which samples are held out, and what is to be told of that.

        Images that the file does not know are held out if the hash of their name says so: a function of the name
        alone, so that they too never change sides.

        Raises:
            DataError: If it knows none of them: then it is another data set's.
        """
        known = [self._held_out.get(name) for name in names]
        new = np.array([each is None for each in known], dtype=bool)
        if len(names) and new.all():
            raise DataError(
                f"the split file {str(self.path)!r} knows none of the {len(names):,} images, the first of which is "
                f"{names[0].decode()!r}: it is another data set's; name another file in data.saved_split, which is "
                "then written."
            )
        held_out = np.array([bool(each) for each in known], dtype=bool)
        held_out[new] = hashes[new] < np.uint64(min(self.fraction * 2.0**64, 2.0**64 - 2048))
        gone = len(self._held_out) - int((~new).sum())
        keeps = "keeps it from now on, written now" if self._is_new else "keeps it"
        parts = [f"as {str(self.path)!r} {keeps}: {int(held_out.sum()):,} of {len(names):,} images are held out"]
        parts += [f"{int(new.sum()):,} that it does not know are placed by their names"] if new.any() else []
        parts += [f"{gone:,} that it knows are gone"] if gone else []
        return held_out, "; ".join(parts)


def keep_split(path: Path, names: Sequence[bytes], held_out: NDArray[np.bool_], fraction: float) -> KeptSplit:
    """Read a split file, or write it with these images if it is not there; of several processes, one writes it.

    Raises:
        DataError: If it can be neither, or is damaged.
        RecipeError: If it was written for another fraction.
    """
    is_new = not path.exists()
    if is_new:
        _write(path, names, held_out, fraction)
    kept = read_split(path, is_new=is_new)
    if kept.fraction != fraction:
        raise RecipeError(
            f"data.validation_fraction={fraction}, but the split file {str(path)!r} was written with {kept.fraction}: "
            f"set data.validation_fraction={kept.fraction}, or name another file in data.saved_split."
        )
    return kept


def read_split(path: Path, *, is_new: bool = False) -> KeptSplit:
    """Read a split file; ``is_new`` says that it was written just now.

    Raises:
        DataError: If it cannot be read, is none, or is not as it was written.
    """
    refuse_odd_kinds(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"the split file {str(path)!r} cannot be read: {error.strerror}.") from None
    first, _, rest = content.partition(b"\n")
    try:
        head = load_json(first)
        fraction, said = float(head["fraction"]), str(head["sha256"])
        is_ours = head["file"] == _HEAD
    except (ValueError, LookupError, TypeError):
        is_ours = False
    if not is_ours:
        raise DataError(f"{str(path)!r} is no split file of Paceline's: name another file in data.saved_split.")
    found = hashlib.sha256(rest).hexdigest()
    if found != said:
        raise DataError(
            f"the split file {str(path)!r} has been changed since it was written (its lines have the digest "
            f"{found[:12]}…, and its first line says {said[:12]}…): restore it, or name another file in "
            "data.saved_split."
        )
    held_out = {}
    for line in rest.splitlines():
        side, _, name = line.partition(b"\t")
        held_out[_unescaped(name)] = side == b"validation"
    return KeptSplit(path, fraction, held_out, said, is_new=is_new)


def _write(path: Path, names: Sequence[bytes], held_out: NDArray[np.bool_], fraction: float) -> None:
    pairs = zip(held_out.tolist(), names, strict=True)
    lines = b"".join(b"%s\t%s\n" % (_SIDES[held].encode(), _escaped(name)) for held, name in pairs)
    head = {
        "file": _HEAD,
        "fraction": fraction,
        "images": len(names),
        "held_out": int(held_out.sum()),
        "sha256": hashlib.sha256(lines).hexdigest(),
    }
    try:
        if not path.parent.is_dir():
            # A slip in the path would become a folder, and a split of its own.
            raise DataError(
                f"there is no folder {str(path.parent)!r} for the split file (data.saved_split): make it, or correct "
                "the path."
            )
        # Not tempfile's, which only its owner may read: whoever reads the data reads this.
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        with open(partial, "xb") as file:
            file.write(json.dumps(head).encode() + b"\n" + lines)
            file.flush()
            os.fsync(file.fileno())
        try:
            with suppress(FileExistsError):  # another process was faster, and what it wrote is believed
                os.link(partial, path)
        finally:
            os.unlink(partial)
    except OSError as error:
        raise DataError(
            f"the split file {str(path)!r} cannot be written ({error.strerror}): name one in a folder that can be "
            "written to (data.saved_split)."
        ) from None


def _escaped(name: bytes) -> bytes:
    return name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")


def _unescaped(name: bytes) -> bytes:
    if b"\\" not in name:
        return name
    pieces = (piece.replace(b"\\n", b"\n").replace(b"\\r", b"\r") for piece in name.split(b"\\\\"))
    return b"\\".join(pieces)
