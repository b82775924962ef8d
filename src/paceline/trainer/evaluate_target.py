"""Score saved weights on held-out samples at one or several image sizes (``paceline evaluate``)."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from paceline.checkpoint.hub_folder import UNNAMED
from paceline.checkpoint.weights import SavedWeights, check_scale, follows_rule, load_trained, read_weights
from paceline.data.batch import Batch, Nested, mapped
from paceline.data.pipeline import Pipeline
from paceline.distributed.collectives import Collectives, join, leave
from paceline.distributed.environment import read_launch
from paceline.errors import DataError, PacelineError, RecipeError
from paceline.host.world import World
from paceline.models.precision import Precision, set_float32_matmul
from paceline.parsing.files import refuse_special_outputs
from paceline.parsing.plain_text import csv_cell, one_form
from paceline.parsing.units import first_of
from paceline.plan import DataFacts, compute
from paceline.plan.build import unused_in_data
from paceline.plugins.references import is_reference, is_same_class
from paceline.plugins.registry import name_of
from paceline.recipe.data import SPLIT_OFF, Data
from paceline.recipe.load import Overrides, refuse_unused_overrides, set_by, stored_recipe, to_tree
from paceline.recipe.schema import Recipe, refuse_foreign_code
from paceline.records.run_directory import encode_json, write_bytes
from paceline.tasks.task import Task, build_task, check_supported, task_name
from paceline.tasks.trained import refuse_unimportable
from paceline.trainer.evaluate import Evaluator, KeepOptions
from paceline.trainer.network import place
from paceline.trainer.nonfinite import not_finite
from paceline.trainer.process_settings import keep_freed_memory, restore_torch_settings
from paceline.trainer.subject import Subject, TaskMaker, find_host_limits

Split = Literal["validation", "holdout"]

_ORIGINS = ("data.validation", "data.validation_fraction")  # keys of reasons that tell which samples are held out
_PER_CLASS = ("label_scores", "class_iou", "class_ap", "entity_scores")  # keys of details
PREDICTION_FORMATS = (".jsonl", ".csv")


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """What to score.

    Attributes:
        target: Run directory, checkpoint, safetensors file or hub folder.
        overrides: Changes to the recipe the weights were trained with, e.g. ``data.path``.
        weights: ``auto``, ``model`` or ``ema``.
        best: Take a run's best checkpoint instead of its newest.
        trust_code: Whether the weights' recipe may name code to import.
        predictions: File for one line per sample, ``.jsonl`` or ``.csv``.
        on: ``validation``, or ``holdout``: what the run's recipe held out of training.
        task: Makes the task, instead of the one that the recipe names.
    """

    target: Path
    overrides: Overrides = ()
    weights: str = "auto"
    best: bool = False
    trust_code: bool = False
    predictions: Path | None = None
    on: Split = "validation"
    task: TaskMaker | None = None

    def __post_init__(self) -> None:
        if (file := self.predictions) is not None:
            if file.suffix not in PREDICTION_FORMATS:
                raise PacelineError(f"--predictions={file}: the name must end in {' or '.join(PREDICTION_FORMATS)}.")
            if not file.parent.is_dir():
                raise PacelineError(f"--predictions={file}: there is no directory '{file.parent}'; create it first.")
            refuse_special_outputs(file)


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    """The result of scoring.

    Attributes:
        path: The weights file.
        weights: ``model`` or ``ema``.
        samples: Samples scored, each once.
        metrics: Values by name; accuracies in percent.
        counts: For each accuracy, the number of samples that counted.
        broken: Files that could not be read.
        seconds: Time taken, including reading.
        confusion: The confusion matrix, as in a run's ``evaluation/confusion.json``; None unless each sample has one
            label, or with more than 1000 classes.
        no_confusion: The method that failed while computing it or the class scores, and its error; else empty.
        not_finite: The metrics that are infinite or nan and therefore not a result.
        left_out: Data that is not used, one sentence per kind.
        per_class: The scores of each class, lowest first, for images with any number of labels, labelled pixels or
            objects; else empty.
    """

    path: Path
    weights: str
    samples: int
    metrics: Mapping[str, float]
    counts: Mapping[str, int]
    broken: tuple[str, ...]
    seconds: float
    confusion: Mapping[str, Any] | None = None
    no_confusion: str = ""
    not_finite: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    per_class: Sequence[Mapping[str, Any]] = ()

    @property
    def samples_per_second(self) -> float:
        """Samples scored per second over all processes, including reading and the first batch."""
        return self.samples / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Return it as one JSON object, with each metric also at its top."""
        separate = {"counts", "seconds", "not_finite", "per_class"}
        fields = {key: value for key, value in asdict(self).items() if key not in separate}
        return {**fields, **self.metrics, **self.counts}


