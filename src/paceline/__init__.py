"""Train neural networks with PyTorch, on one CPU or many GPUs, from one recipe.

The public names are loaded on first use, so that importing the package, as the command line does, does not import
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.version import __version__

__all__ = [
    "ImageClassification",
    "PacelineError",
    "Recipe",
    "Task",
    "TrainResult",
    "__version__",
    "find_lr",
    "load_recipe",
    "train",
]

_HOMES = {
    "ImageClassification": "paceline.tasks.image_classification",
    "PacelineError": "paceline.errors",
    "Recipe": "paceline.recipe.schema",
    "Task": "paceline.tasks.task",
    "TrainResult": "paceline.trainer.train",
    "find_lr": "paceline_advisor.tuning.lr_range",
    "load_recipe": "paceline.recipe.load",
    "train": "paceline.training",
}

if TYPE_CHECKING:
    from paceline.errors import PacelineError
    from paceline.recipe.load import load_recipe
    from paceline.recipe.schema import Recipe
    from paceline.tasks.image_classification import ImageClassification
    from paceline.tasks.task import Task
    from paceline.trainer.train import TrainResult
    from paceline.training import train


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute '{name}'")
    from paceline.loading import loading

    with loading():
        value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # later accesses no longer call this function
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
