"""Transformers' architectures as language models of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_sentences import raises
from torch import nn

from paceline.errors import ModelError
from paceline.models.recompute import recompute_blocks
from paceline.recipe.model import ModelSection
from paceline_text.transformers_models import Objective, build_transformers_model, takes_documents

TINY: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
KINDS: dict[str, tuple[Objective, dict[str, Any]]] = {
    "gpt2": ("causal", TINY),
    "llama": ("causal", {**TINY, "intermediate_size": 24, "num_key_value_heads": 1}),
    "bert": ("masked", {**TINY, "intermediate_size": 24}),
    "roberta": ("masked", {**TINY, "intermediate_size": 24}),
}


def built(name: str, objective: Objective = "causal", context: int = 12, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    model = ModelSection(name=f"transformers:{name}", options=options)
    return build_transformers_model(model, vocabulary=29, context=context, objective=objective)


@pytest.mark.parametrize("kind", KINDS)
def test_documents_in_a_row_are_as_each_alone(kind: str) -> None:
    objective, options = KINDS[kind]
    network = built(kind, objective, **options).double().eval()
    tokens = torch.randint(29, (2, 12))
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 4 + [1] * 4 + [-1] * 4])
    positions = torch.tensor([[*range(5), *range(7)], [*range(4), *range(4), *[0] * 4]])
    together = network(tokens, positions, documents)
    assert torch.isfinite(together).all()
    for row, begin, end in ((0, 0, 5), (0, 5, 12), (1, 0, 4), (1, 4, 8)):
        alone = network(tokens[row : row + 1, begin:end])[0]
        assert (together[row, begin:end] - alone).abs().max() < 1e-10
    assert takes_documents(network, 12)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "roberta", "electra"])
def test_a_causal_one_sees_nothing_that_comes_later(kind: str) -> None:
    """Of those that read both ways, too: without a word of the recipe's they are built as decoders."""
    network = built(kind, **KINDS.get(kind, KINDS["bert"])[1]).eval()
    tokens = torch.randint(29, (1, 9))
    assert torch.allclose(network(tokens)[:, :6], network(tokens[:, :6]), atol=1e-5)
    changed = torch.cat([tokens[:, :6], (tokens[:, 6:] + 1) % 29], dim=1)
    assert torch.allclose(network(tokens)[:, :6], network(changed)[:, :6], atol=1e-6)


def test_what_cannot_keep_documents_apart_says_so() -> None:
    assert not takes_documents(built("mamba", hidden_size=16, num_hidden_layers=1), 12)


def test_a_window_shorter_than_a_row_would_be_lost_to_a_mask() -> None:
    """A mask of documents stands where the window's was: documents in a row would see more than each does alone."""
    narrow = built("mistral", **TINY, intermediate_size=16, num_key_value_heads=1, sliding_window=4)
    assert not takes_documents(narrow, 12)
    assert takes_documents(built("mistral", **TINY, intermediate_size=16, num_key_value_heads=1), 12)


def test_a_switch_that_lets_tokens_see_ahead_is_found_out() -> None:
    with raises(ModelError, key="model.name", value="transformers:bert"):
        built("bert", **TINY, intermediate_size=16, is_decoder=False)


def test_positions_without_a_limit_are_no_error() -> None:
    assert built("xlnet", d_model=16, n_layer=1, n_head=2, d_inner=16) is not None


def test_weights_and_names_are_the_library_s(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config

    network = built("gpt2", **TINY, attn_pdrop=0.0).eval()
    config = GPT2Config(vocab_size=29, n_positions=12, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    theirs.load_state_dict(network.state_dict())
    tokens = torch.randint(29, (2, 12))
    assert torch.equal(network(tokens), theirs(input_ids=tokens).logits)
    theirs.save_pretrained(tmp_path)
    from_folder = ModelSection(name=f"transformers:{tmp_path}")
    again = build_transformers_model(from_folder, vocabulary=20, context=12, objective="causal")
    ours, theirs = ({name: each.shape for name, each in one.state_dict().items()} for one in (network, again))
    assert ours == theirs


def test_recomputed_blocks_are_its_layers() -> None:
    network = built("llama", **KINDS["llama"][1])
    assert recompute_blocks(network, "full") == ["model.layers.0", "model.layers.1"]
    network(torch.randint(29, (2, 12))).sum().backward()
    assert all(each.grad is not None for each in network.parameters())


@pytest.mark.parametrize(
    ("kind", "options", "key"),
    [
        ("gptt2", {}, "model.name"),
        ("gpt2", {"n_leyer": 3}, "model.options"),
        ("gpt2", {"model_type": "llama"}, "model.options"),
        ("gpt2", {"n_layer": "three"}, "model.options"),
        ("gpt2", {"vocab_size": 7}, "model.name"),
        ("gpt2", {"n_positions": 8}, "model.name"),
        ("albert", {}, "model.name"),
    ],
)
def test_mistakes_are_named(kind: str, options: dict[str, Any], key: str) -> None:
    with raises(ModelError, key=key):
        built(kind, **options)


def test_folders_of_no_language_model_are_refused(tmp_path: Path) -> None:
    with raises(ModelError, key="model.name"):
        built(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "my_own", "auto_map": {"AutoConfig": "code.Own"}}))
    with raises(ModelError, key="model.name"):
        built(str(tmp_path))
