"""How are events written so that none is lost, repeated or torn when a run is killed and resumed?

Before a checkpoint becomes visible its events are on the disk (``flush(durable=True)``); when the run resumes
from it, everything later is cut off (:func:`truncate_after`) and written again by the steps done again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import RunDirectoryError
from paceline.plain_json import load_json
from paceline.records.append_file import AppendFile, detach
from paceline.records.events import Event
from paceline.records.run_directory import cannot, encode_json, refuse_odd_record, write_text


class EventWriter(AppendFile):
    """Appends events to a file, one JSON object per line.

    Events are buffered: flushing at every log record lets readers follow the run, and a kill loses at most what
    came after it. Call :func:`truncate_after` first when the file is there already.
    """

    def append(self, event: Event | Mapping[str, Any]) -> None:
        """Add one event.

        Raises:
            ValueError: If a mapping lacks ``event`` or ``step``.
        """
        document = event.to_json() if isinstance(event, Event) else event
        if "event" not in document or "step" not in document:
            raise ValueError(f"an event has the keys 'event' and 'step', found {sorted(document)}")
        self.write(encode_json(document).encode("utf-8") + b"\n")


def truncate_after(path: Path, position: int) -> int:
    """Remove events later than ``position`` in the data, and a last line torn by a kill; return how many went.

    The file is replaced as a whole, or keeps its content. A file that does not exist stays so.

    Raises:
        RunDirectoryError: If a line other than the last is no event.
    """
    refuse_odd_record(path)
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
    else:
        detach(path)  # the run that continues holds it open before it appends
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
        event = load_json(line)
        if isinstance(event["step"], int) and isinstance(event["event"], str):
            return dict(event)
    except (ValueError, TypeError, KeyError):
        pass  # told below, together with objects that lack the keys
    raise RunDirectoryError(
        f"Line {number} of '{path}' is no event: found {line[:60]!r}. The file is damaged; restore it from a "
        "copy, or start the run in another directory."
    )
