"""What answers files and prompts with trained weights, of any task and library, and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from PIL import Image

from paceline.checkpoint.weights import SavedWeights, weights_sha256
from paceline.data.image.decode import BrokenImageError
from paceline.errors import DataError, RecipeError
from paceline.host.machine import available_cores
from paceline.parsing.files import SkippedItems
from paceline.prediction.sources import PictureFile, pictures_of

Prepared = Any
"""One image as prepared for a predictor, with its size in memory as ``nbytes``; opaque to other code."""

NOT_FINITE = "the network's output is not a finite number; use other weights"
"""Error of an image for which the network computed nothing."""

Measure = Literal["probability", "share"]
PLURALS: dict[Measure, str] = {"probability": "probabilities", "share": "shares"}
"""Column name of all of an image's probabilities or scores."""

Box = tuple[float, float, float, float]
"""Left, top, right and bottom edge, in pixels of the original picture."""


@dataclass(frozen=True)
class Answer:
    """The prediction for one image: labels, most probable first, or the reason why there are none.

    Attributes:
        path: The image file, or an archive and the member's name.
        labels: Class names, most probable first; empty if the image could not be read.
        probabilities: Value of each label, in [0, 1]; ``measure`` names it.
        error: Why there is no prediction, if so.
        measure: Meaning of the values: the label's probability or its share of the pixels.
        per_label: Further keys of :meth:`row` that hold something for each label, each with the columns of a CSV file:
            one for text, or several for as many numbers.
    """

    measure: ClassVar[Measure] = "probability"
    per_label: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    path: Path
    labels: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    error: str | None = None

    def description(self) -> str:
        """Describe the prediction in one line, without the path."""
        if self.error is None:
            return self._found()
        return self.error if self.error == NOT_FINITE else f"unreadable: {self.error}"

    def _found(self) -> str:
        pairs = zip(self.labels, self.probabilities, strict=True)
        return "  ".join(f"{label} {100 * value:.1f} %" for label, value in pairs) or "no label"

    def row(self) -> dict[str, Any]:
        """Return the prediction as a row of a file: ``path``, ``labels``, ``probabilities``, further fields, ``error``.

        For regression: ``path``, ``numbers`` by name, ``error``. For multi-label images ``numbers`` are the
        probabilities of all classes.
        """
        return {"path": self.path, **self._columns(), "error": self.error}

    def _columns(self) -> dict[str, Any]:
        return {"labels": self.labels, PLURALS[self.measure]: self.probabilities}

    def drawn(self, prepared: Prepared, classes: Sequence[str]) -> Image.Image:
        """Return a copy of the prepared image with the prediction drawn into it.

        Args:
            prepared: The image as prepared by the predictor.
            classes: All class names; each has a different colour.

        Raises:
            DataError: If this kind of prediction cannot be drawn.
        """
        raise DataError("--draw draws the objects that a detector finds, and these weights predict none.")

    def label_map(self, classes: Sequence[str]) -> Image.Image | None:
        """Return the class of each pixel as a palette image, if that is what was predicted; by default None."""
        return None

    def overlay(self, longest: int, classes: Sequence[str]) -> Image.Image | None:
        """Return a transparent picture of the predicted pixels, to lay over the image; by default None.

        Args:
            longest: Its longest side in pixels, at most.
            classes: All class names; each has a different colour.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A text given instead of files, and what was asked of the answer; None leaves it to the predictor.

    Attributes:
        text: The text.
        tokens: Maximum tokens to generate.
        temperature: Sampling temperature, at least 0.
        seed: Random seed.
        top_k: Maximum answers, or tokens to choose from.
    """

    text: str
    tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    top_k: int | None = None


@dataclass(frozen=True)
class Reply:
    """What a prompt is answered: for ``--json``, and as lines for people."""

    document: Mapping[str, Any]
    lines: Sequence[str]


