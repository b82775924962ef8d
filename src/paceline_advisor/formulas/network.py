"""Rules about a network: tiles of its products, memory and loss barriers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Thread-block tiles of cuBLAS, the most efficient first, as listed in the guide.
TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))

# Overhead of a tile per row and column, in addition to its products: a small tile reads more for its computation. This
# makes the smallest a quarter less efficient than the largest. That is an assumption, because the guide shows the
# effect but gives no law.
_EDGE = 16

# Sizes tried on each side: 512 columns in steps of 8 cover two of the widest tiles, and more than one wave.
_MOST_TRIED = 64

# A tile's sum is worth splitting among multiprocessors if each gets at least this many terms.
_LEAST_TERMS = 512


@dataclass(frozen=True)
class Tiling:
    """How a product is tiled, and the resulting waste.

    Attributes:
        tile: Rows and columns of a tile.
        tiles: Tiles of the product.
        splits: Multiprocessors that share one tile's sum.
        waves: Rounds in which the tiles are processed.
        tile_waste: Fraction of the computed elements that are discarded, in [0, 1).
        wave_waste: Fraction of the multiprocessors' time that is idle, in [0, 1).
        waste: Both combined.
        slowdown: Time relative to tiles of the most efficient size without waste, at least 1.
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
    """Number of tiles that cover a product of m rows and n columns.

    Source:
        NVIDIA, Matrix Multiplication Background User's Guide, "Tile Quantization".
    """
    return math.ceil(m / tile_m) * math.ceil(n / tile_n)


def tile_waste(m: int, n: int, tile_m: int = 128, tile_n: int = 128) -> float:
    """Fraction of the computed elements that lie outside the product, in [0, 1).

    Source:
        NVIDIA, Matrix Multiplication Background User's Guide, "Tile Quantization".
    """
    return 1 - m * n / (tile_count(m, n, tile_m, tile_n) * tile_m * tile_n)


def tile_overhead(m: int, n: int, tile_m: int = 128, tile_n: int = 128) -> float:
    """Computed elements per element of the product, at least 1.

    Source:
        NVIDIA, Matrix Multiplication Background User's Guide, "Tile Quantization" (1.5 times the arithmetic for 0.39 %
        more columns).
    """
    return tile_count(m, n, tile_m, tile_n) * tile_m * tile_n / (m * n)


def wave_count(tiles: int, multiprocessors: int, tiles_at_once: int = 1) -> int:
    """Number of waves in which the multiprocessors process the tiles, each ``tiles_at_once`` at the same time.

    Source:
        NVIDIA, Matrix Multiplication Background User's Guide, "Wave Quantization".
    """
    return math.ceil(tiles / (multiprocessors * tiles_at_once))


def wave_waste(tiles: int, multiprocessors: int, tiles_at_once: int = 1) -> float:
    """Fraction of the multiprocessors' time in which they have no tile, in [0, 1).

    Source:
        NVIDIA, Matrix Multiplication Background User's Guide, "Wave Quantization".
    """
    places = multiprocessors * tiles_at_once
    return 1 - tiles / (wave_count(tiles, multiprocessors, tiles_at_once) * places)


