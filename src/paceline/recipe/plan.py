"""What does a recipe come to on this data, this machine and this many processes?

Every derived number is computed here, once, with integer checks, so that a plan for 64 ranks needs no 64
processes. The trainer follows the plan and computes nothing of its own.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import RecipeError
from paceline.recipe.adapters import unused_in_adapters
from paceline.recipe.batching import micro_batch_size
from paceline.recipe.data import Data
from paceline.recipe.layers import applies_of
from paceline.recipe.profile import plan_profile, unused_in_profile
from paceline.recipe.rates import Lengths, Rates, plan_schedule, unused_in_schedule
from paceline.recipe.running import Checkpoint
from paceline.recipe.schema import Recipe
from paceline.units import Duration, TimeSpan


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What the plan must know of the data.

    Attributes:
        train_samples: Samples in one training epoch.
        evaluation_samples: Samples held out for evaluation; 0 if there are none.
        description: Further facts for the reader, by name (classes, image size, back-end, ...).
        reasons: Why an `auto` became what it is, and why a key that knows no `auto` is not used, by dotted key.
    """

    train_samples: int
    evaluation_samples: int
    description: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What the plan must know of the machine, the same on every rank.

    Attributes:
        device: Device type the model lives on: cpu, cuda, mps or xpu.
        device_name: What the device calls itself.
        fast_bf16: Whether bf16 matrix products are faster than fp32 ones here.
        cores: CPU cores this machine lends to the run.
        threads: Threads per process that the environment asks for (OMP_NUM_THREADS), if it does.
        own_cores: Physical cores that ``parallel.affinity`` gives this process, if it does.
        reasons: Why, by dotted key or by ``fast_bf16``.
    """

    device: str
    device_name: str
    fast_bf16: bool
    cores: int
    threads: int | None = None
    own_cores: int | None = None
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LearningRatePoint:
    """Learning rate at the boundary of a phase of the schedule."""

    step: int
    learning_rate: float
    phase: str


@dataclass(frozen=True, kw_only=True)
class ParameterGroupFacts:
    """Parameters that the optimizer treats alike.

    Attributes:
        parameters: Which: a pattern of the recipe, or in words.
        tensors: How many there are.
        numbers: How many numbers they hold.
        lr_factor: Factor on the schedule's learning rate.
        weight_decay: Their weight decay.
        first_step: The first step that trains them, from 1.
    """

    parameters: str
    tensors: int
    numbers: int
    lr_factor: float
    weight_decay: float
    first_step: int = 1


@dataclass(frozen=True, kw_only=True)
class Plan(Rates):
    """Every derived number of a run. Sizes are samples, intervals are optimizer steps; None means off, or
    for a checkpoint's that it is not measured so.

    ``unused`` says which keys of the recipe ask for something and have no effect in this plan, and why.
    """

    world_size: int
    local_world_size: int
    device: str
    device_name: str
    precision: str
    channels_last: bool
    strategy: str
    threads_per_process: int
    train_samples: int
    evaluation_samples: int
    data: dict[str, Any]
    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    logical_ranks: int
    steps_per_epoch: int
    last_step_samples: int
    total_steps: int
    total_epochs: float
    until_step: int | None
    evaluate_every_steps: int | None
    evaluation_batch_size: int
    checkpoint_every_steps: int | None
    checkpoint_every_seconds: float | None
    log_every_steps: int
    unfreeze_steps: dict[str, int] = field(default_factory=dict)
    profile_steps: tuple[int, int] | None = None
    learning_rates: tuple[LearningRatePoint, ...] = ()
    parameters: int | None = None
    parameter_groups: tuple[ParameterGroupFacts, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)

    def to_tree(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return dataclasses.asdict(self)

    def epoch_of(self, step: int) -> int:
        """Epoch that the step numbered ``step`` (from 0) belongs to."""
        return step // self.steps_per_epoch

    def step_samples(self, position: int) -> int:
        """Samples in the global batch numbered ``position`` (from 0)."""
        is_tail = (position + 1) % self.steps_per_epoch == 0
        return self.last_step_samples if is_tail else self.global_batch_size

    def samples_before(self, step: int) -> int:
        """Training samples used by the first ``step`` steps."""
        epochs, within = divmod(step, self.steps_per_epoch)
        return epochs * self.train_samples + within * self.global_batch_size


def make_plan(
    recipe: Recipe, data: DataFacts, machine: MachineFacts, *, world_size: int, local_world_size: int
) -> Plan:
    """Work out a run's numbers.

    Raises:
        RecipeError: If batch and world do not fit together, or a length comes to nothing.
    """
    reasons = {**machine.reasons, **data.reasons}
    no_gpu = "no GPU was found that could be used"
    reasons["parallel.device"] = no_gpu if machine.device == "cpu" else f"a {machine.device} device was found"
    micro = micro_batch_size(recipe, world_size, reasons)
    batch = recipe.batch.global_size
    if data.train_samples < 1:
        raise RecipeError("there are no training samples; check data.path and data.validation_fraction.")
    _check_evaluation(recipe, data, reasons)
    if batch > data.train_samples:
        reasons["batch.global_size"] = f"an epoch has only {data.train_samples} samples: each step uses all of them"
    steps_per_epoch = math.ceil(data.train_samples / batch)
    last_step = data.train_samples - (steps_per_epoch - 1) * batch
    lengths = Lengths(data.train_samples, batch)
    total = lengths.total(recipe.train.duration)
    rates = plan_schedule(recipe, lengths, total, reasons)
    if total >= steps_per_epoch and last_step // (batch // micro) < 2:
        reasons["batch.tail"] = "an epoch's last step has micro-batches of one sample, too few for BatchNorm"
    return Plan(
        world_size=world_size,
        local_world_size=local_world_size,
        device=machine.device,
        device_name=machine.device_name,
        precision=resolve_precision(recipe, machine, reasons),
        channels_last=resolve_channels_last(recipe, machine, reasons),
        strategy=_strategy(recipe, world_size, batch // micro, reasons),
        threads_per_process=resolve_threads(recipe, machine, local_world_size, reasons),
        train_samples=data.train_samples,
        evaluation_samples=data.evaluation_samples,
        data=data.description,
        global_batch_size=batch,
        micro_batch_size=micro,
        accumulation_steps=batch // (micro * world_size),
        logical_ranks=batch // micro,
        steps_per_epoch=steps_per_epoch,
        last_step_samples=last_step,
        total_steps=total,
        total_epochs=total / steps_per_epoch,
        until_step=None if recipe.train.until is None else lengths.within("train.until", recipe.train.until, total),
        **vars(rates),
        evaluate_every_steps=lengths.interval("evaluate.every", recipe.evaluate.every, total),
        evaluation_batch_size=resolve_evaluation_batch(recipe, reasons),
        checkpoint_every_steps=lengths.interval("checkpoint.every", _in_steps(recipe.checkpoint.every), total),
        checkpoint_every_seconds=_in_seconds(recipe.checkpoint, reasons),
        log_every_steps=lengths.interval("telemetry.log_every", recipe.telemetry.log_every, total) or 1,
        unfreeze_steps=_unfreeze_steps(recipe, lengths, total),
        profile_steps=plan_profile(recipe.telemetry.profile, lengths, total, machine.device),
        reasons={key: why for key, why in reasons.items() if _is_open(recipe, key)},
        unused=unused_keys(recipe, data, world_size) | unused_in_schedule(recipe, rates),
    )


def _unfreeze_steps(recipe: Recipe, lengths: Lengths, total: int) -> dict[str, int]:
    found = {}
    for pattern, length in recipe.model.unfreeze.items():
        found[pattern] = steps = lengths.steps(length, total)
        if not 0 < steps < total:
            raise RecipeError(
                f"model.unfreeze: '{pattern}' stays frozen for '{length}', which is {steps} of the run's {total} "
                "steps; it must be some of them, and not all."
            )
    return found


def _in_steps(every: Duration | TimeSpan | str | None) -> Duration | None:
    return every if isinstance(every, Duration) else None


def _in_seconds(checkpoint: Checkpoint, reasons: dict[str, str]) -> float | None:
    if checkpoint.every == "auto":
        reasons["checkpoint.every"] = (
            "by the clock: the square root of twice what a save costs, times checkpoint.mtbf "
            f"({checkpoint.mtbf}), once a save was measured (Young 1974)"
        )
    return checkpoint.every.seconds if isinstance(checkpoint.every, TimeSpan) else None


# Reasons that are told although the key was not left open.
_ALWAYS_TOLD = (
    "batch.global_size",
    "batch.tail",
    "optimizer.lr",
    "evaluate.top_k",
    "evaluate.every",
    "data.validation",
    "parallel.exact",
    "parallel.affinity",
)


def _is_open(recipe: Recipe, key: str) -> bool:
    """Whether a reason answers a question that the recipe left open."""
    if key in _ALWAYS_TOLD:
        return True
    *path, name = key.split(".")
    section: object = recipe
    for part in path:
        section = getattr(section, part, None)
    if not dataclasses.is_dataclass(section) or not hasattr(section, name):
        return False
    applies = applies_of(type(section), name)
    has_effect = applies is None or applies.allow(getattr(section, applies.to))
    return has_effect and getattr(section, name) == "auto"


def _unused_with_fp16() -> dict[str, str]:
    why = "fp16's loss scaling leaves out every step whose gradient is not finite"
    return {"train.nonfinite": why, "train.max_nonfinite": why}


def unused_keys(recipe: Recipe, data: DataFacts, world_size: int) -> dict[str, str]:
    """Dotted keys that ask for something which has no effect on this data and in this world, with the reason.

    A request that is met anyway is not in vain: ``off``, ``auto``, ``false``, or no loader processes where none are.
    """
    found = _unused_with_fp16() if recipe.train.precision == "fp16" else {}
    found |= _unused_weights(recipe)
    backend = data.description.get("backend", "pytorch")
    if backend != "pytorch":
        why = f"the {backend} back-end, which was chosen here, has no loader processes (data.backend=pytorch has)"
        found["data.prefetch"] = why
        if recipe.data.workers not in ("auto", 0):
            found["data.workers"] = why
    elif data.description.get("workers") == 0:
        found["data.prefetch"] = "there are no loader processes (see data.workers)"
    for key in ("data.validation_fraction", "evaluate.top_k"):
        if key in data.reasons:
            found[key] = data.reasons[key]
    found |= _unused_in_data(recipe.data) | unused_in_profile(recipe.telemetry.profile)
    if recipe.optimizer.decay_norm_and_bias and recipe.optimizer.weight_decay == 0:
        found["optimizer.decay_norm_and_bias"] = "with optimizer.weight_decay=0 nothing decays"
    if recipe.parallel.exact or world_size == 1:
        why = f"{'an exact run' if recipe.parallel.exact else 'one process'} has no buckets"
        found |= {"parallel.bucket_cap_mb": why, "parallel.gradient_compression": why}
    if recipe.evaluate.every is None or data.evaluation_samples == 0:
        why = "evaluate.every=off" if recipe.evaluate.every is None else "no samples are held out"
        keys = ("evaluate.metric", "evaluate.top_k", "evaluate.batch_size")
        found |= {key: f"nothing is evaluated ({why})" for key in keys if _asked(recipe, key) != "auto"}
        if recipe.evaluate.every is not None:
            found["evaluate.every"] = f"nothing is evaluated ({why})"
    return found


def _unused_weights(recipe: Recipe) -> dict[str, str]:
    found = unused_in_adapters(recipe.model.adapters)
    partly = recipe.model.initialize_partly and recipe.model.initialize_from is None
    if partly:
        found["model.initialize_partly"] = "there is nothing to take (model.initialize_from)"
    return found


def _unused_in_data(data: Data) -> dict[str, str]:
    """Keys that say more of what is not done at all."""
    found: dict[str, str] = {}
    mix, augment, jitter = data.mix, data.augment, data.augment.jitter
    if mix.mixup == 0 and mix.cutmix == 0:
        why = "nothing is mixed (data.mix.mixup, data.mix.cutmix)"
        found |= dict.fromkeys(("data.mix.switch", "data.mix.probability", "data.mix.epochs"), why)
    elif mix.mixup == 0 or mix.cutmix == 0:
        found["data.mix.switch"] = "there is one kind of mixing"
    if augment.erase == 0:
        why = "nothing is erased (data.augment.erase)"
        found |= dict.fromkeys(("data.augment.erase_scale", "data.augment.erase_ratio"), why)
    if data.progressive.start_size is None:
        why = "images do not grow (data.progressive.start_size)"
        found |= dict.fromkeys((f"data.progressive.{key}" for key in ("begin", "end", "multiple")), why)
    if not any((jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)):
        found["data.augment.jitter.probability"] = "there is no jitter"
    return found


def _asked(recipe: Recipe, dotted: str) -> object:
    section, _, name = dotted.partition(".")
    return getattr(getattr(recipe, section, None), name, None)


def _check_evaluation(recipe: Recipe, data: DataFacts, reasons: dict[str, str]) -> None:
    nothing = recipe.evaluate.every is None or data.evaluation_samples == 0
    if nothing and recipe.evaluate.patience is not None:
        why = "evaluate.every=off" if recipe.evaluate.every is None else "no held-out samples"
        raise RecipeError(
            f"evaluate.patience={recipe.evaluate.patience} has no effect with {why}: nothing is ever evaluated; "
            "set evaluate.patience=off, or evaluate."
        )
    if data.evaluation_samples == 0:
        reasons["evaluate.every"] = "there are no held-out samples: nothing is evaluated"


def resolve_precision(recipe: Recipe, machine: MachineFacts, reasons: dict[str, str]) -> str:
    """The arithmetic of ``train.precision``."""
    asked = recipe.train.precision
    if asked != "auto":
        return asked
    reasons["train.precision"] = machine.reasons.get("fast_bf16", "")
    reasons.pop("fast_bf16", None)
    return "bf16" if machine.fast_bf16 else "fp32"


def resolve_channels_last(recipe: Recipe, machine: MachineFacts, reasons: dict[str, str]) -> bool:
    """The memory format of ``model.channels_last``."""
    asked = recipe.model.channels_last
    if asked != "auto":
        return asked
    chosen = machine.device in ("cpu", "cuda", "xpu")
    reasons["model.channels_last"] = (
        f"convolutions on {machine.device} have kernels for it" if chosen else f"{machine.device} gains nothing by it"
    )
    return chosen


def _strategy(recipe: Recipe, world_size: int, logical_ranks: int, reasons: dict[str, str]) -> str:
    asked = recipe.parallel.strategy
    if recipe.parallel.exact:
        if asked != "auto":
            raise RecipeError(
                f"parallel.exact=true adds gradients up in its own order, and parallel.strategy={asked} does not; "
                "leave the strategy at auto, or turn exactness off."
            )
        reasons["parallel.strategy"] = "parallel.exact: gradients are added along one tree, whatever the processes"
        reasons["parallel.exact"] = _cost_of_exact(logical_ranks, world_size)
        return "exact"
    if asked == "auto":
        reasons["parallel.strategy"] = _plural(world_size, "process")
        return "ddp" if world_size > 1 else "single"
    if asked == "single" and world_size > 1:
        raise RecipeError(f"parallel.strategy=single with {world_size} processes; use ddp, auto, or one process.")
    if asked == "ddp" and world_size == 1:
        raise RecipeError("parallel.strategy=ddp has no effect with one process; use auto, or --processes 2 or more.")
    return asked


def _cost_of_exact(logical_ranks: int, world_size: int) -> str:
    per_process = logical_ranks // world_size
    depth = math.ceil(math.log2(per_process))
    # One at work, and the partial sums of a process's leaves; those that are no aligned power of two leave more.
    held = 2 + (depth if per_process & (per_process - 1) == 0 else 2 * depth - 1)
    memory = f"memory for up to {held} gradients per process"
    if world_size == 1:
        return f"it costs {memory}, where there would be one"
    return (
        f"it costs {memory}, where ddp holds one, and the time of their exchange, which ddp hides behind the backward "
        "pass (measured in docs/guide/several-processes.md)"
    )


def resolve_threads(recipe: Recipe, machine: MachineFacts, local_world_size: int, reasons: dict[str, str]) -> int:
    """CPU threads per process, ``parallel.threads``."""
    asked = recipe.parallel.threads
    if asked != "auto":
        return asked
    if recipe.parallel.exact and machine.device == "cpu":
        reasons["parallel.threads"] = "parallel.exact: sums over one thread do not depend on the number of processes"
        return 1
    if machine.own_cores is not None:
        reasons["parallel.threads"] = "the physical cores that parallel.affinity gives it, or fewer (OMP_NUM_THREADS)"
        return min(machine.own_cores, machine.threads or machine.own_cores)
    share = max(1, machine.cores // local_world_size)
    if machine.threads not in (None, share):
        reasons["parallel.threads"] = "as OMP_NUM_THREADS says"
        return machine.threads
    reasons["parallel.threads"] = f"{_plural(machine.cores, 'core')} for {_plural(local_world_size, 'process')} here"
    return share


def resolve_evaluation_batch(recipe: Recipe, reasons: dict[str, str]) -> int:
    """Samples per evaluation batch; never a function of the number of processes."""
    asked = recipe.evaluate.batch_size
    if asked != "auto":
        return asked
    size = min(256, recipe.batch.global_size)
    reasons["evaluate.batch_size"] = "independent of the number of processes, so that every sample is scored alike"
    return size


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"