class Predictor(ABC):
    """Predicts files. ``prepare`` is thread-safe; ``answer`` is for one thread at a time.

    Attributes:
        classes: All class names; empty if the network predicts numbers.
        number_names: Names of the numbers in every prediction, which are keys of ``numbers`` in its row or of the row
            itself; empty if there are none.
        usual_top_k: Default maximum number of labels per image.
        largest_batch: Maximum batch size; None if the caller chooses.
        draws: Whether predictions can be drawn.
        kind: Class of the predictions.
        unit: Plural name of what is predicted.
        writes: Whether the answer to a prompt is written piece by piece.
        holds: What the weights are, with its article.
        usual_batch: Usual number of files, or of lines, per batch.
        unused_options: Options of `paceline predict`, as its fields, that have no effect, with the reason.
    """

    classes: tuple[str, ...]
    number_names: tuple[str, ...] = ()
    usual_top_k = 3
    largest_batch: int | None = None
    draws = False
    kind: type[Answer] = Answer
    unit = "images"
    writes = False
    holds = "a network of images"
    usual_batch = 64
    unused_options: Mapping[str, str] = MappingProxyType({})

    _saved: SavedWeights

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the weights in hexadecimal, as in ``summary.json``."""
        return weights_sha256(self._saved.state)

    def files(self, sources: Sequence[Path], left_out: SkippedItems) -> Iterable[PictureFile]:
        """Return what is predicted of files, folders, patterns and archives, in order; by default the images.

        Raises:
            DataError: If there is nothing to predict, or a source cannot be read.
        """
        return pictures_of(sources, left_out)

    def reply(self, prompt: Prompt) -> Reply:
        """Answer a prompt.

        Raises:
            RecipeError: If these weights take none, as by default.
        """
        raise RecipeError(f"the weights in {self._saved.path} are not a language model and take no prompt; give files.")

    def pieces(self, prompt: Prompt) -> Iterator[str]:
        """Yield the text that follows a prompt in pieces, while it is written; pieces may be empty.

        Raises:
            RecipeError: If they do not, as by default.
        """
        raise RecipeError(f"the weights in {self._saved.path} write no text.")

    @abstractmethod
    def prepare(self, content: bytes) -> Prepared:
        """Decode one image file and resize it for the network.

        Raises:
            BrokenImageError: If it cannot be read.
        """

    @abstractmethod
    def answer(self, prepared: Sequence[Prepared], top_k: int) -> Sequence[Answer]:
        """Return one prediction per image, in order, without paths."""

    def set_thresholds(self, thresholds: float | Mapping[str, float]) -> None:
        """Override the run's thresholds: one probability for all classes, or one for each named class.

        Raises:
            RecipeError: If a name is not a class, or the task is not multi-label.
        """
        raise RecipeError("--thresholds has no effect: these weights do not give images any number of labels.")

    def unreadable(self, path: Path, reason: str) -> Answer:
        """Return the prediction of an unreadable image."""
        return self.kind(path, error=reason)


Seen = Callable[[Prepared, Answer], None]


def predict_ahead(
    predictor: Predictor,
    pictures: Iterable[PictureFile],
    *,
    top_k: int,
    batch_size: int | None = None,
    on_prediction: Seen | None = None,
) -> Generator[Answer, None, None]:
    """Yield one prediction per picture, in order; an unreadable one gets an error entry.

    Threads read and decode ahead of the network, with a limit so that memory does not grow with the number of files. A
    batch is a fixed number of consecutive files, including unreadable ones, so that the same files at the same batch
    size give bit-identical results.

    Args:
        predictor: The predictor.
        pictures: The files; read on demand.
        top_k: Maximum number of labels per picture.
        batch_size: Images per batch, by default the predictor's usual number; limited by its ``largest_batch``.
        on_prediction: Called with each readable image and its prediction.
    """
    batch_size = batch_size or predictor.usual_batch
    batch_size = min(batch_size, predictor.largest_batch or batch_size)
    threads = available_cores()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="decoder")
    waiting: deque[tuple[Path, Future[Prepared]]] = deque()
    source = iter(pictures)
    try:
        while True:
            for picture in islice(source, 2 * batch_size + threads - len(waiting)):
                waiting.append((picture.path, pool.submit(lambda each: predictor.prepare(each.read()), picture)))
                if len(waiting) >= 4 * threads:  # members of a tar are in memory until they are decoded
                    wait([waiting[-4 * threads][1]])
            if not waiting:
                return
            batch = [waiting.popleft() for _ in range(min(batch_size, len(waiting)))]
            yield from _predict_batch(predictor, batch, top_k, on_prediction)
            batch.clear()
    finally:
        pool.shutdown(cancel_futures=True)


def _predict_batch(
    predictor: Predictor,
    batch: Iterable[tuple[Path, Future[Prepared]]],
    top_k: int,
    on_prediction: Seen | None,
) -> Iterator[Answer]:
    prepared: list[Prepared] = []
    outcomes: list[tuple[Path, str | None]] = []
    for path, decoding in batch:
        try:
            prepared.append(decoding.result())
            outcomes.append((path, None))
        except BrokenImageError as error:
            outcomes.append((path, error.reason))
    answers = iter(zip(prepared, predictor.answer(prepared, top_k), strict=True) if prepared else ())
    for path, reason in outcomes:
        if reason is not None:
            yield predictor.unreadable(path, reason)
            continue
        image, answer = next(answers)
        answer = replace(answer, path=path)
        if on_prediction is not None:
            on_prediction(image, answer)
        yield answer
