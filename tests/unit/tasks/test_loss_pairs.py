"""Options that shape a loss are right together too: every pair of them is a loop that weighs samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline
from paceline.data.batch import Batch
from paceline.data.order import StepGeometry
from paceline.data.pipeline import Placement
from paceline.recipe.load import load_recipe, stored_recipe, to_tree
from paceline.tasks.facts import draws_of
from paceline.tasks.image_classification import ImageClassification
from paceline.tasks.task import build_task
from paceline.world import World

CPU = torch.device("cpu")
CLASS_WEIGHTS = {"0": 4.0, "3": 0.25, "8": 7.0}
DISTILLED = {"task": "distillation", "distillation.weight": 0.3}
OPTIONS: dict[str, dict[str, Any]] = {
    "bce": {"train.loss": "bce"},
    "threshold": {"train.loss": "bce", "train.target_threshold": 0.2},
    "focal": {"train.loss": "focal", "train.loss_options": {"gamma": 1.5}},
    "own": {"train.loss": "torch.nn:CrossEntropyLoss", "train.loss_options": {"reduction": "none"}},
    "smoothing": {"train.label_smoothing": 0.1},
    "weights": {"train.class_weights": CLASS_WEIGHTS},
    "mixup": {"data.mix.mixup": 1.0},
    "cutmix": {"data.mix.cutmix": 1.0},
    "sampling": {"data.sampling": {"0": 3.0}},
    "soft": {**DISTILLED, "distillation.temperature": 3.0},
    "hard": {**DISTILLED, "distillation.kind": "hard"},
}
# (Processes, micro-batches) of a step of 16 samples.
LAYOUTS = ((1, 1), (1, 4), (4, 8), (2, 4))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    overrides = {"train.duration": "1 steps", "model.options": {"width": 2, "stages": 1}, "parallel.threads": 1}
    overrides |= {"telemetry.report": False, "telemetry.trackers": [], "evaluate.every": "off"}
    run = tmp_path_factory.mktemp("teacher") / "run"
    return paceline.train("digits", overrides=overrides, run_dir=run, quiet=True).run_dir


def logits_of(images: torch.Tensor) -> torch.Tensor:
    matrix = torch.randn(64, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return images.double().flatten(1) @ matrix / 8


def by_hand(rows: Iterator[tuple[list[float], list[float], list[float]]], **asked: Any) -> float:
    """The weighted mean over the samples of a step: logits, shares of the classes, and the teacher's logits."""
    total = weight_of_all = 0.0
    for logits, shares, answers in rows:
        of_class = asked.get("train.class_weights", {})
        weight = sum(share * of_class.get(str(k), 1.0) for k, share in enumerate(shares))
        smoothing, count = asked.get("train.label_smoothing", 0.0), len(logits)
        targets = [share * (1 - smoothing) + smoothing / count for share in shares]
        if "train.target_threshold" in asked:
            targets = [float(each > asked["train.target_threshold"]) for each in targets]
        p, name = softmax(logits), asked.get("train.loss", "cross_entropy")
        if name == "bce":
            logs = [(math.log1p(math.exp(-x)), math.log1p(math.exp(x))) for x in logits]
            loss = sum(t * yes + (1 - t) * no for t, (yes, no) in zip(targets, logs, strict=True)) / count
        else:
            gamma = 1.5 if name == "focal" else 0.0
            loss = -sum(t * (1 - q) ** gamma * math.log(q) for t, q in zip(targets, p, strict=True))
        if asked.get("task") == "distillation":
            temperature = asked.get("distillation.temperature", 1.0)
            q, r = (softmax([x / temperature for x in each]) for each in (logits, answers))
            taught = temperature**2 * sum(b * math.log(b / a) for a, b in zip(q, r, strict=True))
            if asked.get("distillation.kind") == "hard":
                taught = -math.log(p[answers.index(max(answers))])
            loss = 0.7 * loss + 0.3 * taught
        total += weight * loss
        weight_of_all += weight
    return total / weight_of_all


def softmax(numbers: list[float]) -> list[float]:
    powers = [math.exp(each) for each in numbers]
    return [each / sum(powers) for each in powers]


def rows_of(batches: list[Batch], answered: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Any]:
    for batch in batches:
        shares = batch.targets if batch.targets.ndim == 2 else torch.eye(10)[batch.targets]
        columns = (logits_of(batch.inputs), shares, answered(batch.inputs))
        yield from zip(*(each.tolist() for each in columns), strict=True)


PAIRS = [
    (first, second)
    for first, second in combinations(OPTIONS, 2)
    if not (OPTIONS[first].keys() & OPTIONS[second].keys())
]


@pytest.mark.everyday
def test_every_pair_is_the_loop_that_weighs_samples(teacher: Path) -> None:
    plain = to_tree(load_recipe("digits", {"data.augment": None, "train.label_smoothing": 0.0}).recipe)
    dataset, placement = build_task(stored_recipe(plain, "digits")).dataset, Placement(device=CPU)  # type: ignore[attr-defined]
    cases = [(pair, LAYOUTS[-1]) for pair in PAIRS]
    cases += [(("focal", "smoothing", "weights", "mixup", "sampling", "soft"), layout) for layout in LAYOUTS]
    for names, (processes, parts) in cases:
        asked = {key: value for name in names for key, value in OPTIONS[name].items()}
        learns = {"distillation.teacher": str(teacher)} if "task" in asked else {}
        task = build_task(stored_recipe(plain, "digits", asked | learns))
        assert isinstance(task, ImageClassification)
        task.dataset = dataset  # read once
        task.data_facts(World())
        task.prepare_training(placement)
        weights, labels = task.weights_by_class("train.class_weights"), task.sample_classes()
        geometry = StepGeometry(
            seed=1,
            samples=len(labels),
            global_batch_size=16,
            logical_ranks=parts,
            class_weights=np.array(weights)[labels] if weights else None,
            draws=draws_of(task),
        )
        with closing(task.open_pipeline(placement)) as pipeline:
            pipeline.start(training=True, evaluation=False)
            worlds = [World(rank=rank, world_size=processes) for rank in range(processes)]
            batches = [each for world in worlds for each in pipeline.train_batches(geometry, 0, 1, world)]
        assert [len(each.ids) for each in batches] == [16 // parts] * parts
        found = sum(float(task.loss(logits_of, each)) * each.weight / each.slice.step_weight for each in batches)
        with torch.no_grad():
            expected = by_hand(rows_of(batches, getattr(task, "_teacher", None) or logits_of), **asked)
        assert found == pytest.approx(expected, rel=2e-6), (names, processes, parts)
