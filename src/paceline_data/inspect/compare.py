"""Decide whether two images show the same picture: resized, re-encoded, brightened, or cropped by a little.

A shared background or vignette makes different pictures correlate. So a second look compares their details.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline_data.inspect.look import Pixels, grey_parts

Grey = NDArray[np.float32]

_COARSE, _LEAST_CORRELATION = 32, 0.95
_FINE = 64  # parts per side
_TILE, _STRIDE, _SHIFT = 16, 8, 3  # in parts; a crop by a few percent shifts details
_BLUR, _BACKGROUND = 1.2, 4.0  # standard deviations in parts: what copies may lose, and what backgrounds may share
_MOST_UNLIKE = 0.6
_NOISE = 2.0  # out of 255: of JPEG files


def is_same_picture(one: Pixels, other: Pixels) -> bool:
    """Whether two images show the same picture: they correlate, and no part of one has details that the other lacks."""
    first, second = (grey_parts(each, _COARSE, _COARSE).reshape(-1) for each in (one, other))
    if np.corrcoef(first, second)[0, 1] < _LEAST_CORRELATION:
        return False
    return unlike_details(one, other) <= _MOST_UNLIKE


def unlike_details(one: Pixels, other: Pixels) -> float:
    """Return the largest difference in detail of a part of two images, relative to their details as a whole.

    Both are band-passed. Each tile of one is matched with the other by normalised cross-correlation, shifted by up to 5
    % of a side. What remains is the tile's root mean square times sqrt(1 - correlation²).
    """
    first, second = (_details(each) for each in (one, other))
    inner = slice(_SHIFT, _FINE - _SHIFT)
    power, other_power = (_tile_means(each[inner, inner] ** 2) for each in (first, second))
    best = np.zeros_like(power)
    for down in range(2 * _SHIFT + 1):
        for right in range(2 * _SHIFT + 1):
            shifted = second[down:, right:][: inner.stop - _SHIFT, : inner.stop - _SHIFT]
            covariance = _tile_means(first[inner, inner] * shifted)
            scale = np.sqrt(np.maximum(power * _tile_means(shifted**2), 1e-6))
            best = np.maximum(best, covariance / scale)
    left = np.sqrt(np.maximum(power, other_power) * np.clip(1 - best**2, 0, 1))
    whole = max(float(np.sqrt((each**2).mean())) for each in (first, second))
    return float(left.max()) / max(whole, _NOISE)


def _details(image: Pixels) -> Grey:
    """Return the grey image without noise and without what changes slowly, float32 [64, 64]."""
    grey = grey_parts(image, _FINE, _FINE).astype(np.float32)
    sharp = _SMOOTH @ grey @ _SMOOTH.T
    return np.asarray(sharp - _SLOW @ sharp @ _SLOW.T)


def _gaussian(deviation: float) -> Grey:
    places = np.arange(_FINE)
    weights = np.exp(-((places[:, None] - places) ** 2) / (2 * deviation**2))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), dtype=np.float32)


def _tile_means(grey: Grey) -> Grey:
    return np.asarray(_TILES @ grey @ _TILES.T)


_SMOOTH, _SLOW = _gaussian(_BLUR), _gaussian(_BACKGROUND)
_INNER = _FINE - 2 * _SHIFT
_TILES = np.array(
    [
        [float(begin <= at < begin + _TILE) / _TILE for at in range(_INNER)]
        for begin in range(0, _INNER - _TILE + 1, _STRIDE)
    ],
    dtype=np.float32,
)
