"""The recipe's `evaluate`, `checkpoint`, `parallel` and `telemetry` sections: what happens around the steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from paceline.parsing.units import Duration, TimeSpan
from paceline.recipe.fields import (
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
    parse_integer,
    section,
)

_EVALUATED = Needs(("evaluate.every",), "nothing is evaluated (evaluate.every=off)")
_HELD_OUT = Needs(("held-out samples",), "nothing is evaluated (no samples are held out)")
_BUCKETS_OF_DDP = Needs(("ddp",), "{strategy} has no buckets")
_BUCKETS = Needs(("ddp", "fsdp"), "{strategy} has no buckets")
_COMMUNICATES = Needs(("ddp", "fsdp", "parallel.exact"), "{strategy} does not communicate")
_GRAPH_OF_DDP = Needs(("ddp",), "{strategy} does not use DDP's graph")
_SPREAD = Needs(
    ("fsdp", "a strategy that was asked for"),
    "parallel.strategy=auto chose {strategy}, which shards nothing",
    also_off=True,
)
_PROFILED = Needs(("telemetry.profile.steps",), "nothing is profiled (telemetry.profile.steps)")
_OF_FSDP = Applies("strategy", ("auto", "fsdp"))
_Threshold = Annotated[PositiveFloat, Field(lt=1)]


@section
class EvaluateSection:
    """When and how the validation samples are scored."""

    every: Annotated[Length | None, Off, _HELD_OUT] = Duration(1, "epochs")
    """Time between evaluations, or `off`; the last step is always evaluated unless this is `off`."""
    batch_size: Annotated[Auto | PositiveInt, _EVALUATED, _HELD_OUT] = "auto"
    """Samples per forward pass."""
    top_k: Annotated[int, Field(gt=1, strict=True), BeforeValidator(parse_integer), _EVALUATED, _HELD_OUT] = 5
    """The k of the top-k accuracy reported in addition to top-1."""
    augment: Literal["none", "flip", "flip_shift", "five_crop", "ten_crop"] = "none"
    """Average the probabilities of several views of each image, in evaluation and prediction: itself and its mirror
    (`flip`), these and four of them shifted by a pixel (`flip_shift`, Jordan 2024), its corners and centre
    (`five_crop`), or these and their mirrors (`ten_crop`, Krizhevsky et al. 2012). Costs one forward pass per view."""
    metric: Annotated[str, _EVALUATED, _HELD_OUT] = "auto"
    """The metric that selects the best checkpoint: `top1_accuracy`, `loss`, or another metric of the task; `auto` is
    the task's choice, `top1_accuracy` for image classification."""
    metrics: Annotated[dict[str, Options], _EVALUATED, _HELD_OUT] = Field(default_factory=dict)
    """More metrics of classes, labels and clicks by a name of yours, torchmetrics' for example:
    `{f1: {name: torchmetrics.classification:MulticlassF1Score, num_classes: 10}}`. `package.module:factory` is called
    with the other options, and the metric once in each evaluation, with the logits and targets of all samples, which
    each process holds in memory. `paceline evaluate` takes it as an override. A metric of yours that the run's
    recipe names needs `--trust-code`."""
    thresholds: _Threshold | dict[str, _Threshold] = 0.5
    """For `image_multilabel`: the probability above which an image gets a label, in evaluation and prediction: one
    number, or a mapping of class names to numbers, 0.5 for other classes."""
    patience: Annotated[PositiveInt | None, Off] = None
    """Stop after this many evaluations without a better metric, or `off`."""
    keep_examples: Annotated[NonNegativeInt, Field(le=100), _EVALUATED, _HELD_OUT] = 24
    """Held-out samples that each evaluation keeps for inspection, with image, prediction and label, and the confusion
    matrix; 0 keeps neither."""


