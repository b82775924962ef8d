"""Evaluate weights exactly on any number of processes: score each sample once, keep sums and counts, reduce once.

The same pass collects the mean and spread of the inputs, the confusion matrix and example predictions.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.data.batch import Batch, BrokenSample, Nested, tensors_in
from paceline.data.pipeline import Pipeline
from paceline.data.random_draws import uniforms
from paceline.distributed.collectives import Collectives
from paceline.distributed.strategy import Heartbeat
from paceline.host.world import World
from paceline.learning.copies import NO_PRINTS, FingerprintCollector, Prints
from paceline.learning.losses import LossWatcher, Parts, described, merged
from paceline.metrics.accumulator import Accumulator, Collector, DetailedCollector, Rows
from paceline.metrics.answers import HOW_CHOSEN, Candidate, Confusion, Examples, as_png, choose
from paceline.metrics.confusion import MOST_CLASSES, Reliability, Triples, confusion_document, merge_counts
from paceline.metrics.named import NamedMetrics
from paceline.models.precision import Precision
from paceline.parsing.plain_text import utf8
from paceline.records.run_directory import RunDirectory, encode_json, write_text
from paceline.tasks.task import Model, Task

# The last bits depend on how the samples were divided among processes.
_DIGITS = 6


class InputStatistics:
    """Accumulate counts and sums of all floating-point inputs on the device; token ids are left out."""

    def __init__(self) -> None:
        self._sums: list[tuple[int, torch.Tensor]] = []

    def add(self, inputs: Nested) -> None:
        """Add a batch's inputs, without host-device synchronisation."""
        for tensor in tensors_in(inputs):
            if tensor.is_floating_point() and tensor.layout is torch.strided and tensor.numel():
                self._sums.append((tensor.numel(), _sums(tensor)))

    def rows(self) -> Rows:
        """Return the count, sum and sum of squares of each tensor; waits for the device."""
        return [(count, *sums.tolist()) for count, sums in self._sums]


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum and sum of squares: single precision per sample, double precision over samples if available.

    The result therefore hardly depends on which samples share a batch.
    """
    samples = (tensor.unsqueeze(-1) if tensor.ndim < 2 else tensor).to(torch.float32)
    sample_dims = tuple(range(1, samples.ndim)) or (0,)
    totals = samples.sum(dim=sample_dims)
    lengths = torch.linalg.vector_norm(samples, dim=sample_dims)
    precise = torch.float32 if tensor.device.type == "mps" else torch.float64
    return torch.stack((totals.to(precise).sum(), lengths.to(precise).square().sum()))


def mean_and_std(parts: Iterable[Rows]) -> dict[str, float]:
    """Return ``input_mean`` and ``input_std`` over all processes, with each number counted once.

    The result is empty if there are no such numbers, or if one is infinite or nan.
    """
    rows = list(chain.from_iterable(parts))
    if not rows or not all(map(math.isfinite, chain.from_iterable(rows))):
        return {}
    count, total, squares = (math.fsum(column) for column in zip(*rows, strict=True))
    mean = total / count
    std = math.sqrt(max(0.0, squares / count - mean**2))
    return {"input_mean": round(mean, _DIGITS), "input_std": round(std, _DIGITS)}


@dataclass(frozen=True, kw_only=True)
class KeepOptions:
    """What to keep of an evaluation pass.

    Attributes:
        weights: The set of weights whose answers are kept; empty for none.
        examples: The largest number of samples to show.
    """

    weights: str = ""
    examples: int = 0


@dataclass(frozen=True)
class RankAnswers:
    """One process's results: numbers only, without pictures."""

    counts: tuple[Triples, Reliability]
    candidates: tuple[Candidate, ...] = ()
    classes: int = 0
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Artifacts:
    """What an evaluation pass kept.

    Attributes:
        confusion: The confusion matrix; None if there are more than 1000 classes.
        examples: Content of the examples file; None if no examples were requested.
        details: A collector's result over all answers; None without a collector.
        failure: The method that failed and its error; otherwise empty.
    """

    confusion: dict[str, Any] | None = None
    examples: dict[str, Any] | None = None
    details: dict[str, Any] | None = None
    failure: str = ""


