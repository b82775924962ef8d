"""Each device's share of a step: whether it fits into memory, and a lower bound of its time.

Memory is estimated as in ``paceline estimate``: from one fake step, its storages at any batch size, and what several
processes add.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.devices import Device
from paceline.distributed.device import describe_machine
from paceline.errors import RecipeError
from paceline.models.ceilings import ceilings_of
from paceline.plan.batching import micro_batch_size
from paceline.plan.compute import WITH_GRAPHS
from paceline.plan.strategy import check_sharding
from paceline.recipe.schema import Recipe
from paceline.recipe.training import Batch
from paceline.trainer.fake_batch import with_placeholder_data
from paceline.trainer.fake_step import fake_step, machine_with
from paceline.units import format_bytes
from paceline_advisor.apply import with_values
from paceline_advisor.clusters import Cluster
from paceline_advisor.formulas.parallel_step import OneDevice
from paceline_advisor.memory.job import Job, predicted
from paceline_advisor.roofline.study import count_step


@dataclass(frozen=True)
class Share:
    """One device's part of a step.

    Attributes:
        devices: Number of devices that share the step.
        micro_batch: Samples of one pass.
        passes: Passes in a step.
    """

    devices: int
    micro_batch: int
    passes: int

    @property
    def own(self) -> int:
        """Samples of the step on one device."""
        return self.micro_batch * self.passes


def shares_of(recipe: Recipe, sizes: tuple[int, ...], batch_per_device: int | None) -> dict[int, Share]:
    """Return a device's share for each number of devices: of the recipe's global batch, or a fixed batch per device.

    Args:
        recipe: The recipe, which gives the samples per step and pass.
        sizes: Numbers of devices.
        batch_per_device: Samples per device and step; None keeps the recipe's global batch.

    Raises:
        RecipeError: If the global batch cannot be shared evenly, or grows during training.
    """
    if batch_per_device is not None:
        return {size: Share(size, batch_per_device, 1) for size in sizes}
    if recipe.batch.growth:
        raise RecipeError("batch.growth changes the step during training; leave it out, or use --batch-per-gpu.")
    found = {}
    for size in sizes:
        micro = micro_batch_size(recipe, size)
        found[size] = Share(size, micro, recipe.batch.global_size // (micro * size))
    return found


def in_passes(share: Share, largest: int) -> Share:
    """Return the same share in passes of at most this many samples."""
    if share.micro_batch <= largest:
        return share
    passes = next(each for each in range(-(-share.own // largest), share.own + 1) if share.own % each == 0)
    return Share(share.devices, share.own // passes, passes)


@dataclass(frozen=True, kw_only=True)
class Room:
    """What fits on a device that is one of several.

    Attributes:
        share: Its part of the step, in passes that fit; the requested part if nothing fits.
        strategy: ``single``, ``ddp`` or ``fsdp``.
        fits: Whether that fits.
        needed: Bytes that the device must have for this share.
        memory: Bytes that the device has.
        why: The reason, in words.
    """

    share: Share
    strategy: str
    fits: bool
    needed: int
    memory: int
    why: str


def rooms(
    recipe: Recipe,
    shares: Mapping[int, Share],
    cluster: Cluster,
    device: Device | None,
    choose: Callable[[int, int], str],
) -> dict[int, Room]:
    """Return what fits for each number of devices, if the devices' memory is known.

    Args:
        recipe: The recipe to train; its data may be elsewhere.
        shares: The part of each number of devices.
        cluster: The cluster.
        device: Its accelerator, if it is a known one.
        choose: Returns the strategy of that many devices with that many bytes each, considering only memory.

    Raises:
        PacelineError: If the network needs real values, or the recipe cannot be planned there.
    """
    if device is None and not cluster.shares_cores:
        return {}
    cpu = torch.device("cpu")
    machine = machine_with(device) if device is not None else describe_machine(cpu)
    found = {}
    with predicted(of_one_process(recipe, shares[min(shares)]), machine) as one:
        can_shard = recipe.parallel.strategy == "auto" and not one.step.task.why_not_sharded
        for size, share in shares.items():
            memory = device.memory_bytes if device is not None else describe_machine(cpu, processes=size).memory_bytes
            if memory is None:
                continue
            job, strategy = one.sharded_over(max(size, 2)), choose(size, memory)
            room = found[size] = _room(recipe, job, share, memory, strategy)
            if not room.fits and strategy == "ddp" and can_shard:
                spread = _room(recipe, job, share, memory, "fsdp")
                if spread.fits:
                    found[size] = replace(spread, why=f"not even one sample fits with a replica; {spread.why}")
    return found


def _room(recipe: Recipe, job: Job, share: Share, memory: int, strategy: str) -> Room:
    """Return what fits on a device with a strategy."""
    sharding_strategy = None if strategy == "single" else strategy
    has, mode = format_bytes(memory), recipe.model.compile_mode

    def room(share: Share, why: str, *, fits: bool) -> Room:
        needed = job.least(share.micro_batch, memory, sharding_strategy)
        return Room(share=share, strategy=strategy, fits=fits, needed=needed, memory=memory, why=why)

    if strategy == "fsdp":
        try:
            check_sharding(recipe, share.devices)
        except RecipeError as error:
            return room(share, str(error), fits=False)
    if job.fits(share.micro_batch, memory, sharding_strategy):
        needed = format_bytes(job.least(share.micro_batch, memory, sharding_strategy))
        return room(share, f"passes of {share.micro_batch} samples take {needed} of {has}", fits=True)
    largest = job.largest(memory, sharding_strategy)
    if largest == 0:
        return room(share, f"not even one sample fits into {has} with {strategy}", fits=False)
    if recipe.model.compile and mode in WITH_GRAPHS:
        why = f"only {largest} of {share.micro_batch} samples fit into {has}, and model.compile_mode={mode} takes them"
        return room(share, f"{why} in one pass", fits=False)
    cut = in_passes(share, largest)
    needed = format_bytes(job.least(cut.micro_batch, memory, sharding_strategy))
    why = f"{share.micro_batch} samples do not fit into {has}; {cut.passes} passes of {cut.micro_batch} take {needed}"
    return room(cut, f"{why} and make the same step", fits=job.fits(cut.micro_batch, memory, sharding_strategy))


ALONE = {"parallel.strategy": "auto", "parallel.logical_ranks": "auto", "parallel.gradient_compression": "none"}
"""Values with which one process can train alone."""


def of_one_process(recipe: Recipe, share: Share) -> Recipe:
    """Return the recipe for one process's part of the step; missing data are replaced by stand-ins."""
    path = recipe.data.path
    if path is not None and not Path(path).exists():
        recipe = with_values(recipe, {"data.path": None})
    values = {
        "batch": Batch(global_size=share.own, micro_size=share.micro_batch),
        "model.compile": False,  # estimated without compilation: a compiled network saves fewer activations
        **ALONE,
    }
    return with_values(with_placeholder_data(recipe)[0], values)


