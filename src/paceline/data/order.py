"""The order of samples and their assignment to ranks: pure functions of (seed, epoch, step) and the world.

An epoch's order is a permutation; step *t* of the epoch takes the *t*-th slice of it, cut into logical ranks
(micro-batch slots); a process takes the parts of its logical ranks. For samples of unequal length, the permutation and
the cuts balance the cost of steps and parts (`data/balance.py`). So neither the number of processes nor a resume
changes the samples of a step, and a position in the data is one integer.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.balance import (
    LargestMicroBatch,
    SampleLengths,
    StepLoad,
    balance_steps,
    partition_costs,
)
from paceline.data.class_sampling import ClassDraws, sampled_order
from paceline.data.keyed_order import KeyedOrder
from paceline.data.shard_order import ShardOrder, ShardSizes
from paceline.data.slices import SampleIds, SampleShapes, SampleSlice, SampleWeights, even_bounds
from paceline.host.world import World
from paceline.plan.epochs import SORTED_AT_MOST, Epochs

_LOOKED_AT = 200  # steps; cutting one takes about a millisecond
_ORDERED_AHEAD = 2**16  # samples; sorting fewer takes a few milliseconds


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, samples: int, repeats: int = 1) -> SampleIds:
    """Return an epoch's permutation of ``range(samples)``, int64 [samples], read-only.

    With repeats, ids that are equal modulo ``samples / repeats`` are consecutive: they are the same sample, augmented
    several times in one batch (Hoffer et al. 2019).

    Sorts the raw words of NumPy's counter-based Philox: the raw stream is guaranteed not to change between
    NumPy versions, unlike ``Generator.permutation``. More than ``SORTED_AT_MOST`` samples have the order of
    :class:`~paceline.data.keyed_order.KeyedOrder`, which gives slices without the rest.
    """
    if samples > SORTED_AT_MOST:
        order = KeyedOrder(seed, epoch, samples, repeats)[:]
    else:
        different = samples // repeats
        words = np.random.Philox(key=[seed, epoch]).random_raw(different)
        order = np.argsort(words, kind="stable")
        if repeats > 1:
            order = (order[:, None] + different * np.arange(repeats)).reshape(-1)
    order.flags.writeable = False
    return order


_keyed_order = lru_cache(maxsize=2)(KeyedOrder)
_shard_order = lru_cache(maxsize=2)(ShardOrder)


@lru_cache(maxsize=2)
def balanced_order(seed: int, epoch: int, lengths: SampleLengths, batch_size: int) -> SampleIds:
    """The same for samples of unequal length: steps of ``batch_size`` samples have similar token counts."""
    order = balance_steps(epoch_order(seed, epoch, len(lengths.tokens)), lengths.tokens, batch_size)
    order.flags.writeable = False
    return order


@lru_cache(maxsize=64)
def _balanced_cut(
    seed: int, epoch: int, lengths: SampleLengths, position: int, batch_size: int, logical_ranks: int
) -> tuple[SampleIds, tuple[int, ...]]:
    """Return a step's samples and the bounds of its parts; cached, since batches and records both need it."""
    ids = balanced_order(seed, epoch, lengths, batch_size)[position * batch_size : (position + 1) * batch_size]
    ids = ids[np.argsort(-lengths.tokens[ids], kind="stable")]
    places, bounds = partition_costs(lengths.padded(ids), logical_ranks)
    return ids[places], bounds


