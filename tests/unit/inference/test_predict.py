"""Is the network that predicts the one that was trained, and whose code may build it?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_sentences import raises
from PIL import Image
from torch import nn

import paceline
from paceline.checkpoint.weights import read_weights
from paceline.errors import RecipeError
from paceline.inference.predict import load_predictor
from paceline.tasks.labelling import TrainedLabeller
from paceline.trainer.evaluate_target import EvaluationRequest, evaluate_target

OWN = """
from torch import nn
from paceline import ImageClassification

class Flat(ImageClassification):
    def build_model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64 * self.dataset.channels, len(self.dataset.classes)))

def flat(recipe):
    return Flat(recipe)
"""
SHORT = {"train.duration": "2 steps", "evaluate.every": "off", "parallel.device": "cpu"}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module of one's own and a picture, as the current directory."""
    (tmp_path / "flat_task.py").write_text(OWN)
    grey = np.arange(0, 256, 4, dtype=np.uint8).reshape(8, 8)
    Image.fromarray(grey).save(tmp_path / "picture.png")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("flat_task", None)


@pytest.fixture
def trained(own: Path) -> Callable[..., Path]:
    """``trained(task)`` trains the digits with a task by name, or from Python."""

    def train(task: Any) -> Path:
        overrides, made = ({**SHORT, "task": task}, None) if isinstance(task, str) else (SHORT, task)
        return paceline.train("digits", overrides=overrides, run_dir=own / "run", task=made, quiet=True).run_dir

    return train


def probabilities(predictor: TrainedLabeller, picture: Path) -> list[float]:
    (prediction,) = predictor.predict([picture], top_k=10)
    assert prediction.error is None
    return list(prediction.probabilities)


def expected(run: Path, picture: Path) -> list[float]:
    """Computed by hand: a flat linear layer on the normalised picture."""
    saved = read_weights(run)
    data = saved.description("data")
    pixels = torch.from_numpy(np.array(Image.open(picture))).float() / 255
    inputs = ((pixels - data["mean"][0]) / data["std"][0]).flatten()
    logits = saved.state["1.weight"] @ inputs + saved.state["1.bias"]
    return sorted(logits.softmax(dim=0).tolist(), reverse=True)


@pytest.mark.parametrize("name", ["flat_task:Flat", "flat_task:flat"])
def test_a_task_that_builds_another_network_predicts_with_that_network(trained: Any, own: Path, name: str) -> None:
    run = trained(name)
    with raises(RecipeError, key="task", value=name, rule="no code"):
        load_predictor(run)
    found = probabilities(load_predictor(run, trust_code=True), own / "picture.png")
    assert found == pytest.approx(expected(run, own / "picture.png"), rel=1e-4)


def test_a_task_given_in_python_is_found_by_its_class(trained: Callable[..., Path], own: Path) -> None:
    sys.path.insert(0, str(own))
    from flat_task import Flat  # type: ignore[import-not-found]  # written by the fixture

    run = trained(Flat)
    with raises(
        RecipeError,
        key="task",
        value="flat_task:Flat",
        path="checkpoints/step-00000002/ema.safetensors",
        rule="no code",
    ):
        load_predictor(run)
    found = probabilities(load_predictor(run, trust_code=True), own / "picture.png")
    assert found == pytest.approx(expected(run, own / "picture.png"), rel=1e-4)


def test_a_task_that_cannot_be_imported_is_given_again(trained: Callable[..., Path], own: Path) -> None:
    class Local(paceline.ImageClassification):
        def build_model(self) -> nn.Module:
            return nn.Sequential(nn.Flatten(), nn.Linear(64, len(self.dataset.classes)))

    run = trained(Local)
    with pytest.raises(RecipeError, match=r"trained with the task .*Local, which commands cannot import\. Call "):
        load_predictor(run, trust_code=True)
    found = probabilities(load_predictor(run, task=Local), own / "picture.png")
    assert found == pytest.approx(expected(run, own / "picture.png"), rel=1e-4)


def test_a_task_of_the_program_itself_is_refused_without_asking_for_trust(trained: Callable[..., Path]) -> None:
    class Local(paceline.ImageClassification):
        def build_model(self) -> nn.Module:
            return nn.Sequential(nn.Flatten(), nn.Linear(64, len(self.dataset.classes)))

    Local.__module__, Local.__qualname__ = "__main__", "Local"
    run = trained(Local)
    for ask in (load_predictor, lambda target: evaluate_target(EvaluationRequest(target=target))):
        with pytest.raises(RecipeError, match="the task __main__:Local, which commands cannot import"):
            ask(run)


def test_the_data_are_not_needed(own: Path) -> None:
    """The folder is moved away before predicting."""
    for label in ("dark", "light"):
        (own / "photos" / label).mkdir(parents=True)
        for number in range(12):
            Image.new("L", (8, 8), 200 if label == "light" else 20).save(own / "photos" / label / f"{number}.png")
    overrides = {
        **SHORT,
        "task": "flat_task:Flat",
        "data": {"dataset": "image_folder", "path": "photos", "image_size": 8, "channels": 1},
        "batch.global_size": 8,
    }
    run = paceline.train("digits", overrides=overrides, run_dir=own / "run", quiet=True).run_dir
    (own / "photos").rename(own / "away")
    (prediction,) = load_predictor(run, trust_code=True).predict([own / "picture.png"])
    assert set(prediction.labels) == {"dark", "light"}
