"""Language models and text classifiers by their names: built-in transformers, Transformers' networks, or the user's.

Built in are pre-norm transformers: `gpt`, with causal attention, and `bert`, with full attention.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), whose architecture the options can
reproduce exactly; Devlin et al., "BERT" (2018). Rotary positions: Su et al., "RoFormer" (2021). RMSNorm: Zhang and
Sennrich (2019). SwiGLU: Shazeer, "GLU Variants Improve Transformer" (2020).
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.models.factories import call_factory, check_options, mix_in, named_factory, unknown_model
from paceline.recipe.model import ModelSection
from paceline_text.transformers_models import (
    PREFIX,
    WHAT,
    Objective,
    build_transformers_classifier,
    build_transformers_model,
)

Activation = Literal["gelu", "gelu_tanh", "swiglu"]
Norm = Literal["rms", "layer"]
Positions = Literal["rotary", "learned"]


_MOST = {"depth": 1000, "width": 1_000_000, "heads": 1_000_000, "hidden": 10_000_000}


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """The architecture of a transformer.

    GPT-2 is ``depth=12, width=768, heads=12, activation=gelu_tanh, norm=layer, positions=learned, bias=true``.

    Attributes:
        vocabulary: Token ids are in [0, vocabulary).
        context: Maximum number of tokens in a row.
        causal: Whether each token attends only to itself and earlier tokens.
        depth: Number of blocks.
        width: Embedding size of a token.
        heads: Number of attention heads.
        hidden: Hidden size of the feed-forward part; None: 4 times ``width``, with `swiglu` 8/3 times.
        activation: `gelu`, `gelu_tanh` (GPT-2's, an approximation), or `swiglu`, which has a third matrix.
        norm: `rms` or `layer`.
        norm_eps: Added to the variance.
        positions: `rotary`, or `learned` embeddings that are added to the tokens'.
        bias: Whether linear layers and layer norms have biases.
        dropout: Dropout probability in training, in [0, 1).
        tied: Whether the output layer shares the token embedding's weights.
    """

    vocabulary: int
    context: int
    causal: bool
    depth: int = 6
    width: int = 256
    heads: int = 4
    hidden: int | None = None
    activation: Activation = "gelu"
    norm: Norm = "rms"
    norm_eps: float = 1e-5
    positions: Positions = "rotary"
    bias: bool = False
    dropout: float = 0.0
    tied: bool = True

    def __post_init__(self) -> None:
        sizes = {
            "depth": self.depth,
            "width": self.width,
            "heads": self.heads,
            "hidden": 1 if self.hidden is None else self.hidden,
        }
        rules = [(name, size, 1 <= size <= _MOST[name], f"from 1 to {_MOST[name]:,}") for name, size in sizes.items()]
        check_options("a transformer", [*rules, ("dropout", self.dropout, 0 <= self.dropout < 1, "in [0, 1)")])
        if self.width % self.heads:
            raise ModelError(
                f"model.options.width={self.width} cannot be divided among heads={self.heads}.",
                key="model.options.width",
                value=self.width,
            )
        if self.positions == "rotary" and self.width // self.heads % 2:
            raise ModelError(
                f"model.options.width={self.width} gives each of heads={self.heads} an odd number of "
                f"{self.width // self.heads}, which rotary positions turn in pairs; choose an even one.",
                key="model.options.width",
                value=self.width,
            )

    @property
    def middle(self) -> int:
        """Hidden size of the feed-forward part."""
        if self.hidden is not None:
            return self.hidden
        # Narrower matrices compensate for the third one; multiples of 8 suit all kernels.
        return -(-8 * self.width // 24) * 8 if self.activation == "swiglu" else 4 * self.width


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017) by PyTorch's fused kernels."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = shape.heads, shape.causal, shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=shape.bias)
        self.out = nn.Linear(shape.width, shape.width, bias=shape.bias)

    def forward(self, x: Tensor, mask: Tensor | None, rotations: tuple[Tensor, Tensor] | None) -> Tensor:
        """Map [N, T, width] to the same shape; ``mask`` [N, 1, T, T] gives visible tokens, None: all or all earlier."""
        n, t, width = x.shape
        query, key, value = self.qkv(x).view(n, t, 3, self.heads, width // self.heads).unbind(2)
        if rotations is not None:
            query, key = _rotate(query, *rotations), _rotate(key, *rotations)
        y = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal and mask is None,
        )
        out: Tensor = self.out(y.transpose(1, 2).reshape(n, t, width))
        return out


class FeedForward(nn.Module):
    """Two linear layers with a non-linearity between them, applied to each token."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.activation = shape.activation
        factor = 2 if shape.activation == "swiglu" else 1
        self.up = nn.Linear(shape.width, factor * shape.middle, bias=shape.bias)
        self.down = nn.Linear(shape.middle, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, T, width] to the same shape."""
        x = self.up(x)
        if self.activation == "swiglu":
            gate, x = x.chunk(2, dim=-1)
            x = F.silu(gate) * x
        else:
            x = F.gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        out: Tensor = self.down(x)
        return out


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual connection."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.norm1, self.attention = _norm(shape), Attention(shape)
        self.norm2, self.feed_forward = _norm(shape), FeedForward(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, mask: Tensor | None, rotations: tuple[Tensor, Tensor] | None) -> Tensor:
        """Map [N, T, width] to the same shape."""
        x = x + self.dropout(self.attention(self.norm1(x), mask, rotations))
        out: Tensor = x + self.dropout(self.feed_forward(self.norm2(x)))
        return out


class Transformer(nn.Module):
    """Maps token ids to a score for each id at each position."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width) if shape.positions == "learned" else None
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(TransformerBlock(shape) for _ in range(shape.depth))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self._initialize()
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Score the next token, or the masked one, at each position.

        Args:
            tokens: Ids, int64 [N, T].
            positions: Position of each token in its document, int64 [N, T]; None: its position in the row.
            documents: Document index of each token in the row, int64 [N, T]: tokens attend only within their document.
                None: one document without padding.

        Returns:
            Logits [N, T, vocabulary].
        """
        x = self.tokens(tokens)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        rotations = None
        if self.positions is not None:
            x = x + self.positions(positions)
        else:
            rotations = _rotations(positions, self.shape.width // self.shape.heads, x.dtype)
        x = self.dropout(x)
        mask = None
        if documents is not None:  # attention mask, [N, 1, T, T], within documents; padding attends to padding
            same = documents[:, None, :, None] == documents[:, None, None, :]
            mask = same.tril() if self.shape.causal else same
        for block in self.blocks:
            x = block(x, mask, rotations)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _initialize(self) -> None:
        """As in GPT-2: weights that add to the residual stream are scaled down with the number of blocks."""
        residual = 0.02 / math.sqrt(2 * self.shape.depth)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                small = name.endswith(("attention.out", "feed_forward.down"))
                nn.init.normal_(module.weight, std=residual if small else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def transformer(vocabulary: int, context: int, causal: bool, **options: Any) -> Transformer:  # by name
    """Build a transformer; the options are those of :class:`TransformerShape`."""
    return Transformer(TransformerShape(vocabulary=vocabulary, context=context, causal=causal, **options))


# Exposes the available options; mypy knows no such attribute of functions.
transformer.__signature__ = inspect.signature(TransformerShape, eval_str=True)  # type: ignore[attr-defined]  # read by inspect


def _norm(shape: TransformerShape) -> nn.Module:
    if shape.norm == "rms":
        return nn.RMSNorm(shape.width, eps=shape.norm_eps)
    return nn.LayerNorm(shape.width, eps=shape.norm_eps, bias=shape.bias)


def _rotations(positions: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of rotary positions, [T or N, T, 1, size / 2]; the slowest period is 10,000 * 2 pi."""
    rates = 10_000.0 ** (-torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size)
    angles = positions.to(torch.float32)[..., None, None] * rates
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate vectors [N, T, heads, size] by their position: component i pairs with i + size / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)


