"""Build batches like a recipe's from fake tensors, without reading data."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.balance import SampleLengths
from paceline.data.batch import Batch, Nested, mapped
from paceline.data.order import StepGeometry
from paceline.data.pipeline import Placement
from paceline.data.slices import SampleIds, SampleSlice, first_samples
from paceline.host.world import World
from paceline.plan import Plan
from paceline.plugins.dataset_registry import find_dataset, named
from paceline.recipe.data import Augment, Data, Progressive
from paceline.recipe.schema import Recipe
from paceline.tasks.task import BatchMaker, Task

_FEW = 2


def with_placeholder_data(recipe: Recipe) -> tuple[Recipe, str | None]:
    """Return the recipe; without a data path, with typical stand-in data and a sentence that says so.

    Settings that determine the memory and FLOPs of a step are unchanged: image size, mixing, repeats.
    """
    other, notice = with_stand_in(recipe)
    if notice is not None:
        return other, notice
    data = recipe.data
    entry = None if recipe.objects else find_dataset(data.dataset)
    has_targets = bool(data.target_columns) or recipe.task == "image_multilabel"
    if data.path is not None or entry is None or entry.size is None or has_targets:
        return recipe, None  # no stand-in has columns of numbers or several labels
    usual = entry.size
    size = data.image_size if data.image_size != "auto" else usual.image_size
    assumed = Data(
        dataset="synthetic",
        samples=usual.samples,
        classes=usual.classes,
        image_size=size,
        channels=data.channels,
        evaluation_size=data.evaluation_size,
        augment=Augment(repeats=data.augment.repeats),
        progressive=Progressive(),
        mix=data.mix,
    )
    notice = (
        f"data.path is not set: as for {usual.name}, {usual.classes:,} classes and images of {size} pixels are assumed"
    )
    return replace(recipe, data=assumed), notice


def with_stand_in(recipe: Recipe, *, planned: bool = False) -> tuple[Recipe, str | None]:
    """Return the recipe; without a data path, with the data that its data set gives for that, and a sentence.

    Args:
        recipe: The recipe.
        planned: Whether only data sets count with which a run can be planned.
    """
    for entry in named(recipe.data.dataset) if recipe.data.path is None and not recipe.objects else ():
        if entry.stand_in is not None and (entry.stand_in.is_plannable or not planned):
            data, notice = entry.stand_in.assume(recipe.data)
            return replace(recipe, data=data), notice
    return recipe, None


def batch_maker(task: Task, plan: Plan, placement: Placement) -> BatchMaker:
    """Return a factory of batches like the run's, made of empty tensors; for use where those are fake.

    An image task's batches are known from its plan. For other tasks a few samples are read: those with the largest
    weight, if weights differ. Where samples are of unequal length, a batch is padded until it is as large as the run's
    largest batch of that many samples.
    """
    if task.has_known_shapes:
        return task.empty_batches(plan, placement, training=True)
    with contextlib.closing(task.open_pipeline(placement)) as pipeline:
        pipeline.start(training=True, evaluation=False)
        weights = task.sample_costs()

        def read(count: int) -> Batch:
            geometry = one_batch(task.recipe.seed, min(count, plan.train_samples), weights)
            return next(iter(pipeline.train_batches(geometry, 0, 1, World())))

        small, large = read(_FEW), read(2 * _FEW)
    lengths, make = task.sample_lengths(), _extrapolated(small, large)
    if task.sample_sizes() is not None:
        return partial(_with_largest_sizes, task, plan, make)
    return make if lengths is None or not lengths.is_ragged else _with_largest_width(make, large, lengths, plan)


def largest_micro_batch(task: Task, count: int, global_size: int) -> SampleIds | None:
    """Return the samples of the largest micro-batch of about this size, tallest and widest first; None if all alike.

    It depends on which samples share a micro-batch: pictures sorted by shape rarely share one with much taller
    pictures.
    """
    sizes = task.sample_sizes()
    if sizes is None:
        return None
    ranks = max(1, min(global_size, len(sizes)) // count)
    steps = StepGeometry(
        seed=task.recipe.seed,
        samples=len(sizes),
        global_batch_size=min(count * ranks, len(sizes)),
        logical_ranks=ranks,
        sort_key=task.sample_keys(),
        sizes=sizes,
    )
    largest = steps.costliest(0, steps.epochs.first_step(1))
    assert largest is not None
    [part] = [each for each in steps.slices(largest.step, World()) if each.logical_rank == largest.logical_rank]
    tallest, widest = part.ids[sizes[part.ids].argmax(axis=0)]
    return np.array(list(dict.fromkeys((int(tallest), int(widest), *part.ids.tolist()))))


def fixed_batch(seed: int, ids: SampleIds) -> StepGeometry:
    """Return the geometry of a single batch of these samples."""
    return _FixedBatch(seed=seed, samples=len(ids), global_batch_size=len(ids), logical_ranks=1, ids=ids)


def one_batch(seed: int, count: int, weights: NDArray[Any] | None = None) -> StepGeometry:
    """Return the geometry of a single batch of this many samples: the first ones, or those with the largest weight."""
    # A stable sort keeps the first of equal samples. Their order does not matter, but a smaller batch's samples must be
    # among a larger one's.
    heaviest = np.arange(count) if weights is None else np.argsort(-weights, kind="stable")[:count]
    return fixed_batch(seed, heaviest)


@dataclass(frozen=True, kw_only=True)
class _FixedBatch(StepGeometry):
    """A single step that uses these samples."""

    ids: SampleIds = field(repr=False, compare=False)

    def slices(self, step: int, world: World) -> list[SampleSlice]:
        return [replace(part, ids=self.ids) for part in super().slices(step, world)]


def evaluation_batch_maker(task: Task, plan: Plan, placement: Placement) -> BatchMaker:
    """Return the same for evaluation batches: the largest images, or longest samples, of evaluation, without mixing."""
    if task.has_known_shapes:
        return task.empty_batches(plan, placement, training=False)
    with contextlib.closing(task.open_pipeline(placement)) as pipeline:
        pipeline.start(training=False, evaluation=True)
        small, large = (
            next(iter(pipeline.evaluation_batches(min(count, plan.evaluation_samples), World())))
            for count in (_FEW, 2 * _FEW)
        )
    lengths, make = task.evaluation_lengths(), _extrapolated(small, large)
    if lengths is None or not lengths.is_ragged:
        return make
    width, widest = _width(lengths, large.ids), _width(lengths, np.arange(len(lengths.tokens)))
    return lambda count: _widened(make(count), width, widest)


def _extrapolated(small: Batch, large: Batch) -> BatchMaker:
    """Extrapolates batches of any size from two that were read, by comparing the larger with the smaller."""
    sizes = (len(small.ids), len(large.ids))

    def make(count: int) -> Batch:
        part = first_samples(count)
        inputs = _resized(small.inputs, large.inputs, sizes, count)
        targets = _resized(small.targets, large.targets, sizes, count)
        return replace(small, inputs=inputs, targets=targets, ids=part.ids, slice=part, broken=())

    return make


def _resized(small: Nested, large: Nested, sizes: tuple[int, int], count: int) -> Nested:
    """Return the size for a batch of ``count`` samples, given the sizes for two other batches."""
    if isinstance(large, Tensor):
        return _empty(small, large, sizes, count)
    if isinstance(large, dict):
        return {key: _resized(small[key], each, sizes, count) for key, each in large.items()}
    if isinstance(large, list) and (len(small), len(large)) == sizes:
        # One entry per sample, as large as those that were read.
        return [_resized(each, each, sizes, count) for each in islice(cycle(large), count)]
    if isinstance(large, list | tuple):
        parts = [_resized(first, second, sizes, count) for first, second in zip(small, large, strict=True)]
        return type(large)(*parts) if hasattr(large, "_fields") else type(large)(parts)
    return large


def _empty(small: Tensor, large: Tensor, sizes: tuple[int, int], count: int) -> Tensor:
    shape = list(large.shape)
    if shape and small.shape[0] != large.shape[0]:
        # Linear: usually one row per sample, or as many as a sample has of something.
        share = (count - sizes[0]) / (sizes[1] - sizes[0])
        shape[0] = max(1, round(small.shape[0] + share * (large.shape[0] - small.shape[0])))
    elif shape and shape[0] == sizes[0] == sizes[1]:
        shape[0] = count  # only one size could be read
    channels_last = large.ndim == 4 and large.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=large.dtype).to(memory_format=memory_format)


def _with_largest_sizes(task: Task, plan: Plan, make: BatchMaker, count: int) -> Batch:
    """Return a batch of pictures as large as the run's largest of this size, with the other content that was read."""
    ids, sizes, batch = largest_micro_batch(task, count, plan.global_batch_size), task.sample_sizes(), make(count)
    assert ids is not None
    assert sizes is not None
    inputs, targets = [], []
    for image, target, sample in zip(batch.inputs, batch.targets, cycle(ids), strict=False):
        old_size, new_size = image.shape[-2:], tuple(map(int, sizes[sample]))

        def resized(tensor: Tensor, old_size: Any = old_size, new_size: Any = new_size) -> Tensor:
            if tensor.ndim < 2 or tensor.shape[-2:] != old_size:
                return tensor
            return torch.empty((*tensor.shape[:-2], *new_size), dtype=tensor.dtype)

        inputs.append(resized(image))
        targets.append(mapped(resized, target))
    return replace(batch, inputs=inputs, targets=targets)


