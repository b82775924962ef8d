"""How does a run's network come to stand on fixed samples, with its weights and those of its checkpoints?

Everything is read before the processes meet: loader processes are forked while there is no process group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint.state import check_inventory, fitted
from paceline.checkpoint.store import CheckpointStore
from paceline.checkpoint.weights import SavedWeights, read_weights
from paceline.data.batch import Batch
from paceline.data.image.source import SampleSource, SubsetSource
from paceline.data.order import StepGeometry, epoch_order
from paceline.data.pipeline import Pipeline, Placement
from paceline.distributed.device import choose_device, describe_machine
from paceline.errors import CheckpointError, DataError, PacelineError, UnreadableError
from paceline.recipe.load import Overrides
from paceline.recipe.named_code import refuse_foreign_code
from paceline.recipe.plan import resolve_channels_last, resolve_threads
from paceline.recipe.rates import lr_factor
from paceline.recipe.schema import Recipe
from paceline.tasks.build import build_task
from paceline.tasks.image_classification import ImageClassification
from paceline.tasks.task import Task
from paceline.trainer.evaluate_target import EvaluationRequest, scoring_recipe, scoring_task, with_weights
from paceline.world import World
from paceline_advisor.landscape.subject import BatchNormUse, Split, Subject
from paceline_advisor.landscape.trajectory import LEAST

# Samples in a batch; with recomputed statistics, those that are normalised together.
_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which weights, and which samples.

    Attributes:
        overrides: Changes to the recipes the weights were trained with, e.g. ``data.path``.
        weights: ``auto``, ``model`` or ``ema``.
        best: Take a run's best checkpoint instead of its newest.
        trust_code: Whether the weights' recipes may name code to import.
        samples: Most samples of each split; None for all.
        seed: Keys which ones.
        batch_norm: Where BatchNorm's statistics come from; None for ``recomputed`` where there is BatchNorm.
    """

    overrides: Overrides = ()
    weights: str = "auto"
    best: bool = False
    trust_code: bool = False
    samples: int | None = 1024
    seed: int = 0
    batch_norm: BatchNormUse | None = None


@dataclass(frozen=True, kw_only=True)
class Opened:
    """One run that is looked at.

    Attributes:
        target: What was named.
        saved: Its weights.
        recipe: What it was trained with.
        subject: Its network on its samples.
    """

    target: Path
    saved: SavedWeights
    recipe: Recipe
    subject: Subject

    @property
    def steps(self) -> int:
        """Optimizer steps that the weights have behind them."""
        return int(self.saved.metadata.get("step", 0))

    @property
    def peak_lr(self) -> float:
        """The peak learning rate, after the recipe's scaling rule."""
        return self.recipe.optimizer.lr * lr_factor(self.recipe, self.recipe.batch.global_size)


def open_run(target: Path, ask: Selection, world: World) -> Opened:
    """Load a run's network and samples; the same on every process.

    Raises:
        PacelineError: If the target, the overrides or the data are not usable.
    """
    saved = read_weights(target, ask.weights, best=ask.best)
    recipe = scoring_recipe(saved, ask.overrides)
    refuse_foreign_code(saved.described("recipe"), recipe, str(saved.path), trusted=ask.trust_code)
    device = choose_device(recipe.parallel.device, world)
    machine, reasons = describe_machine(device), dict[str, str]()
    placement = Placement(device=device, channels_last=resolve_channels_last(recipe, machine, reasons))
    torch.set_num_threads(resolve_threads(recipe, machine, world.local_world_size, reasons))
    request = EvaluationRequest(target=target, overrides=ask.overrides, weights=ask.weights, best=ask.best)
    task, _ = scoring_task(request, saved, recipe, world)
    network = task.build_model()
    task.check_network(network)
    samples = _samples(task, recipe, placement, ask, world)
    subject = Subject(task, with_weights(network, saved, placement), samples)
    if ask.batch_norm is not None and not subject.has_batch_norm:
        raise PacelineError(
            f"--batch-norm {ask.batch_norm} has no effect: the network of {saved.path} has no BatchNorm; leave it out."
        )
    subject.batch_norm = ask.batch_norm or "recomputed"
    return Opened(target=target, saved=saved, recipe=recipe, subject=subject)


