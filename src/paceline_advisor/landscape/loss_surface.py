"""The loss of a run as a function of its weights.

The weights of a network are one flat vector here, in the order of its named parameters. Everything is computed in the
dtype of the weights, usually float32, on the same samples at every point; dropout is off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.checkpoint.state import adapt_weights, check_inventory
from paceline.checkpoint.store import CheckpointStore
from paceline.checkpoint.weights import SavedWeights, read_weights
from paceline.data.batch import Batch
from paceline.data.order import StepGeometry, epoch_order
from paceline.data.pipeline import Pipeline, Placement
from paceline.errors import CheckpointError, DataError, PacelineError, UnreadableError
from paceline.host.world import World
from paceline.metrics.accumulator import Accumulator
from paceline.plan.compute import resolve_threads
from paceline.plugins.references import is_code_trusted
from paceline.recipe.schema import Recipe
from paceline.records.reader import read_plan
from paceline.records.run_directory import RunDirectory
from paceline.tasks.task import Task, build_task
from paceline.trainer.evaluate_target import EvaluationRequest, open_saved, scoring_task, trained_network
from paceline.trainer.subject import Subject
from paceline_advisor import frozen
from paceline_advisor.commands import Landscape

# Minimum number of checkpoints for a trajectory.
_LEAST = 3
# Samples per batch; with recomputed statistics, these are normalised together.
_BATCH = 256

BatchNormUse = Literal["recomputed", "stored"]
Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)


class LossSurface:
    """A network used only by the study, with its samples.

    Args:
        task: Computes the loss and the accuracies of a batch.
        network: The network, on its device; its weights are changed.
        samples: Batches of each split, on the device.

    Attributes:
        batch_norm: Source of BatchNorm's statistics: ``recomputed`` from each batch, as in training, or ``stored`` with
            the weights, as in evaluation.
        has_batch_norm: Whether that makes a difference.
        size: Number of parameters.
    """

    batch_norm: BatchNormUse = "recomputed"

    def __init__(self, task: Task, network: nn.Module, samples: Mapping[Split, Sequence[Batch]]) -> None:
        if task.metrics[0].is_collected:
            raise PacelineError(
                f"the first metric of the task {type(task).__name__}, {task.metrics[0].name}, is not a mean, but a "
                "landscape needs a loss; put the loss first among its metrics."
            )
        self.task = task
        self.network = network.eval().requires_grad_(requires_grad=True)
        self._samples = samples
        self._numbers: dict[Split, float] = {}
        self._named = dict(network.named_parameters())
        self._parameters = list(self._named.values())
        self._statistics = [each for each in network.buffers() if each.is_floating_point()]
        # A norm without running statistics always normalises by the batch; one across processes cannot run alone.
        self._norms = [
            each
            for each in network.modules()
            if isinstance(each, _BatchNorm) and each.track_running_stats and not isinstance(each, nn.SyncBatchNorm)
        ]
        self.device = self._parameters[0].device
        self.size = sum(each.numel() for each in self._parameters)
        self.has_batch_norm = bool(self._norms)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each parameter, in the order of the vector."""
        return {name: each.shape for name, each in self._named.items()}

    def count(self, split: Split) -> int:
        """Samples of a split."""
        return sum(len(batch.ids) for batch in self._samples[split])

    def current_weights(self) -> Tensor:
        """A copy of the weights, [size]."""
        return _flat([each.detach() for each in self._parameters])

    def statistics(self) -> Tensor:
        """A copy of all floating-point buffers (BatchNorm's statistics), one flat vector."""
        return _flat(self._statistics) if self._statistics else torch.empty(0, device=self.device)

    @torch.no_grad()
    def move_to(self, point: Tensor, statistics: Tensor | None = None) -> None:
        """Set the network's weights to a point, and optionally other statistics."""
        for each, part in _parts(point, self._parameters):
            each.copy_(part)
        if statistics is not None:
            for each, part in _parts(statistics, self._statistics):
                each.copy_(part)

    def measure(self, point: Tensor, on: Split, *, batch_norm: BatchNormUse | None = None) -> dict[str, float]:
        """Every metric of the task at a point, over all samples of a split; not finite if the loss is not.

        Args:
            point: The weights, [size].
            on: The split.
            batch_norm: Source of the statistics, if not the default.
        """
        self.move_to(point)
        sums, collectors = Accumulator(self.task.metrics, self.device), self.task.collectors()
        with self._norms_in(batch_norm or self.batch_norm), torch.no_grad():
            for batch in self._samples[on]:
                scores = self.task.score(self.network, batch)
                sums.add(scores)
                for each in collectors:
                    each.add(scores, batch.ids)
        found = sums.results(sums.rows())[1]
        for each in collectors:
            found |= each.results([each.part()])
        return found

    def loss_and_gradient(self, point: Tensor, on: Split) -> tuple[float, Tensor]:
        """The mean loss over a split at a point, and its gradient there, [size]."""
        self.move_to(point)
        total, gradient = 0.0, torch.zeros_like(point)
        with self._norms_in(self.batch_norm):
            for share in self._losses(on):
                gradient += _flat(torch.autograd.grad(share, self._parameters, materialize_grads=True))
                total += share.item()
        return total, gradient

    def curvature(self, point: Tensor, on: Split) -> Callable[[Tensor], Tensor]:
        """Return a function that multiplies a vector, [size], by the Hessian of the mean loss at a point."""

        def apply(vector: Tensor) -> Tensor:
            self.move_to(point)
            product = torch.zeros_like(point)
            try:
                # Attention's fast kernels have no second derivative.
                with self._norms_in(self.batch_norm), sdpa_kernel(SDPBackend.MATH):
                    for share in self._losses(on):
                        product += self._product(share, vector)
            except (RuntimeError, NotImplementedError) as error:
                if "derivative" not in str(error) and "double backward" not in str(error):
                    raise
                raise NoSecondDerivativeError(
                    f"the loss of this network has no second derivative ({' '.join(str(error).split())[:200]}), so its "
                    "curvature cannot be computed; leave curvature out of --measure."
                ) from error
            return product

        return apply

    def _product(self, loss: Tensor, vector: Tensor) -> Tensor:
        gradients = torch.autograd.grad(loss, self._parameters, create_graph=True, materialize_grads=True)
        along = torch.zeros((), dtype=vector.dtype, device=self.device)
        for each, part in _parts(vector, gradients):
            along = along + (each * part).sum()
        if not along.requires_grad:  # the loss is linear
            return torch.zeros_like(vector)
        return _flat(torch.autograd.grad(along, self._parameters, materialize_grads=True))

    def _losses(self, on: Split) -> Iterator[Tensor]:
        """Return each batch's weight in the mean loss over the split."""
        metric, number = self.task.metrics[0], self._number(on)
        name = metric.summed
        exact = torch.float32 if self.device.type == "mps" else torch.float64
        for batch in self._samples[on]:
            share = metric.scale * self.task.score(self.network, batch)[name].to(exact).sum() / number
            if not share.requires_grad:
                raise PacelineError(
                    f"the task {type(self.task).__name__} gives a {name} without a gradient when it scores, so neither "
                    "sharpness nor curvature can be computed; leave --measure sharpness and curvature out."
                )
            yield share

    def _number(self, on: Split) -> float:
        """Return the divisor of a split's loss: its samples, or the unit of the task's metric, such as tokens."""
        per = self.task.metrics[0].per
        if per is None:
            return self.count(on)
        if on not in self._numbers:
            with torch.no_grad():
                scores = (self.task.score(self.network, batch) for batch in self._samples[on])
                self._numbers[on] = sum(float(each[per].sum()) for each in scores)
        return self._numbers[on]

    @contextlib.contextmanager
    def _norms_in(self, use: BatchNormUse) -> Iterator[None]:
        for norm in self._norms:
            # With these two settings, a batch is normalised by its own statistics and does not change the stored ones.
            norm.training, norm.track_running_stats = use == "recomputed", use == "stored"
        try:
            yield
        finally:
            for norm in self._norms:
                norm.training, norm.track_running_stats = False, True


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.reshape(-1) for each in tensors])


