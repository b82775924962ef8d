"""Whatever number a recipe holds, its plan is made or refused, at once and in a short sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.errors import PacelineError, RecipeError
from paceline.recipe import layers
from paceline.recipe.fields import Applies
from paceline.recipe.load import load_recipe, stored_recipe
from paceline.recipe.schema import Recipe
from paceline.trainer.train import plan_only

TINY: dict[str, Any] = {
    "model.options": {"width": 4, "stages": 1},
    "train.duration": "2 steps",
    "data.augment": None,
    "train.ema": "off",
    "parallel.device": "cpu",
    "optimizer": {"name": "sgd", "lr": 0.1},
    "schedule": {"warmup": "0 steps"},
}
EXTREMES: dict[str, tuple[Any, ...]] = {
    "int": (-1, 0, 2**40, 10**20, 10**400),
    "float": (-1e308, 5e-324, 1e308, float("inf"), float("nan"), 10**400),
    "Duration": ("0 steps", "1e30 steps", "1e15 epochs", "1e400 samples", "1e-300%", "1e15%"),
    "TimeSpan": ("1e-300 s", "2e5 hours", "1e300 hours", "1e400 h"),
}


def _numbers(section: type[Any] = Recipe, path: str = "") -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every field that holds a number, with its type and the choice under which it has an effect."""
    for name in layers.field_types(section):
        inner, applies = layers.subsection(section, name), layers.mark(section, name, Applies)
        needs = {} if applies is None else {f"{path}{applies.to}": next(iter(applies.values))}
        kind = repr(layers.field_types(section)[name])
        if inner is None and any(word in kind for word in EXTREMES):
            yield f"{path}{name}", kind, needs
        elif inner is not None:
            for key, kind_inside, more in _numbers(inner, f"{path}{name}."):
                yield key, kind_inside, needs | more


NUMBERS = list(_numbers())


def test_every_section_is_looked_at() -> None:
    assert {key.split(".")[0] for key, _, _ in NUMBERS} >= {"seed", "model", "data", "batch", "optimizer", "parallel"}
    assert len(NUMBERS) > 120


def _values(kind: str) -> Iterator[Any]:
    for value in (value for word, values in EXTREMES.items() if word in kind for value in values):
        if "dict[str" in kind:
            yield {"*": value}
        elif "dict[" in kind:
            yield {value: 8} if isinstance(value, int) else {1: value}
        else:
            yield [value, value] if "tuple[" in kind else value


@pytest.mark.thorough
@pytest.mark.parametrize(
    "section", ["seed", "model", "data", "batch", "optimizer", "schedule", "train", "distillation"]
)
def test_a_plan_of_an_extreme_number_is_made_or_refused_at_once(section: str) -> None:
    _plan_all(section)


@pytest.mark.parametrize("section", ["seed", "evaluate", "checkpoint", "parallel", "telemetry"])
def test_a_plan_of_how_a_run_is_made_too(section: str) -> None:
    _plan_all(section)


def _plan_all(section: str) -> None:
    for key, kind, needs in NUMBERS:
        if key.split(".")[0] != section:
            continue
        for value in _values(kind):
            try:
                plan = plan_only(load_recipe("digits", {**TINY, **needs, key: value}))
                said = json.dumps(plan.reasons)
            except PacelineError as error:
                said = str(error)
            assert len(said) < 5000, (key, value)


@pytest.mark.parametrize(
    "override",
    [
        "batch.global_size=100000000000000000000",
        "train.duration=1e30 steps",
        "parallel.threads=1099511627776",
        "data.workers=1000000",
        "data.image_size=1000000",
        "checkpoint.every=1e300 hours",
    ],
)
def test_numbers_of_no_run_are_refused_by_their_key(override: str) -> None:
    key, _, value = override.partition("=")
    with pytest.raises(RecipeError) as refusal:
        stored_recipe({"data": {"dataset": "cifar10"}}, "r", [override])
    assert key in str(refusal.value)
    assert value in str(refusal.value)


@pytest.mark.parametrize(
    ("recipe", "options", "named"),
    [
        ("digits", {"stages": 50}, "stages"),
        ("digits", {"width": 10**7}, "width"),
        ("digits", {"width": 10**18, "stages": 1}, "width"),
        ("digits", {"depth": 10**6}, "depth"),
        ("cifar10-speedrun", {"widths": [10**7]}, "widths"),
        ("gpt-small-docs", {"depth": 10**6}, "depth"),
        ("gpt-small-docs", {"width": 10**7}, "width"),
        ("gpt-small-docs", {"width": 10**6, "heads": 1, "depth": 100}, "width"),
        ("shapes-maskrcnn", {"width": 10**6}, "width"),
        ("shapes-maskrcnn", {"levels": 10**6}, "levels"),
    ],
)
def test_a_network_that_no_device_holds_is_refused(recipe: str, options: dict[str, int], named: str) -> None:
    dataset = {"gpt-small-docs": {"data.dataset": "tokens"}, "cifar10-speedrun": {"data.dataset": "digits"}}
    with pytest.raises(PacelineError, match=named):
        plan_only(load_recipe(recipe, {**dataset.get(recipe, {}), "model.options": options}))
