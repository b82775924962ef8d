"""How good are the weights? Exact over any number of processes: each sample once, sums and counts, one reduction."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.data.batch import Batch, BrokenSample, Nested
from paceline.data.pipeline import Pipeline
from paceline.distributed.collectives import Collectives
from paceline.distributed.sightings import Pulse
from paceline.metrics.accumulator import Accumulator, Rows
from paceline.tasks.task import Model, Task
from paceline.trainer.inputs import InputStatistics, mean_and_spread
from paceline.trainer.kept_answers import Keep, Kept, KeptAnswers, Part
from paceline.trainer.nonfinite import check_results
from paceline.trainer.precision import Precision
from paceline.world import World

if TYPE_CHECKING:
    from paceline.trainer.run import Run


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
        pulse: Told how far it is.
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
    pulse: Pulse = field(default_factory=Pulse)
    rounds: int | None = None
    keep: Keep = field(default_factory=Keep)

    def __call__(
        self,
        models: Mapping[str, nn.Module],
        observe: Callable[[str, Batch, dict[str, Nested]], None] | None = None,
    ) -> Evaluation:
        """Score every set of weights in one pass over the data.

        Args:
            models: Networks by the name of their weights.
            observe: Called with (weights, batch, predictions) for each batch, e.g. to write predictions.
        """
        sums = {name: Accumulator(self.task.metrics, self.device) for name in models}
        collected = {name: self.task.collectors() for name in models}
        answers, inputs = KeptAnswers(self.task, self.keep), InputStatistics()
        broken: list[BrokenSample] = []
        rounds, last = 0, None
        # Weights that are spread are other tensors in each pass.
        casts = self.precision.keeping_casts() if self.rounds is None else nullcontext()
        with _evaluation_mode(models.values()), torch.no_grad(), casts:
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
                self.pulse.tick()
            for _ in range(rounds, self.rounds or 0):
                last = last or next(iter(self.pipeline.evaluation_batches(self.batch_size, World())))
                self._go_along(models, last)
        self.pulse.enter("gathering of scores")
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
        return Evaluation(
            samples=next(count for count, _ in counted.values()),
            results=results,
            broken=tuple(sorted((each for part in parts for each in part.broken), key=lambda each: each.id)),
            kept=answers.together([part.kept for part in parts], self.collectives, self.pipeline),
            inputs=mean_and_spread(part.inputs for part in parts),
        )

    def _score(self, looked_at: Any, asked: Model, batch: Batch, answers: KeptAnswers) -> dict[str, Any]:
        """Score a batch; a task that does more with the network than call it is given the network itself."""
        try:
            return self.task.score(looked_at, batch)
        except Exception as error:
            # Where the weights are spread, another pass would wait for the others.
            if looked_at is asked or answers.weights == "" or self.rounds is not None:
                raise
            scores = self.task.score(asked, batch)
            answers.give_up(error)
            return scores

    def _go_along(self, models: Mapping[str, nn.Module], batch: Batch) -> None:
        """Where weights are spread over processes: bring this one's parts to the forward passes of the others."""
        if self.rounds is not None:
            for model in models.values():
                with self.precision.autocast():
                    self.task.score(self.task.evaluated(model), batch)


def evaluate_run(run: Run) -> None:
    """Evaluate a run's weights where it stands, and record the result."""
    if run.plan.evaluation_samples == 0:
        return
    with run.clock.paused():
        started = time.perf_counter()
        run.strategy.sync_buffers(list(run.models().values()))
        evaluation = run.evaluator(run.scored)
        run.progress.take_results(evaluation.results, run.best_metric())
        run.recorder.write_evaluation(run, evaluation, seconds=time.perf_counter() - started)
        check_results(run, evaluation.results)


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
        if not self._is_kept(arguments):
            raise ValueError("the task's `answers` asks the network for something else than `score`")
        assert self._answer is not None
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
def _evaluation_mode(models: Any) -> Iterator[None]:
    """Switch every module to evaluation, and each back to the mode it had, also after an error."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
