"""Checks of computation: precision, memory format, kernels, and the sizes of the network's layers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from paceline.plugins.references import is_ours
from paceline_advisor import named
from paceline_advisor.doctor.anatomy import BYTES, Layer
from paceline_advisor.doctor.checked_run import CheckedRun, CheckResult, Found, check
from paceline_advisor.doctor.findings import (
    AMP,
    CONVOLUTION,
    LINEAR,
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
_TILE = 64


@check(
    why="Matrix units multiply 16-bit numbers several times as fast, and half as many bytes are moved.",
    source=AMP,
    keeps="rounding",
    expected="1.5 to 3 times as fast; sums and weights stay fp32",
    speedup=(1.5, 3.0),
)
def precision(subject: CheckedRun) -> Found:
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
def slow_precision(subject: CheckedRun) -> Found:
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
def channels_last(subject: CheckedRun) -> Found:
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
def layout_lost(subject: CheckedRun) -> Found:
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
def autotune_off(subject: CheckedRun) -> Found:
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
def unfused_optimizer(subject: CheckedRun) -> Found:
    """The optimizer updates the weights one by one."""
    options = subject.recipe.optimizer.options
    if options.get("foreach") is not False:
        return None
    remaining = {key: value for key, value in options.items() if key != "foreach"}
    evidence = f"optimizer.options={{foreach: false}} with {subject.recipe.optimizer.name}"
    return CheckResult(evidence, overrides={"optimizer.options": remaining or None})


@check(why="The network's layers are large enough for several cores.", advice="parallel.threads=auto", keeps="rounding")
def threads(subject: CheckedRun) -> Found:
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
    """Whether, on a CPU, one call of a layer computes little for a micro-batch on average."""
    total = sum(layer.flops for layer in subject.layers) * subject.plan.micro_batch_size
    calls = max(1, sum(layer.calls for layer in subject.layers))
    return not subject.target.is_gpu and total / calls < _SMALL_ON_CPU


@check(
    why="BatchNorm subtracts the mean of each channel, and a bias with it; its gradient is zero but for rounding.",
    advice="bias=False in these layers; the norm's own shift takes its place",
    keeps="rounding",
    expected="up to 1.05 times as fast on a GPU: one sum fewer in each backward pass; on a CPU no gain was measured",
    speedup=(1.01, 1.05),
)
def bias_before_batchnorm(subject: CheckedRun) -> Found:
    """A bias that a following BatchNorm cancels."""
    biased = subject.anatomy.biased
    if not biased:
        return None
    pairs = named([f"{layer} before {norm}" for layer, norm in biased.items()])
    evidence = f"{len(biased)} layer{'s' * (len(biased) > 1)} with a bias that a BatchNorm follows: {pairs}"
    return CheckResult(evidence, places=subject.anatomy.class_counts, layers=tuple(biased))


# ------------------------------------------------------------------------------------------------ sizes of layers


# Other sizes make another network, and the gain is predicted, since the device may not be here.
@check(
    keeps="training",
    predicted=True,
    source=f"{LINEAR}; {CONVOLUTION}",
    expected="predicted: up to 2 times as fast where libraries do not pad, less where they do",
    speedup=(1.1, 2.0),
)
def dimension_alignment(subject: CheckedRun) -> Found:
    """Sizes that matrix units cannot use without padding."""
    multiples = subject.target.multiples(subject.products)
    if multiples is None:
        return None
    unit, best = multiples
    unaligned = list(_unaligned(subject, unit))
    share = subject.share(lambda layer: layer in unaligned)
    if share < _MUCH:
        return None
    sizes = [size for size in (unaligned[0].inputs, unaligned[0].outputs) if size % unit]
    example = ", ".join(f"{size} to {-(-size // unit) * unit}" for size in dict.fromkeys(sizes)) or "groups too"
    by_work = sorted(unaligned, key=lambda layer: -layer.flops)
    heaviest = named([f"{layer.name} {layer.shape}" for layer in by_work], 3)
    return CheckResult(
        f"{len(unaligned)} of {len(subject.layers)} layers, {share:.0%} of their FLOPs, have sizes that are not "
        f"multiples of {unit} ({subject.products}): {heaviest}",
        why=f"Matrix units take sizes that divide by {unit} for {subject.products}, on an A100 and later best by {best}"
        "; others are padded, or computed without them.",
        advice=f"round widths to a multiple of {best if best <= _TILE else unit}, or of {unit}; {example}",
        layers=tuple(layer.name for layer in unaligned),
    )


@check(
    why="Recurrent operations can be parallelised, and cuDNN's implementations do: one call for a sequence.",
    source=RECURRENT,
    advice="nn.LSTM or nn.GRU over the sequence instead of their cells",
    keeps="rounding",
    expected="2 to 10 times as fast for these layers",
    speedup=(1.5, 4.0),
)
def recurrent_cells(subject: CheckedRun) -> Found:
    """Recurrences that are called step by step in Python."""
    cells = [layer for layer in subject.layers if layer.kind == "recurrent cell" and layer.calls > 1]
    shown = named([f"{layer.name} {layer.calls} times" for layer in cells])
    evidence = f"cells called one time step after the other: {shown}"
    return CheckResult(evidence, layers=tuple(layer.name for layer in cells)) if cells else None


def _unaligned(subject: CheckedRun, unit: int) -> Iterator[Layer]:
    """Yield layers with a size that ``unit`` does not divide.

    Recurrent layers, and a first convolution that reads images of at most 4 channels, are left out.
    """
    found = [layer for layer in subject.layers if layer.kind in ("linear", "convolution")]
    first = next((layer for layer in found if layer.kind == "convolution"), None)
    for layer in found:
        sizes = (
            (layer.outputs,) if layer.is_depthwise else (layer.inputs // layer.groups, layer.outputs // layer.groups)
        )
        if (layer is not first or layer.inputs > 4) and any(size % unit for size in sizes):
            yield layer
