"""Estimate the device memory of one process of a run, at any micro-batch size."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch

from paceline.data.image.pipeline import LARGEST_SHARE_OF_DEVICE
from paceline.distributed.device import describe_machine
from paceline.errors import RecipeError
from paceline.host.devices import Device, find_device, recognise
from paceline.host.world import World
from paceline.plan import MachineFacts
from paceline.plan.strategy import exact_gradient_count
from paceline.recipe.schema import Recipe
from paceline.trainer.fake_step import FakeStep, fake_step, machine_with
from paceline.trainer.network import count_parameters
from paceline.trainer.subject import Subject
from paceline_advisor import Json, frozen, picked
from paceline_advisor.memory.allocations import ROOM, Allocation
from paceline_advisor.memory.allocator import (
    INTERVALS,
    MIB,
    PLAIN,
    AllocatedBlock,
    AllocatorSettings,
    CachingAllocator,
    DoesNotFitError,
)
from paceline_advisor.memory.trace import FIRST, STEP, Steps, StepTrace, trace_steps, without_collection
from paceline_advisor.memory.variants import (
    Sharding,
    accumulated,
    buckets,
    in_16_bits,
    outside,
    sharding_of,
    step_total,
    under_fsdp,
    update_start,
    with_data_set,
    with_gradients,
    with_input,
    with_libraries,
    with_permanent,
    with_temporary,
    with_warm_up,
)

_LARGEST = 5


@frozen
class Peak:
    """The moment of a run with the highest memory use.

    Attributes:
        allocated: Bytes in use at that moment, as ``torch.cuda.max_memory_allocated`` counts them; on a CPU, bytes of
            the tensors.
        reserved: Peak memory reserved from the device; None on a CPU, where nothing is cached.
        causes: Bytes in use at that moment, by purpose, including rounding.
        phase: Phase of the step at that moment; ``evaluation`` outside of a step.
        layer: The module that runs at that moment.
        operation: The operation at that moment.
        largest: The layers with the largest activations at that moment, with their bytes.
        parts: Peak of the bytes in use in each part of the run, such as its first step, later steps, its evaluation.
    """

    allocated: int
    reserved: int | None
    causes: Mapping[str, int]
    phase: str
    layer: str
    operation: str
    largest: tuple[tuple[str, int], ...]
    parts: Mapping[str, int]

    @property
    def taken(self) -> int:
        """Peak bytes taken from the device: reserved with a caching allocator, else allocated."""
        return self.allocated if self.reserved is None else self.reserved

    def to_json(self) -> Json:
        """Return the peak as one JSON object."""
        return {
            "allocated_bytes": self.allocated,
            "reserved_bytes": self.reserved,
            **picked(self, "causes", "phase", "layer", "operation"),
            "largest_layers": [{"layer": layer, "activation_bytes": size} for layer, size in self.largest],
            "allocated_bytes_by_part": self.parts,
        }


def _played(step: StepTrace, allocator: CachingAllocator | None) -> Iterator[tuple[str, int, int]]:
    """Allocate and free a run's storages on a device.

    Args:
        step: The run.
        allocator: The device's allocator; None for a CPU.

    Yields:
        The name of the part, the number of events so far, and the bytes in use, at the start of each part and after
        each of its events.

    Raises:
        DoesNotFitError: If a storage does not fit on the device.
    """
    live: dict[int, AllocatedBlock | None] = {}
    allocated = done = 0
    for name, events in step.played:
        yield name, done, allocated
        for event in events:
            number = max(event, ~event)
            each = step.allocations[number]
            # Memory set aside for kernels decides what fits, but does not count.
            counts = each.cause != ROOM
            if number in live:
                block = live.pop(number)
                allocated -= block.size if block is not None and counts else 0
                if allocator is not None:
                    allocator.free(block)
            if event >= 0:
                # Batches are copied and normalised during the step, on a separate stream.
                stream = 1 if each.cause == "batch" else 0
                block = (
                    AllocatedBlock(0, each.size, (stream, False))
                    if allocator is None
                    else allocator.allocate(each.size, stream)
                )
                live[number] = block
                allocated += block.size if block is not None and counts else 0
            done += 1
            yield name, done, allocated


def peak_of(step: StepTrace, *, caching: bool, allocator: AllocatorSettings = PLAIN) -> Peak:
    """Find the peak of a run.

    Args:
        step: The run's steps and its evaluation.
        caching: Whether its device has PyTorch's caching allocator, as GPUs have.
        allocator: Options of that allocator.
    """
    reserving = CachingAllocator(settings=allocator) if caching else None
    parts: dict[str, int] = {}
    most, until = 0, 0
    for name, done, allocated in _played(step, reserving):
        parts[name] = max(parts.get(name, 0), allocated)
        if allocated > most:
            most, until = allocated, done
    live: dict[int, None] = {}
    for event in step.events[:until]:
        if event < 0:
            live.pop(~event, None)
        else:
            live[event] = None
    causes, layers = Counter[str](), Counter[str]()
    for each in (step.allocations[number] for number in sorted(live)):
        if each.cause != ROOM:
            causes[each.cause] += each.size
        if each.cause == "activations":
            layers[each.layer] += each.size
    if rounding := most - sum(causes.values()):
        causes["rounding"] = rounding
    last = step.allocations[step.events[until - 1]]
    return Peak(
        allocated=most,
        reserved=None if reserving is None else reserving.peak_reserved,
        causes=dict(causes),
        phase=last.phase,
        layer=last.layer,
        operation=last.operation,
        largest=tuple(layers.most_common(_LARGEST)),
        parts=parts,
    )


def fits(step: StepTrace, room: int, *, caching: bool, allocator: AllocatorSettings = PLAIN) -> bool:
    """Whether a run completes with ``room`` bytes of memory."""
    if not caching:
        return peak_of(step, caching=False).allocated <= room
    try:
        for _ in _played(step, CachingAllocator(limit=room, settings=allocator)):
            pass
    except DoesNotFitError:
        return False
    return True


# The second is the older name; if both are set, PyTorch uses the first.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Options that affect host memory, or when a call returns, but not blocks on a device.
_OF_THE_HOST = ("pinned_", "release_lock_on_")
_KNOWN = ("expandable_segments", "max_split_size_mb", "roundup_power2_divisions", "backend")
_PAIR = r"\s*([\w.-]+)\s*:\s*(\[[^\]]*\]|[^,\[\]]+)\s*"


def allocator_settings(
    variables: Mapping[str, str], *, expandable: bool = False
) -> tuple[AllocatorSettings, tuple[str, ...]]:
    """Return the allocator's settings, and a sentence for each requested option that is not modelled.

    Args:
        variables: The environment.
        expandable: Whether to use expandable segments in any case.

    Raises:
        RecipeError: If PyTorch does not accept a value.
    """
    name = next((each for each in VARIABLES if variables.get(each)), VARIABLES[0])
    text = variables.get(name, "").strip()
    if text and not re.fullmatch(rf"{_PAIR}(,{_PAIR})*,?", text):
        raise RecipeError(f"{name}={text}: PyTorch reads it as key:value,key:value, but this is not such a list.")
    found = {key: value.strip() for key, value in re.findall(_PAIR, text)}
    notices = []
    for key, value in found.items():
        if key == "garbage_collection_threshold":
            notices.append(
                f"{name}: {key}:{value} frees unused memory slightly earlier than in the estimate; what fits is the "
                "same"
            )
        elif key == "backend" and value != "native":
            notices.append(f"{name}: backend:{value} is another allocator; the estimate is that of PyTorch's own")
        elif key not in _KNOWN and not key.startswith(_OF_THE_HOST):
            notices.append(f"{name}: {key}:{value} is not in the estimate")
    return (
        AllocatorSettings(
            expandable=expandable or found.get("expandable_segments", "").lower() == "true",
            max_split=None if "max_split_size_mb" not in found else MIB * _number(name, found, "max_split_size_mb"),
            divisions=_divisions(name, found),
        ),
        tuple(notices),
    )


def _number(name: str, found: Mapping[str, str], key: str) -> int:
    if not found[key].isdigit():
        raise RecipeError(f"{name}: {key}:{found[key]} is not a whole number, which PyTorch requires.")
    return int(found[key])


def _divisions(name: str, found: Mapping[str, str]) -> tuple[int, ...]:
    """Parse ``roundup_power2_divisions``: one number, or a list of size:number in MiB, where > means all larger sizes.

    Raises:
        RecipeError: If PyTorch does not accept it.
    """
    key = "roundup_power2_divisions"
    if key not in found:
        return ()
    if not found[key].startswith("["):
        return (_power(name, _number(name, found, key)),) * INTERVALS
    divisions, last = [0] * INTERVALS, -1
    for part in found[key].strip("[]").split(","):
        bound, _, value = (each.strip() for each in part.partition(":"))
        if not value.isdigit() or not (bound == ">" or bound.isdigit()):
            raise RecipeError(f"{name}: {key}:{found[key]} is not a list such as [256:1,512:2,>:4].")
        number = _power(name, int(value))
        if bound == ">":
            divisions[last + 1 :] = [number] * (INTERVALS - last - 1)
            continue
        index = min(max(int(bound).bit_length() - 1, 0), INTERVALS - 1)
        if last < 0:
            divisions[:index] = [number] * index
        divisions[index], last = number, index
    return tuple(divisions)


def _power(name: str, number: int) -> int:
    if number & (number - 1):
        raise RecipeError(f"{name}: roundup_power2_divisions takes powers of two, and {number} is not one.")
    return number


MOST = 2**20
"""Largest micro-batch that is tried, in samples."""
_ROUGHLY = 1 / 32
# Precision of the search for the least memory: the needed memory divided by this.
_NEAR = 512
_GUESSES = 3


class SimulatedRun:
    """A process's run under a plan: its steps and its evaluation.

    Args:
        step: Its fake step.
        steps: The same step at all sizes.
        machine: The machine.
        shards: Processes over which weights are sharded, if they are.
        allocator: Options of PyTorch's allocator.

    Attributes:
        step: Its fake step.
        steps: The same step at all sizes.
        plan: The run's plan.
        recipe: The run's recipe.
        outside: Bytes of the device that are not used for tensors.
        numbers: Numbers of the network's parameters, all and trained.
        share: Samples of a process in the largest step; smaller micro-batches are accumulated.
        most: Largest micro-batch to try, in samples. It is the process's share if samples are processed one by one,
            since each size then has to be run.
    """

    def __init__(
        self,
        step: FakeStep,
        steps: Steps,
        machine: MachineFacts,
        *,
        shards: int,
        allocator: AllocatorSettings = PLAIN,
    ) -> None:
        self.step, self.steps, self._machine = step, steps, machine
        self.plan, self.recipe = step.plan, step.recipe
        self.shards, self.allocator = shards, allocator
        self.numbers = count_parameters(step.network)
        self._sharding: Sharding = sharding_of(step.network, step.recipe.parallel, shards)
        self._caching = machine.device in ("cuda", "xpu")
        self.outside = outside(machine.device, self.plan.world_size)
        self.share = max(each.global_batch_size for each in self.plan.batch_phases) // self.plan.world_size
        self.most = max(1, self.share) if steps.goes_one_by_one else MOST
        self.forget()

    def sharded_over(self, shards: int) -> SimulatedRun:
        """Return the same process with its weights, if sharded, on another number of processes."""
        return SimulatedRun(self.step, self.steps, self._machine, shards=shards, allocator=self.allocator)

    def forget(self) -> None:
        """Forget all results, because the steps have changed."""
        self._known: dict[tuple[int, str | None], Peak] = {}
        self._least: dict[tuple[int, int | None, str | None], int] = {}

    def divisor(self, most: int) -> int:
        """Return the largest micro-batch up to ``most`` samples that divides a process's share; 0 if ``most`` is 0."""
        return next((each for each in range(min(most, self.share), 0, -1) if self.share % each == 0), 0)

    def needed(self, micro_batch: int, strategy: str | None = None) -> int:
        """Return the bytes that a process uses on a device with enough memory, including driver and libraries."""
        return self.peak(micro_batch, strategy).taken + self._outside(strategy)

    def least(self, micro_batch: int, memory: int | None = None, strategy: str | None = None) -> int:
        """Return the bytes that a device must have, including driver and libraries. PyTorch frees its cache if needed.

        They are found by bisection, with a precision of 1/512 of :meth:`needed`.

        Args:
            micro_batch: Samples.
            memory: Bytes of the device, if known; the result is at most this if and only if the micro-batch fits.
            strategy: By default the plan's.
        """
        key = micro_batch, memory, strategy
        if key in self._least:
            return self._least[key]
        most = self.needed(micro_batch, strategy)
        near = most // _NEAR
        below = self.peak(micro_batch, strategy).allocated + self._outside(strategy) - 1
        middle = memory if memory is not None and below < memory < most else (below + most) // 2
        while self._caching and most - below > near:
            below, most = (below, middle) if self.fits(micro_batch, middle, strategy) else (middle, most)
            middle = (below + most) // 2
        self._least[key] = most
        return most

    def fits(self, micro_batch: int, memory: int, strategy: str | None = None) -> bool:
        """Whether a micro-batch fits on a device; PyTorch returns cached memory before an allocation fails."""
        room = memory - self._outside(strategy)
        peak = self._known.get((micro_batch, strategy))
        if peak is None and not self._caching:
            peak = self.peak(micro_batch, strategy)
        if peak is not None:
            if peak.taken <= room:
                return True
            if peak.reserved is None or peak.allocated > room:
                return False
        trace = self._trace(micro_batch, strategy or self.plan.strategy)
        return fits(trace, room, caching=self._caching, allocator=self.allocator)

    def _outside(self, strategy: str | None) -> int:
        """Return the memory not used by tensors; a strategy other than the plan's implies several processes."""
        if strategy is None or not self._caching:
            return self.outside
        return outside(self._machine.device, max(self.shards, 2))

    def measured(self, total: int | None) -> None:
        """Take what a process of the run was measured to use, on a CPU; None: nothing but tensors is known."""
        used = self.peak(self.plan.micro_batch_size).taken
        self.forget()
        self.outside = 0 if total is None else max(0, total - used)

    def largest(self, memory: int, strategy: str | None = None, *, roughly: bool = False) -> int:
        """Return the largest micro-batch that fits on a device, in samples; 0 if not even one.

        Args:
            memory: Bytes of the device.
            strategy: By default the plan's.
            roughly: Whether the result may be a few percent too small.
        """

        def room_for(size: int) -> bool:
            return self.fits(size, memory, strategy)

        # Below the process's share, gradients are kept from one micro-batch to the next.
        if room_for(self.share):
            return _last(room_for, self.share, self._guess(memory, strategy, self.share), self.most, roughly)
        if not room_for(1):
            return 0
        return _last(room_for, 1, self._guess(memory, strategy, 1), self.share, roughly)

    def _guess(self, memory: int, strategy: str | None, size: int) -> int:
        """Estimate the size that uses this memory, by a line through two sizes; the second one is near the result."""
        first, second = size, 2 * size
        for _ in range(_GUESSES):
            lower, upper = (self.needed(each, strategy) for each in (first, second))
            found = first + int((memory - lower) * (second - first) / max(upper - lower, 1))
            if found <= first or self.most <= first or abs(found - second) < second * _ROUGHLY:
                break
            second = min(found, self.most)
        return found

    def peak(self, micro_batch: int, strategy: str | None = None) -> Peak:
        """Return the peak of a run with this micro-batch size.

        Args:
            micro_batch: Samples.
            strategy: By default the plan's.
        """
        key = micro_batch, strategy
        if key not in self._known:
            trace = self._trace(micro_batch, strategy or self.plan.strategy)
            self._known[key] = peak_of(trace, caching=self._caching, allocator=self.allocator)
        return self._known[key]

    def _trace(self, micro_batch: int, strategy: str) -> StepTrace:
        # Gradients of several smaller micro-batches are accumulated.
        step = self._shared(self.steps(micro_batch), strategy, accumulates=micro_batch < self.share)
        step = with_input(step, self.plan, self.recipe.data.mix)
        return with_data_set(with_libraries(step, self._machine), self.plan, LARGEST_SHARE_OF_DEVICE)

    def _shared(self, step: StepTrace, strategy: str, *, accumulates: bool) -> StepTrace:
        """Apply a strategy to a run."""
        match strategy:
            case "ddp":
                cap = self.recipe.parallel.bucket_cap_mb
                sent = step if self.recipe.parallel.gradient_compression == "none" else in_16_bits(step, cap)
                return with_warm_up(with_gradients(sent, (bucket for bucket, _ in buckets(step, cap))))
            case "fsdp":
                return with_warm_up(under_fsdp(step, self._sharding))
            case "exact":
                return with_warm_up(self._exact(step))
        return accumulated(step) if accumulates else step

    def _exact(self, step: StepTrace) -> StepTrace:
        """Add permanent sets of gradients and buffer changes, a copy of the buffers, and sets that are exchanged."""
        buffers = step_total(step, "buffers")
        leaf = Allocation(sum(step.allocations[number].size for number in step.gradients()) + buffers, "gradients")
        held = exact_gradient_count(self.plan.logical_ranks, self.plan.world_size)
        step = with_permanent(with_gradients(step, [leaf] * held), [Allocation(buffers, "buffers")])
        if self.plan.world_size == 1:
            return step
        return with_temporary(step, [leaf] * (held - 1), FIRST, STEP, begin=update_start, end=update_start)


