"""A size to evaluate at is chosen on images that were held out of training, or it is refused."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from image_sets import photo_recipe
from paceline.reports.audit import used_samples

import paceline
from paceline.data.image.datasets import open_dataset
from paceline.errors import PacelineError
from paceline.recipe.data import Data
from paceline.tasks.image_classification import ImageClassification
from paceline.trainer.evaluate_target import (
    EvaluationReport,
    EvaluationRequest,
    SizeSweep,
    evaluate_target,
    sweep_sizes,
)

Make = Callable[..., Any]
Trained = Callable[[float], Path]
RECIPE = photo_recipe(
    {"channels": 3},
    train={"duration": "2 epochs", "precision": "fp32"},
    evaluate={"batch_size": 4},
    checkpoint={"every": "off"},
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory, make_photos: Make) -> Path:
    """Twenty pictures to train on and six to evaluate on, of two classes each."""
    return make_photos(tmp_path_factory.mktemp("photos"), names=("first", "second"), train=10, val=3)


@pytest.fixture(scope="module")
def trained(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[float], Path]]:
    """``trained(0.2)`` is the directory of a run that held so much of its training images out."""
    root = tmp_path_factory.mktemp("trained")
    (root / "photos.yaml").write_text(json.dumps(RECIPE))
    made: dict[float, Path] = {}

    def train(fraction: float) -> Path:
        if fraction not in made:
            overrides = {"data.path": str(photos), "data.holdout_fraction": fraction}
            run_dir = root / f"run-{fraction}"
            made[fraction] = paceline.train(
                root / "photos.yaml", overrides=overrides, run_dir=run_dir, quiet=True
            ).run_dir
        return made[fraction]

    return train


def test_what_is_held_out_is_never_trained_on(trained: Trained, photos: Path) -> None:
    """Over both parts every training image is there once, two of ten of each class held out."""
    run_dir = trained(0.2)
    plan = json.loads((run_dir / "plan.json").read_text())
    assert (plan["train_samples"], plan["evaluation_samples"], plan["data"]["holdout_samples"]) == (16, 6, 4)
    assert {sample for entry in used_samples(run_dir, 0) for sample in entry.ids.tolist()} == set(range(16))

    def scored(on: Any) -> list[str]:
        file = run_dir / f"{on}.jsonl"
        evaluate_target(EvaluationRequest(target=run_dir, on=on, predictions=file))
        return [json.loads(line)["sample"] for line in file.read_text().splitlines()]

    held_out = scored("holdout")
    assert [Path(path).parent.name for path in held_out] == ["first"] * 2 + ["second"] * 2
    assert all(Path(path).parent.parent == photos / "train" for path in held_out)
    assert all(Path(path).parent.parent == photos / "val" for path in scored("validation"))
    dataset = open_dataset(Data(path=str(photos), holdout_fraction=0.2))
    left = {dataset.train.path(sample) for sample in range(len(dataset.train))}
    assert left.isdisjoint(held_out)
    assert len(left | set(held_out)) == 20


def test_each_size_is_evaluated_as_if_it_were_the_recipes(trained: Trained) -> None:
    run_dir = trained(0.2)
    sweep = sweep_sizes(EvaluationRequest(target=run_dir, on="holdout"), (24, 16, 20))
    assert list(sweep.reports) == [24, 16, 20]
    for size, report in sweep.reports.items():
        alone = EvaluationRequest(target=run_dir, on="holdout", overrides=[f"data.evaluation_size={size}"])
        assert evaluate_target(alone).metrics == report.metrics
        assert (report.samples, report.samples_per_second > 0) == (4, True)
    assert len({report.metrics["loss"] for report in sweep.reports.values()}) == 3
    document = sweep.to_json()
    assert (document["on"], document["samples"], document["metric"]) == ("holdout", 4, "top1_accuracy")
    assert [each["size"] for each in document["sizes"]] == [24, 16, 20]
    assert document["best_size"] == sweep.best_size


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        ("top1_accuracy", {128: 50.0, 160: 70.0, 192: 70.0, 224: 60.0}, 160),
        ("loss", {128: 0.5, 160: 0.4, 192: 0.7, 224: 0.4}, 160),
    ],
)
def test_the_best_of_equal_sizes_is_the_smallest(metric: str, values: dict[int, float], best: int) -> None:
    reports = {
        size: EvaluationReport(
            path=Path("x"), weights="model", samples=8, metrics={metric: value}, counts={}, broken=(), seconds=2.0
        )
        for size, value in reversed(values.items())
    }
    sweep = SizeSweep(reports=reports, on="holdout", metric=metric)
    assert sweep.best_size == best
    assert sweep.first.samples_per_second == 4.0


@pytest.mark.parametrize(
    ("fraction", "overrides", "message"),
    [
        (0.0, [], r"held no training images out .*data\.holdout_fraction=0\.05"),
        (0.2, ["data.holdout_fraction=0.3"], r"data\.holdout_fraction=0\.3, but .* were trained with 0\.2"),
        (0.2, ["data.evaluation_size=20"], r"'data\.evaluation_size' has no effect with --sizes"),
    ],
)
def test_what_would_choose_wrongly_is_refused(
    fraction: float, overrides: list[str], message: str, trained: Trained
) -> None:
    request = EvaluationRequest(target=trained(fraction), on="holdout", overrides=overrides)
    with pytest.raises(PacelineError, match=message):
        sweep_sizes(request, (16, 20))


def test_other_data_have_nothing_that_is_known_to_be_held_out(trained: Trained, photos: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for path in sorted((photos / "train" / name).iterdir())[:8]:
            (tmp_path / "train" / name / path.name).write_bytes(path.read_bytes())
    request = EvaluationRequest(target=trained(0.2), on="holdout", overrides=[f"data.path={tmp_path}"])
    with pytest.raises(PacelineError, match=r"data differ from those .* so the held-out part is unknown"):
        sweep_sizes(request, (16, 20))
    with pytest.raises(PacelineError, match="names a size twice"):
        sweep_sizes(EvaluationRequest(target=trained(0.2), on="holdout"), (16, 20, 16))


def test_on_the_validation_images_it_may_be_asked_for(trained: Trained) -> None:
    sweep = sweep_sizes(EvaluationRequest(target=trained(0.0)), (16, 24))
    assert [report.samples for report in sweep.reports.values()] == [6, 6]


def test_a_size_ends_its_loader_processes(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are all there from the beginning, since they are forked first, and for no longer than they are needed."""
    alive: list[int] = []
    score = ImageClassification.score

    def counted(*arguments: Any) -> Any:
        alive.append(len(multiprocessing.active_children()))
        return score(*arguments)

    monkeypatch.setattr(ImageClassification, "score", counted)
    sweep_sizes(EvaluationRequest(target=trained(0.2), overrides=["data.workers=1"]), (16, 20, 24))
    assert alive == [3, 3, 2, 2, 1, 1]  # six images in batches of four
    assert multiprocessing.active_children() == []


