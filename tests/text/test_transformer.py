"""Our own transformer: who sees whom, and what its options make of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.errors import ModelError
from paceline.recipe.model import ModelSection
from paceline_text.models import Transformer, build_language_model

SMALL = {"depth": 2, "width": 16, "heads": 2}
OPTIONS = [
    {},
    {"activation": "swiglu", "norm": "layer", "bias": True},
    {"activation": "gelu_tanh", "positions": "learned", "norm": "layer", "bias": True, "tied": False},
]


def build(name: str, **options: object) -> Transformer:
    torch.manual_seed(0)
    network = build_language_model(ModelSection(name=name, options=SMALL | options), vocabulary=20, context=12)
    assert isinstance(network, Transformer)
    return network.eval().double()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 20, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("options", OPTIONS)
@torch.no_grad()
def test_gpt_looks_back_and_bert_both_ways(tokens: torch.Tensor, options: dict[str, object]) -> None:
    other = tokens.clone()
    other[:, 7] = (other[:, 7] + 1) % 20
    for name, first in (("gpt", 7), ("bert", 0)):
        network = build(name, **options)
        assert network(tokens).shape == (2, 12, 20)
        changed = (network(tokens) - network(other)).abs().amax(dim=(0, 2)) > 1e-12
        assert changed.tolist() == [at >= first for at in range(12)]


@pytest.mark.parametrize("name", ["gpt", "bert"])
@pytest.mark.parametrize("options", OPTIONS)
@torch.no_grad()
def test_documents_in_a_row_are_as_if_each_stood_alone(tokens: torch.Tensor, name: str, options: Any) -> None:
    network = build(name, **options)
    positions = torch.tensor([[*range(5), *range(4), 0, 0, 0]] * 2)
    packed = network(tokens, positions, torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3] * 2))
    assert packed.isfinite().all()
    torch.testing.assert_close(packed[:, :5], network(tokens[:, :5]), rtol=0, atol=1e-12)
    torch.testing.assert_close(packed[:, 5:9], network(tokens[:, 5:9]), rtol=0, atol=1e-12)


@torch.no_grad()
def test_rotary_positions_are_relative(tokens: torch.Tensor) -> None:
    network = build("gpt")
    moved = torch.arange(12)[None] + 5
    # Angles are of 32 bits.
    torch.testing.assert_close(network(tokens, moved), network(tokens), rtol=0, atol=1e-6)


def test_token_vectors_are_the_output_layer_s_and_drawn_once() -> None:
    network = build("gpt")
    assert network.head.weight is network.tokens.weight
    assert network.tokens.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert network.blocks[0].feed_forward.down.weight.std().item() == pytest.approx(0.01, rel=0.2)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dept": 3}, r"\['dept'\] are unknown to gpt. Did you mean 'depth'"),
        ({"heads": 3}, "width=16 cannot be divided among heads=3"),
        ({"heads": 16}, "an odd number of 1"),
        ({"depth": 0}, "depth=0: a transformer needs depth from 1 to 1,000"),
        ({"norm": "batch"}, "norm='batch': gpt needs norm as 'rms' or 'layer'"),
        ({"dropout": 1.0}, r"dropout=1.0: a transformer needs dropout in \[0, 1\)"),
    ],
)
def test_options_that_cannot_be_are_told(options: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build("gpt", **options)


def test_unknown_names_and_weights_that_nobody_published_are_told() -> None:
    for asked, said in (
        (ModelSection(name="gbt"), "unknown language model 'gbt'"),
        (ModelSection(name="gpt", pretrained=True), "no published weights"),
        (ModelSection(name="fractions:Fraction"), "returned a Fraction, not a"),
    ):
        with pytest.raises(ModelError, match=said):
            build_language_model(asked, vocabulary=20, context=12)
