"""The task of a batch-size trial: the recipe's own, on a few repeated samples.

A trial is a real run in separate processes, `paceline train … task=paceline_advisor.memory.batch_trial:task`, so that
everything that uses memory in a run uses it here. Only two things differ: the task reads few samples, and the network
does not learn.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from typing import cast

import torch

from paceline.data.batch import Batch, select_rows, tensors_in
from paceline.data.order import StepGeometry, evaluation_slices
from paceline.data.pipeline import Pipeline, Placement
from paceline.data.slices import SampleSlice
from paceline.host.world import World
from paceline.plan import DataFacts
from paceline.recipe.schema import Recipe
from paceline.tasks.task import Task, build_task
from paceline.trainer.fake_batch import fixed_batch, largest_micro_batch, one_batch
from paceline_advisor import frozen
from paceline_advisor.forwarding import PassesOn, TaskStandIn, forwarded

REFERENCE = "paceline_advisor.memory.batch_trial:task"
CONFIG_VARIABLE = "PACELINE_BATCH_TRIAL"
_FEW = 2
_LOOKED_AT = 16  # number of held-out samples of which the largest is used; the first of equal ones


@frozen
class TrialConfig:
    """Settings of a trial.

    Attributes:
        task: The recipe's task.
        samples: Number of training samples to provide.
        evaluation_samples: Number of held-out samples, if any.
        memory: Bytes of its GPU that each process may use; None for all of it.
    """

    task: str
    samples: int
    evaluation_samples: int
    memory: int | None

    def to_variable(self) -> dict[str, str]:
        """Return the settings as an environment variable."""
        return {CONFIG_VARIABLE: json.dumps(asdict(self))}


def task(recipe: Recipe) -> Task:
    """Return the task of a trial, from its settings in the environment."""
    config = TrialConfig(**json.loads(os.environ[CONFIG_VARIABLE]))
    return TrialTask(build_task(replace(recipe, task=config.task)), config)


class TrialTask(TaskStandIn):
    """A task with as many samples as a trial needs: a few repeated ones, each with weight 1.

    Args:
        task: The recipe's own.
        config: Settings of the trial.
    """

    def __init__(self, task: Task, config: TrialConfig) -> None:
        super().__init__(task)
        self.is_own, self._config = task.is_own, config

    def data_facts(self, world: World) -> DataFacts:
        """Return the task's facts, with other numbers of samples."""
        facts = self.task.data_facts(world)
        self.metrics = self.task.metrics
        scored = self._config.evaluation_samples if facts.evaluation_samples else 0
        return replace(facts, train_samples=self._config.samples, evaluation_samples=scored)

    description, build_model, check_network = map(forwarded, ("description", "build_model", "check_network"))
    loss, score, collectors, evaluated = map(forwarded, ("loss", "score", "collectors", "evaluated"))

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Delegate to the task, after reading a few of its samples."""
        return cast(Pipeline, _Repeated(self.task, placement, self._config))

    def prepare_training(self, placement: Placement) -> None:
        """Delegate to the task, after limiting how much of a GPU may be used."""
        self.task.prepare_training(placement)
        if self._config.memory is not None and placement.device.type == "cuda":
            whole = torch.cuda.get_device_properties(placement.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._config.memory / whole), placement.device)


class _Repeated(PassesOn):
    """A pipeline whose batches repeat a few samples; the next batch is prepared while the current one is in use."""

    def __init__(self, task: Task, placement: Placement, config: TrialConfig) -> None:
        super().__init__(task.open_pipeline(placement))
        self._task, self._config = task, config

    def train_batches(self, geometry: StepGeometry, first: int, last: int, world: World) -> Iterator[Batch]:
        # Padded to the same size, a tall and a wide picture take more memory than two of the largest pictures.
        largest = largest_micro_batch(self._task, geometry.largest_part, geometry.global_batch_size)
        if largest is None:
            few = one_batch(geometry.seed, _FEW, self._task.sample_costs())
        else:
            few = fixed_batch(geometry.seed, largest[:_FEW])
        example = next(iter(self._inner.train_batches(few, 0, 1, World())))
        ready: Batch | None = None
        for part in geometry.stream(first, last, world):
            current, ready = ready, _repeated(example, part)
            if current is not None:
                yield current
        if ready is not None:
            yield ready

    def evaluation_batches(self, batch_size: int, world: World) -> Iterator[Batch]:
        few = islice(self._inner.evaluation_batches(1, World()), _LOOKED_AT)
        example = max(few, key=lambda each: sum(tensor.numel() for tensor in tensors_in(each.inputs)))
        for part in evaluation_slices(self._config.evaluation_samples, batch_size, world):
            yield _repeated(example, part)

    def sample_name(self, sample_id: int, *, training: bool) -> str:
        return f"sample {sample_id} of the trial"


def _repeated(example: Batch, part: SampleSlice) -> Batch:
    rows = len(example.ids)
    rows_of = [index % rows for index in range(len(part.ids))]
    inputs, targets = (select_rows(each, rows_of, size=rows) for each in (example.inputs, example.targets))
    return replace(example, inputs=inputs, targets=targets, ids=part.ids, slice=part, broken=())
