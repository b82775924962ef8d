"""What does a recipe's batch look like, where none is to be read?"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from paceline.data.batch import Batch
from paceline.data.image.backend_choice import evaluation_size
from paceline.data.image.mixing import Mixing
from paceline.data.order import StepGeometry
from paceline.data.pipeline import Placement
from paceline.data.slices import SampleSlice
from paceline.data.text.stand_in import REFERENCE, VOCABULARY
from paceline.recipe.data import Augment, Data, Progressive
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline.tasks.averaging import CROPS, shown_for_crops
from paceline.tasks.image_classification import ImageClassification
from paceline.tasks.task import Task
from paceline.world import World

BatchMaker = Callable[[int], Batch]
"""Makes a micro-batch of so many samples."""

_FEW = 2
_TEXTS = ("text_folder", "tokens", "huggingface_text")
_IMAGENET = {"samples": 1_281_167, "classes": 1000}
_CIFAR = {"samples": 50_000, "classes": 10, "image_size": 32}


def with_stand_in_data(recipe: Recipe) -> tuple[Recipe, str | None]:
    """The recipe, and where it does not say where its data lie, with data of a usual kind and a sentence that says so.

    What decides memory and arithmetic of a step stays as it is: the size of images, mixing, repeats.
    """
    data = recipe.data
    if data.path is None and data.dataset in _TEXTS:
        return _with_stand_in_text(recipe)
    if data.path is not None or data.dataset not in ("image_folder", "packed", "webdataset", "huggingface", "cifar10"):
        return recipe, None
    known = _CIFAR if data.dataset == "cifar10" else _IMAGENET
    size = data.image_size if data.image_size != "auto" else known.get("image_size", 224)
    assumed = Data(
        dataset="synthetic",
        samples=known["samples"],
        classes=known["classes"],
        image_size=size,
        channels=data.channels,
        evaluation_size=data.evaluation_size,
        augment=Augment(repeats=data.augment.repeats),
        progressive=Progressive(),
        mix=data.mix,
    )
    name = "CIFAR-10" if known is _CIFAR else "ImageNet"
    said = f"data.path is not set: as for {name}, {known['classes']:,} classes and images of {size} pixels are assumed"
    return replace(recipe, data=assumed), said


def _with_stand_in_text(recipe: Recipe) -> tuple[Recipe, str]:
    tokens = f"{VOCABULARY:,} different tokens are assumed, as GPT-2 has"
    if recipe.data.text.tokenizer != "bytes":
        tokens = "the tokens of data.text.tokenizer are assumed"
    assumed = replace(recipe.data, dataset=REFERENCE)
    return replace(recipe, data=assumed), f"data.path is not set: {tokens}"


def batch_maker(task: Task, plan: Plan, placement: Placement) -> BatchMaker:
    """What makes batches like the run's, with empty tensors; to be used where those are fake.

    An image task's are known from its plan. Of another one's, two samples are read.
    """
    if _shows_images(task):
        return _images(task, plan, placement)
    with contextlib.closing(task.open_pipeline(placement)) as pipeline:
        pipeline.start(training=True, evaluation=False)
        few = min(_FEW, plan.train_samples)
        geometry = StepGeometry(
            seed=task.recipe.seed, samples=plan.train_samples, global_batch_size=few, logical_ranks=1
        )
        example = next(iter(pipeline.train_batches(geometry, 0, 1, World())))
    return _like(example)


def evaluation_batch_maker(task: Task, plan: Plan, placement: Placement) -> BatchMaker:
    """The same for batches that are scored: the largest images of evaluation, and no mixing."""
    if _shows_images(task):
        return _scored_images(task, plan, placement)
    with contextlib.closing(task.open_pipeline(placement)) as pipeline:
        pipeline.start(training=False, evaluation=True)
        few = min(_FEW, plan.evaluation_samples)
        example = next(iter(pipeline.evaluation_batches(few, World())))
    return _like(example)


def _shows_images(task: Task) -> TypeGuard[ImageClassification]:
    return isinstance(task, ImageClassification) and type(task).open_pipeline is ImageClassification.open_pipeline


def _scored_images(task: ImageClassification, plan: Plan, placement: Placement) -> BatchMaker:
    found, data, views = task.dataset, task.recipe.data, task.recipe.evaluate.augment
    side = evaluation_size(data, found)
    if views in CROPS:
        side = evaluation_size(shown_for_crops(data, side, views), found)
    shapes = [tuple(map(int, each.split("x"))) for each in plan.data.get("evaluation_shapes", ())] or [(side, side)]
    height, width = max(shapes, key=math.prod)
    memory_format = torch.channels_last if placement.channels_last else torch.contiguous_format

    def make(count: int) -> Batch:
        inputs = torch.empty((count, found.channels, height, width), memory_format=memory_format)
        part = _part(count)
        return Batch(inputs, torch.empty(count, dtype=torch.int64), part.ids, part)

    return make


def _images(task: ImageClassification, plan: Plan, placement: Placement) -> BatchMaker:
    found = task.dataset
    is_mixed = Mixing(task.recipe.data.mix, len(found.classes), task.recipe.seed).is_asked_for
    memory_format = torch.channels_last if placement.channels_last else torch.contiguous_format

    def make(count: int) -> Batch:
        inputs = torch.empty(count, found.channels, found.image_size, found.image_size).to(memory_format=memory_format)
        targets = torch.empty(count, len(found.classes)) if is_mixed else torch.empty(count, dtype=torch.int64)
        part = _part(count)
        return Batch(inputs, targets, part.ids, part)

    return make


def _like(example: Batch) -> BatchMaker:
    rows = len(example.ids)

    def make(count: int) -> Batch:
        def resized(tensor: Tensor) -> Tensor:
            shape = (count, *tensor.shape[1:]) if tensor.ndim and tensor.shape[0] == rows else tensor.shape
            channels_last = tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
            memory_format = torch.channels_last if channels_last else torch.contiguous_format
            return torch.empty(shape, dtype=tensor.dtype).to(memory_format=memory_format)

        part = _part(count)
        inputs, targets = (tree_map_only(Tensor, resized, each) for each in (example.inputs, example.targets))
        return replace(example, inputs=inputs, targets=targets, ids=part.ids, slice=part, broken=())

    return make


def _part(count: int) -> SampleSlice:
    return SampleSlice(step=0, epoch=0, logical_rank=0, ids=np.arange(count), step_weight=count)
