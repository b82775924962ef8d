"""How does the service begin, and end: when it is told to, after everyone whom it let in has been answered?"""

from __future__ import annotations

import contextlib
import io
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from PIL import Image

from paceline.errors import NotFiniteError, PacelineError
from paceline.inference.answers import ImagePredictor
from paceline.inference.serving.app import make_app
from paceline.inference.serving.connection import Connection
from paceline.inference.serving.limits import Limits
from paceline.inference.serving.metrics import Metrics
from paceline.inference.serving.service import Service
from paceline.inference.serving.visitors import Visitors

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_IDLE_SECONDS = 15
_LAST_SECONDS = 5


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the service listens.

    Attributes:
        socket: Bound, not yet listened to.
        url: What to type into a browser.
        is_loopback: Whether only programs of this machine reach it.
        visitors: Lets requests in.
    """

    socket: socket.socket
    url: str
    is_loopback: bool
    visitors: Visitors


def bind(host: str, port: int, allowed: Sequence[str] = ()) -> Address:
    """Take a place to listen at.

    Args:
        host: A name or address of this machine.
        port: 0 for any that is free.
        allowed: Further names it may be asked as, and sites whose pages may ask; without them, a place that others
            reach may be asked as anything.

    Raises:
        PacelineError: If it cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except (OSError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PacelineError(
            f"--host={host} --port={port}: cannot be listened at: {reason}; give an address of this machine and a free "
            "port (0: any)."
        ) from error
    number = bound.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    loopback = ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
    names = ("localhost", host, *allowed) if loopback or allowed else None
    return Address(
        socket=bound, url=f"http://{shown}:{number}", is_loopback=loopback, visitors=Visitors(names, allowed)
    )


def serve(
    predictor: ImagePredictor,
    target: Path,
    address: Address,
    limits: Limits,
    *,
    say: Callable[[str], None],
    ready: Callable[[], None],
) -> None:
    """Answer until SIGTERM or SIGINT; then finish what was begun, and return.

    Args:
        predictor: Answers.
        target: Where its weights are; its last part is what the model is called.
        address: Where to listen.
        limits: Where to stop.
        say: Told of each request in one line.
        ready: Called when requests are taken.
    """
    _warm(predictor)
    model = target.resolve().name
    service = Service(predictor, limits, Metrics(model, predictor.digest))
    connection = type("LimitedConnection", (Connection,), {"limits": limits})
    config = uvicorn.Config(
        make_app(service, model, address.visitors, say),
        http=connection,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=int(limits.request_seconds) + _LAST_SECONDS,
    )
    _Server(config, ready, service.begin_to_stop).run(sockets=[address.socket])


def _warm(predictor: ImagePredictor) -> None:
    """Ask once before anyone else does: the first answer takes longest."""
    picture = io.BytesIO()
    Image.new("L", (64, 64)).save(picture, "PNG")
    (answer,) = predictor.answer([predictor.prepare(picture.getvalue())], 1)
    if answer.error is not None:
        raise NotFiniteError(f"{answer.error}.")


class _Server(uvicorn.Server):
    """uvicorn's, for which being told to stop is no failure: it would raise the signal once more when it has."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], stopping: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready
        self._stopping = stopping

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._stopping()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {each: signal.signal(each, self.handle_exit) for each in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
