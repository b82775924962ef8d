"""Roofline of a training step: its lower time bound on a device, layer by layer."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from paceline.command import Log
from paceline.errors import RecipeError
from paceline.host.devices import Device, find_device, recognise
from paceline.host.machine import available_cores, cache_folder, cpu_name, memory_bytes
from paceline.models.ceilings import Ceilings, ceilings_of
from paceline.models.flops import PHASES, Product, StepWork, Work, WorkCounter
from paceline.pages.charts import log_axis
from paceline.pages.page import Chart, Table
from paceline.pages.shown import Shown
from paceline.parsing.files import remember
from paceline.parsing.plain_text import load_json
from paceline.parsing.units import format_bytes, format_si
from paceline.recipe.schema import Recipe
from paceline.trainer.fake_batch import with_placeholder_data
from paceline.trainer.fake_step import FakeStep, fake_step, machine_with
from paceline_advisor import Json, as_json, frozen, picked
from paceline_advisor.apply import with_values
from paceline_advisor.commands import Roofline
from paceline_advisor.formulas.network import Tiling, aligned_sizes, alignment_bytes_multiple, best_tiling, better_sizes
from paceline_advisor.memory.largest import MemoryShortage, memory_shortage
from paceline_advisor.traces import trace

_OF_LAYERS = ("forward", "dgrad", "wgrad", "recompute")


@frozen
class LayerBound:
    """A layer in one phase of a step.

    Attributes:
        layer: Its name in the network; empty for operators of the network itself, and outside of it.
        kind: Its class.
        phase: One of ``models.flops.PHASES``.
        flops: Floating-point operations of its products.
        bytes_read: Bytes that its operators must read.
        bytes_written: Bytes that they must write.
        intensity: FLOP per byte.
        ridge: FLOP per byte at which the limit changes from memory to compute.
        bound: ``compute`` or ``memory``.
        seconds: Lower bound on the time of its operators, one after another.
        share: Fraction of the whole step's time, in [0, 1].
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

    @property
    def rate(self) -> float:
        """TFLOP per second at the bound."""
        return self.flops / self.seconds / 1e12


def layer_bounds(found: StepWork, kinds: dict[str, str], ceilings: Ceilings) -> tuple[LayerBound, ...]:
    """Return every layer and phase of a step that moves data, in order."""
    whole = sum(map(ceilings.seconds, found.works)) or 1.0
    bounds = []
    for (layer, phase), works in found.by_layer().items():
        flops = sum(each.flops for each in works)
        read, written = sum(each.bytes_read for each in works), sum(each.bytes_written for each in works)
        if not (read or written or flops):
            continue
        arithmetic, seconds = sum(map(ceilings.arithmetic_seconds, works)), sum(map(ceilings.seconds, works))
        rate = ceilings.device.bytes_per_second
        # The ridge of products in several precisions lies between theirs.
        peak = flops / arithmetic if arithmetic else ceilings.peak(ceilings.precision)
        bounds.append(
            LayerBound(
                layer=layer,
                kind=kinds.get(layer, "") if phase in _OF_LAYERS else "",
                phase=phase,
                flops=flops,
                bytes_read=read,
                bytes_written=written,
                intensity=flops / (read + written) if read + written else 0.0,
                ridge=peak / rate,
                bound="compute" if arithmetic > (read + written) / rate else "memory",
                seconds=seconds,
                share=seconds / whole,
                operators=tuple(dict.fromkeys(each.operator for each in works)),
            )
        )
    return tuple(bounds)


