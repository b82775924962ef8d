"""This machine as a cluster of one node: its devices, links and measured steps."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from paceline.command import Log
from paceline.devices import recognise
from paceline.errors import LaunchError, TrainingError
from paceline.machine import available_cores, cpu_name
from paceline.metrics.intervals import Interval, mean_interval
from paceline.plan.batching import with_valid_ghost_size
from paceline.processes import ProcessGroup
from paceline.recipe.schema import Recipe
from paceline.recipe.training import Batch
from paceline_advisor.apply import with_values
from paceline_advisor.bench.interleaved import Variant, run_interleaved
from paceline_advisor.clusters import Cluster, Link
from paceline_advisor.formulas.parallel_step import SPREAD, OneDevice
from paceline_advisor.scaling.room import ALONE, Share

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
            "batch": Batch(global_size=share.own * processes, micro_size=share.micro_batch),
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


def cluster_here(sizes: Sequence[int], *, on_cpu: bool = False) -> Cluster:
    """Return this machine as a cluster.

    Args:
        sizes: Requested numbers of processes; without GPUs, the largest is the number of devices.
        on_cpu: Whether to ignore its GPUs.
    """
    gpus = 0 if on_cpu else torch.cuda.device_count()
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
