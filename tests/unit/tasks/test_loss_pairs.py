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
from tiny_text import reviews, tagged, write_lines

import paceline
from paceline.data.batch import Batch
from paceline.data.order import StepGeometry
from paceline.data.pipeline import Placement
from paceline.host.world import World
from paceline.recipe.load import load_recipe, stored_recipe, to_tree
from paceline.tasks.facts import draws_of
from paceline.tasks.image_classification import ImageClassification
from paceline.tasks.task import Task, build_task

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
        weight = sum(share * of_class.get(str(k), 1.0) for k, share in enumerate(shares)) if of_class else 1.0
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


def loss_of_a_step(task: Task, model: Callable[..., Any], processes: int, parts: int) -> tuple[float, list[Batch]]:
    """The loss of the first step of 16 samples as the trainer adds it up, and its micro-batches."""
    samples, placement = task.data_facts(World()).train_samples, Placement(device=CPU)
    task.prepare_training(placement)
    weights, labels = task.weights_by_class("train.class_weights"), task.sample_classes()
    geometry = StepGeometry(
        seed=1,
        samples=samples,
        global_batch_size=16,
        logical_ranks=parts,
        weights=task.sample_weights(),
        class_weights=np.array(weights)[labels] if weights else None,
        draws=draws_of(task),
    )
    with closing(task.open_pipeline(placement)) as pipeline:
        pipeline.start(training=True, evaluation=False)
        worlds = [World(rank=rank, world_size=processes) for rank in range(processes)]
        batches = [each for world in worlds for each in pipeline.train_batches(geometry, 0, 1, world)]
    assert [len(each.ids) for each in batches] == [16 // parts] * parts
    return sum(float(task.loss(model, each)) * each.weight / each.slice.step_weight for each in batches), batches


PAIRS = [
    (first, second)
    for first, second in combinations(OPTIONS, 2)
    if not (OPTIONS[first].keys() & OPTIONS[second].keys())
]


@pytest.mark.everyday
def test_every_pair_is_the_loop_that_weighs_samples(teacher: Path) -> None:
    plain = to_tree(load_recipe("digits", {"data.augment": None, "train.label_smoothing": 0.0}).recipe)
    dataset = build_task(stored_recipe(plain, "digits")).dataset  # type: ignore[attr-defined]  # image tasks have it
    cases = [(pair, LAYOUTS[-1]) for pair in PAIRS]
    cases += [(("focal", "smoothing", "weights", "mixup", "sampling", "soft"), layout) for layout in LAYOUTS]
    for names, (processes, parts) in cases:
        asked = {key: value for name in names for key, value in OPTIONS[name].items()}
        learns = {"distillation.teacher": str(teacher)} if "task" in asked else {}
        task = build_task(stored_recipe(plain, "digits", asked | learns))
        assert isinstance(task, ImageClassification)
        task.dataset = dataset  # read once
        found, batches = loss_of_a_step(task, logits_of, processes, parts)
        with torch.no_grad():
            expected = by_hand(rows_of(batches, getattr(task, "_teacher", None) or logits_of), **asked)
        assert found == pytest.approx(expected, rel=2e-6), (names, processes, parts)


# ----------------------------------------------------------------------------------- texts, tokens, pixels, many labels

TEXTS = {**{key: OPTIONS[key] for key in ("bce", "threshold", "focal", "own", "smoothing")}}
TEXTS["weights"] = {"train.class_weights": {"animal": 4.0, "other": 0.25}}
TEXTS["sampling"] = {"data.sampling": {"animal": 3.0}}
SMOOTHING, MIXUP, MASKED = (
    OPTIONS["smoothing"],
    OPTIONS["mixup"],
    {"data.text.objective": "masked", "model.name": "bert"},
)
PIXELS: list[dict[str, Any]] = [{"train.loss": "cross_entropy"}, {"train.loss": "cross_entropy_dice"}]
OTHERS: dict[str, list[dict[str, Any]]] = {
    "text_classification": [
        TEXTS[first] | TEXTS[second]
        for first, second in combinations(TEXTS, 2)
        if not (TEXTS[first].keys() & TEXTS[second].keys())
    ],
    "token_classification": [{}, SMOOTHING],
    "language_modeling": [*({"data.text.rows": rows} for rows in ("chunked", "packed", "single")), MASKED],
    "segmentation": [loss | more for loss in PIXELS for more in ({}, SMOOTHING)],
    "image_multilabel": [{}, MIXUP, {"train.target_threshold": 0.2} | MIXUP],
}
TABLE = torch.randn(300, 300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def made(kind: str, folder: Path, asked: dict[str, Any]) -> Task:
    if kind in ("segmentation", "image_multilabel"):
        shapes = {"data.detection.generated": {"samples": 20, "evaluation_samples": 2, "largest_side": 96}}
        few = {"shapes-segmentation": shapes | {"data.image_size": 16}, "figures": {"data.samples": 64}}
        name = "shapes-segmentation" if kind == "segmentation" else "figures"
        return build_task(load_recipe(name, few[name] | asked).recipe)
    data: dict[str, Any] = {"data.dataset": "text_table", "data.validation_fraction": 0.3, "data.text.rows": "single"}
    if kind == "language_modeling":
        for number in range(9):
            (folder / f"{number}.txt").write_text(f"the {number}th book says. " * (number % 4 + 5))
        data |= {"data.dataset": "text_folder", "data.path": str(folder), "data.text.context": 16, "model.name": "gpt"}
    else:
        rows: Any = reviews(90) if kind == "text_classification" else tagged(90)
        data |= {
            "data.path": str(write_lines(folder / "rows.jsonl", rows)),
            "data.text.context": 48,
            "model.name": "bert",
        }
    path = folder / "recipe.yaml"
    path.write_text(f"task: {kind}\n")
    return build_task(load_recipe(path, data | asked).recipe)


def answers_of(kind: str, classes: int) -> Callable[..., torch.Tensor]:
    if kind == "text_classification":
        return lambda tokens, mask: (TABLE[tokens, :classes] * mask[..., None]).sum(1) / 8
    if kind == "segmentation":
        return lambda images: torch.einsum("nchw,ck->nkhw", images.double(), TABLE[: images.shape[1], :classes])
    if kind == "image_multilabel":
        draws = torch.Generator().manual_seed(2)
        return lambda images: (
            images.double().flatten(1)
            @ torch.randn(images[0].numel(), classes, generator=draws.manual_seed(2), dtype=torch.float64)
            / 32
        )
    return lambda tokens, *_: TABLE[tokens, :classes]


def units_of(kind: str, answers: torch.Tensor, targets: torch.Tensor) -> Iterator[tuple[list[float], list[float]]]:
    """What a loss is the mean of, in Python's numbers: its logits, and its shares of the classes."""
    if kind == "image_multilabel":
        return iter(list(zip(answers.tolist(), targets.tolist(), strict=True)))
    pairs = zip(answers.flatten(0, -2).tolist(), targets.flatten().tolist(), strict=True)
    return ((row, [float(k == target) for k in range(len(row))]) for row, target in pairs if target not in (-100, 255))


def dice_of(units: list[tuple[list[float], list[float]]]) -> float:
    missed = []
    for k in range(len(units[0][0])):
        p, t = [softmax(row)[k] for row, _ in units], [shares[k] for _, shares in units]
        if any(t):
            common = sum(a * b for a, b in zip(p, t, strict=True))
            missed.append(1 - (2 * common + 1) / (sum(p) + sum(t) + 1))
    return sum(missed) / len(missed)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_losses_are_the_loop_over_their_units(kind: str, tmp_path: Path) -> None:
    for number, asked in enumerate(OTHERS[kind]):
        processes, parts = LAYOUTS[number % len(LAYOUTS)]
        task = made(kind, tmp_path, asked)
        task.data_facts(World())
        description = task.description()
        classes = len(description.get("class_names", ())) or description["vocabulary"]
        model = answers_of(kind, classes)
        found, batches = loss_of_a_step(task, model, processes, parts)
        hand = {key: value for key, value in asked.items() if key.startswith("train.")}
        if "train.class_weights" in hand:
            names = description["class_names"]
            hand["train.class_weights"] = {str(names.index(k)): v for k, v in asked["train.class_weights"].items()}
        if kind == "image_multilabel":
            hand.setdefault("train.loss", "bce")
        rows: list[Any] = []
        for batch in batches:
            inputs = batch.inputs if isinstance(batch.inputs, torch.Tensor) else batch.inputs["tokens"]
            more = (batch.inputs["mask"],) if kind == "text_classification" else ()
            answers = model(inputs, *more)
            if kind == "segmentation":
                images = zip(answers.permute(0, 2, 3, 1), batch.targets, strict=True)
                rows += [list(units_of(kind, *image)) for image in images]
            else:
                rows += units_of(kind, answers, batch.targets)
        if kind == "segmentation":
            dice = hand["train.loss"] == "cross_entropy_dice"
            of_images = [by_hand(((*unit, []) for unit in each), **hand) + dice * dice_of(each) for each in rows]
            expected = sum(of_images) / len(of_images)
        else:
            expected = by_hand(((*unit, []) for unit in rows), **hand)
        assert found == pytest.approx(expected, rel=2e-6), (asked, processes, parts)
