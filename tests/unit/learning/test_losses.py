"""What loss functions are given, in sums: compared with figures computed from all samples at once."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.learning.losses import LossWatcher, described, merged, note_own
from paceline.learning.observer import NetworkObserver

DRAWN = torch.Generator().manual_seed(0)
LOGITS, LABELS = torch.randn(60, 4, generator=DRAWN), torch.randint(0, 4, (60,), generator=DRAWN)
NUMBERS = torch.randn(60, 2, generator=DRAWN)


def watched(call: Any, parts: int = 1) -> Any:
    """Return the figures of a loss over all samples, given to several watchers in turn."""
    rows = torch.arange(60).chunk(parts)
    found = []
    for each in rows:
        watcher = LossWatcher()
        with watcher:
            call(each)
        found.append(watcher.drain())
    return described(merged(found))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_classes(parts: int, reduction: str) -> None:
    figures = watched(lambda rows: F.cross_entropy(LOGITS[rows], LABELS[rows], reduction=reduction), parts)
    found, shares = figures["cross_entropy"], LABELS.bincount().double() / 60
    assert found["labels"] == found["groups"] == 60
    assert found["majority"] == pytest.approx(float(shares.max()), rel=1e-5)
    spread = float(-(shares * shares.log()).sum())
    assert found["prior"] == pytest.approx(min(spread + 3 / 120, math.log(4)), rel=1e-5)
    right = (LOGITS.argmax(1) == LABELS).double()
    assert found["accuracy"] == pytest.approx(float(right.mean()), rel=1e-5)
    assert found["accuracy_error"] == pytest.approx(float(right.std(correction=0)) / math.sqrt(60), rel=1e-4)
    assert found["loss"] == pytest.approx(float(F.cross_entropy(LOGITS, LABELS)), rel=1e-5)
    sure = LOGITS.softmax(1).amax(1)
    counts = np.histogram(sure.numpy(), bins=10, range=(0, 1))[0].tolist()
    assert [count for count, _ in found["confidence"]] == counts


def test_classes_of_places_with_some_left_out() -> None:
    logits, labels = LOGITS.reshape(15, 4, 4).mT, LABELS.reshape(15, 4).clone()
    labels[:, 0] = -100
    found = watched(lambda _: F.cross_entropy(logits, labels))["cross_entropy"]
    kept = labels != -100
    assert (found["labels"], found["groups"]) == (45, 15)
    assert found["accuracy"] == pytest.approx(float((logits.argmax(1) == labels)[kept].double().mean()), rel=1e-5)
    assert found["loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)


def test_class_weights_count_as_in_the_loss() -> None:
    weight = torch.tensor([4.0, 1.0, 1.0, 0.5])
    found = watched(lambda rows: F.cross_entropy(LOGITS[rows], LABELS[rows], weight), 3)["cross_entropy"]
    each = weight[LABELS].double()
    right = (LOGITS.argmax(1) == LABELS).double()
    assert found["accuracy"] == pytest.approx(float((each * right).sum() / each.sum()), rel=1e-5)
    assert found["majority"] == pytest.approx(float((LABELS.bincount() * weight).max() / each.sum()), rel=1e-5)
    assert found["loss"] == pytest.approx(float(F.cross_entropy(LOGITS, LABELS, weight)), rel=1e-5)


def test_the_loss_of_each_sample_after_the_mean_counts_once() -> None:
    watcher = LossWatcher()
    with watcher:
        F.cross_entropy(LOGITS, LABELS)
        F.cross_entropy(LOGITS, LABELS, reduction="none")
    assert described(watcher.drain())["cross_entropy"]["groups"] == 60


def test_an_own_loss_is_compared_by_its_answers() -> None:
    def own(answer: Tensor, target: Tensor) -> Any:
        watcher = LossWatcher()
        with watcher:
            note_own(answer, target)
        return described(watcher.drain())

    note_own(LOGITS, LABELS)  # without a watcher, nothing happens
    found = own(LOGITS, LABELS)["own_classes"]
    assert found["accuracy"] == pytest.approx(float((LOGITS.argmax(1) == LABELS).double().mean()), rel=1e-5)
    assert found["loss"] is None
    assert own(-2 * NUMBERS, NUMBERS)["own_numbers"]["correlation"] == pytest.approx(1)
    assert not own(torch.cat((LOGITS, LOGITS), dim=1), LABELS)["own_classes"]  # eight numbers for four classes
    assert own(LOGITS[:, :1], LABELS) == {}


def test_numbers_by_column() -> None:
    target = NUMBERS * torch.tensor([1.0, 100.0]) + 5
    answer = target + torch.randn(60, 2, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, 100.0])
    found = watched(lambda rows: F.mse_loss(answer[rows], target[rows]), 2)["mse_loss"]
    r2 = 1 - ((answer - target) ** 2).mean(0) / target.var(0, correction=0)
    assert found["r2"] == pytest.approx(float(r2.mean()), rel=1e-4)
    each = [float(torch.corrcoef(torch.stack((answer[:, i], target[:, i])))[0, 1]) for i in range(2)]
    assert found["correlation"] == pytest.approx(sum(each) / 2, rel=1e-4)
    assert found["loss"] == pytest.approx(float(F.mse_loss(answer, target)), rel=1e-5)


def test_probabilities_are_recognised() -> None:
    found = watched(lambda rows: F.cross_entropy(LOGITS[rows].softmax(1), LABELS[rows]))["cross_entropy"]
    assert found["off_one"] < 1e-5
    assert 0 <= found["low"] < found["high"] <= 1
    assert watched(lambda rows: F.cross_entropy(LOGITS[rows], LABELS[rows]))["cross_entropy"]["off_one"] > 0.1
    logarithms = watched(lambda rows: F.nll_loss(LOGITS[rows].log_softmax(1), LABELS[rows]))["nll_loss"]
    assert logarithms["off_one"] < 1e-5
    assert watched(lambda rows: F.nll_loss(LOGITS[rows], LABELS[rows]))["nll_loss"]["off_one"] > 0.1


def test_modules_call_the_same_functions_and_other_calls_say_nothing() -> None:
    assert set(watched(lambda rows: nn.CrossEntropyLoss()(LOGITS[rows], LABELS[rows]))) == {"cross_entropy"}
    assert watched(lambda rows: LOGITS[rows].softmax(1).log().mean()) == {}
    # What it cannot understand says nothing either, and the call runs.
    with pytest.warns(UserWarning, match="target size"):
        assert watched(lambda rows: F.mse_loss(NUMBERS[rows], NUMBERS[rows][:, :1])) == {}


class _Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            raise ValueError("one")
        F.mse_loss(x, x)
        return x


def test_a_networks_own_calls_are_not_watched() -> None:
    module, watcher = _Inner(), LossWatcher()
    with watcher.around(module):
        with pytest.raises(ValueError, match="one"):
            module(NUMBERS[:1])
        F.l1_loss(module(NUMBERS), NUMBERS)
    assert set(watcher.drain()) == {"l1_loss"}
    with watcher:
        module(NUMBERS)
    assert set(watcher.drain()) == {"mse_loss"}


def test_another_mode_stays_around_a_networks_calls() -> None:
    module, watcher = _Inner(), LossWatcher()
    with watcher.around(module), torch.device("meta"):
        assert module(torch.zeros(2)).device.type == "meta"
    assert torch.zeros(2).device.type == "cpu"


def test_an_observed_network_is_copied_and_stored_without_its_observer() -> None:
    network, stored = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout()), io.BytesIO()
    observer = NetworkObserver(network, hooked=True)
    observer.begin(statistics=True)
    with observer.around_forward(network):
        torch.save(network, stored)
        stored.seek(0)
        for each in (copy.deepcopy(network), torch.load(stored, weights_only=False)):
            each(torch.zeros(4, 2))
        network(torch.zeros(4, 2))
    assert observer.end()()["calls"] == 1
