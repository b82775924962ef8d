"""The back-end that costs nothing: one batch of noise, shown again and again with the right labels and ids.

It takes reading and decoding out of a run, to measure what the model alone can do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from paceline.data.batch import Batch
from paceline.data.image.source import SampleSource
from paceline.data.image.transforms import View
from paceline.data.slices import SampleSlice

_KEY = 0x6E6F6973


class SyntheticBackend:
    """Serves noise in place of one split's images; satisfies :class:`paceline.data.batch.Backend`."""

    def __init__(self, source: SampleSource, view: View) -> None:
        """Take labels and ids from ``source``, and shapes from ``view``; the augmentation is not applied."""
        self._labels = source.labels
        self._view = view
        self._noise: dict[int, torch.Tensor] = {}

    def batches(self, slices: Iterable[SampleSlice]) -> Iterator[Batch]:
        """Yield one uint8 batch per slice; batches of the same length share one tensor, to be read only."""
        for piece in slices:
            count = len(piece.ids)
            if count not in self._noise:
                shape = (count, self._view.channels, self._view.image_size, self._view.image_size)
                length = int(np.prod(shape))
                words = np.random.Philox(key=_KEY).random_raw(-(-length // 8))
                self._noise[count] = torch.from_numpy(words.view(np.uint8)[:length].reshape(shape))
            targets = torch.from_numpy(self._labels[piece.ids])
            yield Batch(self._noise[count], targets, piece.ids, piece)

    def close(self) -> None:
        """Release the noise."""
        self._noise.clear()
