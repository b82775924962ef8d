"""The synthetic back-end: the right labels and ids, and one batch of noise for each length."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.data.image.sets.synthetic import SyntheticSource
from paceline.data.image.transforms import View
from paceline.data.loaders.memory import SyntheticBackend
from paceline.data.slices import SampleSlice

Slices = Callable[..., list[SampleSlice]]


def test_labels_are_right_and_noise_is_made_once(slices: Slices) -> None:
    source = SyntheticSource(10, 4, (16, 16, 3))
    backend = SyntheticBackend(source, View(image_size=16, channels=3))
    first, second, tail = backend.batches(slices([1, 5, 9], [0, 2, 3], [4]))
    assert first.inputs is second.inputs
    assert (first.inputs.dtype, first.inputs.shape) == (torch.uint8, (3, 3, 16, 16))
    assert tail.inputs.shape == (1, 3, 16, 16)
    assert first.targets.tolist() == [1, 1, 1]
    assert second.targets.tolist() == [0, 2, 3]
    assert second.ids.tolist() == [0, 2, 3]
    assert first.inputs.float().std() > 60
    again = SyntheticBackend(source, View(image_size=16, channels=3))
    assert torch.equal(next(iter(again.batches(slices([1, 2, 3])))).inputs, first.inputs)
    backend.close()
