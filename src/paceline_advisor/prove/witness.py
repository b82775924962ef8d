"""The recipe's task, which computes the same and records what the trainer does with it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sized
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.data.balance import SampleLengths
from paceline.data.batch import Batch, Nested, Progress, chosen, copied, mapped, tensors_in
from paceline.data.boxes.pipeline import BoxSubset
from paceline.data.class_balance import SampleClasses
from paceline.data.image.source import SubsetSource
from paceline.data.order import StepGeometry
from paceline.data.pipeline import Pipeline, Placement
from paceline.data.slices import SampleWeights
from paceline.distributed.environment import read_launch
from paceline.metrics.accumulator import Collector
from paceline.metrics.answers import Answers
from paceline.plan import DataFacts
from paceline.recipe.schema import Recipe
from paceline.tasks.detection import Detection
from paceline.tasks.image_classification import ImageTask
from paceline.tasks.task import Model, Task, build_task
from paceline.world import World
from paceline_advisor.prove.notes import (
    ORDERS_VARIABLE,
    MicroBatchNote,
    Notes,
    Orders,
    ScoreNote,
    StepNote,
    content_of,
    copies_of,
    digest_of,
    tensors_of,
)

REFERENCE = "paceline_advisor.prove.witness:witness"


def witness(recipe: Recipe) -> Witness:
    """The witness in a process of a run that was started as a command; its orders are in the environment."""
    tree = json.loads(os.environ[ORDERS_VARIABLE])
    orders = Orders(**{**tree, "kept_steps": tuple(tree["kept_steps"])})
    return Witness(build_task(replace(recipe, task=orders.task)), orders)


class Witness(Task):
    """A task that passes everything on to another one, and notes what it is asked.

    Only three things differ from the task itself: there are fewer samples, the network computes in float64 if told
    so, and ``alter`` may change the network before it is used.

    Attributes:
        task: The task itself.
        batches: Training batches as they came, by step and logical rank.
    """

    def __init__(self, task: Task, orders: Orders, alter: Callable[[nn.Module], None] | None = None) -> None:
        super().__init__(task.recipe)
        self.task = task
        self.metrics, self.headline, self.unit = task.metrics, task.headline, task.unit
        self.notes = Notes()
        self.batches: dict[tuple[int, int], Batch] = {}
        self._orders = orders
        self._alter = alter
        self._world = read_launch(os.environ).world
        self._network: nn.Module | None = None
        self._evaluated: tuple[Model | None, Model | None] = (None, None)
        self._before: dict[str, Tensor] = {}
        self._average: dict[str, Tensor] = {}
        self._hooks: list[Any] = []
        self._has_called = False

    def data_facts(self, world: World) -> DataFacts:
        """The task's, with fewer samples."""
        _shorten(self.task, self._orders)
        facts = self.task.data_facts(world)
        self.metrics = self.task.metrics
        orders = self._orders
        return replace(facts, train_samples=orders.samples, evaluation_samples=orders.evaluation_samples)

    def sample_weights(self) -> SampleWeights | None:
        """The task's, of the samples that there are."""
        return _first(self.task.sample_weights(), self._orders.samples)

    def sample_classes(self) -> SampleClasses | None:
        """The task's, of the samples that there are."""
        return _first(self.task.sample_classes(), self._orders.samples)

    def sample_sets(self) -> SampleClasses | None:
        """The task's, of the samples that there are."""
        return _first(self.task.sample_sets(), self._orders.samples)

    def sample_lengths(self) -> SampleLengths | None:
        """The task's, of the samples that there are."""
        return _first_lengths(self.task.sample_lengths(), self._orders.samples)

    def evaluation_lengths(self) -> SampleLengths | None:
        """The task's, of the samples that are scored."""
        return _first_lengths(self.task.evaluation_lengths(), self._orders.evaluation_samples)

    def weights_by_class(self, key: str) -> tuple[float, ...]:
        """The task's, of all its samples."""
        return self.task.weights_by_class(key)

    def log(self, name: str, value: torch.Tensor | float) -> None:
        """Have the task log it."""
        self.task.log(name, value)

    def take_logged(self) -> dict[str, torch.Tensor]:
        """What the task has logged."""
        return self.task.take_logged()

    def sample_keys(self) -> NDArray[Any] | None:
        """The task's, of the samples that there are."""
        return _first(self.task.sample_keys(), self._orders.samples)

    def sample_costs(self) -> NDArray[Any] | None:
        """The task's, of the samples that there are."""
        return _first(self.task.sample_costs(), self._orders.samples)

    def sample_sizes(self) -> NDArray[Any] | None:
        """The task's, of the samples that there are."""
        return _first(self.task.sample_sizes(), self._orders.samples)

    def description(self) -> dict[str, Any]:
        """The task's."""
        return self.task.description()

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """The task's, with fewer samples to score."""
        return _FewerSamples(self.task.open_pipeline(placement), self._orders.evaluation_samples, self.finish)

    def build_model(self) -> nn.Module:
        """The task's network, watched."""
        network = self.task.build_model()
        self.task.check_network(network)  # as the task knows it, before it computes in other numbers
        if self._orders.double:
            network.double()
        if self._alter is not None:
            self._alter(network)

        # No method of this object: a copy of the network would copy it, and with it everything here.
        def on_forward(module: nn.Module, arguments: Any, options: Any) -> tuple[Any, Any]:
            if module is self._network and torch.is_grad_enabled() and self.notes.micro_batches:
                self._note_modes(module)
            return (_double(arguments), _double(options)) if self._orders.double else (arguments, options)

        network.register_forward_pre_hook(on_forward, with_kwargs=True)
        self._network = network
        return network

    def first_weights(self, network: nn.Module) -> None:
        """The task's."""
        self.task.first_weights(network)

    def begins_from_data(self, network: nn.Module) -> bool:
        """The task's."""
        return self.task.begins_from_data(network)

    def check_network(self, network: nn.Module) -> None:
        """Nothing: the task was asked when it had built it."""

    def prepare_training(self, placement: Placement) -> None:
        """The task's."""
        self.task.prepare_training(placement)

    def loss(self, model: Model, batch: Batch) -> Tensor:
        """The task's; noted, if it is to be learned from."""
        if torch.is_grad_enabled():
            self._note(batch)
        return self.task.loss(model, batch)

    def evaluated(self, model: Model) -> Model:
        """The task's; whose answers they are is remembered."""
        self._evaluated = (self.task.evaluated(model), model)
        return self._evaluated[0]

    def collectors(self) -> tuple[Collector, ...]:
        """The task's."""
        return self.task.collectors()

    def score(self, model: Model, batch: Batch) -> dict[str, Any]:
        """The task's, noted."""
        answering, network = self._evaluated
        # The network or its average, which are not compiled here.
        network = network if model is answering else model
        assert isinstance(network, nn.Module)
        name = "model" if network is self._network else "ema"
        position, scores = len(self.notes.steps), self.notes.scores
        if not any((each.position, each.weights) == (position, name) for each in scores):
            digest = digest_of(network.buffers())
            scores.append(ScoreNote(position=position, weights=name, buffers=digest, training=network.training))
        note = next(each for each in scores if (each.position, each.weights) == (position, name))
        note.ids += batch.ids.tolist()
        return self.task.score(model, batch)

    def predict(self, model: Model, batch: Batch) -> dict[str, Tensor]:
        """The task's."""
        return self.task.predict(model, batch)

    def answers(self, model: Model, batch: Batch) -> Answers | None:
        """The task's."""
        return self.task.answers(model, batch)

    def pictures(self, inputs: Nested) -> Tensor | None:
        """The task's."""
        return self.task.pictures(inputs)

    def finish(self) -> None:
        """Write the notes down; called when the pipeline is closed, after the last checkpoint."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        folder = Path(self._orders.folder)
        if self._network is not None:
            self.notes.final_buffers = digest_of(self._network.buffers())
        if self._average and self._world.is_first:
            torch.save(self._average, folder / "average.pt")
        path = folder / f"rank-{self._world.rank}.json"
        path.write_text(json.dumps(asdict(self.notes)), encoding="utf-8")

    def _note(self, batch: Batch) -> None:
        assert self._network is not None
        if not self.notes.micro_batches:
            self._begin(self._network)
        part, notes = batch.slice, self.notes.micro_batches
        notes.append(
            MicroBatchNote(
                step=part.step,
                logical_rank=part.logical_rank,
                ids=batch.ids.tolist(),
                contents=_contents(batch),
                phantom=part.phantom,
                generator=hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
                evaluating=_evaluating(self._network),
                broken=[each.id for each in batch.broken],
            )
        )
        self._has_called = False
        # Copies: a network may write into what it is given.
        kept = replace(batch, inputs=copied(batch.inputs), targets=copied(batch.targets))
        self.batches[part.step, part.logical_rank] = kept
        if self._keeps and not self._before:
            self._before = copies_of(self._network)

    def _note_modes(self, network: nn.Module) -> None:
        """What is in evaluation mode in any forward pass of the micro-batch; before the first, in none."""
        before = self.notes.micro_batches[-1].evaluating if self._has_called else []
        self.notes.micro_batches[-1].evaluating = sorted({*before, *_evaluating(network)})
        self._has_called = True

    @property
    def _keeps(self) -> bool:
        return self._world.is_first and self.notes.micro_batches[-1].step in self._orders.kept_steps

    def _begin(self, network: nn.Module) -> None:
        """Listen to the optimizer that moves the network."""
        ours = {id(each) for each in network.parameters()}

        def is_ours(optimizer: torch.optim.Optimizer) -> bool:
            return any(id(each) in ours for group in optimizer.param_groups for each in group["params"])

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if is_ours(optimizer):
                self._before_step(network, optimizer)

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if is_ours(optimizer) and self._average:
                self._update_average(network)

        if self.recipe.train.ema is not None:
            self._average = copies_of(network)
        self._hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def _before_step(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if not self.notes.steps:
            self.notes.micro_batches = _unrehearsed(self.notes.micro_batches)
        gradients = {name: each.grad for name, each in network.named_parameters() if each.requires_grad}
        if self._keeps:
            path = Path(self._orders.folder) / f"step-{self.notes.micro_batches[-1].step}.pt"
            torch.save({"weights": self._before, "gradients": gradients}, path)
        self._before = {}
        self.notes.steps.append(
            StepNote(
                rates=[(float(group["lr"]), float(group.get("lr_factor", 1.0))) for group in optimizer.param_groups],
                gradient=digest_of(each for each in gradients.values() if each is not None),
                without_gradient=[name for name, each in gradients.items() if each is None],
            )
        )

    @torch.no_grad()
    def _update_average(self, network: nn.Module) -> None:
        """The moving average as it is defined, from the weights after each optimizer step."""
        assert self.recipe.train.ema is not None
        step = len(self.notes.steps) - 1
        decay = min(self.recipe.train.ema, (1 + step) / (10 + step))
        for name, current in tensors_of(network).items():
            if current.is_floating_point():
                self._average[name] = decay * self._average[name] + (1 - decay) * current
            else:
                self._average[name] = current.clone()


def _unrehearsed(notes: list[MicroBatchNote]) -> list[MicroBatchNote]:
    """The first step's, without what was rehearsed before it and moved nothing: the largest of all, and its first."""
    first = notes[-1].step
    begin = len(notes) - 1
    while begin > 0 and notes[begin - 1].step == first and notes[begin - 1].logical_rank < notes[begin].logical_rank:
        begin -= 1
    return notes[begin:]


