"""How are events written so that none is lost, repeated or torn when a run is killed and resumed?

Before a checkpoint becomes visible its events are on the disk (``flush(durable=True)``); when the run resumes
from it, everything later is cut off (:func:`truncate_after`) and written again by the steps done again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from paceline.errors import RunDirectoryError
from paceline.records.events import Event
from paceline.records.run_directory import cannot, encode_json, sync_directory, write_text


class EventWriter:
    """Appends events to a file, one JSON object per line.

    Events are buffered: :meth:`flush` at every log record lets readers follow the run, and a kill loses at
    most what came after it.

    Args:
        path: The file, made if it is not there. Call :func:`truncate_after` first when it is.

    Raises:
        RunDirectoryError: If the file cannot be opened; later, if the disk refuses a write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("ab")
            sync_directory(path.parent)
        except OSError as error:
            raise cannot("open", path, error) from error

    def append(self, event: Event | Mapping[str, Any]) -> None:
        """Add one event.

        Raises:
            ValueError: If a mapping lacks ``event`` or ``step``.
        """
        document = event.to_json() if isinstance(event, Event) else event
        if "event" not in document or "step" not in document:
            raise ValueError(f"an event has the keys 'event' and 'step', found {sorted(document)}")
        try:
            self._file.write(encode_json(document).encode("utf-8") + b"\n")
        except OSError as error:
            raise cannot("write", self._path, error) from error

    def flush(self, *, durable: bool = False) -> None:
        """Hand everything to the operating system; with ``durable`` wait until the disk has it."""
        try:
            self._file.flush()
            if durable:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise cannot("write", self._path, error) from error

    def close(self) -> None:
        """Flush durably and close; closing twice is harmless."""
        if not self._file.closed:
            self.flush(durable=True)
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def truncate_after(path: Path, position: int) -> int:
    """Remove events later than ``position`` in the data, and a last line torn by a kill; return how many went.

    The file is replaced as a whole, or not touched. A file that does not exist stays so.

    Raises:
        RunDirectoryError: If a line other than the last is no event.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise cannot("read", path, error) from error
    kept: list[bytes] = []
    for number, line in enumerate(lines, start=1):
        event = parse_line(line, path, number, is_last=number == len(lines))
        if event is not None and event.get("position", event["step"]) <= position:
            kept.append(line)
    if len(kept) < len(lines):
        write_text(path, b"".join(kept).decode("utf-8"))
    return len(lines) - len(kept)


def parse_line(line: bytes, path: Path, number: int, *, is_last: bool) -> dict[str, Any] | None:
    """Return a line's event, or None for a last line without its end, as a kill leaves it.

    Raises:
        RunDirectoryError: If any other line is no event.
    """
    torn = is_last and not line.endswith(b"\n")
    if torn:
        return None
    try:
        event = json.loads(line)
        if isinstance(event["step"], int) and isinstance(event["event"], str):
            return dict(event)
    except (ValueError, TypeError, KeyError):
        pass  # told below, together with objects that lack the keys
    raise RunDirectoryError(
        f"Line {number} of '{path}' is no event: found {line[:60]!r}. The file is damaged; restore it from a "
        "copy, or start the run in another directory."
    )
