"""TensorBoard: event files through torch's ``SummaryWriter``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.telemetry.scalars import read_note, save_note, scalars


class TensorBoardTracker:
    """Writes step records as ``train/<name>`` and evaluations as ``evaluation/<weights>/<name>``.

    A resumed run marks its last logged step and what an earlier launch wrote after it as purged, and writes on from
    there: TensorBoard's readers leave out what is purged.

    Args:
        directory: The folder TensorBoard is pointed at.
        start_step: The step the run resumes from.
    """

    def __init__(self, directory: Path, *, start_step: int = 0) -> None:
        self._directory = directory
        # Versions before the note wrote each record at once.
        is_earlier = any(directory.glob("events.out.tfevents.*"))
        self._first = min(int(read_note(directory).get("last", start_step if is_earlier else 0)), start_step)
        self._writer: Any = None

    def write(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Write the numbers of events, from the first step that may be missing."""
        for event in events:
            found = scalars(event)
            if not found or event["step"] < self._first:
                continue
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._directory.mkdir(exist_ok=True)
                self._writer = SummaryWriter(str(self._directory), purge_step=self._first)
            for tag, value in found.items():
                self._writer.add_scalar(tag, value, event["step"], event.get("time"))
        if self._writer is not None:
            # Records are rare, and one still buffered when the process is killed would be a gap.
            self._writer.flush()
            save_note(self._directory, {"last": events[-1]["step"]})

    def close(self, status: str) -> None:
        """Close the file, if one was opened."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
