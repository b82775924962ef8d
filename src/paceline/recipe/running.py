"""The recipe's `evaluate`, `checkpoint`, `parallel` and `telemetry` sections: what happens around the steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from paceline.recipe.fields import (
    STRICT,
    Applies,
    Auto,
    Interval,
    Length,
    Needs,
    NonNegativeInt,
    Off,
    Options,
    PositiveFloat,
    PositiveInt,
    Switch,
    Time,
    whole,
)
from paceline.units import Duration, TimeSpan

_EVALUATED = Needs(("evaluate.every",), "nothing is evaluated (evaluate.every=off)")
_HELD_OUT = Needs(("held-out samples",), "nothing is evaluated (no samples are held out)")
_BUCKETS_OF_DDP = Needs(("ddp",), "{strategy} has no buckets")
_BUCKETS = Needs(("ddp", "fsdp"), "{strategy} has no buckets")
_GRAPH_OF_DDP = Needs(("ddp",), "{strategy} has no graph of DDP's")
_SPREAD = Needs(
    ("fsdp", "a strategy that was asked for"),
    "parallel.strategy=auto came to {strategy}, which spreads nothing",
    also_off=True,
)
_PROFILED = Needs(("telemetry.profile.steps",), "nothing is profiled (telemetry.profile.steps)")
_OF_FSDP = Applies("strategy", ("auto", "fsdp"))
_Threshold = Annotated[PositiveFloat, Field(lt=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Evaluate:
    """When and how the validation samples are scored."""

    every: Annotated[Length | None, Off, _HELD_OUT] = Duration(1, "epochs")
    """Time between evaluations, or `off`; the last step is always evaluated unless this is `off`."""
    batch_size: Annotated[Auto | PositiveInt, _EVALUATED, _HELD_OUT] = "auto"
    """Samples per forward pass."""
    top_k: Annotated[int, Field(gt=1, strict=True), BeforeValidator(whole), _EVALUATED, _HELD_OUT] = 5
    """The k of the top-k accuracy reported beside top-1."""
    augment: Literal["none", "flip", "flip_shift", "five_crop", "ten_crop"] = "none"
    """Average the probabilities of several views of each image, in evaluation and prediction: itself and its mirror
    (`flip`), these and four of them moved by a pixel (`flip_shift`, Jordan 2024), its corners and centre (`five_crop`),
    or these and their mirrors (`ten_crop`, Krizhevsky et al. 2012). Costs as many forward passes."""
    metric: Annotated[str, _EVALUATED, _HELD_OUT] = "auto"
    """The metric that decides what is best: `top1_accuracy`, `loss`, or another one that the task measures; `auto` is
    the task's own choice, of image classification `top1_accuracy`."""
    metrics: Annotated[dict[str, Options], _EVALUATED, _HELD_OUT] = Field(default_factory=dict)
    """More metrics of classes, labels and clicks by a name of yours, torchmetrics' for example:
    `{f1: {name: torchmetrics.classification:MulticlassF1Score, num_classes: 10}}`. `package.module:factory` is called
    with the other options, and what it gives once in each evaluation, with the logits and targets of all samples."""
    thresholds: _Threshold | dict[str, _Threshold] = 0.5
    """Of `image_multilabel`: the probability above which an image is given a label, in evaluation and prediction: one
    number, or a mapping of class names to numbers, 0.5 for other classes."""
    patience: Annotated[PositiveInt | None, Off] = None
    """Stop after this many evaluations without a better metric, or `off`."""
    keep_examples: Annotated[NonNegativeInt, Field(le=100), _EVALUATED, _HELD_OUT] = 24
    """Held-out samples that each evaluation keeps to be looked at, with image, answer and label, beside the confusion
    matrix; 0 keeps neither."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Checkpoint:
    """When the run's state is saved, and how much of the past is kept."""

    every: Annotated[Interval | None, Off] = Duration(1, "epochs")
    """Steps or time between checkpoints, `auto`: time by what a save costs and `mtbf`, or `off`; the end of the run and
    a requested stop are always saved, and the best evaluation unless `keep_best` is off."""
    mtbf: Annotated[Time, Applies("every", ("auto",))] = TimeSpan(24, "hours")
    """Mean time between failures of the whole job; `auto` is Young's optimum for it."""
    keep: PositiveInt = 2
    """Newest checkpoints to keep."""
    keep_best: Switch = True
    """Keep the checkpoint of the best evaluation too."""
    mirror: Annotated[str | None, Off] = None
    """Address of an object store (`s3://bucket/runs/mine`) to which every checkpoint is copied beside training, with
    what another host needs to go on from it, or `off`. A run directory without a checkpoint as new as the copy's is
    filled from there first."""
    mirror_patience: Annotated[Time | None, Off, Applies("mirror", ("s3://BUCKET/PATH",))] = None
    """How long copying may fail before the run stops, or `off`: it goes on, and copies when it works again."""
    mirror_wait: Annotated[Time, Applies("mirror", ("s3://BUCKET/PATH",))] = TimeSpan(5, "minutes")
    """How long the end of a run, or a stop, waits at most for what is still to be copied."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Parallel:
    """Which device, and how several processes work together."""

    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = "auto"
    """Where the model lives; `cuda` includes ROCm."""
    strategy: Literal["auto", "single", "ddp", "fsdp"] = "auto"
    """`ddp`: one replica per process, gradients averaged. `fsdp`: weights, gradients, optimizer state and average are
    spread over the processes. `auto`: `ddp` as long as a replica leaves room for activations."""
    shard_size: Annotated[Literal["all"] | PositiveInt, _OF_FSDP, _SPREAD] = "all"
    """Processes that `fsdp` spreads one copy over; with fewer than all, such groups hold copies (hybrid sharding)."""
    shard_modules: Annotated[tuple[str, ...], _OF_FSDP, _SPREAD] = ()
    """Shell patterns of the modules that `fsdp` gathers one at a time; empty: the items of the network's lists and
    sequences of blocks."""
    reshard_after_forward: Annotated[Switch, _OF_FSDP, _SPREAD] = True
    """Let go of the other processes' weights after each forward pass, and gather them again for the backward one."""
    gather_dtype: Annotated[Literal["fp32", "bf16"], _OF_FSDP, _SPREAD] = "fp32"
    """In which numbers `fsdp` gathers weights and its modules compute with them; the weights themselves stay fp32."""
    exact: Switch = False
    """The same bits for any number of processes that divides `logical_ranks`, also where a resume changes it."""
    logical_ranks: Auto | PositiveInt = "auto"
    """Micro-batches per step over all processes; with `auto` one per process, or the 8 that `exact` is divided into."""
    bucket_cap_mb: Annotated[PositiveInt, Field(le=10**6), _BUCKETS_OF_DDP] = 25
    """Size of the gradient buckets that DDP reduces while the backward pass goes on."""
    gradient_compression: Annotated[Literal["none", "bf16", "fp16"], _BUCKETS] = "none"
    """Send the gradients of `ddp` and `fsdp` in 16 bits: half the traffic, for slow networks; sums round, and fp16
    loses what is above 65504 or tiny."""
    static_graph: Annotated[Switch, _GRAPH_OF_DDP] = False
    """Promise DDP that every step computes with the same parameters in the same order, which spares it some work."""
    unused_parameters: Literal["refuse", "allow"] = "refuse"
    """What to do if parameters take no part in the first step's loss: name them and end the run, or leave them as they
    are, for which DDP looks for them in every step."""
    threads: Auto | Annotated[PositiveInt, Field(le=4096)] = "auto"
    """CPU threads per process; `auto` shares the machine's cores among its processes, and is 1 for `exact`."""
    affinity: Literal["none", "socket", "single", "single_unique", "interleaved", "contiguous"] = "none"
    """Which cores a process and its loader processes run on: `none` leaves it to the system, `socket` are all near its
    GPU, `single` one of them for all, `single_unique` one for each; `interleaved` and `contiguous` deal them out
    evenly. Without GPUs, sockets are dealt out in order."""
    timeout: Time = TimeSpan(10, "minutes")
    """How long processes wait for one another, when they meet and in every exchange, before the run ends."""


