"""The back-end for small images: all of a split decoded once into one tensor, and batches made by one gather.

Per batch this costs microseconds, so that a small network is not held up by its data. Each process of a run
holds its own copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from paceline.data.batch import Batch, BrokenSample, Progress
from paceline.data.image.augmentation import Draws, draw
from paceline.data.image.batched import PaddedImages, flip_some, index_tensor
from paceline.data.image.source import BrokenImageError, SampleSource, as_array, unrepeated
from paceline.data.image.transforms import View, evaluation_image
from paceline.data.image.variation import Variation, asks_for_variation
from paceline.data.slices import SampleIds, SampleSlice
from paceline.errors import RecipeError
from paceline.recipe.data import Augment

_LOADED_AT_ONCE = 256
_DRAWN_AT_ONCE = 4096


class MemoryBackend:
    """Serves one split from memory; satisfies :class:`paceline.data.batch.Backend`."""

    def __init__(
        self,
        source: SampleSource,
        view: View,
        *,
        device: str | torch.device = "cpu",
        pin_memory: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Load every image of ``source``; images of another size are resized as for evaluation.

        Args:
            source: The split's images.
            view: What the model sees of them.
            device: Where the images are held and the batches are made, on the stream that is current then.
            pin_memory: Whether batches are moved to page-locked memory, for faster copies to a GPU.
            progress: Told how many images are loaded.

        Raises:
            RecipeError: If the augmentation needs the images' full resolution.
        """
        augment = view.augment
        if augment is not None and augment.crop == "random_resized":
            raise RecipeError(
                "data.augment.crop is random_resized, which the memory back-end does not do, because it "
                "keeps images at the size the model sees: use data.backend=pytorch, or crop=pad."
            )
        self._view = view
        self._variation = Variation(augment or Augment(), view.mean, view.seed)
        self._device = torch.device(device)
        self._pin_memory = pin_memory
        images, self._broken = load_images(unrepeated(source), view, progress)
        self._images = len(images)
        images = images.to(self._device)
        self._labels = torch.tensor(source.labels, device=self._device)
        self._plain: torch.Tensor | None = images
        self._padded: PaddedImages | None = None
        if augment is not None and augment.crop == "pad":
            self._padded = PaddedImages(images, augment.padding, augment.padding_mode)
            self._plain = None

    def batches(self, slices: Iterable[SampleSlice]) -> Iterator[Batch]:
        """Yield one uint8 batch per slice; reads slices up to 4096 samples ahead, to draw them at once."""
        augment = self._view.augment
        if augment is None or (augment.crop == "none" and augment.flip == 0 and not asks_for_variation(augment)):
            for piece in slices:
                yield self._batch(piece, None)
            return
        for group in _grouped(slices):
            ids = np.concatenate([piece.ids for piece in group])
            draws = draw(augment, self._view.seed, group[0].epoch, ids)
            ends = accumulate(len(piece.ids) for piece in group)
            for piece, end in zip(group, ends, strict=True):
                yield self._batch(piece, draws.part(end - len(piece.ids), end))

    def close(self) -> None:
        """Release the images."""
        self._plain = self._padded = None

    def _batch(self, piece: SampleSlice, draws: Draws | None) -> Batch:
        ids = piece.ids
        broken: tuple[BrokenSample, ...] = ()
        if self._broken:
            ids, draws, broken = self._without_broken(ids, draws)
        inputs = self._inputs(ids % self._images, draws)
        if draws is not None:
            inputs = self._variation(inputs, ids, piece.epoch)
        batch = Batch(inputs, self._labels.index_select(0, index_tensor(ids, self._device)), ids, piece, broken)
        return batch.pin_memory() if self._pin_memory else batch

    def _inputs(self, ids: SampleIds, draws: Draws | None) -> torch.Tensor:
        if self._padded is not None and draws is not None and draws.offsets is not None:
            images = self._padded.crop(ids, draws.offsets)
        elif self._plain is not None:
            images = self._plain.index_select(0, index_tensor(ids, self._device))
        else:
            raise RuntimeError("this back-end is closed")
        return images if draws is None else flip_some(images, draws.flip)

    def _without_broken(
        self, ids: SampleIds, draws: Draws | None
    ) -> tuple[SampleIds, Draws | None, tuple[BrokenSample, ...]]:
        found = [(sample, self._broken.get(sample % self._images)) for sample in ids.tolist()]
        broken = tuple(replace(each, id=sample) for sample, each in found if each is not None)
        if not broken:
            return ids, draws, ()
        whole = ~np.isin(ids, [sample.id for sample in broken])
        return ids[whole], None if draws is None else draws.where(whole), broken


def load_images(
    source: SampleSource, view: View, progress: Progress | None = None
) -> tuple[torch.Tensor, dict[int, BrokenSample]]:
    """Decode a whole source to uint8 [N, C, S, S], broken images as zeros, and list those by id."""
    size = view.image_size
    array = as_array(source)
    if array is not None and array.shape[1:3] == (size, size):
        return torch.from_numpy(array.transpose(0, 3, 1, 2).copy()), {}
    count = len(source)
    images = torch.zeros((count, view.channels, size, size), dtype=torch.uint8)
    broken: dict[int, BrokenSample] = {}

    def load(start: int) -> int:
        stop = min(start + _LOADED_AT_ONCE, count)
        for sample in range(start, stop):
            try:
                images[sample] = evaluation_image(source.read(sample), size, view.evaluation_crop, view.interpolation)
            except BrokenImageError as error:
                broken[sample] = BrokenSample(sample, error.path, error.reason)
        return stop

    # Decoding releases the interpreter's lock; torch's threads are this process's share of the cores.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for stop in pool.map(load, range(0, count, _LOADED_AT_ONCE)):
            if progress is not None:
                progress(stop, count)
    return images, broken


def _grouped(slices: Iterable[SampleSlice]) -> Iterator[list[SampleSlice]]:
    """Group following slices of one epoch: drawing 4 samples costs as much time as drawing 400."""
    group: list[SampleSlice] = []
    samples = 0
    for piece in slices:
        if group and (piece.epoch != group[0].epoch or samples + len(piece.ids) > _DRAWN_AT_ONCE):
            yield group
            group, samples = [], 0
        group.append(piece)
        samples += len(piece.ids)
    if group:
        yield group
