"""Read a slice into a batch, sample by sample, in a worker or in the main process.

Only the needed region of a file is decoded: its header gives the picture's size, the sample's random draws choose the
region, and that region is decoded, resized and written into the batch.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from paceline.data.batch import Batch, BrokenSample
from paceline.data.image.decode import DecodedImage, LazyImage, resizes
from paceline.data.image.image_store import shrunk, vary
from paceline.data.image.source import BrokenImageError, SampleSource, encoded_source, prefetch
from paceline.data.image.transforms import (
    Draws,
    Shape,
    Variation,
    View,
    draw,
    evaluation_image,
    has_variation,
    random_resized_box,
    resized_part,
    shrinkage,
    snapped,
)
from paceline.data.preflight import SHARED_MEMORY
from paceline.data.slices import SampleIds, SampleSlice
from paceline.recipe.data import Augment
from paceline.units import format_bytes

# Size of the result: 64 images of 32x32. Their intermediate data stay in the cache.
_PIXELS_AT_ONCE = 2**16


class ReadFailure(Exception):  # noqa: N818 (handed over as a value)
    """An unexpected error while reading (not a broken file); sent from a worker instead of its batch.

    Attributes:
        message: One sentence that names the sample.
        trace: The traceback, as text; empty if the message suffices.
    """

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message, trace)
        self.message, self.trace = message, trace


class _Sample:
    """One sample in progress, from the file to its row in the batch."""

    __slots__ = ("image", "picture", "pixels", "resized", "row", "sample")

    picture: LazyImage | DecodedImage
    pixels: NDArray[np.uint8]
    image: torch.Tensor

    def __init__(self, row: int, sample: int) -> None:
        self.row = row
        self.sample = sample
        self.resized: NDArray[np.uint8] | None = None


class SliceReader:
    """Reads the samples of a slice in order; stateless, so that any process can read any slice."""

    def __init__(self, source: SampleSource, view: View, note: Callable[[int], None] | None = None) -> None:
        """Read samples from ``source`` for ``view``; ``note`` is called with each sample's id before it is read."""
        self._source = source
        self._files = encoded_source(source)
        self._view = view
        self._note = note
        self._augment = view.augment or Augment()
        self._variation = Variation(self._augment, view.mean, view.seed)
        self._shifts = self._augment.crop == "pad"

    def __getitem__(self, piece: SampleSlice) -> Batch | ReadFailure:
        view = self._view
        prefetch(self._source, piece.ids)
        draws = None if view.augment is None else draw(view.augment, view.seed, piece.epoch, piece.variation_keys)
        size = view.read_size_at(piece.epoch)
        shape = piece.shape or (size, size)
        try:
            inputs = self._empty(len(piece.ids), shape)
            broken = self._fill(inputs, piece.ids, shape, draws)
        except ReadFailure as failure:
            return failure
        ids, keys = piece.ids, piece.variation_keys
        if broken:
            intact = ~np.isin(np.arange(len(ids)), list(broken))
            inputs, ids, keys = inputs[: len(ids) - len(broken)], ids[intact], keys[intact]
            draws = None if draws is None else draws.select(intact)
        if draws is not None:
            if self._shifts:
                inputs = vary(inputs, self._augment, draws)
            inputs = shrunk(inputs, view.size_at(piece.epoch), view.interpolation)
            inputs = self._variation(inputs, keys, piece.epoch)
        in_order = tuple(broken[row] for row in sorted(broken))
        return Batch(inputs, torch.from_numpy(self._source.labels[ids]), ids, piece, in_order)

    def _fill(self, inputs: torch.Tensor, ids: SampleIds, shape: Shape, draws: Draws | None) -> dict[int, BrokenSample]:
        """Read samples into the first rows of a batch; return the broken ones, which are left out, by row.

        Small images are processed in groups, step by step: alternating between file system, decoder and torch per image
        would add 50 % to the time.
        """
        broken: dict[int, BrokenSample] = {}
        rows, pixels, filled = inputs.unbind(), inputs.permute(0, 2, 3, 1).numpy(), 0
        at_once = max(1, _PIXELS_AT_ONCE // (shape[0] * shape[1]))
        samples = list(enumerate(ids.tolist()))
        for begin in range(0, len(samples), at_once):
            group = [_Sample(row, sample) for row, sample in samples[begin : begin + at_once]]
            for step in (self._open, partial(self._decode, shape, draws), partial(self._resize, shape, draws)):
                group = [each for each in group if self._run_step(step, each, broken)]
            for each in group:
                if each.resized is None:
                    rows[filled].copy_(each.image)
                else:
                    pixels[filled] = each.resized
                filled += 1
        return broken

    def _run_step(self, step: Callable[[_Sample], None], state: _Sample, broken: dict[int, BrokenSample]) -> bool:
        sample = state.sample
        if self._note is not None:
            self._note(sample)
        try:
            step(state)
        except BrokenImageError as error:
            broken[state.row] = BrokenSample(sample, error.path or self._source.path(sample), error.reason)
            return False
        except Exception as error:  # noqa: BLE001 (raised by the training process, which knows what to stop)
            sample_text = f"Reading sample {sample} ({self._source.path(sample)})"
            message = f"{sample_text} failed: {type(error).__name__}: {error}"
            raise ReadFailure(message, traceback.format_exc()) from None
        return True

    def _open(self, state: _Sample) -> None:
        if self._files is None:
            state.picture = DecodedImage(self._source.read(state.sample))
        else:
            state.picture = LazyImage(self._files.encoded(state.sample), self._view.channels)

    def _decode(self, shape: Shape, draws: Draws | None, state: _Sample) -> None:
        """Decode the region of a picture that the model sees, or all of it."""
        picture, augment = state.picture, self._augment
        if draws is None or draws.attempts is None:
            state.pixels = picture.part()
            return
        box = random_resized_box(draws.attempts[state.row], picture.size, augment.scale, augment.ratio)
        shrink = shrinkage(box, shape[0]) if augment.shrink_on_load and picture.shrinks else 1
        box = snapped(box, shrink) if shrink > 1 else box
        if resizes(*shape) and isinstance(picture, LazyImage):
            bicubic, flip = self._view.interpolation == "bicubic", bool(draws.flip[state.row])
            state.resized = picture.resized_part(box, shrink, shape, bicubic=bicubic, flip=flip)
        if state.resized is None:
            state.pixels = picture.part(box, shrink)

    def _resize(self, shape: Shape, draws: Draws | None, state: _Sample) -> None:
        """Resize to the model's input and flip as drawn, unless already done."""
        if state.resized is not None:
            return
        view = self._view
        if draws is None or draws.attempts is None:
            image = evaluation_image(state.pixels, shape, view.evaluation_crop, view.interpolation)
        else:
            image = resized_part(state.pixels, shape[0], view.interpolation)
        flips = draws is not None and bool(draws.flip[state.row]) and not self._shifts
        state.image = image.flip(-1) if flips else image

    def _empty(self, count: int, shape: Shape) -> torch.Tensor:
        """Allocate a batch, uint8 [N, C, H, W]; in a worker, in memory shared with the main process."""
        channels, (height, width) = self._view.channels, shape
        size = count * channels * height * width
        if get_worker_info() is None:
            flat = torch.empty(size, dtype=torch.uint8)
        else:
            # As in torch's collation: a batch in other memory would be copied on transfer.
            try:
                storage = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]  # noqa: SLF001 (torch's collation calls it)
            except RuntimeError as error:
                raise unshared(error, size) from None
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        if self._shifts or has_variation(self._augment):
            # Shifts use rows of one channel, and torchvision's operations may round differently with channels last.
            return flat.view(count, channels, height, width)
        return flat.view(count, height, width, channels).permute(0, 3, 1, 2)


def unlink_shared_memory(pid: int) -> None:
    """Unlink shared memory that a loader process left behind when it failed or was killed; torch does not.

    Transferred memory is not affected, since its name is unlinked at once.
    """
    for left in SHARED_MEMORY.glob(f"torch_{pid}_*"):
        left.unlink(missing_ok=True)


def unshared(error: BaseException, size: int) -> ReadFailure:
    """Return why a loader process could not hand over a batch of ``size`` bytes."""
    unlink_shared_memory(os.getpid())
    if "No space" in str(error):
        return ReadFailure(
            f"a loader process found too little shared memory ({SHARED_MEMORY}) for a batch of {format_bytes(size)}: "
            "give it more (docker run --shm-size=…; in Kubernetes an emptyDir of medium Memory), or lower "
            "data.workers, data.prefetch or batch.micro_size."
        )
    return ReadFailure(
        f"a loader process could not hand over a batch ({type(error).__name__}: {error}); data.workers=0 reads without "
        "loader processes."
    )