def _parts(vector: Tensor, like: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor with its part of a vector, in its shape."""
    for each, part in zip(like, torch.split(vector, [each.numel() for each in like]), strict=True):
        yield each, part.view(each.shape)


class NoSecondDerivativeError(PacelineError):
    """A loss whose curvature cannot be computed."""


@frozen
class OpenedRun:
    """One run under study.

    Attributes:
        target: The named target.
        saved: Its weights.
        recipe: The recipe it was trained with.
        subject: Its network on its samples.
        train_samples: Samples of an epoch of its training.
    """

    target: Path
    saved: SavedWeights
    recipe: Recipe
    subject: LossSurface
    train_samples: int

    @property
    def steps(self) -> int:
        """Optimizer steps of the weights."""
        return int(self.saved.metadata.get("step", 0))


def open_run(target: Path, options: Landscape, world: World) -> OpenedRun:
    """Load a run's network and samples; the same on every process.

    Raises:
        PacelineError: If the target, the overrides or the data are not usable.
    """
    request = EvaluationRequest(
        target=target,
        overrides=options.overrides,
        weights=options.weights,
        best=options.best,
        trust_code=is_code_trusted(),
    )
    saved, opened = open_saved(request, world)
    recipe = opened.recipe
    torch.set_num_threads(resolve_threads(recipe, opened.machine, world.local_world_size)[0])
    task, facts = scoring_task(request, saved, recipe, world)
    network = trained_network([task], saved, opened)
    subject = LossSurface(task, network, _samples(task, opened, options))
    if options.batch_norm is not None and not subject.has_batch_norm:
        raise PacelineError(
            f"--batch-norm {options.batch_norm} has no effect: the network of {saved.path} has no BatchNorm; "
            "leave it out."
        )
    subject.batch_norm = options.batch_norm or subject.batch_norm
    run = RunDirectory(target)
    trained_on = int(read_plan(run)["train_samples"]) if run.plan.is_file() else facts.train_samples
    return OpenedRun(target=target, saved=saved, recipe=recipe, subject=subject, train_samples=trained_on)


def read_trajectory(opened: OpenedRun) -> tuple[list[int], list[Tensor]]:
    """Yield the steps and weights of a run's checkpoints, in order, without damaged ones.

    Raises:
        CheckpointError: If there are too few checkpoints.
    """
    store, subject = CheckpointStore(opened.target / "checkpoints"), opened.subject
    own, like = subject.network.state_dict(), subject.current_weights()
    found: dict[int, Tensor] = {}
    # Up to the weights under study, which may be the best and not the newest.
    for step in (each for each in store.steps() if each <= opened.steps):
        try:
            saved = read_weights(store.path(step), opened.saved.weights)
            state, _ = adapt_weights(own, saved.plain)
            check_inventory(own, state, where=str(saved.path))
            found[step] = _flat([state[name] for name in subject.shapes]).to(like)
        except UnreadableError:
            raise
        except CheckpointError:
            continue
    if len(found) < _LEAST:
        raise CheckpointError(
            f"{opened.target} has {len(found)} whole checkpoint(s), and a trajectory needs {_LEAST}; train with "
            f"checkpoint.keep={max(_LEAST, 20)}, say, and checkpoint.every short enough, or leave trajectory out of "
            "--measure."
        )
    return list(found), list(found.values())


def check_alike(first: OpenedRun, second: OpenedRun) -> None:
    """Check that two networks can be connected by a line.

    Raises:
        PacelineError: If their weights differ in names or shapes.
    """
    shapes = [run.subject.shapes for run in (first, second)]
    if shapes[0] == shapes[1] and len(first.subject.statistics()) == len(second.subject.statistics()):
        return
    names = dict.fromkeys(name for each in shapes for name in each)
    name = next((name for name in names if shapes[0].get(name) != shapes[1].get(name)), "a buffer")
    one, other = ("missing" if name not in each else "x".join(map(str, each[name])) or "a number" for each in shapes)
    raise PacelineError(
        f"there is no line from {first.target} to {second.target}: {name} is {one} in one and {other} in the other; "
        "give runs of the same network, or leave line out of --measure."
    )


def _samples(task: Task, opened: Subject, options: Landscape) -> dict[Split, tuple[Batch, ...]]:
    counts, most, placement = task.split_sizes(), options.samples, opened.placement
    if counts is None:  # a custom task: its first training samples, and its first evaluation samples
        samples = task.data_facts(opened.world).train_samples
        geometry = StepGeometry(
            seed=opened.recipe.seed, samples=samples, global_batch_size=min(_BATCH, samples), logical_ranks=1, repeats=1
        )
        steps = geometry.epochs.phases[0].steps_per_epoch
        with _pipeline(task, placement, training=True) as pipeline:
            train = _whole(pipeline.train_batches(geometry, 0, steps, World()), most)
        with _pipeline(task, placement, training=False) as pipeline:
            return {"train": train, "validation": _whole(pipeline.evaluation_batches(_BATCH, World()), most)}
    found: dict[Split, tuple[Batch, ...]] = {}
    for split, whole in zip(SPLITS, counts, strict=True):
        count = whole if most is None else min(most, whole)
        # Training images are preprocessed like validation images: without augmentation, and the same at every point.
        shown = build_task(opened.recipe)
        ids = np.sort(epoch_order(options.seed, 0, whole)[:count]) if count < whole else np.arange(whole)
        shown.score_only(ids, training=split == "train")
        shown.data_facts(opened.world)
        # Batches of nearly equal size: with recomputed statistics, the last batch must not have only two samples.
        size = -(-count // max(1, -(-count // _BATCH)))
        with _pipeline(shown, placement, training=False) as pipeline:
            found[split] = _whole(pipeline.evaluation_batches(size, World()), None)
    return found


@contextlib.contextmanager
def _pipeline(task: Task, placement: Placement, *, training: bool) -> Iterator[Pipeline]:
    with contextlib.closing(task.open_pipeline(placement)) as pipeline:
        pipeline.start(training=training, evaluation=not training)
        yield pipeline


def _whole(batches: Iterator[Batch], most: int | None) -> tuple[Batch, ...]:
    """Collect complete batches until there are enough samples.

    Raises:
        DataError: If there are no samples.
    """
    found: list[Batch] = []
    for batch in batches:
        if len(batch.ids):
            found.append(batch)
        if most is not None and sum(len(each.ids) for each in found) >= most:
            break
    if not found:
        raise DataError("no sample's loss can be computed; check data.path.")
    return tuple(found)
