"""Our GPT with GPT-2's parts and weights computes what GPT-2 of Hugging Face Transformers does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.recipe.model import ModelSection
from paceline_text.models import build_language_model

DEPTH, WIDTH, HEADS, CONTEXT, VOCABULARY = 3, 48, 4, 24, 101
OURS = {
    "depth": DEPTH,
    "width": WIDTH,
    "heads": HEADS,
    "activation": "gelu_tanh",
    "norm": "layer",
    "positions": "learned",
    "bias": True,
}
THEIRS = {
    "n_layer": DEPTH,
    "n_embd": WIDTH,
    "n_head": HEADS,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
# Of a block, ours and theirs; their linear layers are transposed.
BLOCK = {
    "norm1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "norm2": "ln_2",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}


def names() -> dict[str, str]:
    """Our parameters' names, and theirs."""
    found = {"tokens.weight": "transformer.wte.weight", "positions.weight": "transformer.wpe.weight"}
    pairs = {
        f"blocks.{n}.{ours}": f"transformer.h.{n}.{theirs}" for n in range(DEPTH) for ours, theirs in BLOCK.items()
    }
    for ours, theirs in (pairs | {"norm": "transformer.ln_f"}).items():
        found |= {f"{ours}.{part}": f"{theirs}.{part}" for part in ("weight", "bias")}
    return found


def as_theirs(name: str, tensor: Tensor) -> Tensor:
    is_linear = tensor.ndim == 2 and "blocks" in name
    return tensor.T if is_linear else tensor


def pair(dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(2)
    sizes = {"vocabulary": VOCABULARY, "context": CONTEXT}
    ours = build_language_model(ModelSection(name="gpt", options=OURS), **sizes).to(dtype)
    theirs = build_language_model(ModelSection(name="transformers:gpt2", options=THEIRS), **sizes).to(dtype)
    with torch.no_grad():
        for each in ours.parameters():  # so that biases and norms say something too
            each.add_(torch.randn_like(each) * 0.1)
        for mine, other in names().items():
            theirs.get_parameter(other).copy_(as_theirs(mine, ours.get_parameter(mine)))
    assert {name for name, _ in ours.named_parameters()} == set(names())
    assert {name for name, _ in theirs.named_parameters()} == set(names().values())
    return ours, theirs


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("packed", [False, True])
def test_logits_and_gradients_are_gpt2_s(dtype: torch.dtype, within: float, packed: bool) -> None:
    ours, theirs = pair(dtype)
    tokens = torch.randint(VOCABULARY, (3, CONTEXT))
    cut = (7, 11)
    numbers = [number for number, size in enumerate((*cut, CONTEXT - sum(cut))) for _ in range(size)]
    documents = torch.tensor([numbers] * 3) if packed else None
    places = [place for size in (*cut, CONTEXT - sum(cut)) for place in range(size)]
    positions = torch.tensor([places] * 3) if packed else None
    answers = [network(tokens, positions, documents) for network in (ours, theirs)]
    assert answers[0].abs().max() > 1
    assert (answers[0] - answers[1]).abs().max() <= within
    for each in answers:
        F.cross_entropy(each[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for mine, other in names().items():
        gradient, theirs_of_it = ours.get_parameter(mine).grad, theirs.get_parameter(other).grad
        assert gradient is not None
        assert theirs_of_it is not None
        assert gradient.abs().max() > 0
        assert (as_theirs(mine, gradient) - theirs_of_it).abs().max() <= within, mine


def test_documents_in_a_row_are_as_each_alone() -> None:
    ours, _ = pair(torch.float64)
    tokens = torch.randint(VOCABULARY, (1, 16))
    documents, positions = torch.tensor([[0] * 9 + [1] * 7]), torch.tensor([[*range(9), *range(7)]])
    together = ours(tokens, positions, documents)
    alone = torch.cat([ours(tokens[:, :9]), ours(tokens[:, 9:])], dim=1)
    assert (together - alone).abs().max() <= 1e-10
