"""Compute the micro-batches of a step, and the numbers of processes that can share them."""

from __future__ import annotations

import math
from dataclasses import replace

from paceline.errors import RecipeError, setting_error
from paceline.recipe.model import ModelSection
from paceline.recipe.schema import Recipe

# Default number of parts per step of an exact run, or the next smaller number that divides the step.
_EXACT_LOGICAL_RANKS = 8


def micro_batch_size(recipe: Recipe, world_size: int) -> int:
    """Return the samples per forward pass; the same for every size that the batch grows to.

    Raises:
        RecipeError: If this many processes cannot share the batch; names the numbers that can.
    """
    batch = recipe.batch.global_size
    fixed = fixed_logical_ranks(recipe)
    shared = _shared_parts(recipe, fixed)
    if shared % world_size:
        problem = f"is not a multiple of parallel.logical_ranks={fixed}"
        if recipe.batch.micro_size != "auto":
            problem = f"batch.micro_size={recipe.batch.micro_size} does not divide"
        key, size = next(
            each for each in sizes_by_key(recipe) if each[1] // (_largest_part(recipe, fixed)) % world_size
        )
        raise setting_error(
            key,
            size,
            f"over {world_size} processes gives {size / world_size:g} samples each, which "
            f"{'is not whole' if fixed is None else problem}; the global batch is never changed silently, so run it on "
            f"{', '.join(_divisors(shared))} processes or change {key}.",
        )
    micro = math.gcd(*recipe.batch.sizes().values()) // world_size if fixed is None else batch // fixed
    _check_ghost_size(recipe, micro, world_size)
    return micro


def explain_batching(recipe: Recipe, world_size: int, micro: int, samples: int) -> dict[str, str]:
    """Explain by dotted key why micro-batches have ``micro`` samples, and what follows from it.

    Args:
        recipe: The recipe.
        world_size: Processes.
        micro: Samples of a micro-batch.
        samples: Training samples, to which a larger batch is cut.
    """
    batch, fixed = recipe.batch.global_size, fixed_logical_ranks(recipe)
    if fixed is not None:
        reason = f"{batch} samples in {fixed} logical ranks"
    elif micro * world_size < batch:
        reason = f"the largest share over {world_size} of all sizes that the batch has"
    else:
        reason = f"a process's whole share of {batch} samples over {world_size}"
    ranks = f"{batch} samples in micro-batches of {micro}"
    if samples < batch:
        # A step's samples are shared evenly over as many micro-batches as the recipe's batch has.
        parts = batch // micro
        reason += f"; a step has only the {samples} training samples, so at most {-(-samples // parts)} in each"
        ranks = f"{samples} samples, which a step is cut to, in as many micro-batches as {batch} would have"
    if recipe.parallel.exact:
        ranks = (
            f"{', '.join(_divisors(_shared_parts(recipe, fixed)))} processes can share them, with bit-identical results"
        )
    return {"batch.micro_size": reason, "parallel.logical_ranks": ranks}


def _check_ghost_size(recipe: Recipe, micro: int, world_size: int) -> None:
    group = recipe.model.ghost_batch_norm
    if group is not None and micro % group:
        divisors = [str(size) for size in range(2, micro + 1) if micro % size == 0]
        raise setting_error(
            "model.ghost_batch_norm",
            group,
            f"does not divide the micro-batches of {micro} samples that {world_size} process"
            f"{'es have' if world_size > 1 else ' has'}; choose one of {', '.join(divisors) or 'none'}, or another "
            "batch.micro_size.",
        )


def with_valid_ghost_size(model: ModelSection, micro: int) -> ModelSection:
    """Return a network's section for a trial with another micro-batch size, divisible by BatchNorm's groups."""
    group_size = model.ghost_batch_norm
    if group_size is None or (micro % group_size == 0 and group_size < micro):
        return model
    divisors = [size for size in range(2, min(group_size, micro - 1) + 1) if micro % size == 0]
    return replace(model, ghost_batch_norm=divisors[-1] if divisors else None)


def with_nearest_ghost_size(model: ModelSection, micro: int) -> ModelSection:
    """Return a network's section for another micro-batch size, with BatchNorm groups near the requested size.

    They are never larger; a micro-batch that is not larger than a group forms one group.
    """
    group_size = model.ghost_batch_norm
    if group_size is None:
        return model
    return replace(model, ghost_batch_norm=None) if micro <= group_size else with_valid_ghost_size(model, micro)


