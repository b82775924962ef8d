"""Which layers does a device's arithmetic hold back, which its memory, and what is the least time of each?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.devices import Device
from paceline.errors import RecipeError
from paceline.formulas.roofline import least_seconds
from paceline.models.flops import StepWork, Work

_PRECISIONS = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "float64": "fp64",
}


_OF_LAYERS = ("forward", "dgrad", "wgrad", "recompute")


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
    tf32: Literal["none", "convolutions", "all"]
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


@dataclass(frozen=True, kw_only=True)
class LayerBound:
    """A layer in one phase of a step.

    Attributes:
        layer: Its name in the network; empty for what the network itself does, and what is outside of it.
        kind: Its class.
        phase: One of ``models.flops.PHASES``.
        flops: Floating-point operations of its products.
        bytes_read: Bytes that its operators must read.
        bytes_written: Bytes that they must write.
        intensity: FLOP per byte.
        ridge: FLOP per byte at which the device turns from memory to arithmetic.
        bound: ``compute`` or ``memory``.
        seconds: The least time of its operators, one after another.
        share: Of the whole step's, in [0, 1].
        operators: Their names.
    """

    layer: str
    kind: str
    phase: str
    flops: int
    bytes_read: int
    bytes_written: int
    intensity: float
    ridge: float
    bound: str
    seconds: float
    share: float
    operators: tuple[str, ...]


def layer_bounds(found: StepWork, kinds: dict[str, str], ceilings: Ceilings) -> tuple[LayerBound, ...]:
    """Every layer and phase of a step that moves anything, in the order in which they come."""
    whole = sum(map(ceilings.seconds, found.works)) or 1.0
    return tuple(
        _bound((layer, kinds.get(layer, "") if phase in _OF_LAYERS else "", phase), works, ceilings, whole)
        for (layer, phase), works in found.by_layer().items()
        if any(each.bytes_moved or each.flops for each in works)
    )


def _bound(place: tuple[str, str, str], works: Sequence[Work], ceilings: Ceilings, whole: float) -> LayerBound:
    layer, kind, phase = place
    flops = sum(each.flops for each in works)
    read, written = sum(each.bytes_read for each in works), sum(each.bytes_written for each in works)
    arithmetic = sum(map(ceilings.arithmetic_seconds, works))
    memory = (read + written) / ceilings.device.bytes_per_second
    # Products of several precisions have a ridge between theirs.
    peak = flops / arithmetic if arithmetic else ceilings.peak(ceilings.precision)
    seconds = sum(map(ceilings.seconds, works))
    return LayerBound(
        layer=layer,
        kind=kind,
        phase=phase,
        flops=flops,
        bytes_read=read,
        bytes_written=written,
        intensity=flops / (read + written) if read + written else 0.0,
        ridge=peak / ceilings.device.bytes_per_second,
        bound="compute" if arithmetic > memory else "memory",
        seconds=seconds,
        share=seconds / whole,
        operators=tuple(dict.fromkeys(each.operator for each in works)),
    )
