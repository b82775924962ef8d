"""What the plan needs to know of a task and its data, and which samples each step uses."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, SupportsIndex

import numpy as np

from paceline.data.class_sampling import ClassDraws, counts_by_ratio, describe_weights
from paceline.data.order import StepGeometry
from paceline.errors import DataError, RecipeError, did_you_mean
from paceline.host.world import World
from paceline.metrics.accumulator import Metric
from paceline.parsing.units import format_count
from paceline.plan import DataFacts, Plan, TaskFacts
from paceline.recipe.schema import Recipe
from paceline.records.events import INPUTS, EvaluationEvent
from paceline.tasks.own_code import check_methods, check_metrics, refused, unused_by_own_loss
from paceline.tasks.task import Task, check_supported, task_name


def read_facts(task: Task, recipe: Recipe, world: World) -> tuple[DataFacts, TaskFacts]:
    """Open a task's data and return the facts for the plan.

    Raises:
        PacelineError: If the data cannot be used, or the task does not measure what the recipe asks for.
    """
    check_supported(task)
    data = task.data_facts(world)
    if not isinstance(data, DataFacts):
        raise refused(task, "data_facts returned", data, "a paceline.plan.DataFacts")
    for name in ("train_samples", "evaluation_samples"):
        if not isinstance(number := getattr(data, name), SupportsIndex):
            raise refused(task, f"data_facts().{name} is", number, "a whole number")
    # The class is part of the run's identity: weights of one task cannot be used for another.
    data = replace(data, description={"task": task_name(task), **data.description})
    classes, data = _class_facts(task, data)
    if (shards := task.sample_shards()) is not None:
        if shards.ends[-1] != data.train_samples:
            found = f"{shards.ends[-1]:,} samples, and data_facts() {data.train_samples:,}"
            raise DataError(f"{task_name(task)}.sample_shards() has {found}; give both the same.")
        if "classes_sha256" in classes:
            raise RecipeError(
                f"data.sampling and data.mixture draw samples in any order, but {task_name(task)} reads them a few "
                "files at a time; leave them out."
            )
        data = replace(data, description={**data.description, "shards": shards.facts})
    check_metrics(task)
    check_methods(task)
    _check_metric_names(task)
    best_metric(task)
    lengths = task.sample_lengths()
    is_balanced = recipe.batch.balance and recipe.data.augment.repeats == 1 and "classes_sha256" not in classes
    is_balanced &= shards is None
    return data, TaskFacts(
        higher_is_better={metric.name: metric.higher_is_better for metric in task.measured},
        headline=headline_of(task).name,
        sample_name=task.unit if task.sample_weights() is None else "samples",
        weight_unit=task.unit,
        **classes,
        lengths_sha256=lengths.sha256 if is_balanced and lengths is not None and lengths.is_ragged else None,
    )


def _class_facts(task: Task, data: DataFacts) -> tuple[dict[str, Any], DataFacts]:
    """Return the plan's facts of a task's classes and of the data, with a notice about class weights."""
    labels = task.sample_classes()
    unused = unused_by_own_loss(task)
    reasons: dict[str, str] = {}
    facts: dict[str, Any] = {}
    for key, name in (("train.class_weights", "class_weights"), ("data.sampling", "sampling")):
        if labels is None:
            unused[key] = f"the task {task_name(task)} names no class of its samples"
        elif key not in unused and (weights := task.weights_by_class(key)):
            facts[name] = weights
            reasons[key] = describe_weights(weights, labels, task.description()["class_names"])
    if {"class_weights", "sampling"} <= facts.keys():
        both = "data.sampling and train.class_weights both favour rare classes, so their effects add up; use one"
        data = replace(data, left_out=(*data.left_out, both))
    if draws := draws_of(task):
        facts |= {"classes_sha256": draws.sha256, "mixture": draws.counts}
        if draws.counts:
            each = zip(task.recipe.data.mixture, draws.counts, np.bincount(draws.classes).tolist(), strict=True)
            reasons["data.mixture"] = "per epoch " + ", ".join(
                f"{format_count(count)} samples of {name!r} ({format_count(size)} images)" for name, count, size in each
            )
        else:
            reasons["data.sampling"] = f"drawn with replacement, {reasons['data.sampling']}"
    return facts, replace(data, unused={**unused, **data.unused}, reasons={**data.reasons, **reasons})


def draws_of(task: Task) -> ClassDraws | None:
    """Return how a task's samples are drawn, if not each once; repeats of an image count as one.

    Raises:
        RecipeError: If the recipe draws them both by class and by data set, or a set has no share of an epoch.
    """
    classes, sets, data = task.sample_classes(), task.sample_sets(), task.recipe.data
    weights = task.weights_by_class("data.sampling")
    if sets is not None and not data.mixture:
        raise RecipeError(f"task={task.recipe.task} has sample_sets(), but data.mixture names no ratios; give them.")
    if sets is not None:
        if weights:
            raise RecipeError(
                "data.sampling draws samples by class, but data.dataset=mixture draws them by data set; leave it out: "
                "train.class_weights can weigh classes in the loss."
            )
        sets = sets[: len(sets) // data.augment.repeats]
        return ClassDraws(classes=sets, counts=counts_by_ratio(data.mixture, sets))
    if classes is None or not weights:
        return None
    return ClassDraws(classes=classes[: len(classes) // data.augment.repeats], weights=weights)


def geometry_of(recipe: Recipe, plan: Plan, task: Task) -> StepGeometry:
    """Return which samples each step of a run uses, and their weights.

    Raises:
        DataError: If a sample has weight zero: a step of such samples would have no mean loss.
    """
    classes, weights = task.sample_classes(), task.sample_weights()
    if weights is not None and len(weights) and int(weights.min()) < 1:
        raise DataError(
            f"training sample {int(weights.argmin())} counts for {int(weights.min())} {task.unit} "
            f"({task_name(task)}.sample_weights), and a step of such samples would have no mean loss; leave them out."
        )
    return StepGeometry(
        seed=recipe.seed,
        samples=plan.train_samples,
        global_batch_size=plan.global_batch_size,
        logical_ranks=plan.logical_ranks,
        repeats=recipe.data.augment.repeats,
        growth=tuple((p.first_epoch, p.global_batch_size, p.logical_ranks) for p in plan.batch_phases[1:]),
        in_step=plan.strategy == "fsdp",
        weights=weights,
        lengths=task.sample_lengths(),
        balanced=recipe.batch.balance,
        sort_key=task.sample_keys(),
        sizes=task.sample_sizes(),
        class_weights=np.array(plan.class_weights)[classes] if plan.class_weights else None,
        draws=draws_of(task),
        shards=task.sample_shards(),
    )


def headline_of(task: Task) -> Metric:
    """Return the main metric; a custom task may lack the one that its parent names."""
    return next((metric for metric in task.metrics if metric.name == task.headline), task.metrics[0])


def _check_metric_names(task: Task) -> None:
    """Refuse metrics that the task cannot compute scores for, or whose names clash with others in records."""
    own, metrics = {metric.name for metric in task.metrics}, task.recipe.evaluate.metrics
    recorded = {each.name for each in fields(EvaluationEvent)} | {"event", "last", "best", *INPUTS}
    if clash := sorted(own & recorded):
        raise RecipeError(f"{task_name(task)}.metrics has the name '{clash[0]}', which records use; choose another.")
    if metrics and not task.gives_scores:
        raise RecipeError(
            f"evaluate.metrics needs logits, which task={task.recipe.task} does not give; leave it out, or override "
            "collectors() in a task of yours."
        )
    for name in metrics:
        if not name.isidentifier() or name in own | recorded:
            raise RecipeError(
                f"evaluate.metrics has the name '{name}', but a name is letters, digits and underscores, and not one "
                f"that records use: {', '.join(sorted(own | recorded))}."
            )


def best_metric(task: Task) -> Metric:
    """Return the metric that decides which evaluation is best.

    Raises:
        RecipeError: If the task does not measure the requested one.
    """
    requested = task.recipe.evaluate.metric
    return headline_of(task) if requested == "auto" else find_metric(task, requested, f"evaluate.metric={requested}")


def find_metric(task: Task, name: str, setting: str) -> Metric:
    """Return a task's metric of this name, once the task knows its data (:meth:`Task.data_facts`).

    Args:
        task: The run's task.
        name: Name of the metric.
        setting: The setting that requests it, for the message.

    Raises:
        RecipeError: If the task has no such metric.
    """
    metrics = {metric.name: metric for metric in task.measured}
    if name not in metrics:
        raise RecipeError(
            f"{setting} is not a metric of this task; choose one of: {', '.join(metrics)}.{did_you_mean(name, metrics)}"
        )
    return metrics[name]
