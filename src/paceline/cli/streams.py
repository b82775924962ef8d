"""Handle closed, full or broken standard streams: the command continues, and the exit code reports lost output."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TextIO

from paceline.host.system import existing_signals

_READ, _WRITE = os.O_RDONLY, os.O_WRONLY


class StandardStream(io.TextIOWrapper):
    """A standard stream that never raises: after a write error it reports once on standard error and discards the rest.

    Attributes:
        is_lost: Whether something could not be written.
        is_optional: Whether the command succeeds without it. If not, a closed pipe (``| head``) ends the command.
    """

    is_lost = False
    is_optional = False

    def write(self, text: str) -> int:
        """Write, if possible."""
        try:
            return super().write(text)
        except OSError as error:
            self._on_write_error(error)
            return len(text)

    def flush(self) -> None:
        """Flush, if possible."""
        try:
            super().flush()
        except OSError as error:
            self._on_write_error(error)

    def _on_write_error(self, error: OSError) -> None:
        if error.errno == errno.EPIPE and not self.is_optional:
            raise error
        self.is_lost = True
        discard_output(self)
        if self is not sys.stderr:
            reason = error.strerror or str(error)
            message = f"progress is no longer shown ({reason}); the run continues."
            sys.stderr.write(
                f"paceline: {message if self.is_optional else f'cannot write standard output: {reason}.'}\n"
            )


def discard_output(stream: TextIO) -> None:
    """Discard further writes to a stream."""
    null_device = os.open(os.devnull, _WRITE)
    os.dup2(null_device, stream.fileno())
    os.close(null_device)


def wrap_streams() -> None:
    """Wrap the standard streams of this process.

    A closed stream is opened, since otherwise the next file would get its descriptor: standard output so that writes
    fail, and standard error so that writes are discarded.
    """
    descriptors = []
    for number, stream, mode in ((0, sys.stdin, _READ), (1, sys.stdout, _READ), (2, sys.stderr, _WRITE)):
        descriptor = number if stream is not None else os.open(os.devnull, mode)
        os.set_inheritable(descriptor, True)  # noqa: FBT003  # for the ranks of a run
        descriptors.append(descriptor)
    sys.stdin = sys.stdin or open(descriptors[0], closefd=False)  # noqa: SIM115  # open until the process ends
    sys.stderr, sys.stdout = _wrapped(sys.stderr, descriptors[2]), _wrapped(sys.stdout, descriptors[1])
    make_optional(sys.stderr)


def _wrapped(stream: TextIO | None, descriptor: int) -> TextIO:
    binary = open(descriptor, "wb", closefd=False)  # noqa: SIM115  # open until the process ends
    if not isinstance(stream, io.TextIOWrapper):
        return StandardStream(binary, encoding="utf-8", errors="backslashreplace")
    return StandardStream(
        binary,
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def make_optional(stream: TextIO) -> None:
    """Let the current command succeed without a stream: the exit code of a training run says how the run ended."""
    if isinstance(stream, StandardStream):
        stream.is_optional = True


def final_exit_code(code: int) -> int:
    """Return the exit code of a command that ends now: lost output is a failure, unless it is optional."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output(sys.stdout)
    lost = isinstance(sys.stdout, StandardStream) and sys.stdout.is_lost and not sys.stdout.is_optional
    return code or int(lost)


_SIGNALS = existing_signals("SIGTERM", "SIGHUP")


@contextlib.contextmanager
def exit_on_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Exit on signals, by default a stop request (SIGTERM) or a closed terminal (SIGHUP).

    Python already does so on SIGINT.

    Ignored signals, such as SIGHUP under ``nohup``, stay ignored.
    """
    previous = {number: signal.getsignal(number) for number in numbers or _SIGNALS}
    handled = [number for number in previous if previous[number] != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, previous[number])


def _exit(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
