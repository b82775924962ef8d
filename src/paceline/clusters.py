"""GPU clusters that people train on: GPUs of a node, and the bandwidth and latency of their links.

Rates are what collectives reach, not what links are sold as: within a node the bus bandwidth that an all-reduce of
large messages shows (NVIDIA's nccl-tests define it), between nodes the network cards' line rate times
:data:`NETWORK_SHARE`. Latencies of NVLink, PCIe and InfiniBand are those that NCCL itself reckons with for a ring (its
src/graph/tuning.cc: 3.4, 5.7 and 9.6 microseconds for a message and 8.4 for a collective); TCP's and EFA's are assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from paceline.errors import RecipeError, did_you_mean
from paceline.files import refuse_odd_kinds
from paceline.plain_yaml import BoundedLoader

NETWORK_SHARE = 0.85
"""Part of a network card's line rate that messages of some megabytes reach, headers and pacing taken off."""
# Microseconds of a message. An all-reduce of eight has fourteen, over which what it costs by itself is spread.
NVLINK, PCIE, INFINIBAND = 4, 6.3, 10
_GIGA = 1e9
_MICRO = 1e-6


@dataclass(frozen=True)
class Link:
    """What a message of n bytes takes: ``latency_seconds + n / bytes_per_second``."""

    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines that are alike, and the network between them.

    Attributes:
        name: What it is asked for by: ``dgx-a100``.
        title: What it is.
        device: Its accelerator's name in :mod:`paceline.devices`; None if any may be in it.
        devices_per_node: Accelerators of a machine.
        within: Between the accelerators of a machine, for each of them.
        network: Between machines, for a whole machine: all its cards together.
        cores_per_device: Physical processor cores for each accelerator; None if unknown.
        price_per_device_hour: A public price in US dollars; None if there is none.
        most_devices: No more can be had; None if that is not known.
        shares_cores: The processes compute on the node's cores themselves: there is no accelerator.
        source: Where the figures stand.
    """

    name: str
    title: str
    device: str | None
    devices_per_node: int
    within: Link
    network: Link
    cores_per_device: float | None
    price_per_device_hour: float | None = None
    most_devices: int | None = None
    shares_cores: bool = False
    source: str = ""


def _cluster(
    name: str,
    title: str,
    device: str | None,
    devices: int,
    within: tuple[float, float],
    network: tuple[float, float],
    rest: Mapping[str, Any],
) -> Cluster:
    """``within``: GB/s and microseconds; ``network``: Gbit/s of all cards of a node, and microseconds."""
    gigabits, microseconds = network
    return Cluster(
        name=name,
        title=title,
        device=device,
        devices_per_node=devices,
        within=Link(within[0] * _GIGA, within[1] * _MICRO),
        network=Link(gigabits / 8 * _GIGA * NETWORK_SHARE, microseconds * _MICRO),
        cores_per_device=rest.get("cores"),
        price_per_device_hour=rest.get("price"),
        source=rest["source"],
    )


_NCCL = "all-reduce bus bandwidth as nccl-tests report it for large messages"
_PLAIN = "line rate of the network cards; PCIe 3.0 x16 between GPUs; no datasheet: a plain machine"

CLUSTERS: Mapping[str, Cluster] = MappingProxyType(
    {
        each.name: each
        for each in (
            _cluster(
                "dgx-1",
                "NVIDIA DGX-1: 8 V100 16 GB, NVLink in a hybrid cube mesh, 4 x 100 Gbit InfiniBand",
                "v100-16gb",
                8,
                (130, NVLINK),
                (400, INFINIBAND),
                {"cores": 5, "source": f"DGX-1 system architecture (white paper, 2017); {_NCCL}"},
            ),
            _cluster(
                "dgx-1-32gb",
                "NVIDIA DGX-1 with 8 V100 32 GB, 4 x 100 Gbit InfiniBand",
                "v100-32gb",
                8,
                (130, NVLINK),
                (400, INFINIBAND),
                {"cores": 5, "source": f"DGX-1 system architecture (white paper, 2017); {_NCCL}"},
            ),
            _cluster(
                "dgx-2",
                "NVIDIA DGX-2: 16 V100 32 GB on NVSwitch, 8 x 100 Gbit InfiniBand",
                "v100-32gb",
                16,
                (130, NVLINK),
                (800, INFINIBAND),
                {"cores": 3, "source": f"DGX-2 datasheet (2018); {_NCCL}"},
            ),
            _cluster(
                "dgx-a100",
                "NVIDIA DGX A100: 8 A100 80 GB on NVSwitch, 8 x 200 Gbit InfiniBand",
                "a100-80gb",
                8,
                (230, NVLINK),
                (1600, INFINIBAND),
                {"cores": 16, "source": f"DGX A100 system architecture (white paper, 2020); {_NCCL}"},
            ),
            _cluster(
                "dgx-a100-40gb",
                "NVIDIA DGX A100 with 8 A100 40 GB, 8 x 200 Gbit InfiniBand",
                "a100-40gb",
                8,
                (230, NVLINK),
                (1600, INFINIBAND),
                {"cores": 16, "source": f"DGX A100 system architecture (white paper, 2020); {_NCCL}"},
            ),
            _cluster(
                "dgx-h100",
                "NVIDIA DGX H100: 8 H100 on NVSwitch, 8 x 400 Gbit InfiniBand",
                "h100",
                8,
                (370, NVLINK),
                (3200, INFINIBAND),
                {"cores": 14, "source": f"DGX H100 datasheet (2022); {_NCCL}, without in-switch reduction"},
            ),
            _cluster(
                "8xh200",
                "NVIDIA DGX H200: 8 H200 on NVSwitch, 8 x 400 Gbit InfiniBand",
                "h200",
                8,
                (370, NVLINK),
                (3200, INFINIBAND),
                {"cores": 14, "source": f"DGX H200 datasheet (2024); {_NCCL}, without in-switch reduction"},
            ),
            _cluster(
                "p4d",
                "Amazon EC2 p4d.24xlarge: 8 A100 40 GB on NVSwitch, 4 x 100 Gbit EFA",
                "a100-40gb",
                8,
                (230, NVLINK),
                (400, 20),
                {
                    "cores": 6,
                    "price": 32.77 / 8,
                    "source": f"Amazon EC2 instance types; list price on demand, us-east-1, 2023; {_NCCL}",
                },
            ),
            _cluster(
                "big-basin",
                "Facebook Big Basin: 8 P100 with NVLink, 50 Gbit Ethernet",
                None,
                8,
                (60, NVLINK),
                (50, 30),
                {"source": "Goyal et al., arXiv:1706.02677, section 4; P100 white paper (four links of 20 GB/s)"},
            ),
            *(
                _cluster(
                    f"ethernet-{gigabits}g",
                    f"machines of 4 GPUs on PCIe, {gigabits} Gbit Ethernet (TCP)",
                    None,
                    4,
                    (10, PCIE),
                    (gigabits, 30),
                    {"cores": 8, "source": _PLAIN},
                )
                for gigabits in (10, 25, 100)
            ),
        )
    }
)

_LINK_KEYS = ("gigabytes_per_second", "latency_microseconds")
_REQUIRED = ("gpus_per_node", "within", "network")
_KEYS = (*_REQUIRED, "device", "cores_per_gpu", "price_per_gpu_hour", "most_gpus", "source")
EXAMPLE = (
    "gpus_per_node: 4, within: {gigabytes_per_second: 20, latency_microseconds: 10}, network: "
    "{gigabytes_per_second: 2.5, latency_microseconds: 30}"
)


def find_cluster(name: str) -> Cluster:
    """The cluster of this name, or that a YAML file of this path describes.

    Raises:
        RecipeError: If there is neither, or the file is not as it must be.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return read_cluster(path)
    key = name.lower().replace("_", "-").replace(" ", "-")
    if key not in CLUSTERS:
        raise RecipeError(
            f"cluster '{name}' is not known.{did_you_mean(key, CLUSTERS)} Known: {', '.join(CLUSTERS)}; or give the "
            "path of a YAML file of your own."
        )
    return CLUSTERS[key]


