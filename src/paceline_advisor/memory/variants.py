"""Storages of a step with accumulation or several processes, and what libraries add."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from torch import nn

from paceline.distributed.sharding import modules_to_shard
from paceline.plan import MachineFacts, Plan
from paceline.recipe.data import Mix
from paceline.recipe.running import Parallel
from paceline.telemetry.allocations import Allocation
from paceline.telemetry.memory import private_bytes
from paceline_advisor.formulas.parallel_step import Gradient
from paceline_advisor.formulas.parallel_step import buckets as filled_buckets
from paceline_advisor.memory.allocator import MIB
from paceline_advisor.memory.trace import EVALUATION, FIRST, REHEARSAL, START, STEP, StepTrace

GATHERED = "gathered weights"
"""What FSDP holds of other processes' weights for a moment, and of gradients that are theirs."""

Place = Callable[[StepTrace, Sequence[int]], int]
"""Which of a part's events comes next at some place."""

_SPREAD = ("weights", "average", "optimizer")
_PASSES = ("forward", "backward")


def with_more(step: StepTrace, more: Iterable[Allocation]) -> StepTrace:
    """A run with other storages in memory from its beginning to its end."""
    step, numbers = _added(step, more)
    return replace(step, parts={**step.parts, START: (*numbers, *step.parts.get(START, ()))})


def meanwhile(step: StepTrace, more: Iterable[Allocation], *names: str, begin: Place, end: Place) -> StepTrace:
    """A run in some of whose parts other storages come and go.

    Args:
        step: The run.
        more: The storages.
        names: The parts.
        begin: Where in a part's events they are made.
        end: Where they go.
    """
    step, numbers = _added(step, more)

    def change(events: tuple[int, ...]) -> tuple[int, ...]:
        first, last = begin(step, events), end(step, events)
        gone = (~number for number in numbers)
        return (*events[:first], *numbers, *events[first:last], *gone, *events[last:])

    return step.with_parts(change, *names)


def front(_: StepTrace, __: Sequence[int]) -> int:
    """Before all events of a part."""
    return 0


def back(_: StepTrace, events: Sequence[int]) -> int:
    """Behind them."""
    return len(events)


def update_begins(step: StepTrace, events: Sequence[int]) -> int:
    """Where in a step's events its update begins: the first that it makes, or after the last gradient."""
    made = [place for place, event in enumerate(events) if event >= 0]
    of_update = (place for place in made if step.allocations[events[place]].phase == "update")
    return next(of_update, made[-1] + 1 if made else 0)


def rehearsed(step: StepTrace) -> StepTrace:
    """A run whose first batch goes through both passes once before the first step; buffers are kept meanwhile."""
    buffers = Allocation(step_total(step, "buffers"), "temporary", "forward", operation="clone")
    step, numbers = _added(step, [buffers])
    passes = [event for event in step.parts[FIRST] if step.allocations[max(event, ~event)].phase in _PASSES]
    return replace(step, parts={**step.parts, REHEARSAL: (*numbers, *passes, *(~each for each in numbers))})


def step_total(step: StepTrace, cause: str) -> int:
    """Bytes of what is there from the beginning, of some cause."""
    return sum(each.size for each in step.allocations if each.cause == cause and not each.phase)


def with_gradients(step: StepTrace, kept: Iterable[Allocation]) -> StepTrace:
    """A run to whose gradients others are added, that are there all along: those of DDP's buckets, say.

    Args:
        step: One that makes its gradients.
        kept: What they are added to.
    """
    numbers = set(step.gradients(FIRST)) | set(step.gradients())
    step = _called(step, numbers, "temporary")
    return with_more(step.with_parts(lambda events: _let_go_at_once(events, numbers), FIRST, STEP), kept)


def accumulated(step: StepTrace) -> StepTrace:
    """A run each of whose steps has two micro-batches: the second's gradients are added to those of the first.

    Both passes come twice, first with gradients that stay, and then with gradients that go at once.
    """
    for name in (each for each in (FIRST, STEP) if each in step.parts):
        events, numbers = step.parts[name], step.gradients(name)
        step, added = _added(step, (step.allocations[number] for number in numbers))
        kept = dict(zip(numbers, added, strict=True))
        stay = [
            kept.get(event, event)
            for event in events
            if step.allocations[max(event, ~event)].phase in _PASSES and ~event not in kept
        ]
        step = _called(step, set(kept), "temporary")
        # The first pass's leftovers, its gradients aside, go before the second.
        again = _let_go_at_once(events, set(kept))
        whole = (*stay, *again, *(~number for number in added))
        step = replace(step, parts={**step.parts, name: whole})
    return step


def _called(step: StepTrace, numbers: set[int], cause: str) -> StepTrace:
    allocations = tuple(
        replace(each, cause=cause) if number in numbers else each for number, each in enumerate(step.allocations)
    )
    return replace(step, allocations=allocations)


