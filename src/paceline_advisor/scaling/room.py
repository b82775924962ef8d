"""Each device's share of a step: whether it fits into memory, a lower bound of its time, and its time measured here.

Memory is estimated as in ``paceline estimate``: from one fake step, its storages at any batch size, and what several
processes add. This machine is a cluster of one node.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.command import Log
from paceline.distributed.device import describe_machine
from paceline.errors import LaunchError, RecipeError, TrainingError
from paceline.host.devices import Device, recognise
from paceline.host.machine import available_cores, cpu_name
from paceline.host.processes import ProcessGroup
from paceline.metrics.intervals import Interval, mean_interval
from paceline.models.ceilings import ceilings_of
from paceline.parsing.units import format_bytes
from paceline.plan.batching import micro_batch_size, with_valid_ghost_size
from paceline.plan.compute import WITH_GRAPHS
from paceline.plan.strategy import check_sharding
from paceline.recipe.schema import Recipe
from paceline.recipe.training import BatchSection
from paceline.trainer.fake_batch import with_placeholder_data
from paceline.trainer.fake_step import fake_step, machine_with
from paceline_advisor import frozen
from paceline_advisor.apply import with_values
from paceline_advisor.bench.interleaved import Variant, run_interleaved
from paceline_advisor.clusters import Cluster, Link, find_cluster
from paceline_advisor.formulas.parallel_step import SPREAD, OneDevice
from paceline_advisor.memory.job import SimulatedRun, predicted
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


@frozen
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
    if memory_of(cluster, device, 1) is None:
        return {}
    machine = machine_with(device) if device is not None else describe_machine(torch.device("cpu"))
    found = {}
    with predicted(of_one_process(recipe, shares[min(shares)]), machine) as one:
        can_shard = recipe.parallel.strategy == "auto" and not one.step.task.why_not_sharded
        for size, share in shares.items():
            memory = memory_of(cluster, device, size)
            if memory is None:
                continue
            job, strategy = one.sharded_over(max(size, 2)), choose(size, memory)
            room = found[size] = _room(recipe, job, share, memory, strategy)
            if not room.fits and strategy == "ddp" and can_shard:
                spread = _room(recipe, job, share, memory, "fsdp")
                if spread.fits:
                    found[size] = replace(spread, why=f"not even one sample fits with a replica; {spread.why}")
    return found


def memory_of(cluster: Cluster, device: Device | None, processes: int) -> int | None:
    """Return the memory of each process's device, if known: a share of this machine's if they compute on its cores."""
    if device is None and cluster.shares_cores:
        return describe_machine(torch.device("cpu"), processes=processes).memory_bytes
    return None if device is None else device.memory_bytes


def _room(recipe: Recipe, job: SimulatedRun, share: Share, memory: int, strategy: str) -> Room:
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
    return room(cut, why, fits=job.fits(cut.micro_batch, memory, sharding_strategy))


ALONE = {"parallel.strategy": "auto", "parallel.logical_ranks": "auto", "parallel.gradient_compression": "none"}
"""Values with which one process can train alone."""


def of_one_process(recipe: Recipe, share: Share) -> Recipe:
    """Return the recipe for one process's part of the step; missing data are replaced by stand-ins."""
    path = recipe.data.path
    if path is not None and not Path(path).exists():
        recipe = with_values(recipe, {"data.path": None})
    values = {
        "batch": BatchSection(global_size=share.own, micro_size=share.micro_batch),
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


_BLOCK_SECONDS = 1.5
# The assumed error of a measured step is at least this: a few rounds say little about it.
_LEAST_UNCERTAINTY = 0.01


def measure(
    recipe: Recipe,
    alone: Mapping[int, Share],
    together: Mapping[int, Share],
    threads: Mapping[int, int],
    rounds: int,
    log: Log,
) -> tuple[dict[int, OneDevice], dict[int, Interval]]:
    """Measure shares of a recipe's step, interleaved.

    Args:
        recipe: The recipe to train.
        alone: Shares to measure on one device, by the number of devices that share the step.
        together: Shares to measure on that many devices.
        threads: Threads of each process, by number of processes; empty unless processes compute on cores.
        rounds: Measurements of each variant.
        log: Receives progress messages.

    Returns:
        By number of devices: one device's pass with each share of ``alone``, and the samples per second with each share
        of ``together``. The latter leave out one process: the prediction starts from it, so it tests nothing.

    Raises:
        TrainingError: If a measurement failed.
    """

    def variant(share: Share, processes: int) -> Variant:
        values = {
            "model": with_valid_ghost_size(recipe.model, share.micro_batch),
            "batch": BatchSection(global_size=share.own * processes, micro_size=share.micro_batch),
            "parallel.threads": threads.get(share.devices, recipe.parallel.threads),
            **(ALONE if processes == 1 else {}),
        }
        return Variant(recipe=with_values(recipe, values), processes=processes)

    names = {size: f"1 process as one of {size}" if size > 1 else "1 process" for size in alone}
    several = {size: f"{size} processes" for size in together if size > 1}
    variants = {names[size]: variant(share, 1) for size, share in alone.items()}
    variants |= {name: variant(together[size], size) for size, name in several.items()}
    measurements = run_interleaved(variants, rounds=rounds, block_seconds=_BLOCK_SECONDS, log=log)
    for name, each in measurements.items():
        if not each.rounds:
            raise TrainingError(f"{name} could not be measured: {each.trouble or 'no round was finished'}")
    device_steps = {}
    for size, share in alone.items():
        seconds = measurements[names[size]].step_seconds
        middle = statistics.median(seconds)
        spread = statistics.stdev(seconds) / middle if len(seconds) > 2 else SPREAD
        uncertainty = max(_LEAST_UNCERTAINTY, spread / len(seconds) ** 0.5)
        # Means over a block vary less than single steps, but also include the machine's drift. They do not show the
        # spread of a step, so it is assumed.
        device_steps[size] = OneDevice(
            seconds=middle / share.passes, samples=share.micro_batch, uncertainty=uncertainty, spread=SPREAD
        )
    return device_steps, {size: mean_interval(measurements[name].samples_per_second) for size, name in several.items()}


PROBED_BYTES = 4 * 2**20
_LIMIT_SECONDS = 180
# PCIe 3.0 x16, at the bandwidth that collectives reach. The links between the GPUs of a machine can be found only by
# using the GPUs.
_UNKNOWN_LINK = Link(10e9, 6.3e-6)


def cluster_of(name: str | None, recipe: Recipe, sizes: Sequence[int]) -> Cluster:
    """Return the cluster of this name or file, or this machine as a cluster.

    Args:
        name: The name; None for this machine, whose GPUs do not count if the recipe does not use them.
        recipe: The recipe.
        sizes: Requested numbers of processes; without GPUs, the largest is the number of devices.

    Raises:
        RecipeError: If the name is unknown, or the file is malformed.
    """
    if name is not None:
        return find_cluster(name)
    gpus = 0 if recipe.parallel.device == "cpu" else torch.cuda.device_count()
    cores, device = available_cores(), None
    if gpus:
        name = torch.cuda.get_device_name()
        device, title = recognise(name), f"this machine: {gpus} x {name}"
        source = "this machine; the link between its GPUs is assumed to be PCIe 3.0 x16"
    else:
        title, source = f"this machine: {cores} cores of {cpu_name()}", "this machine, measured"
    return Cluster(
        name="here",
        title=title,
        device=None if device is None else device.name,
        devices_per_node=gpus or max(sizes),
        within=_UNKNOWN_LINK,
        network=_UNKNOWN_LINK,
        cores_per_device=cores / (gpus or max(sizes)),
        max_devices=gpus or None,
        shares_cores=not gpus,
        source=source,
    )


def is_here(device: str | None) -> bool:
    """Whether this machine has the accelerator of this name, by its first GPU."""
    if device is None or not torch.cuda.is_available():
        return False
    found = recognise(torch.cuda.get_device_name())
    return found is not None and found.name == device


def probe(processes: int, *, size: int = PROBED_BYTES) -> Link:
    """Measure bandwidth and latency between processes of this machine in a ring (gloo).

    Args:
        processes: At least two.
        size: Bytes of the larger of two messages that are timed.

    Raises:
        LaunchError: If they could not be started, or could not exchange messages within the time limit.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-link-") as folder:
        words = [sys.executable, "-P", "-m", "paceline_advisor.scaling.link_probe", folder, str(processes), str(size)]
        with ProcessGroup() as group:
            for rank in range(processes):
                errors = Path(folder) / f"errors-{rank}"
                group.start([*words, str(rank)], name=f"process {rank}", stdout=subprocess.DEVNULL, stderr=errors)
            ending = group.wait(_LIMIT_SECONDS, after_failure=1.0)
        if ending.reason == "time":
            raise LaunchError(f"{processes} processes did not exchange messages within {_LIMIT_SECONDS} s.")
        answer = Path(folder) / "answer.json"
        if not answer.exists():
            cause = (
                f"{ending.failed[0].name}: {ending.failed[0].exit_message}" if ending.failed else "there is no result"
            )
            raise LaunchError(f"{processes} processes could not exchange messages: {cause[-300:]}")
        seconds = json.loads(answer.read_text())
    small, large = seconds["small"], seconds["large"]
    messages = 2 * (processes - 1)
    return Link(messages * size / processes / max(large - small, 1e-9), small / messages)
