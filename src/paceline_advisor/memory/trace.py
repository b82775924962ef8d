"""Storages that a run's first steps and its evaluation allocate and free, for any micro-batch size.

Two fake runs of different sizes create the same storages in the same order, and each storage's size is linear in the
number of samples. So two runs determine all sizes.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import chain, pairwise

import torch
from torch import Tensor

from paceline.data.batch import Batch, tensors_in
from paceline.errors import ModelError
from paceline.trainer.fake_step import FakeStep
from paceline_advisor import frozen
from paceline_advisor.memory.allocations import Allocation, AllocationTrace, cpu_workspace, gpu_workspace

Scored = Callable[[AllocationTrace], None]
"""Appends an evaluation's storages to the trace of any step of the same run."""

START, REHEARSAL, FIRST, STEP, EVALUATION = "start", "rehearsal", "first step", "step", "evaluation"
# In the order of a run: the first step creates the optimizer's state, and later ones have it. A step after the
# evaluation starts with the state that it left.
_ORDER = (START, REHEARSAL, FIRST, STEP, EVALUATION, STEP)
# Smaller sizes are extrapolated: a network may behave differently with a single sample, or refuse it.
_SMALLEST = 2
# If a step with twice as many samples has at least this many times as many storages, the network processes its samples
# one by one.
_MANY_MORE = 1.2


