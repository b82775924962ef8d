"""Which is the largest micro-batch that this machine trains? Tried, in processes of their own.

A trial is a real run of two steps with the recipe's task, network, optimizer, average, processes and an evaluation. One
that is refused memory, or killed for it, does not fit; nothing is left of it, and the next trial starts anew.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.distributed.device import choose_device, describe_machine
from paceline.errors import ModelError, TrainingError
from paceline.machine import memory_limit
from paceline.recipe.batching import micro_batch_size
from paceline.recipe.load import LoadedRecipe
from paceline.recipe.schema import Recipe
from paceline.trainer.fake_batch import with_stand_in_data
from paceline.trainer.fake_step import fake_step
from paceline.world import World
from paceline_advisor.launches import check_alone
from paceline_advisor.memory.job import Job
from paceline_advisor.memory.settings import allocator_settings
from paceline_advisor.memory.trace import trace_steps, without_collection
from paceline_advisor.memory.trials import Trial, TrialGround

# A trial costs seconds: sizes between two that differ by less than this are not tried.
_ROUGHLY = 16


@dataclass(frozen=True, kw_only=True)
class FoundBatch:
    """What was found.

    Attributes:
        recipe: The recipe with the micro-batch that is proposed.
        processes: Of the run.
        device: What it runs on.
        trials: In the order made.
        largest: Most samples that fit.
        refused: Fewest samples that were tried and do not; None if all that are of use fit.
        micro_size: The largest size that fits and divides a process's share.
        accumulation_steps: Micro-batches of it in a step, on each process.
        memory: Bytes that each process had; None for a whole GPU.
        estimated: What was estimated for the largest, in bytes, of what was measured; None if it could not be.
        why_not: Why there is no estimate.
    """

    recipe: Recipe
    processes: int
    device: str
    trials: tuple[Trial, ...]
    largest: int
    refused: int | None
    micro_size: int
    accumulation_steps: int
    memory: int | None
    estimated: int | None
    why_not: str

    @property
    def measured(self) -> int | None:
        """Peak of the largest that fits, in bytes."""
        return next((each.peak for each in self.trials if each.micro_batch == self.largest and each.fits), None)

    @property
    def error(self) -> float | None:
        """The estimate's error as a share of what was measured."""
        if self.estimated is None or not self.measured:
            return None
        return self.estimated / self.measured - 1

    def to_json(self) -> dict[str, Any]:
        """As one JSON object."""
        return {
            "processes": self.processes,
            "device": self.device,
            "memory_bytes": self.memory,
            "largest_micro_batch": self.largest,
            "refused_micro_batch": self.refused,
            "micro_size": self.micro_size,
            "accumulation_steps": self.accumulation_steps,
            "global_size": self.recipe.batch.global_size,
            "learning_rate": self.recipe.optimizer.lr,
            "measured_peak_bytes": self.measured,
            "estimated_peak_bytes": self.estimated,
            "estimate_error": self.error,
            "why_no_estimate": self.why_not,
            "trials": [vars(each) for each in self.trials],
        }


