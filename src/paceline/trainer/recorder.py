"""Write a run's events to its records, its trackers and the display, and find the slowest rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from paceline.records.events import Event, EventWriter, FinishEvent, IncidentEvent
from paceline.records.ledger import LedgerWriter
from paceline.telemetry.async_tracker import AsyncTracker
from paceline.telemetry.display import Display
from paceline.telemetry.meter import PHASES
from paceline.trainer.step_stats import Progress

# The slowest process shows in the parts of the step without waiting; in an exchange the others wait for it. In the
# parts below all wait for one another, and one of them writes.
_SHARED = ("communication", "logging")
_OWN = tuple(index for index, phase in enumerate(PHASES) if phase not in _SHARED)

ALARMING_FACTOR = 1.5
ALARMING_RECORDS = 3
ALARMING_SECONDS = 2.0


@dataclass(frozen=True)
class Slowest:
    """The process with the most work time since the last record.

    Attributes:
        rank: Its rank.
        phase: Where it exceeds the others most.
        factor: Its work seconds per step, relative to the median of the others.
        lost: Seconds per step that the others wait for it.
    """

    rank: int
    phase: str
    factor: float
    lost: float


def find_slowest(seconds: Sequence[Sequence[float]], *, blocking: Collection[str]) -> Slowest | None:
    """Find it from each process's mean seconds per step and phase, in the order of ``PHASES``.

    Args:
        seconds: By rank and phase.
        blocking: Phases in which processes wait for one another, because they exchange gradients or weights there. The
            shortest of these times counts for all, since the last to arrive does not wait.

    Returns:
        None for a single process, or if nothing was measured.
    """
    if len(seconds) < 2:
        return None
    shortest = {phase: min(each[phase] for each in seconds) for phase in _OWN if PHASES[phase] in blocking}
    work = [[shortest.get(phase, each[phase]) for phase in _OWN] for each in seconds]
    totals = [sum(each) for each in work]
    rank = max(range(len(work)), key=lambda number: totals[number])
    peers = [number for number in range(len(work)) if number != rank]
    typical = median(totals[number] for number in peers)
    if typical <= 0:
        return None
    excess = [work[rank][part] - median(work[number][part] for number in peers) for part in range(len(work[rank]))]
    phase = PHASES[_OWN[excess.index(max(excess))]]
    return Slowest(rank, phase, totals[rank] / typical, totals[rank] - typical)


def summarize_ranks(seconds: Sequence[Sequence[float]], *, excluded: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Return how much the processes differ: minimum, median and maximum seconds of each phase, with their ranks.

    Args:
        seconds: By rank and phase, as for :func:`find_slowest`.
        excluded: Phases to leave out.
    """
    summaries = {}
    for phase, values in zip(PHASES, zip(*seconds, strict=True), strict=True):
        smallest, largest = min(values), max(values)
        summaries[phase] = {"minimum": smallest, "median": median(values), "maximum": largest}
        summaries[phase] |= {"least_rank": values.index(smallest), "most_rank": values.index(largest)}
    return {phase: each for phase, each in summaries.items() if phase not in excluded}


class SlowRanks:
    """Counts records in a row in which a process was much slower, and the time lost; reports it once."""

    def __init__(self) -> None:
        self._rank: int | None = None
        self._step: int | None = None
        self._records, self._lost = 0, 0.0
        self._reported: set[int] = set()

    def is_new(self, slowest: Slowest, step: int) -> bool:
        """Add the finding of a record after ``step`` steps; return whether to report it."""
        steps = 0 if self._step is None else step - self._step  # unknown for the first record after a resume
        rank = slowest.rank if slowest.factor > ALARMING_FACTOR else None
        if rank != self._rank:
            self._records, self._lost = 0, 0.0
        self._rank, self._step = rank, step
        self._records, self._lost = self._records + 1, self._lost + steps * slowest.lost
        is_alarming = self._records >= ALARMING_RECORDS and self._lost >= ALARMING_SECONDS
        if rank is None or rank in self._reported or not is_alarming:
            return False
        self._reported.add(rank)
        return True


# How long the end of a run waits for its trackers, in total.
_PATIENCE_SECONDS = 30.0
_PATIENCE_WHEN_STOPPED_SECONDS = 10.0
_PATIENCE_AFTER_FAILURE_SECONDS = 2.0


class Recorder:
    """Writes events, feeds trackers and the display. Only the first rank has a writer; all ranks take part.

    Args:
        writer: Appends to the run's events; None on other ranks.
        ledger: The indices of the samples that this rank has used.
        trackers: Other places for the events.
        display: Shows them.
        progress: The run's position when an incident is written.

    Attributes:
        slow_ranks: Ranks that the others had to wait for so far.
        saves_examples: Whether the answers of evaluations can still be kept.
    """

    def __init__(
        self,
        writer: EventWriter | None,
        ledger: LedgerWriter,
        trackers: list[AsyncTracker],
        display: Display,
        progress: Progress,
    ) -> None:
        self._writer = writer
        self._ledger = ledger
        self._trackers = trackers
        self._display = display
        self.progress = progress
        self.slow_ranks = SlowRanks()
        self.saves_examples = writer is not None

    def incident(self, incident: str, message: str, details: Mapping[str, Any] | None = None) -> None:
        """Record an incident at the run's current step."""
        self.write(IncidentEvent(**self.progress.here, incident=incident, message=message, details=details or {}))

    def write(self, event: Event) -> None:
        """Write one event to all destinations."""
        if self._writer is None:
            return
        document = event.to_json()
        if not isinstance(event, FinishEvent):
            self._append(document)
            self._track(event, [tracker.write(document) for tracker in self._trackers])
            return
        # Incidents of the trackers' last records belong to the run; the end event stays the last one.
        self._track(event, [tracker.write(document) for tracker in self._trackers])
        # A failed run's processes are ended soon, and a stopped run's after its job's grace period; the summary must
        # still be written.
        patience = {"failed": _PATIENCE_AFTER_FAILURE_SECONDS, "stopped": _PATIENCE_WHEN_STOPPED_SECONDS}
        deadline = time.monotonic() + patience.get(event.status, _PATIENCE_SECONDS)
        self._track(event, [tracker.close(deadline - time.monotonic()) for tracker in self._trackers])
        self._append(document)

    def _append(self, document: dict[str, Any]) -> None:
        assert self._writer is not None
        self._writer.append(document)
        self._display.record(document)

    def _track(self, event: Event, said: list[str]) -> None:
        """Record the trackers' incidents, in order."""
        for tracker, message in zip(self._trackers, said, strict=True):
            if message:
                here: dict[str, Any] = {"step": event.step, "position": event.position}
                details = {"tracker": tracker.name}
                self.write(IncidentEvent(**here, incident="tracker", message=message, details=details))

    def flush(self, *, durable: bool = False) -> None:
        """Flush records and ledger to the system; with ``durable``, to the disk."""
        self._ledger.flush(durable=durable)
        if self._writer is not None:
            self._writer.flush(durable=durable)

    def close(self) -> None:
        """Close all files, even if closing one fails."""
        with contextlib.ExitStack() as files:
            for tracker in self._trackers:
                files.callback(tracker.close, _PATIENCE_AFTER_FAILURE_SECONDS)  # not closed by `finish`
            files.callback(self._ledger.close)
            if self._writer is not None:
                files.callback(self._writer.close)
