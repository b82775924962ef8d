"""Add the storages of accumulation, several processes and libraries to a step."""

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
from paceline.telemetry.clock import private_bytes
from paceline_advisor.formulas.parallel_step import Gradient
from paceline_advisor.formulas.parallel_step import buckets as filled_buckets
from paceline_advisor.memory.allocations import COPIES, Allocation
from paceline_advisor.memory.allocator import MIB
from paceline_advisor.memory.trace import EVALUATION, FIRST, REHEARSAL, START, STEP, StepTrace

GATHERED = "gathered weights"
"""Purpose of FSDP's temporary memory: weights gathered from other processes, and gradients not yet sent to them."""

Place = Callable[[StepTrace, Sequence[int]], int]
"""Returns a position in the events of a part of a run."""

_SPREAD = ("weights", "average", "optimizer")
_PASSES = ("forward", "backward")


def with_permanent(step: StepTrace, more: Iterable[Allocation]) -> StepTrace:
    """Return a run with additional storages in memory from start to end."""
    step, numbers = _added(step, more)
    return replace(step, parts={**step.parts, START: (*numbers, *step.parts.get(START, ()))})


def with_temporary(step: StepTrace, more: Iterable[Allocation], *names: str, begin: Place, end: Place) -> StepTrace:
    """Return a run with additional temporary storages in some of its parts.

    Args:
        step: The run.
        more: The storages.
        names: The parts.
        begin: Where in a part's events they are allocated.
        end: Where they are freed.
    """
    step, numbers = _added(step, more)

    def change(events: tuple[int, ...]) -> tuple[int, ...]:
        first, last = begin(step, events), end(step, events)
        freed = (~number for number in numbers)
        return (*events[:first], *numbers, *events[first:last], *freed, *events[last:])

    return step.with_parts(change, *names)


def front(_: StepTrace, __: Sequence[int]) -> int:
    """Return the position before all events of a part."""
    return 0


def back(_: StepTrace, events: Sequence[int]) -> int:
    """Return the position after all events of a part."""
    return len(events)


def update_start(step: StepTrace, events: Sequence[int]) -> int:
    """Return where in a step's events its update begins: its first allocation, or after the last gradient."""
    allocations = [position for position, event in enumerate(events) if event >= 0]
    of_update = (position for position in allocations if step.allocations[events[position]].phase == "update")
    return next(of_update, allocations[-1] + 1 if allocations else 0)


def with_warm_up(step: StepTrace) -> StepTrace:
    """Return a run with a forward and backward pass before the first step, during which buffers are saved."""
    buffers = Allocation(step_total(step, "buffers"), "temporary", "forward", operation="clone")
    step, numbers = _added(step, [buffers])
    passes = [event for event in step.parts[FIRST] if step.allocations[max(event, ~event)].phase in _PASSES]
    return replace(step, parts={**step.parts, REHEARSAL: (*numbers, *passes, *(~each for each in numbers))})


def step_total(step: StepTrace, cause: str) -> int:
    """Return the bytes of storages present from the start, by cause."""
    return sum(each.size for each in step.allocations if each.cause == cause and not each.phase)


def with_gradients(step: StepTrace, permanent: Iterable[Allocation]) -> StepTrace:
    """Return a run whose gradients are temporary and are added to permanent ones, such as DDP's buckets.

    Args:
        step: A run that allocates its gradients.
        permanent: The permanent storages.
    """
    numbers = set(step.gradients(FIRST)) | set(step.gradients())
    step = _called(step, numbers, "temporary")
    return with_permanent(step.with_parts(lambda events: _let_go_at_once(events, numbers), FIRST, STEP), permanent)


def accumulated(step: StepTrace) -> StepTrace:
    """Return a run with two micro-batches per step: the second's gradients are added to those of the first.

    Both passes run twice, first with gradients that stay, and then with gradients that are freed immediately.
    """
    for name in (each for each in (FIRST, STEP) if each in step.parts):
        events, numbers = step.parts[name], step.gradients(name)
        step, added = _added(step, (step.allocations[number] for number in numbers))
        permanent = dict(zip(numbers, added, strict=True))
        first_pass = [
            permanent.get(event, event)
            for event in events
            if step.allocations[max(event, ~event)].phase in _PASSES and ~event not in permanent
        ]
        step = _called(step, set(permanent), "temporary")
        # Leftovers of the first pass, except its gradients, are freed before the second.
        second_pass = _let_go_at_once(events, set(permanent))
        events_of_step = (*first_pass, *second_pass, *(~number for number in added))
        step = replace(step, parts={**step.parts, name: events_of_step})
    return step


