"""A wrapper of the recipe's task that computes the same and records what the trainer does with it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.data.balance import SampleLengths
from paceline.data.batch import Batch, Progress, copied, mapped, select_rows, tensors_in
from paceline.data.boxes.pipeline import BoxSubset
from paceline.data.image.source import SubsetSource
from paceline.data.order import StepGeometry
from paceline.data.pipeline import Pipeline, Placement
from paceline.distributed.environment import read_launch
from paceline.plan import DataFacts
from paceline.recipe.schema import Recipe
from paceline.tasks.detection import Detection
from paceline.tasks.image_classification import ImageTask
from paceline.tasks.task import Model, Task, build_task
from paceline.world import World
from paceline_advisor.prove.notes import (
    CONFIG_VARIABLE,
    MicroBatchNote,
    Notes,
    RecorderConfig,
    ScoreNote,
    StepNote,
    content_of,
    copies_of,
    digest_of,
    rows_of,
    tensors_of,
)

REFERENCE = "paceline_advisor.prove.recorder:recorder"


def recorder(recipe: Recipe) -> Recorder:
    """Return the recorder of a run that was started as a command; its settings are in the environment."""
    settings = json.loads(os.environ[CONFIG_VARIABLE])
    config = RecorderConfig(**{**settings, "kept_steps": tuple(settings["kept_steps"])})
    return Recorder(build_task(replace(recipe, task=config.task)), config)


class Recorder(Task):
    """A task that forwards everything to another one, and records its calls.

    Only three things differ from the task itself: there are fewer samples, the network computes in float64 if
    requested, and ``alter`` may change the network before it is used.

    Attributes:
        task: The task itself.
        config: Settings of the recorder.
        notes: What it has recorded.
        batches: Copies of the training batches, by step and logical rank.
    """

    def __init__(self, task: Task, config: RecorderConfig, alter: Callable[[nn.Module], None] | None = None) -> None:
        super().__init__(task.recipe)
        self.task = task
        self.metrics, self.headline, self.unit = task.metrics, task.headline, task.unit
        self.gives_scores = task.gives_scores
        self.notes = Notes()
        self.batches: dict[tuple[int, int], Batch] = {}
        self.config = config
        self._alter = alter
        self._world = read_launch(os.environ).world
        self._network: nn.Module | None = None
        self._evaluated: tuple[Model | None, Model | None] = (None, None)
        self._before: dict[str, Tensor] = {}
        self._average: dict[str, Tensor] = {}
        self._hooks: list[Any] = []
        self._has_called = False

    def data_facts(self, world: World) -> DataFacts:
        """Delegate to the task, with fewer samples."""
        _shorten(self.task, self.config)
        facts = self.task.data_facts(world)
        self.metrics = self.task.metrics
        config = self.config
        return replace(facts, train_samples=config.samples, evaluation_samples=config.evaluation_samples)

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Delegate to the task, with fewer samples to score."""
        return _ShortPipeline(self.task.open_pipeline(placement), self.config.evaluation_samples, self.finish)

    def build_model(self) -> nn.Module:
        """Return the task's network, with hooks that observe it."""
        network = self.task.build_model()
        self.task.check_network(network)  # as the task knows it, before its dtype changes
        if self.config.double:
            network.double()
        if self._alter is not None:
            self._alter(network)

        # Not a method of this object: a copy of the network would also copy this object and all that it holds.
        def on_forward(module: nn.Module, arguments: Any, options: Any) -> tuple[Any, Any]:
            if module is self._network and torch.is_grad_enabled() and self.notes.micro_batches:
                self._note_modes(module)
            return (_double(arguments), _double(options)) if self.config.double else (arguments, options)

        network.register_forward_pre_hook(on_forward, with_kwargs=True)
        self._network = network
        return network

    def check_network(self, network: nn.Module) -> None:
        """Do nothing: the task has checked the network when it was built."""

    def loss(self, model: Model, batch: Batch) -> Tensor:
        """Delegate to the task; record the batch if it is used for training."""
        if torch.is_grad_enabled():
            self._note(batch)
        return self.task.loss(model, batch)

    def evaluated(self, model: Model) -> Model:
        """Delegate to the task; remember which network is being scored."""
        self._evaluated = (self.task.evaluated(model), model)
        return self._evaluated[0]

    def score(self, model: Model, batch: Batch) -> dict[str, Any]:
        """Delegate to the task, and record the call."""
        evaluated_model, network = self._evaluated
        # The network or its average, which are not compiled here.
        network = network if model is evaluated_model else model
        assert isinstance(network, nn.Module)
        name = "model" if network is self._network else "ema"
        position, scores = len(self.notes.steps), self.notes.scores
        if not any((each.position, each.weights) == (position, name) for each in scores):
            digest = digest_of(network.buffers())
            scores.append(ScoreNote(position=position, weights=name, buffers=digest, training=network.training))
        note = next(each for each in scores if (each.position, each.weights) == (position, name))
        note.ids += batch.ids.tolist()
        return self.task.score(model, batch)

    def finish(self) -> None:
        """Write the notes; called when the pipeline is closed, after the last checkpoint."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        folder = Path(self.config.folder)
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
        part, count = batch.slice, len(batch.ids)
        both = (batch.inputs, batch.targets)
        self.notes.micro_batches.append(
            MicroBatchNote(
                step=part.step,
                logical_rank=part.logical_rank,
                ids=batch.ids.tolist(),
                contents=[content_of(tensors_in(select_rows(both, [row], size=count))) for row in range(count)],
                phantom=part.phantom,
                generator=hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
                evaluating=_evaluating(self._network),
                broken=[each.id for each in batch.broken],
            )
        )
        self._has_called = False
        # Copies: a network may write into its inputs.
        kept = replace(batch, inputs=copied(batch.inputs), targets=copied(batch.targets))
        self.batches[part.step, part.logical_rank] = kept
        if self._keeps and not self._before:
            self._before = copies_of(self._network)

    def _note_modes(self, network: nn.Module) -> None:
        """Record modules that are in evaluation mode in any forward pass of the micro-batch."""
        before = self.notes.micro_batches[-1].evaluating if self._has_called else []
        self.notes.micro_batches[-1].evaluating = sorted({*before, *_evaluating(network)})
        self._has_called = True

    @property
    def _keeps(self) -> bool:
        return self._world.is_first and self.notes.micro_batches[-1].step in self.config.kept_steps

    def _begin(self, network: nn.Module) -> None:
        """Observe the optimizer that updates the network."""
        own = {id(each) for each in network.parameters()}

        def is_own(optimizer: torch.optim.Optimizer) -> bool:
            return any(id(each) in own for group in optimizer.param_groups for each in group["params"])

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if is_own(optimizer):
                self._before_step(network, optimizer)

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if is_own(optimizer) and self._average:
                self._update_average(network)

        if self.recipe.train.ema is not None:
            self._average = copies_of(network)
        self._hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def _before_step(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if not self.notes.steps:
            # Drop the passes of the warm-up, which changed nothing: of the largest micro-batch, and of the first one.
            notes = self.notes.micro_batches
            first = len(notes) - 1
            while first and notes[first - 1].step == notes[-1].step:
                if notes[first - 1].logical_rank >= notes[first].logical_rank:
                    break
                first -= 1
            self.notes.micro_batches = notes[first:]
        gradients = {name: each.grad for name, each in network.named_parameters() if each.requires_grad}
        if self._keeps:
            path = Path(self.config.folder) / f"step-{self.notes.micro_batches[-1].step}.pt"
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
        """Update the moving average by its definition, from the weights after an optimizer step."""
        assert self.recipe.train.ema is not None
        step = len(self.notes.steps) - 1
        decay = min(self.recipe.train.ema, (1 + step) / (10 + step))
        for name, current in tensors_of(network).items():
            if current.is_floating_point():
                self._average[name] = decay * self._average[name] + (1 - decay) * current
            else:
                self._average[name] = current.clone()


def _forwarded(name: str) -> Callable[..., Any]:
    def forward(recorder: Recorder, *arguments: Any, **options: Any) -> Any:
        return getattr(recorder.task, name)(*arguments, **options)

    return forward


def _first_samples(name: str, limit: str) -> Callable[..., Any]:
    def first(recorder: Recorder) -> Any:
        values, count = getattr(recorder.task, name)(), getattr(recorder.config, limit)
        if isinstance(values, SampleLengths):
            return replace(values, tokens=values.tokens[:count])
        return None if values is None else values[:count]

    return first


# Properties of samples are cut to the first samples; all other calls go to the task.
for _name in ("weights", "classes", "sets", "lengths", "keys", "costs", "sizes"):
    setattr(Recorder, f"sample_{_name}", _first_samples(f"sample_{_name}", "samples"))
Recorder.evaluation_lengths = _first_samples("evaluation_lengths", "evaluation_samples")  # type: ignore[method-assign]
for _name in vars(Task).keys() - vars(Recorder).keys():
    if callable(getattr(Task, _name)):
        setattr(Recorder, _name, _forwarded(_name))


class _ShortPipeline:
    """A pipeline that scores only the first samples, and calls back when it is closed."""

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
            yield replace(rows_of(batch, (batch.ids < self._limit).nonzero()[0].tolist()), broken=broken)

    def sample_name(self, sample_id: int, *, training: bool) -> str:
        return self._pipeline.sample_name(sample_id, training=training)

    def close(self) -> None:
        self._pipeline.close()
        self._closed()


def can_shorten(task: Task) -> bool:
    """Whether it is an image task, whose data can be reduced."""
    return isinstance(task, ImageTask | Detection)


def _shorten(task: Task, config: RecorderConfig) -> None:
    """Reduce an image task to a few samples, evenly spaced over its data and including the last one."""

    def subset(source: Any, count: int) -> Any:
        chosen_ids = np.linspace(0, max(0, len(source) - 1), min(count, len(source))).astype(np.int64)
        return BoxSubset(source, chosen_ids) if isinstance(task, Detection) else SubsetSource(source, chosen_ids)

    if isinstance(task, ImageTask | Detection):
        dataset: Any = task.dataset
        shortened = {"train": subset(dataset.train, config.samples)}
        shortened["validation"] = subset(dataset.validation, config.evaluation_samples)
        # Where the task itself stores its open data.
        vars(task)["dataset"] = replace(dataset, **shortened)


def _evaluating(network: nn.Module) -> list[str]:
    return [name for name, module in network.named_modules() if not module.training]


def _double(value: Any) -> Any:
    """Return the same with floating-point tensors in float64."""
    return mapped(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, value)
