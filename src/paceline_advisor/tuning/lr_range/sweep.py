"""Which learning rates does a range test go through, and which recipe does it train?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from paceline.errors import RecipeError
from paceline.optim.schedules import LearningRate
from paceline.recipe.batching import micro_batch_size
from paceline.recipe.profile import Profile
from paceline.recipe.schedule import Schedule
from paceline.recipe.schema import Recipe
from paceline.units import Duration

FEWEST_STEPS = 20
# fp16's loss scale comes down by skipping steps, which use up batches.
MOST_SKIPPED = 20


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """How a range test is done.

    Attributes:
        lowest: Learning rate of the first step.
        highest: Learning rate of the last.
        steps: Optimizer steps.
        shape: ``exponential``: the same factor from each step to the next. ``linear``: the same difference.
        smoothing: Weight of the past in the average that is looked at, in [0, 1).
        divergence: The test ends where the average is above so many times its lowest value.

    Raises:
        RecipeError: If they do not fit together.
    """

    lowest: float = 1e-7
    highest: float = 10.0
    steps: int = 100
    shape: Literal["exponential", "linear"] = "exponential"
    smoothing: float = 0.98
    divergence: float = 4.0

    def __post_init__(self) -> None:
        if not (0 < self.lowest < self.highest and math.isfinite(self.highest)):
            raise RecipeError(
                f"a range test from {self.lowest:g} to {self.highest:g} cannot be: it goes from a rate above 0 to a "
                "higher one; change --lowest or --highest."
            )
        if self.steps < FEWEST_STEPS:
            raise RecipeError(
                f"a range test of {self.steps} steps says nothing; take at least {FEWEST_STEPS} (--steps)."
            )
        if self.shape not in ("exponential", "linear"):
            raise RecipeError(f"shape={self.shape!r} is none that a range test has; choose exponential or linear.")
        if not 0 <= self.smoothing < 1:
            raise RecipeError(f"smoothing={self.smoothing:g} is not in [0, 1); 0 looks at each loss by itself.")
        if not self.divergence > 1:
            raise RecipeError(
                f"divergence={self.divergence:g} would end the test at its best loss; take a factor above 1."
            )

    def course(self) -> LearningRate:
        """The rate as a function of the step."""
        return LearningRate(name=self.shape, peak=self.lowest, end=self.highest, total_steps=self.steps - 1)


def as_tested(recipe: Recipe, steps: int, *, world_size: int) -> Recipe:
    """What a range test trains: the recipe as it begins, without what happens later or beside the steps.

    Args:
        recipe: The recipe.
        steps: Steps of the test.
        world_size: Processes that train.
    """
    batch = recipe.batch
    if batch.growth:
        # The first size stays, in the micro-batches that it has beside the later ones.
        batch = replace(batch, micro_size=micro_batch_size(recipe, world_size, {}), growth={})
    return replace(
        recipe,
        batch=batch,
        model=replace(recipe.model, unfreeze={}, freeze_after={}),
        schedule=Schedule(name="constant"),
        train=replace(recipe.train, duration=Duration(steps + MOST_SKIPPED, "steps"), until=None, ema=None),
        evaluate=replace(recipe.evaluate, every=None, patience=None),
        checkpoint=replace(recipe.checkpoint, every=None, keep_best=False),
        telemetry=replace(recipe.telemetry, trackers=(), profile=Profile(), mlperf=False),
    )