@section
class Checkpoint:
    """When the run's state is saved, and how many checkpoints are kept."""

    every: Annotated[Interval | None, Off] = Duration(1, "epochs")
    """Steps or time between checkpoints, `auto`: time from the cost of a save and `mtbf`, or `off`. Even with `off`,
    the end of the run and a requested stop are saved, and the best evaluation unless `keep_best` is off."""
    mtbf: Annotated[Time, Applies("every", ("auto",))] = TimeSpan(24, "hours")
    """Mean time between failures of the whole job; `auto` uses it in Young's formula."""
    keep: PositiveInt = 2
    """Newest checkpoints to keep."""
    keep_best: Switch = True
    """Keep the checkpoint of the best evaluation too."""
    mirror: Annotated[str | None, Off] = None
    """Address of an object store (`s3://bucket/runs/mine`) to which every checkpoint is copied during training, with
    what another host needs to resume from it, or `off`. A run directory with older checkpoints is updated from there
    first."""
    mirror_patience: Annotated[Time | None, Off, Applies("mirror", ("s3://BUCKET/PATH",))] = None
    """How long copying may fail before the run stops; `off`: it continues, and copies when it works again."""
    mirror_wait: Annotated[Time, Applies("mirror", ("s3://BUCKET/PATH",))] = TimeSpan(5, "minutes")
    """Maximum wait for unfinished copies at the end of a run or at a stop."""


@section
class Parallel:
    """Which device, and how several processes work together."""

    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = "auto"
    """Device of the model; `cuda` includes ROCm."""
    strategy: Literal["auto", "single", "ddp", "fsdp"] = "auto"
    """`ddp`: one replica per process, gradients averaged. `fsdp`: weights, gradients, optimizer state and average are
    sharded over the processes. `auto`: `ddp` if a replica leaves room for activations."""
    shard_size: Annotated[Literal["all"] | PositiveInt, _OF_FSDP, _SPREAD] = "all"
    """Processes over which `fsdp` shards one copy; with fewer than all, each group holds a copy (hybrid sharding)."""
    shard_modules: Annotated[tuple[str, ...], _OF_FSDP, _SPREAD] = ()
    """Shell patterns of the modules that `fsdp` gathers one at a time; empty: the items of the network's lists and
    sequences of blocks."""
    reshard_after_forward: Annotated[Switch, _OF_FSDP, _SPREAD] = True
    """Free the other processes' weights after each forward pass, and gather them again for the backward pass."""
    gather_dtype: Annotated[Literal["fp32", "bf16"], _OF_FSDP, _SPREAD] = "fp32"
    """Data type in which `fsdp` gathers weights and computes; the weights themselves stay fp32."""
    backend: Annotated[Auto | Literal["gloo", "nccl", "ucc", "xccl"], _COMMUNICATES] = "auto"
    """Library of torch.distributed through which processes communicate; `auto`: NCCL for `cuda`, XCCL for `xpu`, gloo
    for `cpu`. gloo on GPUs is slow, but shows whether NCCL is at fault. UCC needs a torch built with it.
    """
    exact: Switch = False
    """Bit-identical results for any number of processes that divides `logical_ranks`, even if a resume changes it."""
    logical_ranks: Auto | PositiveInt = "auto"
    """Micro-batches per step over all processes; with `auto` one per process, or the 8 that `exact` is divided into."""
    bucket_cap_mb: Annotated[PositiveInt, Field(le=10**6), _BUCKETS_OF_DDP] = 25
    """Size of the gradient buckets that DDP reduces during the backward pass."""
    gradient_compression: Annotated[Literal["none", "bf16", "fp16"], _BUCKETS] = "none"
    """Send the gradients of `ddp` and `fsdp` in 16 bits: half the traffic, for slow networks; sums are rounded, and
    fp16 loses values above 65504 or tiny ones."""
    static_graph: Annotated[Switch, _GRAPH_OF_DDP] = False
    """Tell DDP that every step uses the same parameters in the same order, which saves it some work."""
    unused_parameters: Literal["refuse", "allow"] = "refuse"
    """What to do if parameters do not contribute to the first step's loss: name them and end the run, or leave them
    unchanged, for which DDP searches for them in every step."""
    threads: Auto | Annotated[PositiveInt, Field(le=4096)] = "auto"
    """CPU threads per process; `auto` divides the machine's cores among its processes, and is 1 for `exact`."""
    affinity: Literal["none", "socket", "single", "single_unique", "interleaved", "contiguous"] = "none"
    """Cores for a process and its loader processes: `none` leaves it to the system, `socket` is all near its GPU,
    `single` one of them for all, `single_unique` one for each; `interleaved` and `contiguous` divide them evenly.
    Without GPUs, sockets are assigned in order."""
    timeout: Time = TimeSpan(10, "minutes")
    """How long processes wait for each other, at start-up and in every collective, before the run ends."""


