"""Networks for click data by their recipe names: DLRM (Naumov et al. 2019), and the size of its tables.

Numeric features go through a bottom MLP and categories through embedding tables; the pairwise dot products and the
bottom MLP's output, or all features through cross layers, go through a top MLP.
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
from paceline.parsing.units import format_bytes
from paceline.plan.strategy import optimizer_state_numbers
from paceline.recipe.model import ModelSection
from paceline.recipe.schema import Recipe


class LowRankCross(nn.Module):
    """Low-rank cross layers of DCN-V2 (Wang et al. 2020): each is ``x = x0 * (W (V x) + b) + x``."""

    def __init__(self, width: int, *, layers: int, rank: int) -> None:
        """Build layers for features of this width; ``V`` is [rank, width] and ``W`` is [width, rank]."""
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width)) for _ in range(layers)
        )

    def forward(self, features: Tensor) -> Tensor:
        """Return the crossed features of ``features``, both [N, width]."""
        crossed = features
        for layer in self.layers:
            crossed = features * layer(crossed) + crossed
        return crossed


class Dlrm(nn.Module):
    """Deep learning recommendation model; with cross layers it is MLPerf's DLRM-DCNv2.

    Weights are initialised as in the authors' program: a layer's weights are normal with variance 2 / (inputs +
    outputs), its biases with 1 / outputs (0 in cross layers); a table is uniform within sqrt(1 / rows).

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
        cross_layers: int = 0,
        cross_rank: int = 64,
    ) -> None:
        """Build the network.

        Args:
            dense_features: Number of numeric features.
            table_rows: Rows of each categorical feature's table.
            embedding: Embedding size, and output size of the bottom MLP.
            bottom: Widths of the bottom MLP's hidden layers.
            top: Widths of the top MLP's hidden layers.
            sparse: Whether tables have sparse gradients, covering only the rows that a batch uses.
            cross_layers: Number of low-rank cross layers, which combine the features instead of dot products; 0: none.
            cross_rank: Rank of their matrices.

        Raises:
            ValueError: If the number of cross layers is negative, or their rank is less than 1.
        """
        super().__init__()
        if cross_layers < 0 or cross_rank < 1:
            raise ValueError(f"cross_layers={cross_layers} is below 0, or cross_rank={cross_rank} is below 1")
        self.bottom = _perceptron([dense_features, *bottom, embedding], ends_with_relu=True)
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, embedding, mode="sum", sparse=sparse) for rows in table_rows)
        features = 1 + len(table_rows)
        self.cross = LowRankCross(features * embedding, layers=cross_layers, rank=cross_rank) if cross_layers else None
        if self.cross is not None:
            width = features * embedding
        else:
            pairs = torch.tril_indices(features, features, offset=-1)
            width = embedding + pairs.shape[1]
            # Flat indices, since a single gather along one axis is fast on every back-end.
            self.register_buffer("pairs", pairs[0] * features + pairs[1], persistent=False)
        self.top = _perceptron([width, *top, 1], ends_with_relu=False)
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
        if self.cross is not None:
            combined = self.cross(features.flatten(1))
        else:
            products = torch.bmm(features, features.transpose(1, 2)).flatten(1)
            pairs: Tensor = self.pairs  # type: ignore[assignment]  # torch types a buffer as tensor or module
            combined = torch.cat([mixed, products.index_select(1, pairs)], dim=1)
        logits: Tensor = self.top(combined)
        return logits.squeeze(1)

    def no_weight_decay(self) -> tuple[str, ...]:
        """Exempt the tables from weight decay, which would shrink rows that no batch uses."""
        return ("tables.*",)

    @torch.no_grad()
    def _begin(self) -> None:
        for name, layer in self.named_modules():
            if isinstance(layer, nn.Linear):
                layer.weight.normal_(0.0, math.sqrt(2 / (layer.in_features + layer.out_features)))
                if layer.bias is not None:
                    spread = 0.0 if name.startswith("cross") else math.sqrt(1 / layer.out_features)
                    layer.bias.normal_(0.0, spread)
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


def click_model_names() -> list[str]:
    """Return the names of the networks for click data."""
    return list(CLICK_MODELS)


def build_click_model(model: ModelSection, *, dense_features: int, table_rows: Sequence[int]) -> nn.Module:
    """Build the recipe's network for click data.

    Args:
        model: The recipe's `model` section.
        dense_features: Number of numeric features.
        table_rows: Rows of each categorical feature's table.

    Raises:
        ModelError: If the name is unknown, the factory does not accept the options, or one has no effect.
    """
    factory = named_factory(model, CLICK_MODELS)
    if factory is None:
        raise unknown_model(model, "network for click data", CLICK_MODELS)
    if factory is Dlrm and "cross_rank" in model.options and not model.options.get("cross_layers"):
        raise ModelError(
            "model.options.cross_rank has no effect without cross layers; leave it out, or set cross_layers.",
            key="model.options.cross_rank",
        )
    try:
        return call_factory(model, factory, dense_features=dense_features, table_rows=tuple(table_rows))
    except RuntimeError as error:  # torch's errors for impossible sizes
        raise ModelError(
            f"model.name={model.name}: model.options {model.options} do not fit: {error}.",
            key="model.name",
            value=model.name,
        ) from error


def describe_tables(recipe: Recipe, rows: Sequence[int]) -> str:
    """Describe the size of the tables and of their optimizer state in one sentence."""
    embedding = recipe.model.options.get("embedding", inspect.signature(Dlrm).parameters["embedding"].default)
    size_text = f"{len(rows)} tables of {sum(rows):,} rows in all"
    if recipe.model.name not in CLICK_MODELS or not isinstance(embedding, int):
        return size_text
    numbers = sum(rows) * embedding
    kept = {"rowwise_adagrad": sum(rows), "sparse_adam": 2 * numbers}
    state = kept.get(recipe.optimizer.tables, optimizer_state_numbers(recipe.optimizer) * numbers)
    size, state_bytes = numbers * _FP32_BYTES, state * _FP32_BYTES
    memory_text = f"{format_bytes(size)}, with {format_bytes(state_bytes)} of optimizer state"
    sharding = "" if recipe.parallel.strategy == "fsdp" else "; each process holds all of them"
    return f"{size_text} x {embedding} numbers x 4 bytes = {memory_text}{sharding}"