# Bytes of a number, in precisions that matrix units support.
_BYTES = {"tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_CLEARLY = 1.1
# A narrower convolution with many groups has a dedicated kernel, without matrix units.
_NARROW = 8


@frozen
class Dimension:
    """One size of a layer that the user can choose.

    Attributes:
        name: ``inputs``, ``outputs``, ``samples``; of a convolution ``channels``, ``filters``; of attention ``head``.
        size: Its value.
        must: Divisor required for matrix units (16 bytes).
        should: Divisor for the best performance (128 bytes).
        advice: What to change, if the user can; otherwise empty.
        aligned: Whether matrix units can read it without padding.
    """

    name: str
    size: int
    must: int
    should: int
    advice: str
    aligned: bool


@frozen
class ShapeFinding:
    """One product of a layer.

    Attributes:
        layer: The layer's name.
        phase: Phase of the step.
        product: Its sizes.
        dimensions: Sizes that the layer is created with.
        tiling: Its tiling; None if it is not computed in tiles.
        better: The nearest smaller and larger n that are clearly faster, for each column.
        seconds_lost: Part of the step's lower bound that tile and wave quantization waste.
    """

    layer: str
    phase: str
    product: Product
    dimensions: tuple[Dimension, ...]
    tiling: Tiling | None
    better: tuple[int | None, int | None]
    seconds_lost: float


def shape_findings(found: StepWork, device: Device, precision_of: Callable[[Work], str]) -> Iterator[ShapeFinding]:
    """Return every product of a step's forward and backward pass.

    Args:
        found: The step.
        device: The device.
        precision_of: Returns the name of the peak that applies to an operator.
    """
    for work in found.works:
        product = work.product
        if product is None or work.phase not in ("forward", "dgrad", "wgrad"):
            continue
        precision = precision_of(work)
        has_units = device.name != "cpu" and precision in _BYTES
        tiling = None
        sizes = (product.m, product.n, product.k, device.multiprocessors, product.count)
        if device.name != "cpu" and (product.count == 1 or min(product.n, product.m) >= _NARROW):
            tiling = best_tiling(*sizes)
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
        advice = ""
        if size % must and name == "channels" and size < 4:
            advice = "pad the images to 4 channels, or leave it to the library, which pads the first layer itself"
        elif size % must:
            lower, upper = aligned_sizes(size, must)
            advice = f"{must} should divide it: {f'{lower} or ' * (lower < size)}{upper}"
        yield Dimension(name=name, size=size, must=must, should=should, advice=advice, aligned=size % must == 0)


_FEW = 8


@frozen
class LowIntensity:
    """Convolutions with few channels per group, and their cost.

    Attributes:
        layers: Their names.
        intensity: Their forward FLOP per byte.
        flops_share: Fraction of the step's FLOPs, in [0, 1].
        seconds_share: Fraction of its lower time bound, in [0, 1].
    """

    layers: tuple[str, ...]
    intensity: float
    flops_share: float
    seconds_share: float


_LAYER_COLUMNS = ("layer", "kind", "phase", "arithmetic", "moved", "FLOP/byte", "ridge", "bound", "least time", "share")
_HOVER = "%{customdata[0]}: %{x:.3g} FLOP/byte, %{customdata[1]:.1%} of the step<extra></extra>"
_PRODUCT_COLUMNS = ("layer", "phase", "m × n × k", "tile", "tiles", "waves", "wasted", "better n", "lost ms")


def _product_row(found: ShapeFinding) -> tuple[str, ...]:
    """Return the table cells of a tiled product."""
    tiling, product = found.tiling, found.product
    assert tiling is not None
    times = f" × {product.count}" if product.count > 1 else ""
    return (
        *(found.layer, found.phase, f"{product.m} × {product.n} × {product.k}{times}"),
        f"{tiling.tile[0]}×{tiling.tile[1]}",
        f"{tiling.tiles}" if tiling.splits == 1 else f"{tiling.tiles} × {tiling.splits}",
        *(str(tiling.waves), f"{tiling.waste:.0%}"),
        " or ".join(str(n) for n in found.better if n is not None) or "–",
        f"{found.seconds_lost * 1e3:.3g}",
    )


@frozen
class RooflineReport:
    """Result of the analysis; times are lower bounds for one optimizer step of one process.

    Attributes:
        recipe: The requested recipe.
        model: Name of its network.
        device: The device.
        precision: Precision of most of the computation: the name of the peak that MFU refers to.
        micro_batch: Samples of a micro-batch.
        micro_batches: Micro-batches of a step.
        found: Operators of one micro-batch's forward and backward pass, and of the update.
        layers: Results by layer.
        shapes: Results by product.
        low_intensity: Depthwise convolutions and the like; None if there are none.
        least_seconds: Lower bound on the time of one micro-batch and the update, with each operator run separately.
        products_seconds: The part of operators with products, as if all others were fused into them.
        arithmetic_seconds: Time of the model's computation only.
        notices: Notices for the user.
        top: Number of layers to show.
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
    def peak(self) -> float:
        """The device's FLOP per second in this precision."""
        return self.device.peak(self.precision) or 0.0

    @property
    def ridge(self) -> float:
        """FLOP per byte above which this precision's compute is the limit."""
        return self.peak / self.device.bytes_per_second

    @property
    def best_mfu(self) -> float:
        """The highest utilisation that the bound allows, in [0, 1], with each operator run separately."""
        return self.arithmetic_seconds / self.least_seconds if self.least_seconds else 0.0

    @property
    def best_fused_mfu(self) -> float:
        """The same if all other operators were fused into matrix products."""
        return self.arithmetic_seconds / self.products_seconds if self.products_seconds else 0.0

    def phases(self) -> dict[str, dict[str, float]]:
        """FLOPs, bytes, lower time bound and its share by phase."""
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
        """A step's totals, in sentences."""
        samples, flops = self.micro_batch, self.found.model_flops
        ceilings = (
            f"{self.model} on {self.device.title}: {format_si(self.peak, 'FLOP/s')} dense in {self.precision}, "
            f"{format_si(self.device.bytes_per_second, 'B/s')}; ridge {self.ridge:.1f} FLOP/byte."
        )
        step = (
            f"A micro-batch of {samples} samples takes {format_si(flops, 'FLOP')} of the model "
            f"({format_si(flops / samples, 'FLOP')} per sample) and moves {format_si(self.found.bytes_moved, 'B')}. "
            f"With the update it cannot take less than {format_si(self.least_seconds, 's')}: at most "
            f"{samples / self.least_seconds:,.0f} samples/s and an MFU of {self.best_mfu:.1%}, or "
            f"{self.best_fused_mfu:.1%} if all other operators were fused into matrix products."
        )
        return ceilings, f"({self.device.source}.)", step

    def remarks(self) -> tuple[str, ...]:
        """Return notable results, in sentences."""
        lines, low = list(self.notices), self.low_intensity
        if low is not None:
            several = len(low.layers) > 1
            lines.append(
                f"{len(low.layers)} depthwise or narrowly grouped convolution{'s' * several} ({low.layers[0]}"
                f"{', …' * several}): {low.intensity:.1f} FLOP/byte against a ridge of {self.ridge:.1f}, "
                f"{low.flops_share:.1%} of the FLOPs and {low.seconds_share:.1%} of the least time. Memory bounds "
                "them; a larger batch does not help."
            )
        # Layers whose sizes are not divisible, slowest first.
        seconds = {(each.layer, each.phase): each.seconds for each in self.layers}
        misaligned = [each for each in self.shapes if any(size.advice for size in each.dimensions)]
        misaligned.sort(key=lambda each: -seconds[each.layer, each.phase])
        for each in misaligned[:_FEW]:
            sizes = [f"{size.name} = {size.size} ({size.advice})" for size in each.dimensions if size.advice]
            lines.append(f"{each.layer}: {', '.join(sizes)}")
        if others := misaligned[_FEW:]:
            share = sum(seconds[each.layer, each.phase] for each in others) / self.least_seconds
            lines.append(
                f"{len(others)} more layers have sizes that do not divide; their forward passes take {share:.1%}."
            )
        lines += [
            f"{each.operator}: {each.calls} calls with {each.share:.1%} of the bytes, whose arithmetic is not counted"
            for each in self.found.uncounted
        ]
        return tuple(dict.fromkeys(lines))

    def __paceline__(self) -> Shown:
        """Return tables of phases, of the slowest layers, and of the most wasteful products."""

        def figures(flops: float, moved: float, *between: str, seconds: float, share: float) -> tuple[str, ...]:
            amounts = format_si(flops, "FLOP") if flops else "–", format_si(moved, "B")
            return *amounts, *between, format_si(seconds, "s"), f"{share:.1%}"

        phases = [
            (name, *figures(each["flops"], each["bytes"], seconds=each["seconds"], share=each["share"]))
            for name, each in self.phases().items()
        ]
        layers = []
        for layer in sorted(self.layers, key=lambda each: -each.seconds)[: self.top]:
            name = layer.layer or ("(network)" if layer.kind else f"({layer.phase})")
            moved = layer.bytes_read + layer.bytes_written
            between = f"{layer.intensity:.1f}", f"{layer.ridge:.1f}", layer.bound
            numbers = figures(layer.flops, moved, *between, seconds=layer.seconds, share=layer.share)
            layers.append((name, layer.kind, layer.phase, *numbers))
        wasteful = sorted((each for each in self.shapes if each.seconds_lost > 0), key=lambda each: -each.seconds_lost)
        products = [_product_row(each) for each in wasteful[: self.top]]
        tables = [
            Table(columns=("phase", "arithmetic", "moved", "least time", "share"), rows=phases, caption="By phase"),
            Table(columns=_LAYER_COLUMNS, rows=layers, caption="Layers by their least time"),
        ]
        if products:
            caption = "Matrix products whose tiles and waves waste most (predicted)"
            tables.append(Table(columns=_PRODUCT_COLUMNS, rows=products, caption=caption))
        return Shown(
            title="Roofline",
            subtitle=f"{self.model} on {self.device.title}",
            blocks=[*self.headline(), *tables, *self.remarks()],
            on_page=[self._chart()],
        )

    def _chart(self) -> Chart:
        """Return a chart of the device's roofline, and the layers below it by their lower time bounds."""
        layers = [each for each in self.layers if each.flops and each.intensity and each.seconds]
        reached = [self.ridge, *(each.intensity for each in layers)]
        roof = [min(reached) / 2, self.ridge, max(reached) * 2]
        limits = [min(self.peak, each * self.device.bytes_per_second) / 1e12 for each in roof]
        line = {"color": "var(--muted)", "width": 1.5}
        traces = [trace("lines", "roof", zip(roof, limits, strict=True), line=line)]
        for phase in dict.fromkeys(each.phase for each in layers):
            of_phase = [each for each in layers if each.phase == phase]
            traces.append(
                trace(
                    "markers",
                    phase,
                    [(each.intensity, each.rate) for each in of_phase],
                    customdata=[[each.layer or f"({phase})", each.share] for each in of_phase],
                    hovertemplate=_HOVER,
                    marker={"size": [6 + 30 * each.share**0.5 for each in of_phase], "opacity": 0.7},
                )
            )
        return Chart(
            title="Layers under the roof",
            traces=traces,
            layout={
                "height": 460,
                "xaxis": log_axis("FLOP/byte", roof),
                "yaxis": log_axis("TFLOP/s at most", limits),
            },
            description=(
                "The most that the device can do at each arithmetic intensity, and each layer's phases at their least "
                "times; larger points take more of the step."
            ),
            table=Table(
                columns=("layer", "phase", "FLOP/byte", "TFLOP/s at most", "share"),
                rows=[
                    (each.layer, each.phase, f"{each.intensity:.3g}", f"{each.rate:.3g}", f"{each.share:.1%}")
                    for each in sorted(layers, key=lambda each: -each.share)
                ],
                caption="Figures of this chart",
                folded=True,
            ),
        )

    def to_json(self) -> Json:
        """Return the result as JSON values."""
        device = self.device
        document = {
            **picked(self, "recipe", "model", "precision", "least_seconds", "products_seconds", "arithmetic_seconds"),
            "device": {
                **picked(device, "name", "title", "bytes_per_second", "multiprocessors", "source"),
                "peak_flops_per_second": self.peak or None,
                "ridge_flop_per_byte": self.ridge,
            },
            "micro_batch_size": self.micro_batch,
            "micro_batches_per_step": self.micro_batches,
            "flops": self.found.flops(),
            "model_flops_per_sample": self.found.model_flops / self.micro_batch,
            "bytes": self.found.bytes_moved,
            "most_samples_per_second": self.micro_batch / self.least_seconds,
            "phases": self.phases(),
            **picked(self.found, "model_flops", "uncounted"),
            **picked(self, "best_mfu", "best_fused_mfu", "layers", "shapes", "low_intensity", "notices"),
        }
        return dict(as_json(document))


_SIZE = 1536
_COPIED_BYTES = 256 * 2**20
_SECONDS = 0.35
_FEWEST = 3
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def this_cpu() -> Device:
    """Return this CPU as a device with peaks measured in a second or two; cached if possible.

    A 1,536 x 1,536 matrix product measures its compute and a copy of 256 MiB its memory. Both are what programs
    achieve, slightly below the vendor's specifications.
    """
    cores = available_cores()
    same = (cpu_name(), cores, torch.get_num_threads(), torch.__version__)
    path = cache_folder() / "roofline" / f"{hashlib.sha256(repr(same).encode()).hexdigest()[:16]}.json"
    try:
        stored = load_json(path.read_bytes())
        rates = {name: float(stored["flops_per_second"][name]) for name in _TYPES}
        rest = {"bytes_per_second": float(stored["bytes_per_second"]), "measured": str(stored["measured"])}
        found: Json = {"flops_per_second": rates, **rest}
    except (OSError, ValueError, KeyError, TypeError):  # not measured yet, or damaged
        flops = {}
        # A separate generator: random states do not change.
        numbers = torch.randn(2, _SIZE, _SIZE, generator=torch.Generator().manual_seed(0))
        for name, dtype in _TYPES.items():
            left, right = numbers.to(dtype)
            multiply = partial(torch.mm, left, right, out=torch.empty(_SIZE, _SIZE, dtype=dtype))
            flops[name] = 2 * _SIZE**3 / _least_seconds(multiply)
        source, target = torch.ones(2, _COPIED_BYTES // 4)  # the cache is not writable
        found = {
            "flops_per_second": flops,
            "bytes_per_second": 2 * _COPIED_BYTES / _least_seconds(partial(target.copy_, source)),
            "measured": time.strftime("%Y-%m-%d"),
        }
        remember(path, json.dumps(found).encode())
    how = "a matrix product of 1,536 squared, a copy of 256 MiB" + (f"; kept in {path}" if path.is_file() else "")
    return Device(
        name="cpu",
        title=f"{cpu_name()} ({cores} core{'s' * (cores > 1)})",
        memory_bytes=memory_bytes() or 0,
        bytes_per_second=found["bytes_per_second"],
        flops_per_second=MappingProxyType(found["flops_per_second"]),
        multiprocessors=cores,
        reported_as="",
        source=f"measured here on {found['measured']}: {how}",
    )


def _least_seconds(run: Callable[[], Any]) -> float:
    """Return the best of several runs; other load on the machine only adds time."""
    run()
    times: list[float] = []
    deadline = time.perf_counter() + _SECONDS
    while len(times) < _FEWEST or time.perf_counter() < deadline:
        start_time = time.perf_counter()
        run()
        times.append(time.perf_counter() - start_time)
    return min(times)


# With so many groups that a group's product is no wider than this, a convolution reads about as much as it computes.
_DEPTHWISE_WIDTH = 4


def choose(name: str | None) -> Device:
    """Return the device of this name, with ``cpu`` for this machine's CPU; without a name, the local device.

    Raises:
        RecipeError: If it is unknown.
    """
    if name is not None:
        return this_cpu() if name.lower() == "cpu" else find_device(name)
    if torch.cuda.is_available():
        here = torch.cuda.get_device_name()
        found = recognise(here)
        if found is None:
            raise RecipeError(f"device: '{here}' is not in the table of devices; name a similar one: --device NAME.")
        return found
    return this_cpu()


def roofline(options: Roofline, log: Log = lambda _: None) -> RooflineReport:
    """Compare a step of a recipe, on fake tensors, with the limits of a device.

    Raises:
        PacelineError: If the recipe cannot be planned there, or the network cannot run on fake tensors.
    """
    loaded = options.load()  # first: measuring a CPU takes seconds
    chosen = choose(options.device)
    recipe, assumed = with_placeholder_data(loaded.recipe)
    if chosen.name == "cpu":
        recipe = with_values(recipe, {"parallel.device": "cpu"})
    machine, too_large = None, ""
    if chosen.name != "cpu":
        machine = machine_with(chosen)
        log("looking for the largest micro-batch that fits")
        if (shortage := memory_shortage(recipe, machine, 1)) is not None:
            recipe, too_large = _fitting(recipe, shortage)
    with fake_step(recipe, machine=machine) as step:
        found, plan = count_step(step), step.plan
        kinds = {name: type(module).__name__ for name, module in step.network.named_modules()}
    ceilings = ceilings_of(plan, chosen, found)
    layers = layer_bounds(found, kinds, ceilings)
    return RooflineReport(
        recipe=options.recipe,
        model=recipe.model.name,
        device=chosen,
        precision=ceilings.precision,
        micro_batch=plan.micro_batch_size,
        micro_batches=plan.accumulation_steps,
        found=found,
        layers=layers,
        shapes=tuple(shape_findings(found, chosen, ceilings.precision_of)),
        low_intensity=_low_intensity(found, layers),
        least_seconds=sum(each.seconds for each in layers),
        products_seconds=sum(ceilings.seconds(each) for each in found.works if each.product or each.flops),
        arithmetic_seconds=sum(map(ceilings.arithmetic_seconds, found.model_works)),
        notices=tuple(each for each in (assumed, too_large) if each),
        top=options.top,
    )


def _fitting(recipe: Recipe, shortage: MemoryShortage) -> tuple[Recipe, str]:
    """Return a recipe whose micro-batch fits, and a sentence that says so."""
    limit = format_bytes(shortage.memory)
    if not shortage.divisor:
        return recipe, f"not even one sample fits into {limit}: paceline estimate says what saves memory"
    fitting = with_values(recipe, {"batch.micro_size": shortage.divisor})
    return fitting, (
        f"the recipe's micro-batch does not fit into {limit}, {shortage.largest:,} samples do: computed with "
        f"batch.micro_size={shortage.divisor}, which {shortage.consequence}"
    )


def count_step(step: FakeStep) -> StepWork:
    """Return the operators of one micro-batch's forward and backward pass, and of an update."""
    step.init_optimizer_state()
    with WorkCounter(step.network) as counter:
        step.backward(step.forward())
        with counter.phase("optimizer"):
            step.update()
    return counter.work


def _low_intensity(found: StepWork, layers: tuple[LayerBound, ...]) -> LowIntensity | None:
    narrow = [
        each
        for each in found.works
        if each.phase == "forward" and (product := each.product) is not None and product.kind == "convolution"
        if product.count > 1 and product.n <= _DEPTHWISE_WIDTH
    ]
    names = {each.layer for each in narrow}
    if not narrow:
        return None
    of_them = [each for each in layers if each.layer in names]
    return LowIntensity(
        layers=tuple(dict.fromkeys(each.layer for each in narrow)),
        intensity=sum(each.flops for each in narrow) / sum(each.bytes_moved for each in narrow),
        flops_share=sum(each.flops for each in of_them) / max(1, found.flops()),
        seconds_share=sum(each.share for each in of_them),
    )
