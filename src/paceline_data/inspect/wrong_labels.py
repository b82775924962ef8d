"""Rank likely wrong labels of a run's samples, by predictions of networks that did not learn them.

The run's own weights predict its held-out samples. With folds, training samples are predicted too: for each fold, the
run's recipe is trained anew on the others.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import logsumexp

from paceline.command import Log
from paceline.data.batch import Batch, tensors_in
from paceline.data.pipeline import Pipeline, Placement
from paceline.data.random_draws import uniforms
from paceline.data.slices import SampleIds
from paceline.errors import CheckpointError, DataError, RecipeError, TrainingError
from paceline.host.world import World
from paceline.metrics.answers import as_png
from paceline.models.precision import Precision
from paceline.plan import compute
from paceline.recipe.load import load_recipe
from paceline.recipe.schema import Recipe
from paceline.tasks.task import Task, build_task
from paceline.trainer.evaluate import evaluation_mode
from paceline.trainer.evaluate_target import EvaluationRequest, open_saved, trained_network
from paceline.training import train
from paceline_data.inspect.label_noise import LEAST_PROBABILITY, LabelNoise, estimate_noise, folds_of

Split = Literal["train", "validation"]

_LEAST_FINDABLE = 0.05  # share of wrong labels
_MOST_PICTURES = 200
_PICTURES_AT_ONCE = 50
_FEWEST = 20  # predicted samples: fewer tell nothing about the share of wrong labels
# A fold's run keeps nothing but its weights.
_PLAIN = (
    *("checkpoint.mirror=null", "train.until=null"),
    *("evaluate.keep_examples=0", "telemetry.trackers=[]", "telemetry.report=false"),
)


@dataclass(frozen=True, kw_only=True)
class WrongLabel:
    """A label that is probably wrong.

    Attributes:
        id: The sample's number in its split.
        split: ``train`` or ``validation``.
        sample: Its file or row.
        given: Its class in the data.
        suggested: The most probable other class.
        score: Probability that the given class is wrong, by which labels are ranked.
        probability: Calibrated probability of the suggested class; of a mistake, as the network gives it.
    """

    id: int
    split: Split
    sample: str
    given: str
    suggested: str
    score: float
    probability: float


@dataclass(frozen=True, kw_only=True)
class WrongLabels:
    """What was found.

    Attributes:
        run: The run.
        found: Labels that are wrong with a probability of at least 80 %, the most probable first.
        checked: Samples that were predicted, by split.
        agreement: Share of these labels that the predictions agree with, by split.
        findable: Estimated share of wrong labels that such predictions find, by split.
        folds: Number of folds; None without.
        not_checked: Why labels, or those of a split, were not checked.
        is_supported: Whether the task has labels that can be checked.
        mistakes: Other samples for which the network answers another class, the most confident answers first.
        pictures: Data URLs of the first ones found, as the network sees them, by split and id.
    """

    run: str
    found: tuple[WrongLabel, ...] = ()
    checked: dict[Split, int]
    agreement: dict[Split, float]
    findable: dict[Split, float]
    folds: int | None = None
    not_checked: str = ""
    is_supported: bool = True
    mistakes: tuple[WrongLabel, ...] = ()
    pictures: dict[tuple[Split, int], str]

    def to_json(self) -> dict[str, Any]:
        """Return it as one JSON object, without pictures."""
        return {
            "run": self.run,
            "folds": self.folds,
            "checked": self.checked,
            "agreement": self.agreement,
            "findable": self.findable,
            "not_checked": self.not_checked,
            "entries": list(map(asdict, self.found)),
        }


@dataclass(frozen=True)
class _Predicted:
    """Scores [samples, classes], labels and names of a split's samples, by id."""

    ids: SampleIds
    scores: NDArray[np.float32]
    labels: NDArray[np.int64]
    names: Sequence[str]


