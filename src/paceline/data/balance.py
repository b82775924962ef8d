"""Balance the work of samples of unequal length, for any number of processes.

Two decisions, both pure functions of (seed, epoch, lengths). *Which samples share a step*: each step takes one sample
of each stratum of lengths, so that all steps have about the same number of tokens. *Which samples share a
micro-batch*: those of about one length, and so many of them that all micro-batches cost about the same once padded.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.data.slices import SampleIds


@dataclass(frozen=True, eq=False, kw_only=True)
class SampleLengths:
    """How long each training sample is, and how far it is padded.

    Attributes:
        tokens: Tokens of each, at least 1, int64 [samples].
        multiple: A micro-batch is padded to its longest sample, rounded up to a multiple of this.
        width: Fixed padded length of each; None if that is the longest of its micro-batch.
        most: No micro-batch is padded beyond this; None for no limit.
    """

    tokens: NDArray[np.int64]
    multiple: int = 1
    width: int | None = None
    most: int | None = None

    @property
    def sha256(self) -> str:
        """Digest of the samples' lengths."""
        return hashlib.sha256(self.tokens.astype("<i8").tobytes()).hexdigest()

    @property
    def is_ragged(self) -> bool:
        """Whether a sample's cost depends on the rest of its micro-batch."""
        return self.width is None

    def padded(self, ids: SampleIds) -> NDArray[np.int64]:
        """Tokens that each sample makes its micro-batch at least as wide as, int64 [N]."""
        if self.width is not None:
            return np.full(len(ids), self.width)
        rounded = -(-self.tokens[ids] // self.multiple) * self.multiple
        return rounded if self.most is None else np.minimum(rounded, self.most)


@dataclass(frozen=True, kw_only=True)
class StepLoad:
    """The work of one step.

    Attributes:
        tokens: Of its samples.
        positions: Places for tokens in its micro-batches, padding included.
        busiest: Those of the process with the most.
        processes: How many share them.
    """

    tokens: int
    positions: int
    busiest: int
    processes: int


@dataclass(frozen=True, kw_only=True, order=True)
class Costliest:
    """The micro-batch that takes the most memory.

    Attributes:
        positions: Places for tokens in it, padding included.
        step: Its step.
        logical_rank: Its place in that.
    """

    positions: int
    step: int
    logical_rank: int


def dealt_to_steps(order: SampleIds, tokens: NDArray[np.int64], batch_size: int) -> SampleIds:
    """An epoch's order in which each step's samples have about as many tokens as every other's.

    The drawn order decides which samples are left for the last, smaller step, which of equally long ones goes where,
    and in which order the steps come. In between, strata of as many samples as there are steps, from the longest to the
    shortest, are dealt one to each step: the longest to the step that has fewest tokens so far.

    Args:
        order: A permutation of all samples, int64 [samples].
        tokens: Of each sample, int64 [samples].
        batch_size: Samples per step.

    Returns:
        Another permutation, int64 [samples].
    """
    steps = len(order) // batch_size
    if steps < 2 or batch_size < 2:
        return order
    whole = order[: steps * batch_size]
    descending = np.argsort(-tokens[whole], kind="stable")
    places = _dealt(descending[None], tokens[whole], steps)
    # A step comes where its longest sample was drawn to come: its place says nothing of its length.
    places = places[np.argsort(places[:, 0])]
    return np.concatenate([whole[places.ravel()], order[steps * batch_size :]])


def _dealt(groups: NDArray[np.int64], costs: NDArray[np.int64], shares: int) -> NDArray[np.int64]:
    """Deal each group's members into shares of equal number and about equal cost.

    Of so many members as there are shares, from the most expensive on, each share takes one: the one that costs most
    goes to the share that has cost least so far.

    Args:
        groups: Members of each group, descending by cost, int64 [groups, members].
        costs: Of each member, by its number.
        shares: Of each group; divides its members.

    Returns:
        Members of each share, descending by cost, int64 [groups * shares, members / shares].
    """
    count, members = groups.shape
    strata = groups.reshape(count, members // shares, shares)
    dealt = np.empty((members // shares, count, shares), dtype=np.int64)
    sums = np.zeros((count, shares), dtype=np.int64)
    for index, taken in enumerate(dealt):
        np.put_along_axis(taken, np.argsort(sums, axis=1, kind="stable"), strata[:, index], axis=1)
        sums += costs[taken]
    return dealt.transpose(1, 2, 0).reshape(count * shares, members // shares)


def shared_out(padded: NDArray[np.int64], parts: int) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Divide a step's samples into parts of about equal cost, and order these for any number of processes.

    Where samples are few and long, no cut makes all parts alike. So the parts are ordered such that those of each half,
    of each quarter and so on, which are a process's, cost about the same together.

    Args:
        padded: Length of each sample, descending, int64 [N].
        parts: Their number.

    Returns:
        Places of the samples in ``padded``, part by part, int64 [N]; and where the parts begin and end there,
        [parts + 1].
    """
    bounds = np.array(padded_bounds(padded, parts))
    if len(padded) < parts:
        return np.arange(len(padded)), tuple(bounds.tolist())  # empty parts stay last
    sizes = np.diff(bounds)
    costs = sizes * padded[bounds[:-1]]
    groups = np.argsort(-costs, kind="stable")[None]
    for factor in _prime_factors(parts):
        groups = _dealt(groups, costs, factor)
    parts_in_order = groups.ravel()
    places = np.concatenate([np.arange(bounds[part], bounds[part + 1]) for part in parts_in_order])
    return places, (0, *np.cumsum(sizes[parts_in_order]).tolist())


def _prime_factors(number: int) -> list[int]:
    """Ascending."""
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found


def even_bounds(size: int, parts: int) -> tuple[int, ...]:
    """Where parts of ``size`` samples begin and end, [parts + 1]: as equal as they can be, larger ones first."""
    part, larger = divmod(size, parts)
    return tuple(rank * part + min(rank, larger) for rank in range(parts + 1))


def padded_bounds(padded: NDArray[np.int64], parts: int) -> tuple[int, ...]:
    """Cut samples that descend by length into parts of which the most expensive costs as little as it can.

    A part costs its samples times its first one's length: what is computed of it, padding included. None is empty
    unless there are fewer samples than parts.

    Args:
        padded: Length of each sample, descending, int64 [N].
        parts: Their number.

    Returns:
        Where they begin and end, [parts + 1].
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
    """As many samples as parts of at most this cost can take, and not so many that a later part would be empty."""
    bounds = [0]
    for later in range(parts - 1, -1, -1):
        begin = bounds[-1]
        bounds.append(begin + min(cost // widths[begin], len(widths) - later - begin))
    return tuple(bounds)
