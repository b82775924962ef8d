"""Criteria of the assessment, the points that a program earned, and why the others were lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from paceline_course.grading import on_run, on_training
from paceline_course.grading.on_run import Schedule
from paceline_course.grading.runs import Finding, Runs, UnseenError

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


@dataclass(frozen=True)
class Item:
    """One line of the marking sheet."""

    name: str
    title: str
    points: float
    find: Callable[[Runs], Finding]

    def mark(self, runs: Runs) -> Criterion:
        """Mark some runs: all points or none."""
        try:
            found = self.find(runs)
        except UnseenError as error:
            found = Finding(f"This could not be seen: {error}.")
        except Exception as error:  # noqa: BLE001  # what a student's program did may be stranger than foreseen
            found = Finding(f"This could not be judged, for the grader met with {type(error).__name__}: {error}.")
        points = 0 if found.reason else self.points
        return Criterion(self.name, self.title, points, self.points, found.reason, found.note, found.seen)


def marking_sheet(schedule: Schedule) -> tuple[Item, ...]:
    """Return all that is marked, 100 points together."""
    return (
        Item("ends", "every run ends by itself, with sizes that are uneven too", 7, on_run.ends),
        Item("clean_exit", "exit code 0, process group destroyed", 3, on_run.clean_exit),
        Item("inside", "writes in its own directory only", 1, on_run.inside),
        Item("once", "each training sample exactly once per epoch, over all ranks", 7, on_run.once),
        Item("disjoint", "ranks train on different samples", 5, on_run.disjoint),
        Item("order", "another order in each epoch", 6, on_run.order),
        Item("initial", "the same initial weights on all ranks", 4, on_training.initial),
        Item("gradient", "each step takes the gradient of the mean over the global batch", 9, on_training.gradient),
        Item("optimizer", "each step is one of SGD with momentum 0.9", 3, on_training.optimizer),
        Item("same_weights", "the same weights on all ranks at the end, and in the file", 4, on_training.same_weights),
        Item("one_process", "the result of one process with the same global batch", 6, on_training.one_process),
        Item("loss", "the loss in the log is the mean over all samples", 5, on_training.loss),
        Item("validation", "validation counts each sample once, and its accuracy is true", 8, on_training.validation),
        Item("validation_shared", "all ranks take part in validation", 2, on_training.validation_shared),
        Item("batchnorm", "BatchNorm's statistics are the same on all ranks when it counts", 5, on_training.batchnorm),
        Item(
            "lr_scaled",
            "the learning rate is scaled with the global batch",
            4,
            partial(on_run.scaled, schedule=schedule),
        ),
        Item("warmup", "the learning rate is warmed up", 4, partial(on_run.warmup, schedule=schedule)),
        Item("one_writer", "one rank alone writes files", 3, on_run.one_writer),
        Item("atomic", "a kill while a checkpoint is written leaves the one before", 3, on_run.atomic),
        Item("resume", "after a kill it goes on to the same result", 6, on_run.resume),
        Item("accuracy", "the target accuracy is reached", 3, on_training.accuracy),
        Item("throughput", "half the throughput of a bare loop, or more", 2, on_run.throughput),
    )