def _with_largest_width(make: BatchMaker, example: Batch, lengths: SampleLengths, plan: Plan) -> BatchMaker:
    width, widest = _width(lengths, example.ids), _width(lengths, np.arange(len(lengths.tokens)))

    def width_of(count: int) -> int:
        ranks = max(1, plan.global_batch_size // count)
        if count * ranks > plan.train_samples:
            return widest  # there are fewer samples than this; with more data any may be as long
        steps = StepGeometry(
            seed=0,
            samples=plan.train_samples,
            global_batch_size=count * ranks,
            logical_ranks=ranks,
            lengths=lengths,
            balanced=plan.lengths_sha256 is not None,
        )
        largest = steps.costliest(0, steps.epochs.first_step(1))
        assert largest is not None
        return -(-largest.positions // (count * lengths.multiple)) * lengths.multiple

    return lambda count: _widened(make(count), width, width_of(count))


def _width(lengths: SampleLengths, ids: SampleIds) -> int:
    """Return the width of a batch of these samples."""
    return int(lengths.padded(ids).max())


def _widened(batch: Batch, width: int, wide: int) -> Batch:
    """Return a batch whose tensors of width ``width`` are replaced: tokens are their second axis."""

    def widened(tensor: Tensor) -> Tensor:
        if tensor.ndim < 2 or tensor.shape[1] != width:
            return tensor
        return torch.empty((tensor.shape[0], wide, *tensor.shape[2:]), dtype=tensor.dtype)

    inputs, targets = (mapped(widened, each) for each in (batch.inputs, batch.targets))
    return replace(batch, inputs=inputs, targets=targets)