class AnswerCollector:
    """Collects what is kept of one process's evaluation pass."""

    def __init__(self, task: Task, keep: KeepOptions) -> None:
        self._task = task
        # Skip all of this for a task without answers.
        self._keep = KeepOptions() if getattr(task.answers, "__func__", None) is Task.answers else keep
        self._confusion = Confusion()
        self._examples = Examples(self._keep.examples, task.pictures)
        self._failure = ""

    @property
    def weights(self) -> str:
        """Return the set of weights whose answers are kept; empty after a failure."""
        return "" if self._failure else self._keep.weights

    def add(self, answered: Model, batch: Batch) -> None:
        """Record the answers to one batch.

        Args:
            answered: Returns the answer that was scored, and only that one.
            batch: The scored batch.
        """
        answers = None
        with self.guarded("answers"):
            answers = self._task.answers(answered, batch)
            if answers is not None and answers.classes <= MOST_CLASSES:
                self._confusion.add(answers)
        if answers is not None and self._keep.examples:
            with self.guarded("pictures"):
                self._examples.add(batch.ids, uniforms(0, 0, batch.ids, 1)[:, 0], batch.inputs, answers)

    def part(self) -> RankAnswers:
        """Return this process's results; waits for the device."""
        with self.guarded("answers"):
            if not self._failure:
                candidates = tuple(self._examples.candidates())
                return RankAnswers(self._confusion.counts(), candidates, self._confusion.classes)
        return RankAnswers(Confusion().counts(), failure=self._failure)

    @contextmanager
    def guarded(self, method: str) -> Iterator[None]:
        """Run a method of the task; an error in it must not fail the evaluation."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever it raises
            self.discard(method, error)

    def discard(self, method: str, error: Exception) -> None:
        """Discard everything kept of this pass."""
        self._failure = self._failure or _failure_message(self._task, method, error)

    def combine(self, parts: Sequence[RankAnswers], collectives: Collectives, pipeline: Pipeline) -> Artifacts:
        """Combine the results of all processes; a collective if pictures are kept."""
        if failure := next((each.failure for each in parts if each.failure), ""):
            return Artifacts(failure=failure)
        classes = max(each.classes for each in parts)
        chosen = choose((each for part in parts for each in part.candidates), self._keep.examples)
        entries_by_sample: dict[int, dict[str, Any]] = {}
        if chosen:
            local_entries: dict[int, dict[str, Any]] = {}
            # A process that fails here must not leave the others waiting.
            with self.guarded("pictures"):
                local = set(parts[collectives.world.rank].candidates)
                local_entries = {each.sample: self._example_entry(each, pipeline) for each in chosen if each in local}
            for failure, entries in collectives.gather_on_rank_zero((self._failure, local_entries)):
                self._failure = self._failure or failure
                entries_by_sample |= entries
        with self.guarded("description"):
            names = [str(each) for each in self._task.description().get("class_names", range(classes))]
            if len(names) < classes:
                raise ValueError(f"the task names {len(names)} classes, but predicts {classes}")
            triples, reliability = zip(*(each.counts for each in parts), strict=True)
            matrix = confusion_document(merge_counts(triples), reliability, names) if classes else None
            examples = [entries_by_sample[each.sample] for each in chosen if each.sample in entries_by_sample]
            document = {"classes": names, "chosen": HOW_CHOSEN, "examples": examples} if chosen else None
            if not self._failure:
                return Artifacts(confusion=matrix, examples=document)
        return Artifacts(failure=self._failure)

    def _example_entry(self, candidate: Candidate, pipeline: Pipeline) -> dict[str, Any]:
        fields = asdict(candidate)
        del fields["score"], fields["is_mistake"]
        pixels = self._examples.picture(candidate)
        picture = {} if pixels is None else {"image": as_png(pixels)}
        # A file name may hold bytes that are not valid text.
        return {**picture, **fields, "name": utf8(pipeline.sample_name(candidate.sample, training=False))}


def _failure_message(owner: object, method: str, error: Exception) -> str:
    return f"{type(owner).__name__}.{method} failed with {type(error).__name__}: {error}"


def write_artifacts(directory: RunDirectory, artifacts: Artifacts, context: dict[str, Any]) -> None:
    """Write the files of an evaluation, on the first rank; remove older files that this evaluation did not produce.

    Args:
        directory: The run directory.
        artifacts: What was kept.
        context: The step and the set of weights, which each file records.

    Raises:
        RunDirectoryError: If the disk fails.
    """
    documents = artifacts.confusion, artifacts.examples, artifacts.details
    for path, document in zip((directory.confusion, directory.examples, directory.details), documents, strict=True):
        if document is None:
            path.unlink(missing_ok=True)
            continue
        path.parent.mkdir(exist_ok=True)
        write_text(path, encode_json({**context, **document}) + "\n")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        samples: Samples scored.
        results: Metric values by set of weights.
        broken: Samples that could not be read, over all processes.
        artifacts: What was kept of the answers; pictures are on the first process only.
        inputs: Mean and spread of the networks' inputs; empty for inputs without floating-point numbers, such as
            tokens.
        losses: What each loss function was given, of the moving average where there is one.
        prints: Fingerprints of the inputs of all samples; empty where they tell nothing.
    """

    samples: int
    results: dict[str, dict[str, float]]
    broken: tuple[BrokenSample, ...]
    artifacts: Artifacts = field(default_factory=Artifacts)
    inputs: Mapping[str, float] = field(default_factory=dict)
    losses: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    prints: Prints = field(default_factory=lambda: NO_PRINTS)


