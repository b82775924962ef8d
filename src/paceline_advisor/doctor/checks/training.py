"""Checks of a run: learning rate and schedule, memory, time between steps, records, several processes."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from paceline.units import format_bytes
from paceline_advisor.doctor.findings import CONVNETS, DDP, GOYAL, KRIZHEVSKY, OWN, TUNING, Advice, Finding
from paceline_advisor.doctor.subject import Subject, named

_LARGE_BATCH = 1024
_LARGEST_LINEAR = 8192
_REFERENCE_BATCH, _REFERENCE_RATE = 256, 0.1
_FEW = 4
_ADAPTIVE = ("adamw", "lamb", "adafactor", "rmsprop", "lion")


def no_warmup(subject: Subject) -> Iterator[Finding]:
    """A large batch whose first step already has the full rate."""
    recipe, plan = subject.recipe, subject.plan
    starts_anew = not recipe.model.pretrained and recipe.model.initialize_from is None
    largest = max(phase.global_batch_size for phase in plan.batch_phases)
    if largest < _LARGE_BATCH or plan.warmup_steps > 0 or not starts_anew:
        return
    yield Finding(
        name="no_warmup",
        severity="spoils",
        evidence=f"batch.global_size={largest} and schedule.warmup={recipe.schedule.warmup}",
        why="With a large batch the rate is large, and the first steps at a peak rate from random weights may never be "
        "made up for.",
        source=f"{GOYAL}; {CONVNETS} (5 to 10 epochs)",
        advice=Advice(words='schedule.warmup="5 epochs"', overrides={"schedule.warmup": "5 epochs"}, keeps="training"),
        expected="no time; accuracy as with a small batch",
    )


def learning_rate(subject: Subject) -> Iterator[Finding]:
    """A rate and a batch that belong to different rules."""
    asked, batch = subject.recipe.optimizer, subject.recipe.batch.global_size
    said, words = "", ""
    if asked.lr_scaling == "linear" and asked.name in _ADAPTIVE:
        said = f"optimizer.lr_scaling=linear with {asked.name}"
        words = "optimizer.lr_scaling=sqrt: adaptive steps do not shrink as the gradient's noise does"
    elif asked.lr_scaling == "linear" and batch > _LARGEST_LINEAR:
        said = f"optimizer.lr_scaling=linear with batch.global_size={batch}"
        words = f"a smaller rate than the rule's: it held up to {_LARGEST_LINEAR} (ResNet-50), or optimizer.name=lars"
    elif _is_left_behind(subject):
        said = f"optimizer.lr={asked.lr:g} with batch.global_size={batch}"
        words = (
            f"{_REFERENCE_RATE * batch / _REFERENCE_BATCH:g} by the linear rule (0.1 for 256), or find it with a range "
            "test; optimizer.lr_scaling=linear with optimizer.lr_reference_batch does it for every batch"
        )
    if not said:
        return
    yield Finding(
        name="learning_rate_rule",
        severity="spoils",
        evidence=said,
        why="As many samples need as large a step: a batch k times as large takes k times the rate with SGD, the root "
        "of k with adaptive methods, and neither without end.",
        source=f"{GOYAL}; {KRIZHEVSKY}",
        advice=Advice(words=words, keeps="training"),
        expected="no time; fewer epochs to the same accuracy",
    )


def ragged_tail(subject: Subject) -> Iterator[Finding]:
    """An epoch's last step with hardly a sample in each micro-batch."""
    plan = subject.plan
    phases = plan.epochs.finished_phases(plan.total_steps)
    parts = [(plan.epochs.last_step_samples(phase), phase) for phase in phases]
    small = [(left, phase) for left, phase in parts if 0 < left // phase.logical_ranks < _FEW < plan.micro_batch_size]
    if not small or not subject.anatomy.order:
        return
    left, phase = small[0]
    yield Finding(
        name="ragged_tail",
        severity="notice",
        evidence=f"an epoch's last step has {left} of {phase.global_batch_size} samples, in {phase.logical_ranks} "
        "micro-batches",
        why="Each sample is used once per epoch, so that what is left over is a step of its own: BatchNorm then "
        "normalises by a few samples, and a whole step is spent on them.",
        source=f"{OWN}; other trainers drop them (drop_last=True: {CONVNETS})",
        advice=Advice(words="a batch.global_size that leaves more over, or nothing", keeps="training"),
        expected="one step less per epoch",
        speedup=(1.0, 1.02),
    )


def loss_scale(subject: Subject) -> Iterator[Finding]:
    """fp16 where bf16 needs no loss scale, or a scale that cannot hold the gradients."""
    asked = subject.recipe.train
    if subject.plan.precision != "fp16":
        return
    said, words = "", ""
    overrides: dict[str, float] = {}
    if asked.grad_scaler.growth_interval < 100:
        said = f"train.grad_scaler.growth_interval={asked.grad_scaler.growth_interval}"
        words = "2000, torch's default: each growth too far costs a step"
        overrides = {"train.grad_scaler.growth_interval": 2000}
    elif asked.grad_scaler.init_scale < 2**7:
        said = f"train.grad_scaler.init_scale={asked.grad_scaler.init_scale:g}"
        words = "65536, torch's default: gradients below 6e-8 over the scale are lost"
        overrides = {"train.grad_scaler.init_scale": 65536.0}
    if not said:
        return
    yield Finding(
        name="loss_scale",
        severity="spoils",
        evidence=f"{said} with train.precision=fp16",
        why="A scale that is too small loses gradients, and one that grows too often loses steps.",
        source=CONVNETS,
        advice=Advice(words=words, overrides=overrides, keeps="training"),
        expected="no time; fewer steps left out",
    )


def _is_left_behind(subject: Subject) -> bool:
    """Whether a large batch has the rate of a small one, from random weights, with plain SGD."""
    recipe = subject.recipe
    fresh = not recipe.model.pretrained and recipe.model.initialize_from is None
    fair = _REFERENCE_RATE * recipe.batch.global_size / _REFERENCE_BATCH
    plain = recipe.optimizer.name == "sgd" and recipe.optimizer.lr_scaling == "none"
    return fresh and plain and recipe.batch.global_size >= _LARGE_BATCH and recipe.optimizer.lr < fair / 4


def does_not_fit(subject: Subject) -> Iterator[Finding]:
    """A micro-batch whose step needs more memory than the device has."""
    lack = subject.lack
    if lack is None:
        return
    now, has = subject.plan.micro_batch_size, format_bytes(lack.memory)
    if lack.divisor:
        advice = Advice(
            words=f"batch.micro_size={lack.divisor}, which accumulation makes the same step of; paceline estimate says "
            "what else saves memory",
            overrides={"batch.micro_size": lack.divisor},
            keeps="training" if lack.normalises else "rounding",
        )
        most = f"about {lack.largest:,} do"
    else:
        advice = Advice(words="paceline estimate says what saves memory", keeps="training")
        most = "not even one does"
    yield Finding(
        name="does_not_fit",
        severity="breaks",
        evidence=f"a micro-batch of {now:,} samples does not fit into {has}, {most}",
        why="The first step ends for want of memory.",
        source=OWN,
        advice=advice,
        expected="the run gets beyond its first step",
        predicted=not subject.target.is_here,
    )


_FEW_STEPS = 4
_SHORT_RUN = 20
_USUAL = "10 steps"
_BACKWARD = 3.0  # a step's time in forward passes: backward takes two


def log_every_step(subject: Subject) -> Iterator[Finding]:
    """A record for every step, or nearly."""
    plan = subject.plan
    few = _FEW_STEPS if subject.target.is_gpu else 1
    if plan.log_every_steps > few or plan.total_steps < _SHORT_RUN:
        return
    waits = "the host waits for the device to read the loss, and " if subject.target.is_gpu else ""
    yield Finding(
        name="log_every_step",
        severity="slows",
        evidence=f"telemetry.log_every={subject.recipe.telemetry.log_every}: a record after every "
        f"{'step' if plan.log_every_steps == 1 else f'{plan.log_every_steps} steps'} of {plan.total_steps}",
        why=f"For each record {waits}a line and the trackers' files are written.",
        source=f"{TUNING} (avoid synchronisation)",
        advice=Advice(words=f'telemetry.log_every="{_USUAL}"', overrides={"telemetry.log_every": _USUAL}),
        expected="1.02 to 1.3 times as fast, most for short steps",
        speedup=(1.02, 1.3),
    )


def evaluation_often(subject: Subject) -> Iterator[Finding]:
    """More time in evaluation than in training."""
    plan = subject.plan
    if plan.evaluate_every_steps is None or plan.evaluation_samples == 0 or plan.total_steps < _SHORT_RUN:
        return
    trained = plan.evaluate_every_steps * plan.global_batch_size * _BACKWARD
    share = plan.evaluation_samples / (plan.evaluation_samples + trained)
    if share < 0.5:
        return
    yield Finding(
        name="evaluation_often",
        severity="slows",
        evidence=f"evaluate.every={subject.recipe.evaluate.every} scores {plan.evaluation_samples} samples after each "
        f"{plan.evaluate_every_steps} steps: about {share:.0%} of the forward and backward work",
        why="A forward pass is a third of a training step's work.",
        source=OWN,
        # What is the best, and when patience is at its end, is found at evaluations.
        advice=Advice(
            words='evaluate.every="1 epoch", or less often', overrides={"evaluate.every": "1 epoch"}, keeps="training"
        ),
        expected=f"up to {1 / (1 - share):.1f} times as fast",
        speedup=(1.0, 1 / (1 - share)),
    )


_WAITS = 0.1
_SKIPPED = 0.01


_QUICKER_IMAGES = (
    "data.workers=auto, packed data (paceline pack), or data.backend=dali; paceline check-data says what makes "
    "decoding slow"
)


def data_wait(subject: Subject) -> Iterator[Finding]:
    """Steps that waited for their batch."""
    found = [event["data_wait_fraction"] for event in _of(subject, "step") if event.get("data_wait_fraction")]
    if not found or (middle := statistics.median(found)) < _WAITS:
        return
    yield Finding(
        name="data_wait",
        severity="slows",
        evidence=f"half of the records have {middle:.0%} or more of the step in waiting for data",
        why="The device is idle while it waits.",
        source=TUNING,
        advice=Advice(
            words=_QUICKER_IMAGES if "data.backend" not in subject.plan.unused else "data.workers=auto or more"
        ),
        expected=f"up to {1 / (1 - middle):.2f} times as fast, as measured in the run",
        speedup=(1.0, 1 / (1 - middle)),
    )


def diverged(subject: Subject) -> Iterator[Finding]:
    """Losses, weights or metrics that are not finite, or a loss far above the first."""
    told = [
        event for event in _of(subject, "incident") if str(event.get("incident")).startswith(("nonfinite", "diverged"))
    ]
    if not told:
        return
    yield Finding(
        name="diverged",
        severity="spoils",
        evidence=f"{len(told)} time{'s' * (len(told) > 1)}; the last: {told[-1].get('message', '')}",
        why="Too large a step moves the weights to where the loss is larger, and so is the next step.",
        source=GOYAL,
        advice=Advice(
            words="a lower optimizer.lr (paceline find-lr), a longer schedule.warmup, or optimizer.clip_norm",
            keeps="training",
        ),
        expected="a loss that falls",
    )


def scaler_health(subject: Subject) -> Iterator[Finding]:
    """Steps that fp16 left out, or a scale that has fallen."""
    steps = _of(subject, "step")
    scales = [event["grad_scale"] for event in steps if event.get("grad_scale")]
    last = steps[-1] if steps else {}
    skipped = last.get("position", last.get("step", 0)) - last.get("step", 0)
    share = skipped / max(1, last.get("position", 1))
    fallen = bool(scales) and scales[-1] < 1
    if subject.plan.precision != "fp16" or not (fallen or share > _SKIPPED):
        return
    yield Finding(
        name="scaler_health",
        severity="spoils",
        evidence=f"{skipped} steps were left out ({share:.1%}), and the loss scale ended at "
        f"{scales[-1] if scales else 1:g}",
        why="Gradients overflow in fp16 faster than the scale can follow.",
        source=CONVNETS,
        advice=Advice(
            words="train.precision=bf16 where the device has it, or a lower optimizer.lr, or optimizer.clip_norm",
            keeps="training",
        ),
        expected="no step lost",
    )


def slow_rank(subject: Subject) -> Iterator[Finding]:
    """A process that the others waited for."""
    told = [event for event in _of(subject, "incident") if event.get("incident") == "slow_rank"]
    if not told:
        return
    yield Finding(
        name="slow_rank",
        severity="slows",
        evidence=f"{len(told)} times; the last: {told[-1].get('message', '')}",
        why="All processes wait for the slowest in each step: work must be spread evenly.",
        source=f"{TUNING} (load balance)",
        advice=Advice(words="look at that host; samples of like size in a batch; parallel.affinity=socket"),
        expected="as fast as the median rank",
        speedup=(1.0, 1.5),
    )


def recompilation(subject: Subject) -> Iterator[Finding]:
    """Graphs that were compiled again in the run."""
    told = [event for event in _of(subject, "incident") if event.get("incident") in ("recompile", "slow_compile")]
    if not told:
        return
    yield Finding(
        name="recompilation",
        severity="slows",
        evidence=f"{len(told)} times; the last: {told[-1].get('message', '')}",
        why="Compiling takes longer than many steps.",
        source=OWN,
        advice=Advice(words="sizes that do not change (no Python numbers that do), or model.compile=false"),
        expected="the seconds that the records tell",
        speedup=(1.0, 1.2),
    )


def _of(subject: Subject, kind: str) -> list[dict[str, Any]]:
    return [event for event in subject.run if event["event"] == kind]


_DISORDER = 0.2


def unused_parameters(subject: Subject) -> Iterator[Finding]:
    """Parameters that are to be trained and take no part in the loss."""
    unused, all_of_them = subject.anatomy.unused, subject.anatomy.parameters
    if not unused:
        return
    allowed = subject.recipe.parallel.unused_parameters == "allow"
    frozen = [f"{name}.*" for name in _modules(subject, unused)]
    patterns = frozen if len(frozen) <= 8 else []
    then = "DDP looks for them in every step" if allowed else "several processes refuse to begin"
    yield Finding(
        name="unused_parameters",
        severity="slows" if allowed else "breaks",
        evidence=f"{len(unused)} of {len(all_of_them)} parameters have no gradient after a backward pass: "
        f"{named(list(unused))}",
        why=f"DDP waits for every parameter's gradient; with parallel.unused_parameters="
        f"{subject.recipe.parallel.unused_parameters}, {then}. Memory is held for them in any case.",
        source=f"{DDP}; {TUNING}",
        advice=Advice(
            words="use them, remove them, or freeze them: model.frozen" + (f"={patterns}" if patterns else ""),
            overrides={"model.frozen": [*subject.recipe.model.frozen, *patterns]} if patterns else {},
        ),
        expected="several processes can train, without a search in every step",
        speedup=(1.0, 1.1),
        layers=unused,
    )


def unused_parameter_search(subject: Subject) -> Iterator[Finding]:
    """A search for parameters without a gradient where there is none."""
    seen = subject.anatomy
    if subject.recipe.parallel.unused_parameters != "allow" or not seen.parameters or seen.unused:
        return
    if subject.recipe.model.unfreeze or subject.recipe.model.freeze_after:
        return
    yield Finding(
        name="unused_parameter_search",
        severity="slows",
        evidence="parallel.unused_parameters=allow, and every parameter had a gradient",
        why="DDP then walks the graph after each forward pass (find_unused_parameters), and cannot arrange its buckets "
        "by the order in which gradients come.",
        source=f"{DDP}; {TUNING}",
        advice=Advice(words="parallel.unused_parameters=refuse", overrides={"parallel.unused_parameters": "refuse"}),
        expected="1.0 to 1.1 times as fast with several processes",
        speedup=(1.0, 1.1),
    )


def construction_order(subject: Subject) -> Iterator[Finding]:
    """Layers that are made in another order than they are used in, where that decides the buckets."""
    if subject.recipe.parallel.unused_parameters != "allow":
        return  # DDP arranges its buckets anew after the first step
    made = list(dict.fromkeys(name.rpartition(".")[0] for name in subject.anatomy.parameters))
    used = [name for name in subject.anatomy.order if name in made]
    disorder = _inversions([made.index(name) for name in used])
    if disorder < _DISORDER:
        return
    yield Finding(
        name="construction_order",
        severity="slows",
        evidence=f"{disorder:.0%} of the pairs of layers are made in another order than they are used in: made first "
        f"{named(made, 2)}, used first {named(used, 2)}",
        why="With a search for unused parameters, buckets follow the order of construction, and each waits for the "
        "last gradient in it.",
        source=TUNING,
        advice=Advice(words="make layers in the order in which forward uses them", keeps="training"),
        expected="more of the reduction beside the backward pass, with several processes",
        speedup=(1.0, 1.1),
        layers=tuple(used),
    )


def data_parallel(subject: Subject) -> Iterator[Finding]:
    """A network that spreads itself over devices in one process."""
    found = subject.anatomy.parallel
    if not found:
        return
    yield Finding(
        name="data_parallel",
        severity="slows",
        evidence=f"torch.nn.DataParallel in the network: {named([name or 'the network itself' for name in found])}",
        why="One process drives all devices, and copies weights and gradients in each step.",
        source=TUNING,
        advice=Advice(words="take it out; one process per GPU (--processes) trains with DistributedDataParallel"),
        expected="1.2 to 2 times as fast on several GPUs",
        speedup=(1.2, 2.0),
        layers=found,
    )


def affinity(subject: Subject) -> Iterator[Finding]:
    """Processes that wander between the sockets of a machine with GPUs."""
    wanders = subject.recipe.parallel.affinity == "none" and subject.sockets > 1
    if not wanders or not subject.target.is_gpu or not subject.target.is_here:
        return
    yield Finding(
        name="affinity",
        severity="notice",
        evidence=f"parallel.affinity=none, and this machine has {subject.sockets} NUMA nodes",
        why="A process on another socket than its GPU reaches both memories over the link between the sockets.",
        source=CONVNETS,
        advice=Advice(words="parallel.affinity=socket", overrides={"parallel.affinity": "socket"}),
        expected="1.0 to 1.15 times as fast",
        speedup=(1.0, 1.15),
    )


def _modules(subject: Subject, unused: tuple[str, ...]) -> list[str]:
    """The modules all of whose parameters are unused."""
    homes = dict.fromkeys(name.rpartition(".")[0] for name in unused)
    others = [name for name in subject.anatomy.parameters if name not in unused]
    return [home for home in homes if home and not any(name.startswith(f"{home}.") for name in others)]


def _inversions(order: list[int]) -> float:
    """The share of pairs that stand the wrong way round."""
    seen: list[int] = []
    wrong = 0
    for value in order:
        place = bisect_left(seen, value)
        wrong += len(seen) - place
        seen.insert(place, value)
    pairs = len(order) * (len(order) - 1) // 2
    return wrong / pairs if pairs else 0.0
