"""The plan: every number that follows from a recipe, its data, this machine and the number of processes.

Every derived number is computed here, once, with integer checks, so that a plan for 64 ranks needs no 64
processes. The trainer follows the plan and computes nothing of its own.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from paceline.errors import RecipeError
from paceline.recipe.batching import micro_batch_size, named_sizes, unused_ghosts
from paceline.recipe.compute import Compiled, Sizes, check_fp8, plan_compilation, resolve_float32_matmul
from paceline.recipe.layers import applies_of
from paceline.recipe.noise import check_noise_scale
from paceline.recipe.phases import BatchPhase, Epochs
from paceline.recipe.profile import plan_profile
from paceline.recipe.rates import Lengths, Rates, plan_schedule
from paceline.recipe.running import Checkpoint
from paceline.recipe.schema import Recipe
from paceline.recipe.strategy import ParameterNumbers, check_sharding, choose_strategy, unused_by, weigh
from paceline.recipe.unused import unused_keys
from paceline.units import Duration, TimeSpan

Occasion = Literal["evaluate", "checkpoint", "log", "noise_scale"]
"""What is done now and then."""


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What the plan must know of the data.

    Attributes:
        train_samples: Samples in one training epoch.
        evaluation_samples: Samples held out for evaluation; 0 if there are none.
        description: Further facts for the reader, by name (classes, image size, back-end, ...).
        reasons: Why an `auto` became what it is, and why a key that knows no `auto` is not used, by dotted key.
        unused: Dotted keys that the task has no use for, with the reason (see :func:`~paceline.recipe.unused.all_but`).
        left_out: What of the data is there and not used, a sentence for each kind.
    """

    train_samples: int
    evaluation_samples: int
    description: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What the plan must know of the machine, the same on every rank.

    Attributes:
        device: Device type the model lives on: cpu, cuda, mps or xpu.
        device_name: What the device calls itself.
        fast_bf16: Whether bf16 matrix products are faster than fp32 ones here.
        cores: CPU cores this machine lends to the run.
        threads: Threads per process that the environment asks for (OMP_NUM_THREADS), if it does.
        memory_bytes: What one process's device has, a CPU's memory shared out among its processes; None if unknown.
        lacks: What it cannot do, with the reason: ``fp8``, ``tf32``, ``bf16_products``.
        own_cores: Physical cores that ``parallel.affinity`` gives this process, if it does.
        reasons: Why, by dotted key or by ``fast_bf16``.
    """

    device: str
    device_name: str
    fast_bf16: bool
    cores: int
    threads: int | None = None
    memory_bytes: int | None = None
    lacks: dict[str, str] = field(default_factory=dict)
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
        last_step: The last one that does; None where that is the run's.
    """

    parameters: str
    tensors: int
    numbers: int
    lr_factor: float
    weight_decay: float
    first_step: int = 1
    last_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plan(Compiled, Rates):
    """Every derived number of a run. Sizes are samples, intervals are optimizer steps; None means off, or
    for a checkpoint's that it is not measured so.

    Where the batch grows, ``batch_phases`` says when and to what; micro-batches per step, steps per epoch and intervals
    are those of the first phase, and ``moments`` says after which steps something is due that is not due every so many.

    ``lengths_sha256`` is of the samples' lengths by which steps are balanced (``batch.balance``), if they are.

    ``higher_is_better`` says of each metric that the task measures which way it is better.

    ``headline`` is the metric that one looks at first, ``sample_name`` what samples are called (``images``), and
    ``weight_unit`` what they count for in a step's mean loss (``tokens``).

    ``unused`` says which keys of the recipe ask for something and have no effect in this plan, and why; ``left_out``,
    what of the data is there and not used.
    """

    world_size: int
    local_world_size: int
    device: str
    device_name: str
    device_memory_bytes: int | None
    precision: str
    float32_matmul: str
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
    noise_scale_every_steps: int | None
    batch_phases: tuple[BatchPhase, ...]
    moments: dict[Occasion, tuple[int, ...]] = field(default_factory=dict)
    lengths_sha256: str | None = None
    unfreeze_steps: dict[str, int] = field(default_factory=dict)
    freeze_after_steps: dict[str, int] = field(default_factory=dict)
    profile_steps: tuple[int, int] | None = None
    learning_rates: tuple[LearningRatePoint, ...] = ()
    higher_is_better: dict[str, bool] = field(default_factory=dict)
    headline: str = "loss"
    sample_name: str = "samples"
    weight_unit: str = "samples"
    parameters: int | None = None
    parameter_groups: tuple[ParameterGroupFacts, ...] = ()
    fp8_layers: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def to_tree(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return dataclasses.asdict(self)

    @cached_property
    def epochs(self) -> Epochs:
        """Where in the epochs each step lies."""
        return Epochs(self.train_samples, self.batch_phases)

    @property
    def step_sizes(self) -> list[int]:
        """Samples of the full steps of each phase: the global batch, or an epoch that is smaller."""
        return [min(phase.global_batch_size, self.train_samples) for phase in self.batch_phases]

    def epoch_of(self, step: int) -> int:
        """Epoch that the step numbered ``step`` (from 0) belongs to."""
        return self.epochs.place(step)[0]

    def step_samples(self, position: int) -> int:
        """Samples in the global batch numbered ``position`` (from 0)."""
        return self.epochs.step_samples(position)

    def samples_before(self, step: int) -> int:
        """Training samples used by the first ``step`` steps."""
        return self.epochs.samples_before(step)

    def is_due(self, occasion: Occasion, position: int) -> bool:
        """Whether something done now and then, and at the run's end, is due after ``position`` global batches."""
        every: int | None = getattr(self, f"{occasion}_every_steps")
        if every is None:
            return False
        if position == self.total_steps:
            return True
        if occasion not in self.moments:
            return position % every == 0
        moments = self.moments[occasion]
        following = bisect_left(moments, position)
        return following < len(moments) and moments[following] == position


def make_plan(
    recipe: Recipe, data: DataFacts, machine: MachineFacts, *, world_size: int, local_world_size: int
) -> Plan:
    """Work out a run's numbers.

    Raises:
        RecipeError: If batch and world do not fit together, or a length comes to nothing.
    """
    reasons = machine.reasons | {key: f"not used: {why}" for key, why in data.unused.items()} | data.reasons
    no_gpu = "no GPU was found that could be used"
    reasons["parallel.device"] = no_gpu if machine.device == "cpu" else f"a {machine.device} device was found"
    micro = micro_batch_size(recipe, world_size, reasons)
    batch = recipe.batch.global_size
    if data.train_samples < 1:
        raise RecipeError("there are no training samples; check data.path and data.validation_fraction.")
    _check_evaluation(recipe, data, reasons)
    _explain_cut(recipe, data.train_samples, reasons)
    epochs = Epochs.cut(data.train_samples, [(at, size, size // micro) for at, size in recipe.batch.sizes().items()])
    lengths = Lengths(epochs)
    total = lengths.total(recipe.train.duration)
    _check_growth(epochs, total)
    rates = plan_schedule(recipe, lengths, total, reasons)
    most_parts = max(each.logical_ranks for each in epochs.phases)
    strategy = choose_strategy(recipe, world_size, most_parts, reasons)
    evaluation_batch = resolve_evaluation_batch(recipe, reasons)
    sizes = Sizes(
        train_samples=data.train_samples,
        global_batch_size=batch,
        logical_ranks=batch // micro,
        evaluation_samples=data.evaluation_samples,
        evaluation_batch_size=evaluation_batch,
    )
    compiled = plan_compilation(recipe, machine.device, sizes, accumulation_steps=most_parts // world_size)
    check_fp8(recipe, machine.lacks)
    if any(epochs.last_step_samples(each) // each.logical_ranks < 2 for each in epochs.finished_phases(total)):
        reasons["batch.tail"] = "an epoch's last step has micro-batches of one sample, too few for BatchNorm"
    occasions = _occasions(recipe)
    return Plan(
        world_size=world_size,
        local_world_size=local_world_size,
        device=machine.device,
        device_name=machine.device_name,
        device_memory_bytes=machine.memory_bytes,
        precision=resolve_precision(recipe, machine, reasons),
        float32_matmul=resolve_float32_matmul(recipe, machine.device, machine.lacks, reasons),
        channels_last=resolve_channels_last(recipe, machine, reasons),
        strategy=strategy,
        threads_per_process=resolve_threads(recipe, machine, local_world_size, reasons),
        train_samples=data.train_samples,
        evaluation_samples=data.evaluation_samples,
        data=data.description,
        global_batch_size=batch,
        micro_batch_size=micro,
        accumulation_steps=batch // (micro * world_size),
        logical_ranks=batch // micro,
        steps_per_epoch=epochs.phases[0].steps_per_epoch,
        last_step_samples=epochs.last_step_samples(epochs.phases[0]),
        total_steps=total,
        total_epochs=epochs.length(total),
        until_step=None if recipe.train.until is None else lengths.within("train.until", recipe.train.until, total),
        **vars(rates),
        **vars(compiled),
        evaluate_every_steps=lengths.interval("evaluate.every", occasions["evaluate"], total),
        evaluation_batch_size=evaluation_batch,
        checkpoint_every_steps=lengths.interval("checkpoint.every", occasions["checkpoint"], total),
        checkpoint_every_seconds=_in_seconds(recipe.checkpoint, reasons),
        log_every_steps=lengths.interval("telemetry.log_every", occasions["log"], total) or 1,
        noise_scale_every_steps=lengths.interval("telemetry.noise_scale", occasions["noise_scale"], total),
        batch_phases=epochs.phases,
        moments={each: found for each, every in occasions.items() if every and (found := epochs.moments(every, total))},
        **_turning_steps(recipe, lengths, total),
        profile_steps=plan_profile(recipe.telemetry.profile, lengths, total, machine.device),
        reasons={key: why for key, why in reasons.items() if _is_open(recipe, key)},
        unused=_unused(recipe, data, rates, strategy, epochs.length(total)) | unused_ghosts(recipe, micro, world_size),
    )


def _explain_cut(recipe: Recipe, samples: int, reasons: dict[str, str]) -> None:
    larger = [f"{key}={size}" for key, size in named_sizes(recipe) if size > samples]
    if larger:
        why = f"larger than the {samples} training samples, so the global batch is {samples}"
        reasons["batch.global_size"] = f"{', '.join(larger)}: {why}"


def _unused(recipe: Recipe, data: DataFacts, rates: Rates, strategy: str, epochs: float) -> dict[str, str]:
    return unused_keys(recipe, data, epochs, rates.warmup_steps) | unused_by(recipe, strategy) | data.unused


def with_network(plan: Plan, recipe: Recipe, numbers: ParameterNumbers) -> Plan:
    """A plan with what the size of the network decides.

    Raises:
        RecipeError: If its state is to be spread over processes, and the rest of the recipe does not go with that.
    """
    plan = replace(plan, parameters=numbers.trained)
    fewest_parts = min(each.logical_ranks for each in plan.batch_phases)
    check_noise_scale(recipe, plan.strategy, fewest_parts=fewest_parts)
    if recipe.parallel.strategy != "auto" or plan.strategy != "ddp":
        return plan
    choice = weigh(recipe, numbers, plan.world_size, plan.device_memory_bytes)
    if choice.strategy == "fsdp":
        check_sharding(recipe, plan.world_size)
        check_noise_scale(recipe, choice.strategy, fewest_parts=fewest_parts)
    keys = unused_by(recipe, plan.strategy).keys()
    unused = {key: why for key, why in plan.unused.items() if key not in keys}
    return replace(
        plan,
        strategy=choice.strategy,
        reasons=plan.reasons | {"parallel.strategy": choice.reason},
        unused=unused | unused_by(recipe, choice.strategy),
    )


def _turning_steps(recipe: Recipe, lengths: Lengths, total: int) -> dict[str, Any]:
    """After how many steps the parameters of each pattern begin, and cease, to be trained, by the plan's fields."""
    asked = {"unfreeze": recipe.model.unfreeze, "freeze_after": recipe.model.freeze_after}
    return {f"{key}_steps": _turns(recipe, key, patterns, lengths, total) for key, patterns in asked.items()}


def _turns(recipe: Recipe, key: str, asked: Mapping[str, Duration], lengths: Lengths, total: int) -> dict[str, int]:
    if asked and recipe.model.compile:
        raise RecipeError(
            f"model.{key} does not go with model.compile=true, which settles at the start what has a gradient; "
            "leave one out."
        )
    found = {}
    for pattern, length in asked.items():
        found[pattern] = steps = lengths.steps(length, total)
        if not 0 < steps < total:
            stays = "stays frozen" if key == "unfreeze" else "is trained"
            raise RecipeError(
                f"model.{key}: '{pattern}' {stays} for '{length}', which is {steps} of the run's {total} steps; it "
                "must be some of them, and not all."
            )
    return found


def _occasions(recipe: Recipe) -> dict[Occasion, Duration | None]:
    """What is done now and then, and how often; None if it is not done so."""
    return {
        "evaluate": recipe.evaluate.every,
        "checkpoint": _in_steps(recipe.checkpoint.every),
        "log": recipe.telemetry.log_every,
        "noise_scale": recipe.telemetry.noise_scale,
    }


def _check_growth(epochs: Epochs, total: int) -> None:
    """Refuse a size that no step has.

    Raises:
        RecipeError: Naming it.
    """
    for before, phase in pairwise(epochs.phases):
        said = f"batch.growth.{phase.first_epoch}={phase.global_batch_size}"
        if phase.first_step >= total:
            raise RecipeError(
                f"{said} begins with step {phase.first_step + 1}, but the run ends with step {total}; leave it out, or "
                "lengthen train.duration."
            )
        if min(before.global_batch_size, phase.global_batch_size) >= epochs.samples:
            raise RecipeError(
                f"{said} has no effect: an epoch has only {epochs.samples} samples, and each step used all of them "
                "before; leave it out."
            )


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
    "data.path",
    "data.decoder",
    "batch.global_size",
    "batch.growth",
    "batch.tail",
    "optimizer.lr",
    "evaluate.top_k",
    "evaluate.every",
    "data.evaluation_shape",
    "data.validation",
    "data.classes",
    "data.content_digest",
    "data.subset",
    "data.only_classes",
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
    if "model.channels_last" in reasons:  # the task has no use for it
        return False
    chosen = machine.device in ("cpu", "cuda", "xpu")
    reasons["model.channels_last"] = (
        f"convolutions on {machine.device} have kernels for it" if chosen else f"{machine.device} gains nothing by it"
    )
    return chosen


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
