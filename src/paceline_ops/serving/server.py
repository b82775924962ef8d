"""The service's life cycle: it listens, and on a stop signal finishes pending requests."""

from __future__ import annotations

import io
import ipaddress
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import uvicorn
from PIL import Image
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.errors import DataError, NotFiniteError, PacelineError
from paceline.prediction.predictor import Predictor, Prompt
from paceline_ops.serving.app import SiteCheck, make_app
from paceline_ops.serving.service import Metrics, Service, ServiceLimits

_CONNECTIONS = 512
_IDLE_SECONDS = 15
# After a stop signal: for requests in progress, and in all, as a computation cannot be interrupted.
_LAST_SECONDS, _STOP_SECONDS = 6, 8


@dataclass(frozen=True, kw_only=True)
class ListeningAddress:
    """The service's listening address.

    Attributes:
        socket: Bound socket; connections queue in it until the service is ready.
        url: Its address in a browser.
        is_loopback: Whether only this machine can reach it.
        sites: Rejects requests from other sites' pages.
    """

    socket: socket.socket
    url: str
    is_loopback: bool
    sites: SiteCheck


def bind(host: str, port: int, allowed: Sequence[str] = ()) -> ListeningAddress:
    """Bind an address to listen on.

    Args:
        host: A name or address of this machine.
        port: 0 for any free port.
        allowed: Additional Host names to accept, and sites whose pages may send requests; without them, a non-loopback
            address accepts any name.

    Raises: PacelineError: If that fails.
    """
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        bound = socket.create_server(address, family=family, backlog=_CONNECTIONS, dualstack_ipv6=both)
    except (OSError, UnicodeError, OverflowError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).partition(" (while")[0]  # Python adds the address
        raise PacelineError(
            f"--host={host} --port={port}: cannot listen: {reason}; give an address of this machine and a free "
            "port (0: any)."
        ) from error
    number = bound.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    loopback = ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
    names = ("localhost", host, *allowed) if loopback or allowed else None
    return ListeningAddress(
        socket=bound, url=f"http://{shown}:{number}", is_loopback=loopback, sites=SiteCheck(names, allowed)
    )


def serve(
    predictor: Predictor,
    target: Path,
    address: ListeningAddress,
    limits: ServiceLimits,
    *,
    say: Callable[[str], None],
    ready: Callable[[], None],
) -> None:
    """Serve until SIGTERM or SIGINT; then finish pending requests, and return.

    Args:
        predictor: The predictor.
        target: Path of its weights; the last component is the model's name.
        address: Address to listen on.
        limits: Request limits.
        say: Receives one log line per request.
        ready: Called when the service is ready.

    Raises:
        NotFiniteError: If the network's first output is not finite.
    """
    _answer_once(predictor)
    model = target.resolve().name
    service = Service(predictor, limits, Metrics(model, predictor.digest))
    config = uvicorn.Config(
        make_app(service, model, address.sites, say, ready),
        http=_Protocol,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_CONNECTIONS,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_LAST_SECONDS,
    )
    server = _Server(config)
    try:
        server.run(sockets=[address.socket])
    finally:
        server.end.cancel()


def _answer_once(predictor: Predictor) -> None:
    """Answer a grey image or a short text: the first prediction is the slowest, so it comes before the first request.

    Raises:
        NotFiniteError: If it is not finite.
    """
    if predictor.unit == "images":
        picture = io.BytesIO()
        Image.new("L", (64, 64)).save(picture, "PNG")
        (answer,) = predictor.answer([predictor.prepare(picture.getvalue())], 1)
        if answer.error is not None:
            raise NotFiniteError(f"{answer.error}.")
        return
    with suppress(DataError):  # a tokenizer may have no token for it
        if predictor.writes:
            next(predictor.pieces(Prompt(text="a", tokens=1)))
        else:
            predictor.reply(Prompt(text="a [MASK]"))


class _Protocol(H11Protocol):
    """Closes a connection whose client sends broken HTTP after its answer, where uvicorn fails with a traceback."""

    def send_400_response(self, msg: str) -> None:
        """Answer broken HTTP, unless an answer has been sent."""
        if self.conn.our_state is h11.IDLE or self.conn.our_state is h11.SEND_RESPONSE:
            super().send_400_response(msg)
        self.transport.close()


class _Server(uvicorn.Server):
    """Stops at the first signal within seconds, and at the second one at once; cuts off clients that do nothing."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.end = threading.Timer(_STOP_SECONDS, os._exit, (0,))
        self.end.daemon = True
        self._idle_since: dict[Any, float] = {}

    async def on_tick(self, counter: int) -> bool:
        """Once per second, close connections whose client has sent no request's head, or read nothing, for too long."""
        if counter % 10 == 0:
            now, idle = time.monotonic(), self._idle_since
            open_ones: Any = self.server_state.connections
            # uvicorn's own limit does not apply before the first answer, nor to a head that arrives byte by byte.
            states = [(each, each.cycle, each.transport.get_write_buffer_size()) for each in open_ones]
            waiting = [s for s in states if s[1] is None or s[1].response_complete or s[0].flow.write_paused]
            self._idle_since = {each: idle.get(each, now) for each in waiting}
            for (connection, *_), since in self._idle_since.items():
                if now - since > _IDLE_SECONDS:
                    connection.transport.abort()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop. uvicorn's method would raise the signal again in the end; a requested stop is no failure."""
        if self.should_exit:
            os._exit(0)
        self.should_exit = True
        self.end.start()
        # Requests that are cut off would be logged with tracebacks.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