Tracker = Literal["tensorboard", "mlflow", "wandb", "csv"]


def check_unique(value: tuple[Tracker, ...]) -> tuple[Tracker, ...]:
    """Refuse a tracker that is named twice."""
    if len(set(value)) < len(value):
        raise ValueError(f"found {list(value)}, but each tracker may be named only once")
    return value


@section
class Submission:
    """Who ran the submission, where, and in which division."""

    org: str = ""
    """Who ran it."""
    platform: str = ""
    """On what."""
    division: Annotated[Literal["closed", "open"] | None, Off] = None
    """Division: `closed` requires the reference's optimizer, schedule and target; `open` requires none of them."""
    status: Annotated[Literal["onprem", "cloud", "preview", "research"] | None, Off] = None
    """Availability of the system."""
    target_accuracy: Annotated[float, Field(gt=0, le=100)] = 75.9
    """Top-1 accuracy in percent that ends the measurement; the log omits what follows."""
    cache_cleared: Switch = False
    """Whether you emptied the system's file cache before the run."""


@section
class Profile:
    """Profile some steps of a run by operator. It does not change the weights."""

    steps: Annotated[PositiveInt | None, Off] = None
    """How many steps to profile, or `off`."""
    after: Annotated[Length, _PROFILED] = Duration(20, "steps")
    """When they start in the run; the step before the first warms up the profiler."""
    tool: Annotated[Literal["torch", "nsys"], _PROFILED] = "torch"
    """`torch` writes a trace and a table of operators into the run directory; `nsys` marks the steps and their phases
    for NVIDIA Nsight Systems, which must run the command."""
    ranks: Annotated[Literal["first", "all"], _PROFILED] = "first"
    """Processes to profile."""
    memory: Annotated[Switch, Applies("tool", ("torch",)), _PROFILED] = False
    """Also record what each operator allocates."""


@section
class VerifySection:
    """A guard against silent faults of memory and processors."""

    every: Annotated[Length | None, Off] = None
    """Time between checks, or `off`. A check loads the newest checkpoint, computes the step after it again, with two
    replicas on the other one, and compares every bit; a difference ends the run before the next save. It costs one
    copy of the state in main memory and, after each save, its digest. On a GPU it needs `train.deterministic`."""


@section
class Telemetry:
    """What is recorded of the run."""

    log_every: Length = Duration(10, "steps")
    """Time between step records; between them a plain step does not make the host wait for the device."""
    trackers: Annotated[tuple[Tracker, ...], AfterValidator(check_unique)] = ("tensorboard",)
    """Where records go in addition to events.jsonl; `csv` writes a table for each kind. MLflow and Weights & Biases
    write
    into the run directory unless MLFLOW_TRACKING_URI or WANDB_MODE selects a server."""
    mlperf: Switch = False
    """Write mlperf/result_0.txt whenever the run ends: a log in MLPerf's format, as for ResNet-50 in Training 4.0. It
    is not an MLPerf result."""
    submission: Annotated[Submission, Applies("mlperf", (True,))] = Submission()
    """Entries of that log that a run cannot know."""
    report: Switch = True
    """Write report.html into the run directory whenever the run ends."""
    noise_scale: Annotated[Length | None, Off] = None
    """Time between measurements of the gradient noise scale, from the gradients of a step's micro-batches, without
    another pass, or `off`. It tells how large a batch still pays (McCandlish et al. 2018)."""
    profile: Profile = Profile()
    """Profiling of a few steps."""