def _first(values: NDArray[Any] | None, samples: int) -> NDArray[Any] | None:
    return None if values is None else values[:samples]


def _first_lengths(lengths: SampleLengths | None, samples: int) -> SampleLengths | None:
    return None if lengths is None else replace(lengths, tokens=lengths.tokens[:samples])


class _FewerSamples:
    """A pipeline of which only the first samples are scored; whoever wants to know is told when it is closed."""

    def __init__(self, pipeline: Pipeline, evaluation_samples: int, closed: Callable[[], None]) -> None:
        self._pipeline = pipeline
        self._limit = evaluation_samples
        self._closed = closed

    def start(self, *, training: bool, evaluation: bool) -> None:
        self._pipeline.start(training=training, evaluation=evaluation)

    def load(self, report: Progress) -> None:
        self._pipeline.load(report)

    def train_batches(self, geometry: StepGeometry, first: int, last: int, world: World) -> Iterator[Batch]:
        return self._pipeline.train_batches(geometry, first, last, world)

    def evaluation_batches(self, batch_size: int, world: World) -> Iterator[Batch]:
        for batch in self._pipeline.evaluation_batches(batch_size, world):
            if not (batch.slice.ids < self._limit).any():
                return
            broken = tuple(each for each in batch.broken if each.id < self._limit)
            wanted = batch.ids < self._limit
            rows = wanted.nonzero()[0].tolist()
            inputs, targets = (chosen(each, rows, of=len(batch.ids)) for each in (batch.inputs, batch.targets))
            yield replace(batch, inputs=inputs, targets=targets, ids=batch.ids[wanted], broken=broken)

    def sample_name(self, sample_id: int, *, training: bool) -> str:
        return self._pipeline.sample_name(sample_id, training=training)

    def close(self) -> None:
        self._pipeline.close()
        self._closed()


