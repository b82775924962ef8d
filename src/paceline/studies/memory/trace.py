"""Which storages does one training step make and let go of, at any size of its micro-batch?

Two fake steps of different sizes make the same storages in the same order, and each storage's size is a line in the
number of samples. So the steps of all sizes are known from two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

from torch import Tensor, nn

from paceline.studies.memory import cpu_kernels
from paceline.telemetry.allocations import Allocation, AllocationTrace
from paceline.trainer.fake_run import FakeRun


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """One step's storages.

    Attributes:
        micro_batch: Samples.
        allocations: Storages; those before the step are the first.
        events: What happens to them, by number: ``n`` is made, ``~n`` goes.
    """

    micro_batch: int
    allocations: tuple[Allocation, ...]
    events: tuple[int, ...]

    @cached_property
    def shape(self) -> tuple[object, ...]:
        """What steps of all sizes have in common."""
        return self.events, tuple(each.operation for each in self.allocations)

    def total(self, *causes: str) -> int:
        """Bytes of all storages of some causes."""
        return sum(each.size for each in self.allocations if each.cause in causes)


def trace_step(step: FakeRun) -> StepTrace:
    """Do a fake step as one in the midst of training: the optimizer has its state."""
    if not step.optimizer.state:
        step.settle()
    inside = cpu_kernels.workspace if step.plan.device == "cpu" else _nothing
    with AllocationTrace(lambda: (step.phase, step.layer), inside) as trace:
        trace.hold(step.network.parameters(), "weights")
        trace.hold(step.network.buffers(), "buffers")
        trace.hold([] if step.ema is None else _tensors(step.ema.module), "average")
        trace.hold(_state(step), "optimizer")
        trace.hold([step.batch.inputs, step.batch.targets], "batch")
        loss = step.forward()
        step.backward(loss)
        trace.call((each.grad for each in step.network.parameters()), "gradients")
        del loss
        step.update()
    return _ordered(step.micro_batch, trace)


def _nothing(*_: Any) -> int:
    return 0


def _ordered(micro_batch: int, trace: AllocationTrace) -> StepTrace:
    """With what was there before in front, also what only an operation showed."""
    before = {number for number, each in enumerate(trace.allocations) if not each.phase}
    events = (*sorted(before), *(each for each in trace.events if each not in before))
    return StepTrace(micro_batch=micro_batch, allocations=tuple(trace.allocations), events=events)


def _tensors(network: nn.Module) -> Iterator[Tensor]:
    return chain(network.parameters(), network.buffers())


def _state(step: FakeRun) -> Iterator[Tensor]:
    for kept in step.optimizer.state.values():
        yield from (each for each in kept.values() if isinstance(each, Tensor))


class Steps:
    """Steps of all sizes, from two that were done.

    Args:
        small: One.
        large: Another one, of more samples.
        again: Does the step of a size that the two do not tell.
    """

    def __init__(self, small: StepTrace, large: StepTrace, again: Callable[[int], StepTrace]) -> None:
        self._small, self._large, self._again = small, large, again
        self.is_linear = small.shape == large.shape
        self._done: dict[int, StepTrace] = {small.micro_batch: small, large.micro_batch: large}

    def __call__(self, micro_batch: int) -> StepTrace:
        """The step of so many samples."""
        if micro_batch not in self._done:
            self._done[micro_batch] = self._between(micro_batch) if self.is_linear else self._again(micro_batch)
        return self._done[micro_batch]

    def done_again(self, micro_batch: int) -> StepTrace:
        """The same, not taken from the two but done."""
        return self._again(micro_batch)

    def _between(self, micro_batch: int) -> StepTrace:
        first, second = self._small, self._large
        share = (micro_batch - first.micro_batch) / (second.micro_batch - first.micro_batch)
        allocations = tuple(
            one if one.size == two.size else replace(one, size=round(one.size + (two.size - one.size) * share))
            for one, two in zip(first.allocations, second.allocations, strict=True)
        )
        return replace(first, micro_batch=micro_batch, allocations=allocations)


def trace_steps(step: FakeRun) -> Steps:
    """The steps of a fake run, at all sizes."""

    def done(micro_batch: int) -> StepTrace:
        step.show(micro_batch)
        return trace_step(step)

    given = max(step.micro_batch, 2)
    return Steps(done(max(1, given // 2)), done(given), done)