def aligned_sizes(size: int, multiple: int) -> tuple[int, int]:
    """Nearest multiples of ``multiple``: the largest up to ``size``, but not 0, and the smallest from ``size`` on.

    Source:
        NVIDIA, Matrix Multiplication Background User's Guide, "Tensor Core Requirements".
    """
    return max(multiple, size // multiple * multiple), math.ceil(size / multiple) * multiple


def alignment_bytes_multiple(bytes_per_element: float, alignment_bytes: int = 16) -> int:
    """Number of elements of which a dimension should be a multiple, so that rows start at ``alignment_bytes``.

    16 bytes are 4 elements of TF32, 8 of FP16 or 16 of INT8. The 128 bytes that suit an A100 best are 32, 64 or 128.

    Source:
        NVIDIA, Matrix Multiplication Background User's Guide, "Tensor Core Requirements", table 1.
    """
    return int(alignment_bytes / bytes_per_element)


def best_tiling(m: int, n: int, k: int, multiprocessors: int, count: int = 1) -> Tiling:
    """Fastest tiling of a product [m, k] × [k, n], with its waste as fractions and its relative slowdown.

    Large tiles reuse more data, small ones leave less waste, and long sums are split among multiprocessors. ``count``
    products of this size are computed at once.

    Source:
        NVIDIA, Matrix Multiplication Background User's Guide, "Tile Quantization" and "Wave Quantization";
        splitting a tile's sum: NVIDIA, CUTLASS documentation, "Efficient GEMM in CUDA", parallelized reductions; the
        cost of a tile's edge is an assumption.
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
    """Relative time of one element of a tile."""
    return 1 + _EDGE * (1 / tile[0] + 1 / tile[1])


def better_sizes(
    m: int, n: int, k: int, multiprocessors: int, count: int = 1, multiple: int = 8, within: float = 0.15
) -> tuple[int | None, int | None]:
    """Nearest smaller and larger n that are at least 5 % faster per column; None if there is none.

    Sizes are multiples of ``multiple`` and differ from n by a fraction of at most ``within``. At most 64 sizes are
    tried on each side.

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


def zero_bytes(
    parameters: float,
    stage: int,
    devices: int = 1,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
    optimizer_bytes: float = 12,
) -> float:
    """Bytes per device of weights, gradients and optimizer state under ZeRO.

    Args:
        parameters: Number of parameters.
        stage: 0: nothing is sharded; 1: the optimizer state; 2: gradients too; 3: weights too (FSDP's full sharding).
        devices: Number of devices that share them.
        parameter_bytes: Bytes per parameter of the weights that the passes use.
        gradient_bytes: Bytes per parameter of the gradients.
        optimizer_bytes: Bytes per parameter of the optimizer state. Adam in mixed precision has an fp32 copy of the
            weights and two fp32 moments.

    Raises:
        ValueError: If there is no such stage.

    Source:
        Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5, figure 1 and table 1.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage}: ZeRO has the stages 0, 1, 2 and 3")
    kinds = (optimizer_bytes, gradient_bytes, parameter_bytes)
    return parameters * sum(each / devices if index < stage else each for index, each in enumerate(kinds))


def training_state_bytes(parameters: float, states: int, bytes_per_element: float = 4, *, ema: bool = False) -> float:
    """Bytes of weights, gradients, ``states`` optimizer states (SGD 0, momentum 1, Adam 2) and the average if ``ema``.

    Source:
        Kingma and Ba, Adam, arXiv:1412.6980, algorithm 1, for the two moments; counting for the rest.
    """
    return parameters * bytes_per_element * (2 + states + ema)


def keskar_sharpness(largest_loss: float, loss: float) -> float:
    """Sharpness of a minimum: the rise of the loss in a small box around the weights, in percent of 1 + loss.

    Args:
        largest_loss: Largest loss in the box of :func:`keskar_box`.
        loss: Loss at its centre.

    Raises:
        ValueError: If ``loss`` is not above -1.

    Source:
        Keskar et al., On large-batch training for deep learning, arXiv:1609.04836, Metric 2.1.
    """
    if loss <= -1:
        raise ValueError(f"a loss of {loss:g} is not above -1")
    return 100 * (largest_loss - loss) / (1 + loss)


def loss_barrier(shares: Sequence[float], losses: Sequence[float]) -> float:
    """Loss barrier between two networks: the largest rise above the line between their losses, in the loss's unit.

    Args:
        shares: Positions between the networks at which losses were measured: 0 is the first network, 1 the second.
        losses: The losses at these positions.

    Returns:
        NaN if a loss between the networks is NaN, or the loss of one of the two is not finite.

    Raises:
        ValueError: If 0 or 1 is missing from ``shares``, or the lengths differ.

    Source:
        Goodfellow et al., Qualitatively characterizing neural network optimization problems, arXiv:1412.6544, section
        3, for the path; Frankle et al., Linear mode connectivity, arXiv:1912.05671, equation 1, for the barrier, here
        above the line between the two losses instead of their mean.
    """
    at = dict(zip(shares, losses, strict=True))
    if 0 not in at or 1 not in at:
        raise ValueError("both networks (0 and 1) must be among the shares")
    rises = [loss - ((1 - share) * at[0] + share * at[1]) for share, loss in at.items() if 0 <= share <= 1]
    # The maximum of numbers and NaN depends on their order.
    return math.nan if any(math.isnan(rise) for rise in rises) else max(rises)