@dataclass(frozen=True, kw_only=True)
class _RankScores:
    """One process's contribution: the sums of each set of weights, and what was read."""

    rows: dict[str, Rows]
    collected: dict[str, tuple[Any, ...]]
    broken: tuple[BrokenSample, ...]
    answers: RankAnswers
    inputs: Rows
    losses: Parts
    prints: Prints


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Scores sets of weights on the evaluation samples; leaves the models unchanged.

    Attributes:
        heartbeat: Receives the progress.
        rounds: Forward passes of each process if all must run the same number, because the weights are sharded and
            every pass gathers them.
        keep: What to keep of the answers.
    """

    task: Task
    pipeline: Pipeline
    precision: Precision
    collectives: Collectives
    device: torch.device
    batch_size: int
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    rounds: int | None = None
    keep: KeepOptions = field(default_factory=KeepOptions)

    def __call__(
        self, models: Mapping[str, nn.Module], observe: Callable[[str, Batch, dict[str, Nested]], None] | None = None
    ) -> Evaluation:
        """Score every set of weights in one pass over the data.

        Args:
            models: Networks by the name of their weights.
            observe: Called with (weights, batch, predictions) for each batch, e.g. to write predictions.
        """
        sums = {name: Accumulator(self.task.metrics, self.device) for name in models}
        named_metrics = self.task.recipe.evaluate.metrics
        collected = {name: (*self.task.collectors(), NamedMetrics(named_metrics)) for name in models}
        answers, inputs = AnswerCollector(self.task, self.keep), InputStatistics()
        prints = FingerprintCollector()
        watcher, watched = LossWatcher(), "ema" if "ema" in models else next(iter(models))
        broken: list[BrokenSample] = []
        rounds, last = 0, None
        # Sharded weights are different tensors in each pass.
        casts = self.precision.keeping_casts() if self.rounds is None else nullcontext()
        with evaluation_mode(models.values()), torch.no_grad(), casts:
            for batch in self.pipeline.evaluation_batches(self.batch_size, self.collectives.world):
                rounds += 1
                broken += batch.broken
                last = batch
                if len(batch.ids) == 0:
                    self._join_forward_passes(models, batch)
                    continue
                inputs.add(batch.inputs)
                prints.add(tensors_in(batch.inputs))
                for name, model in models.items():
                    network = self.task.evaluated(self.precision.applied_to(model))
                    cached = _CachedForward(network)
                    is_reused = observe is not None or name == answers.weights
                    scored = cached if is_reused else network
                    with watcher.around(model) if name == watched else nullcontext():
                        scores = self._score(scored, network, batch, answers)
                    sums[name].add(scores)
                    for each in collected[name]:
                        each.add(scores, batch.ids)
                    if name == answers.weights:
                        answers.add(cached.cached_answer, batch)
                    if observe is not None:
                        observe(name, batch, self.task.predict(cached, batch))
                self.heartbeat.tick()
            for _ in range(rounds, self.rounds or 0):
                last = last or next(iter(self.pipeline.evaluation_batches(self.batch_size, World())))
                self._join_forward_passes(models, last)
        self.heartbeat.enter("gathering scores")
        # One collective for all sets of weights; the first time the host waits for the device.
        local = _RankScores(
            rows={name: each.rows() for name, each in sums.items()},
            collected={name: tuple(each.part() for each in group) for name, group in collected.items()},
            broken=tuple(broken),
            answers=answers.part(),
            inputs=inputs.rows(),
            losses=watcher.drain(),
            prints=prints.prints(),
        )
        parts = self.collectives.gather(local)
        totals = {name: sums[name].results([row for part in parts for row in part.rows[name]]) for name in sums}
        results = {name: dict(values) for name, (_, values) in totals.items()}
        for name, group in collected.items():
            for index, each in enumerate(group):
                results[name] |= each.results([part.collected[name][index] for part in parts])
        artifacts = answers.combine([part.answers for part in parts], self.collectives, self.pipeline)
        return Evaluation(
            samples=next(count for count, _ in totals.values()),
            results=results,
            broken=tuple(sorted((each for part in parts for each in part.broken), key=lambda each: each.id)),
            artifacts=self._with_details(artifacts, collected.get(self.keep.weights, ()), parts),
            inputs=mean_and_std(part.inputs for part in parts),
            losses=described(merged([part.losses for part in parts])),
            prints=np.concatenate([part.prints for part in parts]),
        )

    def _with_details(
        self, artifacts: Artifacts, collectors: Sequence[Collector], parts: Sequence[_RankScores]
    ) -> Artifacts:
        for index, each in enumerate(collectors):
            if isinstance(each, DetailedCollector):
                try:
                    collected = [part.collected[self.keep.weights][index] for part in parts]
                    return replace(artifacts, details=each.details(collected))
                except Exception as error:  # noqa: BLE001  # a task's own code, and for the report only
                    return replace(artifacts, failure=artifacts.failure or _failure_message(each, "details", error))
        return artifacts

    def _score(self, model: Any, network: Model, batch: Batch, answers: AnswerCollector) -> dict[str, Any]:
        """Score a batch; a task that does more than call the network receives the network itself."""
        try:
            return self.task.score(model, batch)
        except Exception as error:
            # With sharded weights, another pass would wait for the other processes.
            if model is network or answers.weights == "" or self.rounds is not None:
                raise
            scores = self.task.score(network, batch)
            answers.discard("score", error)
            return scores

    def _join_forward_passes(self, models: Mapping[str, nn.Module], batch: Batch) -> None:
        """Contribute this process's shards of the weights to the other processes' forward passes."""
        if self.rounds is not None:
            for model in models.values():
                self.task.score(self.task.evaluated(self.precision.applied_to(model)), batch)


class _CachedForward:
    """A network that caches its last answer, so that predicting a scored batch needs no second forward pass.

    Only the identical tensors return the cached answer, and only if it was not modified since.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._given: tuple[Any, ...] = ()
        self._answer: torch.Tensor | None = None
        self._version = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        given = (*arguments, *options, *options.values())
        if self._is_cached(given):
            return self._answer
        answer = self._model(*arguments, **options)
        is_cacheable = isinstance(answer, torch.Tensor) and not answer.is_inference()
        self._given, self._answer = given, answer if is_cacheable else None
        self._version = _version_of(answer) if is_cacheable else 0
        return answer

    def cached_answer(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Return the cached answer; with sharded weights, another pass would need the other processes.

        Raises:
            ValueError: If no answer is cached for these arguments.
        """
        if self._answer is None or not self._is_cached((*arguments, *options, *options.values())):
            raise ValueError("the task's `answers` calls the network differently than `score`")
        return self._answer

    def __getattr__(self, name: str) -> Any:
        # While it is being copied, Python looks up special names on a copy that has no attributes yet.
        if name == "_model" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._model, name)

    def _is_cached(self, given: tuple[Any, ...]) -> bool:
        if self._answer is None or len(given) != len(self._given):
            return False
        return all(map(operator.is_, given, self._given)) and _version_of(self._answer) == self._version


def _version_of(tensor: torch.Tensor) -> int:
    return tensor._version  # noqa: SLF001  # what autograd counts has no other name


@contextmanager
def evaluation_mode(models: Any) -> Iterator[None]:
    """Switch every module to evaluation mode, and restore each one's mode afterwards, also after an error."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