def find_wrong_labels(
    run: Path,
    overrides: Sequence[str] = (),
    *,
    folds: int | None = None,
    duration: str | None = None,
    output: Path | None = None,
    log: Log = lambda line: None,
) -> WrongLabels:
    """Rank likely wrong labels of a run's held-out samples and, with folds, of its training samples.

    Args:
        run: The run directory.
        overrides: Changes to the data section.
        folds: Number of folds; None leaves training samples out.
        duration: Duration of each fold's run; by default that of the run.
        output: Keeps the folds' runs, so that the same call resumes; None for a temporary folder.
        log: Receives progress.

    Raises:
        PacelineError: If the run cannot be used, or a fold cannot be trained.
    """
    request = EvaluationRequest(target=run, overrides=tuple(overrides))
    result = WrongLabels(run=str(run), checked={}, agreement={}, findable={}, pictures={})
    try:
        saved, subject = open_saved(request, World())
    except CheckpointError as error:  # the images can be checked all the same
        return replace(result, not_checked=str(error).rstrip("."))
    task = build_task(subject.recipe)
    if (sizes := _sizes(task)) is None:
        what = f"each image or text needs one class, and task={subject.recipe.task} learns something else"
        return replace(result, is_supported=False, not_checked=what)
    if task.data_digest(World()) != saved.description("data").get("digest"):
        why = "the data have changed since the run, which may have learned what is held out now; train again"
        return replace(result, not_checked=why)
    parts: dict[Split, _Predicted] = {}
    unseen = ["the run holds no samples out"] * (sizes[1] == 0)
    if sizes[1]:
        log(f"predicting {sizes[1]:,} held-out samples")
        parts["validation"] = _predict(request)
    if folds is None:
        unseen.append("training samples are checked with --folds 5")
    else:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(TemporaryDirectory(prefix="paceline-")) if output is None else output / "folds"
            parts["train"] = _predict_in_folds(run, overrides, folds, duration, Path(folder), log)
    noise: dict[Split, LabelNoise] = {}
    agreement: dict[Split, float] = {}
    for split, part in parts.items():
        if len(part.ids) < _FEWEST:
            unseen.append(f"{len(part.ids)} {split} samples are too few to judge")
        elif not np.isfinite(part.scores).all():
            unseen.append(f"the network's answers to {split} samples are not finite")
        else:
            known, agreed = estimate_noise(part.scores, part.labels), (part.scores.argmax(axis=1) == part.labels).mean()
            if known.findable >= _LEAST_FINDABLE:
                noise[split], agreement[split] = known, float(agreed)
            else:
                unseen.append(
                    f"the network predicts {100 * agreed:.0f} % of the {split} labels, too few to judge them: it would "
                    f"find about {100 * known.findable:.0f} % of wrong ones"
                )
    width = max((each.scores.shape[1] for each in parts.values()), default=0)
    names = task.description().get("class_names") or [str(number) for number in range(width)]
    found = sorted(
        (each for split, known in noise.items() for each in _named(split, parts[split], known, names)),
        key=lambda each: (-each.score, each.split, each.id),
    )
    return replace(
        result,
        found=tuple(found),
        mistakes=_other_mistakes(parts, names, found),
        checked={split: len(parts[split].ids) for split in noise},
        agreement=agreement,
        findable={split: each.findable for split, each in noise.items()},
        folds=folds,
        not_checked="; ".join(unseen),
        pictures=_pictures(subject.recipe, found[:_MOST_PICTURES]),
    )


def _other_mistakes(
    parts: Mapping[Split, _Predicted], names: Sequence[str], found: Sequence[WrongLabel]
) -> tuple[WrongLabel, ...]:
    """Return the mistakes that are not among the labels found, the most confident first."""
    listed = {(each.split, each.id) for each in found}
    mistakes = [each for split in parts for each in _mistakes(split, parts[split], names)]
    others = [each for each in mistakes if (each.split, each.id) not in listed]
    return tuple(sorted(others, key=lambda each: -each.probability))


def _sizes(task: Task) -> tuple[int, int] | None:
    """Return the samples of training and validation, of a task with one class for each; else None."""
    if not task.gives_scores or task.sample_classes() is None:
        return None
    return task.split_sizes()


def _named(split: Split, part: _Predicted, noise: LabelNoise, names: Sequence[str]) -> Iterator[WrongLabel]:
    for at in np.flatnonzero(noise.wrong >= LEAST_PROBABILITY).tolist():
        yield WrongLabel(
            id=int(part.ids[at]),
            split=split,
            sample=part.names[at],
            given=names[part.labels[at]],
            suggested=names[noise.likely[at]],
            score=float(noise.wrong[at]),
            probability=float(noise.probability[at]),
        )


def _mistakes(split: Split, part: _Predicted, names: Sequence[str]) -> Iterator[WrongLabel]:
    probabilities = np.exp(part.scores - logsumexp(part.scores, axis=1, keepdims=True))
    answers = part.scores.argmax(axis=1)
    for at in np.flatnonzero(answers != part.labels).tolist():
        probability = float(probabilities[at, answers[at]])
        yield WrongLabel(
            id=int(part.ids[at]),
            split=split,
            sample=part.names[at],
            given=names[part.labels[at]],
            suggested=names[answers[at]],
            score=float(1 - probabilities[at, part.labels[at]]),
            probability=probability,
        )


# Predictions


