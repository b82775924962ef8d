"""Balance the work of samples of unequal length, for any number of processes (classes: `data/class_sampling.py`).

Two decisions, both pure functions of (seed, epoch, lengths). *Which samples share a step*: each step takes one sample
of each stratum of lengths, so that all steps have about the same number of tokens. *Which samples share a micro-batch*:
those of similar length, in numbers that make all micro-batches cost about the same once padded.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.data.slices import SampleIds, even_bounds


@dataclass(frozen=True, eq=False, kw_only=True)
class SampleLengths:
    """Length of each training sample, and how far it is padded.

    Attributes:
        tokens: Tokens of each, at least 1, int64 [samples].
        multiple: A micro-batch is padded to its longest sample, rounded up to a multiple of this.
        width: Fixed padded length of each sample; None to pad to the longest of its micro-batch.
        max_width: Maximum padded length; None for no limit.
    """

    tokens: NDArray[np.int64]
    multiple: int = 1
    width: int | None = None
    max_width: int | None = None

    @property
    def sha256(self) -> str:
        """Digest of the samples' lengths."""
        return hashlib.sha256(self.tokens.astype("<i8").tobytes()).hexdigest()

    @property
    def is_ragged(self) -> bool:
        """Whether a sample's cost depends on the rest of its micro-batch."""
        return self.width is None

    def padded(self, ids: SampleIds) -> NDArray[np.int64]:
        """Return each sample's minimum padded width of its micro-batch, int64 [N]."""
        if self.width is not None:
            return np.full(len(ids), self.width)
        rounded = -(-self.tokens[ids] // self.multiple) * self.multiple
        return rounded if self.max_width is None else np.minimum(rounded, self.max_width)


@dataclass(frozen=True, kw_only=True)
class StepLoad:
    """The work of one step.

    Attributes:
        tokens: Tokens in its samples.
        positions: Token positions in its micro-batches, including padding.
        busiest: Positions of the busiest process.
        processes: Number of processes.
    """

    tokens: int
    positions: int
    busiest: int
    processes: int


@dataclass(frozen=True, kw_only=True, order=True)
class LargestMicroBatch:
    """The micro-batch that takes the most memory.

    Attributes:
        positions: Token positions in it, including padding.
        step: Its step.
        logical_rank: Its logical rank in the step.
    """

    positions: int
    step: int
    logical_rank: int


def balance_steps(order: SampleIds, tokens: NDArray[np.int64], batch_size: int) -> SampleIds:
    """Reorder an epoch so that all steps have about the same number of tokens.

    The random order determines the samples of the last, smaller step, the placement of equally long samples, and the
    order of steps. In between, samples are sorted by length into strata with one sample per step. Each stratum is dealt
    out: its longest sample goes to the step with the fewest tokens so far.

    Args:
        order: A permutation of all samples, int64 [samples].
        tokens: Tokens of each sample, int64 [samples].
        batch_size: Samples per step.

    Returns:
        Another permutation, int64 [samples].
    """
    steps = len(order) // batch_size
    if steps < 2 or batch_size < 2:
        return order
    complete = order[: steps * batch_size]
    assignment = _deal(np.argsort(-tokens[complete], kind="stable")[None], tokens[complete], steps)
    # A step takes the position at which its longest sample was drawn, which is independent of length.
    assignment = assignment[np.argsort(assignment[:, 0])]
    return np.concatenate([complete[assignment.ravel()], order[steps * batch_size :]])


def _deal(groups: NDArray[np.int64], costs: NDArray[np.int64], shares: int) -> NDArray[np.int64]:
    """Deal each group's members into shares of equal size and about equal cost.

    Members are dealt by descending cost, one per share and round; the most expensive one goes to the cheapest share so
    far.

    Args:
        groups: Members of each group, descending by cost, int64 [groups, members].
        costs: Cost of each member, by its number.
        shares: Number of shares per group; divides the number of members.

    Returns:
        Members of each share, descending by cost, int64 [groups * shares, members / shares].
    """
    count, members = groups.shape
    strata = groups.reshape(count, members // shares, shares)
    dealt = np.empty((members // shares, count, shares), dtype=np.int64)
    sums = np.zeros((count, shares), dtype=np.int64)
    for index, dealt_members in enumerate(dealt):
        np.put_along_axis(dealt_members, np.argsort(sums, axis=1, kind="stable"), strata[:, index], axis=1)
        sums += costs[dealt_members]
    return dealt.transpose(1, 2, 0).reshape(count * shares, members // shares)


def partition_costs(padded: NDArray[np.int64], parts: int) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Divide a step's samples into parts of about equal cost, ordered for any number of processes.

    With few and long samples no cut makes all parts equal. So the parts are ordered such that each half, each quarter
    and so on, which belong to one process, cost about the same in total.

    Args:
        padded: Length of each sample, descending, int64 [N].
        parts: Number of parts.

    Returns:
        Indices into ``padded``, part by part, int64 [N]; and the bounds of the parts in them, [parts + 1].
    """
    bounds = np.array(padded_bounds(padded, parts))
    if len(padded) < parts:
        return np.arange(len(padded)), tuple(bounds.tolist())  # empty parts stay last
    sizes = np.diff(bounds)
    costs = sizes * padded[bounds[:-1]]
    groups = np.argsort(-costs, kind="stable")[None]
    for factor in _prime_factors(parts):
        groups = _deal(groups, costs, factor)
    parts_in_order = groups.ravel()
    indices = np.concatenate([np.arange(bounds[part], bounds[part + 1]) for part in parts_in_order])
    return indices, (0, *np.cumsum(sizes[parts_in_order]).tolist())


def _prime_factors(number: int) -> list[int]:
    """Return the prime factors in ascending order."""
    factors, factor = [], 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return factors


def padded_bounds(padded: NDArray[np.int64], parts: int) -> tuple[int, ...]:
    """Cut samples sorted by descending length into parts so that the most expensive part costs as little as possible.

    A part's cost is its number of samples times its first length: the padded computation. No part is empty unless there
    are fewer samples than parts.

    Args:
        padded: Length of each sample, descending, int64 [N].
        parts: Number of parts.

    Returns:
        Their bounds, [parts + 1].
    """
    size, widths = len(padded), padded.tolist()
    if size <= parts:
        return even_bounds(size, parts)
    low, high = widths[0], widths[0] * -(-size // parts)
    while low < high:
        cost = (low + high) // 2
        low, high = (low, cost) if _bounds_within(cost, widths, parts)[-1] == size else (cost + 1, high)
    return _bounds_within(low, widths, parts)


def _bounds_within(cost: int, widths: list[int], parts: int) -> tuple[int, ...]:
    """Return bounds that fill parts up to this cost, but leave a sample for each later part."""
    bounds = [0]
    for later in range(parts - 1, -1, -1):
        begin = bounds[-1]
        bounds.append(begin + min(cost // widths[begin], len(widths) - later - begin))
    return tuple(bounds)
