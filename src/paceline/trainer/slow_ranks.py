"""For which process do the others wait, and in which part of the step is it slow?

Processes wait for one another where they exchange gradients, and weights if these are spread over them. So the slowest
one is told by the parts of the step in which nobody waits; that it is slow shows in the others' exchange, not its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from paceline.telemetry.meter import PHASES

# In these all wait for one another, and one of them writes.
_SHARED = ("communication", "logging")
_OWN = tuple(index for index, phase in enumerate(PHASES) if phase not in _SHARED)

ALARMING_FACTOR = 1.5
ALARMING_RECORDS = 3


@dataclass(frozen=True)
class Slowest:
    """The process whose own work took longest since the last record.

    Attributes:
        rank: Its number.
        phase: Where it exceeds the others most.
        factor: Its seconds per step in work of its own, over the median of the others'.
    """

    rank: int
    phase: str
    factor: float


def find_slowest(seconds: Sequence[Sequence[float]], *, waits_in: Collection[str]) -> Slowest | None:
    """Find it from each process's mean seconds per step and phase, in the order of ``PHASES``.

    Args:
        seconds: By rank and phase.
        waits_in: Phases in which processes wait for one another, because they exchange gradients or weights there.
            Of these the shortest one counts for all, since who comes last does not wait.

    Returns:
        None for a single process, and where nothing was measured.
    """
    if len(seconds) < 2:
        return None
    shortest = {phase: min(each[phase] for each in seconds) for phase in _OWN if PHASES[phase] in waits_in}
    own = [[shortest.get(phase, each[phase]) for phase in _OWN] for each in seconds]
    totals = [sum(each) for each in own]
    rank = max(range(len(own)), key=lambda number: totals[number])
    others = [number for number in range(len(own)) if number != rank]
    usual = median(totals[number] for number in others)
    if usual <= 0:
        return None
    excess = [own[rank][part] - median(own[number][part] for number in others) for part in range(len(own[rank]))]
    phase = PHASES[_OWN[excess.index(max(excess))]]
    return Slowest(rank, phase, totals[rank] / usual)


def over_ranks(seconds: Sequence[Sequence[float]], *, untold: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """How much the processes differ: for each phase the least, the middle and the most seconds, and whose these are.

    Args:
        seconds: By rank and phase, as for :func:`find_slowest`.
        untold: Phases to leave out.
    """
    found = {}
    for index, phase in enumerate(PHASES):
        values = [each[index] for each in seconds]
        least, most = min(values), max(values)
        found[phase] = {
            "minimum": least,
            "median": median(values),
            "maximum": most,
            "least_rank": values.index(least),
            "most_rank": values.index(most),
        }
    return {phase: each for phase, each in found.items() if phase not in untold}


class SlowRanks:
    """Remembers for how many records in a row a process was alarmingly slow, and says so once."""

    def __init__(self) -> None:
        self._rank: int | None = None
        self._records = 0
        self._told: set[int] = set()

    def is_news(self, slowest: Slowest | None) -> bool:
        """Take what a record found; whether it is to be told."""
        rank = slowest.rank if slowest is not None and slowest.factor > ALARMING_FACTOR else None
        self._records = self._records + 1 if rank == self._rank else 1
        self._rank = rank
        if rank is None or rank in self._told or self._records < ALARMING_RECORDS:
            return False
        self._told.add(rank)
        return True