Tracker = Literal["tensorboard", "mlflow", "wandb", "csv"]


def each_once(value: tuple[Tracker, ...]) -> tuple[Tracker, ...]:
    """Refuse a tracker that is named twice."""
    if len(set(value)) < len(value):
        raise ValueError(f"found {list(value)}, but each tracker is named once")
    return value


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Submission:
    """What the log says of who ran where, and what for."""

    org: str = ""
    """Who ran it."""
    platform: str = ""
    """On what."""
    division: Annotated[Literal["closed", "open"] | None, Off] = None
    """By which rules: `closed` asks for the reference's optimizer, schedule and target, and `open` for none of them."""
    status: Annotated[Literal["onprem", "cloud", "preview", "research"] | None, Off] = None
    """Where such a system is to be had."""
    target_accuracy: Annotated[float, Field(gt=0, le=100)] = 75.9
    """Top-1 accuracy in percent at which the run has arrived; what comes after is not in the log."""
    cache_cleared: Switch = False
    """Whether the system's file cache was emptied before the run: for you to do, and to say."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Profile:
    """Some steps of a run, operator by operator. The weights are the same with it and without."""

    steps: Annotated[PositiveInt | None, Off] = None
    """How many steps to profile, or `off`."""
    after: Annotated[Length, _PROFILED] = Duration(20, "steps")
    """How far into the run they begin; the step before the first warms the profiler up."""
    tool: Annotated[Literal["torch", "nsys"], _PROFILED] = "torch"
    """`torch` writes a trace and a table of operators into the run directory; `nsys` marks the steps and their phases
    for NVIDIA's Nsight Systems, which is to run the command."""
    ranks: Annotated[Literal["first", "all"], _PROFILED] = "first"
    """Which processes are profiled."""
    memory: Annotated[Switch, Applies("tool", ("torch",)), _PROFILED] = False
    """Also record what each operator allocates."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Telemetry:
    """What is recorded of the run."""

    log_every: Length = Duration(10, "steps")
    """Time between step records; between them a plain step does not let the host wait for the device."""
    trackers: Annotated[tuple[Tracker, ...], AfterValidator(each_once)] = ("tensorboard",)
    """Where records go beside events.jsonl; `csv` is a table for each kind of them. MLflow and Weights & Biases write
    into the run directory unless MLFLOW_TRACKING_URI and WANDB_MODE say otherwise."""
    mlperf: Switch = False
    """Write mlperf/result_0.txt at every end of the run: a log in MLPerf's format, as of its ResNet-50 in Training 4.0.
    It is no MLPerf result."""
    submission: Annotated[Submission, Applies("mlperf", (True,))] = Submission()
    """What such a log says that no run knows."""
    report: Switch = True
    """Write report.html into the run directory at every end of the run."""
    noise_scale: Annotated[Length | None, Off] = None
    """Time between steps whose gradient noise scale is measured, from the gradients of their micro-batches, without
    another pass, or `off`. It says how large a batch still pays (McCandlish et al. 2018)."""
    profile: Profile = Profile()
    """Some steps looked at closely."""