def evaluate_target(request: EvaluationRequest) -> EvaluationReport:
    """Score saved weights. Collective: every rank must call this.

    Raises:
        PacelineError: If the target, the overrides or the data are not usable.
    """
    return _evaluate(request, (None,))[0]


def _evaluate(request: EvaluationRequest, sizes: Sequence[int | None]) -> list[EvaluationReport]:
    launch = read_launch(os.environ)
    saved, subject = open_saved(request, launch.world)
    recipe, machine, device = subject.recipe, subject.machine, subject.device
    try:
        products = compute.resolve_float32_matmul(recipe, machine)
    except RecipeError:
        if "train.float32_matmul" in set_by(request.overrides):
            raise
        products = "default"  # the run's machine rounded more than this one can
    if any(sizes) and not (task := build_task(recipe)).takes_sizes:
        raise RecipeError(
            f"--sizes has no effect on the task {task_name(task)}, which prepares its own samples; leave it out."
        )
    tasks: list[Task] = []
    for size in sizes:
        resized = recipe if size is None else replace(recipe, data=replace(recipe.data, evaluation_size=size))
        task, facts = scoring_task(request, saved, resized, launch.world)
        tasks.append(task)
    network = trained_network(tasks, saved, subject)
    with contextlib.ExitStack() as stack:
        stack.enter_context(keep_freed_memory(device))
        stack.enter_context(restore_torch_settings())
        set_float32_matmul(products)
        torch.set_num_threads(compute.resolve_threads(recipe, machine, launch.world.local_world_size)[0])
        stack.callback(leave)
        # Loader processes are forked before the process group exists, so those of all sizes are forked here. Each size
        # has as many as it would have alone: only one size runs at a time, and it stops its own.
        pipeline_stacks = [stack.enter_context(contextlib.ExitStack()) for _ in tasks]
        pipelines = [
            pipeline_stack.enter_context(contextlib.closing(task.open_pipeline(subject.placement)))
            for pipeline_stack, task in zip(pipeline_stacks, tasks, strict=True)
        ]
        for pipeline in pipelines:
            pipeline.start(training=False, evaluation=True)
        collectives = join(launch, device)
        reports = []
        for task, pipeline, turn in zip(tasks, pipelines, pipeline_stacks, strict=True):
            evaluator = Evaluator(
                task=task,
                pipeline=pipeline,
                precision=Precision(compute.resolve_precision(recipe, machine), device, recipe.train.grad_scaler),
                collectives=collectives,
                device=device,
                batch_size=compute.resolve_evaluation_batch(recipe),
                keep=KeepOptions(weights=saved.weights),
            )
            with turn:
                reports.append(_score(request, saved, evaluator, network, recipe.data, facts))
    return reports


