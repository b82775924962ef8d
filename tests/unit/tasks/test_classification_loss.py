"""Training losses are those of timm and of the formulas."""

from __future__ import annotations

import pytest
import torch

from paceline.recipe.load import stored_recipe
from paceline.tasks.image_classification import ClassificationLoss

timm_loss = pytest.importorskip("timm.loss")

LOGITS = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(8) % 5


def loss(**train: object) -> ClassificationLoss:
    overrides = {f"train.{key}": value for key, value in train.items()}
    return ClassificationLoss(stored_recipe({}, "plain", overrides).train)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("threshold", [None, 0.2])
def test_bce_is_timms(smoothing: float, threshold: float | None) -> None:
    theirs = timm_loss.BinaryCrossEntropy(smoothing=smoothing, target_threshold=threshold)
    asked = {"loss": "bce", "label_smoothing": smoothing} | (
        {} if threshold is None else {"target_threshold": threshold}
    )
    torch.testing.assert_close(loss(**asked)(LOGITS, CLASSES), theirs(LOGITS, CLASSES))


def test_bce_of_mixed_targets_asks_for_both_classes() -> None:
    mixed = 0.7 * torch.eye(5)[CLASSES] + 0.3 * torch.eye(5)[CLASSES.roll(1)]
    found = loss(loss="bce", target_threshold=0.2)(LOGITS, mixed)
    both = torch.eye(5)[CLASSES] + torch.eye(5)[CLASSES.roll(1)]
    torch.testing.assert_close(found, torch.nn.functional.binary_cross_entropy_with_logits(LOGITS, both))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_torchs(smoothing: float) -> None:
    theirs = torch.nn.CrossEntropyLoss(label_smoothing=smoothing)
    ours = loss(label_smoothing=smoothing)
    assert torch.equal(ours(LOGITS, CLASSES), theirs(LOGITS, CLASSES))
    soft = LOGITS.softmax(dim=1).roll(1, 0)
    assert torch.equal(ours(LOGITS, soft), theirs(LOGITS, soft))
    timms = timm_loss.LabelSmoothingCrossEntropy(smoothing)
    torch.testing.assert_close(ours(LOGITS, CLASSES), timms(LOGITS, CLASSES))
