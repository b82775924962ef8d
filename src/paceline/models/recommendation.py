"""Networks for click data by their recipe names: DLRM (Naumov et al. 2019), and the size of its tables.

Numeric features go through a bottom MLP and categories through embedding tables; the pairwise dot products and the
bottom MLP's output go through a top MLP.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.models.factories import call_factory, named_factory, unknown_model
from paceline.plan.strategy import table_state_numbers
from paceline.recipe.model import Model
from paceline.recipe.schema import Recipe
from paceline.units import format_bytes


class Dlrm(nn.Module):
    """Deep learning recommendation model.

    Weights are initialised as in the authors' program: a layer's weights are normal with variance 2 / (inputs +
    outputs), its biases with 1 / outputs; a table is uniform within sqrt(1 / rows).

    Attributes:
        tables: One embedding bag for each categorical feature.
    """

    def __init__(
        self,
        dense_features: int,
        table_rows: Sequence[int],
        *,
        embedding: int = 16,
        bottom: Sequence[int] = (512, 256, 64),
        top: Sequence[int] = (512, 256),
        sparse: bool = False,
    ) -> None:
        """Build the network.

        Args:
            dense_features: Number of numeric features.
            table_rows: Rows of each categorical feature's table.
            embedding: Embedding size, and output size of the bottom MLP.
            bottom: Widths of the bottom MLP's hidden layers.
            top: Widths of the top MLP's hidden layers.
            sparse: Whether tables have sparse gradients, covering only the rows that a batch uses.
        """
        super().__init__()
        self.bottom = _perceptron([dense_features, *bottom, embedding], ends_with_relu=True)
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, embedding, mode="sum", sparse=sparse) for rows in table_rows)
        features = 1 + len(table_rows)
        pairs = torch.tril_indices(features, features, offset=-1)
        # Flat indices, since a single gather along one axis is fast on every back-end.
        self.register_buffer("pairs", pairs[0] * features + pairs[1], persistent=False)
        self.top = _perceptron([embedding + pairs.shape[1], *top, 1], ends_with_relu=False)
        self._begin()

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """Return the click logits, [N].

        Args:
            dense: Numbers, float [N, dense features].
            categories: Rows of the tables, int64 [N, categorical features].
        """
        mixed = self.bottom(dense)
        looked_up = [table(categories[:, index : index + 1]) for index, table in enumerate(self.tables)]
        features = torch.stack([mixed, *(each.to(mixed.dtype) for each in looked_up)], dim=1)
        products = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        pairs: Tensor = self.pairs  # type: ignore[assignment]  # torch types a buffer as tensor or module
        answer: Tensor = self.top(torch.cat([mixed, products.index_select(1, pairs)], dim=1))
        return answer.squeeze(1)

    def no_weight_decay(self) -> tuple[str, ...]:
        """Exempt the tables from weight decay, which would shrink rows that no batch uses."""
        return ("tables.*",)

    @torch.no_grad()
    def _begin(self) -> None:
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.normal_(0.0, math.sqrt(2 / (layer.in_features + layer.out_features)))
                layer.bias.normal_(0.0, math.sqrt(1 / layer.out_features))
            elif isinstance(layer, nn.EmbeddingBag):
                bound = math.sqrt(1 / layer.num_embeddings)
                layer.weight.uniform_(-bound, bound)


def _perceptron(widths: Sequence[int], *, ends_with_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*(layers if ends_with_relu else layers[:-1]))


CLICK_MODELS: dict[str, Callable[..., nn.Module]] = {"dlrm": Dlrm}
_FP32_BYTES = 4


def build_click_model(model: Model, *, dense_features: int, table_rows: Sequence[int]) -> nn.Module:
    """Build the recipe's network for click data.

    Args:
        model: The recipe's `model` section.
        dense_features: Number of numeric features.
        table_rows: Rows of each categorical feature's table.

    Raises:
        ModelError: If the name is unknown, or the factory does not accept the options.
    """
    factory = named_factory(model, CLICK_MODELS)
    if factory is None:
        raise unknown_model(model, "network for click data", CLICK_MODELS)
    try:
        return call_factory(model, factory, dense_features=dense_features, table_rows=tuple(table_rows))
    except RuntimeError as error:  # torch's errors for impossible sizes
        raise ModelError(f"model.name={model.name}: model.options {model.options} do not fit: {error}.") from error


def describe_tables(recipe: Recipe, rows: Sequence[int]) -> str:
    """Describe the size of the tables and of their optimizer state in one sentence."""
    embedding = recipe.model.options.get("embedding", inspect.signature(Dlrm).parameters["embedding"].default)
    counted = f"{len(rows)} tables of {sum(rows):,} rows in all"
    if recipe.model.name not in CLICK_MODELS or not isinstance(embedding, int):
        return counted
    size = sum(rows) * embedding * _FP32_BYTES
    kept = table_state_numbers(recipe.optimizer, rows=sum(rows), embedding=embedding) * _FP32_BYTES
    taken = f"{format_bytes(size)}, with {format_bytes(kept)} of optimizer state"
    where = "" if recipe.parallel.strategy == "fsdp" else "; each process holds all of them"
    return f"{counted} x {embedding} numbers x 4 bytes = {taken}{where}"