def _score(
    request: EvaluationRequest,
    saved: SavedWeights,
    evaluator: Evaluator,
    network: nn.Module,
    data: Data,
    facts: DataFacts,
) -> EvaluationReport:
    started = time.perf_counter()
    task = evaluator.task
    lines = _Predictions(evaluator.pipeline, task)
    evaluation = evaluator({saved.weights: network}, lines.add if request.predictions else None)
    seconds = time.perf_counter() - started
    most_unread = data.unread_limit(evaluation.samples + len(evaluation.broken))
    if len(evaluation.broken) > most_unread:
        first = evaluation.broken[0]
        way = f"data.on_bad=skip leaves out {most_unread}: check the disk."
        if data.on_bad == "refuse":
            way = f"data.max_broken={most_unread}; score the others with data.on_bad=skip, or repair or remove them."
        raise DataError(
            f"'{first.path}' could not be read: {first.reason}. {len(evaluation.broken)} broken sample(s), and {way}"
        )
    if not evaluation.samples:
        raise DataError(f"none of the {len(evaluation.broken)} samples could be read; repair them, or score others.")
    if request.predictions is not None:
        lines.write(request.predictions, evaluator.collectives)
    metrics, details = evaluation.results[saved.weights], evaluation.artifacts.details or {}
    return EvaluationReport(
        path=saved.path,
        weights=saved.weights,
        samples=evaluation.samples,
        metrics=metrics,
        counts={
            metric.name.replace("accuracy", "correct"): round(metrics[metric.name] * evaluation.samples / metric.scale)
            for metric in task.metrics
            if metric.name.endswith("accuracy") and metric.per is None and not metric.is_collected
        },
        broken=tuple(each.path for each in evaluation.broken),
        seconds=seconds,
        confusion=evaluation.artifacts.confusion,
        no_confusion=evaluation.artifacts.failure,
        not_finite=not_finite(task, metrics),
        left_out=facts.left_out,
        per_class=next((rows for rows in map(details.get, _PER_CLASS) if rows), ()),
    )


def open_saved(request: EvaluationRequest, world: World) -> tuple[SavedWeights, Subject]:
    """Read weights, and choose the device for the recipe to score them with.

    Raises:
        PacelineError: If the target, the overrides or the device are not usable, or the recipe would run foreign code.
    """
    saved = read_weights(request.target, request.weights, best=request.best)
    recipe = scoring_recipe(saved, request.overrides)
    refuse_foreign_code(saved.description("recipe"), recipe, str(saved.path), trusted=request.trust_code)
    return saved, Subject.open(recipe, world, "device")


def scoring_task(
    request: EvaluationRequest, saved: SavedWeights, recipe: Recipe, world: World
) -> tuple[Task, DataFacts]:
    """Return the task that the weights were trained with, and its data."""
    recipe = _with_all_to_score(request, saved, recipe, world)
    if request.on != "holdout":
        # It does not affect the scores, and other data may have fewer images.
        recipe = replace(recipe, data=replace(recipe.data, subset=None))
    task = (request.task or build_task)(recipe)
    trained, rebuilt = saved.description("data").get("task", ""), task_name(task)
    if trained and not is_same_class(trained, rebuilt):
        if name_of("tasks", trained) == trained:
            refuse_unimportable(trained, str(saved.path))
        raise RecipeError(
            f"the weights in {saved.path} were trained with the task {trained}, but their recipe names {rebuilt}; "
            f"score them with task={name_of('tasks', trained)}."
        )
    check_supported(task)
    if request.on == "holdout":
        _take_holdout(task, saved, recipe, world)
    task.adapt_to(saved)
    facts = task.data_facts(world)
    if facts.evaluation_samples == 0:
        way = "set data.validation_fraction (1 for all) or add a val/ folder"
        way = "give paceline.fit held_out" if "objects" in facts.description else way
        raise DataError(f"no samples are held out to score; {way}.")
    if request.on != "holdout" and (recipe.data.score_all or "data.path" in set_by(request.overrides)):
        part = "all, also any that the run was trained on" if recipe.data.score_all else "the held-out part"
        part = next((facts.reasons[key] for key in _ORIGINS if key in facts.reasons), part)
        note = f"{facts.evaluation_samples:,} samples are scored: {part}"
        facts = replace(facts, left_out=(*facts.left_out, note))
    scored = compute.resolve_evaluation_batch(recipe)
    if refusal := find_host_limits(facts.description, recipe, world.local_world_size, scored=scored).refusal:
        raise DataError(refusal)
    refuse_unused_overrides(request.overrides, unused_in_data(facts), recipe)
    _check_classes(task, saved)
    task.check_trained(saved)
    return task, facts


