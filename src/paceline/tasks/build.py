"""Tasks by their names in recipes."""

from __future__ import annotations

from dataclasses import replace

from paceline import registry
from paceline.errors import RecipeError
from paceline.recipe.running import Evaluate
from paceline.recipe.schema import Recipe
from paceline.references import call_reference
from paceline.storage.addresses import is_address
from paceline.storage.cache import local_path
from paceline.tasks.task import Task


def build_task(recipe: Recipe) -> Task:
    """Make the task a recipe names; data at an address are copied to this host first.

    Raises:
        RecipeError: If there is none of that name, or the reference does not give a task.
        StorageError: If the data lie at an address and cannot be copied.
    """
    recipe = with_local_data(recipe)
    task = call_reference("task", recipe.task, registry.load("tasks", recipe.task, RecipeError), RecipeError, recipe)
    if not isinstance(task, Task):
        raise RecipeError(f"task '{recipe.task}' gave a {type(task).__name__}, not a paceline.Task.")
    return task


def with_local_data(recipe: Recipe) -> Recipe:
    """The recipe for those who read the data: where they lie at an address, with the path of their copy on this host.

    Raises:
        StorageError: If they cannot be copied.
    """
    path = recipe.data.path
    if path is None or not is_address(path):
        return recipe
    return replace(recipe, data=replace(recipe.data, path=local_path(path, key="data.path")))


def task_name(task: Task) -> str:
    """The task's class as ``module:name``."""
    return f"{type(task).__module__}:{type(task).__qualname__}"


def check_used_by(task: Task) -> None:
    """Refuse what is asked of a task that does not do it.

    Raises:
        RecipeError: If its images are to be seen from several views, and it asks the network as it is; or if more
            or fewer examples than usual are to be kept, and it names no classes.
    """
    asked = task.recipe.evaluate.augment
    if asked != "none" and type(task).evaluated is Task.evaluated:
        raise RecipeError(
            f"evaluate.augment={asked} has no effect with the task {task_name(task)}, whose `evaluated` gives the "
            "network itself; leave it out, or override that method."
        )
    kept = task.recipe.evaluate.keep_examples
    if kept not in (0, Evaluate().keep_examples) and type(task).answers is Task.answers:
        raise RecipeError(
            f"evaluate.keep_examples={kept} has no effect with the task {task_name(task)}, which does not say which "
            "class was answered; leave it out, or override its method `answers`."
        )
