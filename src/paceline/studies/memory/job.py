"""What does one process of a run need of its device, at any size of micro-batch?"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from paceline.data.image.backend_choice import LARGEST_SHARE_OF_DEVICE
from paceline.recipe.plan import MachineFacts
from paceline.recipe.strategy import gradients_held_by_exact
from paceline.studies.memory.replay import Peak, fits, peak_of
from paceline.studies.memory.surroundings import outside, with_data_set, with_input, with_libraries
from paceline.studies.memory.trace import StepTrace
from paceline.studies.memory.variants import Spread, buckets, fully_sharded, spread_of, with_gradients, with_more
from paceline.trainer.fake_run import FakeRun

_MOST = 2**20
_ROUGHLY = 1 / 32


class Job:
    """A process's step under a plan.

    Args:
        step: Its fake step, which is asked now for what needs its network.
        steps: The same at all sizes.
        machine: What it runs on.
        ways: Processes to spread the weights over, if they are.
        expandable: Whether PyTorch's allocator has expandable segments.

    Attributes:
        share: Samples of a process in the largest step; fewer in a micro-batch are made up for by accumulation.
    """

    def __init__(
        self,
        step: FakeRun,
        steps: Callable[[int], StepTrace],
        machine: MachineFacts,
        *,
        ways: int,
        expandable: bool = False,
    ) -> None:
        self.plan, self.recipe = step.plan, step.recipe
        self._steps, self._machine = steps, machine
        self.ways, self.expandable = ways, expandable
        self._spread: Spread = spread_of(step.network, step.recipe.parallel, ways)
        self._caching = machine.device in ("cuda", "xpu")
        self.outside = outside(machine.device, self.plan.world_size)
        self.share = max(each.global_batch_size for each in self.plan.batch_phases) // self.plan.world_size
        self.peak = cache(self._peak)

    def accumulates(self, micro_batch: int) -> bool:
        """Whether gradients of earlier micro-batches are there."""
        return micro_batch < self.share

    def needed(self, micro_batch: int, strategy: str | None = None) -> int:
        """Bytes that a process takes from its device, driver and libraries included."""
        peak: Peak = self.peak(micro_batch, strategy)
        return (peak.allocated if peak.reserved is None else peak.reserved) + self._outside(strategy)

    def fits(self, micro_batch: int, memory: int, strategy: str | None = None) -> bool:
        """Whether a device has room for it; a GPU gives back what it keeps in reserve before it refuses."""
        trace = self._trace(micro_batch, strategy or self.plan.strategy)
        return fits(trace, memory - self._outside(strategy), caching=self._caching, expandable=self.expandable)

    def _outside(self, strategy: str | None) -> int:
        """What is not tensors'; another strategy than the plan's is that of several processes."""
        return self.outside if strategy is None else outside(self._machine.device, max(self.ways, 2))

    def largest(self, memory: int, strategy: str | None = None, *, roughly: bool = False) -> int:
        """Most samples of a micro-batch that a device has room for; 0 if not even one.

        Args:
            memory: Bytes of the device.
            strategy: The plan's unless given.
            roughly: Whether some more per cent might fit.
        """

        def room_for(size: int) -> bool:
            return self.fits(size, memory, strategy)

        # Below the process's share gradients are kept from one micro-batch to the next.
        if room_for(self.share):
            return _last(room_for, self.share, self._guess(memory, strategy, self.share), _MOST, roughly)
        if not room_for(1):
            return 0
        return _last(room_for, 1, self._guess(memory, strategy, 1), self.share, roughly)

    def _guess(self, memory: int, strategy: str | None, size: int) -> int:
        """Where the line through two sizes meets the memory."""
        below, above = (self.needed(each, strategy) for each in (size, 2 * size))
        return size + int((memory - below) * size / max(above - below, 1))

    def _peak(self, micro_batch: int, strategy: str | None = None) -> Peak:
        trace = self._trace(micro_batch, strategy or self.plan.strategy)
        return peak_of(trace, caching=self._caching, expandable=self.expandable)

    def _trace(self, micro_batch: int, strategy: str) -> StepTrace:
        step = self._shared(self._steps(micro_batch), strategy, accumulates=self.accumulates(micro_batch))
        mix = self.recipe.data.mix
        step = with_input(step, self.plan, is_mixed=mix.mixup > 0 or mix.cutmix > 0)
        return with_data_set(with_libraries(step, self._machine), self.plan, LARGEST_SHARE_OF_DEVICE)

    def _shared(self, step: StepTrace, strategy: str, *, accumulates: bool) -> StepTrace:
        """What a strategy makes of a step."""
        if strategy == "ddp":
            return with_gradients(step, buckets(step, self.recipe.parallel.bucket_cap_mb))
        if strategy == "fsdp":
            return fully_sharded(step, self._spread)
        if strategy == "exact":
            held = gradients_held_by_exact(self.plan.logical_ranks, self.plan.world_size)
            gradients = [each for each in step.allocations if each.cause == "gradients"]
            return with_more(step, gradients * (held - 1))
        return with_gradients(step) if accumulates else step


def _last(holds: Callable[[int], bool], low: int, guess: int, high: int, roughly: bool) -> int:
    """The largest number for which something holds that holds for ``low``, and for all below the first it does not."""
    at = min(max(guess, low), high)
    stride = max(1, at // 64)
    while holds(at) and at < high:
        low, at = at, min(at + stride, high)
        stride *= 2
    if holds(at):
        return at
    refused = at
    while refused - stride > low and not holds(refused - stride):
        refused -= stride
        stride *= 2
    low = max(low, refused - stride)
    while refused - low > (max(1, low * _ROUGHLY) if roughly else 1):
        middle = (low + refused) // 2
        low, refused = (middle, refused) if holds(middle) else (low, middle)
    return low
