"""Choose the number of GPUs for a deadline or a budget, with batch and learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from paceline.command import Log
from paceline.errors import PacelineError, RecipeError
from paceline.host.machine import available_cores
from paceline.pages.shown import Shown
from paceline.parsing.units import counted
from paceline.plan.batching import usable_processes
from paceline.plan.rates import lr_factor
from paceline.plan.strategy import choose_automatically
from paceline.recipe.schema import Recipe
from paceline_advisor import Json, as_json, frozen, picked
from paceline_advisor.scaling.commands import PlanTraining
from paceline_advisor.scaling.room import Room, cluster_of, rooms
from paceline_advisor.scaling.study import (
    MOST_HERE,
    ScaleReport,
    Scaling,
    ScalingRow,
    device_words,
    filled_table,
    shown_hours,
)

LARGEST_WITHOUT_LOSS = 8192
"""Largest batch, in samples, that costs ResNet-50 no accuracy in as many epochs of ImageNet (Goyal et al. 2017)."""
CRITICAL_BATCH = 15_000
"""Batch, in samples, with which ImageNet classifiers need twice as many samples as with small batches, on average over
training (McCandlish et al. 2018, table 1)."""
ONE_DEVICE_UNCERTAINTY = 0.08
"""Added to the hours of one device, as a fraction of them, for evaluations and records; assumed, not measured."""

_COLUMNS = (
    *("strategy", "batch", "lr", "samples/s", "efficiency", "time", "time at worst", "cost"),
    *("cost at worst", "limited by"),
)


@frozen
class Choice:
    """A candidate number of GPUs.

    Attributes:
        row: Its prediction.
        reason: Why this strategy.
        learning_rate: Learning rate to use.
        hours: Predicted hours.
        high_hours: Hours at the upper end of the predicted range.
        high_cost: Cost in dollars at that end; None without a price.
        room: What fits on the device; None if its memory is unknown.
        warning: A warning about its batch; otherwise empty.
    """

    row: ScalingRow
    reason: str
    learning_rate: float
    hours: float
    high_hours: float
    high_cost: float | None
    room: Room | None = None
    warning: str = ""

    @property
    def has_room(self) -> bool:
        """Whether it fits into memory, as far as is known."""
        return self.room is None or self.room.fits

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.row.prediction.devices

    def why_not(self, options: PlanTraining) -> str:
        """Return why it is not chosen although it may be faster than the choice."""
        if not self.has_room:
            return "does not fit into memory"
        if options.budget is not None and self.high_cost is not None and self.high_cost > options.budget:
            return f"at worst ${self.high_cost:,.2f}, over --budget {options.budget:g}"
        if self.high_cost is not None:
            return f"at worst ${self.high_cost:,.2f}, more than the deadline needs"
        return "more device hours than the deadline needs"

    @property
    def high_gpu_hours(self) -> float:
        """Hours of all GPUs that are paid for, at the upper end of the predicted range; proportional to the cost."""
        return round(self.high_hours * self.row.paid, 6)

    def excess(self, options: PlanTraining) -> float:
        """Return its worst-case time or cost relative to the allowed one, whichever ratio is larger."""
        over_deadline = 0.0 if options.deadline_hours is None else self.high_hours / options.deadline_hours
        over_budget = 0.0 if options.budget is None or self.high_cost is None else self.high_cost / options.budget
        return max(over_deadline, over_budget)

    def table_row(self) -> tuple[object, ...]:
        """Return its line in the table."""
        found, row = self.row.prediction, self.row
        return (
            *(found.devices, row.strategy, f"{row.batch:,}", f"{self.learning_rate:g}", f"{found.rate:,.0f}"),
            *(f"{found.efficiency:.1%}", shown_hours(self.hours), shown_hours(self.high_hours)),
            *("" if cost is None else f"${cost:,.2f}" for cost in (row.cost, self.high_cost)),
            found.limit if self.has_room else "memory: does not fit",
        )

    def to_json(self) -> Json:
        """Return the choice as JSON values."""
        room, found = self.room, self.row.prediction
        return {
            **self.row.to_json(),
            "strategy_reason": self.reason,
            "micro_batch": found.samples // (found.devices * self.row.passes),
            "fits": room and room.fits,
            "needed_bytes": room and room.needed,
            "memory_bytes": room and room.memory,
            "memory_reason": room.why if room else "",
            **picked(self, "learning_rate", "warning"),
            "hours_at_worst": self.high_hours,
            "cost_at_worst": self.high_cost,
        }


@frozen
class TrainingPlan:
    """Result of the planning.

    Attributes:
        report: The prediction behind it.
        chosen: The chosen candidate; None if none meets the target, or if one device's rate is only a bound.
        choices: All candidates.
        nearest: The best candidate that meets the target by the prediction, also by a bound; otherwise the closest.
        why: Why the chosen candidate is chosen.
        faster: Why faster numbers of GPUs are not chosen.
        recipe_batch: The recipe's global batch, at most the data's samples.
        recipe_lr: The recipe's peak learning rate for it, by its own scaling rule.
    """

    report: ScaleReport
    chosen: Choice | None
    choices: tuple[Choice, ...]
    nearest: Choice
    why: str
    faster: Mapping[int, str]
    recipe_batch: int
    recipe_lr: float

    def to_json(self) -> Json:
        """Return the plan as JSON values."""
        document = {
            **picked(self, "chosen", "nearest", "why", "faster", "choices"),
            "recipe_global_batch": self.recipe_batch,
            "recipe_learning_rate": self.recipe_lr,
            **picked(self.report, "basis", "is_bound", "price_per_gpu_hour", "notices"),
            "cluster": self.report.cluster.name,
        }
        return dict(as_json(document))

    def __paceline__(self) -> Shown:
        """Show every number of GPUs tried, and details of the chosen or closest one."""
        remarks: list[str] = []
        one, many = device_words(self.report.cluster)
        if self.report.is_bound:
            remarks = [
                f"No choice from a bound that no {one} reaches; give one {one}'s --throughput. The best candidate:"
            ]
        elif self.chosen is None:
            remarks = ["No configuration meets the target at worst; the closest:"]
        choice = self.chosen or self.nearest
        if self.chosen is not None:
            faster = [f"{gpus} {many} ({why})" for gpus, why in self.faster.items()]
            remarks += [f"Faster, but not chosen: {'; '.join(faster)}."] if faster else []
        found, cluster = choice.row.prediction, self.report.cluster
        grown = choice.row.batch != self.recipe_batch
        pairs = {
            many: f"{found.devices} on {cluster.title}; {counted(cluster.nodes(found.devices), 'node')}"
            + f"; {self.why}" * bool(self.chosen),
            "strategy": f"{choice.row.strategy}: {choice.reason}",
            "memory": "" if choice.room is None else choice.room.why,
            "global batch": f"{choice.row.batch:,}" + f" instead of the recipe's {self.recipe_batch:,}" * grown,
            "learning rate": f"{choice.learning_rate:g}" + f" instead of the recipe's {self.recipe_lr:g}" * grown,
            "time": f"{shown_hours(choice.hours)}, at worst {shown_hours(choice.high_hours)}",
            "cost": "" if choice.row.cost is None else f"${choice.row.cost:,.2f}, at worst ${choice.high_cost:,.2f}",
            "warning": choice.warning,
        }
        return Shown(
            title=f"{many[0].upper()}{many[1:]} for {self.report.recipe} on {cluster.title}",
            blocks=[
                filled_table((many, *_COLUMNS), [each.table_row() for each in self.choices], ""),
                *remarks,
                {name: text for name, text in pairs.items() if text},
                f"  Given: one {one} ({self.report.basis}), the batch and the price. Predicted: the rest.",
                *(f"  note: {notice}" for notice in self.report.notices),
            ],
            ok=self.chosen is not None or "",
        )


def plan_training(options: PlanTraining, log: Log) -> TrainingPlan:
    """Choose the cheapest number of GPUs that meets a deadline, or without one the fastest within a budget.

    Deadline and budget are compared with the upper end of the predicted range.

    Raises:
        PacelineError: If a setting is unknown, or settings are incompatible.
    """
    loaded = options.load()
    recipe = loaded.recipe
    sizes = _sizes(recipe, options)
    scaling = Scaling(loaded, options.scale(sizes), log)
    found: dict[int, Room] = {}
    notices: tuple[str, ...] = ()
    try:
        found = rooms(
            *(recipe, scaling.shares, scaling.cluster, scaling.device),
            lambda size, memory: _strategy(recipe, scaling, size, memory)[0],
        )
        if not found:
            title = scaling.cluster.title
            notices = (f"{title}: its devices' memory is unknown; memory was not checked",)
    except PacelineError as error:
        notices = (f"it is unknown whether a batch fits into memory: {error}",)
    scaling.shares |= {size: room.share for size, room in found.items()}
    report = scaling.report()
    if options.budget is not None and report.price_per_gpu_hour is None:
        raise RecipeError(f"--budget needs a price, and {report.cluster.title} has none; give --price-per-gpu-hour.")
    choices = []
    recipe_batch = min(recipe.batch.global_size, scaling.subject.samples)
    for size in sizes:
        rows = [row for row in report.rows if row.prediction.devices == size]
        room = found.get(size)
        strategy, reason = _strategy(recipe, scaling, size, None if room is None else room.memory)
        if room is not None and room.strategy != strategy:
            strategy, reason = room.strategy, room.why
        row = next((row for row in rows if row.strategy == strategy), rows[0])
        assert row.hours is not None  # a recipe has a length
        worst = row.prediction.high_seconds / row.prediction.seconds
        hours = row.hours * max(worst, 1 + ONE_DEVICE_UNCERTAINTY)
        rate, warning = _rate(row.batch, recipe_batch, recipe, options)
        choices.append(
            Choice(
                row=row,
                reason=reason,
                learning_rate=rate,
                hours=row.hours,
                high_hours=hours,
                high_cost=None if row.cost is None else row.cost * hours / row.hours,
                room=room,
                warning=warning,
            )
        )
    fitting = [each for each in choices if each.has_room and each.excess(options) <= 1]
    timed, priced = options.deadline_hours is not None, report.price_per_gpu_hour is not None
    best = min(fitting, key=lambda each: (each.high_gpu_hours * timed, each.high_hours), default=None)
    possible = [each for each in choices if each.has_room] or choices
    nearest = best or min(possible, key=lambda each: each.excess(options))
    return TrainingPlan(
        report=replace(report, notices=(*loaded.notices, *report.notices, *notices)),
        # A lower bound on the time does not justify a decision.
        chosen=None if report.is_bound else best,
        choices=tuple(choices),
        nearest=nearest,
        why=f"{'cheapest' if priced else 'fewest device hours'} for the deadline"
        if timed
        else "fastest for the budget",
        faster={each.gpus: each.why_not(options) for each in choices if each.high_hours < nearest.high_hours},
        recipe_batch=recipe_batch,
        recipe_lr=recipe.optimizer.lr * lr_factor(recipe, recipe_batch),
    )


def _sizes(recipe: Recipe, options: PlanTraining) -> tuple[int, ...]:
    """Return the numbers of devices to try: powers of two that can share the batch, up to the available number.

    Processes without accelerators get one core each.

    Raises:
        RecipeError: If no number can share the recipe's global batch.
    """
    cluster = cluster_of(options.cluster, recipe, (1,))
    available = available_cores() if cluster.shares_cores else cluster.max_devices or options.most_gpus
    if cluster.shares_cores and options.cluster is None:  # the link between the processes is measured
        available = min(available, MOST_HERE)
    most = min(options.most_gpus, available)
    sizes = [2**power for power in range(most.bit_length())]
    if options.batch_per_gpu is None:
        usable = set(usable_processes(recipe, 1, most))
        sizes = [size for size in sizes if size in usable]
    if not sizes:
        many = device_words(cluster)[1]
        raise RecipeError(f"no number of {many} can share this recipe's global batch; see batch.global_size.")
    return tuple(sizes)


def _strategy(recipe: Recipe, scaling: Scaling, size: int, memory: int | None) -> tuple[str, str]:
    if size == 1:
        return "single", f"1 {device_words(scaling.cluster)[0]}"
    if recipe.parallel.strategy != "auto":
        return recipe.parallel.strategy, f"parallel.strategy={recipe.parallel.strategy}"
    if scaling.subject.unsharded:
        return "ddp", f"{size} processes; FSDP {scaling.subject.unsharded}"
    return choose_automatically(recipe, scaling.subject.numbers, size, memory)


def _rate(batch: int, recipe_batch: int, recipe: Recipe, options: PlanTraining) -> tuple[float, str]:
    """Return the peak learning rate for a batch, and a warning about that batch."""
    optimizer = recipe.optimizer
    rate = optimizer.lr * lr_factor(recipe, batch if options.lr_rule == "none" else recipe_batch)
    if options.lr_rule != "none":
        rate *= batch / recipe_batch if options.lr_rule == "linear" else math.sqrt(batch / recipe_batch)
    if batch == recipe_batch:
        return rate, ""
    if options.lr_rule == "none" and optimizer.lr_scaling == "none":
        return rate, (
            f"the batch is {batch:,} instead of {recipe_batch:,}, and the learning rate stays {optimizer.lr:g}: "
            "choose an --lr-rule"
        )
    if batch > CRITICAL_BATCH:
        return rate, (
            f"a batch of {batch:,} exceeds the critical {CRITICAL_BATCH:,} of ImageNet classifiers: the same epochs "
            "reach a lower accuracy"
        )
    if batch > LARGEST_WITHOUT_LOSS:
        return rate, (
            f"a batch of {batch:,} lost accuracy where {LARGEST_WITHOUT_LOSS:,} did not (ResNet-50, ImageNet)"
        )
    return rate, ""
