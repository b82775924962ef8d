"""Points that a program earned, and why the others were lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PASS_AT = 70  # of 100


@dataclass(frozen=True)
class Criterion:
    """One thing that was looked at.

    Attributes:
        name: Short and stable, such as ``gradient``.
        title: What is asked, as a phrase for the student.
        points: Earned, between 0 and ``most``.
        most: Points for doing it right.
        reason: Why points were lost, in one sentence that says what was seen; empty if none was.
        note: What the student should know although no point was lost; mostly empty.
        seen: The values that it was decided by.
    """

    name: str
    title: str
    points: float
    most: float
    reason: str = ""
    note: str = ""
    seen: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Marks:
    """What came of one grading.

    Attributes:
        criteria: In the order in which they are told.
        seconds: Wall-clock time of the grading.
        processor_seconds: Time of all its processes on the processor.
    """

    criteria: tuple[Criterion, ...]
    seconds: float = 0.0
    processor_seconds: float = 0.0

    @property
    def points(self) -> float:
        """Earned in all."""
        return sum(criterion.points for criterion in self.criteria)

    @property
    def most(self) -> float:
        """What a program without a fault earns."""
        return sum(criterion.most for criterion in self.criteria)

    @property
    def passed(self) -> bool:
        """Whether the assessment counts as passed: 70 of 100 points."""
        return self.points * 100 >= PASS_AT * self.most > 0

    @property
    def lost(self) -> tuple[Criterion, ...]:
        """The criteria that cost points."""
        return tuple(criterion for criterion in self.criteria if criterion.points < criterion.most)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for ``json.dumps``."""
        return {
            "points": self.points,
            "most": self.most,
            "passed": self.passed,
            "seconds": round(self.seconds, 1),
            "processor_seconds": round(self.processor_seconds, 1),
            "criteria": [asdict(criterion) for criterion in self.criteria],
        }
