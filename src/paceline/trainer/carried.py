"""Objects that Python carries into a run's processes: a task, data and callbacks that no recipe can name.

They are written with cloudpickle, which also takes what a script or notebook defines, and read by fresh processes: a
fork after OpenMP has started threads, or a GPU is in use, may hang.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from paceline.errors import RecipeError
from paceline.plugins.references import is_ours
from paceline.trainer.listeners import Callbacks
from paceline.trainer.subject import TaskMaker

CARRIED_VARIABLE = "PACELINE_CARRIED"
"""Names the file, for the processes of one run."""


@dataclass(frozen=True, kw_only=True)
class Carried:
    """What the processes of a run need besides its recipe.

    Attributes:
        task: Makes the task; None for the recipe's.
        callbacks: Observers of the run; each process has its own.
    """

    task: TaskMaker | None = None
    callbacks: Callbacks

    def write(self, path: Path) -> None:
        """Write them to a file.

        Raises:
            RecipeError: If something cannot be carried, such as an open file or a GPU's memory.
        """
        import cloudpickle  # only for several processes from Python

        for module in _only_here():
            cloudpickle.register_pickle_by_value(module)
        try:
            path.write_bytes(cloudpickle.dumps(self))
        except (TypeError, pickle.PicklingError, AttributeError, RuntimeError) as error:
            raise RecipeError(
                f"other processes cannot get what was given ({type(error).__name__}: {error}); use processes=1, or "
                "start the script with torchrun."
            ) from error


def _only_here() -> Iterator[ModuleType]:
    """Yield modules that another process would not find on the path, such as those of tests."""
    found: dict[str, bool] = {}
    for name, module in list(sys.modules.items()):
        file, top = getattr(module, "__file__", None), name.partition(".")[0]
        if file is None or "-packages" in file or top in sys.stdlib_module_names or is_ours(name):
            continue
        if top not in found:
            found[top] = PathFinder.find_spec(top) is not None
        if not found[top]:
            yield module


def read_carried() -> Carried:
    """Return what this process was given when it was started; nothing for a command that a user started.

    Raises:
        RecipeError: If a module of it is not on the path.
    """
    path = os.environ.get(CARRIED_VARIABLE)
    if path is None:
        return Carried(callbacks=Callbacks())
    found: Carried = pickle.loads(Path(path).read_bytes())  # written by the process that started this one
    return found
