"""Evaluate weights exactly over any number of processes: each sample once, sums and counts, one reduction.

Along the pass, the mean and spread of the inputs, the confusion matrix and example predictions are collected.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from paceline.data.batch import Batch, BrokenSample, Nested, tensors_in
from paceline.data.pipeline import Pipeline
from paceline.data.random_draws import uniforms
from paceline.distributed.collectives import Collectives
from paceline.distributed.watchdog import Heartbeat
from paceline.escaping import utf8
from paceline.metrics.accumulator import Accumulator, Collector, DetailedCollector, Rows
from paceline.metrics.answers import HOW_CHOSEN, Candidate, Confusion, Examples, as_png, choose
from paceline.metrics.confusion import MOST_CLASSES, Reliability, Triples, confusion_document, merged
from paceline.metrics.named import NamedMetrics
from paceline.records.run_directory import RunDirectory, encode_json, write_text
from paceline.tasks.task import Model, Task
from paceline.trainer.precision import Precision
from paceline.world import World

# The last bits are those of how the samples were shared out.
_DIGITS = 6


class InputStatistics:
    """Counts and sums of all floating-point numbers of the batches, kept on the device; tokens are no such numbers."""

    def __init__(self) -> None:
        self._sums: list[tuple[int, torch.Tensor]] = []

    def add(self, inputs: Nested) -> None:
        """Take a batch's inputs. No host-device synchronisation."""
        for tensor in tensors_in(inputs):
            if tensor.is_floating_point() and tensor.layout is torch.strided and tensor.numel():
                self._sums.append((tensor.numel(), _sums(tensor)))

    def rows(self) -> Rows:
        """Count, sum and sum of squares of each tensor; waits for the device."""
        return [(count, *sums.tolist()) for count, sums in self._sums]


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Sum and sum of squares, of each sample in fast single precision, and over samples in double where there is it.

    So they hardly depend on which samples are in a batch.
    """
    samples = (tensor.unsqueeze(-1) if tensor.ndim < 2 else tensor).to(torch.float32)
    rest = tuple(range(1, samples.ndim)) or (0,)
    totals = samples.sum(dim=rest)
    lengths = torch.linalg.vector_norm(samples, dim=rest)
    precise = torch.float32 if tensor.device.type == "mps" else torch.float64
    return torch.stack((totals.to(precise).sum(), lengths.to(precise).square().sum()))


def mean_and_spread(parts: Iterable[Rows]) -> dict[str, float]:
    """``input_mean`` and ``input_std`` of what all processes took together, each number once.

    Nothing is said where there are none, or where one is infinite or no number.
    """
    rows = list(chain.from_iterable(parts))
    if not rows or not all(map(math.isfinite, chain.from_iterable(rows))):
        return {}
    count, total, squares = (math.fsum(column) for column in zip(*rows, strict=True))
    mean = total / count
    spread = math.sqrt(max(0.0, squares / count - mean**2))
    return {"input_mean": round(mean, _DIGITS), "input_std": round(spread, _DIGITS)}


@dataclass(frozen=True, kw_only=True)
class Keep:
    """What is to be kept of a pass.

    Attributes:
        weights: Of which set of weights; empty for none.
        examples: Samples to show at most.
    """

    weights: str = ""
    examples: int = 0


@dataclass(frozen=True)
class Part:
    """One process's results: numbers, no pictures yet."""

    counts: tuple[Triples, Reliability]
    candidates: tuple[Candidate, ...] = ()
    classes: int = 0
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What was kept.

    Attributes:
        confusion: The confusion matrix; None where there are more than 1000 classes.
        examples: What the file of examples says; None if none were requested.
        details: What a collector says of all answers; None if none does.
        failure: Which method failed, and with what; or an empty string.
    """

    confusion: dict[str, Any] | None = None
    examples: dict[str, Any] | None = None
    details: dict[str, Any] | None = None
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
        answers = None
        with self.looking("answers"):
            answers = self._task.answers(answered, batch)
            if answers is not None and answers.classes <= MOST_CLASSES:
                self._confusion.add(answers)
        if answers is not None and self._keep.examples:
            with self.looking("pictures"):
                draws = uniforms(0, 0, batch.ids, 1)[:, 0]
                self._examples.add(batch.ids, draws, batch.inputs, answers)

    def part(self) -> Part:
        """This process's results; waits for the device."""
        with self.looking("answers"):
            if not self._failure:
                candidates = tuple(self._examples.candidates())
                return Part(self._confusion.counts(), candidates, self._confusion.classes)
        return Part(Confusion().counts(), failure=self._failure)

    @contextmanager
    def looking(self, method: str) -> Iterator[None]:
        """A method of the task's own runs inside: an evaluation must not fail of being looked at."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever it raises
            self.give_up(method, error)

    def give_up(self, method: str, error: Exception) -> None:
        """Keep nothing of this pass."""
        self._failure = self._failure or _failed(self._task, method, error)

    def together(self, parts: Sequence[Part], collectives: Collectives, pipeline: Pipeline) -> Kept:
        """Put the parts of all processes together; a collective if pictures are kept."""
        if failure := next((each.failure for each in parts if each.failure), ""):
            return Kept(failure=failure)
        classes = max(each.classes for each in parts)
        chosen = choose((each for part in parts for each in part.candidates), self._keep.examples)
        shown: dict[int, dict[str, Any]] = {}
        if chosen:
            own: dict[int, dict[str, Any]] = {}
            # A process that fails here must not leave the others waiting.
            with self.looking("pictures"):
                mine = set(parts[collectives.world.rank].candidates)
                own = {each.sample: self._as_shown(each, pipeline) for each in chosen if each in mine}
            for failure, entries in collectives.gather_on_first((self._failure, own)):
                self._failure = self._failure or failure
                shown |= entries
        with self.looking("description"):
            names = [str(each) for each in self._task.description().get("class_names", range(classes))]
            if len(names) < classes:
                raise ValueError(f"the task names {len(names)} classes, but predicts {classes}")
            triples, reliability = zip(*(each.counts for each in parts), strict=True)
            matrix = confusion_document(merged(triples), reliability, names) if classes else None
            examples = [shown[each.sample] for each in chosen if each.sample in shown]
            document = {"classes": names, "chosen": HOW_CHOSEN, "examples": examples} if chosen else None
            if not self._failure:
                return Kept(confusion=matrix, examples=document)
        return Kept(failure=self._failure)

    def _as_shown(self, candidate: Candidate, pipeline: Pipeline) -> dict[str, Any]:
        fields = asdict(candidate)
        del fields["score"], fields["is_mistake"]
        pixels = self._examples.picture(candidate)
        picture = {} if pixels is None else {"image": as_png(pixels)}
        # A file's name may hold bytes that are no text.
        return {**picture, **fields, "name": utf8(pipeline.sample_name(candidate.sample, training=False))}


def _failed(owner: object, method: str, error: Exception) -> str:
    return f"{type(owner).__name__}.{method} failed with {type(error).__name__}: {error}"


def write_kept(directory: RunDirectory, kept: Kept, where: dict[str, Any]) -> None:
    """Write the files of an evaluation, on the first rank; files that a newer one did not keep are removed.

    Args:
        directory: The run's.
        kept: What was kept.
        where: At which step, and of which weights: stands in each file.

    Raises:
        RunDirectoryError: If the disk fails.
    """
    documents = (kept.confusion, kept.examples, kept.details)
    for path, document in zip(directory.evaluation_files, documents, strict=True):
        if document is None:
            path.unlink(missing_ok=True)
            continue
        path.parent.mkdir(exist_ok=True)
        write_text(path, encode_json({**where, **document}) + "\n")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was measured.

    Attributes:
        samples: Samples scored.
        results: Metric values by set of weights.
        broken: Samples that could not be read, over all processes.
        kept: What was kept of the answers; with pictures on the first process only.
        inputs: Mean and spread of the numbers that the networks were given; empty where there were none, tokens say.
    """

    samples: int
    results: dict[str, dict[str, float]]
    broken: tuple[BrokenSample, ...]
    kept: Kept = field(default_factory=Kept)
    inputs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Share:
    """What one process brings together with the others: of each set of weights, and of what was read."""

    rows: dict[str, Rows]
    collected: dict[str, tuple[Any, ...]]
    broken: tuple[BrokenSample, ...]
    kept: Part
    inputs: Rows


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Scores sets of weights on the evaluation samples; leaves no trace in the models.

    Attributes:
        heartbeat: Told how far it is.
        rounds: Forward passes of each process, if all must make as many as the others: the weights are spread over
            them, and gathered in each.
        keep: What is to be kept of the answers.
    """

    task: Task
    pipeline: Pipeline
    precision: Precision
    collectives: Collectives
    device: torch.device
    batch_size: int
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    rounds: int | None = None
    keep: Keep = field(default_factory=Keep)

    def __call__(
        self, models: Mapping[str, nn.Module], observe: Callable[[str, Batch, dict[str, Nested]], None] | None = None
    ) -> Evaluation:
        """Score every set of weights in one pass over the data.

        Args:
            models: Networks by the name of their weights.
            observe: Called with (weights, batch, predictions) for each batch, e.g. to write predictions.
        """
        sums = {name: Accumulator(self.task.metrics, self.device) for name in models}
        more = self.task.recipe.evaluate.metrics
        collected = {name: (*self.task.collectors(), NamedMetrics(more)) for name in models}
        answers, inputs = KeptAnswers(self.task, self.keep), InputStatistics()
        broken: list[BrokenSample] = []
        rounds, last = 0, None
        # Weights that are spread are other tensors in each pass.
        casts = self.precision.keeping_casts() if self.rounds is None else nullcontext()
        with evaluation_mode(models.values()), torch.no_grad(), casts:
            for batch in self.pipeline.evaluation_batches(self.batch_size, self.collectives.world):
                rounds += 1
                broken += batch.broken
                last = batch
                if len(batch.ids) == 0:
                    self._go_along(models, batch)
                    continue
                inputs.add(batch.inputs)
                for name, model in models.items():
                    asked = self.task.evaluated(model)
                    once = _OneForward(asked)
                    is_looked_at = observe is not None or name == answers.weights
                    with self.precision.autocast():
                        scores = self._score(once if is_looked_at else asked, asked, batch, answers)
                        sums[name].add(scores)
                        for each in collected[name]:
                            each.add(scores, batch.ids)
                        if name == answers.weights:
                            answers.add(once.again, batch)
                        if observe is not None:
                            observe(name, batch, self.task.predict(once, batch))
                self.heartbeat.tick()
            for _ in range(rounds, self.rounds or 0):
                last = last or next(iter(self.pipeline.evaluation_batches(self.batch_size, World())))
                self._go_along(models, last)
        self.heartbeat.enter("gathering scores")
        # One collective for all sets of weights; the first moment the host waits for the device.
        mine = _Share(
            rows={name: each.rows() for name, each in sums.items()},
            collected={name: tuple(each.part() for each in group) for name, group in collected.items()},
            broken=tuple(broken),
            kept=answers.part(),
            inputs=inputs.rows(),
        )
        parts = self.collectives.gather(mine)
        counted = {name: sums[name].results([row for part in parts for row in part.rows[name]]) for name in sums}
        results = {name: dict(values) for name, (_, values) in counted.items()}
        for name, group in collected.items():
            for index, each in enumerate(group):
                results[name] |= each.results([part.collected[name][index] for part in parts])
        kept = answers.together([part.kept for part in parts], self.collectives, self.pipeline)
        return Evaluation(
            samples=next(count for count, _ in counted.values()),
            results=results,
            broken=tuple(sorted((each for part in parts for each in part.broken), key=lambda each: each.id)),
            kept=self._with_details(kept, collected.get(self.keep.weights, ()), parts),
            inputs=mean_and_spread(part.inputs for part in parts),
        )

    def _with_details(self, kept: Kept, collectors: Sequence[Collector], parts: Sequence[_Share]) -> Kept:
        for index, each in enumerate(collectors):
            if isinstance(each, DetailedCollector):
                try:
                    collected = [part.collected[self.keep.weights][index] for part in parts]
                    return replace(kept, details=each.details(collected))
                except Exception as error:  # noqa: BLE001  # a task's own code, and for the report only
                    return replace(kept, failure=kept.failure or _failed(each, "details", error))
        return kept

    def _score(self, looked_at: Any, asked: Model, batch: Batch, answers: KeptAnswers) -> dict[str, Any]:
        """Score a batch; a task that does more with the network than call it is given the network itself."""
        try:
            return self.task.score(looked_at, batch)
        except Exception as error:
            # Where the weights are spread, another pass would wait for the others.
            if looked_at is asked or answers.weights == "" or self.rounds is not None:
                raise
            scores = self.task.score(asked, batch)
            answers.give_up("score", error)
            return scores

    def _go_along(self, models: Mapping[str, nn.Module], batch: Batch) -> None:
        """Where weights are spread over processes: bring this one's parts to the forward passes of the others."""
        if self.rounds is not None:
            for model in models.values():
                with self.precision.autocast():
                    self.task.score(self.task.evaluated(model), batch)


