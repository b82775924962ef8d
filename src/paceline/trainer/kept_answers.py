"""What is kept of an evaluation, to be looked at: the confusion matrix, and some samples with their answers.

It is gathered along the pass that scores, from the very answers that are scored, and leaves no trace in it: what goes
wrong here is told, and nothing is kept.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.data.batch import Batch
from paceline.data.random_draws import uniforms
from paceline.distributed.collectives import Collectives
from paceline.escaping import utf8
from paceline.metrics.answers import MOST_CLASSES, Confusion, Triples, confusion_document, merged
from paceline.metrics.examples import HOW_CHOSEN, Candidate, Examples, choose
from paceline.records.run_directory import RunDirectory, encode_json, write_text
from paceline.tasks.task import Model, Task

if TYPE_CHECKING:
    from paceline.data.pipeline import Pipeline


@dataclass(frozen=True, kw_only=True)
class Keep:
    """What is to be kept of a pass.

    Attributes:
        weights: Of which set of weights; empty for none.
        examples: Samples to show at most.
    """

    weights: str = ""
    examples: int = 0


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one process has to bring: numbers, no pictures yet."""

    triples: Triples
    candidates: tuple[Candidate, ...]
    classes: int
    failure: str


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What was kept.

    Attributes:
        confusion: The confusion matrix; None where there are more than 1000 classes.
        examples: What the file of examples says; None if none were asked for.
        failure: Why nothing was kept, or an empty string.
    """

    confusion: dict[str, Any] | None = None
    examples: dict[str, Any] | None = None
    failure: str = ""


class KeptAnswers:
    """Goes along the pass of one process."""

    def __init__(self, task: Task, keep: Keep) -> None:
        self._task = task
        # A task without answers is spared all of it.
        self._keep = Keep() if getattr(task.answers, "__func__", None) is Task.answers else keep
        self._confusion = Confusion()
        self._examples = Examples(self._keep.examples, task.pictures)
        self._failure = ""

    @property
    def weights(self) -> str:
        """The set of weights whose answers are kept; empty once something went wrong."""
        return "" if self._failure else self._keep.weights

    def add(self, answered: Model, batch: Batch) -> None:
        """Take the answers to one batch.

        Args:
            answered: Gives the answer that was scored again, and no other.
            batch: What was scored.
        """
        try:
            answers = self._task.answers(answered, batch)
            if answers is None:
                return
            if answers.classes <= MOST_CLASSES:
                self._confusion.add(answers)
            if self._keep.examples:
                draws = uniforms(0, 0, batch.ids, 1)[:, 0]
                self._examples.add(batch.ids, draws, batch.inputs, answers)
        except Exception as error:  # noqa: BLE001  # the task's own code; an evaluation must not fail of being looked at
            self.give_up(error)

    def part(self) -> Part:
        """What this process has; waits for the device."""
        if not self._failure:
            try:
                return Part(
                    triples=self._confusion.triples(),
                    candidates=tuple(self._examples.candidates()),
                    classes=self._confusion.classes,
                    failure="",
                )
            except Exception as error:  # noqa: BLE001  # what the task gave may only now turn out to be no numbers
                self.give_up(error)
        return Part(triples=[], candidates=(), classes=0, failure=self._failure)

    def give_up(self, error: Exception) -> None:
        """Keep nothing of this pass."""
        self._failure = self._failure or f"{type(error).__name__}: {error}"

    def together(self, parts: Sequence[Part], collectives: Collectives, pipeline: Pipeline) -> Kept:
        """Put the parts of all processes together; a collective if pictures are kept."""
        if failure := next((each.failure for each in parts if each.failure), ""):
            return Kept(failure=failure)
        classes = max(each.classes for each in parts)
        chosen = choose((each for part in parts for each in part.candidates), self._keep.examples)
        shown: dict[int, dict[str, Any]] = {}
        if chosen:
            # A process that fails here must not leave the others waiting.
            own = self._own(
                [each for each in chosen if each in set(parts[collectives.world.rank].candidates)], pipeline
            )
            for failure, entries in collectives.gather_on_first((self._failure, own)):
                self._failure = self._failure or failure
                shown |= entries
        try:
            names = self._names(classes)
            matrix = confusion_document(merged(each.triples for each in parts), names) if classes else None
        except Exception as error:  # noqa: BLE001  # the task's names may be fewer than its answers
            self.give_up(error)
        if self._failure:
            return Kept(failure=self._failure)
        examples = [shown[each.sample] for each in chosen if each.sample in shown]
        return Kept(
            confusion=matrix,
            examples={"classes": names, "chosen": HOW_CHOSEN, "examples": examples} if chosen else None,
        )

    def _names(self, classes: int) -> list[str]:
        names = [str(each) for each in self._task.description().get("class_names", range(classes))]
        if len(names) < classes:
            raise ValueError(f"the task names {len(names)} classes and answers with {classes}")
        return names

    def _own(self, chosen: Sequence[Candidate], pipeline: Pipeline) -> dict[int, dict[str, Any]]:
        try:
            return {each.sample: self._as_shown(each, pipeline) for each in chosen}
        except Exception as error:  # noqa: BLE001  # the task's own pictures, the pipeline's own names
            self.give_up(error)
            return {}

    def _as_shown(self, candidate: Candidate, pipeline: Pipeline) -> dict[str, Any]:
        fields = asdict(candidate)
        del fields["score"], fields["is_mistake"]
        pixels = self._examples.picture(candidate)
        picture = {} if pixels is None else {"image": data_url(pixels)}
        name = pipeline.sample_name(candidate.sample, training=False)
        # A file's name may hold bytes that are no text.
        return {**picture, **fields, "name": utf8(name)}


def data_url(pixels: NDArray[np.uint8]) -> str:
    """A picture [H, W, C] as a PNG that a page can hold; of other than 3 channels the first 3, or the first."""
    shown = pixels[:, :, :3] if pixels.shape[2] >= 3 else pixels[:, :, 0]
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(shown)).save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def write_kept(directory: RunDirectory, kept: Kept, where: dict[str, Any]) -> None:
    """Write the files of an evaluation, on the first rank; what a younger one did not keep goes.

    Args:
        directory: The run's.
        kept: What was kept.
        where: At which step, and of which weights: stands in both files.

    Raises:
        RunDirectoryError: If the disk refuses.
    """
    for path, document in ((directory.confusion, kept.confusion), (directory.examples, kept.examples)):
        if document is None:
            path.unlink(missing_ok=True)
            continue
        path.parent.mkdir(exist_ok=True)
        write_text(path, encode_json({**where, **document}) + "\n")
