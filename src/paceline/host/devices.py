"""Accelerators: peak rates, memory and bandwidth, from the vendors' documents, as listed in ``devices.yaml``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import yaml

from paceline.errors import RecipeError, did_you_mean
from paceline.parsing.plain_yaml import BoundedLoader

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator.

    Attributes:
        name: Its name on the command line: ``a100-80gb``.
        title: The vendor's name.
        memory_bytes: Memory available to programs.
        bytes_per_second: Peak rate of that memory.
        flops_per_second: Dense peaks by the precision of the products' inputs: ``fp32`` (no matrix units), ``tf32``,
            ``fp16``, ``bf16``, ``fp8``; accumulation is in 32 bits.
        multiprocessors: Streaming multiprocessors (NVIDIA) or compute units (AMD).
        reported_as: Regular expression that matches the complete name reported by its driver.
        source: Source of the figures.
    """

    name: str
    title: str
    memory_bytes: int
    bytes_per_second: float
    flops_per_second: Mapping[str, float]
    multiprocessors: int
    reported_as: str
    source: str

    def peak(self, precision: str) -> float | None:
        """Return the dense peak for products of this precision, in FLOP/s; None if the device does not support it."""
        return self.flops_per_second.get(precision)


def _read_devices() -> dict[str, Device]:
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return {
        name: Device(
            name=name,
            title=each["title"],
            memory_bytes=int(each["gibibytes"] * GIB),
            bytes_per_second=each["gigabytes_per_second"] * 1e9,
            flops_per_second=MappingProxyType({kind: peak * 1e12 for kind, peak in each["teraflops"].items()}),
            multiprocessors=each["multiprocessors"],
            reported_as=each["reported_as"],
            source=each["source"],
        )
        for name, each in yaml.load(text, Loader=BoundedLoader).items()
    }


DEVICES: Mapping[str, Device] = MappingProxyType(_read_devices())
_ALIASES = MappingProxyType({"v100": "v100-16gb", "a100": "a100-80gb", "h100-sxm": "h100"})


def find_device(name: str) -> Device:
    """Return the device of this name; short names such as ``a100`` mean the most common variant.

    Raises:
        RecipeError: If there is no such device.
    """
    key = name.lower().replace("_", "-").replace(" ", "-")
    device = DEVICES.get(_ALIASES.get(key, key))
    if device is None:
        raise RecipeError(
            f"device: '{name}' is not known.{did_you_mean(key, (*DEVICES, *_ALIASES))} Known: {', '.join(DEVICES)}."
        )
    return device


def recognise(reported: str) -> Device | None:
    """Return the device whose driver reports this name (``torch.cuda.get_device_name``); None if unknown."""
    return next((each for each in DEVICES.values() if re.fullmatch(each.reported_as, reported.strip())), None)
