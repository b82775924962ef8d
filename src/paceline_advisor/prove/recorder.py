"""A wrapper of the recipe's task that computes the same and records what the trainer does with it; and its notes."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.checkpoint.weights import read_weights
from paceline.data.balance import SampleLengths
from paceline.data.batch import Batch, copied, mapped, select_rows, tensors_in
from paceline.data.pipeline import Pipeline, Placement
from paceline.distributed.environment import read_launch
from paceline.host.world import World
from paceline.plan import DataFacts
from paceline.recipe.schema import Recipe
from paceline.tasks.task import Model, Task, build_task
from paceline_advisor import frozen
from paceline_advisor.forwarding import PassesOn, TaskStandIn, forwarded

Verdict = Literal["passed", "failed", "not applicable"]


@frozen
class Check:
    """A comparison and its result.

    Attributes:
        name: Its subject.
        compared: What is compared with what.
        verdict: ``passed``, ``failed`` or ``not applicable``.
        difference: The measured value: a relative difference, or a count; None if nothing was measured.
        limit: The largest difference that passes.
        found: Where and how it differs, or why the check does not apply; otherwise empty.
        advice: What to check if it failed; empty otherwise, once it has run.
    """

    name: str
    compared: str
    verdict: Verdict = "failed"
    difference: float | None = None
    limit: float | None = None
    found: str = ""
    advice: str = ""

    def about(self, compared: str) -> Check:
        """Return the check with a description of the comparison that depends on the evidence."""
        return replace(self, compared=compared)

    def measured(self, difference: float, limit: float = 0, *, found: str = "") -> Check:
        """Return the check with the measured value; it passes if this does not exceed the limit."""
        check = replace(self, difference=float(difference), limit=limit, found=found)
        return replace(check, verdict="passed", advice="") if difference <= limit else check

    def failed(self, found: str) -> Check:
        """Return the check as failed without a measured value, because there is nothing to compare."""
        return replace(self, found=found)

    def not_applicable(self, reason: str) -> Check:
        """Return the check as not applicable, with the reason."""
        return replace(self, verdict="not applicable", found=reason, advice="")


def nan_as_infinite(difference: float) -> float:
    """Return the difference, or infinity for NaN, so that it compares as the largest."""
    return math.inf if math.isnan(difference) else difference


CONFIG_VARIABLE = "PACELINE_PROVE"


@frozen
class RecorderConfig:
    """Settings of a recorder.

    Attributes:
        task: The task that the user's recipe names.
        folder: Where notes are written.
        samples: Training samples to use.
        evaluation_samples: Held-out samples to use.
        kept_steps: Steps, from 0, whose weights and gradients are stored.
        double: Whether the network computes in float64.
    """

    task: str
    folder: str
    samples: int
    evaluation_samples: int
    kept_steps: tuple[int, ...]
    double: bool


@dataclass(kw_only=True)
class MicroBatchNote:
    """One forward and backward pass.

    Attributes:
        step: Its step, from 0.
        logical_rank: Its logical rank.
        ids: Its samples, without those that could not be read.
        contents: Digests of each sample's input and target, for :func:`same_content`.
        phantom: Whether the pass is only there to keep processes in step, and does not count.
        generator: A digest of the state of torch's generator before the loss.
        evaluating: Modules that were in evaluation mode when the network was called.
        broken: Ids of samples that could not be read.
    """

    step: int
    logical_rank: int
    ids: list[int]
    contents: list[str]
    phantom: bool
    generator: str
    evaluating: list[str]
    broken: list[int]


@dataclass(kw_only=True)
class StepNote:
    """One step of the optimizer.

    Attributes:
        rates: Learning rate of each group, and the group's own factor.
        gradient: A digest of the gradient that the optimizer got.
        without_gradient: Trainable parameters without a gradient.
    """

    rates: list[tuple[float, float]]
    gradient: str
    without_gradient: list[str]


@dataclass(kw_only=True)
class ScoreNote:
    """A scoring of a set of weights on this process.

    Attributes:
        position: Optimizer steps taken before.
        weights: ``model`` or ``ema``.
        buffers: A digest of the network's buffers.
        training: Whether the network was in training mode.
        ids: The scored samples.
    """

    position: int
    weights: str
    buffers: str
    training: bool
    ids: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class Notes:
    """What one process observed of a run; ``final_buffers`` is a digest of the buffers at the end."""

    micro_batches: list[MicroBatchNote] = field(default_factory=list)
    steps: list[StepNote] = field(default_factory=list)
    scores: list[ScoreNote] = field(default_factory=list)
    final_buffers: str = ""


@frozen
class ObservedRun:
    """A finished run.

    Attributes:
        name: Its name in messages.
        recipe: Its recipe.
        folder: Folder of its notes, which contains its run directory.
        processes: Number of processes.
        trouble: Why it did not finish; empty if it did.
        batches: The training batches of a run in this process, by step and logical rank.
    """

    name: str
    recipe: Recipe
    folder: Path
    processes: int = 1
    trouble: str = ""
    batches: Mapping[tuple[int, int], Batch] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.folder / "run"

    @cached_property
    def ranks(self) -> list[Notes]:
        """The notes of every process that wrote some, in order."""
        paths = (self.folder / f"rank-{rank}.json" for rank in range(self.processes))
        return [TypeAdapter(Notes).validate_json(path.read_bytes()) for path in paths if path.exists()]

    @cached_property
    def micro_batches(self) -> list[MicroBatchNote]:
        """All batches used for training, over all processes, in the order of steps and logical ranks."""
        found = [each for notes in self.ranks for each in notes.micro_batches if not each.phantom]
        return sorted(found, key=lambda each: (each.step, each.logical_rank))

    def completed(self, step: int) -> bool:
        """Whether a step, from 0, was completed: the run has ended, or is in a later step."""
        return not self.trouble or any(note.step > step for note in self.micro_batches)

    def step(self, number: int) -> tuple[dict[str, Tensor], dict[str, Tensor | None]] | None:
        """Return a step's weights and buffers before it, and the gradients that the optimizer got; None if not kept."""
        path = self.folder / f"step-{number}.pt"
        if not path.exists():
            return None
        state = torch.load(path, weights_only=True)
        return state["weights"], state["gradients"]

    def average(self) -> dict[str, Tensor] | None:
        """Return the moving average as computed by the recorder; None if it computed none."""
        path = self.folder / "average.pt"
        found: dict[str, Tensor] | None = torch.load(path, weights_only=True) if path.exists() else None
        return found

    def saved(self, weights: str) -> dict[str, Tensor]:
        """Return the run's last checkpoint of ``model`` or ``ema``."""
        return dict(read_weights(self.run_dir, weights).state)


