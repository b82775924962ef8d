"""How does a slice become a batch, read sample by sample? The same in a worker as in the run's process.

Of a file only what is needed is decoded: its head says how large the picture is, the sample's draws say which part of
it the model sees, and that part is decoded, resized, and written into the batch.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from paceline.data.batch import Batch, BrokenSample
from paceline.data.image.augmentation import Draws, draw, random_resized_box, shrinkage, snapped
from paceline.data.image.batched import vary
from paceline.data.image.decode import DecodedPicture, Picture
from paceline.data.image.source import BrokenImageError, SampleSource, encoded_source
from paceline.data.image.transforms import Shape, View, evaluation_image, resized_part
from paceline.data.image.variation import Variation, asks_for_variation
from paceline.data.slices import SampleIds, SampleSlice
from paceline.recipe.data import Augment


@dataclass(frozen=True)
class ReadFailure:
    """A defect, not a broken file, that came up while reading; travels from a worker in place of its batch.

    Attributes:
        message: One sentence that names the sample.
        trace: The traceback, as text.
    """

    message: str
    trace: str


class SliceReader:
    """Reads the samples of a slice one after the other; without state, so that any process can read any."""

    def __init__(self, source: SampleSource, view: View, note: Callable[[int], None] | None = None) -> None:
        """Read from ``source`` what ``view`` shows; ``note`` is told each sample's id before it is read."""
        self._source = source
        self._files = encoded_source(source)
        self._view = view
        self._note = note
        self._augment = view.augment or Augment()
        self._variation = Variation(self._augment, view.mean, view.seed)
        self._shifts = self._augment.crop == "pad"

    def __getitem__(self, piece: SampleSlice) -> Batch | ReadFailure:
        view = self._view
        draws = None if view.augment is None else draw(view.augment, view.seed, piece.epoch, piece.ids)
        size = view.size_at(piece.epoch)
        shape = piece.shape or (size, size)
        inputs = self._empty(len(piece.ids), shape)
        broken: list[BrokenSample] = []
        whole = np.ones(len(piece.ids), dtype=bool)
        rows = inputs.unbind()
        for row, sample in enumerate(piece.ids.tolist()):
            try:
                rows[row - len(broken)].copy_(self._image(sample, shape, draws, row))
            except BrokenImageError as error:
                broken.append(BrokenSample(sample, error.path or self._source.path(sample), error.reason))
                whole[row] = False
            except Exception as error:  # noqa: BLE001 (raised by the training process, which knows what to stop)
                where = f"Reading sample {sample} ({self._source.path(sample)})"
                return ReadFailure(f"{where} failed: {type(error).__name__}: {error}", traceback.format_exc())
        ids = piece.ids
        if broken:
            inputs, ids = inputs[: len(ids) - len(broken)], ids[whole]
            draws = None if draws is None else draws.where(whole)
        return self._batch(piece, inputs, ids, draws, tuple(broken))

    def _empty(self, count: int, shape: Shape) -> torch.Tensor:
        """Memory for a batch, uint8 [N, C, H, W]; in a worker, memory that the run's process sees too."""
        channels, (height, width) = self._view.channels, shape
        size = count * channels * height * width
        if get_worker_info() is None:
            flat = torch.empty(size, dtype=torch.uint8)
        else:
            # As torch's own collation does: a batch in other memory would be copied when it is handed over.
            flat = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))  # noqa: SLF001
        if self._shifts or asks_for_variation(self._augment):
            # Shifts are made of rows of one channel, and torchvision's operations may round otherwise when the channel
            # is the fastest axis.
            return flat.view(count, channels, height, width)
        return flat.view(count, height, width, channels).permute(0, 3, 1, 2)

    def _batch(
        self,
        piece: SampleSlice,
        inputs: torch.Tensor,
        ids: SampleIds,
        draws: Draws | None,
        broken: tuple[BrokenSample, ...],
    ) -> Batch:
        if draws is not None:
            if self._shifts:
                inputs = vary(inputs, self._augment, draws)
            inputs = self._variation(inputs, ids, piece.epoch)
        return Batch(inputs, torch.from_numpy(self._source.labels[ids]), ids, piece, broken)

    def _image(self, sample: int, shape: Shape, draws: Draws | None, row: int) -> torch.Tensor:
        """One image, uint8 [C, height, width], cropped and flipped as drawn in a row of ``draws``."""
        view = self._view
        if self._note is not None:
            self._note(sample)
        if self._files is None:
            picture: Picture | DecodedPicture = DecodedPicture(self._source.read(sample))
        else:
            picture = Picture(self._files.encoded(sample), view.channels)
        if draws is None or draws.attempts is None:
            image = evaluation_image(picture.part(), shape, view.evaluation_crop, view.interpolation)
        else:
            image = self._cropped(picture, draws.attempts[row], shape[0])
        return image.flip(-1) if draws is not None and draws.flip[row] and not self._shifts else image

    def _cropped(self, picture: Picture | DecodedPicture, attempts: NDArray[np.float64], size: int) -> torch.Tensor:
        augment = self._augment
        box = random_resized_box(attempts, picture.size, augment.scale, augment.ratio)
        shrink = shrinkage(box, size) if augment.shrink_on_load and picture.shrinks else 1
        if shrink > 1:
            box = snapped(box, shrink)
        return resized_part(picture.part(box, shrink), size, self._view.interpolation)
