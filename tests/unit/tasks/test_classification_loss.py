"""Training losses are those of timm and of the formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from golden_sentences import raises

from paceline.errors import RecipeError
from paceline.recipe.load import stored_recipe
from paceline.tasks.class_losses import ClassificationLoss

timm_loss = pytest.importorskip("timm.loss")

LOGITS = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(8) % 5


def loss(**train: Any) -> ClassificationLoss:
    overrides = {f"train.{key}": value for key, value in train.items()}
    return ClassificationLoss(stored_recipe({}, "plain", overrides).train)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("threshold", [None, 0.2])
def test_bce_is_timms(smoothing: float, threshold: float | None) -> None:
    theirs = timm_loss.BinaryCrossEntropy(smoothing=smoothing, target_threshold=threshold)
    asked: dict[str, Any] = {"loss": "bce", "label_smoothing": smoothing} | (
        {} if threshold is None else {"target_threshold": threshold}
    )
    torch.testing.assert_close(loss(**asked)(LOGITS, CLASSES), theirs(LOGITS, CLASSES))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_torchs(smoothing: float) -> None:
    theirs = torch.nn.CrossEntropyLoss(label_smoothing=smoothing)
    ours = loss(label_smoothing=smoothing)
    assert torch.equal(ours(LOGITS, CLASSES), theirs(LOGITS, CLASSES))
    soft = LOGITS.softmax(dim=1).roll(1, 0)
    assert torch.equal(ours(LOGITS, soft), theirs(LOGITS, soft))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_focal_is_its_formula(gamma: float, smoothing: float) -> None:
    logits = LOGITS.double().requires_grad_()
    found = loss(loss="focal", loss_options={"gamma": gamma}, label_smoothing=smoothing)(logits, CLASSES)
    p = logits.exp() / logits.exp().sum(dim=1, keepdim=True)
    shares = torch.eye(5, dtype=torch.float64)[CLASSES] * (1 - smoothing) + smoothing / 5
    plain = -(shares * (1 - p) ** gamma * p.log()).sum(dim=1).mean()
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=0)
    slopes = [torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (found, plain)]
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-12)
    if gamma == 0:  # the cross-entropy
        theirs = loss(label_smoothing=smoothing)(logits, CLASSES)
        torch.testing.assert_close(found, theirs, rtol=1e-12, atol=0)


def test_focal_has_a_gradient_where_the_answer_is_certain() -> None:
    logits = torch.tensor([[200.0, 0.0], [0.0, 200.0]], requires_grad=True)
    found = loss(loss="focal", loss_options={"gamma": 0.5})(logits, torch.tensor([0, 0]))
    torch.testing.assert_close(torch.autograd.grad(found, logits)[0], torch.tensor([[0.0, 0.0], [-0.5, 0.5]]))


@pytest.mark.parametrize("options", [{"gama": 2}, {"gamma": -1}, {"gamma": "a"}, {"gamma": float("nan")}])
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(RecipeError, match=r"train\.loss_options .* do not fit train\.loss=focal"):
        loss(loss="focal", loss_options=options)
    with raises(RecipeError, rule="with effect"):
        loss(loss_options=options)
