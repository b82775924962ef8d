"""How much of a step does each of several devices do?"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import RecipeError
from paceline.recipe.batching import micro_batch_size
from paceline.recipe.schema import Recipe


@dataclass(frozen=True)
class Share:
    """One device's part of a step.

    Attributes:
        devices: How many share the step.
        micro_batch: Samples of one pass.
        passes: Passes in a step.
    """

    devices: int
    micro_batch: int
    passes: int

    @property
    def global_batch(self) -> int:
        """Samples of the step over all devices."""
        return self.devices * self.micro_batch * self.passes


def shares_of(recipe: Recipe, sizes: tuple[int, ...], batch_per_device: int | None) -> dict[int, Share]:
    """Each size's share: of the recipe's global batch, or a fixed one on each device, with which the step grows.

    Args:
        recipe: Says how many samples a step has, and a pass.
        sizes: Numbers of devices.
        batch_per_device: Samples of each device's pass and step; None keeps the recipe's global batch.

    Raises:
        RecipeError: If the global batch cannot be shared evenly.
    """
    if batch_per_device is not None:
        return {size: Share(size, batch_per_device, 1) for size in sizes}
    if recipe.batch.growth:
        raise RecipeError("batch.growth changes the step while training goes on; leave it out, or use --batch-per-gpu.")
    found = {}
    for size in sizes:
        micro = micro_batch_size(recipe, size, {})
        found[size] = Share(size, micro, recipe.batch.global_size // (micro * size))
    return found


def in_passes(share: Share, largest: int) -> Share:
    """The same share in passes of at most so many samples."""
    if share.micro_batch <= largest:
        return share
    own = share.micro_batch * share.passes
    passes = next(each for each in range(-(-own // largest), own + 1) if own % each == 0)
    return Share(share.devices, own // passes, passes)
