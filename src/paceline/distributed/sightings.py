"""Where is each process, as far as the others know, and for which of them do they wait?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

NO_SAMPLES: Ids = np.empty(0, dtype=np.int64)
_LAST = 1_000_000


class Pulse:
    """Where this process is: plain attributes that the loop writes and a thread reads; no locks, and next to no cost.

    Attributes:
        step: The step it is in, counted from 1; 0 before the first.
        phase: The part of it.
        order: Which part; comparable between processes at the same step.
        ticks: Grows with everything that is got done.
        is_new: Whether it is in this part for the first time; networks are compiled then.
        samples: The samples in hand.
    """

    __slots__ = ("_entered", "is_new", "order", "phase", "samples", "step", "ticks")

    def __init__(self) -> None:
        self.step, self.phase, self.order, self.ticks, self.is_new = 0, "start", 0, 0, True
        self.samples: Ids = NO_SAMPLES
        self._entered: set[str] = set()

    def begin_step(self, step: int) -> None:
        """A new step begins."""
        self.step, self.order = step, 0

    def enter(self, phase: str, *, last: bool = False, samples: Ids = NO_SAMPLES) -> None:
        """Go on to another part.

        Args:
            phase: Its name.
            last: Whether it is the last one before processes meet; they may have come there by unequal ways.
            samples: The samples in hand then.
        """
        self.phase, self.samples = phase, samples
        self.order = _LAST if last else self.order + 1
        self.is_new = phase not in self._entered
        if self.is_new:
            self._entered.add(phase)
        self.ticks += 1

    def tick(self) -> None:
        """Something was got done within a part."""
        self.ticks += 1


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """What a process said of itself.

    Attributes:
        serial: Grows each time; 0 if it has not said anything.
        seconds: Since when it was there.
        is_over: Whether it has ended its part in the run.
        failure: The error that it ended with.
    """

    rank: int
    host: str = "an unknown host"
    serial: int = 0
    step: int = 0
    phase: str = "start"
    order: int = 0
    ticks: int = -1
    is_new: bool = True
    seconds: float = 0.0
    is_over: bool = False
    failure: str = ""

    @property
    def place(self) -> tuple[int, int]:
        """How far it is, for comparison."""
        return self.step, self.order

    @property
    def where(self) -> str:
        """Its place in words."""
        return f"{self.phase} of step {self.step}" if self.step else f"{self.phase} before the first step"

    @property
    def who(self) -> str:
        """Its name in words."""
        return f"rank {self.rank} on {self.host}"

    def __str__(self) -> str:
        return f"{self.who}, in {self.where}"


def diagnose(sightings: Sequence[Sighting], silent: Mapping[int, float]) -> list[Sighting]:
    """The processes that the others wait for; empty if all are at the same place.

    Args:
        sightings: The last of each process, by rank.
        silent: Seconds for which some of them have not been heard of, by rank.
    """
    if failed := [each for each in sightings if each.failure]:
        return failed
    if silent:
        return [each for each in sightings if each.rank in silent]
    furthest_behind = min(each.place for each in sightings)
    behind = [each for each in sightings if each.place == furthest_behind]
    return behind if len(behind) < len(sightings) else []
