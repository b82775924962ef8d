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
    "Loop",
    "PacelineError",
    "Recipe",
    "Task",
    "TrainResult",
    "__version__",
    "fit",
    "load_recipe",
    "train",
]

_HOMES = {
    "ImageClassification": "paceline.tasks.image_classification",
    "Loop": "paceline.loop.loop",
    "PacelineError": "paceline.errors",
    "Recipe": "paceline.recipe.schema",
    "Task": "paceline.tasks.task",
    "TrainResult": "paceline.trainer.train",
    "fit": "paceline.fitting",
    "load_recipe": "paceline.recipe.load",
    "train": "paceline.training",
}

if TYPE_CHECKING:
    from paceline.errors import PacelineError
    from paceline.fitting import fit
    from paceline.loop.loop import Loop
    from paceline.recipe.load import load_recipe
    from paceline.recipe.schema import Recipe
    from paceline.tasks.image_classification import ImageClassification
    from paceline.tasks.task import Task
    from paceline.trainer.train import TrainResult
    from paceline.training import train


def __getattr__(name: str) -> Any:
    from paceline.loading import loading

    with loading():
        if name in _HOMES:
            value = getattr(importlib.import_module(_HOMES[name]), name)
        else:
            value = _registered(name)
    globals()[name] = value  # later accesses no longer call this function
    return value


def _registered(name: str) -> Any:
    """Return the function that another package registers under a name."""
    from paceline.errors import PacelineError
    from paceline.registry import built_in, installed, load

    try:
        is_known = not name.startswith("_") and (name in built_in("functions") or name in installed("functions"))
    except PacelineError as error:  # of other names; importing a submodule asks for an attribute first
        raise AttributeError(str(error)) from None
    if not is_known:
        raise AttributeError(f"module 'paceline' has no attribute '{name}'")
    return load("functions", name, PacelineError)


def __dir__() -> list[str]:
    from paceline.registry import known_names

    return sorted({*__all__, *known_names("functions")})
