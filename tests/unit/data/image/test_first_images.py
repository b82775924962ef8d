"""The images that a network begins from: from all over the split, the same ones for everyone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.data.image.source import BrokenImageError, Image
from paceline.data.image.transforms import View, first_images
from paceline.errors import DataError

VIEW = View(image_size=4, channels=1)


class Numbered:
    """Images that are filled with their number, class by class; some broken."""

    def __init__(self, count: int, broken: tuple[int, ...] = ()) -> None:
        self.labels = np.arange(count) // 10
        self._broken = broken

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, sample: int) -> Image:
        if sample in self._broken:
            raise BrokenImageError(self.path(sample), "it is torn")
        return np.full((4, 4, 1), sample, dtype=np.uint8)

    def path(self, sample: int) -> str:
        return f"numbered[{sample}]"


def numbers(images: torch.Tensor) -> list[int]:
    return [int(each) for each in images[:, 0, 0, 0]]


def test_they_come_from_every_class_of_a_sorted_set() -> None:
    found = numbers(first_images(Numbered(100), VIEW, 20))
    assert len(found) == len(set(found)) == 20
    assert {number // 10 for number in found} == set(range(10))


@pytest.mark.parametrize("count", [1, 3, 7])
def test_a_small_set_is_taken_whole(count: int) -> None:
    assert numbers(first_images(Numbered(count), VIEW, 7)) == list(range(count))


def test_broken_ones_are_left_out_unless_all_are() -> None:
    assert numbers(first_images(Numbered(4, broken=(1, 2)), VIEW, 4)) == [0, 3]
    with pytest.raises(DataError, match="none of 2 training images from which"):
        first_images(Numbered(2, broken=(0, 1)), VIEW, 2)
