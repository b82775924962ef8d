"""What may a criterion say? That all is right, or in one sentence what was seen instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline_course.grading.runs import Run


class UnseenError(Exception):
    """What a criterion looks at is not there; the message says why, as it goes on after a colon."""


@dataclass(frozen=True)
class Finding:
    """What one criterion found.

    Attributes:
        reason: Why points are lost; empty if none is.
        note: What the student should know anyway.
        seen: The values that it was decided by.
    """

    reason: str = ""
    note: str = ""
    seen: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Runs:
    """The runs of one grading; those that were not made are not there.

    Attributes:
        by_name: ``one``, ``two``, ``three`` (with so many processes), ``batchnorm``, ``killed``, ``resumed`` (killed as
            it saved), ``again``, ``pace-before`` and ``pace-after`` (the bare loop).
    """

    by_name: Mapping[str, Run]

    def get(self, name: str) -> Run | None:
        """Return a run that was made, complete or not."""
        return self.by_name.get(name)

    def complete(self, *names: str) -> dict[str, Run]:
        """Return those of some runs that ended by themselves."""
        found = {name: self.by_name[name] for name in names if name in self.by_name}
        return {name: run for name, run in found.items() if run.is_complete}

    def on_several(self, check: Callable[[Run], Finding]) -> Finding:
        """Apply a check to the runs with 2 and 3 processes, and return the first complaint."""
        runs = self.complete("two", "three")
        if not runs:
            return Finding("This could not be seen: no run with 2 or 3 processes trained to its end.")
        findings = [check(run) for run in runs.values()]
        return next((finding for finding in findings if finding.reason), findings[0])


def listing(values: Sequence[Any], most: int = 4) -> str:
    """Write a few values for a sentence: ``3, 5, 8, … (12 in all)``."""
    text = ", ".join(str(value) for value in values[:most])
    return text if len(values) <= most else f"{text}, … ({len(values)} in all)"


def with_processes(run: Run) -> str:
    """Write how many processes a run had: ``with 1 process``, ``with 2 processes``."""
    return f"with {run.processes} process{'' if run.processes == 1 else 'es'}"
