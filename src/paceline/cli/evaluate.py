"""`paceline evaluate`: score saved weights, each held-out sample once, with any number of processes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from paceline.cli.options import usable_gpus
from paceline.command import Best, JoinedProcesses, Log, Overrides, Shape, Target, TrustCode, Weights, command
from paceline.errors import NotFiniteError, PacelineError
from paceline.pages.page import Table
from paceline.pages.shown import Document, Result, Shown
from paceline.parsing.plain_text import one_line
from paceline.parsing.units import metric_unit
from paceline.plugins.loading import loading
from paceline.recipe.load import refuse_training_overrides

if TYPE_CHECKING:
    from paceline.trainer.evaluate_target import EvaluationReport, SizeSweep

# Scores shown for each class, if available.
_SHARES = {
    "precision": "precision",
    "recall": "recall",
    "f1": "F1",
    "average_precision": "AP",
    "mask_average_precision": "AP of masks",
    "iou": "IoU",
}
_MANY = 100  # samples from which on decimals of a percentage mean something
# What is counted instead of samples, by metric.
_COUNTED = {"miou": "pixels", "entity_f1": "entities", "box_map": "boxes", "token_accuracy": "tokens"}
_THRESHOLDS = {"threshold": "threshold", "best_threshold": "best threshold"}


def _pixels(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{text!r} is not a size in pixels; give whole numbers, for example 192,224")
    return int(text)


@command("evaluate")
@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Score the weights of TARGET: a run directory, a checkpoint directory, a safetensors file or a hub folder.

    The data is that of the weights' recipe; overrides change it. Every held-out sample is scored once,
    with any number of processes. Of other data (data.path), all samples are scored, or its validation
    or test split if it has one. Data to classify may lack some of the weights' classes. A timm hub folder
    describes how to prepare images, but not which: give data.path.

    --sizes tries several sizes of images instead, on those that the run held out of training
    (data.holdout_fraction), and reports the best.

    Examples:
      paceline evaluate runs/digits --best
      paceline evaluate runs/photos --per-class
      paceline evaluate runs/photos evaluate.augment=flip
      paceline evaluate runs/photos --sizes 192,224,256,288
      paceline evaluate runs/photos data.path=more-photos --predictions answers.csv
      paceline evaluate resnet50-folder data.path=photos
    """

    target: Target
    overrides: Overrides = ()
    processes: JoinedProcesses = None
    predictions: Annotated[
        Path | None,
        Shape(metavar="FILE", without=("sizes",)),
        "Write one line per sample (.jsonl or .csv): id, sample, and by task: prediction, probability, target for "
        "classes, with their names, and lists of these with the words for tagged texts; boxes, labels, scores for "
        "detection; loss, tokens for a language model.",
    ] = None
    per_class: Annotated[
        bool,
        Shape(without=("sizes",)),
        "Also show precision, recall, F1 and the number of samples of each class, or of entities of each type, worst "
        "first; of any number of labels the average precision and the threshold of the highest F1 too; of segmentation "
        "IoU and the number of pixels; of detection the average precision and the number of boxes.",
    ] = False
    weights: Weights = "auto"
    best: Best = False
    trust_code: TrustCode = False
    sizes: Annotated[
        tuple[int, ...],
        Shape(metavar="PIXELS,...", parse=_pixels),
        "Evaluate at each of these sizes, instead of data.evaluation_size, and report the best.",
    ] = ()
    on: Annotated[
        Literal["validation", "holdout"] | None,
        "Images to score: the validation images (the default), or those that data.holdout_fraction kept out of "
        "training (the default with --sizes).",
    ] = None

    def __post_init__(self) -> None:
        refuse_training_overrides(self.overrides)

    def usable_gpus(self) -> int:
        """Count the GPUs of the kind that the weights' recipe or an override names."""
        if max(usable_gpus("cuda"), usable_gpus("xpu")) < 2:
            return 1  # whatever the recipe says, so it need not be read
        from paceline.checkpoint.weights import read_weights

        recipe = read_weights(self.target, self.weights, best=self.best).recipe(self.overrides)
        return usable_gpus(recipe.parallel.device)

    def run(self, _: Log) -> Result:
        """Score the weights; a collective of all ranks."""
        with loading():
            from paceline.trainer.evaluate_target import EvaluationRequest, evaluate_target, sweep_sizes

        names = {each.name for each in dataclasses.fields(EvaluationRequest)} - {"task"}
        fields = {name: getattr(self, name) for name in names}
        request = EvaluationRequest(**fields | {"on": self.on or ("holdout" if self.sizes else "validation")})
        if self.sizes:
            return _of_sizes(sweep_sizes(request, self.sizes))
        return _of_one(evaluate_target(request), per_class=self.per_class)