def can_shorten(task: Task) -> bool:
    """Whether it is a task of images, whose data can be left out in part."""
    return isinstance(task, ImageTask | Detection)


def _shorten(task: Task, orders: Orders) -> None:
    """Leave a task of images only some of them, from all over its data: where they end is then where they ended."""
    if not isinstance(task, ImageTask | Detection):
        return
    train = _some(task.dataset.train, orders.samples)
    validation = _some(task.dataset.validation, orders.evaluation_samples)
    # In the place where the task itself keeps what it has opened.
    if isinstance(task, ImageTask):
        images = task.dataset
        shorter = SubsetSource(images.train, train), SubsetSource(images.validation, validation)
        vars(task)["dataset"] = replace(images, train=shorter[0], validation=shorter[1])
    else:
        boxes = task.dataset
        few = BoxSubset(boxes.train, train), BoxSubset(boxes.validation, validation)
        vars(task)["dataset"] = replace(boxes, train=few[0], validation=few[1])


def _some(source: Sized, count: int) -> NDArray[np.int64]:
    return np.linspace(0, max(0, len(source) - 1), min(count, len(source))).astype(np.int64)


def _contents(batch: Batch) -> list[str]:
    """What each sample's input and target are, as short digests."""
    count, both = len(batch.ids), (batch.inputs, batch.targets)
    return [content_of(tensors_in(chosen(both, [row], of=count))) for row in range(count)]


def _evaluating(network: nn.Module) -> list[str]:
    return [name for name, module in network.named_modules() if not module.training]


def _double(value: Any) -> Any:
    """The same with its floating-point tensors in float64."""
    return mapped(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, value)
