"""Would a run with these changes of its recipe begin at all? Planned before anything is written or measured."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import nn

from paceline.errors import PacelineError
from paceline.recipe.load import stored_recipe, to_tree
from paceline.recipe.plan import MachineFacts
from paceline.recipe.schema import Recipe
from paceline.tasks.build import build_task
from paceline.trainer.fake_batch import with_stand_in_data
from paceline.trainer.meta_network import build_shapes
from paceline.trainer.preparation import plan_network, plan_run, without_initial_weights
from paceline.world import World
from paceline_advisor.doctor.study import Diagnosis
from paceline_advisor.doctor.untouched import untouched

# What a strategy refuses, it refuses with several processes only, and a recipe is written for more than one machine.
_SEVERAL = (2, 4, 8)


def changed(recipe: Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """A recipe with overrides on top.

    Raises:
        RecipeError: If they do not go together.
    """
    return stored_recipe(to_tree(recipe), "the improved recipe", overrides)


class Plans:
    """Plans of an examined recipe with changes.

    They are made for the device that it was examined for, with as many processes, and with each number of several with
    which the recipe can be planned as it is.
    """

    def __init__(self, diagnosis: Diagnosis) -> None:
        self._recipe, self._machine = diagnosis.loaded.recipe, diagnosis.machine
        self._processes = diagnosis.processes

    def refusal(self, overrides: Mapping[str, Any]) -> str:
        """Why a plan refuses the recipe with these changes, or has no use for one of them; empty if it takes them."""
        found = self._refusal(overrides)
        # What it says of the recipe as it is too is no reason against a change.
        return "" if found == self._as_it_is else found

    @cached_property
    def _as_it_is(self) -> str:
        return self._refusal({})

    @cached_property
    def _several(self) -> list[int]:
        asked = _Asked(self._recipe, self._machine)
        return [count for count in _SEVERAL if count != self._processes and asked.can_be_planned(count)]

    def _refusal(self, overrides: Mapping[str, Any]) -> str:
        try:
            asked = _Asked(changed(self._recipe, overrides), self._machine)
            unused = asked.unused(self._processes)
            for processes in self._several:
                asked.unused(processes)
        except PacelineError as error:
            return str(error)
        idle = next((key for key in overrides if key in unused), None)
        return "" if idle is None else f"{idle} would have no effect: {unused[idle]}"


class _Asked:
    """A recipe that is planned for several worlds; its network is built once, of shapes."""

    def __init__(self, recipe: Recipe, machine: MachineFacts) -> None:
        self._recipe, self._machine = without_initial_weights(with_stand_in_data(recipe)[0]), machine
        self._shapes: nn.Module | None = None

    def unused(self, processes: int) -> Mapping[str, str]:
        """The keys that its plan has no use for, with the reasons.

        Raises:
            PacelineError: If it is refused.
        """
        with untouched():
            task = build_task(self._recipe)
            world = World(world_size=processes, local_world_size=processes)
            plan = plan_run(self._recipe, task, self._machine, world)
            if self._shapes is None:
                self._shapes = build_shapes(self._recipe, task, channels_last=plan.channels_last)
            return plan_network(plan, self._shapes, self._recipe).unused

    def can_be_planned(self, processes: int) -> bool:
        """Whether it is not refused."""
        try:
            self.unused(processes)
        except PacelineError:
            return False
        return True
