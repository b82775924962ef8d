"""Bugs that let a training of digits go on, each a little worse than it should be: does the recipe's band see them?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

import paceline
from paceline.data.batch import Batch
from paceline.recipe.schema import Recipe
from paceline.tasks.image_classification import ImageClassification
from paceline.tasks.task import Model


class WrongMean(ImageClassification):
    """Normalises digits as if they were ImageNet's photographs."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.dataset = dataclasses.replace(self.dataset, mean=(0.485,), std=(0.229,))


class NoisyLabels(ImageClassification):
    """Takes 1 % of the training images for another digit, always the same one."""

    def loss(self, model: Model, batch: Batch) -> torch.Tensor:
        """The task's own, of targets some of which are changed."""
        ids = np.asarray(batch.ids)
        wrong = torch.as_tensor((ids * 7919 + 13) % 1000 < 10)
        others = (batch.targets + 1 + torch.as_tensor(ids % 9)) % 10
        return super().loss(model, dataclasses.replace(batch, targets=torch.where(wrong, others, batch.targets)))


@dataclass(frozen=True)
class Bug:
    """What is wrong with a run: its task's code, or what it asks for."""

    task: type[ImageClassification] = ImageClassification
    asked: Mapping[str, str] = field(default_factory=dict)


BUGS: Mapping[str, Bug] = {
    "wrong mean": Bug(WrongMean),
    "wrong labels": Bug(NoisyLabels),
    "no warm-up": Bug(asked={"schedule.warmup": "0 steps"}),
}


def train_with(bug: Bug, seed: int, run: Path, until: str | None = None) -> Path:
    """A run of digits with the bug, in this process; ``until`` as ``train.until``."""
    asked = {"seed": seed, "telemetry.report": False, "telemetry.trackers": [], **bug.asked}
    if until is not None:
        asked["train.until"] = until
    paceline.train("digits", overrides=asked, run_dir=run, task=bug.task, quiet=True)
    return run