def _called(step: StepTrace, numbers: set[int], cause: str) -> StepTrace:
    allocations = tuple(
        replace(each, cause=cause) if number in numbers else each for number, each in enumerate(step.allocations)
    )
    return replace(step, allocations=allocations)


def _added(step: StepTrace, more: Iterable[Allocation]) -> tuple[StepTrace, tuple[int, ...]]:
    """Return a run with additional storages, whose parts do not use them yet, and their numbers."""
    added = tuple(more)
    count = len(step.allocations)
    return replace(step, allocations=(*step.allocations, *added)), tuple(range(count, count + len(added)))


def _let_go_at_once(events: Sequence[int], numbers: set[int]) -> tuple[int, ...]:
    """Return the events with some storages freed before the next allocation instead of later."""
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
    """Return DDP's buckets for a step's gradients, with their numbers, in order.

    ``.grad`` is a view of them.

    Args:
        step: A run that allocates its gradients.
        cap_mb: ``parallel.bucket_cap_mb``, in MiB.
        part: The part of the run with the gradients.
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
    """Return a run whose DDP buckets are sent as 16-bit copies; call this before :func:`with_gradients`.

    A copy is allocated when its bucket's last gradient is ready, and all copies live until the update.
    """
    for name in (FIRST, STEP):
        for bucket, numbers in buckets(step, cap_mb, name):
            half = Allocation(bucket.size // 2, "temporary", "backward", operation="compressed")

            def behind(_: StepTrace, events: Sequence[int], last: int = numbers[-1]) -> int:
                return events.index(last) + 1

            step = with_temporary(step, [half], name, begin=behind, end=update_start)
    return step


@dataclass(frozen=True)
class Sharding:
    """How FSDP shards a network.

    Attributes:
        shards: Processes that share one copy.
        gathered: Peak bytes of gathered weights.
        gradients: Peak bytes of unsharded gradients.
        shares: Bytes of a parameter's largest shard by the parameter's bytes. They exceed an equal share if the rows do
            not divide evenly.
        is_cast: Whether weights are gathered in 16 bits, and so need no 16-bit copies.
    """

    shards: int
    gathered: int
    gradients: int
    shares: Mapping[int, int] = field(default_factory=dict)
    is_cast: bool = False

    def share(self, size: int) -> int:
        """Return the bytes of a process's shard of a parameter with this many bytes."""
        return self.shares.get(size, -(-size // self.shards))


def sharding_of(network: nn.Module, parallel: Parallel, processes: int) -> Sharding:
    """Return the sharding of a recipe with this many processes.

    While a unit computes, the units that contain it are gathered too, and the next one is being received, both as sent
    and as used. In the backward pass its gradients are unsharded, while those of the previous unit are still being
    sent.

    Raises:
        ModelError: If it names modules that the network does not have.
    """
    shards = processes if parallel.shard_size == "all" else min(parallel.shard_size, processes)
    seen: set[int] = set()
    own_parameters: dict[str, list[nn.Parameter]] = {}  # the parameters of each module that no earlier one has
    for name, module in {**modules_to_shard(network, parallel), "": network}.items():
        own_parameters[name] = [each for each in module.parameters() if id(each) not in seen]
        seen.update(map(id, own_parameters[name]))
    bytes_each = 2 if parallel.gather_dtype == "bf16" else 4
    weights = {name: bytes_each * sum(each.numel() for each in part) for name, part in own_parameters.items()}
    trained = {
        name: 4 * sum(each.numel() for each in part if each.requires_grad) for name, part in own_parameters.items()
    }
    gathered = _nested(weights)
    if not parallel.reshard_after_forward:
        gathered = max(gathered, sum(weights.values()))
    shares: dict[int, int] = {}
    for each in network.parameters():
        rows = max(each.shape[0] if each.ndim else 1, 1)
        share = each.nbytes // rows * -(-rows // shards)
        shares[each.nbytes] = max(share, shares.get(each.nbytes, 0))
    return Sharding(
        shards=shards,
        gathered=gathered + 2 * max(weights.values()),
        gradients=_nested(trained) + max(trained.values()),
        shares=shares,
        is_cast=bytes_each == 2,
    )


def _nested(sizes: Mapping[str, int]) -> int:
    """Return the largest sum of a unit's size and the sizes of the units that contain it."""
    return max(
        sum(size for outer, size in sizes.items() if outer in ("", name) or name.startswith(f"{outer}."))
        for name in sizes
    )


def under_fsdp(step: StepTrace, sharding: Sharding) -> StepTrace:
    """Return one process's run under FSDP.

    The peak of gathered weights is assumed to be present all the time, which slightly overestimates memory. A 16-bit
    copy of a weight is freed after its use.
    """
    copies = {number for number, each in enumerate(step.allocations) if each.cause == COPIES}
    step = step.with_parts(lambda events: _let_go_at_once(events, copies), *step.parts.keys() - {START})
    gradients = [step.allocations[number] for number in step.gradients()]
    gradient_shards = [Allocation(sharding.share(each.size), "gradients") for each in gradients]
    sharded = with_gradients(step, gradient_shards)
    allocations = tuple(
        # The temporary memory of an update is sharded too.
        replace(each, size=sharding.share(each.size))
        if each.cause in _SPREAD or (each.cause == "temporary" and each.phase == "update")
        else replace(each, size=0)
        if sharding.is_cast and each.cause == COPIES
        else each
        for each in sharded.allocations
    )
    gathered = Allocation(sharding.gathered, GATHERED), Allocation(sharding.gradients, GATHERED)
    return with_permanent(replace(sharded, allocations=allocations), gathered)


_MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear")
# PyTorch's cuBLAS workspace for each thread that multiplies matrices: aten/src/ATen/cuda/CublasHandlePool.cpp.
_WORKSPACE = (2 * 4096 + 8 * 16) * 1024
_LARGER_WORKSPACES = {**dict.fromkeys(("H100", "H200", "B200", "GH200", "GB200"), 32 * MIB), "MI300": 128 * MIB}
# Memory of a process before its first tensor: the driver's context and the loaded kernels. This is an allowance, which
# was not measured here.
CONTEXT = 600 * MIB
# NCCL's buffers and its own context, with more than one process. Also an allowance.
COMMUNICATION = 600 * MIB
_BYTES_PER_NUMBER = 4
# A process that has loaded torch but has not trained uses less than this. One that uses more has data of its own, which
# a run in a separate process would not have.
_USUAL = 512 * MIB
_ASK = "import paceline.trainer.train; from paceline.telemetry.clock import private_bytes; print(private_bytes())"


def outside(device_type: str, processes: int) -> int:
    """Return the bytes of a device's memory that are not used by tensors.

    On a CPU this is the memory of a process with torch loaded before training; elsewhere an allowance.
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
    """Return a step with cuBLAS workspaces: one for the forward thread, one for the backward thread."""
    if machine.device != "cuda":
        return step
    used = {each.phase for each in step.allocations if each.operation.split(".")[0] in _MATRIX_PRODUCTS}
    larger = (size for name, size in _LARGER_WORKSPACES.items() if name in machine.device_name)
    each = Allocation(next(larger, _WORKSPACE), "workspace", operation="cublas")
    return with_permanent(step, [each] * len(used & {"forward", "backward"}))


def with_input(step: StepTrace, plan: Plan, mix: Mix) -> StepTrace:
    """Return a run that prepares the next batch on the device during its steps: copies, normalises and mixes it."""
    if plan.device not in ("cuda", "xpu"):
        return step
    batch = [each for each in step.allocations if each.cause == "batch" and not each.phase]
    scored = [each for each in step.allocations if each.cause == "batch" and each.phase == EVALUATION]
    # Both training batches stay allocated during an evaluation.
    step = with_permanent(step, batch)
    if batch:
        step = with_temporary(step, _passing(batch, mix), REHEARSAL, FIRST, STEP, begin=front, end=front)
    if scored:
        step = with_temporary(step, _passing(scored, Mix()), EVALUATION, begin=front, end=front)
        step = with_temporary(step, scored, EVALUATION, begin=front, end=back)
    return step


def _passing(batch: list[Allocation], mix: Mix) -> list[Allocation]:
    """Return temporary storages of batch preparation: an earlier batch, images as bytes, and copies for mixing.

    Mixup needs one copy of all images and CutMix two; targets are 8-byte integers before they become floats.
    """
    images, targets = batch[0], batch[1:]
    passing = [*batch, replace(images, size=images.size // _BYTES_PER_NUMBER)]
    if mix.mixup > 0 or mix.cutmix > 0:
        passing += [images] * (2 if mix.cutmix > 0 else 1)
        passing += [each for one in targets for each in (replace(one, size=2 * one.size), one)]
    return passing


def with_data_set(step: StepTrace, plan: Plan, share: float) -> StepTrace:
    """Return a step on a device that stores the images of each split, if they take a small enough share of it.

    Args:
        step: The step.
        plan: The run's plan.
        share: Fraction of a device's memory that one split's images may use.
    """
    if plan.device != "cuda" or plan.data.get("backend") != "memory" or plan.device_memory_bytes is None:
        return step
    each = int(plan.data["channels"]) * int(plan.data["image_size"]) ** 2
    sizes = [count * each for count in (plan.train_samples, plan.evaluation_samples) if count]
    sizes_on_device = [size for size in sizes if size <= share * plan.device_memory_bytes]
    return with_permanent(step, [Allocation(size, "data set") for size in sizes_on_device])
