"""At which shape is an image shown, and what do the heads of files say of it?"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_sentences import raises
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from paceline.data.image.decode import decode, upright_size
from paceline.data.image.pipeline import distinct_sizes, measure, rectangle
from paceline.data.image.sets.synthetic import SyntheticSource
from paceline.data.image.source import ArraySource, FileSource, SubsetSource
from paceline.data.image.transforms import evaluation_image
from paceline.errors import RecipeError

sides = st.integers(1, 5000)


@given(height=sides, width=sides, size=st.integers(1, 600), multiple=st.integers(1, 64))
def test_the_longer_side_is_the_nearest_step(height: int, width: int, size: int, multiple: int) -> None:
    """Against the definition, in fractions and by trying every step."""
    shape = rectangle(height, width, size=size, multiple=multiple)
    ratio = min(Fraction(max(height, width), min(height, width)), 2)
    steps = range(size // multiple + 1)
    nearest = min(steps, key=lambda step: (abs(size + multiple * step - size * ratio), -step))
    assert sorted(shape) == [size, size + multiple * nearest]
    assert (shape[0] > shape[1]) <= (height > width)
    assert (shape[1] > shape[0]) <= (width > height)


@given(height=sides, width=sides)
def test_a_turned_image_has_the_turned_shape(height: int, width: int) -> None:
    upright = rectangle(height, width, size=224, multiple=32)
    assert rectangle(width, height, size=224, multiple=32) == upright[::-1]


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_head_says_what_decoding_gives(suffix: str, orientation: int, tmp_path: Path) -> None:
    image = Image.fromarray(np.zeros((20, 50, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / f"image.{suffix}", exif=exif)
    decoded = decode(tmp_path / f"image.{suffix}", 3).shape[:2]
    assert upright_size(tmp_path / f"image.{suffix}") == decoded == ((20, 50) if orientation < 5 else (50, 20))


def test_what_cannot_be_read_is_square(tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("no image")
    Image.fromarray(np.zeros((10, 20, 3), dtype=np.uint8)).save(tmp_path / "wide.png")
    names = [b"text.jpg", b"wide.png", b"absent.jpg"]
    source = SubsetSource(FileSource(tmp_path, names, np.zeros(3, dtype=np.int64), 3), np.array([2, 1, 0, 1]))
    shapes = measure(source, size=8, multiple=4)
    assert shapes.tolist() == [[8, 8], [8, 16], [8, 8], [8, 16]]
    assert distinct_sizes(shapes) == {(8, 8): 2, (8, 16): 2}


def test_many_images_are_measured_in_order() -> None:
    """More than are measured at once, by several threads."""

    class Growing(ArraySource):
        def size(self, sample: int) -> tuple[int, int]:
            return 100, 100 + sample % 100

    source = Growing(np.zeros((1000, 1, 1, 3), dtype=np.uint8), np.zeros(1000, dtype=np.int64), "growing")
    expected = [list(rectangle(100, 100 + sample % 100, size=32, multiple=1)) for sample in range(1000)]
    assert measure(source, size=32, multiple=1).tolist() == expected


def test_a_source_that_does_not_tell_sizes_is_refused() -> None:
    source = SyntheticSource(4, 2, (8, 8, 3))
    for each in (source, SubsetSource(source, np.arange(2))):
        with raises(RecipeError, key="data.evaluation_shape", value="rectangular"):
            measure(each, size=8, multiple=4)


@given(
    height=st.integers(1, 60),
    width=st.integers(1, 60),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    crop=st.sampled_from([0.5, 0.875, 1.0]),
)
def test_any_image_covers_any_shape(height: int, width: int, shape: tuple[int, int], crop: float) -> None:
    """Nothing is padded, and nothing but the border is cut away."""
    shown = evaluation_image(np.full((height, width, 1), 200, dtype=np.uint8), shape, crop)
    assert tuple(shown.shape) == (1, *shape)
    assert (shown == 200).all()


def numbered(count: int, step: int) -> Any:
    """An image of so many columns, each ``step`` brighter than the one before."""
    return np.repeat(np.arange(0, count * step, step, dtype=np.uint8)[None, :, None], 40, axis=0)


def test_less_of_a_wide_image_is_cut_away() -> None:
    """The square loses a third of the columns, the rectangle next to none."""
    square = evaluation_image(numbered(60, 4), 40, 1.0)[0, 0].tolist()
    rectangular = evaluation_image(numbered(60, 4), rectangle(40, 60, size=40, multiple=10), 1.0)[0, 0].tolist()
    assert square == list(range(40, 200, 4))
    assert rectangular == list(range(0, 240, 4))


@pytest.mark.parametrize("turned", [False, True])
def test_what_is_kept_is_not_squeezed(turned: bool) -> None:
    """Half the size, so half the columns (or rows): from one to the next, brightness grows by two."""
    image, shape = numbered(90, 1), rectangle(40, 90, size=20, multiple=10)
    if turned:
        shown = evaluation_image(image.swapaxes(0, 1), shape[::-1], 1.0)[0].T
    else:
        shown = evaluation_image(image, shape, 1.0)[0]
    assert tuple(shown.shape) == shape == (20, 40)
    assert (shown.int().diff(dim=1)[:, 2:-2] == 2).all()
