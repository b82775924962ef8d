"""How many GPUs does a training need to end in time, or within a budget; and with which batch and learning rate?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from paceline.clusters import find_cluster
from paceline.errors import PacelineError, RecipeError
from paceline.machine import available_cores
from paceline.recipe.batching import usable_processes
from paceline.recipe.load import load_recipe
from paceline.recipe.rates import lr_factor
from paceline.recipe.schema import Recipe
from paceline.recipe.strategy import weigh
from paceline_advisor.scaling.here import cluster_here
from paceline_advisor.scaling.room import Room, rooms
from paceline_advisor.scaling.study import Asked, Row, ScaleReport, Scaling

LrRule = Literal["none", "linear", "sqrt"]

LARGEST_WITHOUT_LOSS = 8192
"""Samples of a step up to which ResNet-50 loses no accuracy in as many epochs of ImageNet (Goyal et al. 2017)."""
CRITICAL_BATCH = 15_000
"""Where ImageNet's classifiers need twice as many samples as with small batches, over the whole training (McCandlish et
al. 2018, table 1)."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to plan for.

    Attributes:
        scaling: What to predict with; its sizes are found here.
        deadline_hours: Until the training ends; None if it may take as long as it takes.
        budget: Dollars; None for any.
        most: GPUs at most.
        lr_rule: What a step that grows with the number of GPUs makes of the learning rate; ``none`` leaves it to
            the recipe's own ``optimizer.lr_scaling``.
    """

    scaling: Asked
    deadline_hours: float | None = None
    budget: float | None = None
    most: int = 256
    lr_rule: LrRule = "none"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One number of GPUs.

    Attributes:
        row: What is predicted of it.
        reason: Why this strategy.
        learning_rate: With which to train.
        high_hours: If what several GPUs add costs more than thought.
        high_cost: Then; None without a price.
        room: What the device has room for; None if its memory is unknown.
        warning: What is to be said of its batch; empty if nothing.
    """

    row: Row
    reason: str
    learning_rate: float
    high_hours: float
    high_cost: float | None
    room: Room | None = None
    warning: str = ""

    @property
    def has_room(self) -> bool:
        """Whether it fits into memory, as far as that is known."""
        return self.room is None or self.room.fits

    @property
    def gpus(self) -> int:
        """How many."""
        return self.row.prediction.devices

    def to_json(self) -> dict[str, Any]:
        """The choice as JSON values."""
        return {
            **self.row.to_json(),
            "strategy_reason": self.reason,
            "micro_batch": self.row.prediction.samples // (self.gpus * self.row.passes),
            "fits": None if self.room is None else self.room.fits,
            "needed_bytes": None if self.room is None else self.room.needed,
            "memory_bytes": None if self.room is None else self.room.memory,
            "memory_reason": "" if self.room is None else self.room.why,
            "learning_rate": self.learning_rate,
            "hours_at_worst": self.high_hours,
            "cost_at_worst": self.high_cost,
            "warning": self.warning,
        }


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What was planned.

    Attributes:
        report: The prediction behind it.
        chosen: What to take; None if nothing tried does it, or where one device's rate is only a bound.
        choices: Everything tried.
        nearest: What comes nearest, where nothing does it; on a bound, the least that could.
        recipe_batch: The recipe's global batch.
        recipe_lr: The recipe's peak learning rate for it, by its own scaling rule.
    """

    report: ScaleReport
    chosen: Choice | None
    choices: tuple[Choice, ...]
    nearest: Choice
    recipe_batch: int
    recipe_lr: float

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            "chosen": None if self.chosen is None else self.chosen.to_json(),
            "nearest": self.nearest.to_json(),
            "choices": [each.to_json() for each in self.choices],
            "recipe_global_batch": self.recipe_batch,
            "recipe_learning_rate": self.recipe_lr,
            "basis": self.report.basis,
            "is_bound": self.report.is_bound,
            "cluster": self.report.cluster.name,
            "price_per_gpu_hour": self.report.price,
            "notices": list(self.report.notices),
        }


def plan_training(wanted: Wanted, say: Callable[[str], None]) -> TrainingPlan:
    """Choose: for a deadline the fewest GPUs, for a budget the fastest.

    Both are held against the upper end of the prediction's range.

    Raises:
        PacelineError: If something in it is unknown, or does not fit together.
    """
    asked = wanted.scaling
    _check(wanted)
    loaded = load_recipe(asked.recipe, asked.overrides)
    recipe = loaded.recipe
    sizes = _sizes(recipe, wanted)
    scaling = Scaling(recipe, loaded.name, replace(asked, sizes=sizes), say)
    found, notices = _rooms(recipe, scaling)
    scaling.shares = {size: found[size].share if size in found else share for size, share in scaling.shares.items()}
    report = scaling.report()
    if wanted.budget is not None and report.price is None:
        raise RecipeError(f"--budget needs a price, and {report.cluster.title} has none; give --price-per-gpu-hour.")
    choices = []
    for size in sizes:
        rows = [row for row in report.rows if row.prediction.devices == size]
        room = found.get(size)
        strategy, reason = _strategy(recipe, scaling, size, None if room is None else room.memory)
        if room is not None and room.strategy != strategy:
            strategy, reason = room.strategy, room.why
        row = next((row for row in rows if row.strategy == strategy), rows[0])
        choices.append(replace(_choice(row, reason, recipe, wanted, report.price), room=room))
    fitting = [each for each in choices if _fits(each, wanted)]
    best = _best(fitting, wanted) if fitting else None
    possible = [each for each in choices if each.has_room] or choices
    return TrainingPlan(
        report=replace(report, notices=(*loaded.notices, *report.notices, *notices)),
        # What no device does better than is no ground for a decision.
        chosen=None if report.is_bound else best,
        choices=tuple(choices),
        nearest=best or min(possible, key=lambda each: _excess(each, wanted)),
        recipe_batch=recipe.batch.global_size,
        recipe_lr=_recipe_rate(recipe, recipe.batch.global_size),
    )


def _rooms(recipe: Recipe, scaling: Scaling) -> tuple[dict[int, Room], tuple[str, ...]]:
    """What each size has room for, and what is to be said where that is not known."""

    def choose(size: int, memory: int) -> str:
        return _strategy(recipe, scaling, size, memory)[0]

    try:
        found = rooms(recipe, scaling.shares, scaling.cluster, scaling.device, choose)
    except PacelineError as error:
        return {}, (f"whether a batch fits into memory is not known: {error}",)
    if found:
        return found, ()
    return {}, (f"{scaling.cluster.title}: its devices' memory is unknown; whether a batch fits was not looked at",)


def _check(wanted: Wanted) -> None:
    if wanted.deadline_hours is None and wanted.budget is None:
        raise RecipeError("plan for what? Give --deadline, for example 8h, or --budget in dollars, or both.")
    grows = wanted.scaling.batch_per_device is not None
    if wanted.lr_rule != "none" and not grows:
        raise RecipeError(
            f"--lr-rule={wanted.lr_rule} has no effect while the global batch stays; give --batch-per-gpu, with which "
            "the batch grows, or leave it out."
        )


def _sizes(recipe: Recipe, wanted: Wanted) -> tuple[int, ...]:
    most = min(wanted.most, _most_devices(wanted))
    sizes = [2**power for power in range(int(math.log2(most)) + 1)]
    if wanted.scaling.batch_per_device is None:
        usable = set(usable_processes(recipe, 1, most))
        sizes = [size for size in sizes if size in usable]
    if not sizes:
        raise RecipeError("no number of GPUs can share this recipe's global batch; see batch.global_size.")
    return tuple(sizes)


def _most_devices(wanted: Wanted) -> int:
    """As many as there are; where processes compute on this machine's cores, one for each core."""
    name = wanted.scaling.cluster
    cluster = cluster_here((1,)) if name is None else find_cluster(name)
    if cluster.shares_cores:
        return available_cores()
    return cluster.most_devices or wanted.most


