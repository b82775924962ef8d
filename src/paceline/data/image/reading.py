"""How does a slice become a batch, read sample by sample? The same in a worker as in the run's process."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from paceline.data.batch import Batch, BrokenSample
from paceline.data.image.augmentation import Draws, draw, random_resized_box
from paceline.data.image.batched import vary
from paceline.data.image.source import BrokenImageError, SampleSource, announce
from paceline.data.image.transforms import Shape, View, evaluation_image, training_image
from paceline.data.image.variation import Variation
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
        self._view = view
        self._note = note
        self._variation = Variation(view.augment or Augment(), view.mean, view.seed)

    def __getitem__(self, piece: SampleSlice) -> Batch | ReadFailure:
        view = self._view
        announce(self._source, piece.ids)
        draws = None if view.augment is None else draw(view.augment, view.seed, piece.epoch, piece.ids)
        size = view.size_at(piece.epoch)
        shape = piece.shape or (size, size)
        inputs = torch.empty(len(piece.ids), view.channels, *shape, dtype=torch.uint8)
        broken: list[BrokenSample] = []
        whole = np.ones(len(piece.ids), dtype=bool)
        for row, sample in enumerate(piece.ids.tolist()):
            try:
                inputs[row - len(broken)] = self._image(
                    sample, shape, None if draws is None else draws.part(row, row + 1)
                )
            except BrokenImageError as error:
                broken.append(BrokenSample(sample, error.path, error.reason))
                whole[row] = False
            except Exception as error:  # noqa: BLE001 (raised by the training process, which knows what to stop)
                where = f"Reading sample {sample} ({self._source.path(sample)})"
                return ReadFailure(f"{where} failed: {type(error).__name__}: {error}", traceback.format_exc())
        ids = piece.ids
        if broken:
            inputs, ids = inputs[: len(ids) - len(broken)], ids[whole]
            draws = None if draws is None else draws.where(whole)
        return self._batch(piece, inputs, ids, draws, tuple(broken))

    def _batch(
        self,
        piece: SampleSlice,
        inputs: torch.Tensor,
        ids: SampleIds,
        draws: Draws | None,
        broken: tuple[BrokenSample, ...],
    ) -> Batch:
        if self._view.augment is not None and draws is not None:
            inputs = self._variation(vary(inputs, self._view.augment, draws), ids, piece.epoch)
        return Batch(inputs, torch.from_numpy(self._source.labels[ids]), ids, piece, broken)

    def _image(self, sample: int, shape: Shape, draws: Draws | None) -> torch.Tensor:
        view = self._view
        if self._note is not None:
            self._note(sample)
        image = self._source.read(sample)
        if view.augment is None or draws is None or draws.attempts is None:
            return evaluation_image(image, shape, view.evaluation_crop, view.interpolation)
        height, width = image.shape[:2]
        box = random_resized_box(draws.attempts[0], (height, width), view.augment.scale, view.augment.ratio)
        return training_image(image, box, shape[0], view.interpolation)