def _of_one(report: EvaluationReport, *, per_class: bool) -> Result:
    counted = _counted(report)
    lines = {name: _in_words(name, report) for name in report.metrics}
    blocks: list[Any] = [
        f"{report.path} ({report.weights} weights)",
        {"samples": f"{report.samples:,}", **lines, **report.counts},
        *(one_line(f"  not scored, unreadable: {path}") for path in report.broken),
    ]
    if report.no_confusion:
        blocks.append(one_line(f"  incomplete: {report.no_confusion}"))
    scores = _by_class(report) if per_class else {}
    if per_class:
        classes = scores["per_class"]
        shares, thresholds = ([key for key in keys if key in classes[0]] for keys in (_SHARES, _THRESHOLDS))
        titles = [(_SHARES | _THRESHOLDS)[key] for key in (*shares, *thresholds)]
        total = report.samples if counted == "samples" else sum(each["count"] for each in classes)
        rows = [
            (
                one_line(each["class"]),
                f"{each['count']:,}",
                *_cells(each, shares, _percentage(each["count"])),
                *_cells(each, thresholds, "{:.3g}"),
            )
            for each in (*classes, {"class": "mean over classes", "count": total, **scores["mean"]})
        ]
        blocks.append(Table(columns=("class", counted, *titles), rows=rows))
    blocks += [f"note: {sentence}" for sentence in report.left_out]
    return Document(
        document={**report.to_json(), **scores}, shown=Shown(blocks=blocks, ok=next(_not_finite(report), True))
    )


def _by_class(report: EvaluationReport) -> dict[str, Any]:
    """Return the scores of each class, worst first, and their means.

    Raises:
        PacelineError: If there are no scores: samples do not have one label each, or there are too many classes.
    """
    from paceline.metrics.confusion import MOST_CLASSES, scores_by_class

    scores = report.per_class if report.confusion is None else scores_by_class(report.confusion)
    if not scores:
        reason = (
            report.no_confusion or f"samples do not have one label each, or there are more than {MOST_CLASSES} classes"
        )
        raise PacelineError(f"--per-class has nothing to show: {reason}; leave it out.")
    # For labels, the average precision of a class without samples is undefined.
    defined = [each for each in scores if each["count"] or "average_precision" not in each]
    means = {key: sum(each[key] for each in defined) / max(len(defined), 1) for key in _SHARES if key in scores[0]}
    return {"per_class": scores, "mean": means}


def _cells(scores: Mapping[str, Any], keys: Sequence[str], form: str) -> list[str]:
    """Format the scores of a class; unknown scores are empty."""
    return ["" if math.isnan(value := scores.get(key, math.nan)) else form.format(value) for key in keys]


def _of_sizes(sweep: SizeSweep) -> Result:
    first, best = sweep.first, sweep.best_size
    images = "training images that were held out" if sweep.on == "holdout" else "validation images"
    names = tuple(first.metrics)
    rows = [
        (
            f"{size}{' *' * (size == best)}",
            *(_in_words(name, report) for name in names),
            f"{report.samples_per_second:,.0f}",
        )
        for size, report in sweep.reports.items()
    ]
    blocks: list[Any] = [
        f"{first.path} ({first.weights} weights) on {first.samples:,} {images}",
        Table(columns=("size", *names, "images/s"), rows=rows),
        f"best by {sweep.metric}: data.evaluation_size={best}",
    ]
    if sweep.on == "validation":
        blocks.append(
            "note: a size chosen on the validation images is fitted to them; hold out others with data.holdout_fraction"
        )
    blocks += [f"note: {sentence}" for sentence in first.left_out]
    errors = (error for report in sweep.reports.values() for error in _not_finite(report))
    return Document(document=sweep.to_json(), shown=Shown(blocks=blocks, ok=next(errors, True)))


def _not_finite(report: EvaluationReport) -> Iterator[NotFiniteError]:
    """Yield the error of metrics that are not a result, if there are any."""
    if report.not_finite:
        yield NotFiniteError(
            f"{', '.join(report.not_finite)} of {report.path} on {report.samples:,} samples: not a finite number, "
            "so not a result."
        )


def _percentage(samples: int) -> str:
    return "{:.2f} %" if samples >= _MANY else "{:.0f} %"


def _counted(report: EvaluationReport) -> str:
    return next((what for key, what in _COUNTED.items() if key in report.metrics), "samples")


def _in_words(name: str, report: EvaluationReport) -> str:
    value, samples = report.metrics[name], report.samples if _counted(report) == "samples" else _MANY
    if math.isnan(value):
        return "absent" if name.startswith("iou_") else "undefined"
    return (_percentage(samples) if metric_unit(name) else "{:.4f}").format(value)
