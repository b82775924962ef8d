"""Does the run use the device's fast arithmetic: precision, memory format, the fastest kernels?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from paceline_advisor.doctor.findings import Advice, Finding, Keeps
from paceline_advisor.doctor.layers import BYTES, Layer
from paceline_advisor.doctor.sources import AMP, CONVOLUTION, OWN, TUNING
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