OWN_LANGUAGE_MODELS = {"gpt": True, "bert": False}
"""Built-in transformers, and whether each is causal."""


def language_model_names() -> list[str]:
    """Return the names of our own language models."""
    return list(OWN_LANGUAGE_MODELS)


def build_language_model(model: ModelSection, *, vocabulary: int, context: int, is_masked: bool = False) -> nn.Module:
    """Build the recipe's network for tokens: ``model(tokens, positions=None, documents=None)`` returns logits.

    Args:
        model: The recipe's `model` section.
        vocabulary: Token ids are in [0, vocabulary).
        context: Maximum tokens in a row.
        is_masked: Whether it predicts masked tokens instead of the next one.

    Raises:
        ModelError: If the name is unknown, or the options are not the factory's.
    """
    if model.name.startswith(PREFIX):
        objective: Objective = "masked" if is_masked else "causal"
        return build_transformers_model(model, vocabulary=vocabulary, context=context, objective=objective)
    sizes = {"vocabulary": vocabulary, "context": context}
    if model.name in OWN_LANGUAGE_MODELS:
        sizes["causal"] = OWN_LANGUAGE_MODELS[model.name]
    factory = named_factory(model, dict.fromkeys(OWN_LANGUAGE_MODELS, transformer))
    if factory is None:
        raise unknown_model(model, "language model", [*OWN_LANGUAGE_MODELS, f"{PREFIX}NAME"])
    return call_factory(model, factory, **sizes)


