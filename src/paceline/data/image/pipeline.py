"""Choose the image back-end and its workers, reject unsupported settings, and open its batches.

With ``data.evaluation_shape=rectangular`` an image's evaluation shape depends on the image and the recipe alone, not on
its batch: each batch has images of one shape. So a sample gets the same score in any batch (unlike fastai's rectangular
validation, Howard 2018, which uses a batch's mean aspect ratio).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeGuard

import numpy as np
import torch

from paceline.data.batch import Backend, Batch, Nested, Placement, Progress, to_device
from paceline.data.image.datasets import LARGEST_SMALL_IMAGE, ImageDataset
from paceline.data.image.feed_rates import FeedRates
from paceline.data.image.image_store import StoreShape
from paceline.data.image.source import MeasuredSource, SampleSource, SubsetSource, repeated, unrepeated
from paceline.data.image.transforms import Mixing, Shape, View, has_variation
from paceline.data.loaders.memory import MemoryBackend, SyntheticBackend
from paceline.data.loaders.pytorch import PytorchBackend
from paceline.data.order import StepGeometry, evaluation_rounds, evaluation_slices
from paceline.data.slices import SampleShapes
from paceline.data.splits import Source
from paceline.errors import RecipeError, setting_error
from paceline.host.machine import available_cores, memory_bytes
from paceline.host.world import World
from paceline.parsing.units import format_bytes, format_count
from paceline.plugins.registry import installed, load
from paceline.recipe.data import Data, Progressive

# Maximum aspect ratio in either direction; longer images are cropped. It bounds the memory of a batch.
LARGEST_RATIO = 2

_MEASURED_AT_ONCE = 64
_READERS = 8  # reading a header is mostly waiting for the disk


def rectangle(height: int, width: int, *, size: int, multiple: int) -> Shape:
    """Return the shape at which an image of ``height`` x ``width`` is shown.

    The shorter side is ``size``; the longer one is ``size`` plus the nearest multiple of ``multiple`` pixels.
    """
    short, long = sorted((height, width))
    # Integer rounding, halves up, so that every machine rounds alike.
    steps = (2 * size * (long - short) + multiple * short) // (2 * multiple * short)
    longer = size + multiple * min(steps, size * (LARGEST_RATIO - 1) // multiple)
    return (longer, size) if height > width else (size, longer)


def measure(source: SampleSource, *, size: int, multiple: int) -> SampleShapes:
    """Return the shape of every image of a source, from file headers; int64 [N, 2].

    An image with an unreadable header counts as square; the error appears when it is read.

    Raises:
        RecipeError: If a custom source does not provide sizes.
    """
    if not _is_measured(source):
        raise setting_error(
            "data.evaluation_shape",
            "rectangular",
            "needs to know every image's size before it is read, and this data set's source does not provide it: add "
            "a method size(sample) that returns (height, width), or use square.",
        )
    shapes = np.full((len(source), 2), size, dtype=np.int64)

    def fill(begin: int) -> None:
        for sample in range(begin, min(begin + _MEASURED_AT_ONCE, len(source))):
            shape = source.size(sample)
            if shape is not None:
                shapes[sample] = rectangle(*shape, size=size, multiple=multiple)

    with ThreadPoolExecutor(_READERS) as pool:
        list(pool.map(fill, range(0, len(source), _MEASURED_AT_ONCE)))
    return shapes


def distinct_sizes(shapes: SampleShapes) -> dict[Shape, int]:
    """Return the number of images of each shape."""
    sizes, counts = np.unique(shapes, axis=0, return_counts=True)
    return {(int(height), int(width)): int(count) for (height, width), count in zip(sizes, counts, strict=True)}


def common_size(source: SampleSource) -> Shape | None:
    """Return the common height and width of 32 evenly spread images, by their headers; None if there is none."""
    if len(source) == 0 or not _is_measured(source):
        return None
    sizes = {source.size(int(sample)) for sample in np.linspace(0, len(source) - 1, min(32, len(source)))}
    return sizes.pop() if len(sizes) == 1 else None


def _is_measured(source: SampleSource) -> TypeGuard[MeasuredSource]:
    return _is_measured(source.base) if isinstance(source, SubsetSource) else isinstance(source, MeasuredSource)


Split = Literal["train", "validation"]


class ImageBackend(Protocol):
    """A back-end of an installed package, which ``data.backend`` names: its settings, and how it opens a split."""

    def why_unavailable(self) -> str:
        """Return why it cannot be used here, and what to do; empty if it can."""
        ...

    def check(self, data: Data, dataset: ImageDataset) -> None:
        """Check what a recipe asks of it.

        Raises:
            RecipeError: If it cannot do that, or cannot be used here.
        """
        ...

    def workers(self, data: Data, world: World) -> tuple[int, str]:
        """Return its threads or processes per rank, with the reason.

        Raises:
            RecipeError: If it does not take the recipe's number.
        """
        ...

    def open(self, source: SampleSource, view: View, data: Data, *, workers: int, device: torch.device) -> Backend:
        """Open one split, preprocessed as ``view`` says; ``device`` is the model's."""
        ...


