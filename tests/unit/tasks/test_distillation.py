"""A student learns from its teacher's answers, and from nothing else of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_sentences import raises

import paceline
from paceline.checkpoint.weights import read_weights
from paceline.data.pipeline import Placement
from paceline.errors import DataError, ModelError, PacelineError, RecipeError, RunDirectoryError
from paceline.host.world import World
from paceline.models.small_resnet import small_resnet
from paceline.recipe.load import load_recipe
from paceline.tasks.distillation import Distillation
from paceline.trainer.evaluate_target import EvaluationRequest, evaluate_target

DIGITS = (
    "data.validation_fraction=0.2",
    "model.options={width: 4, stages: 1}",
    "batch.global_size=128",
    "schedule.warmup=0 steps",
    "train.precision=fp32",
    "train.ema=off",
    "telemetry.trackers=[]",
    "parallel.device=cpu",
    "parallel.threads=1",
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that knows the digits well."""
    run = tmp_path_factory.mktemp("teacher") / "run"
    options = ("model.options={width: 8, stages: 1}", "train.duration=12 epochs", "optimizer.lr=0.3")
    paceline.train("digits", overrides=[*DIGITS, *options], run_dir=run, quiet=True)
    return run


@pytest.fixture
def taught(runs: Path, teacher: Path) -> Callable[..., Any]:
    def train(name: str, *overrides: str, source: Path = teacher) -> Any:
        asked = [*DIGITS, "task=distillation", f"distillation.teacher={source}", "train.duration=4 steps", *overrides]
        return paceline.train("digits", overrides=asked, run_dir=runs / name, quiet=True)

    return train


def test_the_teacher_answers_as_its_run_does(teacher: Path) -> None:
    """What is made of the answers is in the table of pairs of losses."""
    asked = ["task=distillation", f"distillation.teacher={teacher}"]
    task = Distillation(load_recipe("digits", [*DIGITS, *asked]).recipe)
    task.data_facts(World())
    task.prepare_training(Placement(device=torch.device("cpu")))
    images = torch.randn(9, 1, 8, 8)
    network: Any = task._teacher
    with torch.no_grad():
        assert torch.equal(network(images), predictor_network(teacher)(images))


def predictor_network(run: Path) -> torch.nn.Module:
    network = small_resnet(10, 1, width=8, stages=1)
    network.load_state_dict(read_weights(run).state)
    return network.eval()


def test_without_labels_a_student_comes_to_agree_with_its_teacher(taught: Callable[..., Any], runs: Path) -> None:
    done = taught("run", "distillation.weight=1.0", "train.duration=16 epochs", "optimizer.lr=0.3")
    assert done.summary.metrics["top1_accuracy"] > 60
    # Evaluating needs no teacher.
    report = evaluate_target(EvaluationRequest(target=runs / "run", overrides=["parallel.threads=1"]))
    assert report.metrics["top1_accuracy"] == done.summary.metrics["top1_accuracy"]


def test_the_teacher_is_no_part_of_the_run(taught: Callable[..., Any], runs: Path) -> None:
    taught("run")
    taught("alone", "distillation.weight=0.0")
    assert set(read_weights(runs / "run").state) == set(small_resnet(10, 1, width=4, stages=1).state_dict())
    asked = [*DIGITS, "train.duration=4 steps"]
    plain = paceline.train("digits", overrides=asked, run_dir=runs / "plain", quiet=True)
    alone = read_weights(runs / "alone").state
    assert all(torch.equal(alone[key], value) for key, value in read_weights(plain.run_dir).state.items())


@pytest.mark.parametrize(
    ("overrides", "error", "said"),
    [
        (("distillation.teacher=off",), RecipeError, "set distillation.teacher to a run directory"),
        (("distillation.teacher=nowhere",), PacelineError, "there is no run directory '"),
        (
            ("data={dataset: synthetic, classes: 10, samples: 512, validation_fraction: null, augment: null}",),
            DataError,
            "a teacher must have the same classes",
        ),
        (("distillation.temperature=2", "distillation.kind=hard"), RecipeError, "it needs distillation.kind=soft"),
    ],
)
def test_mistakes(
    taught: Callable[..., Any], runs: Path, overrides: tuple[str, ...], error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as caught:
        taught("run", *overrides)
    assert said in str(caught.value)
    assert not (runs / "run").exists()


def test_a_teacher_of_another_image_size_is_refused(taught: Callable[..., Any], runs: Path) -> None:
    options = "model.options={img_size: 8, patch_size: 4, depth: 1, embed_dim: 24}"
    fixed = ("model.name=vit_tiny_patch16_224", options, "train.duration=1 steps")
    paceline.train("digits", overrides=[*DIGITS, *fixed], run_dir=runs / "fixed", quiet=True)
    with pytest.raises(ModelError, match=r"distillation\.teacher\) does not take images of 12 pixels"):
        taught("run", "data.image_size=12", source=runs / "fixed")
    assert not (runs / "run").exists()


def test_a_teacher_without_distillation_is_refused(runs: Path) -> None:
    with raises(RecipeError, rule="with effect"):
        paceline.train("digits", overrides=[f"distillation.teacher={runs}"], run_dir=runs / "run", quiet=True)


def test_another_teacher_is_noticed_when_a_run_goes_on(taught: Callable[..., Any], teacher: Path, runs: Path) -> None:
    mine, moved = runs / "teacher.safetensors", runs / "moved.safetensors"
    shutil.copy(read_weights(teacher).path, mine)
    taught("run", "train.until=2 steps", source=mine)
    shutil.copy(mine, moved)
    other = paceline.train("digits", overrides=[*DIGITS, "train.duration=2 steps"], run_dir=runs / "other", quiet=True)
    shutil.copy(read_weights(other.run_dir).path, mine)
    with raises(RunDirectoryError, key="teacher"):
        taught("run", source=mine)
    assert taught("run", source=moved).summary.step == 4