def _strategy(recipe: Recipe, scaling: Scaling, size: int, memory: int | None) -> tuple[str, str]:
    if size == 1:
        return "single", "1 GPU"
    if recipe.parallel.strategy != "auto":
        return recipe.parallel.strategy, f"parallel.strategy={recipe.parallel.strategy}"
    if scaling.subject.unsharded:
        return "ddp", f"{size} processes; FSDP {scaling.subject.unsharded}"
    chosen = weigh(recipe, scaling.subject.numbers, size, memory)
    return chosen.strategy, chosen.reason


def _choice(row: Row, reason: str, recipe: Recipe, wanted: Wanted, price: float | None) -> Choice:
    found = row.prediction
    assert row.hours is not None  # the recipe says how long it trains
    hours = row.hours * found.high_seconds / found.seconds
    return Choice(
        row=row,
        reason=reason,
        learning_rate=_rate(found.samples, recipe, wanted),
        high_hours=hours,
        high_cost=None if price is None else hours * found.devices * price,
        warning=_warning(found.samples, recipe, wanted),
    )


def _recipe_rate(recipe: Recipe, batch: int) -> float:
    """The peak that a run has with this batch: a recipe may scale its learning rate by itself."""
    return recipe.optimizer.lr * lr_factor(recipe, batch)


def _rate(batch: int, recipe: Recipe, wanted: Wanted) -> float:
    if wanted.lr_rule == "none":
        return _recipe_rate(recipe, batch)
    ratio = batch / recipe.batch.global_size
    rate = _recipe_rate(recipe, recipe.batch.global_size)
    return rate * (ratio if wanted.lr_rule == "linear" else math.sqrt(ratio))


def _warning(batch: int, recipe: Recipe, wanted: Wanted) -> str:
    if batch == recipe.batch.global_size:
        return ""
    if wanted.lr_rule == "none" and recipe.optimizer.lr_scaling == "none":
        return (
            f"the batch is {batch:,} in place of {recipe.batch.global_size:,}, and the learning rate stays "
            f"{recipe.optimizer.lr:g}: choose an --lr-rule"
        )
    if batch > CRITICAL_BATCH:
        return (
            f"a batch of {batch:,} is beyond the critical {CRITICAL_BATCH:,} of ImageNet's classifiers: as many "
            "epochs train worse"
        )
    if batch > LARGEST_WITHOUT_LOSS:
        return f"a batch of {batch:,} lost accuracy where {LARGEST_WITHOUT_LOSS:,} did not (ResNet-50, ImageNet)"
    return ""


def _fits(choice: Choice, wanted: Wanted) -> bool:
    return choice.has_room and _excess(choice, wanted) <= 1


def _excess(choice: Choice, wanted: Wanted) -> float:
    """How many times as long, or as dear, as it may be."""
    late = 0.0 if wanted.deadline_hours is None else choice.high_hours / wanted.deadline_hours
    dear = 0.0 if wanted.budget is None or choice.high_cost is None else choice.high_cost / wanted.budget
    return max(late, dear)


def _best(fitting: list[Choice], wanted: Wanted) -> Choice:
    if wanted.deadline_hours is not None:
        return min(fitting, key=lambda each: each.gpus)
    return min(fitting, key=lambda each: each.high_hours)
