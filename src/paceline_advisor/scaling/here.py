"""This machine as a cluster of one node: its devices, links and measured steps."""

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

from paceline.clusters import PCIE, Cluster, Link
from paceline.devices import recognise
from paceline.errors import LaunchError, TrainingError
from paceline.machine import available_cores, cpu_name
from paceline.metrics.intervals import Interval, mean_interval
from paceline.plan.batching import with_fitting_ghosts
from paceline.processes import ProcessGroup
from paceline.recipe.running import Parallel
from paceline.recipe.schema import Recipe
from paceline.recipe.training import Batch
from paceline_advisor.bench.interleaved import Measured, Variant, run_bursts
from paceline_advisor.formulas.parallel_step import SPREAD, OneDevice
from paceline_advisor.scaling.room import Share

_BLOCK_SECONDS = 1.5
# Beyond this a step is called no steadier than it is: a few rounds say little of a spread.
_LEAST_DOUBT = 0.01


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What runs took that took turns.

    Attributes:
        alone: One device's step with the share it has among so many, by their number.
        together: Samples per second of so many, by their number.
    """

    alone: Mapping[int, OneDevice]
    together: Mapping[int, Interval]


@dataclass(frozen=True, kw_only=True)
class Trials:
    """What is to be measured.

    Attributes:
        recipe: What is trained.
        alone: Shares to measure on one device.
        together: Shares to measure on as many devices as they are for.
        threads: Of each process, by the number of processes; empty where processes do not compute on cores.
        rounds: Turns of each.
    """

    recipe: Recipe
    alone: Mapping[int, Share]
    together: Mapping[int, Share]
    threads: Mapping[int, int]
    rounds: int


def measure(trials: Trials, say: Callable[[str], None]) -> Measurements:
    """Run them in turns.

    Raises:
        TrainingError: If one of them failed.
    """
    names = {size: f"1 process as one of {size}" for size in trials.alone if size > 1} | {1: "1 process"}
    variants = {names[size]: _variant(trials, share, 1) for size, share in trials.alone.items()}
    several = {size: share for size, share in trials.together.items() if size > 1}
    variants |= {f"{size} processes": _variant(trials, share, size) for size, share in several.items()}
    found = run_bursts(variants, rounds=trials.rounds, block_seconds=_BLOCK_SECONDS, say=say)
    for name, each in found.items():
        if not each.rounds:
            raise TrainingError(f"{name} could not be measured: {each.trouble or 'no round was finished'}")
    alone = {size: _one_device(found[names[size]], share) for size, share in trials.alone.items()}
    # One process is what the prediction begins with: it is no test of it.
    together = {size: _rate(found[f"{size} processes"]) for size in several}
    return Measurements(alone=alone, together=together)


def _variant(trials: Trials, share: Share, processes: int) -> Variant:
    recipe = trials.recipe
    own = share.micro_batch * share.passes
    parallel = recipe.parallel if processes > 1 else _for_one(recipe.parallel)
    if share.devices in trials.threads:
        parallel = replace(parallel, threads=trials.threads[share.devices])
    batch = Batch(global_size=own * processes, micro_size=share.micro_batch)
    model = with_fitting_ghosts(recipe.model, share.micro_batch)
    return Variant(recipe=replace(recipe, model=model, batch=batch, parallel=parallel), processes=processes)


def _for_one(parallel: Parallel) -> Parallel:
    return replace(parallel, strategy="auto", logical_ranks="auto", gradient_compression="none")


def _one_device(measured: Measured, share: Share) -> OneDevice:
    seconds = measured.step_seconds
    middle = statistics.median(seconds)
    spread = statistics.stdev(seconds) / middle if len(seconds) > 2 else SPREAD
    doubt = max(_LEAST_DOUBT, spread / len(seconds) ** 0.5)
    # Means over a block vary less than steps do, and the machine's drift is in them: neither is a step's own spread.
    return OneDevice(seconds=middle / share.passes, samples=share.micro_batch, doubt=doubt, spread=SPREAD)


def _rate(measured: Measured) -> Interval:
    return mean_interval(measured.samples_per_second)


PROBED_BYTES = 4 * 2**20
_LIMIT_SECONDS = 180
# PCIe 3.0 x16 as collectives use it; what GPUs of a machine are joined by cannot be asked without using them.
_UNKNOWN_LINK = Link(10e9, PCIE * 1e-6)


def cluster_here(sizes: Sequence[int], *, on_cpu: bool = False) -> Cluster:
    """This machine.

    Args:
        sizes: Numbers of processes that are asked about.
        on_cpu: Whether its GPUs are to be left alone.
    """
    gpus = 0 if on_cpu else torch.cuda.device_count()
    cores = available_cores()
    if gpus:
        name = torch.cuda.get_device_name()
        device = recognise(name)
        return Cluster(
            name="here",
            title=f"this machine: {gpus} x {name}",
            device=None if device is None else device.name,
            devices_per_node=gpus,
            within=_UNKNOWN_LINK,
            network=_UNKNOWN_LINK,
            cores_per_device=cores / gpus,
            most_devices=gpus,
            source="this machine; the link between its GPUs is assumed to be PCIe 3.0 x16",
        )
    most = max(sizes)
    return Cluster(
        name="here",
        title=f"this machine: {cores} cores of {cpu_name()}",
        device=None,
        devices_per_node=most,
        within=_UNKNOWN_LINK,
        network=_UNKNOWN_LINK,
        cores_per_device=cores / most,
        shares_cores=True,
        source="this machine, measured",
    )


def is_here(device: str | None) -> bool:
    """Whether this machine has such an accelerator."""
    if device is None or not torch.cuda.is_available():
        return False
    found = recognise(torch.cuda.get_device_name())
    return found is not None and found.name == device


def probe(processes: int, *, size: int = PROBED_BYTES) -> Link:
    """What messages take between processes of this machine that all take part in a ring (gloo).

    Args:
        processes: At least two.
        size: Bytes of the larger of two messages that are timed.

    Raises:
        LaunchError: If they could not be started or did not find one another.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-link-") as folder:
        words = [sys.executable, "-P", "-m", "paceline_advisor.scaling.link_probe", folder, str(processes), str(size)]
        with ProcessGroup() as group:
            for rank in range(processes):
                errors = Path(folder) / f"errors-{rank}"
                group.start([*words, str(rank)], name=f"process {rank}", stdout=subprocess.DEVNULL, stderr=errors)
            ending = group.wait(_LIMIT_SECONDS, after_failure=1.0)
        if ending.reason == "time":
            raise LaunchError(f"{processes} processes did not exchange messages in {_LIMIT_SECONDS} s.")
        answer = Path(folder) / "answer.json"
        if not answer.exists():
            cause = f"{ending.failed[0].name}: {ending.failed[0].ending}" if ending.failed else "there is no result"
            raise LaunchError(f"{processes} processes could not exchange messages: {cause[-300:]}")
        seconds = json.loads(answer.read_text())
    small, large = seconds["small"], seconds["large"]
    messages = 2 * (processes - 1)
    return Link(messages * size / processes / max(large - small, 1e-9), small / messages)
