"""The plan: every number that follows from a recipe, its data, this machine and the number of processes.

Every derived number is computed here, once, with integer checks, so that a plan for 64 ranks does not need 64
processes. The trainer follows the plan and derives nothing itself.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

from paceline.errors import RecipeError, setting_error
from paceline.host.world import World
from paceline.parsing.units import Duration, TimeSpan
from paceline.plan.batching import explain_batching, largest_micro_batch, micro_batch_size, sizes_by_key
from paceline.plan.compute import (
    Compiled,
    explain_compute,
    plan_compilation,
    resolve_channels_last,
    resolve_evaluation_batch,
    resolve_float32_matmul,
    resolve_precision,
    resolve_threads,
    without_slow_bf16,
)
from paceline.plan.epochs import Epochs
from paceline.plan.facts import DataFacts, MachineFacts, NetworkFacts, ParameterGroupFacts, TaskFacts
from paceline.plan.rates import LearningRate, LearningRatePoint, Rates, explain_rates, plan_schedule
from paceline.plan.run_logs import check_logs
from paceline.plan.strategy import choose_strategy
from paceline.recipe.layers import effective_items
from paceline.recipe.running import Profile
from paceline.recipe.schema import Recipe
from paceline.recipe.unused import unused_keys

Occasion = Literal["evaluate", "checkpoint", "log", "noise_scale", "verify"]
"""What is done now and then."""

# Steps of the first records of a run with long record intervals, so that problems show at once.
_FIRST_LOGS = (1, 2, 5)

# torch's communication back-ends by device.
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}

_ANY_TASK = TaskFacts()
_ARRANGED_AT_MOST = 2**27  # samples; arranging as many by length or by class takes about 8 GiB in each process
_EMPTY: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Plan(TaskFacts, Compiled, Rates):
    """Every derived number of a run. Sizes are in samples, intervals in steps; None means off, or not in steps.

    Where the batch grows, ``batch_phases`` lists the sizes and when they start. Micro-batches per step, steps per epoch
    and intervals are those of the first phase, and ``moments`` lists the steps of events without a fixed interval in
    steps.

    ``unused`` lists recipe keys that have no effect in this plan, with the reason; ``left_out`` lists data that exists
    but is not used.
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
    total_epochs: float
    until_step: int | None
    evaluate_every_steps: int | None
    evaluation_batch_size: int
    checkpoint_every_steps: int | None
    checkpoint_every_seconds: float | None
    log_every_steps: int
    noise_scale_every_steps: int | None
    verify_every_steps: int | None
    moments: dict[Occasion, tuple[int, ...]] = field(default_factory=dict)
    unfreeze_steps: dict[str, int] = field(default_factory=dict)
    freeze_after_steps: dict[str, int] = field(default_factory=dict)
    profile_steps: tuple[int, int] | None = None
    learning_rates: tuple[LearningRatePoint, ...] = ()
    parameters: int | None = None
    parameter_groups: tuple[ParameterGroupFacts, ...] = ()
    fp8_layers: tuple[str, ...] = ()
    network_config: dict[str, Any] | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def to_tree(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return dataclasses.asdict(self)

    @cached_property
    def epochs(self) -> Epochs:
        """How steps map to epochs."""
        return Epochs(self.train_samples, self.batch_phases)

    @property
    def step_sizes(self) -> list[int]:
        """Samples of a full step in each phase: the global batch, or the epoch if that is smaller."""
        return [min(phase.global_batch_size, self.train_samples) for phase in self.batch_phases]

    @property
    def end(self) -> int:
        """The step after which this run stops."""
        return self.total_steps if self.until_step is None else self.until_step

    @property
    def evaluates(self) -> bool:
        """Whether the run is evaluated at all: it has held-out samples, and evaluations are due."""
        return self.evaluation_samples > 0 and self.evaluate_every_steps is not None

    def epoch_of(self, step: int) -> int:
        """Return the epoch that the step numbered ``step`` (from 0) belongs to."""
        return self.epochs.locate(step)[0]

    def step_samples(self, position: int) -> int:
        """Return the samples in the global batch numbered ``position`` (from 0)."""
        return self.epochs.step_samples(position)

    def samples_before(self, step: int) -> int:
        """Return the training samples used by the first ``step`` steps."""
        return self.epochs.samples_before(step)

    def is_due(self, occasion: Occasion, position: int) -> bool:
        """Whether something periodic, also due at the run's end, is due after ``position`` global batches."""
        every = {
            "evaluate": self.evaluate_every_steps,
            "checkpoint": self.checkpoint_every_steps,
            "log": self.log_every_steps,
            "noise_scale": self.noise_scale_every_steps,
            "verify": self.verify_every_steps,
        }[occasion]
        if every is None:
            return False
        if position == self.total_steps or (occasion == "log" and position in _FIRST_LOGS and every > max(_FIRST_LOGS)):
            return True
        if occasion not in self.moments:
            return position % every == 0
        moments = self.moments[occasion]
        following = bisect_left(moments, position)
        return following < len(moments) and moments[following] == position


def make(
    recipe: Recipe,
    *,
    world: World,
    data: DataFacts,
    machine: MachineFacts,
    task: TaskFacts = _ANY_TASK,
    network: NetworkFacts | None = None,
    notes: Mapping[str, str] = _EMPTY,
) -> Plan:
    """Derive a run's numbers from its recipe and the facts: a pure function, and the only one that makes plans.

    Args:
        recipe: The recipe.
        world: The run's processes.
        data: Facts of the data.
        machine: Facts of the machine.
        task: Facts of the task.
        network: Facts of the network; until they are known, ``auto`` does not become ``fsdp``.
        notes: Additional reasons, by the key that they explain.

    Raises:
        RecipeError: If batch and world do not fit together, a duration is less than a step, or two keys are mutually
            exclusive.
    """
    _check_facts(recipe, data, machine, task)
    machine = without_slow_bf16(machine, network)
    micro = micro_batch_size(recipe, world.world_size)
    epochs = Epochs.cut(data.train_samples, [(at, size, size // micro) for at, size in recipe.batch.sizes().items()])
    total = epochs.total(recipe.train.duration)
    _check_growth(epochs, total)
    rates = plan_schedule(recipe, epochs, total)
    parts = [each.logical_ranks for each in epochs.phases]
    strategy, why_strategy = choose_strategy(recipe, world.world_size, parts, network, machine)
    threads, why_threads = resolve_threads(recipe, machine, world.local_world_size)
    largest = largest_micro_batch(recipe, micro, world.world_size)
    given = machine.reasons | {key: f"not used: {why}" for key, why in data.unused.items()} | data.reasons
    reasons = (
        explain_compute(recipe, machine)
        | given
        | explain_batching(recipe, world.world_size, micro, data.train_samples)
        | _explain_steps(recipe, data, epochs, total)
        | explain_rates(recipe, epochs, rates)
        | why_strategy
        | {"parallel.backend": f"{_BACKENDS.get(machine.device, 'none')} is torch's for {machine.device}"}
        | {"parallel.threads": why_threads, "evaluate.metric": f"{task.headline}: the task's own choice"}
    )
    notes = check_logs(recipe, data.evaluation_samples, rates.peak_lr) | dict(notes)
    return Plan(
        world_size=world.world_size,
        local_world_size=world.local_world_size,
        device=machine.device,
        device_name=machine.device_name,
        device_memory_bytes=machine.memory_bytes,
        precision=resolve_precision(recipe, machine),
        float32_matmul=resolve_float32_matmul(recipe, machine),
        channels_last=resolve_channels_last(recipe, machine, is_useful="model.channels_last" not in given),
        strategy=strategy,
        threads_per_process=threads,
        train_samples=data.train_samples,
        evaluation_samples=data.evaluation_samples,
        data=data.description,
        global_batch_size=recipe.batch.global_size,
        micro_batch_size=micro,
        accumulation_steps=parts[0] // world.world_size,
        logical_ranks=parts[0],
        evaluation_batch_size=resolve_evaluation_batch(recipe),
        learning_rates=LearningRate.of(recipe.schedule, rates).phases(),
        **vars(rates),
        **vars(plan_compilation(recipe, machine, data, parts, world.world_size)),
        **_in_steps(recipe, epochs, total, machine.device),
        **vars(task),
        parameters=None if network is None else network.parameters.trained,
        parameter_groups=() if network is None else network.groups,
        fp8_layers=() if network is None else network.fp8_layers,
        network_config=None if network is None else network.config,
        reasons={key: why for key, why in reasons.items() if _is_shown(recipe, key)} | notes,
        unused=_unused(recipe, data, task, strategy, rates.warmup_steps, epochs.length(total), largest),
        left_out=data.left_out,
    )


def _check_facts(recipe: Recipe, data: DataFacts, machine: MachineFacts, task: TaskFacts) -> None:
    if data.train_samples < 1 or recipe.data.score_all:
        raise RecipeError(
            "there are no training samples; check data.path and data.validation_fraction.", key="data.path"
        )
    sorts = {"batch.balance": task.lengths_sha256, "data.sampling": task.sampling, "data.mixture": task.mixture}
    key = next((each for each, is_used in sorts.items() if is_used), None)
    if key is not None and data.train_samples > _ARRANGED_AT_MOST:
        raise RecipeError(
            f"{key} sorts all {data.train_samples:,} samples of an epoch, and at most {_ARRANGED_AT_MOST:,} can be "
            "sorted; turn it off, or train on fewer samples.",
            key=key,
        )
    if recipe.evaluate.patience is not None and (recipe.evaluate.every is None or data.evaluation_samples == 0):
        reason = "evaluate.every=off" if recipe.evaluate.every is None else "no held-out samples"
        raise setting_error(
            "evaluate.patience",
            recipe.evaluate.patience,
            f"has no effect with {reason}: nothing is evaluated; set evaluate.patience=off, or evaluate.",
        )
    if recipe.train.precision == "fp8" and (lacking := machine.lacks.get("fp8")):
        raise setting_error("train.precision", "fp8", f"is not available here: {lacking}; use bf16, or auto.")


def _explain_steps(recipe: Recipe, data: DataFacts, epochs: Epochs, total: int) -> dict[str, str]:
    reasons = {
        "checkpoint.every": "by time: the square root of twice the cost of a save times checkpoint.mtbf "
        f"({recipe.checkpoint.mtbf}), once a save was measured (Young 1974)"
    }
    if data.evaluation_samples == 0:
        reasons["evaluate.every"] = "there are no held-out samples: nothing is evaluated"
    if larger := [f"{key}={size}" for key, size in sizes_by_key(recipe) if size > data.train_samples]:
        reason = f"larger than the {data.train_samples} training samples, so the global batch is {data.train_samples}"
        reasons["batch.global_size"] = f"{', '.join(larger)}: {reason}"
    if any(epochs.last_step_samples(each) // each.logical_ranks < 2 for each in epochs.finished_phases(total)):
        reasons["batch.tail"] = "an epoch's last step has micro-batches of one sample, too few for BatchNorm"
    return reasons


def _unused(
    recipe: Recipe, data: DataFacts, task: TaskFacts, strategy: str, warmup_steps: int, epochs: float, largest: int
) -> dict[str, str]:
    """Return unused keys: by their marks (:class:`~paceline.recipe.fields.Needs`), and then by the data."""
    backend, mix, progressive = data.description.get("backend", "pytorch"), recipe.data.mix, recipe.data.progressive
    rule = recipe.optimizer.rule
    scales = recipe.optimizer.has_layers_to_scale or recipe.schedule.weight_decay.name != "constant"
    conditions = {
        "warm-up": warmup_steps > 0,
        "held-out samples": data.evaluation_samples > 0,
        "a back-end with loader processes": backend not in ("memory", "synthetic"),
        "loader processes": data.description.get("workers") != 0,
        "samples of unequal length": task.lengths_sha256 is not None,
        "several groups in a micro-batch": recipe.model.ghost_batch_norm != largest,
        "epochs after mixing": mix.epochs is None or mix.epochs < epochs,
        "epochs of growing images": progressive.begin < epochs,
        "layers to scale": scales or not rule.unscaled,
        "an optimizer with momentum": rule.has_momentum,
        "numbers to learn": "target_mean" in data.description,
        "ddp": strategy == "ddp",
        "fsdp": strategy == "fsdp",
        "a strategy that was asked for": recipe.parallel.strategy != "auto",
    }
    words = {
        "backend": backend,
        "epochs": f"{epochs:g}",
        "largest_micro_batch": largest,
        "optimizer": recipe.optimizer.name,
        "unscaled": rule.unscaled,
        "strategy": {"exact": "an exact run", "single": "one process"}.get(strategy, strategy),
    }
    # The shape determines how images are predicted, whatever the held-out images are like.
    unused_by_data = {key: why for key, why in unused_in_data(data).items() if key != "data.evaluation_shape"}
    return unused_keys(recipe, conditions, words) | unused_by_data | data.unused


# Keys whose use depends only on the data, with the data's reasons (``DataFacts.reasons``).
_REASONS_FROM_DATA = (
    "data.validation_fraction",
    "data.split_by",
    "data.saved_split",
    "data.download",
    "data.options",
    "data.evaluation_shape",
    "data.augment.shrink_on_load",
    "evaluate.top_k",
    "evaluate.thresholds",
)


def unused_in_data(data: DataFacts) -> dict[str, str]:
    """Return keys that have no effect on this data, with the reason."""
    reasons = data.unused | data.reasons
    if "label_thresholds" not in data.description:
        reasons |= {"evaluate.thresholds": "only image_multilabel has them"}
    return {key: reasons[key] for key in _REASONS_FROM_DATA if key in reasons}


def _in_steps(recipe: Recipe, epochs: Epochs, total: int, device: str) -> dict[str, Any]:
    """Return the fields of a plan that give durations or intervals."""
    train, every = recipe.train, recipe.checkpoint.every
    intervals: dict[Occasion, tuple[str, Duration | None]] = {
        "evaluate": ("evaluate.every", recipe.evaluate.every),
        "checkpoint": ("checkpoint.every", every if isinstance(every, Duration) else None),
        "log": ("telemetry.log_every", recipe.telemetry.log_every),
        "noise_scale": ("telemetry.noise_scale", recipe.telemetry.noise_scale),
        "verify": ("verify.every", recipe.verify.every),
    }
    freezing = {"unfreeze": recipe.model.unfreeze, "freeze_after": recipe.model.freeze_after}
    return {
        "steps_per_epoch": epochs.phases[0].steps_per_epoch,
        "last_step_samples": epochs.last_step_samples(epochs.phases[0]),
        "total_epochs": epochs.length(total),
        "until_step": None if train.until is None else epochs.steps_within("train.until", train.until, total),
        **{f"{name}_every_steps": epochs.interval(key, each, total) for name, (key, each) in intervals.items()},
        "checkpoint_every_seconds": every.seconds if isinstance(every, TimeSpan) else None,
        "moments": {
            name: at for name, (_, each) in intervals.items() if each and (at := epochs.due_steps(each, total))
        },
        **{f"{key}_steps": _freeze_steps(recipe, key, patterns, epochs, total) for key, patterns in freezing.items()},
        "profile_steps": _profiled(recipe.telemetry.profile, epochs, total, device),
    }


def _freeze_steps(
    recipe: Recipe, key: str, durations: Mapping[str, Duration], epochs: Epochs, total: int
) -> dict[str, int]:
    if durations and recipe.model.compile:
        raise RecipeError(
            f"model.{key} does not work with model.compile=true, which fixes at the start what has a gradient; leave "
            "one out.",
            key=f"model.{key}",
        )
    result = {}
    for pattern, length in durations.items():
        result[pattern] = steps = epochs.steps_in(length, total)
        if not 0 < steps < total:
            verb = "stays frozen" if key == "unfreeze" else "is trained"
            raise RecipeError(
                f"model.{key}: '{pattern}' {verb} for '{length}', which is {steps} of the run's {total} steps; it "
                "must be more than none and fewer than all.",
                key=f"model.{key}",
            )
    return result


def _check_growth(epochs: Epochs, total: int) -> None:
    """Refuse a batch size that no step has.

    Raises:
        RecipeError: Naming it.
    """
    for previous, phase in pairwise(epochs.phases):
        key, size = f"batch.growth.{phase.first_epoch}", phase.global_batch_size
        if phase.first_step >= total:
            raise setting_error(
                key,
                size,
                f"begins with step {phase.first_step + 1}, but the run ends with step {total}; leave it out, or "
                "lengthen train.duration.",
            )
        if min(previous.global_batch_size, size) >= epochs.samples:
            raise setting_error(
                key,
                size,
                f"has no effect: an epoch has only {epochs.samples} samples, and each step already uses all of them; "
                "leave it out.",
            )


# Reasons that are shown although the key was set.
_ALWAYS_SHOWN = (
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
    "data.copies",
    "data.subset",
    "data.only_classes",
    "data.sampling",
    "data.mixture",
    "train.class_weights",
    "parallel.exact",
    "parallel.affinity",
)


def _is_shown(recipe: Recipe, key: str) -> bool:
    """Whether a reason explains a choice that the recipe left open."""
    if key in _ALWAYS_SHOWN:
        return True
    *path, name = key.split(".")
    section: object = recipe
    for part in path:
        section = getattr(section, part, None)
    if not dataclasses.is_dataclass(section) or not hasattr(section, name):
        return False
    return dict(effective_items(section)).get(name) == "auto"


def _profiled(profile: Profile, epochs: Epochs, total: int, device: str) -> tuple[int, int] | None:
    """Return the first profiled global batch, from 0, and the one after the last; None without a profile.

    Raises:
        RecipeError: If the run has no such steps, or the tool does not support the device.
    """
    if profile.steps is None:
        return None
    if profile.tool == "nsys" and device != "cuda":
        raise setting_error(
            "telemetry.profile.tool",
            "nsys",
            f"marks steps for NVIDIA's Nsight Systems, and this run is on {device}; use telemetry.profile.tool=torch.",
        )
    first = epochs.steps_in(profile.after, total)
    if first < 1:
        problem = "leaves the profiler no warm-up step; give at least '1 step'."
        raise setting_error("telemetry.profile.after", profile.after, problem)
    if first + profile.steps > total:
        raise RecipeError(
            f"telemetry.profile asks for steps {first + 1} to {first + profile.steps}, beyond the run's {total}; lower "
            "telemetry.profile.after or telemetry.profile.steps.",
            key="telemetry.profile.steps",
            value=profile.steps,
        )
    return first, first + profile.steps