def read_trajectory(opened: Opened) -> tuple[list[int], list[Tensor]]:
    """The steps and the weights of a run's checkpoints, in order; those that are damaged are left out.

    Raises:
        CheckpointError: If there are too few.
    """
    store = CheckpointStore(opened.target / "checkpoints")
    steps: list[int] = []
    weights: list[Tensor] = []
    # Up to the weights that are looked at, which may be the best and not the newest.
    for step in (each for each in store.steps() if each <= opened.steps):
        try:
            weights.append(_vector(opened, read_weights(store.path(step), opened.saved.weights)))
            steps.append(step)
        except UnreadableError:
            raise
        except CheckpointError:
            continue
    if len(weights) < LEAST:
        raise CheckpointError(
            f"{opened.target} has {len(weights)} whole checkpoint(s), and a trajectory needs {LEAST}; train with "
            f"checkpoint.keep={max(LEAST, 20)}, say, and checkpoint.every short enough, or leave trajectory out of "
            "--measure."
        )
    return steps, weights


def _vector(opened: Opened, saved: SavedWeights) -> Tensor:
    network = opened.subject.network
    state, _ = fitted(network.state_dict(), saved.plain)
    check_inventory(network.state_dict(), state, where=str(saved.path))
    names, like = opened.subject.shapes, opened.subject.here()
    return torch.cat([state[name].reshape(-1) for name in names]).to(like)


def check_alike(first: Opened, second: Opened) -> None:
    """See to it that there is a line between two networks.

    Raises:
        PacelineError: If their weights are not of the same names and shapes.
    """
    mine, theirs = first.subject.shapes, second.subject.shapes
    if mine == theirs and len(first.subject.statistics()) == len(second.subject.statistics()):
        return
    odd = next((name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)), "a buffer")
    raise PacelineError(
        f"there is no line from {first.target} to {second.target}: {odd} is {_shape(mine.get(odd))} in the one and "
        f"{_shape(theirs.get(odd))} in the other; give runs of the same network, or leave line out of --measure."
    )


def _shape(shape: torch.Size | None) -> str:
    return "missing" if shape is None else "x".join(map(str, shape)) or "a number"


def _samples(
    task: Task, recipe: Recipe, placement: Placement, ask: Selection, world: World
) -> dict[Split, tuple[Batch, ...]]:
    if not isinstance(task, ImageClassification):
        return _first_samples(task, recipe, placement, ask, world)
    dataset = task.dataset
    sources: dict[Split, SampleSource] = {"train": dataset.train, "validation": dataset.validation}
    found: dict[Split, tuple[Batch, ...]] = {}
    for split, source in sources.items():
        # Training images are shown as held-out ones are: not varied, and the same at every point.
        shown = build_task(recipe)
        assert isinstance(shown, ImageClassification)
        shown.dataset = replace(dataset, validation=_some(source, ask))
        shown.data_facts(world)
        found[split] = _scored(shown, placement, len(shown.dataset.validation))
    return found


def _some(source: SampleSource, ask: Selection) -> SampleSource:
    if ask.samples is None or ask.samples >= len(source):
        return source
    return SubsetSource(source, np.sort(epoch_order(ask.seed, 0, len(source))[: ask.samples]))


def _scored(task: Task, placement: Placement, count: int) -> tuple[Batch, ...]:
    # Batches as alike as can be: with recomputed statistics, the last must not be one of two samples.
    size = -(-count // max(1, -(-count // _BATCH)))
    with _pipeline(task, placement, training=False) as pipeline:
        return _whole(pipeline.evaluation_batches(size, World()), None)


def _first_samples(
    task: Task, recipe: Recipe, placement: Placement, ask: Selection, world: World
) -> dict[Split, tuple[Batch, ...]]:
    """Of a task of the user's own: what it trains on first, and what it evaluates first."""
    facts = task.data_facts(world)
    size = min(_BATCH, facts.train_samples)
    geometry = StepGeometry(
        seed=recipe.seed, samples=facts.train_samples, global_batch_size=size, logical_ranks=1, repeats=1
    )
    steps = geometry.epochs.phases[0].steps_per_epoch
    with _pipeline(task, placement, training=True) as pipeline:
        train = _whole(pipeline.train_batches(geometry, 0, steps, World()), ask.samples)
    with _pipeline(task, placement, training=False) as pipeline:
        return {"train": train, "validation": _whole(pipeline.evaluation_batches(_BATCH, World()), ask.samples)}


@contextlib.contextmanager
def _pipeline(task: Task, placement: Placement, *, training: bool) -> Iterator[Pipeline]:
    with contextlib.closing(task.open_pipeline(placement)) as pipeline:
        pipeline.start(training=training, evaluation=not training)
        yield pipeline


def _whole(batches: Iterator[Batch], most: int | None) -> tuple[Batch, ...]:
    """Whole batches until there are so many samples.

    Raises:
        DataError: If there is none.
    """
    found: list[Batch] = []
    for batch in batches:
        if len(batch.ids):
            found.append(batch)
        if most is not None and sum(len(each.ids) for each in found) >= most:
            break
    if not found:
        raise DataError("there are no samples whose loss could be computed; check data.path.")
    return tuple(found)
