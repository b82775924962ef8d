"""The generated pictures are a pure function of their numbers, and their boxes and masks say what is in them."""

from __future__ import annotations

import numpy as np

from paceline.recipe.data import GeneratedBoxes
from paceline_vision.sets.shapes import CLASSES, open_shapes

WANTED = ([57, 61], [2, 1], [[33, 22, 48, 36], [39, 36, 57, 52]])
ASKED = GeneratedBoxes(samples=40, evaluation_samples=10, smallest_side=48, largest_side=64)


def test_a_box_is_around_each_mask_and_a_picture_has_the_size_it_says() -> None:
    found = open_shapes(ASKED)
    assert (len(found.train), len(found.validation), found.classes) == (40, 10, CLASSES)
    seen = set()
    for number in range(len(found.train)):
        height, width = found.train.sizes[number]
        assert found.train.read(number).shape == (height, width, 3)
        objects = found.train.objects(number, masks=True)
        assert objects.masks is not None
        assert objects.masks.shape == (len(objects.labels), height, width)
        assert 1 <= len(objects.labels) <= ASKED.objects
        assert objects.masks.sum(axis=0).max() == 1  # what is hidden belongs to whoever hides it
        for (left, top, right, bottom), mask in zip(objects.boxes.astype(int), objects.masks, strict=True):
            rows, columns = np.nonzero(mask)
            assert (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) == (left, top, right, bottom)
        seen.update(objects.labels.tolist())
    assert seen == {0, 1, 2}


def test_no_bit_of_a_picture_depends_on_how_many_there_are() -> None:
    fewer = GeneratedBoxes(samples=7, evaluation_samples=5, smallest_side=48, largest_side=64)
    for split in ("train", "validation"):
        many, few = getattr(open_shapes(ASKED), split), getattr(open_shapes(fewer), split)
        assert np.array_equal(many.read(4), few.read(4))
        assert np.array_equal(many.sizes[:5], few.sizes[:5])
    both = open_shapes(ASKED)
    assert not np.array_equal(both.train.sizes[:10], both.validation.sizes)


def test_a_picture_keeps_what_is_in_it() -> None:
    source = open_shapes(ASKED).train
    objects = source.objects(3, masks=False)
    assert (source.sizes[3].tolist(), objects.labels.tolist(), objects.boxes.tolist()) == WANTED


def test_drawings_are_kept() -> None:
    source = open_shapes(ASKED).train
    assert source.read(3) is source.read(3)
