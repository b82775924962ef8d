"""A recipe for other machines, or with more than a short run has a use for, is proved too; what it lacks is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.data.batch import Batch
from paceline.errors import RecipeError
from paceline.recipe.load import load_recipe
from paceline.tasks.task import Task
from paceline_advisor.prove.runs import Sizes, set_aside, shortened
from paceline_advisor.prove.witness import Witness


def test_adapters_that_drop_are_no_mistake(proof: Callable[..., Any], failed: Callable[..., set[str]]) -> None:
    pytest.importorskip("peft")
    checks = proof(overrides={"model.adapters.rank": 2, "model.adapters.dropout": 0.2})
    assert failed(checks) == set(), [check for check in checks.values() if check.verdict == "failed"]


class Doubled:
    """Stands in the network's place, and is not one."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = 2 * self.model(inputs)
        return answer


def test_what_a_task_evaluates_in_the_networks_place_is_proved(proof: Any, failed: Any, tiny_task: Any) -> None:
    asked: list[str] = []

    def score(model: Any, batch: Batch, _: Any) -> None:
        asked.append(type(model).__name__)

    def make(recipe: Any) -> Any:
        task = tiny_task(on_score=score)(recipe)
        task.__class__ = type("Own", (type(task),), {"evaluated": lambda _, model: Doubled(model)})
        return task

    assert failed(proof(task=make)) == set()
    assert set(asked) == {"Doubled"}


def test_a_task_that_knows_no_views_is_refused_by_its_own_name(proof: Any, tiny_task: Any) -> None:
    def make(recipe: Any) -> Any:
        task = tiny_task()(recipe)
        task.__class__ = type("Plain", (type(task),), {"evaluated": Task.evaluated})
        return task

    with pytest.raises(RecipeError, match=r"evaluate\.augment=flip has no effect with the task .*:Plain"):
        proof(task=make, overrides={"evaluate.augment": "flip"})


def test_whatever_a_task_can_be_asked_the_witness_passes_on() -> None:
    hooks = {name for name, each in vars(Task).items() if callable(each)} - {"__init__"}
    assert hooks <= set(vars(Witness))


def test_adapters_drop_nothing_in_short_runs(tiny_recipe: Path) -> None:
    overrides = ("model.adapters.rank=2", "model.adapters.dropout=0.2", "parallel.strategy=ddp", "optimizer.lr=0.1")
    recipe = load_recipe(tiny_recipe, overrides).recipe
    adapters = shortened(recipe, Sizes.of(52, 21, 1), micro_batch=4).model.adapters
    assert (adapters.rank, adapters.dropout) == (2, 0.0)
    assert set(set_aside(recipe)) == {"model.adapters.dropout=0.2", "parallel.strategy=ddp"}