def tensors_of(network: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, including buffers that are not saved."""
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def copies_of(network: nn.Module) -> dict[str, Tensor]:
    """Return copies of a network's parameters and buffers, by name."""
    return {name: each.detach().clone() for name, each in tensors_of(network).items()}


def rows_of(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return some of a batch's samples, optionally in another order."""
    inputs, targets = (select_rows(each, rows, size=len(batch.ids)) for each in (batch.inputs, batch.targets))
    return replace(batch, inputs=inputs, targets=targets, ids=batch.ids[list(rows)])


def content_of(tensors: Iterable[Tensor]) -> str:
    """Return digests of a sample's tensors, each [1, ...], for :func:`same_content`: with and without their padding.

    A sample that is shorter than others in its batch is padded to a length that depends on them.
    """
    return ";".join(_content(each[0] if each.ndim > 1 else each) for each in tensors)


def _content(row: Tensor) -> str:
    """Return three digests: of a row; of the row without its trailing equal values; of the latter and that value."""
    unpadded, padding = row, None
    if row.ndim and row.numel():
        padding = row[-1].reshape(-1)[0]
        differ = (row != padding).reshape(len(row), -1).any(dim=1).nonzero()
        unpadded = row[: int(differ[-1]) + 1 if len(differ) else 0]
    kind = f"{row.dtype}{tuple(row.shape[1:])}"
    parts = [(kind, row), (kind, unpadded), (f"{kind}{None if padding is None else padding.item()!r}", unpadded)]
    return ",".join(hashlib.sha256(f"{label} {digest_of([each])}".encode()).hexdigest()[:16] for label, each in parts)


def same_content(a: str, b: str) -> bool:
    """Whether two samples have the same contents apart from padding."""
    parts = [(first.split(","), second.split(",")) for first, second in zip(a.split(";"), b.split(";"), strict=False)]
    return a.count(";") == b.count(";") and all(
        first[0] in second[:2] or second[0] in first[:2] or first[2:] == second[2:] for first, second in parts
    )


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the bytes of tensors."""
    total = hashlib.sha256()
    for each in tensors:
        total.update(each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


REFERENCE = "paceline_advisor.prove.recorder:recorder"


def recorder(recipe: Recipe) -> RecordingTask:
    """Return the recorder of a run that was started as a command; its settings are in the environment."""
    settings = json.loads(os.environ[CONFIG_VARIABLE])
    config = RecorderConfig(**{**settings, "kept_steps": tuple(settings["kept_steps"])})
    return RecordingTask(build_task(replace(recipe, task=config.task)), config)


class RecordingTask(TaskStandIn):
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
        super().__init__(task)
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
        if self.task.can_shorten:
            self.task.shorten(self.config.samples, self.config.evaluation_samples)
        facts = self.task.data_facts(world)
        self.metrics = self.task.metrics
        config = self.config
        return replace(facts, train_samples=config.samples, evaluation_samples=config.evaluation_samples)

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Delegate to the task, with fewer samples to score."""
        pipeline = self.task.open_pipeline(placement)
        return cast(Pipeline, _ShortPipeline(pipeline, self.config.evaluation_samples, self.finish))

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


def _first_samples(name: str, limit: str) -> Callable[..., Any]:
    def first(recorder: RecordingTask) -> Any:
        values, count = getattr(recorder.task, name)(), getattr(recorder.config, limit)
        if isinstance(values, SampleLengths):
            return replace(values, tokens=values.tokens[:count])
        return None if values is None else values[:count]

    return first


# Properties of samples are cut to the first samples; all other calls go to the task.
for _name in ("weights", "classes", "sets", "lengths", "keys", "costs", "sizes"):
    setattr(RecordingTask, f"sample_{_name}", _first_samples(f"sample_{_name}", "samples"))
RecordingTask.evaluation_lengths = _first_samples("evaluation_lengths", "evaluation_samples")  # type: ignore[method-assign]
for _name in vars(Task).keys() - vars(RecordingTask).keys():
    if callable(getattr(Task, _name)):
        setattr(RecordingTask, _name, forwarded(_name))


class _ShortPipeline(PassesOn):
    """A pipeline that scores only the first samples, and calls back when it is closed."""

    def __init__(self, pipeline: Pipeline, evaluation_samples: int, closed: Callable[[], None]) -> None:
        super().__init__(pipeline)
        self._limit, self._closed = evaluation_samples, closed

    def evaluation_batches(self, batch_size: int, world: World) -> Iterator[Batch]:
        for batch in self._inner.evaluation_batches(batch_size, world):
            if not (batch.slice.ids < self._limit).any():
                return
            broken = tuple(each for each in batch.broken if each.id < self._limit)
            yield replace(rows_of(batch, (batch.ids < self._limit).nonzero()[0].tolist()), broken=broken)

    def close(self) -> None:
        self._inner.close()
        self._closed()


def _evaluating(network: nn.Module) -> list[str]:
    return [name for name, module in network.named_modules() if not module.training]


def _double(value: Any) -> Any:
    """Return the same with floating-point tensors in float64."""
    return mapped(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, value)