@dataclass(frozen=True, kw_only=True)
class StepGeometry:
    """How epochs are cut into steps.

    Attributes:
        seed: The run's seed.
        samples: Samples per epoch.
        global_batch_size: Samples per step in the first epoch; an epoch's last step takes the remainder.
        logical_ranks: Micro-batch slots per step in the first epoch, over all processes.
        growth: (Epoch, global batch size, logical ranks) of each later size; the epoch is the first one with it.
        repeats: How often each image occurs among the samples.
        weights: Weight of each sample in a step's mean loss, int64 [samples], for example tokens; None: all equal.
        sort_key: Key by which each step's samples are sorted before they are cut into micro-batches, [samples]; None:
            unsorted. It does not affect which samples a step uses.
        in_step: Whether all processes need the same number of micro-batches in a step, as with weights that are
            gathered in each micro-batch; missing ones become phantoms.
        lengths: Length of each sample; None if irrelevant.
        sizes: Height and width of each sample, [samples, 2], if a micro-batch is padded to its largest height and
            width.
        class_weights: Class weight of each sample in the loss, float64 [samples]; None: all equal. It does not affect
            micro-batch weights and BatchNorm statistics.
        draws: Sampling with replacement; None: each sample is used once per epoch.
        shards: The files that samples are read from a few at a time; None: in any order.
        balanced: Whether to balance the cost of steps and micro-batches for samples of unequal length.
    """

    seed: int
    samples: int
    global_batch_size: int
    logical_ranks: int
    repeats: int = 1
    in_step: bool = False
    growth: tuple[tuple[int, int, int], ...] = ()
    weights: SampleWeights | None = field(default=None, repr=False, compare=False)
    lengths: SampleLengths | None = field(default=None, repr=False, compare=False)
    sizes: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)
    shards: ShardSizes | None = field(default=None, repr=False, compare=False)
    balanced: bool = True
    sort_key: NDArray[Any] | None = field(default=None, repr=False, compare=False)
    class_weights: NDArray[np.float64] | None = field(default=None, repr=False, compare=False)
    draws: ClassDraws | None = field(default=None, repr=False, compare=False)

    @cached_property
    def epochs(self) -> Epochs:
        """Position of each step within the epochs."""
        return Epochs.cut(self.samples, [(0, self.global_batch_size, self.logical_ranks), *self.growth])

    def slices(self, step: int, world: World) -> list[SampleSlice]:
        """Return one process's micro-batches of a step, in logical order, phantoms first; never empty."""
        keys, bounds = self._cut_keys(step)
        ids = self._ids(keys)
        (epoch, position), phase = self.epochs.locate(step), self.epochs.phase_at(step)
        is_consecutive = self._balances is None and self.sort_key is None
        first = position * phase.global_batch_size if is_consecutive else None
        parts = _parts(bounds, world, in_step=self.in_step)
        step_weight = len(ids) if self.weights is None else int(self.weights[ids].sum())
        class_weight = None if self.class_weights is None else float(self.class_weights[ids].mean())
        return [
            SampleSlice(
                step=step,
                epoch=epoch,
                logical_rank=part.logical_rank,
                ids=ids[part.begin : part.end],
                is_last=part.is_last,
                weight=None if self.weights is None else int(self.weights[ids[part.begin : part.end]].sum()),
                step_weight=step_weight,
                step_samples=None if self.weights is None else len(ids),
                logical_ranks=phase.logical_ranks,
                phantom=part.phantom,
                mean_class_weight=class_weight,
                keys=None if self.draws is None else keys[part.begin : part.end],
                first=None if first is None else first + part.begin,
            )
            for part in parts
        ]

    def load(self, step: int, processes: int) -> StepLoad | None:
        """Return the work of one step on a number of processes; None if samples have no lengths."""
        if self.lengths is None:
            return None
        costs = self._costs(step, self.lengths)
        each = len(costs) // processes
        return StepLoad(
            tokens=int(self.lengths.tokens[self._cut(step)[0]].sum()),
            positions=sum(costs),
            busiest=max(sum(costs[rank * each : (rank + 1) * each]) for rank in range(processes)),
            processes=processes,
        )

    def costliest(self, first: int, last: int) -> LargestMicroBatch | None:
        """Return the largest micro-batch of steps ``first`` to ``last`` (excluded).

        Of the steps after the first 200, only those with the longest sample or largest picture of the first two epochs
        are considered.

        None if there are no such steps, or all micro-batches are equal: samples have no lengths or a fixed padded
        length.
        """
        if self.sizes is None and (self.lengths is None or not self.lengths.is_ragged):
            return None
        later: list[int] = []
        if last > first + _LOOKED_AT:
            epoch = self.epochs.locate(first)[0]
            # A resumed run may have passed this epoch's longest sample.
            begun = (each for each in (epoch, epoch + 1) if self.epochs.first_step(each) < last)
            later = [step for each in begun if first <= (step := self._step_of_longest(each)) < last]
        largest = self._costliest_of(range(first, min(last, first + _LOOKED_AT)))
        longest = self._costliest_of(later)
        return longest if longest and largest and longest.positions > largest.positions else largest

    def _costliest_of(self, steps: Iterable[int]) -> LargestMicroBatch | None:
        candidates = (
            LargestMicroBatch(positions=cost, step=step, logical_rank=rank)
            for step in steps
            for rank, cost in enumerate(self._areas(step) if self.lengths is None else self._costs(step, self.lengths))
        )
        return max(candidates, default=None)

    def _step_of_longest(self, epoch: int) -> int:
        """Return the step that has the epoch's longest sample, or its largest picture."""
        ids = self._ids(self._order(epoch)[:])
        if self.lengths is not None:
            costs = self.lengths.tokens[ids]
        else:
            assert self.sizes is not None
            costs = self.sizes[ids].prod(axis=1)
        size = self.epochs.phase_of_epoch(epoch).global_batch_size
        return self.epochs.first_step(epoch) + int(costs.argmax()) // size

    def _areas(self, step: int) -> list[int]:
        """Return the padded pixels in each logical rank's micro-batch: its largest height times its largest width."""
        assert self.sizes is not None
        ids, bounds = self._cut(step)
        sizes = self.sizes[ids]
        return [(end - begin) * int(sizes[begin:end].max(axis=0, initial=0).prod()) for begin, end in pairwise(bounds)]

    def _costs(self, step: int, lengths: SampleLengths) -> list[int]:
        """Return the padded token positions in each logical rank's micro-batch."""
        ids, bounds = self._cut(step)
        padded = lengths.padded(ids)
        # An empty micro-batch has no longest sample.
        return [(end - begin) * int(padded[begin:end].max(initial=0)) for begin, end in pairwise(bounds)]

    def ids_at(self, epoch: int, begin: int, end: int) -> SampleIds:
        """Return the samples at positions ``begin`` to ``end`` (excluded) of an epoch's order."""
        return self._ids(self._order(epoch)[begin:end])

    def _ids(self, keys: SampleIds) -> SampleIds:
        return keys if self.draws is None else keys % self.samples

    def _order(self, epoch: int) -> SampleIds | KeyedOrder | ShardOrder:
        if self.shards is not None:
            return _shard_order(self.seed, epoch, self.shards)
        if self.draws is not None:
            return sampled_order(self.seed, epoch, self.draws, self.repeats)
        if self._balances is None and self.samples > SORTED_AT_MOST:
            return _keyed_order(self.seed, epoch, self.samples, self.repeats)
        if self._balances is None:
            return epoch_order(self.seed, epoch, self.samples, self.repeats)
        return balanced_order(self.seed, epoch, self._balances, self.epochs.phase_of_epoch(epoch).global_batch_size)

    def _cut(self, step: int) -> tuple[SampleIds, tuple[int, ...]]:
        """Return the samples of one step, and the bounds of each logical rank among them."""
        keys, bounds = self._cut_keys(step)
        return self._ids(keys), bounds

    def _cut_keys(self, step: int) -> tuple[SampleIds, tuple[int, ...]]:
        """The same, with the keys of samples drawn with replacement."""
        (epoch, position), phase = self.epochs.locate(step), self.epochs.phase_at(step)
        if self._balances is not None:
            return _balanced_cut(
                self.seed, epoch, self._balances, position, phase.global_batch_size, phase.logical_ranks
            )
        ids = self._order(epoch)[position * phase.global_batch_size : (position + 1) * phase.global_batch_size]
        if self.sort_key is not None:
            ids = ids[np.argsort(self.sort_key[self._ids(ids)], kind="stable")]
        return ids, even_bounds(len(ids), phase.logical_ranks)

    @property
    def _balances(self) -> SampleLengths | None:
        """Return the lengths used for balancing, if any; repeated samples stay together."""
        balances = self.balanced and self.repeats == 1 and self.draws is None and self.shards is None
        return self.lengths if balances and self.lengths is not None and self.lengths.is_ragged else None

    def stream(self, first_step: int, last_step: int, world: World) -> Iterator[SampleSlice]:
        """Yield one process's micro-batches for steps ``first_step`` to ``last_step`` (excluded), across epochs."""
        begun, fetched = -1, (-1, -1)
        for step in range(first_step, last_step):
            fetched = self._fetch_ahead(step, last_step, fetched)
            yield from self.slices(step, world)
            epoch, _ = self.epochs.locate(step)
            if epoch != begun:
                begun = epoch
                self._order_ahead(epoch + 1, last_step)

    def _fetch_ahead(self, step: int, last_step: int, fetched: tuple[int, int]) -> tuple[int, int]:
        """Where a step begins a window of shards, fetch the next one; returns the epoch and window that are here."""
        if self.shards is None or self.shards.fetch is None:
            return fetched
        epoch, position = self.epochs.locate(step)
        order = _shard_order(self.seed, epoch, self.shards)
        window = order.window_at(position * self.epochs.phase_at(step).global_batch_size)
        if (epoch, window) != fetched:
            size = self.shards.window
            after = order.shards[(window + 1) * size : (window + 2) * size]
            if not len(after) and self.epochs.locate(last_step - 1)[0] > epoch:
                after = _shard_order(self.seed, epoch + 1, self.shards).shards[:size]
            fetch = threading.Thread(target=self.shards.fetch, args=(after.tolist(),), name="shards ahead", daemon=True)
            if len(after):
                fetch.start()
        return epoch, window

    def _order_ahead(self, epoch: int, last_step: int) -> None:
        """Compute a long epoch's order in advance: sorting a million samples takes longer than some steps."""
        if _ORDERED_AHEAD <= self.samples <= SORTED_AT_MOST and self.epochs.locate(last_step - 1)[0] >= epoch:
            threading.Thread(target=self._order, args=(epoch,), name="epoch order", daemon=True).start()

    @property
    def largest_part(self) -> int:
        """Maximum number of samples in the first epoch's micro-batches, for even parts."""
        return -(-self.global_batch_size // self.logical_ranks)

    def smallest_part(self, steps: int) -> int:
        """Return the number of samples in the smallest non-empty micro-batch of a run with this number of steps."""
        epochs = self.epochs
        if self._balances is not None:
            return 1  # a long sample may be alone in its micro-batch
        tails = [epochs.last_step_samples(each) // each.logical_ranks for each in epochs.finished_phases(steps)]
        whole = [each.global_batch_size // each.logical_ranks for each in epochs.phases if each.first_step < steps]
        return max(1, min(tails + whole))


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Position of one micro-batch among a step's samples."""

    logical_rank: int
    begin: int
    end: int
    is_last: bool
    phantom: bool = False


@lru_cache(maxsize=8)
def _parts(bounds: tuple[int, ...], world: World, *, in_step: bool) -> tuple[_Part, ...]:
    """Return one process's parts of a step, given ``bounds``; among all parts, empty ones come last."""
    size, logical_ranks = bounds[-1], len(bounds) - 1
    per_process = logical_ranks // world.world_size
    owned = range(world.rank * per_process, (world.rank + 1) * per_process)
    filled = [rank for rank in owned if bounds[rank] < bounds[rank + 1]]
    # Empty parts come last, so no process has more non-empty parts than the first.
    wanted = min(size, per_process) if in_step else 1
    empty = [rank for rank in owned if rank not in filled][: max(0, wanted - len(filled))]
    phantoms = [
        _Part(logical_rank=rank, begin=0, end=1, is_last=not filled and rank == empty[-1], phantom=True)
        for rank in empty
    ]
    parts = (
        _Part(logical_rank=rank, begin=bounds[rank], end=bounds[rank + 1], is_last=rank == filled[-1])
        for rank in filled
    )
    return (*phantoms, *parts)


def evaluation_rounds(samples: int, batch_size: int, world: World, shapes: SampleShapes | None = None) -> int:
    """Return the maximum number of evaluation batches of any process."""
    batches = sum(math.ceil(len(ids) / batch_size) for _, ids in _group_by_shape(samples, shapes))
    return math.ceil(batches / world.world_size)


def evaluation_slices(
    samples: int, batch_size: int, world: World, shapes: SampleShapes | None = None
) -> Iterator[SampleSlice]:
    """Yield one process's evaluation batches: each sample once, in batches that do not depend on the world size.

    Batch *j* holds samples ``[j * batch_size, (j + 1) * batch_size)`` and goes as a whole to process ``j mod
    world_size``, so that a sample is always scored in the same batch. With shapes, int64 [samples, 2], samples are
    grouped by shape, and a batch holds samples of one shape.
    """
    batches = [
        (shape, ids[start : start + batch_size])
        for shape, ids in _group_by_shape(samples, shapes)
        for start in range(0, len(ids), batch_size)
    ]
    for index in range(world.rank, len(batches), world.world_size):
        shape, ids = batches[index]
        yield SampleSlice(step=index, epoch=0, logical_rank=index, ids=ids, step_weight=len(ids), shape=shape)


def _group_by_shape(samples: int, shapes: SampleShapes | None) -> list[tuple[tuple[int, int] | None, SampleIds]]:
    """Return the samples of each shape, in order."""
    if shapes is None:
        return [(None, np.arange(samples))]
    distinct, group = np.unique(shapes, axis=0, return_inverse=True)
    return [((int(h), int(w)), np.flatnonzero(group.ravel() == index)) for index, (h, w) in enumerate(distinct)]