def least_steps(recipe: Recipe, shares: Mapping[int, Share], device: Device) -> dict[int, OneDevice]:
    """Return a lower bound of the time of a pass for each part: every operator is limited by compute or by memory.

    If the recipe compiles, only operators with FLOPs count: fusion may save the memory traffic of the others.

    Args:
        recipe: The recipe to train; its data may be elsewhere.
        shares: The part of each number of devices.
        device: The device.

    Raises:
        PacelineError: If the network needs real values, or the recipe cannot be planned there.
    """
    largest = max(shares.values(), key=lambda each: each.micro_batch)
    with fake_step(of_one_process(recipe, replace(largest, passes=1)), machine=machine_with(device)) as step:
        found = count_step(step)
        ceilings = ceilings_of(step.plan, device, found)
    works = [each for each in found.works if each.product or each.flops or not recipe.model.compile]
    update = sum(ceilings.seconds(each) for each in works if each.phase == "optimizer")
    passing = sum(map(ceilings.seconds, works)) - update
    return {
        size: OneDevice(
            # FSDP shards the update, and a step with several passes has only one update.
            seconds=passing * share.micro_batch / largest.micro_batch + update / (share.passes * size),
            samples=share.micro_batch,
            is_bound=True,
        )
        for size, share in shares.items()
    }
