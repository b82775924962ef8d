"""Augmentation is a pure function of (seed, epoch, sample), with the laws it is documented to have."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import stats

from paceline.data.image.transforms import draw, pad_offsets, random_resized_box
from paceline.data.random_draws import uniforms
from paceline.recipe.data import Augment

EVERYTHING = [
    Augment(flip=0.5),
    Augment(crop="pad", padding=3, flip=0.5),
    Augment(crop="random_resized", flip=0.25),
]


@pytest.mark.parametrize("augment", EVERYTHING, ids=lambda augment: augment.crop)
def test_draws_do_not_depend_on_the_batch(augment: Augment) -> None:
    ids = np.array([7, 3, 2**40, 0, 11], dtype=np.int64)
    together = draw(augment, 5, 2, ids)
    for row, sample in enumerate(ids):
        alone = draw(augment, 5, 2, np.array([sample, 99]))
        for name in ("flip", "offsets", "attempts"):
            first, second = getattr(together, name), getattr(alone, name)
            assert (first is None) == (second is None)
            assert first is None or np.array_equal(first[row], second[0])


def test_crops_share_the_flip_column() -> None:
    ids = np.arange(100)
    flips = [draw(augment, 1, 0, ids).flip for augment in (EVERYTHING[0], EVERYTHING[1])]
    assert np.array_equal(*flips)
    numbers = uniforms(1, 0, ids, 44)
    attempts = draw(EVERYTHING[2], 1, 0, ids).attempts
    assert attempts is not None
    assert np.array_equal(attempts[:, 0], numbers[:, 4:8])
    assert np.array_equal(attempts[:, 9], numbers[:, 40:44])


def test_parts_and_choices() -> None:
    draws = draw(EVERYTHING[1], 0, 0, np.arange(10))
    part = draws.select(slice(2, 5))
    assert np.array_equal(part.flip, draws.flip[2:5])
    assert part.offsets is not None
    assert draws.offsets is not None
    chosen = draws.select(np.arange(10) % 2 == 0)
    assert chosen.offsets is not None
    assert np.array_equal(chosen.offsets, draws.offsets[::2])


def test_flips_have_their_probability() -> None:
    ids = np.arange(20_000)
    assert not draw(Augment(flip=0.0), 0, 0, ids).flip.any()
    assert draw(Augment(flip=1.0), 0, 0, ids).flip.all()
    assert stats.binomtest(int(draw(Augment(flip=0.3), 0, 0, ids).flip.sum()), len(ids), 0.3).pvalue > 0.001


def test_shifts_are_uniform() -> None:
    offsets = draw(Augment(crop="pad", padding=4), 3, 1, np.arange(20_000)).offsets
    assert offsets is not None
    counts = np.zeros((9, 9))
    np.add.at(counts, (offsets[:, 0], offsets[:, 1]), 1)
    assert stats.chisquare(counts.ravel()).pvalue > 0.001


def test_pad_offsets_reach_both_ends() -> None:
    assert pad_offsets(np.array([0.0, 0.4999, 1 - 2**-32]), 4).tolist() == [0, 4, 8]


@pytest.mark.parametrize(
    ("size", "scale", "ratio"),
    [
        ((375, 500), (0.08, 1.0), (3 / 4, 4 / 3)),
        ((32, 32), (0.25, 1.0), (3 / 4, 4 / 3)),
        ((200, 40), (0.5, 1.0), (3 / 4, 4 / 3)),  # mostly the fallback
    ],
)
def test_random_resized_has_torchvisions_law(
    size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]
) -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    count = 2000
    numbers = uniforms(11, 0, np.arange(count), 40).reshape(count, 10, 4)
    ours = np.array([random_resized_box(row, size, scale, ratio) for row in numbers])
    with torch.random.fork_rng():
        torch.manual_seed(1)
        image = torch.empty(3, *size)
        get = transforms.RandomResizedCrop.get_params
        theirs = np.array([get(image, list(scale), list(ratio)) for _ in range(count)])
    for column in range(4):
        assert stats.ks_2samp(ours[:, column], theirs[:, column]).pvalue > 0.001
    areas, ratios = ours[:, 2] * ours[:, 3], ours[:, 3] / ours[:, 2]
    assert stats.ks_2samp(areas, theirs[:, 2] * theirs[:, 3]).pvalue > 0.001
    assert stats.ks_2samp(ratios, theirs[:, 3] / theirs[:, 2]).pvalue > 0.001


def test_fallback_is_the_largest_allowed_centre() -> None:
    never = np.full((10, 4), 0.999)
    assert random_resized_box(never, (400, 20), (0.9, 1.0), (3 / 4, 4 / 3)) == (186, 0, 27, 20)
    assert random_resized_box(never, (20, 400), (0.9, 1.0), (3 / 4, 4 / 3)) == (0, 186, 20, 27)


@settings(max_examples=200, deadline=None)
@given(
    height=st.integers(1, 600),
    width=st.integers(1, 600),
    low=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**32),
)
def test_boxes_lie_inside(height: int, width: int, low: float, seed: int) -> None:
    numbers = uniforms(seed, 0, np.arange(1), 40).reshape(10, 4)
    box = random_resized_box(numbers, (height, width), (low, 1.0), (0.5, 2.0))
    assert min(box.height, box.width) >= 1
    assert min(box.top, box.left) >= 0
    assert box.top + box.height <= height
    assert box.left + box.width <= width


def test_an_alternating_flip_shows_both_sides_in_any_two_epochs() -> None:
    ids = np.arange(20_000)
    asked = Augment(flip=0.5, alternate_flip=True, crop="pad", padding=2)
    epochs = [draw(asked, 3, epoch, ids) for epoch in range(4)]
    plain = draw(Augment(flip=0.5), 3, 0, ids).flip
    assert np.array_equal(epochs[0].flip, plain)
    assert abs(plain.mean() - 0.5) < 0.02
    for before, after in pairwise(epochs):
        assert np.array_equal(before.flip, ~after.flip)
        assert not np.array_equal(before.offsets, after.offsets)  # other draws are drawn anew
    some = np.array([17, 3])
    assert np.array_equal(draw(asked, 3, 1, some).flip, epochs[1].flip[some])
    assert not np.array_equal(draw(asked, 4, 0, ids).flip, plain)


@pytest.mark.parametrize("flip", [0.0, 0.3, 1.0])
def test_alternating_goes_with_every_second_image_mirrored_only(flip: float) -> None:
    with pytest.raises(ValidationError, match=r"alternate_flip=true with flip=.*set flip to 0\.5"):
        Augment(flip=flip, alternate_flip=True)