def _with_all_to_score(request: EvaluationRequest, saved: SavedWeights, recipe: Recipe, world: World) -> Recipe:
    """Return the recipe that scores all samples of data other than the run's, or the split that it has for that.

    The run's own data, moved or not, keeps its split. Data sets and tasks from custom code split their data themselves.
    """
    overridden, data = set_by(request.overrides), recipe.data
    explicit_split = {"data.validation_fraction", "data.split_by", "data.saved_split"} & set(overridden)
    if request.on == "holdout" or "data.path" not in overridden or explicit_split or data.path is None:
        return recipe
    origin = saved.recipe().data.path
    is_moved = origin is None or Path(origin).expanduser().resolve() != Path(data.path).expanduser().resolve()
    if not is_moved or data.dataset not in SPLIT_OFF or is_reference(recipe.task):
        return recipe
    with contextlib.suppress(DataError, RecipeError):  # no training samples, or fewer than data.subset
        if (request.task or build_task)(recipe).data_digest(world) == saved.description("data").get("digest"):
            return recipe
    return replace(recipe, data=replace(data, validation_fraction=1.0, saved_split=None))


def _take_holdout(task: Task, saved: SavedWeights, recipe: Recipe, world: World) -> None:
    """Have the task score what the run held out of training.

    Raises:
        PacelineError: If it held nothing out, or what would be scored may have been trained on.
    """
    task.score_holdout(f"the run of {saved.path}")
    stored = saved.recipe().data
    for key in ("holdout_fraction", "validation_fraction"):
        former, value = getattr(stored, key), getattr(recipe.data, key)
        if former != value:
            raise RecipeError(
                f"data.{key}={value}, but the weights in {saved.path} were trained with {former}: other images would "
                "count as held out, and some of them were trained on; leave the key as it was."
            )
    if saved.description("data").get("digest") != task.data_digest(world):
        raise DataError(
            f"the data differ from those that the weights in {saved.path} were trained on, so the held-out part is "
            "unknown; give the same data, or score them with --on validation."
        )


def scoring_recipe(saved: SavedWeights, overrides: Overrides) -> Recipe:
    """Return the recipe to score weights with: the recipe they were trained with, plus the overrides."""
    recipe = saved.recipe(overrides)
    # The weights come from the file, so nothing is downloaded or initialised from elsewhere. The numerics are the
    # run's, unless an override changes them.
    recipe = recipe.without_initial_weights()
    distillation = replace(recipe.distillation, teacher=None)
    # Preprocess the images as in training, even where the defaults differ.
    described = saved.description("data")
    check_scale(described, str(saved.path))
    preprocessing: dict[str, Any] = {
        key: tuple(described[key]) if isinstance(described[key], list) else described[key]
        for key in ("image_size", "evaluation_size", "channels", "mean", "std", "target_mean", "target_std")
        if follows_rule(key, described.get(key)) and getattr(recipe.data, key) == "auto"
    }
    if recipe.data.image_size not in ("auto", described.get("image_size")):
        preprocessing.pop("evaluation_size", None)  # it follows the requested size
    if recipe.train.precision == "auto" and "precision" in saved.metadata:
        recipe = stored_recipe(to_tree(recipe), str(saved.path), {"train.precision": saved.metadata["precision"]})
    return replace(recipe, distillation=distillation, data=replace(recipe.data, **preprocessing))


def _check_classes(task: Task, saved: SavedWeights) -> None:
    """Refuse weights whose classes differ from the data's: the scores would be silently wrong."""
    facts = saved.description("data")
    trained, names = facts.get("class_names"), task.description().get("class_names")
    if trained is None or names is None:
        return
    names = list(one_form(names, trained).values())
    if len(trained) == len(names) if facts.get(UNNAMED) else trained == names:
        return
    kind, unknown = "tags" if facts.get("labels_words") else "classes", [name for name in names if name not in trained]
    missing = [name for name in trained if name not in names]
    trained_text = f"the {len(trained)} {kind} {first_of(trained)}"
    advice = f"add {first_of(missing)}, in the order of the weights" if missing else "give them in the same order"
    if facts.get(UNNAMED):
        trained_text, advice = f"{len(trained)} {kind}", "give data with as many, in the order of the weights"
    elif unknown:
        advice = f"correct {first_of(unknown)}, or leave out what has these {kind}"
    raise DataError(
        f"the weights in {saved.path} have {trained_text}, but the data has the {len(names)} {kind} {first_of(names)}; "
        f"{advice}."
    )


def trained_network(tasks: Sequence[Task], saved: SavedWeights, subject: Subject) -> nn.Module:
    """Return the network with saved weights on the device; it is the same for all tasks, and each has to accept it."""
    network = tasks[0].build_model()
    for task in tasks:
        task.check_network(network)
    load_trained(network, saved)
    return place(network, subject.placement)