LARGEST_IN_MEMORY = 2**30
# Share of a GPU's memory for the images of one split; the rest is for the model, gradients and activations.
LARGEST_SHARE_OF_DEVICE = 0.125
_ON_CPU = Placement(device=torch.device("cpu"))
_WITHOUT_WORKERS = ("memory", "synthetic")


def available_backends() -> dict[str, str]:
    """Return back-ends, with the reason why one is unavailable."""
    others = {name: _installed_backend(name).why_unavailable() or "available" for name in installed("backends")}
    return {"memory": "available", "pytorch": "available", **others, "synthetic": "available"}


def _installed_backend(name: str) -> ImageBackend:
    backend: ImageBackend = load("backends", name, RecipeError)()
    return backend


def choose_backend(data: Data, dataset: ImageDataset, processes: int = 1) -> tuple[str, str]:
    """Return the back-end's name and the reason for it.

    Args:
        data: The recipe's section.
        dataset: The opened data set.
        processes: Processes on this machine, each of which would hold the images in memory.

    Raises:
        RecipeError: If the recipe names a back-end that does not support its settings.
    """
    if data.backend != "auto":
        _refuse(data, dataset, processes)
        return data.backend, "as the recipe says"
    if data.dataset == "synthetic":
        _refuse(replace(data, backend="synthetic"), dataset, processes)
        return "synthetic", "noise needs no reading"
    if data.workers not in ("auto", 0):
        return "pytorch", f"data.workers={data.workers} asks for loader processes"
    if reason := _no_workers_reason(data):
        return "pytorch", reason
    total, text = _decoded(dataset)
    if dataset.native_size is None or max(dataset.native_size) > LARGEST_SMALL_IMAGE:
        return "pytorch", f"images are not all of one size up to {LARGEST_SMALL_IMAGE} pixels"
    if total > LARGEST_IN_MEMORY:
        return "pytorch", f"{text}, more than {format_bytes(LARGEST_IN_MEMORY)}"
    if reason := _too_large(data, dataset, processes):
        return "pytorch", reason
    return "memory", text


def _no_workers_reason(data: Data) -> str:
    """Return a setting of the recipe that requires per-image processing, if any."""
    if data.augment.crop == "random_resized":
        return "crop=random_resized needs each image at its full size"
    if data.evaluation_shape != "square":
        return f"data.evaluation_shape={data.evaluation_shape} shows images in several shapes"
    if has_variation(data.augment):
        return "data.augment asks for operations on single images, which loader processes run in parallel"
    return ""


def evaluation_size(data: Data, dataset: ImageDataset) -> int:
    """Height and width of evaluation images."""
    return dataset.image_size if data.evaluation_size == "auto" else data.evaluation_size


def choose_workers(data: Data, backend: str, world: World, measured: FeedRates | None = None) -> tuple[int, str]:
    """Return loader processes, or another back-end's threads, per rank, with the reason.

    Uses the measured number of loader processes if there is one; otherwise their share of the cores.

    Raises:
        RecipeError: If the back-end does not take the recipe's number.
    """
    if backend in _WITHOUT_WORKERS:
        return 0, f"the {backend} back-end has none"
    if backend != "pytorch":
        return _installed_backend(backend).workers(data, world)
    if data.workers != "auto":
        return data.workers, "as the recipe says"
    return share_of_cores(world) if measured is None else (measured.best, str(measured))


