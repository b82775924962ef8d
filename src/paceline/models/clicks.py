"""Networks for click data by their names in recipes, and the size of their tables."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

from torch import nn

from paceline.errors import ModelError, did_you_mean
from paceline.models.dlrm import Dlrm
from paceline.models.factories import call_factory, named_factory
from paceline.plan.strategy import table_state_numbers
from paceline.recipe.model import Model
from paceline.recipe.schema import Recipe
from paceline.units import format_bytes

CLICK_MODELS: dict[str, Callable[..., nn.Module]] = {"dlrm": Dlrm}
_FP32_BYTES = 4


def build_click_model(model: Model, *, dense_features: int, table_rows: Sequence[int]) -> nn.Module:
    """Build the network of a recipe for click data.

    Args:
        model: The recipe's `model` section.
        dense_features: Numbers of a sample.
        table_rows: Rows of each categorical feature's table.

    Raises:
        ModelError: If the name is unknown, or the options are not the factory's.
    """
    factory = named_factory(model, CLICK_MODELS)
    if factory is None:
        raise ModelError(
            f"model.name={model.name} is not a network for click data.{did_you_mean(model.name, CLICK_MODELS)} It is "
            f"{', '.join(CLICK_MODELS)}, or package.module:factory of your own."
        )
    try:
        return call_factory(model, factory, dense_features=dense_features, table_rows=tuple(table_rows))
    except RuntimeError as error:  # torch's, of sizes that cannot be
        raise ModelError(f"model.name={model.name}: model.options {model.options} do not fit: {error}.") from error


def describe_tables(recipe: Recipe, rows: Sequence[int]) -> str:
    """How large the tables are, and what an optimizer keeps beside them, in a sentence."""
    embedding = recipe.model.options.get("embedding", inspect.signature(Dlrm).parameters["embedding"].default)
    counted = f"{len(rows)} tables of {sum(rows):,} rows in all"
    if recipe.model.name not in CLICK_MODELS or not isinstance(embedding, int):
        return counted
    size = sum(rows) * embedding * _FP32_BYTES
    kept = table_state_numbers(recipe.optimizer, rows=sum(rows), embedding=embedding) * _FP32_BYTES
    taken = f"{format_bytes(size)}, with {format_bytes(kept)} of optimizer state"
    where = "" if recipe.parallel.strategy == "fsdp" else "; each process holds all of them"
    return f"{counted} x {embedding} numbers x 4 bytes = {taken}{where}"
