"""Decide whether two images show the same picture: resized, re-encoded, brightened, or cropped by a little.

A shared background, vignette or layout makes different pictures correlate. So a second look compares their colours, and
their details once one is fitted to the other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline_data.inspect.look import Pixels, grey_parts

Grey = NDArray[np.float32]

_COARSE, _LEAST_CORRELATION = 32, 0.95
_COLOURED, _MOST_COLOUR = 8, 14  # parts per side; difference out of 255, above that of JPEG files and small crops
_FINE = 64  # parts per side
_LARGEST = 2 * _FINE  # pixels per side
_TILE, _STRIDE = 16, 8  # in parts
_BLUR, _BACKGROUND = 1.2, 4.0  # standard deviations in parts: what copies may lose, and what backgrounds may share
_MOST_UNLIKE = 0.34
_NOISE = 2.0  # out of 255: of JPEG files
_ROUNDS, _MOST_SHIFT, _MOST_SCALE = 4, 3.0, 0.08  # of a fit: parts, and a share of the size; a crop by a few percent
_EDGE = 4  # parts that a crop may have removed


def is_same_picture(one: Pixels, other: Pixels) -> bool:
    """Whether two images show the same picture: the same brightness, colours and details in every part."""
    height, width = (min(*sides, _LARGEST) for sides in zip(one.shape[:2], other.shape[:2], strict=True))
    one, other = (_resized(each, width, height) for each in (one, other))
    first, second = (grey_parts(each, _COARSE, _COARSE).reshape(-1) for each in (one, other))
    if np.corrcoef(first, second)[0, 1] < _LEAST_CORRELATION:
        return False
    if one.shape[2] == other.shape[2] == 3 and np.abs(_colours(one) - _colours(other)).max() > _MOST_COLOUR:
        return False
    return unlike_details(one, other) <= _MOST_UNLIKE


def unlike_details(one: Pixels, other: Pixels) -> float:
    """Return the largest difference in detail of a part of two images, relative to their details as a whole.

    Both are band-passed, and the other is fitted to the one. Tiles are compared by normalised cross-correlation: what
    remains is a tile's root mean square times sqrt(1 - correlation²).
    """
    first = _details(one)
    second = _fitted(_details(other), first)[_EDGE:-_EDGE, _EDGE:-_EDGE]
    first = first[_EDGE:-_EDGE, _EDGE:-_EDGE]
    power, other_power = _tile_means(first**2), _tile_means(second**2)
    correlation = _tile_means(first * second) / np.sqrt(np.maximum(power * other_power, 1e-6))
    left = np.sqrt(np.maximum(power, other_power) * (1 - np.clip(correlation, 0, 1) ** 2))
    whole = max(float(np.sqrt((each**2).mean())) for each in (first, second))
    return float(left.max()) / max(whole, _NOISE)


def _resized(image: Pixels, width: int, height: int) -> Pixels:
    """Return the image at a size; a copy that was reduced is then as blurred as its original."""
    whole = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    small = np.asarray(whole.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=4.0))
    return small.reshape(height, width, -1)


def _colours(image: Pixels) -> NDArray[np.int16]:
    """Return the chroma of parts of an image, int16 [8, 8, 2]."""
    parts = Image.fromarray(image).convert("YCbCr").resize((_COLOURED, _COLOURED), Image.Resampling.BILINEAR)
    return np.asarray(parts, dtype=np.int16)[:, :, 1:]


def _details(image: Pixels) -> Grey:
    """Return the grey image without noise and without what changes slowly, float32 [64, 64]."""
    grey = grey_parts(image, _FINE, _FINE).astype(np.float32)
    sharp = _SMOOTH @ grey @ _SMOOTH.T
    return np.asarray(sharp - _SLOW @ sharp @ _SLOW.T)


def _fitted(moved: Grey, target: Grey) -> Grey:
    """Return an image shifted and scaled by what fits it to another: a few rounds of least squares (Gauss-Newton)."""
    most = np.array([_MOST_SCALE, _MOST_SHIFT] * 2)
    found = np.zeros(4)  # scale and shift, of rows and of columns
    inner = slice(_EDGE, -_EDGE)
    for _ in range(_ROUNDS):
        image = _sampled(moved, found)
        down, right = np.gradient(image)
        slopes = np.stack([down * _PLACES[:, None], down, right * _PLACES, right], axis=-1)[inner, inner].reshape(-1, 4)
        left = (target - image)[inner, inner].reshape(-1)
        step = np.linalg.solve(slopes.T @ slopes + 1e-3 * np.eye(4), slopes.T @ left)
        found = np.clip(found + step, -most, most)
    return _sampled(moved, found)


def _sampled(image: Grey, found: NDArray[np.float64]) -> Grey:
    rows, columns = (_between(*each) for each in (found[:2], found[2:]))
    return np.asarray(rows @ image @ columns.T)


def _between(scale: float, shift: float) -> Grey:
    """Return the weights that interpolate linearly at scaled and shifted places, float32 [64, 64]."""
    places = np.clip(_PLACES * (1 + scale) + shift - _PLACES[0], 0, _FINE - 1)
    return np.asarray(np.maximum(1 - np.abs(places[:, None] - np.arange(_FINE)), 0), dtype=np.float32)


def _gaussian(deviation: float) -> Grey:
    places = np.arange(_FINE)
    weights = np.exp(-((places[:, None] - places) ** 2) / (2 * deviation**2))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), dtype=np.float32)


def _tile_means(grey: Grey) -> Grey:
    return np.asarray(_TILES @ grey @ _TILES.T)


_PLACES = np.arange(_FINE) - (_FINE - 1) / 2
_SMOOTH, _SLOW = _gaussian(_BLUR), _gaussian(_BACKGROUND)
_INNER = _FINE - 2 * _EDGE
_TILES = np.array(
    [
        [float(begin <= at < begin + _TILE) / _TILE for at in range(_INNER)]
        for begin in range(0, _INNER - _TILE + 1, _STRIDE)
    ],
    dtype=np.float32,
)
