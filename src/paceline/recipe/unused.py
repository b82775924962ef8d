"""Keys of a recipe that ask for something which has no effect in a plan, with the reason.

A condition on other keys is declared at the field (:class:`~paceline.recipe.fields.Needs`), and one walker looks at
all; what depends on derived numbers is computed here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from paceline.recipe.data import Data
from paceline.recipe.layers import needs_of, subsection
from paceline.recipe.schema import Recipe
from paceline.units import Duration, TimeSpan

if TYPE_CHECKING:
    from paceline.recipe.plan import DataFacts


def unused_keys(recipe: Recipe, data: DataFacts, epochs: float, warmup_steps: int) -> dict[str, str]:
    """Dotted keys that ask for something which has no effect on this data in so many epochs, with the reason.

    A request that is met anyway is not in vain: ``off``, ``auto``, ``false``, or no loader processes where none are.
    """
    facts = {"warm-up": warmup_steps > 0, "held-out samples": data.evaluation_samples > 0}
    found = dict(_without_needs(recipe, recipe, facts, ""))
    backend = data.description.get("backend", "pytorch")
    if backend not in ("pytorch", "dali"):
        why = f"the {backend} back-end, which was chosen here, has no loader processes (data.backend=pytorch has)"
        found["data.prefetch"] = why
        if recipe.data.workers not in ("auto", 0):
            found["data.workers"] = why
    elif data.description.get("workers") == 0:
        found["data.prefetch"] = "there are no loader processes (see data.workers)"
    # The shape decides how images are predicted, whatever the held-out ones come to.
    found |= {key: why for key, why in unused_in_data(data).items() if key != "data.evaluation_shape"}
    found |= _beyond_the_end(recipe.data, epochs)
    found |= _unscaled_layers(recipe)
    if recipe.optimizer.name == "adafactor":
        found["schedule.momentum.name"] = "adafactor has no momentum"
    return found


def _without_needs(recipe: Recipe, section: Any, facts: Mapping[str, bool], path: str) -> Iterator[tuple[str, str]]:
    """Dotted keys of a section whose marks of :class:`Needs` do not hold, with the reason."""
    for each in dataclasses.fields(section):
        value = getattr(section, each.name)
        if subsection(type(section), each.name) is not None:
            yield from _without_needs(recipe, value, facts, f"{path}{each.name}.")
        elif value and value != "auto":
            marks = needs_of(type(section), each.name)
            missing = (mark.why for mark in marks if not any(_holds(recipe, facts, one) for one in mark.any_of))
            yield from ((f"{path}{each.name}", why) for why in islice(missing, 1))


def _holds(recipe: Recipe, facts: Mapping[str, bool], condition: str) -> bool:
    if condition in facts:
        return facts[condition]
    dotted, differs, unwanted = condition.partition("!=")
    value = attrgetter(dotted)(recipe)
    return bool(value != unwanted) if differs else bool(value)


def all_but(used: Collection[str], why: str, sections: Collection[str] = ("data",)) -> dict[str, str]:
    """Every dotted key of some sections, with the reason, but for those that are used.

    Args:
        used: Dotted keys, or the sections within sections that all of it is used of (``data.text``).
        why: Why the others are not.
        sections: Whose keys are meant.
    """
    keys = (key for section in sections for key in _leaves(getattr(Recipe(), section), f"{section}."))
    return {key: why for key in keys if not any(key == each or key.startswith(f"{each}.") for each in used)}


def _leaves(section: Any, path: str) -> Iterator[str]:
    for each in dataclasses.fields(section):
        value = getattr(section, each.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, Duration | TimeSpan):
            yield from _leaves(value, f"{path}{each.name}.")
        else:
            yield f"{path}{each.name}"


def unused_in_data(data: DataFacts) -> dict[str, str]:
    """Keys that have no effect on this data, with the reason."""
    split = ("data.validation_fraction", "data.split_by", "data.saved_split")
    keys = (
        *split,
        "data.download",
        "data.options",
        "data.evaluation_shape",
        "data.augment.shrink_on_load",
        "evaluate.top_k",
    )
    reasons = data.unused | data.reasons
    return {key: reasons[key] for key in keys if key in reasons}


def _unscaled_layers(recipe: Recipe) -> dict[str, str]:
    """Whether LARS or LAMB has no layer to scale: timm's leave out what does not decay."""
    asked = recipe.optimizer
    decays = asked.weight_decay > 0 or any(each.weight_decay not in ("auto", 0) for each in asked.groups.values())
    if asked.name not in ("lars", "lamb") or decays or asked.options.get("always_adapt"):
        return {}
    if recipe.schedule.weight_decay.name != "constant":
        return {}
    plain = "sgd" if asked.name == "lars" else "adamw"
    why = (
        f"{asked.name} scales the steps of what decays, and with optimizer.weight_decay=0 that is nothing, so that it "
        f"moves like {plain}; give a weight decay, or optimizer.options={{always_adapt: true}}"
    )
    return {"optimizer.name": why, **({"optimizer.trust_coefficient": why} if asked.name == "lars" else {})}


def _beyond_the_end(data: Data, epochs: float) -> dict[str, str]:
    """Keys that speak of epochs which a run does not have."""
    found: dict[str, str] = {}
    why = f"the run has {epochs:g} epochs"
    if data.mix.epochs is not None and data.mix.epochs >= epochs and (data.mix.mixup or data.mix.cutmix):
        found["data.mix.epochs"] = f"{why}: all are mixed"
    if data.progressive.start_size is not None and data.progressive.begin >= epochs:
        found["data.progressive.end"] = f"{why}: images stay as they begin"
    return found
