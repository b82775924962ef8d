"""Predictions for images, from any weights and library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

from PIL import Image

from paceline.checkpoint.weights import SavedWeights, weights_sha256
from paceline.data.image.decode import BrokenImageError
from paceline.errors import DataError, RecipeError
from paceline.inference.sources import PictureFile
from paceline.machine import available_cores

Prepared = Any
"""One image as a predictor wants it, with its size in memory as ``nbytes``; only the predictor that made it looks
inside."""

NOT_FINITE = "the network's output is not a finite number; use other weights"
"""Why an image has no answer where the network computed none."""

Measure = Literal["probability", "share"]
PLURALS: dict[Measure, str] = {"probability": "probabilities", "share": "shares"}
"""What rows call all of an image's together."""

Box = tuple[float, float, float, float]
"""Left, top, right and bottom edge, in pixels of the file's picture."""


@dataclass(frozen=True)
class Answer:
    """The answer for one image: labels, the most probable first, or the reason why there are none.

    Attributes:
        path: The image file, or its archive and its name in there.
        labels: Class names, the most probable first; empty if the image could not be read.
        probabilities: Of each, in [0, 1]; or whatever ``measure`` says.
        error: Why there is no answer, if there is none.
        measure: What stands beside each label: its probability, or the share of the pixels that it has.
    """

    measure: ClassVar[Measure] = "probability"
    path: Path
    labels: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    error: str | None = None

    def described(self) -> str:
        """The answer as one line for people, without the path."""
        if self.error is None:
            return self._found()
        return self.error if self.error == NOT_FINITE else f"unreadable: {self.error}"

    def _found(self) -> str:
        pairs = zip(self.labels, self.probabilities, strict=True)
        return "  ".join(f"{label} {100 * value:.1f} %" for label, value in pairs) or "no label"

    def row(self) -> dict[str, Any]:
        """The answer as a row of a file: ``path``, ``labels``, ``probabilities``, what else there is, ``error``.

        Of numbers ``path``, ``numbers`` by their names, ``error``; of any number of labels ``numbers`` are the
        probabilities of all classes.
        """
        return {"path": self.path, **self._columns(), "error": self.error}

    def _columns(self) -> dict[str, Any]:
        return {"labels": self.labels, PLURALS[self.measure]: self.probabilities}

    def drawn(self, prepared: Prepared, classes: Sequence[str]) -> Image.Image:
        """A copy of the image that was prepared, with the answer drawn into it.

        Args:
            prepared: What the predictor made of the image.
            classes: All class names; each has its own colour.

        Raises:
            DataError: If nothing in such an answer can be drawn.
        """
        raise DataError("--draw draws the objects that a detector finds, and these weights predict none.")


class ImagePredictor(ABC):
    """Answers questions about images. Preparing is safe in several threads at once; answering in one at a time.

    Attributes:
        classes: All class names; none where the network predicts numbers.
        number_names: What the numbers are called of which every answer has all; empty where there are none.
        usual_top_k: Default maximum of labels per image.
        largest_batch: Maximum batch size; None if the caller chooses.
        finds_boxes: Whether answers have boxes.
        draws: Whether answers can be drawn.
        kind: The class of answers.
    """

    classes: tuple[str, ...]
    number_names: tuple[str, ...] = ()
    usual_top_k = 3
    largest_batch: int | None = None
    finds_boxes = False
    draws = False
    kind: type[Answer] = Answer

    _saved: SavedWeights

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the weights in hexadecimal, as ``summary.json`` has it."""
        return weights_sha256(self._saved.state)

    @abstractmethod
    def prepare(self, content: bytes) -> Prepared:
        """Decode one image file and bring it to the size that is shown.

        Raises:
            BrokenImageError: If it cannot be read.
        """

    @abstractmethod
    def answer(self, prepared: Sequence[Prepared], top_k: int) -> Sequence[Answer]:
        """One answer for each image, in order, without paths."""

    def set_thresholds(self, asked: float | Mapping[str, float]) -> None:
        """Give labels above other probabilities than the run's: one for all classes, or those of some.

        Raises:
            RecipeError: If a name is no class's, or images do not have any number of labels.
        """
        raise RecipeError("--thresholds has no effect: these weights do not give images any number of labels.")

    def unreadable(self, path: Path, reason: str) -> Answer:
        """The answer for an image that cannot be read."""
        return self.kind(path, error=reason)


BATCH = 64
"""Default number of images per batch."""

Seen = Callable[[Prepared, Answer], None]


def answers_ahead(
    predictor: ImagePredictor,
    pictures: Iterable[PictureFile],
    *,
    top_k: int,
    batch_size: int = BATCH,
    seen: Seen | None = None,
) -> Generator[Answer, None, None]:
    """Yield one answer for each picture, in order; an unreadable one is an answer too.

    Threads read and decode ahead of the network, only so far that memory does not grow with the number of files. A
    batch is a fixed number of files in a row, unreadable ones among them, so that the same files at the same batch size
    give the same bits.

    Args:
        predictor: Answers.
        pictures: The files; read as they are needed.
        top_k: Most labels of each.
        batch_size: Images answered at once; fewer where the predictor says so.
        seen: Told of each image that could be read, and its answer.
    """
    batch_size = min(batch_size, predictor.largest_batch or batch_size)
    threads = available_cores()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="decoder")
    waiting: deque[tuple[PictureFile, Future[Prepared]]] = deque()
    source = iter(pictures)
    try:
        while True:
            for picture in islice(source, 2 * batch_size + threads - len(waiting)):
                waiting.append((picture, pool.submit(lambda each: predictor.prepare(each.read()), picture)))
            if not waiting:
                return
            batch = [waiting.popleft() for _ in range(min(batch_size, len(waiting)))]
            yield from _answered(predictor, batch, top_k, seen)
            batch.clear()
    finally:
        pool.shutdown(cancel_futures=True)


def _answered(
    predictor: ImagePredictor,
    batch: Iterable[tuple[PictureFile, Future[Prepared]]],
    top_k: int,
    seen: Seen | None,
) -> Iterator[Answer]:
    prepared: list[Prepared] = []
    outcomes: list[tuple[PictureFile, str | None]] = []
    for picture, decoding in batch:
        try:
            prepared.append(decoding.result())
            outcomes.append((picture, None))
        except BrokenImageError as error:
            outcomes.append((picture, error.reason))
    answers = iter(zip(prepared, predictor.answer(prepared, top_k), strict=True) if prepared else ())
    for picture, reason in outcomes:
        if reason is not None:
            yield predictor.unreadable(picture.path, reason)
            continue
        image, answer = next(answers)
        answer = replace(answer, path=picture.path)
        if seen is not None:
            seen(image, answer)
        yield answer
