"""A network that is built without numbers gets those that it would have had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.models.build import build_model
from paceline.models.deferred import NotDeferrableError, build_deferred, tensors_of
from paceline.recipe.model import ModelSection
from paceline_text.models import build_language_model

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY_LLAMA = {**TINY, "intermediate_size": 24, "num_key_value_heads": 1}


def language_model(name: str, *, is_masked: bool = False, **options: Any) -> Callable[[], nn.Module]:
    model = ModelSection(name=name, options=options)
    return lambda: build_language_model(model, vocabulary=37, context=8, is_masked=is_masked)


class Chained(nn.Module):
    """Weights that are written to several times, drawn in another order than they stand in, and made of others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 5)
        self.turned = nn.Parameter(torch.empty(7, 5))
        self.register_buffer("table", torch.arange(12.0).view(3, 4).cos())
        with torch.no_grad():
            nn.init.trunc_normal_(self.second.weight)
            self.turned.copy_(self.first.weight * 2)
            nn.init.kaiming_normal_(self.first.weight)
            self.first.weight[2].zero_()
            self.first.weight.mul_(0.5).add_(torch.randn(7, 5))


NETWORKS = {
    "gpt": language_model("gpt", depth=2, width=16, heads=2),
    "gpt with learned positions": language_model("gpt", depth=2, width=16, heads=2, positions="learned", norm="layer"),
    "gpt2": language_model("transformers:gpt2", **TINY),
    "llama": language_model("transformers:llama", **TINY_LLAMA),
    "bert": language_model("transformers:bert", is_masked=True, **TINY, intermediate_size=24),
    "vit": lambda: build_model(
        ModelSection(name="vit_tiny_patch16_224", options={"depth": 1, "embed_dim": 24}), num_classes=3, in_channels=3
    ),
    "chained": Chained,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_its_first_values_are_those_of_the_whole_network(name: str) -> None:
    torch.manual_seed(5)
    whole = dict(tensors_of(NETWORKS[name]()))
    torch.manual_seed(5)
    network, first_values = build_deferred(NETWORKS[name])
    torch.manual_seed(99)  # what is drawn meanwhile changes nothing
    before = torch.get_rng_state()
    found = dict(tensors_of(network))
    assert found.keys() == whole.keys()
    assert all(each.is_meta for each in network.parameters())
    # In another order than they were made in.
    for key in reversed(found):
        assert torch.equal(first_values(key) if found[key].is_meta else found[key], whole[key]), key
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_shared_stays_shared() -> None:
    network, _ = build_deferred(NETWORKS["gpt2"])
    assert network.get_parameter("lm_head.weight") is network.get_parameter("transformer.wte.weight")


def own_draw() -> nn.Parameter:
    return nn.Parameter(torch.randn(3, 3, device="cpu").normal_(generator=torch.Generator().manual_seed(1)))


# What a constructor does with a layer that it has made.
ODD: dict[str, Callable[[nn.Linear], object]] = {
    "looks": lambda layer: layer.weight.data.neg_() if layer.weight[0, 0] > 0 else None,
    "draws": lambda layer: nn.Linear(3, int(torch.randint(1, 5, (), device="cpu"))),
    "asks": lambda layer: None if layer.weight.is_meta else nn.init.ones_(layer.weight),
    "uses what torch leaves out on its meta device": lambda layer: nn.init.orthogonal_(layer.weight),
    "leaves it": lambda layer: setattr(layer, "weight", nn.Parameter(torch.empty(3, 3))),
    "has its own generator": lambda layer: setattr(layer, "weight", own_draw()),
}


@pytest.mark.parametrize("name", ODD)
def test_it_says_so_where_that_cannot_be(name: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            ODD[name](self.layer)

    with pytest.raises(NotDeferrableError):
        build_deferred(Odd)
