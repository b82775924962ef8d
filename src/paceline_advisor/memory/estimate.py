"""How much memory does a run take, by cause, on this machine or on a device that is not here?"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.devices import DEVICES, find_device
from paceline.distributed.device import choose_device, describe_machine
from paceline.recipe.load import LoadedRecipe
from paceline.recipe.plan import MachineFacts, Plan
from paceline.recipe.schema import Recipe
from paceline.trainer.fake_batch import with_stand_in_data
from paceline.trainer.fake_step import fake_step, machine_with
from paceline.world import World
from paceline_advisor.formulas.caching_allocator import Settings
from paceline_advisor.memory.cpu_kernels import unknown_kernels
from paceline_advisor.memory.job import Job
from paceline_advisor.memory.replay import Peak, peak_of
from paceline_advisor.memory.savings import Saving, savings
from paceline_advisor.memory.settings import allocator_settings
from paceline_advisor.memory.trace import EVALUATION, Steps, trace_steps, without_collection
from paceline_advisor.memory.verdict import Verdict, weigh

# Where one process is planned, what spreading would do is told for this many.
SUPPOSED = 8
_HALVINGS, _DOUBLINGS = 3, 2
# Sizes between two that differ by less than this are not done where each has to be.
_ROUGHLY = 16


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be estimated.

    Attributes:
        loaded: The recipe.
        device: A name of ``paceline.devices``, or ``cpu``; None is the device that a run here would use.
        processes: Of the run.
        expandable: With expandable segments in PyTorch's allocator, whatever ``PYTORCH_ALLOC_CONF`` says.
    """

    loaded: LoadedRecipe
    device: str | None = None
    processes: int = 1
    expandable: bool = False


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a micro-batch of another size would need.

    Attributes:
        micro_batch: Samples.
        needed: Bytes that a process takes from its device in all, if it can.
        least: Bytes that a device must have for it; a GPU gives back what it keeps in reserve before it refuses.
        fits: Whether the device has room for that.
    """

    micro_batch: int
    needed: int
    least: int
    fits: bool | None


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Which micro-batches a device has room for.

    Attributes:
        device: Its name.
        memory: Bytes that it has.
        largest: Samples that fit (some more per cent might), 0 if not even one; None if it lacks the precision.
    """

    device: str
    memory: int
    largest: int | None


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """What a run takes on each process.

    Attributes:
        plan: The run's, on the device asked for.
        asked_precision: What the recipe says; the plan has what that came to.
        device: What it is called.
        memory: Bytes that it has for a process; None if unknown.
        outside: Of these, what is not tensors': on a GPU an allowance for the driver and libraries.
        accumulates: Whether gradients of earlier micro-batches are there.
        peak: The highest point of its steps and its evaluation.
        allocator: How PyTorch's allocator is set.
        needed: Bytes that a process takes from its device in all, if it can.
        least: Bytes that a device must have: PyTorch gives back what it keeps in reserve before it is refused memory.
        fits: Whether the device has room for that; None if its memory is unknown.
        sizes: Other sizes of micro-batch.
        largest: Most samples of a micro-batch that fit the device, or the most that are looked for; None if its memory
            is unknown.
        micro_size: The largest that fits and divides the process's share of the global batch.
        verified: Tensors at the peak with the largest, of a step that was done, over those worked out from two others.
        devices: What fits on the known devices.
        savings: What could be saved.
        verdict: DDP or FSDP.
        notices: What was assumed.
        seconds: What it took to find out.
    """

    plan: Plan
    asked_precision: str
    device: str
    memory: int | None
    outside: int
    accumulates: bool
    peak: Peak
    allocator: Settings
    needed: int
    least: int
    fits: bool | None
    sizes: tuple[Size, ...]
    largest: int | None
    micro_size: int | None
    verified: float | None
    devices: tuple[Fit, ...]
    savings: tuple[Saving, ...]
    verdict: Verdict
    notices: tuple[str, ...]
    seconds: float

    @property
    def left(self) -> int | None:
        """Bytes of the device that are left, of what it must have; less than zero if it does not fit."""
        return None if self.memory is None else self.memory - self.least

    def to_json(self) -> dict[str, Any]:
        """As one JSON object."""
        plan = self.plan
        return {
            "device": self.device,
            "memory_bytes": self.memory,
            "processes": plan.world_size,
            "strategy": plan.strategy,
            "precision": plan.precision,
            "micro_batch": plan.micro_batch_size,
            "accumulation_steps": plan.accumulation_steps,
            "needed_bytes": self.needed,
            "least_bytes": self.least,
            "left_bytes": self.left,
            "fits": self.fits,
            "outside_bytes": self.outside,
            "peak": self.peak.to_json(),
            "evaluation_batch": self.plan.evaluation_batch_size if EVALUATION in self.peak.parts else None,
            "allocator": vars(self.allocator),
            "sizes": [vars(each) for each in self.sizes],
            "largest_micro_batch": self.largest,
            "micro_size": self.micro_size,
            "verified": self.verified,
            "devices": [vars(each) for each in self.devices],
            "savings": [vars(each) for each in self.savings],
            "verdict": vars(self.verdict),
            "notices": list(self.notices),
            "seconds": self.seconds,
        }


