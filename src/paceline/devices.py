"""Accelerators: peak rates, memory and bandwidth, from their makers' documents.

Peaks are dense: what a maker prints for matrices with half of their entries zero is twice as much, and no training has
it. Memory is what the driver leaves a program of the card's: the smallest total that PyTorch is known to report for it,
so that what is said to fit does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from paceline.errors import RecipeError, did_you_mean

GIB = 2**30
_TERA = 1e12


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator.

    Attributes:
        name: What it is asked for by: ``a100-80gb``.
        title: What its maker calls it.
        memory_bytes: Memory that a program finds on it.
        bytes_per_second: Peak rate of that memory.
        flops_per_second: Dense peaks by the precision of the products' inputs: ``fp32`` (no matrix units), ``tf32``,
            ``fp16``, ``bf16``, ``fp8``; sums are kept in 32 bits.
        multiprocessors: Streaming multiprocessors (NVIDIA) or compute units (AMD).
        reported_as: Regular expression of the whole name that its driver reports.
        source: Where the figures stand.
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
        """Dense peak for products of this precision, in FLOP/s; None if it has no units for it."""
        return self.flops_per_second.get(precision)


def _device(
    name: str,
    title: str,
    memory: tuple[float, float],
    peaks: Mapping[str, float],
    multiprocessors: int,
    known_by: str,
    source: str,
) -> Device:
    gibibytes, gigabytes_per_second = memory
    return Device(
        name=name,
        title=title,
        memory_bytes=int(gibibytes * GIB),
        bytes_per_second=gigabytes_per_second * 1e9,
        flops_per_second=MappingProxyType({precision: each * _TERA for precision, each in peaks.items()}),
        multiprocessors=multiprocessors,
        reported_as=known_by,
        source=source,
    )


_V100 = {"fp32": 15.7, "fp16": 125}
_A100 = {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}
_H100 = {"fp32": 66.9, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9}
_H100_PCIE = {"fp32": 51.2, "tf32": 378, "fp16": 756, "bf16": 756, "fp8": 1513}

_VOLTA = "NVIDIA Tesla V100 GPU Architecture (white paper, 2017) and V100 datasheet (2020)"
_AMPERE = "NVIDIA A100 Tensor Core GPU Architecture (white paper, 2020) and A100 datasheet (2021)"
_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture (white paper, 2023) and H100 datasheet (2023)"

DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        each.name: each
        for each in (
            _device(
                "v100-16gb", "NVIDIA V100 SXM2 16 GB", (15.77, 900), _V100, 80, r"(Tesla|NVIDIA) V100-SXM2-16GB", _VOLTA
            ),
            _device(
                "v100-32gb", "NVIDIA V100 SXM2 32 GB", (31.73, 900), _V100, 80, r"(Tesla|NVIDIA) V100-SXM2-32GB", _VOLTA
            ),
            _device(
                "t4",
                "NVIDIA T4",
                (14.56, 320),
                {"fp32": 8.1, "fp16": 65},
                40,
                r"(Tesla|NVIDIA) T4",
                "NVIDIA Turing GPU Architecture (white paper, 2018) and T4 datasheet (2019)",
            ),
            _device(
                "a100-40gb", "NVIDIA A100 SXM4 40 GB", (39.38, 1555), _A100, 108, r"(NVIDIA )?A100-SXM4-40GB", _AMPERE
            ),
            _device(
                "a100-80gb", "NVIDIA A100 SXM4 80 GB", (79.14, 2039), _A100, 108, r"(NVIDIA )?A100-SXM4-80GB", _AMPERE
            ),
            _device(
                "h100-pcie", "NVIDIA H100 PCIe 80 GB", (79.10, 2000), _H100_PCIE, 114, r"NVIDIA H100 PCIe", _HOPPER
            ),
            _device("h100", "NVIDIA H100 SXM5 80 GB", (79.10, 3350), _H100, 132, r"NVIDIA H100 80GB HBM3", _HOPPER),
            _device(
                "h200",
                "NVIDIA H200 SXM 141 GB",
                (139.72, 4800),
                _H100,
                132,
                r"NVIDIA H200",
                "NVIDIA H200 datasheet (2024)",
            ),
            _device(
                "b200",
                "NVIDIA B200 SXM 180 GB",
                (178.35, 7700),
                {"fp32": 75, "tf32": 1125, "fp16": 2250, "bf16": 2250, "fp8": 4500},
                148,
                r"NVIDIA B200",
                "NVIDIA Blackwell and HGX B200 datasheets (2024)",
            ),
            _device(
                "l4",
                "NVIDIA L4",
                (21.96, 300),
                {"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121, "fp8": 242.5},
                58,
                r"NVIDIA L4",
                "NVIDIA L4 datasheet (2023)",
            ),
            _device(
                "rtx3090",
                "NVIDIA GeForce RTX 3090",
                (23.57, 936),
                {"fp32": 35.6, "tf32": 35.6, "fp16": 71, "bf16": 71},
                82,
                r"(NVIDIA )?GeForce RTX 3090",
                "NVIDIA Ampere GA102 GPU Architecture (white paper, 2021)",
            ),
            _device(
                "rtx4090",
                "NVIDIA GeForce RTX 4090",
                (23.51, 1008),
                {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 330.3},
                128,
                r"(NVIDIA )?GeForce RTX 4090",
                "NVIDIA Ada GPU Architecture (white paper, 2023)",
            ),
            _device(
                "mi300x",
                "AMD Instinct MI300X",
                (191.98, 5300),
                {"fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "bf16": 1307.4, "fp8": 2614.9},
                304,
                r"AMD Instinct MI300X.*",
                "AMD Instinct MI300X data sheet (2023)",
            ),
        )
    }
)
_ALSO = MappingProxyType({"v100": "v100-16gb", "a100": "a100-80gb", "h100-sxm": "h100"})


def find_device(name: str) -> Device:
    """The device of this name; ``a100`` and the like stand for the one that is met most.

    Raises:
        RecipeError: If there is none.
    """
    key = name.lower().replace("_", "-").replace(" ", "-")
    found = DEVICES.get(_ALSO.get(key, key))
    if found is None:
        raise RecipeError(
            f"device: '{name}' is not known.{did_you_mean(key, (*DEVICES, *_ALSO))} Known: {', '.join(DEVICES)}."
        )
    return found


def recognise(reported: str) -> Device | None:
    """The device whose driver reports this name (``torch.cuda.get_device_name``); None if it is none of these."""
    return next((each for each in DEVICES.values() if re.fullmatch(each.reported_as, reported.strip())), None)
