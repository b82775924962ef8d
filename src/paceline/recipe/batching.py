"""Into how many micro-batches is a step's batch cut, and which numbers of processes can share them?"""

from __future__ import annotations

from paceline.errors import RecipeError
from paceline.recipe.schema import Recipe

# Exact runs divide their step into this many parts unless told otherwise, or the next smaller number that divides it.
_EXACT_LOGICAL_RANKS = 8


def micro_batch_size(recipe: Recipe, world_size: int, reasons: dict[str, str]) -> int:
    """Samples per forward pass.

    Raises:
        RecipeError: If this many processes cannot share the batch; names the numbers that can.
    """
    batch = recipe.batch.global_size
    fixed = fixed_logical_ranks(recipe)
    if (batch if fixed is None else fixed) % world_size:
        raise RecipeError(
            f"batch.global_size={batch} over {world_size} processes gives {batch / world_size:g} samples each, which "
            f"{_misfit(recipe, fixed)}; the global batch is never changed silently, so run it on "
            f"{', '.join(_fitting(batch if fixed is None else fixed))} processes or change batch.global_size."
        )
    if recipe.batch.micro_size == "auto":
        reasons["batch.micro_size"] = (
            f"a process's whole share of {batch} samples over {world_size}"
            if fixed is None
            else f"{batch} samples in {fixed} logical ranks"
        )
    parts = world_size if fixed is None else fixed
    reasons["parallel.logical_ranks"] = (
        f"{', '.join(_fitting(parts))} processes can share them, with the same bits"
        if recipe.parallel.exact
        else f"{batch} samples in micro-batches of {batch // parts}"
    )
    return batch // parts


def fixed_logical_ranks(recipe: Recipe) -> int | None:
    """Micro-batches per step where the recipe fixes them; None where each process takes its share in one.

    Raises:
        RecipeError: If they do not divide the batch, or contradict one another.
    """
    batch, micro, ranks = recipe.batch.global_size, recipe.batch.micro_size, recipe.parallel.logical_ranks
    if micro != "auto" and batch % micro:
        raise RecipeError(
            f"batch.global_size={batch} is not a multiple of batch.micro_size={micro}; "
            f"choose a micro_size that divides it, for example {_nearest_divisor(batch, micro)}."
        )
    if ranks != "auto" and batch % ranks:
        raise RecipeError(
            f"batch.global_size={batch} cannot be cut into parallel.logical_ranks={ranks} equal parts; "
            f"choose a number that divides it, for example {_nearest_divisor(batch, ranks)}."
        )
    if micro != "auto" and ranks != "auto" and micro * ranks != batch:
        raise RecipeError(
            f"batch.micro_size={micro} times parallel.logical_ranks={ranks} is {micro * ranks}, but "
            f"batch.global_size={batch}; leave one of the two at auto."
        )
    if ranks != "auto":
        return ranks
    if micro != "auto":
        return batch // micro
    if not recipe.parallel.exact:
        return None
    return next(each for each in range(_EXACT_LOGICAL_RANKS, 0, -1) if batch % each == 0)


def default_processes(recipe: Recipe, devices: int) -> int:
    """Processes of a run that was not told how many: one per device, as many as share the global batch evenly."""
    return next(iter(usable_processes(recipe, 1, devices)), 1)


def usable_processes(recipe: Recipe, lowest: int, highest: int) -> list[int]:
    """Numbers of processes in a range that can share the global batch evenly, the largest first."""
    if recipe.parallel.strategy == "single":
        return [1] if lowest <= 1 <= highest else []
    try:
        parts = fixed_logical_ranks(recipe) or recipe.batch.global_size
    except RecipeError:  # which the plan will raise, in a world of any size
        return []
    return [count for count in range(highest, lowest - 1, -1) if parts % count == 0]


def _misfit(recipe: Recipe, fixed: int | None) -> str:
    if fixed is None:
        return "is not whole"
    if recipe.batch.micro_size != "auto":
        return f"batch.micro_size={recipe.batch.micro_size} does not divide"
    return f"is no whole number of parallel.logical_ranks={fixed}"


def _fitting(parts: int) -> list[str]:
    return [str(size) for size in range(1, min(parts, 1024) + 1) if parts % size == 0]


def _nearest_divisor(batch: int, wanted: int) -> int:
    return min((d for d in range(1, batch + 1) if batch % d == 0), key=lambda d: abs(d - wanted))
