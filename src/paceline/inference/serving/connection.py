"""How long may a client hold a connection open without asking for anything, or without taking what it asked for?

uvicorn limits how long a connection is idle between two requests, but not how long a request's head may take, nor how
slowly a body is sent that nobody wants any more, nor how slowly answers are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.inference.serving.limits import Limits

_BUSY = b'{"error":"too many connections; come back in a second"}'
_SLOW = b'{"error":"the request was not whole in time"}'


class Connection(H11Protocol):
    """A connection that is closed when it dawdles, and refused when there are too many."""

    limits = Limits()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._patience: asyncio.TimerHandle | None = None
        self._round: asyncio.TimerHandle | None = None
        self._unread_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn, too, narrows asyncio's type
        """Take a connection, unless there are too many."""
        super().connection_made(transport)
        self._look_at_answers()
        if len(self.connections) > self.limits.connections:
            self._end(b"503 Service Unavailable", _BUSY, b"Retry-After: 1\r\n")
            return
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._stop_watching()
        if self._round is not None:
            self._round.cancel()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        """Go on: the client has taken most of what waited for it."""
        self._unread_since = None
        super().resume_writing()

    def _look_at_answers(self) -> None:
        """Now and then: break off a connection whose client does not take its answers; closing would wait for it."""
        if self.transport.get_write_buffer_size() == 0:
            self._unread_since = None
        elif self._unread_since is None:
            self._unread_since = self.loop.time()
        elif self.loop.time() - self._unread_since >= self.limits.request_seconds:
            self.transport.abort()
            return
        self._round = self.loop.call_later(self.limits.head_seconds, self._look_at_answers)

    def data_received(self, data: bytes) -> None:
        """Take what the client sends; once its request is being answered, others watch over its body."""
        super().data_received(data)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, as everything is refused: in JSON."""
        body = json.dumps({"error": msg}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        answer = h11.Response(status_code=400, headers=[*headers, (b"connection", b"close")], reason=b"Bad Request")
        with contextlib.suppress(h11.LocalProtocolError):  # in the middle of another answer
            for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _is_asking(self) -> bool:
        """Whether no request of this connection is being answered: what comes is a head, or refused."""
        return not self._has_asked() or self.cycle.response_complete

    def _has_asked(self) -> bool:
        """Whether a request of this connection was ever understood."""
        return bool(self.cycle)

    def _watch(self) -> None:
        if not self._is_asking() or self.transport.is_closing():
            self._stop_watching()
        elif self._patience is None:
            self._patience = self.loop.call_later(self.limits.head_seconds, self._lose_patience)

    def _stop_watching(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _lose_patience(self) -> None:
        self._patience = None
        if self._is_asking() and not self.transport.is_closing():
            self._end(b"408 Request Timeout", _SLOW, b"")

    def _end(self, status: bytes, body: bytes, headers: bytes) -> None:
        """Say why, and close."""
        if not self._has_asked():  # or else it might stand in the middle of another answer
            lines = (
                b"HTTP/1.1 " + status,
                b"Content-Type: application/json",
                b"Content-Length: %d" % len(body),
                b"Connection: close",
            )
            self.transport.write(b"\r\n".join(lines) + b"\r\n" + headers + b"\r\n" + body)
        self.transport.close()