class TextClassifier(nn.Module):
    """Mixed into a transformer's class, whose output layer then scores classes.

    Attributes:
        per_token: Whether it scores each token, instead of the mean over a text's tokens.
    """

    per_token: bool

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the logits of each text, [N, classes], or of each token, [N, T, classes].

        Args:
            tokens: Ids, int64 [N, T].
            mask: 1 for tokens, 0 for padding, int64 [N, T].
        """
        scores: Tensor = super().forward(tokens, None, mask - 1)
        if self.per_token:
            return scores
        return (scores * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def build_text_classifier(
    model: ModelSection, *, vocabulary: int, context: int, classes: int, pad: int, per_token: bool = False
) -> nn.Module:
    """Build the recipe's network that classifies texts: ``model(tokens, mask)`` returns logits, [N, classes].

    Args:
        model: The recipe's `model` section.
        vocabulary: Token ids are in [0, vocabulary).
        context: Maximum tokens of a text.
        classes: Number of classes.
        pad: Id of the padding token.
        per_token: Whether it classifies tokens instead: logits are [N, T, classes].

    Raises:
        ModelError: If the name is unknown, or the options are not the factory's.
    """
    sizes = {"vocabulary": vocabulary, "context": context}
    objective: Objective = "tags" if per_token else "classes"
    if model.name.startswith(PREFIX):
        return build_transformers_classifier(model, **sizes, classes=classes, pad=pad, objective=objective)
    if model.name not in OWN_LANGUAGE_MODELS:
        factory = named_factory(model, {})
        if factory is None:
            raise unknown_model(model, WHAT[objective], [*OWN_LANGUAGE_MODELS, f"{PREFIX}NAME"])
        return call_factory(model, factory, **sizes, num_classes=classes)
    network = build_language_model(model, vocabulary=vocabulary, context=context)
    assert isinstance(network, Transformer)
    network.head = nn.Linear(network.shape.width, classes)
    nn.init.normal_(network.head.weight, std=0.02)
    nn.init.zeros_(network.head.bias)
    mix_in([network], TextClassifier, per_token=per_token)
    return network


def is_causal(model: ModelSection) -> bool | None:
    """Whether a network is causal; None if its name does not tell."""
    return OWN_LANGUAGE_MODELS.get(model.name)