def estimate(asked: Asked) -> MemoryEstimate:
    """Estimate the memory of a run's steps and of its evaluation; nothing is trained or allocated.

    Raises:
        PacelineError: If the recipe cannot be planned, or its network needs the numbers.
    """
    with without_collection():
        return _estimated(asked)


def _estimated(asked: Asked) -> MemoryEstimate:
    begun = time.perf_counter()
    recipe, assumed = with_stand_in_data(asked.loaded.recipe)
    machine = _machine(asked, recipe)
    ways = asked.processes if asked.processes > 1 else SUPPOSED
    memory = machine.memory_bytes
    allocator, unheeded = allocator_settings(
        os.environ if machine.device == "cuda" else {}, expandable=asked.expandable
    )
    with fake_step(recipe, processes=asked.processes, machine=machine, scores=True) as step:
        steps = trace_steps(step)
        job = Job(step, steps, machine, ways=ways, allocator=allocator)
        largest, verified = (None, None) if memory is None else _largest(job, steps, memory)
        # Inside: a network whose steps do not grow in proportion is run at each of these sizes.
        now = job.plan.micro_batch_size
        kernels = unknown_kernels(step.network) if machine.device == "cpu" else ""
        found = MemoryEstimate(
            plan=job.plan,
            asked_precision=recipe.train.precision,
            device=machine.device_name,
            memory=memory,
            outside=job.outside,
            accumulates=job.accumulates(now),
            peak=job.peak(now),
            allocator=allocator,
            needed=job.needed(now),
            least=job.least(now, memory),
            fits=None if memory is None else job.fits(now, memory),
            sizes=tuple(_size(job, each, memory) for each in _sizes(now) if each <= max(now, job.most)),
            largest=largest,
            micro_size=_divisor(job.share, largest) if largest else None,
            verified=verified,
            devices=tuple(_fits(job, machine, largest)) if machine.device == "cuda" else (),
            # Where samples are gone through one by one, spread weights would be gathered for each.
            savings=() if job.plan.strategy == "fsdp" or steps.is_scaled else (_spread(job, ways, memory),),
            verdict=weigh(job, memory, ways),
            notices=tuple(each for each in (assumed, *unheeded, kernels, *_notices(job, steps)) if each),
            seconds=0.0,
        )
        least = job.least(now, memory)
    others = savings(recipe, machine, asked.processes, job, least)
    return replace(found, savings=(*found.savings, *others), seconds=time.perf_counter() - begun)


def _machine(asked: Asked, recipe: Recipe) -> MachineFacts:
    world = World(world_size=asked.processes, local_world_size=asked.processes)
    if asked.device is None:
        return describe_machine(choose_device(recipe.parallel.device, world), processes=asked.processes)
    if asked.device.lower() == "cpu":
        return describe_machine(torch.device("cpu"), processes=asked.processes)
    return machine_with(find_device(asked.device), processes=asked.processes)