def share_of_cores(world: World, maximum: int = 16, why: str = "") -> tuple[int, str]:
    """Return the cores for a rank's loaders, with the reason: its share but one, which is left for training.

    Args:
        world: The run's processes.
        maximum: Maximum number.
        why: What limits it, to add to the reason.
    """
    cores = available_cores()
    workers = max(1, min(cores // world.local_world_size - 1, maximum))
    processes = "one process" if world.local_world_size == 1 else f"{world.local_world_size} processes"
    return workers, f"{cores} cores for {processes}, one of each share reserved for training{why}"


def open_backend(
    name: str,
    data: Data,
    dataset: ImageDataset,
    split: Split,
    *,
    seed: int,
    workers: int = 0,
    placement: Placement = _ON_CPU,
    progress: Progress | None = None,
) -> Backend:
    """Open one split with its transform: training images are augmented, held-out images are not.

    Args:
        name: Result of :func:`choose_backend`.
        data: The recipe's section.
        dataset: The opened data set.
        split: The images to open.
        seed: The run's seed.
        workers: Result of :func:`choose_workers`.
        placement: The model's device; for a GPU, batches are made there or in pinned memory.
        progress: Called by the memory back-end with the number of loaded images.
    """
    train = split == "train"
    source = repeated(dataset.train, data.augment.repeats) if train else dataset.validation
    view = View(
        image_size=dataset.image_size if train else evaluation_size(data, dataset),
        channels=dataset.channels,
        evaluation_crop=data.evaluation_crop,
        augment=data.augment if train else None,
        seed=seed,
        mean=dataset.mean,
        interpolation=data.interpolation,
        progressive=data.progressive if train else Progressive(),
    )
    on_gpu = placement.device.type == "cuda"
    if name == "memory":
        held_there = on_gpu and _fits_on_device(source, view, placement.device)
        return MemoryBackend(
            source,
            view,
            device=placement.device if held_there else "cpu",
            channels_last=placement.channels_last,
            progress=progress,
        )
    if name == "synthetic":
        return SyntheticBackend(source, view, pin_memory=on_gpu)
    if name == "pytorch":
        return PytorchBackend(source, view, workers=workers, prefetch=data.prefetch, pin_memory=on_gpu)
    return _installed_backend(name).open(source, view, data, workers=workers, device=placement.device)


def _fits_on_device(source: SampleSource, view: View, device: torch.device) -> bool:
    """Whether a GPU has memory for the images next to the model, and all preprocessing can run there."""
    if view.augment is not None and has_variation(view.augment):
        return False
    shape = StoreShape.of(view.augment, count=len(unrepeated(source)), channels=view.channels, size=view.image_size)
    return shape.bytes <= LARGEST_SHARE_OF_DEVICE * torch.cuda.get_device_properties(device).total_memory


def _refuse(data: Data, dataset: ImageDataset, processes: int) -> None:
    if data.dataset == "synthetic" and data.backend != "synthetic":
        raise RecipeError(
            f"data.backend is {data.backend}, but the synthetic data set has no files to read: use "
            "data.backend=synthetic, or another data.dataset."
        )
    if data.backend not in ("pytorch", *_WITHOUT_WORKERS):
        _installed_backend(data.backend).check(data, dataset)
    if data.backend == "synthetic":
        _refuse_synthetic(data)
    if data.backend in _WITHOUT_WORKERS and data.evaluation_shape != "square":
        raise setting_error(
            "data.evaluation_shape",
            data.evaluation_shape,
            f"asks for images of several shapes, and the {data.backend} back-end stores only one: use "
            "data.backend=pytorch with files, or leave it out.",
        )
    if data.backend != "memory":
        return
    if data.augment.crop == "random_resized":
        raise RecipeError(
            "data.backend is memory, which keeps images at the size the model sees and cannot crop "
            "random_resized from the original: use data.backend=pytorch, or data.augment.crop=pad."
        )
    if reason := _too_large(data, dataset, processes):
        raise RecipeError(f"data.backend is memory, but {reason}: use data.backend=pytorch.")


def _refuse_synthetic(data: Data) -> None:
    if data.augment.crop != "none" or data.augment.flip > 0 or has_variation(data.augment):
        raise RecipeError(
            f"data.augment (crop={data.augment.crop}, flip={data.augment.flip}, …) has no effect on noise, which the "
            "synthetic back-end never varies: remove it (data.augment=null), or use another data.backend."
        )
    if data.progressive.start_size is not None:
        raise setting_error(
            "data.progressive.start_size",
            data.progressive.start_size,
            "asks for images of several sizes, and the synthetic back-end has only one: use a data set of images, or "
            "leave it out.",
        )


def _too_large(data: Data, dataset: ImageDataset, processes: int) -> str:
    """Explain why images do not fit into memory; empty if they do."""
    sizes = (dataset.image_size, evaluation_size(data, dataset))
    splits = ((dataset.train, data.augment), (dataset.validation, None))
    held_bytes = sum(
        StoreShape.of(augment, count=len(source), channels=dataset.channels, size=size).bytes
        for size, (source, augment) in zip(sizes, splits, strict=True)
    )
    memory = memory_bytes()
    if memory is None or held_bytes * processes <= memory:
        return ""
    _, text = _decoded(dataset)
    each = "" if processes == 1 else f" in each of {processes} processes"
    return f"{text}, {format_bytes(held_bytes)} in memory{each}, and this machine has {format_bytes(memory)}"


def _decoded(dataset: ImageDataset) -> tuple[int, str]:
    count, size = len(dataset.train) + len(dataset.validation), dataset.image_size
    total = count * size * size * dataset.channels
    return total, f"{format_count(count)} images of {size}x{size}x{dataset.channels} take {format_bytes(total)}"


@dataclass(frozen=True, kw_only=True)
class OpenedSplit:
    """One split of a data set, and how to open a back-end for it.

    Attributes:
        source: Its samples.
        open: Opens the back-end; may report progress.
        shapes: Shape of each image, if not the same for all.
    """

    source: Source[Any]
    open: Callable[[Progress | None], Backend]
    shapes: SampleShapes | None = None


class ImagePipeline:
    """Training and evaluation batches of two splits.

    Back-ends with loader processes open in :meth:`start`, others on first use, since decoding a whole set would be
    wasted if the run is already complete. Only the streams requested in :meth:`start` are loaded.
    """

    def __init__(
        self,
        *,
        train: OpenedSplit,
        evaluation: OpenedSplit,
        normalize: Callable[[Nested], Nested],
        placement: Placement,
        has_workers: bool,
        mixing: Mixing | None = None,
    ) -> None:
        self._splits = {True: train, False: evaluation}
        self._opened: dict[bool, Backend] = {}
        self._wanted = {True: True, False: True}
        self._normalize = normalize
        self._placement = placement
        self._has_workers = has_workers
        self._moving: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._mixing = mixing if mixing is not None and mixing.is_active else None

    def start(self, *, training: bool, evaluation: bool) -> None:
        """Start the loader processes for these streams, if any."""
        self._wanted = {True: training, False: evaluation}
        for split, is_wanted in self._wanted.items():
            if is_wanted and self._has_workers:
                self._backend(training=split)

    def load(self, report: Progress) -> None:
        """Load the in-memory data now and report progress."""
        for split, is_wanted in self._wanted.items():
            if is_wanted and len(self._splits[split].source):
                self._backend(report, training=split)

    def train_batches(self, geometry: StepGeometry, first: int, last: int, world: World) -> Iterator[Batch]:
        """Yield this process's micro-batches of steps ``first`` to ``last`` (excluded)."""
        raw = self._backend(training=True).batches(geometry.stream(first, last, world))
        return to_device(raw, self._normalize, self._placement, self._mixing, self._moving)

    def timed_by(self, moving: Callable[[], AbstractContextManager[Any]]) -> None:
        """Enter the context of ``moving`` whenever a training step waits for a transfer to the device."""
        self._moving = moving

    def evaluation_batches(self, batch_size: int, world: World) -> Iterator[Batch]:
        """Yield this process's part of the evaluation samples."""
        split = self._splits[False]
        slices = evaluation_slices(len(split.source), batch_size, world, split.shapes)
        return to_device(self._backend(training=False).batches(slices), self._normalize, self._placement)

    def evaluation_rounds(self, batch_size: int, world: World) -> int:
        """Maximum number of evaluation batches of any process."""
        split = self._splits[False]
        return evaluation_rounds(len(split.source), batch_size, world, split.shapes)

    def sample_name(self, sample_id: int, *, training: bool) -> str:
        """Return the sample's file, or its set and number."""
        return self._splits[training].source.path(sample_id)

    def reading(self, *, training: bool) -> str:
        """Describe the sample being read or read last; empty outside training."""
        return self._opened[training].reading() if training in self._opened else ""

    def close(self) -> None:
        """Stop the workers."""
        for backend in self._opened.values():
            backend.close()
        self._opened = {}

    def _backend(self, progress: Progress | None = None, *, training: bool) -> Backend:
        if training not in self._opened:
            self._opened[training] = self._splits[training].open(progress)
        return self._opened[training]