PLAIN = """
from paceline import ImageClassification
from paceline.tasks.task import Task

class Plain(Task):
    def __init__(self, recipe):
        super().__init__(recipe)
        self._inner = ImageClassification(recipe)
        self.data_facts, self.open_pipeline = self._inner.data_facts, self._inner.open_pipeline
        self.metrics = self._inner.metrics[:1]

    def build_model(self):
        return self._inner.build_model()

    def loss(self, model, batch):
        return self._inner.loss(model, batch)

    def score(self, model, batch):
        return {"loss": self._inner.score(model, batch)["loss"]}

    def data_facts(self, world): ...
    def open_pipeline(self, placement): ...
"""


def test_a_task_that_shows_its_samples_itself_has_no_sizes(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain_task.py").write_text(PLAIN)
    (tmp_path / "photos.yaml").write_text(json.dumps(RECIPE))
    monkeypatch.syspath_prepend(tmp_path)
    overrides = {"data.path": str(photos), "task": "plain_task:Plain", "evaluate.metric": "loss"}
    run_dir = paceline.train(
        tmp_path / "photos.yaml", overrides=overrides, run_dir=tmp_path / "run", quiet=True
    ).run_dir
    request = EvaluationRequest(target=run_dir, trust_code=True)
    assert evaluate_target(request).samples == 6
    with pytest.raises(PacelineError, match="--sizes has no effect on the task plain_task:Plain"):
        sweep_sizes(request, (16, 20))
    sys.modules.pop("plain_task")