def machine_for(name: str | None, recipe: Recipe, processes: int = 1) -> tuple[MachineFacts, Device | None]:
    """Return the machine to assume, and its accelerator if it is a known one.

    Args:
        name: A name of ``paceline.host.devices``, or ``cpu``; None for the device that a run here would use.
        recipe: The run's recipe.
        processes: Processes on the machine, each with its own device unless that is the CPU.

    Raises:
        RecipeError: If the name is unknown, or the recipe's device is not here.
    """
    if name is None:
        machine = Subject.open(recipe, World(world_size=processes, local_world_size=processes), "device").machine
        return machine, recognise(machine.device_name) if machine.device == "cuda" else None
    if name.lower() == "cpu":
        return describe_machine(torch.device("cpu"), processes=processes), None
    device = find_device(name)
    return machine_with(device, processes=processes), device


@contextlib.contextmanager
def predicted(
    recipe: Recipe,
    machine: MachineFacts,
    processes: int = 1,
    *,
    shards: int = 0,
    scores: bool = True,
    allocator: AllocatorSettings | None = None,
    trace: Callable[[FakeStep], Steps] = trace_steps,
) -> Iterator[SimulatedRun]:
    """Predict the memory of one process of a run at any micro-batch size, from a fake step; the one way to do it.

    Args:
        recipe: The recipe.
        machine: The machine to assume.
        processes: Processes of the run.
        shards: Processes over which weights would be sharded; by default all, and at least two.
        scores: Whether to include an evaluation.
        allocator: Options of PyTorch's allocator; by default those of the environment, for CUDA.
        trace: Runs the step at the sizes that determine all others.

    Raises:
        PacelineError: If the recipe cannot be planned there, or its network needs real values.
    """
    if allocator is None:
        allocator, _ = allocator_settings(os.environ if machine.device == "cuda" else {})
    with without_collection(), fake_step(recipe, processes=processes, machine=machine, scores=scores) as step:
        yield SimulatedRun(step, trace(step), machine, shards=shards or max(2, processes), allocator=allocator)


def _last(condition: Callable[[int], bool], low: int, guess: int, high: int, roughly: bool) -> int:
    """Return the largest number for which a monotonic condition holds; it holds for ``low``."""
    at = min(max(guess, low), high)
    stride = max(1, at // (32 if roughly else 64))
    if at == low or condition(at):
        low, refused = at, high + 1
        while low < high and refused > high:
            at = min(low + stride, high)
            low, refused = (at, refused) if condition(at) else (low, at)
            stride *= 2
    else:
        refused = at
        while refused - stride > low and not condition(refused - stride):
            refused -= stride
            stride *= 2
        low = max(low, refused - stride)
    while refused - low > (max(1, low * _ROUGHLY) if roughly else 1) and refused <= high:
        middle = (low + refused) // 2
        low, refused = (middle, refused) if condition(middle) else (low, middle)
    return low
