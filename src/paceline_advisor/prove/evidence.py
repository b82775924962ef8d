"""What is there to judge, once all runs are over?"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline_advisor.prove.nature import Nature
from paceline_advisor.prove.notes import Observed
from paceline_advisor.prove.reference import Plain
from paceline_advisor.prove.runs import Sizes


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The runs of a recipe, and the plain loops they are held against.

    Attributes:
        recipe: What the user asked.
        plans: Its own plans, not shortened, by number of processes.
        whole: A run of one batch a step, the network at rest.
        parts: A run of micro-batches, the network at rest.
        asked: A run of micro-batches, the network as it is.
        several: The same in several processes; None if there is none.
        alone: Why there is none.
        plain_whole: The plain loop for one batch, the network at rest.
        plain: The plain loop for micro-batches, the network as it is.
    """

    recipe: Recipe
    plans: dict[int, Plan]
    sizes: Sizes
    nature: Nature
    whole: Observed
    parts: Observed
    asked: Observed
    several: Observed | None
    alone: str
    plain_whole: Plain
    plain: Plain

    @property
    def runs(self) -> list[Observed]:
        """Every run once."""
        found = [self.whole, self.parts, *([] if self.asked is self.parts else [self.asked])]
        return found + ([] if self.several is None else [self.several])

    @property
    def as_asked(self) -> list[Observed]:
        """The runs in which the network is as it is."""
        return [self.asked, *([] if self.several is None else [self.several])]
