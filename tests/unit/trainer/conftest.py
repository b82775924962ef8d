"""A network that counts its steps, so that a test can say beforehand what each evaluation will find."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from paceline.data.pipeline import Placement
from paceline.distributed.collectives import Collectives
from paceline.host.world import World
from paceline.models.precision import Precision
from paceline.recipe.load import load_recipe
from paceline.recipe.training import GradScaler
from paceline.telemetry.display import Display
from paceline.trainer.evaluate import Evaluator

Make = Callable[..., Any]
CPU = torch.device("cpu")

COUNTING = {"optimizer.lr": 1.0, "optimizer.momentum": 0, "schedule.name": "constant"}


class Counting(nn.Module):
    """Its one weight is the number of steps taken, if the loss is minus the weight and the rate is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.steps.float().expand(len(x), 3)


@pytest.fixture
def scripted(tiny_task: Make, train_tiny: Make) -> Make:
    """``scripted("a", [10, 30, 20], {...})`` trains one step after another, each evaluated to the next number."""

    def train(
        name: str, script: Sequence[float], overrides: Any = None, metric: str = "top1_accuracy", **more: Any
    ) -> Any:
        made: list[Counting] = []

        def network() -> Counting:
            made.append(Counting())
            return made[-1]

        def on_score(model: Counting, _: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            # The average's weight is a fraction: it stands for the last step it has passed.
            value = script[max(math.floor(model.steps.item() + 1e-6), 1) - 1]
            scale = 100 if metric == "top1_accuracy" else 1
            return {**values, metric: torch.full_like(values["loss"], value / scale, dtype=torch.float64)}

        task = tiny_task(make_network=network, on_loss=lambda *_: -made[-1].steps, on_score=on_score)
        common = {**COUNTING, "evaluate.every": "1 steps", "train.duration": f"{len(script)} steps"}
        return train_tiny(name, {**common, **(overrides or {})}, task=task, **more)

    return train


@pytest.fixture
def opened(tiny_task: Make, tiny_recipe: Path) -> Make:
    """``opened({...}, classes=7)``: a tiny task, opened as the trainer does, and its pipeline."""

    def make(overrides: Any = None, **changes: Any) -> Any:
        task = tiny_task(**changes)(load_recipe(tiny_recipe, overrides or {}).recipe)
        task.data_facts(World())
        return task, task.open_pipeline(Placement(device=CPU))

    return make


@pytest.fixture
def evaluator() -> Make:
    """``evaluator(task, pipeline, precision="bf16")``: scores on this process, in batches of 16."""

    def make(task: Any, pipeline: Any, *, precision: str = "fp32", **more: Any) -> Evaluator:
        common: dict[str, Any] = {"collectives": Collectives(World()), "device": CPU, "batch_size": 16}
        scaled = Precision(precision, CPU, GradScaler())
        return Evaluator(task=task, pipeline=pipeline, precision=scaled, **common, **more)

    return make


@pytest.fixture
def listening() -> Display:
    """A display that keeps what a user is told, in ``heard``."""

    class Listening(Display):
        def __init__(self) -> None:
            self.heard: list[str] = []

        def message(self, text: str) -> None:
            self.heard.append(text)

    return Listening()


@pytest.fixture(scope="session")
def make_photos() -> Callable[..., Path]:
    """``make_photos(folder, train=10, val=3)``: so many smooth pictures of each of two classes."""

    def make(
        root: Path, *, names: Sequence[str] = ("cat", "dog"), side: int = 24, ending: str = "png", **splits: int
    ) -> Path:
        generator = np.random.default_rng(11)
        for split, count in splits.items():
            for name in names:
                (root / split / name).mkdir(parents=True)
                for number in range(count):
                    coarse = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
                    Image.fromarray(coarse).resize((side, side)).save(root / split / name / f"{number:02d}.{ending}")
        return root

    return make
