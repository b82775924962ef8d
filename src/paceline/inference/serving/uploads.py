"""How do the bytes of a request become pictures, without anyone being able to fill the memory or hold the door?

A body is read within its limits of bytes, whether it says its length or comes in chunks, and taken apart in memory: no
file is written, and nothing of it is ever run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect, Request

from paceline.inference.serving.limits import Limits, RefusedError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FIELD = "images"
# So much of a body that is too large is still read, and thrown away: a client that sends before it listens would else
# find the connection broken, and not the reason.
_DISCARDED_BYTES = 16 * 2**20
_DISCARDING_SECONDS = 2.0
_LONGEST_NAME = 255
_LARGEST_HEADER_BYTES = 8192
_PIECE_BYTES = 2**20


@dataclass(frozen=True)
class Upload:
    """One part of a request: what the client calls it, and its bytes."""

    name: str
    content: bytes


class Desk:
    """Where bodies lie while they are worked on; so many bytes, all together."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held = 0

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytearray]:
        """Read a body, and hold its place while it is worked on; who has taken it apart may clear it.

        Raises:
            RefusedError: If it is too large, or there is no room for it now.
        """
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._limits.request_bytes:
            if "expect" not in request.headers:
                await _discard(request)
            raise self._too_large()
        with self._place() as place:
            content = bytearray()
            try:
                async for piece in request.stream():
                    content += piece
                    place.grow(len(piece))
                    if len(content) > self._limits.request_bytes:
                        content.clear()
                        await _discard(request)
                        raise self._too_large()
            except ClientDisconnect:
                raise disconnected() from None
            yield content

    @contextmanager
    def _place(self) -> Iterator[_Place]:
        place = _Place(self)
        try:
            yield place
        finally:
            self._held -= place.size

    def hold(self, count: int) -> None:
        """Take so many bytes more.

        Raises:
            RefusedError: If there is no room.
        """
        if self._held + count > self._limits.bodies_bytes:
            raise RefusedError(503, "busy", "too many uploads at once; come back in a second")
        self._held += count

    def _too_large(self) -> RefusedError:
        most = self._limits.request_bytes
        return RefusedError(413, "too_large", f"the request is larger than {most:,} bytes; send fewer, smaller images")


class _Place:
    """How much of the desk one body takes."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.size = 0

    def grow(self, count: int) -> None:
        """Take so many bytes more."""
        self._desk.hold(count)
        self.size += count


def disconnected() -> RefusedError:
    """Says that nobody waits for the answer; nobody reads it either, but the log and the metrics count it."""
    return RefusedError(400, "disconnected", "the client went away before it was answered")


async def _discard(request: Request) -> None:
    left = _DISCARDED_BYTES
    try:
        async with asyncio.timeout(_DISCARDING_SECONDS):
            async for piece in request.stream():
                left -= len(piece)
                if left < 0:
                    return
    except (TimeoutError, ClientDisconnect):
        return


def uploads_of(content_type: str, body: bytearray, limits: Limits) -> list[Upload]:
    """Take a multipart body apart.

    Args:
        content_type: The request's header.
        body: All of it.
        limits: How many parts there may be.

    Raises:
        RefusedError: If it is no such body, cut off, has other fields, no image or too many.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= 256:
        raise RefusedError(
            415, "not_multipart", f"send images as multipart/form-data with a boundary, in fields called {FIELD}"
        )
    parts = _Parts(limits.images)
    try:
        parser = MultipartParser(boundary, parts.callbacks(), max_header_size=_LARGEST_HEADER_BYTES)
        for start in range(0, len(body), _PIECE_BYTES):
            parser.write(bytes(body[start : start + _PIECE_BYTES]))
        parser.finalize()
    except FormParserError as error:
        raise RefusedError(400, "malformed", "the body is not as multipart/form-data is written") from error
    if not parts.is_whole:
        raise RefusedError(400, "malformed", "the body ends before its last boundary")
    if not parts.uploads:
        raise RefusedError(422, "no_image", f"there is no image in the request; send some in fields called {FIELD}")
    return parts.uploads


class _Parts:
    """What the parser finds, put together."""

    def __init__(self, most: int) -> None:
        self.uploads: list[Upload] = []
        self.is_whole = False
        self._most = most
        self._key, self._value, self._disposition = bytearray(), bytearray(), b""
        self._content = bytearray()
        self._name = ""

    def callbacks(self) -> MultipartCallbacks:
        """What the parser calls."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._on_key,
            "on_header_value": self._on_value,
            "on_header_end": self._on_header,
            "on_headers_finished": self._on_headers,
            "on_part_data": self._on_content,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        if len(self.uploads) == self._most:
            raise RefusedError(
                413, "too_many", f"there are more than {self._most} images in the request; send fewer in each"
            )
        self._disposition, self._content, self._name = b"", bytearray(), ""

    def _on_key(self, data: bytes, start: int, end: int) -> None:
        self._key += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header(self) -> None:
        if self._key.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._key, self._value = bytearray(), bytearray()

    def _on_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        field = options.get(b"name", b"").decode("utf-8", "replace")
        if field != FIELD:
            raise RefusedError(422, "unknown_field", f"the field {field[:50]!r} is unknown; images are called {FIELD}")
        self._name = options.get(b"filename", b"").decode("utf-8", "replace")[:_LONGEST_NAME]

    def _on_content(self, data: bytes, start: int, end: int) -> None:
        self._content += data[start:end]

    def _end(self) -> None:
        self.uploads.append(Upload(self._name, bytes(self._content)))
        self._content = bytearray()

    def _finish(self) -> None:
        self.is_whole = True