def _largest(job: Job, steps: Steps, memory: int) -> tuple[int, float | None]:
    """The largest micro-batch whose steps fit when they are done, and not only worked out from two others.

    Returns:
        The second: how the tensors of the first one tried compare with what was worked out; None if none is.
    """
    tried = job.largest(memory)
    if not tried:
        return 0, None
    worked_out = peak_of(steps(tried), caching=False).allocated
    is_as_expected = steps.confirm(tried)
    verified = peak_of(steps(tried), caching=False).allocated / worked_out
    if is_as_expected:
        return tried, verified
    # It does not grow in proportion: what fits is found by doing it.
    low, high = 0, tried + 1
    while high - low > max(1, low // _ROUGHLY):
        job.forget()
        low, high = (tried, high) if job.fits(tried, memory) else (low, tried)
        tried = (low + high) // 2
        steps.confirm(tried)
    steps.confirm(max(low, 1))
    job.forget()
    return low, verified


def _sizes(now: int) -> tuple[int, ...]:
    """Sizes around the one asked for, each twice the one before."""
    return tuple(sorted({max(1, now * 2**power // 2**_HALVINGS) for power in range(_HALVINGS + _DOUBLINGS + 1)}))


def _size(job: Job, micro_batch: int, memory: int | None) -> Size:
    fits = None if memory is None else job.fits(micro_batch, memory)
    return Size(
        micro_batch=micro_batch, needed=job.needed(micro_batch), least=job.least(micro_batch, memory), fits=fits
    )


def _divisor(share: int, most: int) -> int:
    return next(each for each in range(min(most, share), 0, -1) if share % each == 0)


def _fits(job: Job, machine: MachineFacts, largest: int | None) -> Iterator[Fit]:
    """What fits on each known device; on the one that was asked for, what was found for it to the sample."""
    for device in DEVICES.values():
        if job.plan.precision != "fp32" and device.peak(job.plan.precision) is None:
            most = None
        elif (device.title, device.memory_bytes) == (machine.device_name, machine.memory_bytes):
            most = largest
        else:
            most = job.largest(device.memory_bytes, roughly=True)
        yield Fit(device=device.name, memory=device.memory_bytes, largest=most)


def _spread(job: Job, ways: int, memory: int | None) -> Saving:
    now = job.plan.micro_batch_size
    total = job.least(now, memory, "fsdp")
    change = f"parallel.strategy=fsdp over {ways} processes"
    return Saving(change=change, needed=total, saved=job.least(now, memory) - total)


def _notices(job: Job, steps: Steps) -> Iterator[str]:
    plan = job.plan
    if steps.is_scaled:
        yield (
            "what a detector finds is assumed: as many proposals and objects as its settings let it keep, and of these "
            "as many to learn from"
        )
    elif steps.goes_one_by_one:
        yield (
            f"the network goes through its samples one by one, so that each size was done by itself: no more than "
            f"{job.most}, a process's share of a step, were looked for"
        )
    if why := steps(max(2, plan.micro_batch_size)).why_unscored:
        yield f"evaluation is not in the estimate: {why}"
    if plan.compile != "off":
        yield (
            f"model.compile=true ({plan.compile}): estimated as uncompiled; a compiled network keeps less, and what "
            "CUDA graphs or tuning hold is not in the estimate"
        )
    if "tables" in plan.data:
        yield f"{plan.data['tables']}; their gradient is taken as dense"
    if plan.precision == "fp8":
        yield "train.precision=fp8: estimated as bf16, which keeps as much or more"
    if plan.data.get("backend") == "dali":
        yield "data.backend=dali: what it holds on a GPU for decoding is not in the estimate"
    if plan.unfreeze_steps:
        yield "model.unfreeze: estimated with everything trained that ever is"
    if plan.freeze_after_steps:
        yield "model.freeze_after: estimated with everything trained, as it is at first"