def largest_micro_batch(recipe: Recipe, micro: int, world_size: int) -> int:
    """Return the largest micro-batch, in samples, on any number of processes."""
    return micro if fixed_logical_ranks(recipe) is not None else micro * world_size


def fixed_logical_ranks(recipe: Recipe) -> int | None:
    """Return the micro-batches per initial step, if the recipe sets them; None if each process runs its share as one.

    Raises:
        RecipeError: If they do not divide the batch, or contradict one another.
    """
    batch, micro, ranks = recipe.batch.global_size, recipe.batch.micro_size, recipe.parallel.logical_ranks
    if micro != "auto":
        for key, size in sizes_by_key(recipe):
            if size % micro:
                raise setting_error(
                    key,
                    size,
                    f"is not a multiple of batch.micro_size={micro}; choose a micro_size that divides it, for example "
                    f"{_nearest_divisor(size, micro)}.",
                )
    if ranks != "auto" and batch % ranks:
        raise setting_error(
            "batch.global_size",
            batch,
            f"cannot be cut into parallel.logical_ranks={ranks} equal parts; choose a number that divides it, for "
            f"example {_nearest_divisor(batch, ranks)}.",
        )
    if micro != "auto" and ranks != "auto" and micro * ranks != batch:
        raise setting_error(
            "batch.micro_size",
            micro,
            f"times parallel.logical_ranks={ranks} is {micro * ranks}, but batch.global_size={batch}; leave one of the "
            "two at auto.",
        )
    if ranks != "auto":
        _check_growth_sizes(recipe, batch // ranks)
        return ranks
    if micro != "auto":
        return batch // micro
    if not recipe.parallel.exact:
        return None
    common = math.gcd(*recipe.batch.sizes().values())
    counts = (n for n in range(_EXACT_LOGICAL_RANKS, 0, -1) if batch % n == 0 and common % (batch // n) == 0)
    return next(counts, batch // common)


def _check_growth_sizes(recipe: Recipe, micro: int) -> None:
    for key, size in sizes_by_key(recipe):
        if size % micro:
            raise setting_error(
                key,
                size,
                f"is not a whole number of the micro-batches of {micro} samples that parallel.logical_ranks="
                f"{recipe.parallel.logical_ranks} cuts batch.global_size={recipe.batch.global_size} into; choose "
                "another size, or more logical ranks.",
            )


def sizes_by_key(recipe: Recipe) -> list[tuple[str, int]]:
    """Return every batch size, with the key that sets it."""
    key = "batch.growth."
    return [(f"{key}{epoch}" if epoch else "batch.global_size", size) for epoch, size in recipe.batch.sizes().items()]


def _largest_part(recipe: Recipe, fixed: int | None) -> int:
    """Return the number of samples that cannot be split between processes."""
    return 1 if fixed is None else recipe.batch.global_size // fixed


def _shared_parts(recipe: Recipe, fixed: int | None) -> int:
    """Return the number of parts to divide among processes, in steps of every size: their number must divide it."""
    return math.gcd(*recipe.batch.sizes().values()) // _largest_part(recipe, fixed)


def default_processes(recipe: Recipe, devices: int) -> int:
    """Return the default number of processes: one per device, as many as share the global batch evenly."""
    return next(iter(usable_processes(recipe, 1, devices)), 1)


def usable_processes(recipe: Recipe, lowest: int, highest: int) -> list[int]:
    """Return the numbers of processes in a range that can share the global batch evenly, largest first."""
    if recipe.parallel.strategy == "single":
        return [1] if lowest <= 1 <= highest else []
    try:
        parts = _shared_parts(recipe, fixed_logical_ranks(recipe))
    except RecipeError:  # the plan raises this error, for any world size
        return []
    return [count for count in range(highest, lowest - 1, -1) if parts % count == 0]


def _divisors(parts: int) -> list[str]:
    return [str(size) for size in range(1, min(parts, 1024) + 1) if parts % size == 0]


def _nearest_divisor(batch: int, target: int) -> int:
    return min((d for d in range(1, batch + 1) if batch % d == 0), key=lambda d: abs(d - target))
