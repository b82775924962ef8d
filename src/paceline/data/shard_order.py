"""The order of samples in many files (shards) that are read a few at a time.

Shards are permuted, and then the samples of each window of consecutive shards: two permutations that are pure functions
of (seed, epoch). A place in the epoch is found by searching the sums of the shards' sizes, so the memory needed grows
with the number of shards, not of samples, and there is no buffer whose state a resume would need.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from paceline.data.keyed_order import KeyedOrder
from paceline.data.random_draws import derive_seed
from paceline.data.slices import SampleIds

_PURPOSE = 0x7368617264  # "shard": another stream than those of whole epochs


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardSizes:
    """Where samples lie: sample ids count through the shards in order.

    Attributes:
        sizes: Samples in each shard, int64 [shards], all above 0.
        window: Shards whose samples are mixed with one another.
        fetch: Called in a thread with shards that are about to be read; None: they are here.
    """

    sizes: NDArray[np.int64]
    window: int
    fetch: Callable[[list[int]], None] | None = None

    @property
    def facts(self) -> dict[str, int | str]:
        """What a plan records of them: the order depends on it."""
        digest = hashlib.sha256(self.sizes.astype("<i8").tobytes()).hexdigest()
        return {"files": len(self.sizes), "window": self.window, "sha256": digest}

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """The first sample id after each shard, int64 [shards]."""
        return np.cumsum(self.sizes)

    def locate(self, sample: int) -> tuple[int, int]:
        """Return the shard of a sample, and its row there."""
        shard = int(np.searchsorted(self.ends, sample, side="right"))
        return shard, sample - int(self.ends[shard] - self.sizes[shard])


def describe_shards(facts: Mapping[str, int | str] | None) -> str:
    """Say what a plan records of shards: ``9 files, window 2, sizes 3fa1b7c2``."""
    return "none" if facts is None else f"{facts['files']} files, window {facts['window']}, sizes {facts['sha256']:.8}"


class ShardOrder:
    """An epoch's order of all samples; a slice with step 1 is int64 [N].

    Args:
        seed: The run's seed, in [0, 2**64).
        epoch: The epoch, in [0, 2**64).
        shards: The shards.

    Attributes:
        shards: Shards in the order in which they are read, int64 [shards].
    """

    def __init__(self, seed: int, epoch: int, shards: ShardSizes) -> None:
        count = len(shards.sizes)
        self._seed, self._epoch = derive_seed(seed, _PURPOSE), epoch
        self.shards = KeyedOrder(self._seed, epoch, count)[:]
        sizes = shards.sizes[self.shards]
        self._ends = np.cumsum(sizes)
        # What is added to a place in the epoch to find its sample, were samples not mixed.
        self._moved = (shards.ends - shards.sizes)[self.shards] - (self._ends - sizes)
        window = min(shards.window, count)
        lasts = np.append(np.arange(window, count, window), count) - 1
        self._windows = np.insert(self._ends[lasts], 0, 0)
        self._mixed = lru_cache(maxsize=2)(self._mixed_window)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, places: slice) -> SampleIds:
        begin, end, _ = places.indices(len(self))
        found = [np.empty(0, dtype=np.int64)]
        while begin < end:
            window = self.window_at(begin)
            first, after = self._windows[window : window + 2].tolist()
            until = min(end, after)
            mixed = first + self._mixed(window)[begin - first : until - first]
            found.append(mixed + self._moved[np.searchsorted(self._ends, mixed, side="right")])
            begin = until
        return np.concatenate(found)

    def window_at(self, place: int) -> int:
        """Return the window in which a place of the epoch lies."""
        return int(np.searchsorted(self._windows, place, side="right")) - 1

    def _mixed_window(self, window: int) -> KeyedOrder:
        samples = int(self._windows[window + 1] - self._windows[window])
        return KeyedOrder(derive_seed(self._seed, window), self._epoch, samples)
