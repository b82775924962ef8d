"""What is this machine, as a cluster of one node, and how fast do its processes exchange messages?"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from paceline.clusters import PCIE, Cluster, Link
from paceline.devices import recognise
from paceline.errors import LaunchError
from paceline.machine import available_cores, cpu_name
from paceline.processes import ProcessGroup

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
