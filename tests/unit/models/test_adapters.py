"""Low-rank adapters: what is trained, that they merge into the plain network, and what to do without peft."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_sentences import raises
from torch import nn

from paceline.checkpoint.weights import merge_adapters, read_weights
from paceline.errors import ModelError, RecipeError
from paceline.inference.predict import load_predictor
from paceline.models.adapters import PartlyNew, add_adapters, head_names
from paceline.models.transfer import adapt
from paceline.recipe.load import load_recipe
from paceline.recipe.model import Adapters, ModelSection
from paceline.trainer.evaluate_target import EvaluationRequest, evaluate_target
from paceline.trainer.train import plan_only

needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft is not installed (pip install 'paceline[adapters]')"
)
ADAPTED = {"model.adapters.rank": 2, "model.adapters.alpha": 6, "model.adapters.dropout": 0.2, "train.ema": 0.9}


class Mixed(nn.Module):
    """Convolutions of several kinds, linear layers with and without a bias, and torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1, stride=2)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.pointwise = nn.Conv2d(6, 8, 1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.body = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.pointwise(self.depthwise(self.stem(images)))).flatten(2).transpose(1, 2)
        found = found + self.attention(found, found, found, need_weights=False)[0]
        answer: torch.Tensor = self.head(self.body(found).relu().mean(1))
        return answer


