"""Do batch, rate and schedule go together, so that fast steps also lead somewhere?"""

from __future__ import annotations

from collections.abc import Iterator

from paceline_advisor.doctor.findings import Advice, Finding
from paceline_advisor.doctor.sources import CONVNETS, GOYAL, KRIZHEVSKY, OWN
from paceline_advisor.doctor.subject import Subject

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
