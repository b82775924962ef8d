"""Whether the gradient noise scale can be measured during a run, without a pass of its own."""

from __future__ import annotations

from paceline.errors import RecipeError
from paceline.recipe.schema import Recipe


def check_noise_scale(recipe: Recipe, strategy: str, *, fewest_parts: int) -> None:
    """See whether a process ever holds the gradient of less than the whole batch.

    Args:
        recipe: Says whether that is asked for.
        strategy: How processes work together.
        fewest_parts: Micro-batches of a step over all processes, in the epochs that have the fewest.

    Raises:
        RecipeError: With what to change, if none does.
    """
    if recipe.telemetry.noise_scale is None:
        return
    asked = f"telemetry.noise_scale='{recipe.telemetry.noise_scale}'"
    if strategy == "fsdp":
        raise RecipeError(
            f"{asked} compares the gradient of a micro-batch with the whole batch's, and with parallel.strategy=fsdp "
            "no process ever holds a whole gradient of its own; use parallel.strategy=ddp, or turn it off."
        )
    if fewest_parts < 2:
        batch = recipe.batch.global_size
        half = next((size for size in range(batch // 2, 0, -1) if batch % size == 0), 1)
        remedy = f"set batch.micro_size={half}, use several processes, " if batch > 1 else "use a larger batch "
        raise RecipeError(
            f"{asked} compares the gradients of a step's micro-batches, and here a step is one micro-batch of {batch} "
            f"samples; {remedy}or leave it off and run `paceline noise-scale`, which cuts the batch for itself."
        )
