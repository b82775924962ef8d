"""Tasks and recipes of trained weights, whose networks need nothing but the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from paceline.checkpoint.weights import SavedWeights
from paceline.errors import RecipeError
from paceline.plugins.references import is_reference, is_same_class
from paceline.plugins.registry import built_in, name_of
from paceline.recipe.load import Overrides
from paceline.recipe.schema import Recipe, refuse_foreign_code
from paceline.storage.addresses import is_address
from paceline.tasks.exportable import Exportable
from paceline.tasks.own_code import refused
from paceline.tasks.task import Task, build_task, task_name

TaskMaker = Callable[[Recipe], Task]


def trained_recipe(saved: SavedWeights, overrides: Overrides = ()) -> Recipe:
    """Return the weights' training recipe, changed so that building the network downloads and initialises nothing."""
    recipe = saved.recipe(overrides)
    return replace(recipe.without_initial_weights(), distillation=replace(recipe.distillation, teacher=None))


def trained_task(saved: SavedWeights, *, trust_code: bool) -> TaskMaker:
    """Return the factory of the task that the weights were trained with.

    Raises:
        RecipeError: If the task is imported code and the user has not allowed the file to name code, or if it cannot be
            imported.
    """

    tree, where = saved.description("recipe"), str(saved.path)

    def refuse_code(recipe: Recipe) -> None:
        # The recipe's data set is not opened, so its code need not be trusted.
        used = {"task": recipe.task, "model": tree.get("model", {}), "objects": tree.get("objects", {})}
        refuse_foreign_code(used, recipe, where, trusted=trust_code)

    def make(recipe: Recipe) -> Task:
        refuse_code(recipe)
        trained = saved.description("data").get("task", "")
        if recipe.task not in built_in("tasks"):
            return build_task(recipe)
        if recipe.data.path is not None and is_address(recipe.data.path):
            recipe = replace(recipe, data=replace(recipe.data, path=None))  # predicting needs no data, and copies none
        task = build_task(recipe)
        if not trained or is_same_class(trained, task_name(task)):
            return task
        # A task given in Python is recorded in the data's description, not in the recipe.
        if (name := name_of("tasks", trained)) != trained:
            return build_task(replace(recipe, task=name))
        refuse_unimportable(trained, where)
        recipe = replace(recipe, task=trained)
        refuse_code(recipe)
        return build_task(recipe)

    return make


def refuse_unimportable(task: str, where: str) -> None:
    """Refuse a task that was given in Python, and whose class is in the program itself or inside a function.

    Raises:
        RecipeError: If it is.
    """
    if not is_reference(task) or task.startswith("__main__:"):
        raise RecipeError(
            f"the weights in {where} were trained with the task {task}, which commands cannot import. Call evaluate(), "
            "predict() or export() of the result in that program, or load_predictor(task=...); for commands, move the "
            "class to a module, name it in the recipe (task=module:Class) and train again."
        )


def open_exportable(
    saved: SavedWeights, *, trust_code: bool, target: str, task: TaskMaker | None = None, overrides: Overrides = ()
) -> Exportable:
    """Build the network of saved weights, and describe its inputs.

    Args:
        saved: The weights.
        trust_code: Whether to import code named in their recipe.
        target: Requested format, for the message.
        task: Makes the task, instead of the one that the recipe names.
        overrides: Changes to the recipe's ``data`` section, for tasks whose exports are compared on their data.

    Raises:
        PacelineError: If the network's inputs are unknown.
    """
    opened = (task or trained_task(saved, trust_code=trust_code))(trained_recipe(saved, overrides))
    exportable = opened.exportable(saved, target)
    if not isinstance(exportable, Exportable):
        raise refused(opened, "exportable returned", exportable, "an Exportable of paceline.tasks.exportable")
    exportable.network.requires_grad_(requires_grad=False)  # exported parameters need no gradients
    return exportable
