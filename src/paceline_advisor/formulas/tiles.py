"""Share of a GPU that a matrix product leaves idle because its sizes do not divide.

A product is cut into tiles, each computed by one multiprocessor, and the tiles are worked off in waves. What hangs over
the last tile of a row or column is computed and thrown away; what the last wave lacks stands idle. Libraries choose
tiles by more than their waste, and may share one tile's sum out among multiprocessors: what is said here is a
prediction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Thread-block tiles that cuBLAS has, the most efficient first, as the guide lists them.
TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))

# What a tile costs beside its products, per row and column: a small one reads more for what it computes. It makes the
# smallest a quarter less efficient than the largest: an assumption, for the guide shows the effect and gives no law.
_EDGE = 16

# Sizes tried to each side: 512 columns in steps of 8 are two of the widest tiles, and waves come round sooner.
_MOST_TRIED = 64

# A tile's sum is worth sharing out among multiprocessors if each gets so many terms at least.
_LEAST_TERMS = 512


@dataclass(frozen=True)
class Tiling:
    """How a product is cut, and what that wastes.

    Attributes:
        tile: Rows and columns of a tile.
        tiles: Tiles of the product.
        splits: Multiprocessors that share one tile's sum.
        waves: Rounds in which they are worked off.
        tile_waste: Share of the computed elements that are thrown away, in [0, 1).
        wave_waste: Share of the multiprocessors' time that stands idle, in [0, 1).
        waste: Both together.
        slowdown: Time beside that of tiles of the most efficient size without any waste, at least 1.
    """

    tile: tuple[int, int]
    tiles: int
    splits: int
    waves: int
    tile_waste: float
    wave_waste: float
    waste: float
    slowdown: float


def tile_count(m: int, n: int, tile_m: int = 128, tile_n: int = 128) -> int:
    """Tiles that cover a product of m rows and n columns.

    Source:
        NVIDIA, Matrix Multiplication Background User's Guide, "Tile Quantization".
    """
    return math.ceil(m / tile_m) * math.ceil(n / tile_n)


def tile_waste(m: int, n: int, tile_m: int = 128, tile_n: int = 128) -> float:
    """Share of the computed elements that lie outside the product, in [0, 1).

    Source:
        NVIDIA, Matrix Multiplication Background User's Guide, "Tile Quantization".
    """
    return 1 - m * n / (tile_count(m, n, tile_m, tile_n) * tile_m * tile_n)


def tile_overhead(m: int, n: int, tile_m: int = 128, tile_n: int = 128) -> float:
    """Elements computed for each that is wanted, at least 1.

    Source:
        NVIDIA, Matrix Multiplication Background User's Guide, "Tile Quantization" (1.5 times the arithmetic for 0.39 %
        more columns).
    """
    return tile_count(m, n, tile_m, tile_n) * tile_m * tile_n / (m * n)


def wave_count(tiles: int, multiprocessors: int, tiles_at_once: int = 1) -> int:
    """Rounds in which the multiprocessors work off the tiles, each taking ``tiles_at_once``.

    Source:
        NVIDIA, Matrix Multiplication Background User's Guide, "Wave Quantization".
    """
    return math.ceil(tiles / (multiprocessors * tiles_at_once))


def wave_waste(tiles: int, multiprocessors: int, tiles_at_once: int = 1) -> float:
    """Share of the multiprocessors' time in which they have no tile, in [0, 1).

    Source:
        NVIDIA, Matrix Multiplication Background User's Guide, "Wave Quantization".
    """
    places = multiprocessors * tiles_at_once
    return 1 - tiles / (wave_count(tiles, multiprocessors, tiles_at_once) * places)


def aligned_sizes(size: int, multiple: int) -> tuple[int, int]:
    """The nearest sizes that ``multiple`` divides: at most and at least this one; the lower is ``multiple`` at least.

    Source:
        NVIDIA, Matrix Multiplication Background User's Guide, "Tensor Core Requirements".
    """
    return max(multiple, size // multiple * multiple), math.ceil(size / multiple) * multiple


def alignment_bytes_multiple(bytes_per_element: float, alignment_bytes: int = 16) -> int:
    """Elements whose number should divide a dimension so that rows begin at multiples of ``alignment_bytes``.

    16 bytes are 4 numbers of TF32, 8 of FP16, 16 of INT8; the 128 bytes that A100 does best with 32, 64, 128.

    Source:
        NVIDIA, Matrix Multiplication Background User's Guide, "Tensor Core Requirements", table 1.
    """
    return int(alignment_bytes / bytes_per_element)


def best_tiling(m: int, n: int, k: int, multiprocessors: int, count: int = 1) -> Tiling:
    """The fastest of the guide's tilings: large tiles reuse more, small ones fit better; long sums are shared out.

    With ``count``, so many products of this size are computed at once.

    Source:
        NVIDIA, Matrix Multiplication Background User's Guide, "Tile Quantization" and "Wave Quantization"; sharing
        out a tile's sum: NVIDIA, CUTLASS documentation, "Efficient GEMM in CUDA", parallelized reductions.
    """
    tilings = (_tiling((m, n, k, count), each, multiprocessors) for each in TILES)
    return min(tilings, key=lambda each: round(each.slowdown, 9))


def _tiling(sizes: tuple[int, int, int, int], tile: tuple[int, int], multiprocessors: int) -> Tiling:
    m, n, k, count = sizes
    tiles = tile_count(m, n, *tile) * count
    splits = max(1, min(multiprocessors // tiles, k // _LEAST_TERMS))
    of_tiles, of_waves = tile_waste(m, n, *tile), wave_waste(tiles * splits, multiprocessors)
    return Tiling(
        tile=tile,
        tiles=tiles,
        splits=splits,
        waves=wave_count(tiles * splits, multiprocessors),
        tile_waste=of_tiles,
        wave_waste=of_waves,
        waste=1 - (1 - of_tiles) * (1 - of_waves),
        slowdown=_cost(tile) / _cost(TILES[0]) / ((1 - of_tiles) * (1 - of_waves)),
    )


def _cost(tile: tuple[int, int]) -> float:
    """Of one element of a tile."""
    return 1 + _EDGE * (1 / tile[0] + 1 / tile[1])


def better_sizes(
    m: int, n: int, k: int, multiprocessors: int, count: int = 1, multiple: int = 8, within: float = 0.15
) -> tuple[int | None, int | None]:
    """The nearest smaller and larger n that take clearly less for each column, by 5 %; None where none is that near.

    No more than 64 sizes to each side are looked at, however large n is.

    Source:
        NVIDIA, Matrix Multiplication Background User's Guide, "Dimension Quantization Effects".
    """
    limit = 0.95 * best_tiling(m, n, k, multiprocessors, count).slowdown
    lower, upper = aligned_sizes(n, multiple)
    below = range(lower if lower < n else lower - multiple, max(1, math.ceil(n * (1 - within))) - 1, -multiple)
    above = range(upper if upper > n else upper + multiple, math.floor(n * (1 + within)) + 1, multiple)

    def first(sizes: range) -> int | None:
        for each in sizes[:_MOST_TRIED]:
            if best_tiling(m, each, k, multiprocessors, count).slowdown <= limit:
                return each
        return None

    return first(below), first(above)
