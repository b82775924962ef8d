"""Which network does a recipe name for click data, and how large are its tables?"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

from torch import nn

from paceline.errors import ModelError, did_you_mean
from paceline.models.dlrm import Dlrm
from paceline.recipe.model import Model
from paceline.recipe.schema import Recipe
from paceline.recipe.strategy import table_state_numbers
from paceline.references import is_reference, load_reference
from paceline.units import format_bytes

CLICK_MODELS: dict[str, Callable[..., nn.Module]] = {"dlrm": Dlrm}
_SIZES = ("dense_features", "table_rows")
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
    if model.pretrained:
        raise ModelError(
            f"model.pretrained=true has no effect with model.name={model.name}: it has no published weights."
        )
    if model.name not in CLICK_MODELS and not is_reference(model.name):
        raise ModelError(
            f"model.name={model.name} is no network for click data.{did_you_mean(model.name, CLICK_MODELS)} It is "
            f"{', '.join(CLICK_MODELS)}, or package.module:factory of your own."
        )
    factory = CLICK_MODELS.get(model.name) or load_reference(model.name, ModelError)
    _check_options(model)
    try:
        network = factory(dense_features=dense_features, table_rows=tuple(table_rows), **model.options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(f"model.name={model.name}: model.options {model.options} do not fit: {error}.") from error
    if not isinstance(network, nn.Module):
        raise ModelError(
            f"model.name={model.name}: the factory returned a {type(network).__name__}, not a torch.nn.Module."
        )
    return network


def _check_options(model: Model) -> None:
    if model.name not in CLICK_MODELS:
        return
    known = [name for name in inspect.signature(CLICK_MODELS[model.name]).parameters if name not in _SIZES]
    wrong = [name for name in model.options if name not in known]
    if wrong:
        raise ModelError(
            f"model.options {wrong} are unknown to {model.name}.{did_you_mean(wrong[0], known)} It has "
            f"{', '.join(known)}."
        )


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
