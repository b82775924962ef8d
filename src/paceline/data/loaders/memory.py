"""Back-ends without files: images decoded once and kept in memory, and noise.

Batches from memory are made by one gather on the device, which takes microseconds, so that a small network does not
wait for its data. Each process of a run holds a separate copy. Noise removes reading and decoding from a run, to
measure the model alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from paceline.data.batch import Batch, BrokenSample, Progress
from paceline.data.image.image_store import ImageStore, StoreShape, shrunk
from paceline.data.image.source import BrokenImageError, SampleSource, as_array, unrepeated
from paceline.data.image.transforms import Draws, Variation, View, draw, evaluation_image, has_variation
from paceline.data.slices import SampleIds, SampleSlice
from paceline.recipe.data import Augment

_LOADED_AT_ONCE = 256
_DRAWN_AT_ONCE = 4096


class MemoryBackend:
    """Serves one split from memory; implements :class:`paceline.data.batch.Backend`."""

    def __init__(
        self,
        source: SampleSource,
        view: View,
        *,
        device: str | torch.device = "cpu",
        channels_last: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Load every image of ``source``; images of another size are resized as for evaluation.

        Args:
            source: The split's images.
            view: Preprocessing.
            device: Device that holds the images and makes the batches, on the current stream.
            channels_last: Whether the model uses channels-last; this affects only speed, not pixels.
            progress: Called with the number of loaded images.
        """
        augment = view.augment
        self._view = view
        self._one_by_one = augment is not None and has_variation(augment)
        self._variation = Variation(augment or Augment(), view.mean, view.seed)
        self._device = torch.device(device)
        once = unrepeated(source)
        self._images = len(once)
        shape = StoreShape.of(
            augment, count=len(once), channels=view.channels, size=view.image_size, channels_last=channels_last
        )
        self._store: ImageStore | None
        self._store, self._broken = hold_images(once, view, shape, self._device, progress)
        self._labels = torch.tensor(source.labels, device=self._device)

    def batches(self, slices: Iterable[SampleSlice]) -> Iterator[Batch]:
        """Yield one uint8 batch per slice; reads slices up to 4096 samples ahead, to compute their draws together."""
        augment = self._view.augment
        moves = augment is not None and (augment.crop != "none" or augment.flip > 0)
        for group in _grouped(slices):
            parts = [self._intact(piece) for piece in group]
            ids, keys = (np.concatenate([each[kind] for each in parts]) for kind in (0, 1))
            draws = draw(augment, self._view.seed, group[0].epoch, keys) if augment is not None and moves else None
            starts, rows = self._indices(ids, draws)
            sizes = [len(each[0]) for each in parts]
            targets = self._labels.index_select(0, rows)
            batches = zip(group, parts, torch.split(starts, sizes), torch.split(targets, sizes), strict=True)
            for piece, (whole, own, broken), begins, labels in batches:
                yield Batch(self._inputs(begins, own, piece.epoch), labels, whole, piece, broken)

    def reading(self) -> str:
        """Return nothing: the images have been read."""
        return ""

    def close(self) -> None:
        """Release the images."""
        self._store = None

    def _indices(self, ids: SampleIds, draws: Draws | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images' starts in the store and their labels, on the device; for many batches at once."""
        both = torch.from_numpy(np.stack((self._opened().starts(ids % self._images, draws), ids)))
        if self._device.type == "cuda":
            # From pinned memory, since the copy would otherwise block; torch keeps it until the copy is done.
            both = both.pin_memory().to(self._device, non_blocking=True)
        elif self._device.type != "cpu":
            both = both.to(self._device)
        return both[0], both[1]

    def _inputs(self, starts: torch.Tensor, keys: SampleIds, epoch: int) -> torch.Tensor:
        inputs = shrunk(self._opened().gather(starts), self._view.size_at(epoch), self._view.interpolation)
        if self._one_by_one:
            # In the memory format of loader processes' batches, since results may depend on it.
            inputs = self._variation(inputs.contiguous(), keys, epoch)
        return inputs

    def _opened(self) -> ImageStore:
        if self._store is None:
            raise RuntimeError("this back-end is closed")
        return self._store

    def _intact(self, piece: SampleSlice) -> tuple[SampleIds, SampleIds, tuple[BrokenSample, ...]]:
        """Return the ids of a slice's intact samples, the keys of their augmentation, and the broken samples."""
        if not self._broken:
            return piece.ids, piece.variation_keys, ()
        faults = [(sample, self._broken.get(sample % self._images)) for sample in piece.ids.tolist()]
        broken = tuple(replace(each, id=sample) for sample, each in faults if each is not None)
        intact = np.array([each is None for _, each in faults], dtype=bool)
        return piece.ids[intact], piece.variation_keys[intact], broken


def hold_images(
    source: SampleSource, view: View, shape: StoreShape, device: torch.device, progress: Progress | None = None
) -> tuple[ImageStore, dict[int, BrokenSample]]:
    """Decode a whole source into a store, or wrap its array; broken images stay black and are reported by id."""
    size, count = view.image_size, len(source)
    array = as_array(source) if device.type == "cpu" else None
    if array is not None and (existing := ImageStore.over(shape, device, array)) is not None:
        return existing, {}
    store = ImageStore(shape, device)
    broken: dict[int, BrokenSample] = {}

    def load(start: int) -> int:
        samples = range(start, min(start + _LOADED_AT_ONCE, count))
        images = np.zeros((len(samples), size, size, view.channels), dtype=np.uint8)
        for sample in samples:
            try:
                image = source.read(sample)
                if image.shape[:2] != (size, size):
                    resized = evaluation_image(image, size, view.evaluation_crop, view.interpolation)
                    image = resized.permute(1, 2, 0).numpy()
                images[sample - start] = image
            except BrokenImageError as error:
                broken[sample] = BrokenSample(sample, error.path, error.reason)
        store.put(start, torch.from_numpy(images).permute(0, 3, 1, 2))
        return samples.stop

    # Decoding releases the GIL; torch's thread count is this process's share of the cores.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for stop in pool.map(load, range(0, count, _LOADED_AT_ONCE)):
            if progress is not None:
                progress(stop, count)
    return store, broken


def _grouped(slices: Iterable[SampleSlice]) -> Iterator[list[SampleSlice]]:
    """Group consecutive slices of one epoch: drawing for 4 samples takes as long as for 400."""
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


_KEY = 0x6E6F6973


class SyntheticBackend:
    """Serves noise instead of one split's images; implements :class:`paceline.data.batch.Backend`."""

    def __init__(self, source: SampleSource, view: View, *, pin_memory: bool = False) -> None:
        """Take labels and ids from ``source``, and shapes from ``view``; the augmentation is not applied.

        With ``pin_memory``, the noise is made in pinned memory, so that copying it to a GPU costs the host nothing.
        """
        self._labels = source.labels
        self._view = view
        self._pin_memory = pin_memory
        self._noise: dict[int, torch.Tensor] = {}

    def batches(self, slices: Iterable[SampleSlice]) -> Iterator[Batch]:
        """Yield one uint8 batch per slice; batches of equal length share one read-only tensor."""
        for piece in slices:
            count = len(piece.ids)
            if count not in self._noise:
                shape = (count, self._view.channels, self._view.image_size, self._view.image_size)
                length = int(np.prod(shape))
                words = np.random.Philox(key=_KEY).random_raw(-(-length // 8))
                noise = torch.from_numpy(words.view(np.uint8)[:length].reshape(shape))
                self._noise[count] = noise.pin_memory() if self._pin_memory else noise
            yield Batch(self._noise[count], torch.from_numpy(self._labels[piece.ids]), piece.ids, piece)

    def reading(self) -> str:
        """Return nothing: nothing is read."""
        return ""

    def close(self) -> None:
        """Release the noise."""
        self._noise.clear()
