"""A task of one's own, by class, by name or by reference; and what image classification measures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import paceline
from paceline.data.image.decode import describe_decoder
from paceline.errors import PacelineError, RecipeError
from paceline.host.world import World
from paceline.recipe.load import load_recipe, stored_recipe
from paceline.tasks.image_classification import ImageClassification
from paceline.tasks.task import build_task, check_supported
from paceline.trainer.train import plan_only

OWN = """
import torch
from torch import nn
import paceline

class Halved(paceline.ImageClassification):
    def loss(self, model, batch):
        return super().loss(model, batch) / 2

def widest(num_classes, in_channels, width=5):
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * 64, width), nn.ReLU(), nn.Linear(width, num_classes))

def no_task(recipe):
    return "a task"
"""


def digits(overrides: Any = ()) -> paceline.Recipe:
    return stored_recipe({"data": {"dataset": "digits"}}, "plain", overrides)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_tasks.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield
    sys.path[:] = path
    sys.modules.pop("my_tasks", None)


def test_the_public_names_are_there() -> None:
    assert {*dir(paceline)} == {*paceline.__all__}
    assert {"ImageClassification", "PacelineError", "Task", "evaluate", "find_lr", "fit", "train"} <= {
        *paceline.__all__
    }
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None


# -------------------------------------------------------------------------------------- which task


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("image_clasification", "unknown task 'image_clasification'. Did you mean 'image_classification'? Known: "),
        ("my_tasks:Halfed", "'my_tasks:Halfed': module 'my_tasks' has no 'Halfed'. Did you mean 'Halved'?"),
        ("my_tsaks:Halved", "'my_tsaks:Halved': there is no module 'my_tsaks'; it must be importable or be in "),
        ("my_tasks:no_task", "task 'my_tasks:no_task' gave a str, not a paceline.Task."),
    ],
)
def test_a_task_that_is_not_there(name: str, said: str, own: None) -> None:
    with pytest.raises(RecipeError) as caught:
        build_task(digits({"task": name}))
    assert str(caught.value).startswith(said)


def test_by_reference_with_a_model_by_reference(own: None, tmp_path: Path, runs: Path, tiny_recipe: Path) -> None:
    """Half the loss at twice the rate is the same descent."""
    text = tiny_recipe.read_text().replace("{width: 4, stages: 1, depth: 1}", "{width: 4}")
    (tmp_path / "own.yaml").write_text(text.replace("small_resnet", "my_tasks:widest"))
    common = {
        "train.duration": "4 steps",
        "optimizer.momentum": 0,
        "data.validation_fraction": 0.97,
        "parallel.threads": 1,
    }
    plain = {**common, "optimizer.lr": 0.125}
    halved = {**common, "optimizer.lr": 0.25, "task": "my_tasks:Halved"}
    digests = [
        paceline.train(tmp_path / "own.yaml", overrides=each, run_dir=runs / name, quiet=True).summary.weights_sha256
        for name, each in {"plain": plain, "halved": halved}.items()
    ]
    assert digests[0] == digests[1]


def test_the_plan_says_how_files_are_found_and_decoded(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (40, 30)).save(tmp_path / "photos" / name / f"{number}.jpg")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {name: small_resnet}\ntrain: {duration: 1 epochs}\nbatch: {global_size: 4}\n")
    files = {"data.path": str(tmp_path / "photos"), "data.image_size": 16}
    crop = {"data.augment.crop": "random_resized", "data.augment.shrink_on_load": False}
    plan = plan_only(load_recipe(recipe, {**files, **crop}))
    assert plan.reasons["data.path"].startswith("8 files, listed in ")
    assert plan.reasons["data.decoder"] == f"for JPEG files: {describe_decoder()}"
    assert "data.augment.shrink_on_load" not in plan.unused
    without = plan_only(load_recipe(recipe, {"data.dataset": "digits", **crop}))
    assert "data.decoder" not in without.reasons
    assert without.unused["data.augment.shrink_on_load"] == "this data set has no files that are decoded"


def test_a_task_made_by_hand(tiny_recipe: Path, runs: Path) -> None:
    class Own(paceline.ImageClassification):
        def build_model(self) -> nn.Module:
            return nn.Sequential(nn.Flatten(), nn.Linear(64, len(self.dataset.classes)))

    overrides = {"data.validation_fraction": 0.97, "train.duration": "2 steps"}
    result = paceline.train(tiny_recipe, overrides=overrides, run_dir=runs / "run", task=Own, quiet=True)
    assert result.summary.parameters == 650


# ------------------------------------------------------------------------------- what the data come to


def test_facts_of_the_digits() -> None:
    task = ImageClassification(digits())
    facts = task.data_facts(World())
    assert facts.train_samples + facts.evaluation_samples == 1797
    assert facts.description["classes"] == 10
    assert (facts.description["image_size"], facts.description["channels"]) == (8, 1)
    assert facts.reasons["data.backend"]
    assert [metric.name for metric in task.metrics] == ["loss", "top1_accuracy", "top5_accuracy"]
    assert task.description() == {
        "class_names": [str(digit) for digit in range(10)],
        "evaluation_crop": 0.875,
        "interpolation": "bilinear",
        "native_size": [8, 8],
    }


@pytest.mark.parametrize(("top_k", "expected"), [(2, ["top2_accuracy"]), (9, ["top9_accuracy"]), (10, []), (11, [])])
def test_top_k_is_measured_where_it_means_something(top_k: int, expected: list[str]) -> None:
    task = ImageClassification(digits({"evaluate.top_k": top_k}))
    facts = task.data_facts(World())
    assert [metric.name for metric in task.metrics[2:]] == expected
    assert ("evaluate.top_k" in facts.reasons) == (not expected)


def test_the_model_fits_the_data(tiny_task: Callable[..., Any]) -> None:
    assert tiny_task(classes=7)(digits()).build_model()(torch.zeros(2, 1, 8, 8)).shape == (2, 7)


@pytest.mark.parametrize("method", ["loss", "open_pipeline", "first_weights"])
def test_a_network_that_a_task_calls_in_its_own_way_is_not_tried(method: str) -> None:
    def own(*_: Any) -> None: ...

    type("Own", (ImageClassification,), {method: own})(digits()).check_network(nn.Bilinear(64, 64, 10))


def test_a_plan_for_any_world_needs_no_world() -> None:
    plans = [plan_only(load_recipe("digits"), world_size=world) for world in (1, 2, 64)]
    assert plans[0].higher_is_better == {"loss": False, "top1_accuracy": True, "top5_accuracy": True}
    assert [plan.world_size for plan in plans] == [1, 2, 64]
    assert len({plan.total_steps for plan in plans}) == 1
    assert len({plan.data["digest"] for plan in plans}) == 1


def test_a_metric_that_is_not_measured_is_refused(tmp_path: Path) -> None:
    class Lossy(ImageClassification):
        def data_facts(self, world: World) -> Any:
            facts = super().data_facts(world)
            self.metrics = self.metrics[:1]
            return facts

    with pytest.raises(
        PacelineError, match=r"evaluate\.metric=top1_accuracy is not a metric of this task; choose one of: loss"
    ):
        paceline.train(
            "digits", overrides=["evaluate.metric=top1_accuracy"], task=Lossy, run_dir=tmp_path / "run", quiet=True
        )
    assert not (tmp_path / "run").exists()


class Plain(paceline.Task):
    """A task that knows nothing of images."""

    data_facts = open_pipeline = build_model = loss = score = None  # type: ignore[assignment]


@pytest.mark.parametrize("augment", ["flip", "ten_crop"])
def test_a_task_without_views_refuses_them(augment: str) -> None:
    recipe = digits({"evaluate.augment": augment})
    with pytest.raises(RecipeError, match=rf"evaluate\.augment={augment} has no effect with the task .*Plain"):
        check_supported(Plain(recipe))
    check_supported(Plain(digits()))
    check_supported(ImageClassification(recipe))
