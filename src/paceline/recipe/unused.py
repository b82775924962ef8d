"""Which keys of a recipe ask for something that has no effect on this data, and why?"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from paceline.recipe.adapters import unused_in_adapters
from paceline.recipe.data import Data
from paceline.recipe.profile import unused_in_profile
from paceline.recipe.schema import Recipe
from paceline.units import Duration, TimeSpan

if TYPE_CHECKING:
    from paceline.recipe.plan import DataFacts


def unused_keys(recipe: Recipe, data: DataFacts, epochs: float) -> dict[str, str]:
    """Dotted keys that ask for something which has no effect on this data in so many epochs, with the reason.

    A request that is met anyway is not in vain: ``off``, ``auto``, ``false``, or no loader processes where none are.
    """
    found = _unused_with_fp16() if recipe.train.precision == "fp16" else {}
    found |= _unused_weights(recipe)
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
    found |= _unused_in_augmentation(recipe.data) | unused_in_profile(recipe.telemetry.profile)
    found |= _beyond_the_end(recipe.data, epochs)
    if recipe.optimizer.decay_norm_and_bias and recipe.optimizer.weight_decay == 0:
        found["optimizer.decay_norm_and_bias"] = "with optimizer.weight_decay=0 nothing decays"
    found |= _unscaled_layers(recipe)
    if recipe.evaluate.every is None or data.evaluation_samples == 0:
        why = "evaluate.every=off" if recipe.evaluate.every is None else "no samples are held out"
        keys = ("evaluate.metric", "evaluate.top_k", "evaluate.batch_size", "evaluate.keep_examples")
        found |= {key: f"nothing is evaluated ({why})" for key in keys if _asked(recipe, key) not in ("auto", 0)}
        if recipe.evaluate.every is not None:
            found["evaluate.every"] = f"nothing is evaluated ({why})"
    return found


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


def _unused_with_fp16() -> dict[str, str]:
    why = "fp16's loss scaling leaves out every step whose gradient is not finite"
    return {"train.nonfinite": why, "train.max_nonfinite": why}


def _unused_weights(recipe: Recipe) -> dict[str, str]:
    found = unused_in_adapters(recipe.model.adapters)
    partly = recipe.model.initialize_partly and recipe.model.initialize_from is None
    if partly:
        found["model.initialize_partly"] = "there is nothing to take (model.initialize_from)"
    return found


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


def _unused_in_augmentation(data: Data) -> dict[str, str]:
    """Keys that say more of what is not done at all."""
    found: dict[str, str] = {}
    mix, augment, jitter = data.mix, data.augment, data.augment.jitter
    if mix.mixup == 0 and mix.cutmix == 0:
        why = "nothing is mixed (data.mix.mixup, data.mix.cutmix)"
        found |= dict.fromkeys(("data.mix.switch", "data.mix.probability", "data.mix.epochs"), why)
    elif mix.mixup == 0 or mix.cutmix == 0:
        found["data.mix.switch"] = "there is one kind of mixing"
    if augment.erase == 0:
        why = "nothing is erased (data.augment.erase)"
        found |= dict.fromkeys(("data.augment.erase_scale", "data.augment.erase_ratio"), why)
    if data.progressive.start_size is None:
        why = "images do not grow (data.progressive.start_size)"
        found |= dict.fromkeys((f"data.progressive.{key}" for key in ("begin", "end", "multiple")), why)
    if not any((jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)):
        found["data.augment.jitter.probability"] = "there is no jitter"
    return found


def _beyond_the_end(data: Data, epochs: float) -> dict[str, str]:
    """Keys that speak of epochs which a run does not have."""
    found: dict[str, str] = {}
    why = f"the run has {epochs:g} epochs"
    if data.mix.epochs is not None and data.mix.epochs >= epochs and (data.mix.mixup or data.mix.cutmix):
        found["data.mix.epochs"] = f"{why}: all are mixed"
    if data.progressive.start_size is not None and data.progressive.begin >= epochs:
        found["data.progressive.end"] = f"{why}: images stay as they begin"
    return found


def _asked(recipe: Recipe, dotted: str) -> object:
    section, _, name = dotted.partition(".")
    return getattr(getattr(recipe, section, None), name, None)
