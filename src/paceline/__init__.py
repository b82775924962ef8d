"""Train neural networks with PyTorch, on one CPU or many GPUs, from one recipe.

The public names are loaded on first use, so that importing the package, as the command line does, does not import
torch. ``__init__.pyi``, which `scripts/public` writes, holds their types.
"""

from __future__ import annotations

import importlib
from typing import Any

from paceline.version import __version__ as __version__

HOMES = {
    "CommandResult": "paceline.functions",
    "FitResult": "paceline.fitting",
    "ImageClassification": "paceline.tasks.image_classification",
    "Loop": "paceline.loop.loop",
    "PacelineError": "paceline.errors",
    "Recipe": "paceline.recipe.schema",
    "Task": "paceline.tasks.task",
    "TrainResult": "paceline.trainer.result",
    "fit": "paceline.fitting",
    "load_recipe": "paceline.recipe.load",
    "train": "paceline.training",
}
# Commands that are functions too; those of other packages are registered.
COMMANDS = ("audit", "evaluate", "export", "predict", "report", "resume")
# Modules that are public as a whole, in addition to this one.
PUBLIC_MODULES = (
    *("paceline.tasks", "paceline.order", "paceline.checkpoints", "paceline.ledger", "paceline.scores"),
    *("paceline.conform", "paceline.shards"),
)


def __getattr__(name: str) -> Any:
    from paceline.plugins.loading import loading

    with loading():
        if name == "__all__":
            value: Any = _public_names()
        elif name in HOMES:
            value = getattr(importlib.import_module(HOMES[name]), name)
        elif f"paceline.{name}" in PUBLIC_MODULES and (module := _module(name)) is not None:
            value = module
        else:
            value = _function(name)
    globals()[name] = value  # later accesses no longer call this function
    return value


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"paceline.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"paceline.{name}":
            raise
        return None


def _function(name: str) -> Any:
    """Return the function of a command's name, or one that another package registers."""
    from paceline.errors import PacelineError

    if name in COMMANDS:
        from paceline.cli.commands import reference_of
        from paceline.plugins.references import load_reference

        value = load_reference(str(reference_of(name)), PacelineError, installed=True)
    else:
        value = _registered(name)
    if not hasattr(value, "__paceline_command__"):
        return value
    from paceline.functions import function_of

    return function_of(value)


def _registered(name: str) -> Any:
    from paceline.errors import PacelineError
    from paceline.plugins.registry import built_in, installed, load

    try:
        is_known = not name.startswith("_") and (name in built_in("functions") or name in installed("functions"))
    except PacelineError as error:  # of other names; importing a submodule asks for an attribute first
        raise AttributeError(str(error)) from None
    if not is_known:
        raise AttributeError(f"module 'paceline' has no attribute '{name}'")
    return load("functions", name, PacelineError)


def _public_names() -> list[str]:
    from paceline.plugins.registry import built_in

    return sorted({*HOMES, *COMMANDS, *built_in("functions"), "__version__"})


def __dir__() -> list[str]:
    from paceline.plugins.registry import known_names

    return sorted({*_public_names(), *known_names("functions")})
