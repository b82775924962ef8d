"""Tasks and recipes of trained weights, whose networks take nothing but those weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from paceline.checkpoint.weights import SavedWeights
from paceline.errors import RecipeError
from paceline.recipe.load import stored_recipe
from paceline.recipe.named_code import refuse_foreign_code
from paceline.recipe.schema import Recipe
from paceline.references import is_reference
from paceline.registry import built_in
from paceline.tasks.task import Task, build_task, task_name

TaskMaker = Callable[[Recipe], Task]


def trained_recipe(saved: SavedWeights) -> Recipe:
    """The recipe that weights were trained with, to build their network: nothing is downloaded or initialised."""
    recipe = stored_recipe(saved.described("recipe"), str(saved.path))
    return replace(
        recipe,
        model=replace(recipe.model, pretrained=False, initialize_from=None),
        distillation=replace(recipe.distillation, teacher=None),
    )


def trusted_recipe(saved: SavedWeights, *, trust_code: bool) -> Recipe:
    """The same, for networks that are built without a task.

    Raises:
        RecipeError: If the model is code to import, and the user has not said that the file may name some.
    """
    recipe = trained_recipe(saved)
    model = {"model": saved.described("recipe").get("model", {})}
    refuse_foreign_code(model, recipe, str(saved.path), trusted=trust_code)
    return recipe


def trained_task(saved: SavedWeights, *, trust_code: bool) -> TaskMaker:
    """What makes the task that weights were trained with.

    Raises:
        RecipeError: If that is code to import, and the user has not said that the file may name some; or if it cannot
            be imported.
    """

    def make(recipe: Recipe) -> Task:
        tree, where = saved.described("recipe"), str(saved.path)
        trained = saved.described("data").get("task")
        # A task that was given in Python is in the data's description, and the recipe does not name it.
        if recipe.task in built_in("tasks") and trained not in (None, task_name(build_task(recipe))):
            if not is_reference(trained):
                raise RecipeError(
                    f"the weights in {where} were trained with the task {trained}, which cannot be imported; make it "
                    "a class of its module, or give load_predictor(task=...)."
                )
            recipe = replace(recipe, task=trained)
        # The data set that the recipe names is not opened, so its code is not asked for.
        named = {"task": recipe.task, "model": tree.get("model", {})}
        refuse_foreign_code(named, recipe, where, trusted=trust_code)
        return build_task(recipe)

    return make
