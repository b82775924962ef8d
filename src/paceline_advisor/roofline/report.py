"""Result of a roofline, layer by layer, as text and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from paceline.devices import Device
from paceline.models.ceilings import Ceilings
from paceline.models.flops import PHASES, StepWork, Uncounted, Work
from paceline.models.operator_work import Product
from paceline.pages.page import Table
from paceline.pages.shown import Shown
from paceline_advisor.formulas.network import (
    Tiling,
    aligned_sizes,
    alignment_bytes_multiple,
    best_tiling,
    better_sizes,
)

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


_FEW = 8


@dataclass(frozen=True, kw_only=True)
class LowIntensity:
    """Convolutions of few channels for each group, and what they cost.

    Attributes:
        layers: Their names.
        intensity: Their forward FLOP per byte.
        flops_share: Of the step's FLOPs, in [0, 1].
        seconds_share: Of its least time, in [0, 1].
    """

    layers: tuple[str, ...]
    intensity: float
    flops_share: float
    seconds_share: float


@dataclass(frozen=True, kw_only=True)
class RooflineReport:
    """What was found; times are lower bounds for one optimizer step of one process.

    Attributes:
        recipe: What was asked for.
        model: Name of its network.
        device: On what.
        precision: Of most of the arithmetic: the name of the peak that MFU goes by.
        micro_batch: Samples of a micro-batch.
        micro_batches: Micro-batches of a step.
        found: What the forward and backward pass of one micro-batch and the update do.
        layers: Layer by layer.
        shapes: Product by product.
        low_intensity: Depthwise convolutions and the like; None if there are none.
        least_seconds: The least time of one micro-batch and the update, each operator by itself.
        products_seconds: Of this, operators with products: as if all others were fused into them.
        arithmetic_seconds: Of the model's arithmetic alone.
        notices: What the user should know.
        top: How many layers are shown.
    """

    recipe: str
    model: str
    device: Device
    precision: str
    micro_batch: int
    micro_batches: int
    found: StepWork
    layers: tuple[LayerBound, ...]
    shapes: tuple[ShapeFinding, ...]
    low_intensity: LowIntensity | None
    least_seconds: float
    products_seconds: float
    arithmetic_seconds: float
    notices: tuple[str, ...]
    top: int = 15

    @property
    def ridge(self) -> float:
        """FLOP per byte above which the arithmetic of this precision is what counts."""
        return (self.device.peak(self.precision) or 0.0) / self.device.bytes_per_second

    @property
    def best_mfu(self) -> float:
        """The highest utilisation that the bound allows, in [0, 1], each operator by itself."""
        return self.arithmetic_seconds / self.least_seconds if self.least_seconds else 0.0

    @property
    def best_fused_mfu(self) -> float:
        """The same if all operators without products were fused into those with."""
        return self.arithmetic_seconds / self.products_seconds if self.products_seconds else 0.0

    @property
    def uncounted(self) -> tuple[Uncounted, ...]:
        """Operators whose arithmetic is not in these figures."""
        return self.found.uncounted

    def phases(self) -> dict[str, dict[str, float]]:
        """FLOPs, bytes, least time and its share by phase."""
        return {
            phase: {
                "flops": sum(each.flops for each in of_phase),
                "bytes": sum(each.bytes_read + each.bytes_written for each in of_phase),
                "seconds": sum(each.seconds for each in of_phase),
                "share": sum(each.share for each in of_phase),
            }
            for phase in PHASES
            if (of_phase := [each for each in self.layers if each.phase == phase])
        }

    def headline(self) -> tuple[str, ...]:
        """What a step comes to, in sentences."""
        peak, rate = self.device.peak(self.precision) or 0.0, self.device.bytes_per_second
        samples, flops = self.micro_batch, self.found.model_flops
        ceilings = (
            f"{self.model} on {self.device.title}: {peak / 1e12:,.4g} TFLOP/s dense in {self.precision}, "
            f"{rate / 1e9:,.4g} GB/s; ridge {self.ridge:.1f} FLOP/byte."
        )
        step = (
            f"A micro-batch of {samples} samples takes {flops / 1e9:,.4g} GFLOP of the model "
            f"({flops / samples / 1e9:.4g} for a sample) and moves {self.found.bytes_moved / 1e9:.4g} GB. With the "
            f"update it cannot take less than {self.least_seconds * 1e3:.4g} ms: at most "
            f"{samples / self.least_seconds:,.0f} samples/s and an MFU of {self.best_mfu:.1%}, or "
            f"{self.best_fused_mfu:.1%} if all operators without products were fused into those with."
        )
        return ceilings, f"({self.device.source}.)", step

    def remarks(self) -> tuple[str, ...]:
        """What stands out, in sentences."""
        said = list(self.notices)
        if self.low_intensity is not None:
            said.append(_of_low_intensity(self.low_intensity, self.ridge))
        said += self._of_sizes()
        said += [
            f"{each.operator}: {each.calls} calls with {each.share:.1%} of the bytes, whose arithmetic is not counted"
            for each in self.uncounted
        ]
        return tuple(dict.fromkeys(said))

    def _of_sizes(self) -> list[str]:
        """Layers whose sizes do not divide, those that take most time first."""
        seconds = {(each.layer, each.phase): each.seconds for each in self.layers}
        odd = [each for each in self.shapes if each.odd_dimensions]
        odd.sort(key=lambda each: -seconds[each.layer, each.phase])
        said = [f"{each.layer}: {', '.join(map(str, each.odd_dimensions))}" for each in odd[:_FEW]]
        rest = odd[_FEW:]
        share = sum(seconds[each.layer, each.phase] for each in rest) / self.least_seconds if rest else 0.0
        if rest:
            said.append(
                f"{len(rest)} more layers have sizes that do not divide; their forward passes take {share:.1%}."
            )
        return said

    def __paceline__(self) -> Shown:
        """Return tables of phases, of the slowest layers, and of products that waste most."""
        phases = [
            (name, *_work(each["flops"], each["bytes"]), *_time(each["seconds"], each["share"]))
            for name, each in self.phases().items()
        ]
        layers = [
            (
                *(each.layer or ("(network)" if each.kind else f"({each.phase})"), each.kind, each.phase),
                *_work(each.flops, each.bytes_read + each.bytes_written),
                *(f"{each.intensity:.1f}", f"{each.ridge:.1f}", each.bound),
                *_time(each.seconds, each.share),
            )
            for each in sorted(self.layers, key=lambda each: -each.seconds)[: self.top]
        ]
        wasteful = sorted((each for each in self.shapes if each.seconds_lost > 0), key=lambda each: -each.seconds_lost)
        products = [(*each.row(), f"{each.seconds_lost * 1e3:.3g}") for each in wasteful[: self.top]]
        return Shown(
            title="Roofline",
            subtitle=f"{self.model} on {self.device.title}",
            blocks=[
                *self.headline(),
                Table(columns=("phase", "GFLOP", "MB", "least ms", "share"), rows=phases, caption="By phase"),
                Table(
                    columns=(
                        "layer",
                        "kind",
                        "phase",
                        "GFLOP",
                        "MB",
                        "FLOP/byte",
                        "ridge",
                        "bound",
                        "least ms",
                        "share",
                    ),
                    rows=layers,
                    caption="Layers by their least time",
                ),
                *(
                    [
                        Table(
                            columns=(*ShapeFinding.COLUMNS, "lost ms"),
                            rows=products,
                            caption="Matrix products whose tiles and waves waste most (predicted)",
                        )
                    ]
                    if products
                    else []
                ),
                *self.remarks(),
            ],
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        low = self.low_intensity
        return {
            "recipe": self.recipe,
            "model": self.model,
            "device": _device_json(self.device, self.precision, self.ridge),
            "precision": self.precision,
            "micro_batch_size": self.micro_batch,
            "micro_batches_per_step": self.micro_batches,
            "flops": self.found.flops(),
            "model_flops": self.found.model_flops,
            "model_flops_per_sample": self.found.model_flops / self.micro_batch,
            "bytes": self.found.bytes_moved,
            "least_seconds": self.least_seconds,
            "products_seconds": self.products_seconds,
            "arithmetic_seconds": self.arithmetic_seconds,
            "most_samples_per_second": self.micro_batch / self.least_seconds,
            "best_mfu": self.best_mfu,
            "best_fused_mfu": self.best_fused_mfu,
            "phases": self.phases(),
            "layers": [asdict(each) for each in self.layers],
            "shapes": [each.to_json() for each in self.shapes],
            "low_intensity": None if low is None else asdict(low),
            "uncounted": [asdict(each) for each in self.uncounted],
            "notices": list(self.notices),
        }


def _work(flops: float, moved: float) -> tuple[str, str]:
    return f"{flops / 1e9:,.2f}", f"{moved / 1e6:,.1f}"


def _time(seconds: float, share: float) -> tuple[str, str]:
    return f"{seconds * 1e3:.3g}", f"{share:.1%}"


def _device_json(device: Device, precision: str, ridge: float) -> dict[str, Any]:
    return {
        "name": device.name,
        "title": device.title,
        "peak_flops_per_second": device.peak(precision),
        "bytes_per_second": device.bytes_per_second,
        "ridge_flop_per_byte": ridge,
        "multiprocessors": device.multiprocessors,
        "source": device.source,
    }


def _of_low_intensity(low: LowIntensity, ridge: float) -> str:
    names = low.layers[0] + ", …" * (len(low.layers) > 1)
    return (
        f"{len(low.layers)} depthwise or narrowly grouped convolution{'s' * (len(low.layers) > 1)} ({names}): "
        f"{low.intensity:.1f} FLOP/byte against a ridge of {ridge:.1f}, {low.flops_share:.1%} of the FLOPs and "
        f"{low.seconds_share:.1%} of the least time. Their memory is what takes it; a larger batch does not help."
    )
