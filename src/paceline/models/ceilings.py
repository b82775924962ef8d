"""Peak performance that applies to each operator of a step on a device.

A product runs in the precision of its tensors. In fp32 it runs in TF32 if the run allows it; torch's default allows it
for convolutions but not for matrix products.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from paceline.errors import RecipeError
from paceline.host.devices import Device
from paceline.models.roofline import least_seconds

if TYPE_CHECKING:  # importing torch's counters takes time
    from paceline.models.flops import StepWork, Work
    from paceline.plan import Plan

Tf32 = Literal["none", "convolutions", "all"]

_PRECISIONS = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "float64": "fp64",
}
_OF_LAYERS = ("forward", "dgrad", "wgrad", "recompute")


def tf32_of(float32_matmul: str) -> Tf32:
    """Return which fp32 products ``train.float32_matmul`` runs in TF32; ``default`` or ``auto`` is torch's default.

    Source:
        PyTorch, CUDA semantics, "TensorFloat-32 (TF32) on Ampere (and later) devices".
    """
    if float32_matmul in ("default", "auto"):
        return "convolutions"
    return "none" if float32_matmul == "highest" else "all"


@dataclass(frozen=True)
class Ceilings:
    """Peak performance of a device in a run's precision.

    Attributes:
        device: The device.
        tf32: Which fp32 products may use TF32: none, convolutions, or all.
        precision: Precision of most products; its ridge point is reported for layers without products.
        fp8_layers: Layers whose products are in fp8 although their tensors are not.
    """

    device: Device
    tf32: Tf32
    precision: str = "fp32"
    fp8_layers: frozenset[str] = frozenset()

    def precision_of(self, work: Work) -> str:
        """Return the name of the peak that applies to an operator's products."""
        if work.product is not None and work.layer in self.fp8_layers and work.phase in _OF_LAYERS:
            return "fp8"
        name = _PRECISIONS.get(work.dtype, "fp32")
        if name != "fp32" or self.tf32 == "none" or not self.device.peak("tf32"):
            return name
        is_convolution = work.product is not None and work.product.kind == "convolution"
        return "tf32" if is_convolution or self.tf32 == "all" else "fp32"

    def peak(self, precision: str) -> float:
        """Return its peak in FLOP/s; an unknown fp64 peak counts as half the fp32 peak, as on devices with fp64 units.

        Raises:
            RecipeError: If the device does not support the precision.
        """
        device_peak = self.device.peak(precision)
        if device_peak is None and precision == "fp64":
            device_peak = self.peak("fp32") / 2
        if device_peak is None:
            raise RecipeError(
                f"train.precision: {self.device.title} has no units for {precision}; choose one of: "
                f"{', '.join(self.device.flops_per_second)}."
            )
        return device_peak

    def seconds(self, work: Work) -> float:
        """Return the minimum time of an operator."""
        peak = self.peak(self.precision_of(work)) if work.flops else self.device.peak("fp32") or 1.0
        return least_seconds(work.flops, work.bytes_moved, peak, self.device.bytes_per_second)

    def arithmetic_seconds(self, work: Work) -> float:
        """Return the time of its arithmetic alone."""
        return work.flops / self.peak(self.precision_of(work)) if work.flops else 0.0

    def flops_by_precision(self, works: Iterable[Work]) -> dict[str, int]:
        """Return floating-point operations by the peak that applies, largest first."""
        flops: dict[str, int] = defaultdict(int)
        for work in works:
            if work.flops:
                flops[self.precision_of(work)] += work.flops
        return dict(sorted(flops.items(), key=lambda each: -each[1]))


def ceilings_of(plan: Plan, device: Device, work: StepWork) -> Ceilings:
    """Return a device's ceilings for the counted work of a run's step."""
    ceilings = Ceilings(device, tf32_of(plan.float32_matmul), fp8_layers=frozenset(plan.fp8_layers))
    return replace(ceilings, precision=next(iter(ceilings.flops_by_precision(work.works)), "fp32"))
