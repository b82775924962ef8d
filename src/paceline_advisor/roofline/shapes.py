"""Do the sizes of a step's products suit matrix units: do they divide, and do tiles and waves come out even?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from paceline.devices import Device
from paceline.models.flops import StepWork, Work
from paceline.models.operator_work import Product
from paceline_advisor.formulas.tiles import Tiling, aligned_sizes, alignment_bytes_multiple, best_tiling, better_sizes

# Of a number, in those precisions that matrix units have.
_BYTES = {"tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_CLEARLY = 1.1
# Narrower than that, and one of many: a kernel of its own computes it, without matrix units.
_NARROW = 8


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One size of a layer that is the user's to choose.

    Attributes:
        name: ``inputs``, ``outputs``, ``samples``; of a convolution ``channels``, ``filters``; of attention ``head``.
        size: How large it is.
        must: What should divide it for matrix units to be used (16 bytes).
        should: What divides it where they do best (128 bytes).
        advice: What to change, if it is the user's to; empty if nothing need be.
    """

    name: str
    size: int
    must: int
    should: int
    advice: str

    @property
    def is_aligned(self) -> bool:
        """Whether matrix units can read it as it is."""
        return self.size % self.must == 0

    def __str__(self) -> str:
        return f"{self.name} = {self.size} ({self.advice})"


@dataclass(frozen=True, kw_only=True)
class ShapeFinding:
    """One product of a layer.

    Attributes:
        layer: The layer's name.
        phase: Of the step.
        product: Its sizes.
        dimensions: Those that the layer is made with.
        tiling: How it is cut; None where it is not computed in tiles.
        better: The nearest smaller and larger n that are clearly faster, for each column.
        seconds_lost: Of the step's least time, what tiles and waves waste.
    """

    COLUMNS: ClassVar = ("layer", "phase", "m × n × k", "tile", "tiles", "waves", "wasted", "better n")

    layer: str
    phase: str
    product: Product
    dimensions: tuple[Dimension, ...]
    tiling: Tiling | None
    better: tuple[int | None, int | None]
    seconds_lost: float

    @property
    def odd_dimensions(self) -> tuple[Dimension, ...]:
        """Those that something should be changed about."""
        return tuple(each for each in self.dimensions if each.advice)

    def row(self) -> tuple[str, ...]:
        """Return the cells of ``COLUMNS``, of a product that is cut into tiles."""
        tiling, product = self.tiling, self.product
        assert tiling is not None
        times = f" × {product.count}" if product.count > 1 else ""
        return (
            *(self.layer, self.phase, f"{product.m} × {product.n} × {product.k}{times}"),
            f"{tiling.tile[0]}×{tiling.tile[1]}",
            f"{tiling.tiles}" if tiling.splits == 1 else f"{tiling.tiles} × {tiling.splits}",
            *(str(tiling.waves), f"{tiling.waste:.0%}"),
            " or ".join(str(n) for n in self.better if n is not None) or "–",
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            **{key: value for key, value in asdict(self).items() if key != "dimensions"},
            "better": list(self.better),
            "dimensions": [{**asdict(each), "aligned": each.is_aligned} for each in self.dimensions],
        }


def shape_findings(found: StepWork, device: Device, precision_of: Callable[[Work], str]) -> Iterator[ShapeFinding]:
    """Every product of a step's forward and backward pass.

    Args:
        found: The step.
        device: Where it is computed.
        precision_of: The name of the peak that an operator has there.
    """
    for work in found.works:
        product = work.product
        if product is None or work.phase not in ("forward", "dgrad", "wgrad"):
            continue
        precision = precision_of(work)
        has_units = device.name != "cpu" and precision in _BYTES
        tiling = _tiling(product, device)
        sizes = (product.m, product.n, product.k, device.multiprocessors, product.count)
        is_slow = tiling is not None and tiling.slowdown > _CLEARLY
        peak = device.peak(precision) or device.peak("fp32") or 1.0
        yield ShapeFinding(
            layer=work.layer,
            phase=work.phase,
            product=product,
            dimensions=tuple(_dimensions(product, _BYTES[precision])) if has_units and work.phase == "forward" else (),
            tiling=tiling,
            better=better_sizes(*sizes) if is_slow else (None, None),
            seconds_lost=0.0 if tiling is None else work.flops / peak * (tiling.slowdown - 1),
        )


def _tiling(product: Product, device: Device) -> Tiling | None:
    if device.name == "cpu" or (product.count > 1 and min(product.n, product.m) < _NARROW):
        return None
    return best_tiling(product.m, product.n, product.k, device.multiprocessors, product.count)


def _dimensions(product: Product, width: int) -> Iterator[Dimension]:
    must, should = alignment_bytes_multiple(width), alignment_bytes_multiple(width, 128)
    if product.kind == "attention":
        named = {"head": product.k}
    elif product.kind == "convolution":
        if product.count > 1 and min(product.n, product.k // product.window) < _NARROW:
            return  # depthwise and the like: no matrix units
        named = {"channels": product.k // product.window, "filters": product.n}
    else:
        named = {"samples": product.m, "inputs": product.k, "outputs": product.n}
    for name, size in named.items():
        yield Dimension(name=name, size=size, must=must, should=should, advice=_advice(name, size, must))


def _advice(name: str, size: int, must: int) -> str:
    if size % must == 0:
        return ""
    if name == "channels" and size < 4:
        return "pad the images to 4 channels, or leave it to the library, which pads the first layer itself"
    lower, upper = aligned_sizes(size, must)
    return (
        f"{must} should divide it: {upper}"
        if lower >= size or lower == upper
        else f"{must} should divide it: {lower} or {upper}"
    )