def _predict(request: EvaluationRequest) -> _Predicted:
    """Predict what a task scores, with saved weights."""
    saved, subject = open_saved(request, World())
    task = (request.task or build_task)(subject.recipe)
    task.adapt_to(saved)
    # A task returns its scores if a metric needs them; this one is never made.
    task.recipe = replace(task.recipe, evaluate=replace(task.recipe.evaluate, metrics={"scores": {}}))
    network = trained_network([task], saved, subject)
    precision = Precision(
        compute.resolve_precision(subject.recipe, subject.machine), subject.device, subject.recipe.train.grad_scaler
    )
    ids, scores, labels, names = [], [], [], []
    with _scored(task, subject.placement) as pipeline, torch.no_grad(), evaluation_mode([network]):
        model = task.evaluated(precision.applied_to(network))
        for batch in pipeline.evaluation_batches(compute.resolve_evaluation_batch(subject.recipe), World()):
            if len(batch.ids):
                values = task.score(model, batch)
                ids.append(batch.ids)
                scores.append(values["logit"].float().cpu().numpy())
                labels.append(values["label"].cpu().numpy())
                names += [pipeline.sample_name(sample, training=False) for sample in batch.ids.tolist()]
    if not ids:
        raise DataError(f"none of the samples of {request.target} could be read; repair them.")
    return _Predicted(np.concatenate(ids), np.concatenate(scores), np.concatenate(labels), names)


@contextlib.contextmanager
def _scored(task: Task, placement: Placement) -> Iterator[Pipeline]:
    """Open the batches that a task scores."""
    task.data_facts(World())
    with contextlib.closing(task.open_pipeline(placement)) as pipeline:
        pipeline.start(training=False, evaluation=True)
        yield pipeline


def _predict_in_folds(
    run: Path, overrides: Sequence[str], folds: int, duration: str | None, folder: Path, log: Log
) -> _Predicted:
    """Train the run's recipe without each fold, and predict the fold."""
    words = [*overrides, *_PLAIN, *([] if duration is None else [f"train.duration={duration}"])]
    recipe = load_recipe(run, words).recipe
    labels, groups = _read_training(recipe)
    if len(labels) < folds:
        raise RecipeError(f"--folds={folds}: the run has {len(labels)} training samples; give fewer folds.")
    fold_of = folds_of(groups, labels, folds, uniforms(recipe.seed, 0, np.arange(len(labels)), 1)[:, 0])
    parts = []
    for fold in range(folds):
        ids = np.flatnonzero(fold_of == fold)
        if not len(ids):  # all its samples are copies
            continue
        log(f"fold {fold + 1} of {folds}: training on {len(labels) - len(ids):,} samples, predicting {len(ids):,}")
        maker = partial(_without, ids)
        target = folder / f"fold-{fold}-of-{folds}"
        result = train(run, overrides=words, run_dir=target, task=maker, quiet=True)
        if result.status != "completed":
            raise TrainingError(f"fold {fold + 1} was stopped; the same command with the same --output resumes it.")
        found = _predict(EvaluationRequest(target=target, task=maker))
        parts.append(replace(found, ids=ids[found.ids]))
    return _Predicted(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.scores for part in parts]),
        np.concatenate([part.labels for part in parts]),
        [name for part in parts for name in part.names],
    )


def _without(ids: SampleIds, recipe: Recipe) -> Task:
    """Return the recipe's task, which learns all training samples but these, and scores these."""
    task = build_task(recipe)
    sizes = task.split_sizes()
    assert sizes is not None
    task.score_only(ids, training=True)
    task.train_only(np.setdiff1d(np.arange(sizes[0]), ids))
    return task


def _read_training(recipe: Recipe) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the classes of the training samples, and the first sample that each is a copy of, [samples]."""
    task = build_task(recipe)
    sizes = task.split_sizes()
    assert sizes is not None
    task.score_only(np.arange(sizes[0]), training=True)
    labels, groups = np.zeros(sizes[0], dtype=np.int64), np.arange(sizes[0])
    first: dict[bytes, int] = {}
    with _scored(task, Placement(device=torch.device("cpu"))) as pipeline:
        # One by one: padding depends on the batch.
        for batch in pipeline.evaluation_batches(1, World()):
            for sample in batch.ids.tolist():
                labels[sample] = int(batch.targets)
                groups[sample] = first.setdefault(_digest(batch), sample)
    return labels, groups


def _digest(batch: Batch) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors_in(batch.inputs):
        digest.update(repr(tuple(tensor.shape)).encode() + tensor.contiguous().numpy().tobytes())
    return digest.digest()


def _pictures(recipe: Recipe, found: Sequence[WrongLabel]) -> dict[tuple[Split, int], str]:
    """Return the pictures of some samples as the network sees them, if the task has any."""
    shown: dict[tuple[Split, int], str] = {}
    for split in dict.fromkeys(each.split for each in found):
        ids = np.array(sorted(each.id for each in found if each.split == split))
        task = build_task(recipe)
        task.score_only(ids, training=split == "train")
        with _scored(task, Placement(device=torch.device("cpu"))) as pipeline:
            for batch in pipeline.evaluation_batches(_PICTURES_AT_ONCE, World()):
                if (pictures := task.pictures(batch.inputs)) is not None:
                    pixels = pictures.permute(0, 2, 3, 1).numpy()
                    names = ((split, int(ids[at])) for at in batch.ids.tolist())
                    shown |= dict(zip(names, map(as_png, pixels), strict=True))
    return shown