def _added(step: StepTrace, more: Iterable[Allocation]) -> tuple[StepTrace, tuple[int, ...]]:
    """A run with further storages, whose parts do not have them yet, and their numbers."""
    added = tuple(more)
    count = len(step.allocations)
    return replace(step, allocations=(*step.allocations, *added)), tuple(range(count, count + len(added)))


def _let_go_at_once(events: Sequence[int], numbers: set[int]) -> tuple[int, ...]:
    """Free some storages before the next one is made, and not when they went."""
    changed: list[int] = []
    added: list[int] = []
    for event in events:
        if event >= 0:
            changed += [~number for number in added]
            added = [event] if event in numbers else []
            changed.append(event)
        elif ~event not in numbers:
            changed.append(event)
    return (*changed, *(~number for number in added))


def buckets(step: StepTrace, cap_mb: int, part: str = STEP) -> list[tuple[Allocation, list[int]]]:
    """DDP's buckets for a step's gradients, with their numbers, in the order in which they come.

    ``.grad`` is a view of them.

    Args:
        step: One that makes its gradients.
        cap_mb: ``parallel.bucket_cap_mb``.
        part: Which of the steps.
    """
    numbers = step.gradients(part)
    arriving = [Gradient(step.allocations[number].size, place + 1) for place, number in enumerate(numbers)]
    found, begin = [], 0
    for bucket in filled_buckets(arriving, cap_mb * MIB):
        end = int(bucket.ready)
        found.append((Allocation(int(bucket.size_bytes), "gradients", operation="bucket"), numbers[begin:end]))
        begin = end
    return found


