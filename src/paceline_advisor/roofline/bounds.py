"""Which layers does a device's arithmetic hold back, which its memory, and what is the least time of each?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.models.ceilings import Ceilings
from paceline.models.flops import StepWork, Work

_OF_LAYERS = ("forward", "dgrad", "wgrad", "recompute")


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
