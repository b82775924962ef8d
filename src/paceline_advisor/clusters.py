"""Common GPU clusters: GPUs per node, and the bandwidth and latency of their links.

The known ones are in ``clusters.yaml``; a user's file describes one with the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.errors import RecipeError, did_you_mean
from paceline.parsing.files import refuse_special_inputs
from paceline.parsing.plain_yaml import BoundedLoader
from paceline_advisor import frozen


@dataclass(frozen=True)
class Link:
    """Time for a message of n bytes: ``latency_seconds + n / bytes_per_second``."""

    bytes_per_second: float
    latency_seconds: float


@frozen
class Cluster:
    """Identical machines, and the network between them.

    Attributes:
        name: Its name on the command line: ``dgx-a100``.
        title: Its full name.
        device: Its accelerator's name in :mod:`paceline.host.devices`; None for any.
        devices_per_node: Accelerators per machine.
        within: Link between the accelerators of a machine, per accelerator.
        network: Link between machines, per machine: all its network cards together.
        cores_per_device: Physical CPU cores per accelerator; None if unknown.
        price_per_device_hour: A public price in US dollars; None if there is none.
        max_devices: Maximum number available; None if unknown.
        shares_cores: Whether the processes compute on the node's CPU cores, without accelerators.
        source: Source of the figures.
    """

    name: str
    title: str
    device: str | None
    devices_per_node: int
    within: Link
    network: Link
    cores_per_device: float | None
    price_per_device_hour: float | None = None
    max_devices: int | None = None
    shares_cores: bool = False
    source: str = ""

    def nodes(self, devices: int) -> int:
        """Return the machines that hold this many accelerators."""
        return -(-devices // self.devices_per_node)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _LinkTable(_Table):
    gigabytes_per_second: float = Field(gt=0)
    latency_microseconds: float = Field(ge=0)

    @property
    def link(self) -> Link:
        return Link(self.gigabytes_per_second * 1e9, self.latency_microseconds * 1e-6)


class _ClusterTable(_Table):
    """Schema of a file that describes a cluster."""

    gpus_per_node: int = Field(gt=0)
    within: _LinkTable
    network: _LinkTable
    title: str | None = None
    device: str | None = None
    cores_per_gpu: float | None = Field(default=None, gt=0)
    price_per_gpu_hour: float | None = Field(default=None, gt=0)
    most_gpus: int | None = Field(default=None, gt=0)
    source: str | None = None


EXAMPLE = (
    "gpus_per_node: 4, within: {gigabytes_per_second: 20, latency_microseconds: 10}, network: "
    "{gigabytes_per_second: 2.5, latency_microseconds: 30}"
)


def _parse_cluster(name: str, entry: Any, path: Path) -> Cluster:
    """Read a file's description of a cluster.

    Raises:
        RecipeError: Naming the missing, unknown or invalid key.
    """
    if not isinstance(entry, dict):
        raise RecipeError(f"{path}: found {entry!r}, but a cluster is keys and values: {EXAMPLE}.")
    try:
        table = _ClusterTable.model_validate(entry)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        match first["type"]:
            case "missing":
                problem = f"key '{key}' is missing; a cluster has at least: {EXAMPLE}."
            case "extra_forbidden":
                known = _LinkTable.model_fields if "." in key else _ClusterTable.model_fields
                problem = (
                    f"key '{key}' is unknown.{did_you_mean(str(first['loc'][-1]), known)} It has {', '.join(known)}."
                )
            case "model_type":
                keys = " and ".join(_LinkTable.model_fields)
                problem = f"{key} is {first['input']!r}, but it has exactly the keys {keys}."
            case _:
                problem = f"{key} is {first['input']!r}; {first['msg'].replace('Input should', 'it must')}."
        raise RecipeError(f"{path}: {problem}") from None
    return Cluster(
        name=name,
        title=table.title or str(path),
        device=table.device,
        devices_per_node=table.gpus_per_node,
        within=table.within.link,
        network=table.network.link,
        cores_per_device=table.cores_per_gpu,
        price_per_device_hour=table.price_per_gpu_hour,
        max_devices=table.most_gpus,
        source=table.source or str(path),
    )


def _load(path: Path) -> Any:
    refuse_special_inputs(path)
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=BoundedLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cluster '{path}' cannot be read: {error}; give a name or a YAML file's path.") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None


_CLUSTER_FILE = Path(__file__).with_suffix(".yaml")
CLUSTERS: Mapping[str, Cluster] = MappingProxyType(
    {name: _parse_cluster(name, found, _CLUSTER_FILE) for name, found in _load(_CLUSTER_FILE).items()}
)


def find_cluster(name: str) -> Cluster:
    """Return the cluster of this name, or described by the YAML file at this path.

    Raises:
        RecipeError: If neither exists, or the file is malformed.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return _parse_cluster(path.stem, _load(path), path)
    key = name.lower().replace("_", "-").replace(" ", "-")
    if key not in CLUSTERS:
        raise RecipeError(
            f"cluster '{name}' is not known.{did_you_mean(key, CLUSTERS)} Known: {', '.join(CLUSTERS)}; or give the "
            "path of your own YAML file."
        )
    return CLUSTERS[key]
