"""The peak of a device at which each operator of a step runs.

A product runs in the precision of its tensors, except in fp32: there it runs in TF32 where the run allows it, which
torch's default does for convolutions but not for matrix products.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from paceline.devices import Device
from paceline.errors import RecipeError
from paceline.models.roofline import least_seconds

if TYPE_CHECKING:  # torch's counters take their time to import
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
    """Which fp32 products ``train.float32_matmul`` lets a GPU compute in TF32; ``default`` or ``auto`` is torch's own.

    Source:
        PyTorch, CUDA semantics, "TensorFloat-32 (TF32) on Ampere (and later) devices".
    """
    if float32_matmul in ("default", "auto"):
        return "convolutions"
    return "none" if float32_matmul == "highest" else "all"


@dataclass(frozen=True)
class Ceilings:
    """What a device can do in a run's precision.

    Attributes:
        device: The device.
        tf32: Which fp32 products may be computed in TF32: none, convolutions, or all.
        precision: Of most products; its ridge is told of layers that have none.
        fp8_layers: Those whose products are in fp8, though their tensors are not.
    """

    device: Device
    tf32: Tf32
    precision: str = "fp32"
    fp8_layers: frozenset[str] = frozenset()

    def precision_of(self, work: Work) -> str:
        """The name of the peak that an operator's products have."""
        if work.product is not None and work.layer in self.fp8_layers and work.phase in _OF_LAYERS:
            return "fp8"
        name = _PRECISIONS.get(work.dtype, "fp32")
        if name != "fp32" or self.tf32 == "none" or not self.device.peak("tf32"):
            return name
        is_convolution = work.product is not None and work.product.kind == "convolution"
        return "tf32" if is_convolution or self.tf32 == "all" else "fp32"

    def peak(self, precision: str) -> float:
        """Its peak in FLOP/s; where it has none for fp64, half of fp32's, as where it has units for it.

        Raises:
            RecipeError: If it cannot multiply such numbers.
        """
        found = self.device.peak(precision)
        if found is None and precision == "fp64":
            found = self.peak("fp32") / 2
        if found is None:
            raise RecipeError(
                f"train.precision: {self.device.title} has no units for {precision}; choose one of: "
                f"{', '.join(self.device.flops_per_second)}."
            )
        return found

    def seconds(self, work: Work) -> float:
        """The least time of an operator."""
        peak = self.peak(self.precision_of(work)) if work.flops else self.device.peak("fp32") or 1.0
        return least_seconds(work.flops, work.bytes_moved, peak, self.device.bytes_per_second)

    def arithmetic_seconds(self, work: Work) -> float:
        """The time of its arithmetic alone."""
        return work.flops / self.peak(self.precision_of(work)) if work.flops else 0.0

    def flops_by_precision(self, works: Iterable[Work]) -> dict[str, int]:
        """Floating-point operations by the peak that they have, the largest number first."""
        found: dict[str, int] = defaultdict(int)
        for work in works:
            if work.flops:
                found[self.precision_of(work)] += work.flops
        return dict(sorted(found.items(), key=lambda each: -each[1]))


def ceilings_of(plan: Plan, device: Device, found: StepWork) -> Ceilings:
    """What holds a run's step, counted, on a device."""
    ceilings = Ceilings(device, tf32_of(plan.float32_matmul), fp8_layers=frozenset(plan.fp8_layers))
    return replace(ceilings, precision=next(iter(ceilings.flops_by_precision(found.works)), "fp32"))
