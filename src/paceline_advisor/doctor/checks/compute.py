"""Checks of computation: precision, memory format, kernels, and the sizes of the network's layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from paceline.references import is_ours
from paceline_advisor.doctor.anatomy import BYTES, Layer
from paceline_advisor.doctor.checked_run import CheckedRun, CheckResult, check, named
from paceline_advisor.doctor.findings import (
    AMP,
    CONVOLUTION,
    INTENSITY,
    LINEAR,
    MEMORY_LIMITED,
    OWN,
    RECURRENT,
    TUNING,
    Keeps,
)
from paceline_advisor.formulas.parallel_step import KERNEL_SECONDS

# On a CPU, converting its dtype or starting threads takes about as long as a layer with fewer FLOPs.
_SMALL_ON_CPU = 1e8
# On a GPU, the casts of another precision use up a smaller gain than this.
_WORTH_IT = 1.1
_MUCH = 0.05
_MOST = 0.5
_TILE = 64
_COMPUTE_BOUND = {"batch": 128, "hidden": 256}


@check(
    why="Matrix units multiply 16-bit numbers several times as fast, and half as many bytes are moved.",
    source=AMP,
    keeps="rounding",
    expected="1.5 to 3 times as fast; sums and weights stay fp32",
    speedup=(1.5, 3.0),
)
def precision(subject: CheckedRun) -> CheckResult | None:
    """Matrices are multiplied in fp32, although the device has matrix units for 16 bits."""
    plan, target = subject.plan, subject.target
    faster = next((each for each in ("bf16", "fp16") if target.has(each)), None)
    if plan.precision != "fp32" or faster is None or _too_small(subject):
        return None
    if not target.is_gpu and any(layer.is_depthwise for layer in subject.layers):
        return None  # CPUs compute these faster in fp32, or train.precision=auto takes bf16
    is_own = not is_ours(str(plan.data["task"]))  # `auto` is then fp32
    setting, rates = "auto" if faster == "bf16" and not is_own else faster, ""
    if target.device is not None:
        fast, slow = target.device.peak(faster), target.device.peak(subject.products)
        if fast and slow:
            rates = f": {target.device.title} has {fast / 1e12:g} TFLOP/s in {faster}, {slow / 1e12:g} in "
            rates += subject.products
    advice = f"train.precision={setting} ({faster})"
    if target.has("tf32") and plan.float32_matmul not in ("high", "medium"):
        advice += "; or, nearer to fp32, train.float32_matmul=high (TF32)"
    evidence = f"train.precision={subject.recipe.train.precision} resolves to fp32{rates}"
    result = CheckResult(evidence, advice=advice, overrides={"train.precision": setting})
    best_speedup = _most_gained(subject, faster)
    if best_speedup < _WORTH_IT:
        result = result.updated(severity="notice")
    if best_speedup < 1.5:
        expectation = (
            f"predicted: at most {best_speedup:.2f} times as fast: layers end about as soon as the next can be launched"
        )
        result = result.updated(expected=expectation, speedup=(1.0, best_speedup))
    return result


def _most_gained(subject: CheckedRun, faster: str) -> float:
    """Return the possible speedup of the layers' forward pass in another precision; infinite if unknown.

    A layer takes the longest of its compute time, its memory traffic and its launch.
    """
    device, current = subject.target.device, subject.products
    if device is None or not subject.layers:
        return math.inf
    samples = subject.plan.micro_batch_size

    def seconds(layer: Layer, precision: str) -> float:
        flops = layer.flops * samples
        bytes_moved = flops / layer.intensity(samples, BYTES[precision]) if flops else 0.0
        peak = device.peak(precision) or math.inf
        return max(flops / peak, bytes_moved / device.bytes_per_second, KERNEL_SECONDS * layer.calls)

    times = {each: sum(seconds(layer, each) for layer in subject.layers) for each in (current, faster)}
    return times[current] / times[faster]


@check(
    why="A device emulates precisions it has no units for, slower than fp32.",
    source=OWN,
    keeps="rounding",
    expected="2 to 5 times as fast",
    speedup=(2.0, 5.0),
)
def slow_precision(subject: CheckedRun) -> CheckResult | None:
    """bf16 on a device without units for it."""
    machine = subject.target.machine
    if subject.plan.precision != "bf16" or machine.fast_bf16:
        return None
    better = "fp16" if subject.target.has("fp16") else "auto"
    evidence = f"train.precision=bf16, and {machine.reasons.get('fast_bf16', 'the device has no bf16 matrix products')}"
    return CheckResult(evidence, advice=f"train.precision={better}", overrides={"train.precision": better})


@check(
    why="The kernels work on NHWC; images and filters in NCHW are transposed before and after.",
    source=f"{CONVOLUTION}; {TUNING}",
    advice="model.channels_last=auto",
    overrides={"model.channels_last": "auto"},
    keeps="rounding",
    expected="1.05 to 1.35 times as fast on a GPU, more on a CPU",
    speedup=(1.05, 1.5),
)
def channels_last(subject: CheckedRun) -> CheckResult | None:
    """Convolutions in channels-first memory format."""
    if subject.plan.channels_last or subject.target.kind not in ("cpu", "cuda", "xpu"):
        return None
    share = subject.share(lambda layer: layer.kind == "convolution")
    count = sum(layer.kind == "convolution" for layer in subject.layers)
    evidence = f"model.channels_last=false, and {count} convolutions have {share:.0%} of the FLOPs"
    return CheckResult(evidence) if share > 0.5 else None


@check(
    why="Something before them (contiguous(), view, a permuted tensor) copies the images into another layout.",
    source=f"{CONVOLUTION}; {TUNING}",
    advice="leave the layout: reshape instead of contiguous().view, and no permute",
    keeps="rounding",
    expected="1.05 to 1.35 times as fast on a GPU, more on a CPU",
    speedup=(1.05, 1.4),
)
def layout_lost(subject: CheckedRun) -> CheckResult | None:
    """The batch is channels-last, and a part of the network changes its layout."""
    converted = subject.anatomy.not_channels_last
    count = len({layer.name for layer in subject.layers if layer.kind == "convolution"})
    share = subject.share(lambda layer: layer.name in converted)
    if not subject.plan.channels_last or not subject.convolutional or share < 0.1:
        return None
    return CheckResult(
        f"{len(converted)} of {count} convolutions, {share:.0%} of the FLOPs, were given images that are not "
        "channels-last, although the batch was",
        layers=tuple(converted),
    )


@check(
    why="Paceline lets cuDNN time its kernels for each shape and take the fastest; this prevents it (cudnn.benchmark).",
    source=f"{TUNING}; {CONVOLUTION}",
    advice="remove it from your code",
    keeps="rounding",
    expected="1.05 to 1.3 times as fast for convolutions",
    speedup=(1.05, 1.3),
)
def autotune_off(subject: CheckedRun) -> CheckResult | None:
    """cuDNN may not choose its fastest kernels."""
    recipe, states = subject.recipe, subject.calls.states
    if subject.target.kind != "cuda" or not subject.convolutional:
        return None
    keeps: Keeps = "training" if recipe.parallel.exact and not recipe.train.deterministic else "rounding"
    key = "train.deterministic" if keeps == "rounding" else "parallel.exact"
    places = tuple(place for place in states.values() if place is not None)
    if recipe.train.deterministic or recipe.parallel.exact:
        return CheckResult(
            f"{key}=true",
            severity="notice",
            advice="leave it out, unless results must be bit-identical",
            overrides={key: False},
            keeps=keeps,
            places=places,
        )
    return CheckResult(", ".join(states), places=places) if states else None


@check(
    why="One kernel for each weight and operation, where few could update all of them.",
    advice="leave out foreach: torch then updates many weights at once, fused on CUDA",
    keeps="rounding",
    expected="the optimizer's part of the step, up to several times as fast",
    speedup=(1.0, 1.2),
)
def unfused_optimizer(subject: CheckedRun) -> CheckResult | None:
    """The optimizer updates the weights one by one."""
    options = subject.recipe.optimizer.options
    if options.get("foreach") is not False:
        return None
    remaining = {key: value for key, value in options.items() if key != "foreach"}
    evidence = f"optimizer.options={{foreach: false}} with {subject.recipe.optimizer.name}"
    return CheckResult(evidence, overrides={"optimizer.options": remaining or None})


@check(why="The network's layers are large enough for several cores.", advice="parallel.threads=auto", keeps="rounding")
def threads(subject: CheckedRun) -> CheckResult | None:
    """A CPU uses fewer cores than it has."""
    plan, setting, workers = subject.plan, subject.recipe.parallel.threads, subject.plan.data.get("workers")
    cores, threads_used = subject.target.machine.cores // plan.local_world_size, plan.threads_per_process
    if subject.target.is_gpu or subject.recipe.parallel.exact or _too_small(subject) or threads_used >= cores:
        return None
    if isinstance(workers, int) and threads_used + workers >= cores:
        return None  # the others load data
    found = CheckResult(
        f"parallel.threads={setting}: {threads_used} of {cores} cores compute",
        overrides={"parallel.threads": "auto"},
        expected=f"up to {cores / threads_used:.2g} times as fast",
        speedup=(1.2, cores / threads_used),
    )
    if setting != "auto":
        return found
    return found.updated(
        evidence=f"OMP_NUM_THREADS: {threads_used} of {cores} cores compute",
        advice="unset OMP_NUM_THREADS, or give parallel.threads",
        overrides={"parallel.threads": cores},
    )


def _too_small(subject: CheckedRun) -> bool:
    return not subject.target.is_gpu and subject.flops_per_layer < _SMALL_ON_CPU


@check(
    why="BatchNorm subtracts the mean of each channel, and a bias with it; its gradient is zero but for rounding.",
    advice="bias=False in these layers; the norm's own shift takes its place",
    keeps="rounding",
    expected="up to 1.05 times as fast on a GPU: one sum fewer in each backward pass; on a CPU no gain was measured",
    speedup=(1.01, 1.05),
)
def bias_before_batchnorm(subject: CheckedRun) -> CheckResult | None:
    """A bias that a following BatchNorm cancels."""
    biased = subject.anatomy.biased
    if not biased:
        return None
    pairs = named([f"{layer} before {norm}" for layer, norm in biased.items()])
    evidence = f"{len(biased)} layer{'s' * (len(biased) > 1)} with a bias that a BatchNorm follows: {pairs}"
    return CheckResult(evidence, places=subject.anatomy.class_counts, layers=tuple(biased))


# ------------------------------------------------------------------------------------------------ sizes of layers

# Other sizes make another network, and the gain is predicted, since the device may not be here.
prediction = partial(check, keeps="training", predicted=True)


@prediction(
    source=f"{LINEAR}; {CONVOLUTION}",
    expected="predicted: up to 2 times as fast where libraries do not pad, less where they do",
    speedup=(1.1, 2.0),
)
def dimension_alignment(subject: CheckedRun) -> CheckResult | None:
    """Sizes that matrix units cannot use without padding."""
    multiples = subject.target.multiples(subject.products)
    if multiples is None:
        return None
    unit, best = multiples
    unaligned = [layer for layer in _inner(subject) if _divisor_fails(layer, unit)]
    share = _share(subject, unaligned)
    if share < _MUCH:
        return None
    sizes = [size for size in (unaligned[0].inputs, unaligned[0].outputs) if size % unit]
    example = ", ".join(f"{size} to {-(-size // unit) * unit}" for size in dict.fromkeys(sizes)) or "groups too"
    return CheckResult(
        f"{len(unaligned)} of {len(subject.layers)} layers, {share:.0%} of their FLOPs, have sizes that are not "
        f"multiples of {unit} ({subject.products}): {_heaviest(unaligned)}",
        why=f"Matrix units take sizes that divide by {unit} for {subject.products}, on an A100 and later best by {best}"
        "; others are padded, or computed without them.",
        advice=f"round widths to a multiple of {best if best <= _TILE else unit}, or of {unit}; {example}",
        layers=tuple(layer.name for layer in unaligned),
    )


@prediction(
    source=LINEAR,
    expected="predicted: up to 2 times as fast where libraries do not pad, less where they do",
    speedup=(1.05, 2.0),
)
def batch_alignment(subject: CheckedRun) -> CheckResult | None:
    """A batch size that matrix units cannot use without padding, where only the batch forms rows."""
    multiples, batch = subject.target.multiples(subject.products), subject.plan.micro_batch_size
    linear_share = subject.share(lambda layer: layer.kind == "linear" and layer.rows == 1)
    if multiples is None or batch % multiples[0] == 0 or linear_share < _MOST:
        return None
    unit = multiples[0]
    return CheckResult(
        f"a micro-batch of {batch} is not a multiple of {unit} ({subject.products}), and linear layers, whose rows are "
        f"samples, have {linear_share:.0%} of the FLOPs",
        why=f"Matrix units take sizes that divide by {unit} for {subject.products}; others are padded.",
        advice=f"micro-batches in multiples of {unit}, ideally of {_TILE} to 256",
    )


@prediction(
    severity="notice",
    why=f"Products are cut into tiles of {_TILE} to 256, which sizes that divide by {_TILE}, ideally 256, fill.",
    source=f"{LINEAR}; {CONVOLUTION}",
    advice=f"widths in multiples of {_TILE}, ideally 256",
    expected="predicted: up to 1.3 times as fast",
    speedup=(1.0, 1.3),
)
def tile_alignment(subject: CheckedRun) -> CheckResult | None:
    """Sizes that leave the best tiles partly empty."""
    if subject.target.multiples(subject.products) is None:
        return None
    unaligned = [layer for layer in _inner(subject) if _divisor_fails(layer, _TILE) and not layer.is_depthwise]
    share = _share(subject, unaligned)
    if share < _MOST or dimension_alignment(subject):
        return None
    return CheckResult(
        f"{len(unaligned)} of {len(subject.layers)} layers, {share:.0%} of their FLOPs, have sizes that are not "
        f"multiples of {_TILE}: {_heaviest(unaligned)}",
        layers=tuple(layer.name for layer in unaligned),
    )


@prediction(
    severity="notice",
    source=CONVOLUTION,
    advice="a stride of 2, or fewer filters in the first layer",
    expected="predicted: that layer's time, partly",
    speedup=(1.0, 1.1),
)
def first_layer_channels(subject: CheckedRun) -> CheckResult | None:
    """An expensive first convolution with few channels."""
    unit = subject.target.multiples(subject.products)
    first = next((layer for layer in subject.layers if layer.kind == "convolution"), None)
    if unit is None or first is None or first.inputs >= unit[0] or _share(subject, [first]) < 2 * _MUCH:
        return None
    if first.inputs in (3, 4) and first.stride == 2:
        return None  # padded to 4 channels, which is enough with this stride
    return CheckResult(
        f"{first.name} ({first.shape}, stride {first.stride}) has {first.inputs} input channels and "
        f"{_share(subject, [first]):.0%} of the FLOPs",
        why=f"It is padded to {unit[0]} channels, or to 4 with a stride of 2; the rest of each product is zeros.",
        layers=(first.name,),
    )


@prediction(
    severity="notice",
    why="Below that intensity the units wait for memory; a batch and width above 128 are usually above it.",
    source=f"{LINEAR}; {INTENSITY}",
    advice="larger batch.micro_size or wider layers",
    expected="predicted: time depends on bytes, not FLOPs, until sizes grow",
    speedup=(1.0, 1.5),
)
def memory_bound_layers(subject: CheckedRun) -> CheckResult | None:
    """Matrix products that are limited by memory traffic."""
    ridge, samples = subject.target.ridge(subject.products), subject.plan.micro_batch_size
    each = BYTES[subject.products]
    if ridge is None:
        return None
    memory_bound = [layer for layer in subject.layers if layer.intensity(samples, each) < ridge]
    share, most = _share(subject, memory_bound), _COMPUTE_BOUND["batch"]
    if share < _MOST:
        return None
    small = [f"a micro-batch of {samples}"] if samples <= most else []
    widths = [layer for layer in memory_bound if min(layer.inputs, layer.outputs) <= most]
    small += [f"{len(widths)} layers with {most} or fewer features on a side"] if widths else []
    found = CheckResult(
        f"{len(memory_bound)} of {len(subject.layers)} layers, {share:.0%} of their FLOPs, do fewer than the "
        f"{ridge:.0f} FLOPs a byte that keep {subject.target.machine.device_name} busy ({subject.products}): "
        + _heaviest(memory_bound, lambda layer: f"{layer.intensity(samples, each):.0f}")
        + (f"; {', '.join(small)}" if small else ""),
        layers=tuple(layer.name for layer in memory_bound),
    )
    if "model.compile" in subject.plan.unused:
        return found
    more = "; model.compile=true moves fewer bytes between them"
    return found.updated(advice=f"larger batch.micro_size or wider layers{more}")


@prediction(
    severity="notice",
    why="A filter for each channel does few operations for each number it reads: a GPU waits for memory.",
    source=f"{MEMORY_LIMITED}; {INTENSITY}",
    advice="judge by time, not by FLOPs; a network of full convolutions (timm's regnet, a resnet) is often faster for "
    "the same accuracy",
    expected="predicted: far from the device's peak",
    speedup=(1.0, 1.5),
)
def depthwise_convolutions(subject: CheckedRun) -> CheckResult | None:
    """Convolutions that filter each channel separately, as in MobileNet and EfficientNet."""
    separate = [layer for layer in subject.layers if layer.is_depthwise]
    moved = sum((layer.read + layer.written) * layer.calls for layer in subject.layers)
    share = sum((layer.read + layer.written) * layer.calls for layer in separate) / moved if moved else 0.0
    if not subject.target.is_gpu or share < 0.2:
        return None
    names = [layer.name for layer in separate]
    return CheckResult(
        f"{len(separate)} depthwise convolutions have {_share(subject, separate):.0%} of the FLOPs and {share:.0%} of "
        f"what layers read and write: {named(names)}",
        layers=tuple(names),
    )


@prediction(
    why="Each time step is one small product: sizes that divide by 8 (fp16) or 4 (TF32), a batch above 128 and a "
    "hidden size above 256 keep the device busy.",
    source=RECURRENT,
    expected="predicted: up to 2 times as fast for these layers",
    speedup=(1.0, 2.0),
)
def recurrent_sizes(subject: CheckedRun) -> CheckResult | None:
    """Recurrent layers with sizes that matrix units do not support, or with little work."""
    multiples = subject.target.multiples(subject.products)
    found = [layer for layer in subject.layers if layer.kind == "recurrent"]
    if multiples is None or not found:
        return None
    unit, batch = multiples[0], subject.plan.micro_batch_size
    unaligned = [layer for layer in found if layer.outputs % unit or layer.inputs % unit]
    small = [layer for layer in found if layer.outputs <= _COMPUTE_BOUND["hidden"]]
    problems = [f"{_heaviest(unaligned)} not a multiple of {unit}"] if unaligned else []
    problems += [f"a micro-batch of {batch} is not a multiple of {unit}"] if batch % unit else []
    problems += [f"a micro-batch of {batch}, 128 or fewer"] if batch <= _COMPUTE_BOUND["batch"] else []
    problems += [f"{_heaviest(small)}, 256 or fewer"] if small else []
    if not problems:
        return None
    return CheckResult(
        "; ".join(problems),
        severity="slows" if unaligned or batch % unit else "notice",
        advice=f"hidden sizes in multiples of {_TILE}, a batch above 128 in multiples of {unit}",
        layers=tuple(layer.name for layer in found),
    )


@check(
    why="Recurrent operations can be parallelised, and cuDNN's implementations do: one call for a sequence.",
    source=RECURRENT,
    advice="nn.LSTM or nn.GRU over the sequence instead of their cells",
    keeps="rounding",
    expected="2 to 10 times as fast for these layers",
    speedup=(1.5, 4.0),
)
def recurrent_cells(subject: CheckedRun) -> CheckResult | None:
    """Recurrences that are called step by step in Python."""
    cells = [layer for layer in subject.layers if layer.kind == "recurrent cell" and layer.calls > 1]
    shown = named([f"{layer.name} {layer.calls} times" for layer in cells])
    evidence = f"cells called one time step after the other: {shown}"
    return CheckResult(evidence, layers=tuple(layer.name for layer in cells)) if cells else None


def _inner(subject: CheckedRun) -> list[Layer]:
    """Return the layers, except recurrent ones and a first convolution that reads images of at most 4 channels."""
    found = [layer for layer in subject.layers if layer.kind in ("linear", "convolution")]
    first = next((layer for layer in found if layer.kind == "convolution"), None)
    return [layer for layer in found if layer is not first or layer.inputs > 4]


def _divisor_fails(layer: Layer, unit: int) -> bool:
    if layer.is_depthwise:
        return layer.outputs % unit != 0
    return layer.inputs // layer.groups % unit != 0 or layer.outputs // layer.groups % unit != 0


def _share(subject: CheckedRun, layers: list[Layer]) -> float:
    names = {layer.name for layer in layers}
    return subject.share(lambda layer: layer.name in names)


def _heaviest(layers: list[Layer], figure: Callable[[Layer], str] = lambda layer: layer.shape) -> str:
    """Name the layers with the most FLOPs, each with a value, by default its sizes."""
    heaviest = sorted(layers, key=lambda layer: -layer.flops)
    return named([f"{layer.name} {figure(layer)}" for layer in heaviest], 3)