class _OneForward:
    """A network whose last answer is kept: predicting what was just scored takes no second forward pass.

    Only the very same tensors give the kept answer, and only if nobody has written into it since.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._arguments: tuple[Any, ...] = ()
        self._answer: torch.Tensor | None = None
        self._writes = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self._is_kept(arguments) and not options:
            return self._answer
        answer = self._model(*arguments, **options)
        plain = isinstance(answer, torch.Tensor) and not answer.is_inference() and not options
        self._arguments, self._answer = arguments, answer if plain else None
        self._writes = _writes(answer) if plain else 0
        return answer

    def again(self, *arguments: Any) -> torch.Tensor:
        """The kept answer; where weights are spread over processes, another pass would need the others.

        Raises:
            ValueError: If there is none to these arguments.
        """
        if self._answer is None or not self._is_kept(arguments):
            raise ValueError("the task's `answers` calls the network differently than `score`")
        return self._answer

    def __getattr__(self, name: str) -> Any:
        # Of a copy that is being made, which has nothing yet, Python asks for its own names.
        if name == "_model" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._model, name)

    def _is_kept(self, arguments: tuple[Any, ...]) -> bool:
        if self._answer is None or len(arguments) != len(self._arguments):
            return False
        return all(map(operator.is_, arguments, self._arguments)) and _writes(self._answer) == self._writes


def _writes(tensor: torch.Tensor) -> int:
    return tensor._version  # noqa: SLF001  # what autograd counts has no other name


@contextmanager
def evaluation_mode(models: Any) -> Iterator[None]:
    """Switch every module to evaluation, and each back to the mode it had, also after an error."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
