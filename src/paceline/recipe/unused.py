"""Recipe keys that have no effect, with the reason.

What a key needs is declared at its field (:class:`~paceline.recipe.fields.Needs`), and one function checks all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter
from typing import Any

from paceline.recipe.fields import Needs
from paceline.recipe.layers import all_keys, marks, subsection
from paceline.recipe.schema import Recipe


def unused_keys(recipe: Recipe, conditions: Mapping[str, bool], substitutions: Mapping[str, object]) -> dict[str, str]:
    """Return the dotted keys whose marks of :class:`Needs` do not hold, with the reason.

    Args:
        recipe: The recipe.
        conditions: Conditions evaluated by the plan, by name.
        substitutions: Words that the plan inserts into reasons.
    """
    return dict(_unmet_needs(recipe, recipe, conditions, substitutions, ""))


def _unmet_needs(
    recipe: Recipe, section: Any, conditions: Mapping[str, bool], substitutions: Mapping[str, object], path: str
) -> Iterator[tuple[str, str]]:
    def is_met(condition: str) -> bool:
        if condition in conditions:
            return conditions[condition]
        dotted, operator, unwanted = condition.partition("!=")
        value = attrgetter(dotted)(recipe)
        return bool(value != unwanted) if operator else bool(value)

    for each in dataclasses.fields(section):
        key, value = f"{path}{each.name}", getattr(section, each.name)
        needs = marks(type(section), each.name, Needs)
        if subsection(type(section), each.name) is not None:
            yield from _unmet_needs(recipe, value, conditions, substitutions, f"{key}.")
            key, value = f"{key}.name", getattr(value, "name", None)
        # A request that holds anyway is not reported: `off`, `auto`, `false`, or no loader processes where there are
        # none.
        is_requested = bool(value) and value != "auto"
        missing = (need for need in needs if (is_requested or need.also_off) and not any(map(is_met, need.any_of)))
        if first := next(missing, None):
            yield key, first.reason.format_map(substitutions)


def all_but(used: Collection[str], reason: str, section: str = "data") -> dict[str, str]:
    """Return every dotted key of a section, with the reason, except for those that are used.

    Args:
        used: Dotted keys, or subsections that are used completely (``data.text``).
        reason: Why the others are not used.
        section: The section.
    """
    keys = all_keys(getattr(Recipe(), section), f"{section}.")
    return {key: reason for key in keys if not any(key == each or key.startswith(f"{each}.") for each in used)}