def find_batch(loaded: LoadedRecipe, *, processes: int, memory: int | None, say: Callable[[str], None]) -> FoundBatch:
    """Find the largest micro-batch by doubling and bisecting.

    Args:
        loaded: The recipe.
        processes: Of the run.
        memory: Bytes that each process may take; None for what there is.
        say: Told of each trial.

    Raises:
        TrainingError: If not even one sample fits, or a trial fails for another reason.
        PacelineError: For the mistakes that training would find before it begins.
    """
    check_alone("find-batch")
    recipe, assumed = with_stand_in_data(loaded.recipe)
    if assumed:
        say(assumed)
    if recipe.model.compile:
        say("model.compile=true: tried uncompiled, as every size would be compiled anew")
    device = choose_device(recipe.parallel.device, World(world_size=processes, local_world_size=processes))
    if device.type == "cpu" and memory is None:
        memory = _available(processes)
    share = _share(recipe, processes)
    job, why_not = _job(recipe, device, processes)
    ground = TrialGround(
        recipe=recipe, processes=processes, share=share, memory=memory, device_type=device.type, say=say
    )
    low, high = search(ground.fits, start=_start(job, memory, share), most=share)
    if low == 0:
        raise TrainingError(
            f"not even one sample fits ({ground.trials[-1].why}); see what `paceline estimate` advises."
        )
    for divisor in (each for each in range(low + 1, high or 0) if share % each == 0):
        if not ground.fits(divisor):
            high = divisor
            break
        low = divisor
    micro = proposed(ground.fits, most=low, share=share)
    if micro == 0:
        raise TrainingError(f"no size that divides the {share} samples of a process fits, though {low} samples do.")
    batch = replace(loaded.recipe.batch, micro_size=micro)
    return FoundBatch(
        recipe=replace(loaded.recipe, batch=batch),
        processes=processes,
        device=describe_machine(device).device_name,
        trials=tuple(ground.trials),
        largest=low,
        refused=high,
        micro_size=micro,
        accumulation_steps=recipe.batch.global_size // (micro * processes),
        memory=memory,
        estimated=None if job is None else _as_measured(job, low),
        why_not=why_not,
    )


def search(fits: Callable[[int], bool], *, start: int, most: int) -> tuple[int, int | None]:
    """The largest size that fits and the smallest tried that does not, no more than a sixteenth apart.

    Doubles from ``start`` until one does not fit, or halves until one does, and bisects between the two.

    Returns:
        The first is 0 if not even 1 fits; the second None if ``most`` does.
    """
    low, high, size = 0, None, max(1, min(start, most))
    while high is None or low == 0:
        if fits(size):
            low = size
            if high is not None or size == most:
                break
            size = min(2 * size, most)
        else:
            high = size
            if low or size == 1:
                break
            size //= 2
    while low and high is not None and high - low > max(1, low // _ROUGHLY):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, high


def proposed(fits: Callable[[int], bool], *, most: int, share: int) -> int:
    """The largest size up to ``most`` that divides a process's share and fits when it is tried itself; 0 if none."""
    return next((each for each in range(most, 0, -1) if share % each == 0 and fits(each)), 0)


def _job(recipe: Recipe, device: torch.device, processes: int) -> tuple[Job | None, str]:
    """What estimates the run's memory, or why nothing does."""
    machine = describe_machine(device, processes=processes)
    allocator, _ = allocator_settings(os.environ if device.type == "cuda" else {})
    try:
        with without_collection(), fake_step(recipe, processes=processes, machine=machine, scores=True) as step:
            steps = trace_steps(step)
            job = Job(step, steps, machine, ways=processes, allocator=allocator)
    except ModelError as error:
        return None, str(error)
    return (
        (job, "") if steps.is_linear or steps.is_scaled else (None, "its steps of different sizes do different things")
    )


def _start(job: Job | None, memory: int | None, share: int) -> int:
    """Where to begin: a quarter of what is expected to fit, since a trial that does not fit costs most."""
    memory = job.plan.device_memory_bytes if job is not None and memory is None else memory
    return 1 if job is None or memory is None else max(1, min(job.largest(memory, roughly=True), share) // 4)


def _as_measured(job: Job, micro_batch: int) -> int:
    """Bytes of a trial's peak: on a CPU all that a process has, on a GPU what PyTorch allocates."""
    return job.needed(micro_batch) if job.plan.device == "cpu" else job.peak(micro_batch).allocated


def _share(recipe: Recipe, processes: int) -> int:
    """Samples of a process in every step, which micro-batches must divide."""
    whole = replace(recipe, batch=replace(recipe.batch, micro_size="auto"))
    whole = replace(whole, parallel=replace(whole.parallel, logical_ranks="auto", exact=False))
    return micro_batch_size(whole, processes, {})


def _available(processes: int) -> int | None:
    """Bytes of main memory that each of so many processes can have without taking it from others."""
    limits = [each for each in (memory_limit(), _free()) if each is not None]
    return min(limits) // processes if limits else None


def _free() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
