"""Small pictures of image files, decoded as in a run and encoded anew: no byte of a file reaches a browser."""

from __future__ import annotations

import hashlib
import io
import threading
from collections import OrderedDict
from pathlib import Path

from PIL import Image

from paceline.data.image.decode import BrokenImageError, LazyImage, image_header
from paceline.errors import data_error
from paceline.parsing.files import refuse_special_inputs

_SIDE = 720
_CACHE_BYTES = 32 * 2**20
_FILE_BYTES = 64 * 2**20
_PIXELS = 30_000_000  # decoded at once, of at most 3 bytes each, and as many for a copy


class Thumbnails:
    """Makes thumbnails on demand and keeps the last ones."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path) -> tuple[str, bytes]:
        """Return the digest of a file's content, and a JPEG of it.

        Raises:
            PacelineError: If the file cannot be read.
            BrokenImageError: If it cannot be shown.
        """
        refuse_special_inputs(path)
        with self._lock:  # one at a time: a large picture takes much memory
            try:
                with path.open("rb") as file:
                    content = file.read(_FILE_BYTES + 1)
            except OSError as error:
                raise data_error(path, f"cannot be read: {error.strerror}.") from None
            digest = hashlib.blake2b(content, digest_size=16).hexdigest()
            if digest not in self._kept:
                if len(content) > _FILE_BYTES:
                    raise BrokenImageError("", f"it has more than {_FILE_BYTES:,} bytes")
                try:
                    self._kept[digest] = _small(content)
                except BrokenImageError:
                    raise
                except Exception as error:  # Pillow's plugins raise anything
                    raise BrokenImageError("", "it cannot be decoded") from error
            self._kept.move_to_end(digest)
            while len(self._kept) > 1 and sum(map(len, self._kept.values())) > _CACHE_BYTES:
                self._kept.popitem(last=False)
            return digest, self._kept[digest]


def _small(content: bytes) -> bytes:
    head, factor = image_header(content), 1
    if head is None:
        raise BrokenImageError("", "it cannot be decoded")
    (height, width), _ = head
    if content.startswith(b"\xff\xd8"):
        image = LazyImage(content, 3)
        while image.shrinks and factor < 8 and max(height, width) >= 2 * factor * _SIDE:
            factor *= 2
    if height * width > _PIXELS * factor**2:
        raise BrokenImageError("", f"{width}x{height} pixels are too many to show")
    pixels = LazyImage(content, 3).part(shrink=factor)
    picture = Image.fromarray(pixels)
    picture.thumbnail((_SIDE, _SIDE), reducing_gap=2.0)
    encoded = io.BytesIO()
    picture.save(encoded, "JPEG", quality=85)
    return encoded.getvalue()