def read_cluster(path: Path) -> Cluster:
    """A cluster of the user's own.

    Raises:
        RecipeError: Naming the key that is missing, unknown or no number.
    """
    found = _mapping(path)
    for key in found:
        if key not in _KEYS:
            raise RecipeError(
                f"{path}: key '{key}' is unknown.{did_you_mean(str(key), _KEYS)} It has {', '.join(_KEYS)}."
            )
    for key in _REQUIRED:
        if key not in found:
            raise RecipeError(f"{path}: key '{key}' is missing; a cluster has at least: {EXAMPLE}.")
    optional = {key: _number(found, key, path) for key in ("cores_per_gpu", "price_per_gpu_hour") if key in found}
    return Cluster(
        name=path.stem,
        title=str(path),
        device=None if found.get("device") is None else str(found["device"]),
        devices_per_node=_whole(found, "gpus_per_node", path),
        within=_link(found, "within", path),
        network=_link(found, "network", path),
        cores_per_device=optional.get("cores_per_gpu"),
        price_per_device_hour=optional.get("price_per_gpu_hour"),
        most_devices=_whole(found, "most_gpus", path) if "most_gpus" in found else None,
        source=str(found.get("source", path)),
    )


def _mapping(path: Path) -> dict[str, Any]:
    refuse_odd_kinds(path)
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=BoundedLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cluster '{path}' cannot be read: {error}; give a name or a YAML file's path.") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is no YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(found, dict):
        raise RecipeError(f"{path}: found {found!r}, but a cluster is keys and values: {EXAMPLE}.")
    return found


def _link(found: Mapping[str, Any], key: str, path: Path) -> Link:
    value = found[key]
    if not isinstance(value, dict) or set(value) != set(_LINK_KEYS):
        raise RecipeError(f"{path}: {key} is {value!r}, but it has exactly the keys {' and '.join(_LINK_KEYS)}.")
    rate = _number(value, "gigabytes_per_second", path)
    latency = _number(value, "latency_microseconds", path, zero=True)
    return Link(rate * _GIGA, latency * _MICRO)


def _number(found: Mapping[str, Any], key: str, path: Path, *, zero: bool = False) -> float:
    value = found[key]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (value > 0 or (zero and value == 0)) or value == float("inf"):
        raise RecipeError(f"{path}: {key} is {value!r}; give a number {'of at least' if zero else 'above'} zero.")
    return float(value)


def _whole(found: Mapping[str, Any], key: str, path: Path) -> int:
    value = _number(found, key, path)
    if value != int(value):
        raise RecipeError(f"{path}: {key} is {value:g}; give a whole number.")
    return int(value)