@frozen
class StepTrace:
    """The storages of a run's steps and of its evaluation.

    Attributes:
        micro_batch: Its size in samples.
        allocations: All storages, by number.
        parts: Events by storage number in each part of the run: ``n`` is allocated, ``~n`` is freed. A storage
            allocated again while present replaces itself.
        why_unscored: Why an evaluation is missing from the parts; empty if none is missing.
    """

    micro_batch: int
    allocations: tuple[Allocation, ...]
    parts: Mapping[str, tuple[int, ...]]
    why_unscored: str = ""

    @cached_property
    def played(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The parts, in the order of a run."""
        return tuple((name, self.parts[name]) for name in _ORDER if name in self.parts)

    @cached_property
    def events(self) -> tuple[int, ...]:
        """All events, in that order."""
        return tuple(chain.from_iterable(events for _, events in self.played))

    @cached_property
    def shape(self) -> tuple[object, ...]:
        """What runs of different sizes have in common: the events, and the operations that allocate the storages."""
        return self.played, tuple(each.operation for each in self.allocations)

    def gradients(self, part: str = STEP) -> list[int]:
        """Return the numbers of a part's gradients, in order of allocation."""
        made = {event for event in self.parts.get(part, ()) if event >= 0}
        return sorted(number for number in made if self.allocations[number].cause == "gradients")

    def with_parts(self, change: Callable[[tuple[int, ...]], tuple[int, ...]], *names: str) -> StepTrace:
        """Return a copy with some parts changed."""
        changed = {name: change(events) if name in names else events for name, events in self.parts.items()}
        return replace(self, parts=changed)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Collect garbage beforehand, and disable collection inside.

    Frees in a trace must not depend on when the collector runs. It also slows tracing down.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def trace_step(step: FakeStep, scored: Scored | None = None) -> StepTrace:
    """Run a fake run's first step, its evaluation if any, and the update of another step.

    The passes of both steps are the same, but the first update creates the optimizer's state.

    Args:
        step: The fake run.
        scored: Its evaluation, if already traced.
    """
    step.optimizer.state.clear()
    trained = [each for each in step.network.parameters() if each.requires_grad]
    reallocated = {}
    with _tracing(step) as trace:
        trace.hold(tensors_in(step.batch.inputs, step.batch.targets), "batch")
        cuts = [len(trace.events)]
        step.backward(step.forward())
        trace.call((each.grad for each in trained), "gradients")
        gradients = [None if each.grad is None else trace.number_of(each.grad) for each in trained]
        cuts.append(len(trace.events))
        step.update()
        trace.call(_state(step), "optimizer")
        trace.hold(_state(step), "optimizer")
        cuts.append(len(trace.events))
        why_unscored = ""
        try:
            if step.is_sample_by_sample and step.evaluation_batch_size:
                (scored or evaluation_of(step))(trace)
            else:
                step.evaluate(_calling(trace))
        except ModelError as error:
            why_unscored = str(error)
        cuts.append(len(trace.events))
        # Replace the gradients: running the passes again would take as long as before.
        for parameter, number in zip(trained, gradients, strict=True):
            if number is not None:
                parameter.grad = torch.empty_like(parameter)
                reallocated[trace.number_of(parameter.grad)] = number
        step.update()
        cuts.append(len(trace.events))
    allocations = tuple(trace.allocations)
    # Earlier storages come first, including those that only an operation revealed.
    before = {number for number, each in enumerate(allocations) if not each.phase and number not in reallocated}
    dropped = {number for number, each in enumerate(allocations) if why_unscored and each.phase == EVALUATION}

    def between(first: int, last: int) -> tuple[int, ...]:
        kept = []
        for event in trace.events[first:last]:
            if event >= 0 and (event in before or event in reallocated):
                continue
            number = max(event, ~event)
            if number not in dropped:
                kept.append(~reallocated[number] if number in reallocated else event)
        return tuple(kept)

    passes, first, evaluation, later = (between(*pair) for pair in pairwise(cuts))
    if why_unscored:  # storages freed during the failed evaluation would be freed anyway
        first, evaluation = (*first, *evaluation), ()
    parts = {START: tuple(sorted(before)), FIRST: (*passes, *first), STEP: (*passes, *later)}
    return StepTrace(
        micro_batch=step.micro_batch,
        allocations=allocations,
        parts=parts | ({EVALUATION: evaluation} if evaluation else {}),
        why_unscored=why_unscored,
    )


@contextlib.contextmanager
def _tracing(step: FakeStep) -> Iterator[AllocationTrace]:
    """Trace a fake run's operations, with its weights in memory."""
    inside = cpu_workspace if step.plan.device == "cpu" else gpu_workspace
    with AllocationTrace(lambda: (step.phase, step.layer), inside) as trace:
        trace.hold(step.network.parameters(), "weights")
        trace.hold(step.network.buffers(), "buffers")
        if step.ema is not None:
            trace.hold(chain(step.ema.module.parameters(), step.ema.module.buffers()), "average")
        yield trace


def evaluation_of(step: FakeStep) -> Scored:
    """Return the evaluation of a network that processes samples one by one, from runs with one and two samples.

    Raises:
        ModelError: If it needs real values.
    """

    def traced(samples: int) -> tuple[int, list[Allocation], list[int], int]:
        """Return the number of earlier storages, the new storages, their events, and their peak."""
        with _tracing(step) as trace:
            held = len(trace.allocations)
            step.evaluate(_calling(trace), samples)
        events = [event for event in trace.events if max(event, ~event) >= held]
        total = most = 0
        for event in events:
            size = trace.allocations[max(event, ~event)].size
            total += size if event >= 0 else -size
            most = max(most, total)
        return held, trace.allocations[held:], events, most

    count = step.evaluation_batch_size
    held, allocations, events, most = traced(min(2, count))
    if count > 2:
        more = (count - 2) * max(0, most - traced(1)[3])
        number = held + len(allocations)
        allocations.append(Allocation(more, "activations", "evaluation", "", f"{count - 2} further samples"))
        events = [number, *events, ~number]

    def append(trace: AllocationTrace) -> None:
        behind = len(trace.allocations) - held  # earlier storages come first in every trace
        trace.allocations += allocations
        trace.events += (event + behind if event >= 0 else event - behind for event in events)

    return append


def _calling(trace: AllocationTrace) -> Callable[[Batch], None]:
    def see(batch: Batch) -> None:
        trace.call(tensors_in(batch.inputs, batch.targets), "batch")

    return see


def _state(step: FakeStep) -> Iterator[Tensor]:
    for kept in step.optimizer.state.values():
        yield from (each for each in kept.values() if isinstance(each, Tensor))


class Steps:
    """Steps of all sizes, extrapolated from two that were run.

    Args:
        small: One step.
        large: Another step, with more samples.
        again: Runs the step of a size that the two do not determine.
        one_by_one: Whether the network is known to process its samples in a loop.

    Attributes:
        again: Runs the step of a size.
        is_linear: Whether the two create the same storages, so that other sizes follow from them.
        is_scaled: Whether other sizes are assumed to have the storages of a step that was run, rescaled.
    """

    def __init__(
        self, small: StepTrace, large: StepTrace, again: Callable[[int], StepTrace], *, one_by_one: bool = False
    ) -> None:
        self._small, self._large, self.again = small, large, again
        self.is_scaled = one_by_one
        self.is_linear = small.shape == large.shape
        self._refused: set[int] = set()
        self._done: dict[int, StepTrace] = {small.micro_batch: small, large.micro_batch: large}

    @property
    def goes_one_by_one(self) -> bool:
        """Whether the number of storages grows with the samples: the network processes them in a loop."""
        return self.is_scaled or len(self._large.allocations) >= _MANY_MORE * len(self._small.allocations)

    def __call__(self, micro_batch: int) -> StepTrace:
        """Return the step with this many samples.

        Raises:
            ModelError: If it has to be run, and cannot be.
        """
        if micro_batch in self._done:
            return self._done[micro_batch]
        if self.is_scaled and micro_batch >= _SMALLEST:
            return self._like_others(micro_batch)
        if not self.is_linear:
            try:
                self._done[micro_batch] = self.again(micro_batch)
            except ModelError:
                if not self.is_scaled:
                    raise
                self._refused.add(micro_batch)
                self._done[micro_batch] = self._like_others(micro_batch)
            return self._done[micro_batch]
        first, second = self._small, self._large
        share = (micro_batch - first.micro_batch) / (second.micro_batch - first.micro_batch)
        allocations = tuple(
            one if one.size == two.size else replace(one, size=round(one.size + (two.size - one.size) * share))
            for one, two in zip(first.allocations, second.allocations, strict=True)
        )
        self._done[micro_batch] = replace(first, micro_batch=micro_batch, allocations=allocations)
        return self._done[micro_batch]

    def refuses(self, micro_batch: int) -> bool:
        """Whether the step of this size cannot be run, such as a detector's with one picture.

        BatchNorm needs at least two values of each channel.
        """
        self(micro_batch)
        return micro_batch in self._refused

    def _like_others(self, micro_batch: int) -> StepTrace:
        others = [each for each in self._done.values() if each.micro_batch >= _SMALLEST]
        return _scaled(min(others, key=lambda each: abs(each.micro_batch - micro_batch)), micro_batch)

    def confirm(self, micro_batch: int) -> bool:
        """Run the step of a size, and use it instead of the extrapolation; return whether the two match."""
        computed, done = self(micro_batch), self.again(micro_batch)
        if computed.allocations == done.allocations and computed.shape == done.shape:
            return True
        self.is_linear = self.is_linear and done.shape == self._small.shape
        if self.is_scaled:
            self._done[micro_batch] = done
            return False
        self._large = done
        self._done = {self._small.micro_batch: self._small, micro_batch: done}
        return False


def _scaled(trace: StepTrace, micro_batch: int) -> StepTrace:
    """Return another size of a step that processes samples one by one: storages of samples are rescaled."""
    share = micro_batch / trace.micro_batch

    def is_of_samples(each: Allocation) -> bool:
        if each.cause == "batch":
            return each.phase != EVALUATION
        return each.cause in ("activations", "temporary") and each.phase in ("forward", "backward")

    allocations = tuple(
        replace(each, size=round(each.size * share)) if is_of_samples(each) else each for each in trace.allocations
    )
    return replace(trace, micro_batch=micro_batch, allocations=allocations)


def trace_steps(step: FakeStep) -> Steps:
    """Return the steps of a fake run, at all sizes."""
    scored = None
    if step.is_sample_by_sample and step.evaluation_batch_size:
        with contextlib.suppress(ModelError):  # each step then reports it
            scored = evaluation_of(step)

    def done(micro_batch: int) -> StepTrace:
        step.set_micro_batch(micro_batch)
        return trace_step(step, scored)

    given = max(step.micro_batch, 2 * _SMALLEST)
    return Steps(done(given // 2), done(given), done, one_by_one=step.is_sample_by_sample)