def adapted(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    network = Mixed()
    adapt(network, ModelSection(adapters=Adapters(rank=2, alpha=6.0), **more))
    return network


def drawn(network: nn.Module) -> None:
    """Adapters that are no longer nothing."""
    for name, each in network.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(each)


def trained(network: nn.Module) -> set[str]:
    return {name for name, each in network.named_parameters() if each.requires_grad}


@needs_peft
def test_only_adapters_and_the_classifier_are_trained() -> None:
    matrices = [f"{layer}.lora_{which}.default.weight" for layer in ("stem", "pointwise", "body") for which in "AB"]
    network = adapted()
    assert trained(network) == {*matrices, "head.weight", "head.bias"}
    assert not network.norm.training  # nothing of it is trained: its statistics stay as they are
    assert trained(adapted(frozen=("!norm.*", "head.bias"))) == {*matrices, "head.weight", "norm.weight", "norm.bias"}


@needs_peft
def test_a_network_with_adapters_begins_as_it_was() -> None:
    torch.manual_seed(0)
    plain = Mixed().eval()
    images = torch.rand(4, 1, 12, 12)
    torch.testing.assert_close(adapted().eval()(images), plain(images), rtol=0, atol=1e-6)


@needs_peft
def test_merged_weights_give_the_same_answers_under_the_plain_names() -> None:
    network = adapted().eval()
    drawn(network)
    merged = merge_adapters(network.state_dict(), 2, 6, where="w")
    plain = Mixed().eval()
    assert list(merged) == list(plain.state_dict())
    plain.load_state_dict(merged)
    images = torch.rand(16, 1, 12, 12)
    torch.testing.assert_close(plain(images), network(images), rtol=1e-5, atol=1e-5)
    assert (plain(images) - Mixed().eval()(images)).abs().max() > 0.1


class Tied(nn.Module):
    """A language model whose output layer's weights are its token vectors, whichever it made first."""

    def __init__(self, head_first: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 20) if head_first else nn.Embedding(20, 8)
        self.body = nn.Linear(8, 8)
        self.last = nn.Embedding(20, 8) if head_first else nn.Linear(8, 20)
        self.last.weight = self.first.weight

    def get_classifier(self) -> nn.Module:
        return self.first if isinstance(self.first, nn.Linear) else self.last


@needs_peft
@pytest.mark.parametrize("head_first", [False, True])
def test_a_tied_output_layer_stays_with_the_token_vectors(head_first: bool) -> None:
    network = Tied(head_first)
    adapt(network, ModelSection(adapters=Adapters(rank=2)))
    bias = "first.bias" if head_first else "last.bias"
    assert trained(network) == {"body.lora_A.default.weight", "body.lora_B.default.weight", bias}


@needs_peft
@pytest.mark.parametrize("recipe", ["gpt-small-docs", "bert-tiny-docs"])
def test_the_shipped_language_models_take_adapters(recipe: str) -> None:
    whole, adapters = (plan_only(load_recipe(recipe, more)) for more in ({}, {"model.adapters.rank": 4}))
    assert 0 < (adapters.parameters or 0) < 0.1 * (whole.parameters or 0)


@needs_peft
def test_transposed_layers_are_merged_as_peft_does() -> None:
    """GPT-2's weights are [in, out]; of a square one the shape does not tell."""
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    network = nn.Sequential(pytorch_utils.Conv1D(6, 6), pytorch_utils.Conv1D(4, 6), nn.Linear(4, 3))
    adapt(network, ModelSection(adapters=Adapters(rank=2, alpha=6.0)))
    drawn(network)
    merged = merge_adapters(network.state_dict(), 2, 6, where="w")
    plain = nn.Sequential(pytorch_utils.Conv1D(6, 6), pytorch_utils.Conv1D(4, 6), nn.Linear(4, 3))
    plain.load_state_dict(merged)
    found = torch.rand(5, 6)
    torch.testing.assert_close(plain(found), network(found), rtol=1e-5, atol=1e-5)


@needs_peft
def test_a_run_with_adapters_goes_on_and_is_begun_from(train_tiny: Any, weights: Any) -> None:
    whole = train_tiny("whole", ADAPTED)
    train_tiny("pieces", {**ADAPTED, "train.until": "3 steps"})
    pieces = train_tiny("pieces", ADAPTED)
    assert pieces.summary.weights_sha256 == whole.summary.weights_sha256
    assert pieces.summary.ema_sha256 == whole.summary.ema_sha256
    plan = json.loads((whole.run_dir / "plan.json").read_text())
    held = weights(whole)
    small = sum(each.numel() for name, each in held.items() if "lora_" in name or name.startswith("classifier"))
    assert plan["parameters"] == small
    assert whole.summary.parameters == small
    # Weights for a new run, merged: the names are the plain network's.
    after = train_tiny("after", {"model.initialize_from": str(whole.run_dir), "train.ema": "off"})
    assert set(weights(after)) == set(read_weights(whole.run_dir).plain) == set(weights(train_tiny("plain")))


@needs_peft
def test_the_base_stays_to_the_bit(train_tiny: Callable[..., Any], weights: Callable[..., Any]) -> None:
    asked = {**ADAPTED, "optimizer.weight_decay": 0.1, "checkpoint.every": "1 steps", "checkpoint.keep": 9}
    run = train_tiny("run", asked)
    first, last = (read_weights(run.run_dir / "checkpoints" / f"step-{n:08d}", "model").state for n in (1, 8))
    moved = {name for name in last if not torch.equal(first[name], last[name])}
    assert {name for name in moved if "lora_" not in name} == {"classifier.weight", "classifier.bias"}
    assert any("lora_A" in name for name in moved)


@needs_peft
def test_digits_with_adapters_score_as_they_did_in_training(tiny_recipe: Path, tmp_path: Path) -> None:
    import paceline

    overrides = {**ADAPTED, "train.ema": "off"}
    run = paceline.train(tiny_recipe, overrides=overrides, run_dir=tmp_path / "run", quiet=True)
    report = evaluate_target(EvaluationRequest(target=tmp_path / "run"))
    assert report.metrics["loss"] == pytest.approx(run.metrics["loss"], rel=1e-4)
    assert load_predictor(tmp_path / "run").classes == tuple(map(str, range(10)))


@needs_peft
@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (("nothing.*",), r"matches 'nothing\.\*'"),
        (("head",), "the classifier is trained in full"),
        (("depthwise",), "neither grouped convolutions"),
        (("attention.*",), "inside torch's MultiheadAttention"),
    ],
)
def test_layers_that_cannot_have_adapters_are_named(targets: tuple[str, ...], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        add_adapters(Mixed(), Adapters(rank=2, targets=targets))


@needs_peft
@pytest.mark.parametrize(
    ("target", "found"), [("query", ["block.query"]), ("body", ["body", "block.body"]), ("*.body", ["block.body"])]
)
def test_a_pattern_matches_whole_names_and_their_ends_as_in_peft(target: str, found: list[str]) -> None:
    network = Mixed()
    network.block = nn.ModuleDict({"query": nn.Linear(8, 8), "body": nn.Linear(8, 8)})
    network.head = network._modules.pop("head")  # the last layer is the classifier
    add_adapters(network, Adapters(rank=2, targets=(target,)))
    assert [name for name, module in network.named_modules() if hasattr(module, "lora_A")] == found


def test_adapters_need_a_classifier() -> None:
    assert head_names(Mixed()) == ["head"]
    with pytest.raises(ModelError, match="no linear classifier"):
        head_names(nn.Sequential(nn.Conv2d(1, 1, 1)))


def test_a_network_may_say_which_of_its_layers_are_new() -> None:
    class Pooled(PartlyNew):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.pooler, self.head = (nn.Linear(4, 4) for _ in range(3))

        def new_layers(self) -> list[str]:
            return ["pooler", "head"]

    assert head_names(Pooled()) == ["pooler", "head"]


def test_more_is_said_of_adapters_that_are_not_there(train_tiny: Callable[..., Any]) -> None:
    with raises(RecipeError, key="model.adapters.alpha", rule="with effect"):
        train_tiny("run", {"model.adapters.alpha": 4})


@pytest.mark.skipif(importlib.util.find_spec("peft") is not None, reason="peft is installed")
def test_without_peft_it_is_said_how_to_get_it(train_tiny: Callable[..., Any], runs: Path) -> None:
    with pytest.raises(ModelError, match=r"needs peft .*pip install 'paceline\[adapters\]'"):
        train_tiny("run", ADAPTED)
    assert not (runs / "run").exists()