class _Predictions:
    """Collects one line per sample on this process, with what the task adds to it, such as class names."""

    def __init__(self, pipeline: Pipeline, task: Task) -> None:
        self._pipeline, self._task, self._classes = pipeline, task, task.description().get("class_names", ())
        self._lines: list[dict[str, Any]] = []

    def add(self, _: str, batch: Batch, values: dict[str, Nested]) -> None:
        """Record the predictions of a batch."""
        columns = {name: mapped(lambda tensor: tensor.tolist(), value) for name, value in values.items()}
        for row, sample in enumerate(batch.ids.tolist()):
            name = self._pipeline.sample_name(sample, training=False)
            line = {"id": sample, "sample": name, **{key: column[row] for key, column in columns.items()}}
            self._lines.append(line | self._task.named_answers(line, self._classes))

    def write(self, path: Path, collectives: Collectives) -> None:
        """Write the lines of all processes in sample order; a collective."""
        rows = sorted((line for part in collectives.gather(self._lines) for line in part), key=lambda line: line["id"])

        def on_first() -> None:
            file = io.StringIO(newline="")
            if path.suffix == ".jsonl":
                file.writelines(encode_json(row) + "\n" for row in rows)
            elif rows:
                writer = csv.DictWriter(file, fieldnames=list(rows[0]))
                writer.writeheader()
                writer.writerows({key: csv_cell(value) for key, value in row.items()} for row in rows)
            # File names may not be valid text; invalid bytes are escaped.
            write_bytes(path, file.getvalue().encode("utf-8", "backslashreplace"))

        collectives.on_rank_zero(on_first)


@dataclass(frozen=True, kw_only=True)
class SizeSweep:
    """Results at several sizes.

    Attributes:
        reports: The result at each ``data.evaluation_size`` (pixels), in the requested order.
        on: Which images were scored: ``holdout`` or ``validation``.
        metric: The deciding metric: the top-1 accuracy, or the loss if there is none.
    """

    reports: Mapping[int, EvaluationReport]
    on: str
    metric: str

    @property
    def first(self) -> EvaluationReport:
        """The first report; values that do not depend on the size are the same in all."""
        return next(iter(self.reports.values()))

    @property
    def best_size(self) -> int:
        """The best size; among equal ones the smallest, which is the cheapest."""
        sign = -1 if self.metric == "loss" else 1
        return max(self.reports, key=lambda size: (sign * self.reports[size].metrics[self.metric], -size))

    def to_json(self) -> dict[str, Any]:
        """Return the sweep as one JSON object."""
        first = self.first
        return {
            "path": str(first.path),
            "weights": first.weights,
            "on": self.on,
            "samples": first.samples,
            "metric": self.metric,
            "best_size": self.best_size,
            "left_out": list(first.left_out),
            "sizes": [
                {"size": size, "seconds": each.seconds, "samples_per_second": each.samples_per_second, **each.metrics}
                for size, each in self.reports.items()
            ],
        }


def sweep_sizes(request: EvaluationRequest, sizes: Sequence[int]) -> SizeSweep:
    """Score saved weights at several sizes; collective: every rank must call this.

    A random crop shows objects larger than a centre crop of the same size does, so weights score better on images
    somewhat larger than the training images (Touvron et al. 2019). Choosing a size on the validation images would bias
    their result; ``holdout`` chooses it on training images that the run held out instead.

    Raises:
        PacelineError: If the target or the data are not usable, nothing was held out, or a size has no effect.
    """
    if "data.evaluation_size" in set_by(request.overrides):
        raise PacelineError(
            "override 'data.evaluation_size' has no effect with --sizes, which sets the sizes. Remove it."
        )
    if len(set(sizes)) < len(sizes):
        raise PacelineError(f"--sizes={','.join(map(str, sizes))} names a size twice; name each once.")
    reports = _evaluate(request, sizes)
    metric = "top1_accuracy" if "top1_accuracy" in reports[0].metrics else "loss"
    return SizeSweep(reports=dict(zip(sizes, reports, strict=True)), on=request.on, metric=metric)