def in_16_bits(step: StepTrace, cap_mb: int) -> StepTrace:
    """A run whose DDP buckets are sent as 16-bit copies; call before :func:`with_gradients`.

    A copy is made when its bucket's last gradient is there, and all copies live until the update.
    """
    for name in (FIRST, STEP):
        for bucket, numbers in buckets(step, cap_mb, name):
            half = Allocation(bucket.size // 2, "temporary", "backward", operation="compressed")

            def behind(_: StepTrace, events: Sequence[int], last: int = numbers[-1]) -> int:
                return events.index(last) + 1

            step = meanwhile(step, [half], name, begin=behind, end=update_begins)
    return step


@dataclass(frozen=True)
class Spread:
    """How FSDP spreads a network.

    Attributes:
        ways: Processes that share one copy.
        gathered: Bytes of whole weights there are at once, at most.
        gradients: Bytes of whole gradients there are at once, at most.
        shares: What the fullest process has of a parameter, in bytes, by the bytes of all of it: only rows are shared
            out.
    """

    ways: int
    gathered: int
    gradients: int
    shares: Mapping[int, int] = field(default_factory=dict)

    def share(self, size: int) -> int:
        """A process's share of so many bytes."""
        return self.shares.get(size, -(-size // self.ways))


def spread_of(network: nn.Module, parallel: Parallel, processes: int) -> Spread:
    """What a recipe asks for, with so many processes.

    While a part computes, those that it lies in are whole too, and the next one is on its way, as it comes and as it is
    used. In the backward pass its gradients are whole, and those of the part before still being sent.

    Raises:
        ModelError: If it names modules that the network does not have.
    """
    ways = processes if parallel.shard_size == "all" else min(parallel.shard_size, processes)
    taken: set[int] = set()
    own: dict[str, list[nn.Parameter]] = {}  # those of each module that none before it has
    for name, module in {**modules_to_shard(network, parallel), "": network}.items():
        own[name] = [each for each in module.parameters() if id(each) not in taken]
        taken.update(map(id, own[name]))
    bytes_each = 2 if parallel.gather_dtype == "bf16" else 4
    weights = {name: bytes_each * sum(each.numel() for each in part) for name, part in own.items()}
    trained = {name: 4 * sum(each.numel() for each in part if each.requires_grad) for name, part in own.items()}
    gathered = _nested(weights)
    if not parallel.reshard_after_forward:
        gathered = max(gathered, sum(weights.values()))
    shares: dict[int, int] = {}
    for each in network.parameters():
        rows = max(each.shape[0] if each.ndim else 1, 1)
        share = each.nbytes // rows * -(-rows // ways)
        shares[each.nbytes] = max(share, shares.get(each.nbytes, 0))
    return Spread(
        ways=ways,
        gathered=gathered + 2 * max(weights.values()),
        gradients=_nested(trained) + max(trained.values()),
        shares=shares,
    )


def _nested(sizes: Mapping[str, int]) -> int:
    """The most that a part and those that it lies in come to."""
    return max(
        sum(size for outer, size in sizes.items() if outer in ("", name) or name.startswith(f"{outer}."))
        for name in sizes
    )


def fully_sharded(step: StepTrace, spread: Spread) -> StepTrace:
    """One process's run under FSDP.

    What is gathered is taken to be there all along, and as much as there ever is: a little more than it takes.
    """
    gradients = [step.allocations[number] for number in step.gradients()]
    parts = [Allocation(spread.share(each.size), "gradients") for each in gradients]
    cut = with_gradients(step, parts)
    allocations = tuple(
        # What an update takes for a moment is of parts too.
        replace(each, size=spread.share(each.size))
        if each.cause in _SPREAD or (each.cause == "temporary" and each.phase == "update")
        else each
        for each in cut.allocations
    )
    gathered = Allocation(spread.gathered, GATHERED), Allocation(spread.gradients, GATHERED)
    return with_more(replace(cut, allocations=allocations), gathered)


_MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear")
# PyTorch's cuBLAS workspace for each thread that multiplies matrices: aten/src/ATen/cuda/CublasHandlePool.cpp.
_WORKSPACE = (2 * 4096 + 8 * 16) * 1024
_LARGER_WORKSPACES = {**dict.fromkeys(("H100", "H200", "B200", "GH200", "GB200"), 32 * MIB), "MI300": 128 * MIB}
# What a process takes before its first tensor: the driver's context and the kernels that it loads. An allowance; it
# has not been measured here.
CONTEXT = 600 * MIB
# NCCL's buffers and its own context, for more than one process. An allowance too.
COMMUNICATION = 600 * MIB
_BYTES_PER_NUMBER = 4
# A process with torch loaded and nothing trained has less than this. One with more has data of its own, which a run in
# a process of its own would not have.
_USUAL = 512 * MIB
_ASK = "import paceline.trainer.train; from paceline.telemetry.memory import private_bytes; print(private_bytes())"


def outside(device_type: str, processes: int) -> int:
    """Bytes of a device's memory that are not tensors'.

    On a CPU what a process takes with torch loaded and nothing trained; elsewhere an allowance.
    """
    if device_type == "cpu":
        taken = private_bytes()
        return taken if taken <= _USUAL else min(taken, _of_a_new_process())
    return CONTEXT + (COMMUNICATION if processes > 1 else 0)


@cache
def _of_a_new_process() -> int:
    asked = subprocess.run([sys.executable, "-P", "-c", _ASK], capture_output=True, text=True, check=False)
    return int(asked.stdout) if asked.returncode == 0 else _USUAL


def with_libraries(step: StepTrace, machine: MachineFacts) -> StepTrace:
    """A step with the workspace of cuBLAS: one for the thread of the forward pass, one for the backward pass's."""
    if machine.device != "cuda":
        return step
    used = {each.phase for each in step.allocations if each.operation.split(".")[0] in _MATRIX_PRODUCTS}
    larger = (size for name, size in _LARGER_WORKSPACES.items() if name in machine.device_name)
    each = Allocation(next(larger, _WORKSPACE), "workspace", operation="cublas")
    return with_more(step, [each] * len(used & {"forward", "backward"}))


def with_input(step: StepTrace, plan: Plan, mix: Mix) -> StepTrace:
    """A run beside whose steps the next batch is copied to the device, normalised and mixed (``data/pipeline.py``)."""
    if plan.device not in ("cuda", "xpu"):
        return step
    batch = [each for each in step.allocations if each.cause == "batch" and not each.phase]
    scored = [each for each in step.allocations if each.cause == "batch" and each.phase == EVALUATION]
    # Both of training's stay while there is an evaluation.
    step = with_more(step, batch)
    if batch:
        step = meanwhile(step, _passing(batch, mix), REHEARSAL, FIRST, STEP, begin=front, end=front)
    if scored:
        step = meanwhile(step, _passing(scored, Mix()), EVALUATION, begin=front, end=front)
        step = meanwhile(step, scored, EVALUATION, begin=front, end=back)
    return step


def _passing(batch: list[Allocation], mix: Mix) -> list[Allocation]:
    """What there is for a moment while a batch is made: the one before the last, bytes of images, and mixing's copies.

    Mixup takes a copy of all images and CutMix two; targets are integers of 8 bytes before they are numbers.
    """
    images, targets = batch[0], batch[1:]
    passing = [*batch, replace(images, size=images.size // _BYTES_PER_NUMBER)]
    if mix.mixup > 0 or mix.cutmix > 0:
        passing += [images] * (2 if mix.cutmix > 0 else 1)
        passing += [each for one in targets for each in (replace(one, size=2 * one.size), one)]
    return passing


def with_data_set(step: StepTrace, plan: Plan, share: float) -> StepTrace:
    """A step on a device that holds the images, where they are small and few enough.

    Args:
        step: The step.
        plan: Its run's.
        share: Of a device's memory, what one split's images may take there.
    """
    if plan.device != "cuda" or plan.data.get("backend") != "memory" or plan.device_memory_bytes is None:
        return step
    each = int(plan.data["channels"]) * int(plan.data["image_size"]) ** 2
    sizes = [count * each for count in (plan.train_samples, plan.evaluation_samples) if count]
    held = [size for size in sizes if size <= share * plan.device_memory_bytes]
    return with_more(step, [Allocation(size, "data set") for size in held])
