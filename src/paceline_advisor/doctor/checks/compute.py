"""Checks of arithmetic: precision, memory format, kernels, and the sizes of the network's layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from paceline_advisor.doctor.anatomy import BYTES, Layer
from paceline_advisor.doctor.findings import (
    AMP,
    CONVOLUTION,
    INTENSITY,
    LINEAR,
    MEMORY_LIMITED,
    OWN,
    RECURRENT,
    TUNING,
    Advice,
    Finding,
    Keeps,
)
from paceline_advisor.doctor.subject import Subject, named
from paceline_advisor.formulas.parallel_step import KERNEL_SECONDS

# On a CPU, a layer of fewer FLOPs takes about as long as what changing its numbers or starting threads costs.
_SMALL_ON_CPU = 1e8
# On a GPU, a change of numbers that gains less than that costs as much in casts.
_WORTH_IT = 1.1


def precision(subject: Subject) -> Iterator[Finding]:
    """Matrices are multiplied in fp32, although the device has units for 16 bits."""
    plan, target = subject.plan, subject.target
    faster = next((each for each in ("bf16", "fp16") if target.has(each)), None)
    if plan.precision != "fp32" or faster is None or _too_small(subject):
        return
    asked = "auto" if faster == "bf16" else faster
    figures = ""
    if target.device is not None:
        fast, slow = target.device.peak(faster), target.device.peak(subject.products)
        figures = (
            f": {target.device.title} has {fast / 1e12:g} TFLOP/s in {faster}, {slow / 1e12:g} in "
            if (fast and slow)
            else ""
        )
        figures += subject.products if figures else ""
    words = f"train.precision={asked} ({faster})"
    if target.has("tf32") and plan.float32_matmul not in ("high", "medium"):
        words += "; or, nearer to fp32, train.float32_matmul=high (TF32)"
    most = _most_gained(subject, faster)
    expected, speedup = "1.5 to 3 times as fast; sums and weights stay fp32", (1.5, 3.0)
    if most < speedup[0]:
        expected = f"predicted: at most {most:.2f} times as fast: layers end about as soon as the next can be launched"
        speedup = (1.0, most)
    yield Finding(
        name="precision",
        severity="slows" if most >= _WORTH_IT else "notice",
        evidence=f"train.precision={subject.recipe.train.precision} comes to fp32{figures}",
        why="Matrix units multiply 16-bit numbers several times as fast, and half as many bytes are moved.",
        source=AMP,
        advice=Advice(words=words, overrides={"train.precision": asked}, keeps="rounding"),
        expected=expected,
        speedup=speedup,
    )


def _most_gained(subject: Subject, faster: str) -> float:
    """How many times as fast the forward pass of the layers can be in other numbers; infinite if unknown.

    A layer takes the time of its arithmetic, of its memory traffic, or of launching it, whichever is most.
    """
    device, slower = subject.target.device, subject.products
    if device is None or not subject.layers:
        return math.inf
    samples = subject.plan.micro_batch_size

    def seconds(layer: Layer, precision: str) -> float:
        flops = layer.flops * samples
        moved = flops / layer.intensity(samples, BYTES[precision]) if flops else 0.0
        peak = device.peak(precision) or math.inf
        return max(flops / peak, moved / device.bytes_per_second, KERNEL_SECONDS * layer.calls)

    taken = {each: sum(seconds(layer, each) for layer in subject.layers) for each in (slower, faster)}
    return taken[slower] / taken[faster]


def slow_precision(subject: Subject) -> Iterator[Finding]:
    """bf16 on a device without units for it."""
    machine, asked = subject.target.machine, subject.plan.precision
    if asked != "bf16" or machine.fast_bf16:
        return
    better = "fp16" if subject.target.has("fp16") else "auto"
    yield Finding(
        name="slow_precision",
        severity="slows",
        evidence=f"train.precision=bf16, and {machine.reasons.get('fast_bf16', 'the device has no bf16 products')}",
        why="What a device has no units for is computed in a roundabout way, slower than fp32.",
        source=OWN,
        advice=Advice(words=f"train.precision={better}", overrides={"train.precision": better}, keeps="rounding"),
        expected="2 to 5 times as fast",
        speedup=(2.0, 5.0),
    )


def channels_last(subject: Subject) -> Iterator[Finding]:
    """Convolutions with the channel as the slowest axis but one."""
    if subject.plan.channels_last or subject.target.kind not in ("cpu", "cuda", "xpu"):
        return
    share = subject.share(lambda layer: layer.kind == "convolution")
    count = sum(layer.kind == "convolution" for layer in subject.layers)
    if share <= 0.5:
        return
    yield Finding(
        name="channels_last",
        severity="slows",
        evidence=f"model.channels_last=false, and {count} convolutions have {share:.0%} of the FLOPs",
        why="The kernels work on NHWC; images and filters in NCHW are transposed before and after.",
        source=f"{CONVOLUTION}; {TUNING}",
        advice=Advice(words="model.channels_last=auto", overrides={"model.channels_last": "auto"}, keeps="rounding"),
        expected="1.05 to 1.35 times as fast on a GPU, more on a CPU",
        speedup=(1.05, 1.5),
    )


def layout_lost(subject: Subject) -> Iterator[Finding]:
    """The batch is channels-last, and something in the network lays it out anew."""
    lost = subject.anatomy.not_channels_last
    convolutions = {layer.name: layer for layer in subject.layers if layer.kind == "convolution"}
    share = subject.share(lambda layer: layer.name in lost)
    if not subject.plan.channels_last or not subject.convolutional or share < 0.1:
        return
    yield Finding(
        name="layout_lost",
        severity="slows",
        evidence=f"{len(lost)} of {len(convolutions)} convolutions, {share:.0%} of the FLOPs, were given images that "
        "are not channels-last, although the batch was",
        why="Something before them (contiguous(), view, a permuted tensor) copies the images into another layout.",
        source=f"{CONVOLUTION}; {TUNING}",
        advice=Advice(words="leave the layout: reshape instead of contiguous().view, and no permute", keeps="rounding"),
        expected="1.05 to 1.35 times as fast on a GPU, more on a CPU",
        speedup=(1.05, 1.4),
        layers=tuple(lost),
    )


def autotune_off(subject: Subject) -> Iterator[Finding]:
    """cuDNN may not choose its fastest kernels."""
    recipe = subject.recipe
    if subject.target.kind != "cuda" or not subject.convolutional:
        return
    keeps: Keeps = "rounding"
    overrides: dict[str, Any] = {}
    said = ""
    if recipe.train.deterministic:
        said, overrides = "train.deterministic=true", {"train.deterministic": False}
    elif recipe.parallel.exact:
        said, overrides, keeps = "parallel.exact=true", {"parallel.exact": False}, "training"
    states = {name: place for name, place in subject.behaviour.states.items() if not said}
    if not said and not states:
        return
    yield _autotune(said or ", ".join(states), subject, overrides, keeps)


def _autotune(said: str, subject: Subject, overrides: dict[str, Any], keeps: Keeps) -> Finding:
    is_asked = bool(overrides)
    return Finding(
        name="autotune_off",
        severity="notice" if is_asked else "slows",
        evidence=said,
        why="Paceline lets cuDNN time its kernels for each shape and take the fastest; this forbids "
        "it (cudnn.benchmark).",
        source=f"{TUNING}; {CONVOLUTION}",
        advice=Advice(
            words="leave it out, unless bits must repeat" if is_asked else "take it out of your code",
            overrides=overrides,
            keeps=keeps,
        ),
        expected="1.05 to 1.3 times as fast for convolutions",
        speedup=(1.05, 1.3),
        places=tuple(place for place in subject.behaviour.states.values() if place is not None),
    )


def unfused_optimizer(subject: Subject) -> Iterator[Finding]:
    """The optimizer goes through the weights one by one."""
    options = subject.recipe.optimizer.options
    if options.get("foreach") is not False:
        return
    left = {key: value for key, value in options.items() if key != "foreach"}
    yield Finding(
        name="unfused_optimizer",
        severity="slows",
        evidence=f"optimizer.options={{foreach: false}} with {subject.recipe.optimizer.name}",
        why="One kernel for each weight and operation, where few could update all of them.",
        source=TUNING,
        advice=Advice(
            words="leave out foreach: torch then updates many weights at once, fused on CUDA",
            overrides={"optimizer.options": left or None},
            keeps="rounding",
        ),
        expected="the optimizer's part of the step, up to several times as fast",
        speedup=(1.0, 1.2),
    )


def threads(subject: Subject) -> Iterator[Finding]:
    """A CPU computes on fewer cores than there are."""
    plan = subject.plan
    cores = subject.target.machine.cores // plan.local_world_size
    if subject.target.is_gpu or subject.recipe.parallel.exact or _too_small(subject):
        return
    if plan.threads_per_process >= cores:
        return
    workers = plan.data.get("workers")
    if isinstance(workers, int) and plan.threads_per_process + workers >= cores:
        return  # the others read
    asked = subject.recipe.parallel.threads
    said = f"parallel.threads={asked}" if asked != "auto" else "OMP_NUM_THREADS"
    yield Finding(
        name="threads",
        severity="slows",
        evidence=f"{said}: {plan.threads_per_process} of {cores} cores compute",
        why="The network's layers are large enough to be shared among cores.",
        source=TUNING,
        advice=Advice(
            words="parallel.threads=auto" if asked != "auto" else "unset OMP_NUM_THREADS, or give parallel.threads",
            overrides={"parallel.threads": "auto" if asked != "auto" else cores},
            keeps="rounding",
        ),
        expected=f"up to {cores / plan.threads_per_process:.2g} times as fast",
        speedup=(1.2, cores / plan.threads_per_process),
    )


def _too_small(subject: Subject) -> bool:
    return not subject.target.is_gpu and subject.flops_per_layer < _SMALL_ON_CPU


def bias_before_batchnorm(subject: Subject) -> Iterator[Finding]:
    """A bias that the next module takes away again."""
    biased = subject.anatomy.biased
    if not biased:
        return
    shown = [f"{layer} before {norm}" for layer, norm in biased.items()]
    yield Finding(
        name="bias_before_batchnorm",
        severity="slows",
        evidence=f"{len(biased)} layer{'s' * (len(biased) > 1)} with a bias that a BatchNorm follows: {named(shown)}",
        why="BatchNorm subtracts the mean of each channel, and a bias with it; its gradient is zero but for rounding.",
        source=TUNING,
        advice=Advice(words="bias=False in these layers; the norm's own shift takes its place", keeps="rounding"),
        expected="up to 1.05 times as fast on a GPU: one sum less in each backward pass; on a CPU no gain was measured",
        speedup=(1.01, 1.05),
        places=subject.anatomy.holders,
        layers=tuple(biased),
    )


_MUCH = 0.05
_MOST = 0.5
_TILE = 64
_COMPUTE_BOUND = {"batch": 128, "hidden": 256}


def alignment(subject: Subject) -> Iterator[Finding]:
    """Sizes that matrix units cannot take as they are."""
    multiples = subject.target.multiples(subject.products)
    if multiples is None:
        return
    unit, best = multiples
    odd = [layer for layer in _inner(subject) if _divisor_fails(layer, unit)]
    share = _share(subject, odd)
    if share < _MUCH:
        return
    yield Finding(
        name="dimension_alignment",
        severity="slows",
        evidence=f"{len(odd)} of {len(subject.layers)} layers, {share:.0%} of their FLOPs, have sizes that are no "
        f"multiple of {unit} ({subject.products}): {_shapes(odd)}",
        why=f"Matrix units take sizes that divide by {unit} for {subject.products}, on an A100 and later best by {best}"
        "; others are padded, or computed without them.",
        source=f"{LINEAR}; {CONVOLUTION}",
        advice=Advice(
            words=f"round widths to a multiple of {best if best <= _TILE else unit}, or of {unit}; "
            f"{_example(odd[0], unit)}",
            keeps="training",
        ),
        expected="predicted: up to 2 times as fast where libraries do not pad, less where they do",
        speedup=(1.1, 2.0),
        layers=tuple(layer.name for layer in odd),
        predicted=True,
    )


def batch_alignment(subject: Subject) -> Iterator[Finding]:
    """A batch that matrix units cannot take as it is, where nothing but the batch makes rows."""
    multiples, batch = subject.target.multiples(subject.products), subject.plan.micro_batch_size
    flat = subject.share(lambda layer: layer.kind == "linear" and layer.rows == 1)
    if multiples is None or batch % multiples[0] == 0 or flat < _MOST:
        return
    unit = multiples[0]
    yield Finding(
        name="batch_alignment",
        severity="slows",
        evidence=f"a micro-batch of {batch} is no multiple of {unit} ({subject.products}), and linear layers, whose "
        f"rows are samples, have {flat:.0%} of the FLOPs",
        why=f"Matrix units take sizes that divide by {unit} for {subject.products}; others are padded.",
        source=LINEAR,
        advice=Advice(words=f"micro-batches in multiples of {unit}, ideally of {_TILE} to 256", keeps="training"),
        expected="predicted: up to 2 times as fast where libraries do not pad, less where they do",
        speedup=(1.05, 2.0),
        predicted=True,
    )


def tiles(subject: Subject) -> Iterator[Finding]:
    """Sizes that leave the best tiles partly empty."""
    multiples = subject.target.multiples(subject.products)
    if multiples is None:
        return
    rough = [layer for layer in _inner(subject) if _divisor_fails(layer, _TILE) and not layer.is_depthwise]
    share = _share(subject, rough)
    if share < _MOST or any(True for _ in alignment(subject)):
        return
    yield Finding(
        name="tile_alignment",
        severity="notice",
        evidence=f"{len(rough)} of {len(subject.layers)} layers, {share:.0%} of their FLOPs, have sizes that are no "
        f"multiple of {_TILE}: {_shapes(rough)}",
        why=f"Products are cut into tiles of {_TILE} to 256, which sizes that divide by {_TILE}, ideally 256, fill.",
        source=f"{LINEAR}; {CONVOLUTION}",
        advice=Advice(words=f"widths in multiples of {_TILE}, ideally 256", keeps="training"),
        expected="predicted: up to 1.3 times as fast",
        speedup=(1.0, 1.3),
        layers=tuple(layer.name for layer in rough),
        predicted=True,
    )


def first_layer(subject: Subject) -> Iterator[Finding]:
    """A first convolution of few channels that costs much."""
    unit = subject.target.multiples(subject.products)
    first = next((layer for layer in subject.layers if layer.kind == "convolution"), None)
    if unit is None or first is None or first.inputs >= unit[0] or _share(subject, [first]) < 2 * _MUCH:
        return
    if first.inputs in (3, 4) and first.stride == 2:
        return  # padded to 4 channels, which is enough with this stride
    yield Finding(
        name="first_layer_channels",
        severity="notice",
        evidence=f"{first.name} ({first.shape}, stride {first.stride}) has {first.inputs} input channels and "
        f"{_share(subject, [first]):.0%} of the FLOPs",
        why=f"It is padded to {unit[0]} channels, or to 4 with a stride of 2; the rest of each product is zeros.",
        source=CONVOLUTION,
        advice=Advice(words="a stride of 2, or fewer filters in the first layer", keeps="training"),
        expected="predicted: that layer's time, partly",
        speedup=(1.0, 1.1),
        layers=(first.name,),
        predicted=True,
    )


def memory_bound(subject: Subject) -> Iterator[Finding]:
    """Matrix products that wait for memory."""
    ridge = subject.target.ridge(subject.products)
    samples, each = subject.plan.micro_batch_size, BYTES[subject.products]
    if ridge is None:
        return
    bound = [layer for layer in subject.layers if layer.intensity(samples, each) < ridge]
    share = _share(subject, bound)
    if share < _MOST:
        return
    small = [f"a micro-batch of {samples}"] if samples <= _COMPUTE_BOUND["batch"] else []
    widths = [layer for layer in bound if min(layer.inputs, layer.outputs) <= _COMPUTE_BOUND["batch"]]
    small += [f"{len(widths)} layers with {_COMPUTE_BOUND['batch']} or fewer features on a side"] if widths else []
    title = subject.target.machine.device_name
    yield Finding(
        name="memory_bound_layers",
        severity="notice",
        evidence=f"{len(bound)} of {len(subject.layers)} layers, {share:.0%} of their FLOPs, do fewer than the "
        f"{ridge:.0f} FLOPs a byte that keep {title} busy ({subject.products}): {_intensities(bound, samples, each)}"
        f"{'; ' + ', '.join(small) if small else ''}",
        why="Below that intensity the units wait for memory; batch and width above 128 usually are above it.",
        source=f"{LINEAR}; {INTENSITY}",
        advice=Advice(
            words="larger batch.micro_size or wider layers"
            + "; model.compile=true moves fewer bytes between them" * ("model.compile" not in subject.plan.unused),
            keeps="training",
        ),
        expected="predicted: time goes with bytes, not with FLOPs, until sizes grow",
        speedup=(1.0, 1.5),
        layers=tuple(layer.name for layer in bound),
        predicted=True,
    )


def depthwise(subject: Subject) -> Iterator[Finding]:
    """Convolutions that filter each channel by itself, as MobileNet's and EfficientNet's."""
    separate = [layer for layer in subject.layers if layer.is_depthwise]
    moved = sum((layer.read + layer.written) * layer.calls for layer in subject.layers)
    share = sum((layer.read + layer.written) * layer.calls for layer in separate) / moved if moved else 0.0
    if not subject.target.is_gpu or share < 0.2:
        return
    yield Finding(
        name="depthwise_convolutions",
        severity="notice",
        evidence=f"{len(separate)} depthwise convolutions have {_share(subject, separate):.0%} of the FLOPs and "
        f"{share:.0%} of what layers read and write: {named([layer.name for layer in separate])}",
        why="A filter for each channel does few operations for each number it reads: a GPU waits for memory.",
        source=f"{MEMORY_LIMITED}; {INTENSITY}",
        advice=Advice(
            words="judge by time, not by FLOPs; a network of full convolutions (timm's regnet, a resnet) is often "
            "faster for the same accuracy",
            keeps="training",
        ),
        expected="predicted: far from the device's peak",
        speedup=(1.0, 1.5),
        layers=tuple(layer.name for layer in separate),
        predicted=True,
    )


def recurrent_sizes(subject: Subject) -> Iterator[Finding]:
    """Recurrent layers of sizes that matrix units do not take, or of little work."""
    multiples = subject.target.multiples(subject.products)
    found = [layer for layer in subject.layers if layer.kind == "recurrent"]
    if multiples is None or not found:
        return
    unit, batch = multiples[0], subject.plan.micro_batch_size
    odd = [layer for layer in found if layer.outputs % unit or layer.inputs % unit]
    small = [layer for layer in found if layer.outputs <= _COMPUTE_BOUND["hidden"]]
    said = [f"{_shapes(odd)} no multiple of {unit}"] if odd else []
    said += [f"a micro-batch of {batch} is no multiple of {unit}"] if batch % unit else []
    said += [f"a micro-batch of {batch}, 128 or fewer"] if batch <= _COMPUTE_BOUND["batch"] else []
    said += [f"{_shapes(small)}, 256 or fewer"] if small else []
    if not said:
        return
    yield Finding(
        name="recurrent_sizes",
        severity="slows" if odd or batch % unit else "notice",
        evidence="; ".join(said),
        why="Each time step is one small product: sizes that divide by 8 (fp16) or 4 (TF32), a batch above 128 and a "
        "hidden size above 256 keep the device busy.",
        source=RECURRENT,
        advice=Advice(
            words=f"hidden sizes in multiples of {_TILE}, a batch above 128 in multiples of {unit}", keeps="training"
        ),
        expected="predicted: up to 2 times as fast for these layers",
        speedup=(1.0, 2.0),
        layers=tuple(layer.name for layer in found),
        predicted=True,
    )


def recurrent_cells(subject: Subject) -> Iterator[Finding]:
    """Recurrences that are called step by step in Python."""
    cells = [layer for layer in subject.layers if layer.kind == "recurrent cell" and layer.calls > 1]
    if not cells:
        return
    shown = [f"{layer.name} {layer.calls} times" for layer in cells]
    yield Finding(
        name="recurrent_cells",
        severity="slows",
        evidence=f"cells called one time step after the other: {named(shown)}",
        why="Recurrent operations can be parallelised, and cuDNN's implementations do: one call for a sequence.",
        source=RECURRENT,
        advice=Advice(words="nn.LSTM or nn.GRU over the sequence instead of their cells", keeps="rounding"),
        expected="2 to 10 times as fast for these layers",
        speedup=(1.5, 4.0),
        layers=tuple(layer.name for layer in cells),
    )


def _inner(subject: Subject) -> list[Layer]:
    """The layers but for the first convolution, whose channels are those of images, and recurrent ones."""
    found = [layer for layer in subject.layers if layer.kind in ("linear", "convolution")]
    first = next((layer for layer in found if layer.kind == "convolution"), None)
    return [layer for layer in found if layer is not first or layer.inputs > 4]


def _divisor_fails(layer: Layer, unit: int) -> bool:
    if layer.is_depthwise:
        return layer.outputs % unit != 0
    return layer.inputs // layer.groups % unit != 0 or layer.outputs // layer.groups % unit != 0


def _share(subject: Subject, layers: list[Layer]) -> float:
    names = {layer.name for layer in layers}
    return subject.share(lambda layer: layer.name in names)


def _shapes(layers: list[Layer]) -> str:
    heaviest = sorted(layers, key=lambda layer: -layer.flops)
    return named([f"{layer.name} {layer.shape}" for layer in heaviest], 3)


def _intensities(layers: list[Layer], samples: int, each: int) -> str:
    heaviest = sorted(layers, key=lambda layer: -layer.flops)
    return named([f"{layer.name} {layer.intensity(samples, each):.0f}" for layer in heaviest], 3)


def _example(layer: Layer, unit: int) -> str:
    sizes = [size for size in (layer.inputs, layer.outputs) if size % unit]
    return ", ".join(f"{size} to {-(-size // unit) * unit}" for size in dict.fromkeys(sizes)) or "groups too"
