"""Runs that learn: nothing is said about them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn import datasets
from tests.learning.networks import Perceptron, Pixels, Sequences, digits, sentences
from tests.learning.test_planted_faults import Runner, answers, numbers
from torch import Tensor, nn

Split = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


class Layers(nn.Module):
    """Hidden layers as a draw makes them."""

    def __init__(self, inputs: int, outputs: int, draw: random.Random) -> None:
        super().__init__()
        width, depth = draw.choice([32, 64, 128]), draw.choice([1, 2, 3])
        activation, norm = draw.choice([nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU]), draw.choice(["batch", "layer", "none"])
        self.is_normed, dropout = norm != "none", draw.choice([0.0, 0.1, 0.3, 0.5])
        layers: list[nn.Module] = []
        for index in range(depth):
            layers.append(nn.Linear(width if index else inputs, width))
            layers += {"batch": [nn.BatchNorm1d(width)], "layer": [nn.LayerNorm(width)], "none": []}[norm]
            layers += [activation(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(width, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Answers [N, outputs] to inputs [N, inputs]."""
        answer: Tensor = self.layers(x)
        return answer


def _split(x: Any, y: Any) -> Split:
    """Return the first four fifths and the rest, in a drawn order; numbers are standardised."""
    inputs, targets = torch.as_tensor(x).float(), torch.as_tensor(y)
    inputs = (inputs - inputs.mean(0)) / (inputs.std(0) + 1e-6)
    if targets.is_floating_point():
        targets = ((targets - targets.mean()) / targets.std()).float().reshape(len(targets), -1)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    inputs, targets, cut = inputs[order], targets[order], int(0.08 * len(inputs)) * 10  # no last batch of one sample
    return (inputs[:cut], targets[:cut]), (inputs[cut:], targets[cut:])


def _parity() -> Split:
    (x, y), (held_x, held_y) = digits()

    def labels(digit: Tensor) -> Tensor:
        return torch.stack([digit % 2 == 0, digit > 4, digit % 3 == 0], dim=1).float()

    return (x, labels(y)), (held_x, labels(held_y))


def _kind(number: int) -> tuple[str, Split, Any, int]:
    """Return a data set by its number: its name, samples, loss, and how many times as many epochs it needs."""
    made = number // len(_NAMES)
    name = _NAMES[number % len(_NAMES)]
    classes, answer, mean = F.cross_entropy, F.binary_cross_entropy_with_logits, F.mse_loss
    if name == "classes":
        x, y = datasets.make_classification(1500, 20, n_informative=10, n_classes=4, random_state=made)
        return name, _split(x, y), classes, 1
    if name == "rare":
        x, y = datasets.make_classification(2000, 20, n_informative=10, weights=[0.9], flip_y=0, random_state=made)
        return name, _split(x, y), classes, 1
    if name == "line":
        return name, _split(*datasets.make_regression(1000, 20, noise=5, random_state=made)), mean, 1
    simple: dict[str, tuple[Any, Any, int]] = {
        "digits": (digits, classes, 1),
        "pixels": (digits, classes, 1),
        "wine": (lambda: _split(*datasets.load_wine(return_X_y=True)), classes, 4),
        "cancer": (lambda: _split(*datasets.load_breast_cancer(return_X_y=True)), classes, 2),
        "diabetes": (lambda: _split(*datasets.load_diabetes(return_X_y=True)), F.smooth_l1_loss, 4),
        "threes": (answers, answer, 1),
        "several": (_parity, answer, 1),
        "numbers": (numbers, mean, 1),
        "sequences": (sentences, classes, 4),
    }
    make, loss, times = simple[name]
    return name, tuple(make()), loss, times


_NAMES = (
    *("digits", "pixels", "wine", "cancer", "diabetes", "threes", "several", "numbers", "sequences"),
    *("classes", "rare", "line"),
)
_RUNS = 100
_EVERYDAY = (0, 3, 7)


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.everyday) if n in _EVERYDAY else n for n in range(_RUNS)]
)
def test_nothing_is_said_about_a_run_that_learns(number: int, tmp_path: Path) -> None:
    draw, run = random.Random(number), Runner(tmp_path / "run")
    torch.manual_seed(number)
    name, (train, held_out), loss, times = _kind(number)
    outputs = train[1].shape[1] if train[1].is_floating_point() else int(train[1].max()) + 1
    model: Any = Layers(train[0].shape[1], outputs, draw)
    if name in ("pixels", "sequences"):
        model = Pixels() if name == "pixels" else Sequences(256)
    rate = 1e-2 if name == "sequences" else draw.choice([1e-3, 3e-3, 1e-2])
    optimizer = draw.choice([torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam])
    if draw.random() < 0.3 and getattr(model, "is_normed", True):
        optimizer, rate = torch.optim.SGD, 10 * rate
    run.fit(
        *(model, train, held_out),
        loss=loss,
        epochs=times * draw.choice([3, 5, 8]),
        batch_size=draw.choice([8, 16, 32, 64]),
        optimizer=lambda parameters: optimizer(parameters, lr=rate),
        seed=number,
    )
    assert not run.judgement, str(run.judgement)


def _rare() -> Split:
    x, y = datasets.make_classification(2000, 20, n_informative=12, weights=[0.9], flip_y=0.1, random_state=0)
    return _split(x, y)


def _focal(outputs: Tensor, targets: Tensor) -> Tensor:
    logs = outputs.log_softmax(1).gather(1, targets[:, None])
    return (-((1 - logs.exp()) ** 2) * logs).mean()


class _Distances(Perceptron):
    def __init__(self) -> None:
        super().__init__(16)
        self.prototypes = nn.Parameter(torch.randn(10, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(super().forward(x), self.prototypes)


def _nearest(outputs: Tensor, targets: Tensor) -> Tensor:
    return -(-outputs).log_softmax(1).gather(1, targets[:, None]).mean()


@pytest.mark.parametrize(
    ("make", "data", "loss"),
    [
        pytest.param(
            *(lambda: nn.Linear(20, 2), _rare, nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.8]))),
            id="class weights, fewer right than the majority",
            marks=pytest.mark.everyday,
        ),
        pytest.param(Perceptron, digits, _focal, id="own loss"),
        pytest.param(_Distances, digits, _nearest, id="own loss of distances", marks=pytest.mark.everyday),
        pytest.param(lambda: Perceptron(1, end=F.relu), numbers, lambda o, t: F.mse_loss(o, t.abs()), id="positive"),
    ],
)
def test_nothing_is_said_about_an_unusual_loss(make: Any, data: Any, loss: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = Runner(tmp_path / "run")
    run.fit(make(), *data(), loss=loss, epochs=6)
    assert not run.judgement, str(run.judgement)


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("digits", {}),
        ("discs", {}),
        ("figures", {}),
        ("dlrm-synthetic", {"train__duration": "400 steps"}),
        ("shapes-segmentation", {"train__duration": "300 steps"}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
@pytest.mark.thorough
def test_nothing_is_said_about_a_recipe_that_learns(recipe: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    run = Runner(tmp_path / "run")
    run.recipe(recipe, **overrides)
    assert not run.judgement, str(run.judgement)
