"""Criteria of the assessment: points earned, and the reasons for lost ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from paceline_course.grading import on_run, on_training
from paceline_course.grading.on_run import RequestedSchedule
from paceline_course.grading.runs import CriterionResult, NotObservedError, Runs

PASS_AT = 70  # of 100


@dataclass(frozen=True)
class Criterion:
    """The mark for one criterion.

    Attributes:
        name: Short, stable name, such as ``gradient``.
        title: The requirement, as a phrase for the student.
        points: Points earned, from 0 to ``most``.
        most: Points available.
        reason: Why points were lost, in one sentence about what was observed; empty if none were.
        note: Information for the student that cost no points; usually empty.
        seen: The values on which the decision is based.
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
    """The result of a grading.

    Attributes:
        criteria: The criteria, in the order of the report.
        seconds: Wall-clock time of the grading.
        processor_seconds: CPU time of all its processes.
    """

    criteria: tuple[Criterion, ...]
    seconds: float = 0.0
    processor_seconds: float = 0.0

    @property
    def points(self) -> float:
        """Total points earned."""
        return sum(criterion.points for criterion in self.criteria)

    @property
    def most(self) -> float:
        """Total points available."""
        return sum(criterion.most for criterion in self.criteria)

    @property
    def passed(self) -> bool:
        """Whether the program passes: 70 of 100 points."""
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
    find: Callable[[Runs], CriterionResult]

    def mark(self, runs: Runs) -> Criterion:
        """Mark the runs: all points or none."""
        try:
            found = self.find(runs)
        except NotObservedError as error:
            found = CriterionResult(f"This could not be checked: {error}.")
        except Exception as error:  # noqa: BLE001  # a student's program may do what the grader does not expect
            found = CriterionResult(
                f"This could not be judged: the grader failed with {type(error).__name__}: {error}."
            )
        points = 0 if found.reason else self.points
        return Criterion(self.name, self.title, points, self.points, found.reason, found.note, found.seen)


def marking_sheet(schedule: RequestedSchedule) -> tuple[Item, ...]:
    """Return all criteria, 100 points together."""
    return (
        Item("ends", "every run ends by itself, also if sizes do not divide", 7, on_run.ends),
        Item("clean_exit", "exit code 0, process group destroyed", 3, on_run.clean_exit),
        Item("inside", "writes only to its own directory", 1, on_run.inside),
        Item("once", "each training sample exactly once per epoch, over all ranks", 7, on_run.once),
        Item("disjoint", "ranks train on different samples", 5, on_run.disjoint),
        Item("order", "a different order in each epoch", 6, on_run.order),
        Item("initial", "the same initial weights on all ranks", 4, on_training.initial),
        Item("gradient", "each step uses the gradient of the mean over the global batch", 9, on_training.gradient),
        Item("optimizer", "each step is SGD with momentum 0.9", 3, on_training.optimizer),
        Item("same_weights", "the same weights on all ranks at the end, and in the file", 4, on_training.same_weights),
        Item("one_process", "the same result as one process with this global batch", 6, on_training.one_process),
        Item("loss", "the logged loss is the mean over all samples", 5, on_training.loss),
        Item("validation", "validation counts each sample once; correct accuracy logged", 8, on_training.validation),
        Item("validation_shared", "all ranks take part in validation", 2, on_training.validation_shared),
        Item("batchnorm", "BatchNorm's statistics equal on all ranks in validation", 5, on_training.batchnorm),
        Item(
            "lr_scaled",
            "the learning rate is scaled with the global batch",
            4,
            partial(on_run.scaled, schedule=schedule),
        ),
        Item("warmup", "the learning rate is warmed up", 4, partial(on_run.warmup, schedule=schedule)),
        Item("one_writer", "only one rank writes files", 3, on_run.one_writer),
        Item("atomic", "a kill while saving leaves the previous checkpoint intact", 3, on_run.atomic),
        Item("resume", "a killed run resumes to the same result", 6, on_run.resume),
        Item("accuracy", "the target accuracy is reached", 3, on_training.accuracy),
        Item("throughput", "at least half the throughput of a bare loop", 2, on_run.throughput),
    )
