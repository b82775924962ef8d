"""`paceline.fit`: your network, data and loss in the same loop, with the same promises."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.data.order import epoch_order

Fit = Callable[..., Any]
X = torch.randn(140, 5, generator=torch.Generator().manual_seed(0))
Y = X @ torch.arange(5.0) + 0.1 * torch.randn(140, generator=torch.Generator().manual_seed(1))
TRAIN, HELD_OUT = (X[:100], Y[:100]), (X[100:], Y[100:])


OTHER = nn.Linear(5, 1)


class Linear(nn.Module):
    def __init__(self, inputs: int = 5) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.layer(x)
        return answer.squeeze(1)


@pytest.fixture
def fit(runs: Path) -> Fit:
    """``fit("a", …)`` trains in ``runs/a``: a linear regression, where nothing else is given."""

    def run(name: str, **given: Any) -> Any:
        quick = {"parallel.device": "cpu", "parallel.threads": 1, "telemetry.report": False, "telemetry.trackers": []}
        arguments: dict[str, Any] = {
            "model": Linear,
            "train_set": TRAIN,
            "loss": F.mse_loss,
            "epochs": 2,
            "batch_size": 20,
        }
        arguments |= {"lr": 0.05, "optimizer": torch.optim.Adam, "quiet": True} | given
        if isinstance(arguments.get("overrides", {}), dict):
            arguments["overrides"] = quick | arguments.get("overrides", {})
        return paceline.fit(**arguments, run_dir=runs / name)

    return run


def by_hand(network: nn.Module, optimizer: Any, *, epochs: int = 2, schedule: Any = None, each: str = "step") -> Any:
    """Train as one would write it, with the samples in Paceline's order."""
    for epoch in range(epochs):
        order = torch.from_numpy(epoch_order(0, epoch, 100).copy())
        for first in range(0, 100, 20):
            ids = order[first : first + 20]
            torch.autograd.backward(F.mse_loss(network(X[ids]), Y[ids]))
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None and each == "step":
                schedule.step()
        if schedule is not None and each == "epoch":
            schedule.step()
    return network.state_dict()


def seeded() -> Linear:
    torch.manual_seed(0)
    return Linear()


def assert_same(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, each in expected.items():
        assert torch.allclose(state[name], each, rtol=0, atol=1e-6), name


@pytest.mark.parametrize("given", ["class", "function", "object"])
def test_the_weights_are_those_of_a_loop_of_one_s_own(fit: Fit, given: str) -> None:
    network, own = seeded(), seeded()
    expected = by_hand(own, torch.optim.Adam(own.parameters(), lr=0.05))
    made: Any = {
        "class": {"optimizer": torch.optim.Adam},
        "function": {"optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.05), "lr": None},
        "object": {"optimizer": torch.optim.Adam(network.parameters(), lr=0.05), "lr": None},
    }[given]
    result = fit("run", model=network, **made)
    assert result.model is network
    assert_same(network.state_dict(), expected)


def test_each_group_has_its_own_schedule(fit: Fit) -> None:
    def groups(parameters: Any) -> Any:
        weight, bias = parameters
        return torch.optim.SGD([{"params": [weight], "lr": 0.01}, {"params": [bias], "lr": 0.1}], momentum=0.9)

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.2], total_steps=20)

    own = seeded()
    optimizer = groups(own.parameters())
    expected = by_hand(own, optimizer, schedule=schedule(optimizer))
    result = fit("run", model=seeded(), optimizer=groups, lr=None, schedule=schedule)
    assert_same(result.model.state_dict(), expected)


class Decaying(torch.optim.lr_scheduler.LRScheduler):
    """Raises the weight decay of one group, for a while, and never the learning rate."""

    def get_lr(self) -> list[float | Tensor]:
        self.optimizer.param_groups[1]["weight_decay"] = 0.5 if 2 <= self.last_epoch < 6 else 0.0
        return [group["lr"] for group in self.optimizer.param_groups]


def cycled(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=10, base_momentum=[0.5, 0.7], max_momentum=[0.6, 0.9]
    )


@pytest.mark.parametrize("schedule", [Decaying, cycled])
def test_all_that_a_scheduler_moves_is_applied(fit: Fit, schedule: Any) -> None:
    def groups(parameters: Any) -> Any:
        return torch.optim.Adam([{"params": [each]} for each in parameters], lr=0.05)

    own = seeded()
    optimizer = groups(own.parameters())
    expected = by_hand(own, optimizer, schedule=schedule(optimizer))
    given: Any = {"optimizer": groups, "lr": None, "schedule": schedule}
    assert_same(fit("run", model=seeded(), **given).model.state_dict(), expected)
    fit("resumed", model=seeded(), **given, overrides={"train.until": "7 steps"})
    assert_same(fit("resumed", model=seeded(), **given).model.state_dict(), expected)


def test_a_resume_says_what_has_changed(fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    fit("run", overrides={"train.until": "3 steps"})
    fit("run", loss=lambda outputs, targets: 2 * F.mse_loss(outputs, targets), quiet=False)
    assert "loss was torch.nn.functional:mse_loss and is now" in capsys.readouterr().out


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_scheduler_moves_as_in_a_loop_of_one_s_own(fit: Fit, interval: str) -> None:
    def schedule(optimizer: Any) -> Any:
        if interval == "epoch":
            return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)

    own = seeded()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.05, momentum=0.9)
    expected = by_hand(own, optimizer, schedule=schedule(optimizer), each=interval)
    result = fit(
        "run",
        model=seeded(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        lr=None,
        schedule=schedule,
        schedule_interval=interval,
    )
    assert_same(result.model.state_dict(), expected)


def test_scores_are_those_of_the_same_weights(fit: Fit) -> None:
    result = fit("run", held_out=HELD_OUT, metrics={"mae": lambda outputs, targets: (outputs - targets).abs()})
    outputs = result.model(HELD_OUT[0])
    assert result.metrics["loss"] == pytest.approx(F.mse_loss(outputs, HELD_OUT[1]).item(), rel=1e-6)
    assert result.metrics["mae"] == pytest.approx(F.l1_loss(outputs, HELD_OUT[1]).item(), rel=1e-6)
    assert torch.equal(result.predict(HELD_OUT[0]), outputs)
    assert torch.equal(result.predict(HELD_OUT), outputs)
    assert [each["mae"] for each in result.history()][-1] == result.metrics["mae"]


class Words(Dataset[dict[str, Tensor]]):
    """Sentences of different length, varied by NumPy's generator."""

    def __init__(self, count: int, seed: int) -> None:
        draws = np.random.default_rng(seed)
        self.words = [draws.integers(1, 20, draws.integers(3, 12)) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        words = torch.tensor(self.words[i])
        kept = torch.tensor(np.random.rand(len(words)) < 0.9)  # noqa: NPY002  # as people write it
        return {"tokens": words * kept, "labels": (words * 3 + 1) % 20}


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    def pad(key: str, value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence([each[key] for each in samples], batch_first=True, padding_value=value)

    return {"tokens": pad("tokens", 0), "labels": pad("labels", -100)}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dropout, self.tag = nn.Embedding(20, 8), nn.Dropout(0.1), nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.tag(self.dropout(self.embed(tokens)))
        return scores


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def test_loader_processes_change_no_bit(fit: Fit) -> None:
    words = {"model": Tagger, "train_set": Words(80, 1), "held_out": Words(20, 2), "loss": token_loss}
    words |= {"collate": padded, "weights": lambda sample: len(sample["tokens"]), "lr": 0.02}
    found = [fit(f"{workers}", **words, workers=workers) for workers in (0, 3)]
    assert len({each.summary.weights_sha256 for each in found}) == 1
    assert len({each.metrics["loss"] for each in found}) == 1


def test_a_mean_over_tokens_is_that_of_all_tokens(fit: Fit) -> None:
    result = fit(
        "run",
        model=Tagger,
        train_set=Words(40, 1),
        held_out=Words(20, 2),
        loss=token_loss,
        collate=padded,
        weights=lambda sample: len(sample["tokens"]),
    )
    predicted = result.predict(Words(20, 2), batch_size=20)
    samples = [
        {"tokens": torch.tensor(each), "labels": torch.tensor((each * 3 + 1) % 20)} for each in Words(20, 2).words
    ]
    assert predicted.shape[:2] == padded(samples)["labels"].shape
    assert result.metrics["loss"] > 0


def test_a_loss_of_each_sample_is_weighted(fit: Fit) -> None:
    counts = np.arange(1, 101)

    def weighted(model: Any, batch: Any) -> Tensor:
        inputs, targets, weights = batch
        loss: Tensor = ((model(inputs) - targets).square() * weights).sum() / weights.sum()
        return loss

    each = fit("each", loss=lambda outputs, targets: (outputs - targets).square(), weights=counts)
    mean = fit("mean", loss=weighted, train_set=(*TRAIN, torch.from_numpy(counts)), weights=counts)
    assert_same(each.model.state_dict(), mean.model.state_dict())
    plain = fit("plain")
    assert not torch.equal(each.model.state_dict()["layer.bias"], plain.model.state_dict()["layer.bias"])


class Rotated(Dataset[Any]):
    def __init__(self) -> None:
        albumentations = pytest.importorskip("albumentations")
        self.vary = albumentations.Compose([albumentations.Affine(rotate=(-30, 30)), albumentations.GaussNoise(p=1)])

    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> Any:
        image = np.full((5, 5, 1), i / 60, dtype=np.float32)
        return torch.from_numpy(self.vary(image=image)["image"]).flatten()[:5], Y[i]


def test_albumentations_draw_alike_in_every_process(fit: Fit) -> None:
    found = [fit(f"{workers}", train_set=Rotated(), workers=workers) for workers in (0, 3)]
    assert len({each.summary.weights_sha256 for each in found}) == 1


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(5, 5, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        answer: Tensor = self.layer(left, right)
        return answer.squeeze(1)


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> Any:
        return (X[i], X[i].flip(0)), Y[i]


def test_a_network_of_two_inputs(fit: Fit) -> None:
    columns = fit("columns", model=Both, train_set=(X[:100], X[:100].flip(1), Y[:100]))
    pairs = fit("pairs", model=Both, train_set=Pairs())
    named = fit("named", model=Both, train_set={"left": X[:100], "right": X[:100].flip(1), "targets": Y[:100]})
    assert len({each.summary.weights_sha256 for each in (columns, pairs, named)}) == 1
    assert columns.predict((X[:7], X[:7].flip(1))).shape == (7,)


def test_a_loss_of_the_model_and_the_batch(fit: Fit) -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        inputs, targets = batch
        return F.mse_loss(model(inputs), targets)

    metrics = {"mae": lambda outputs, targets: (outputs - targets).abs()}
    full = fit("full", loss=loss, held_out=HELD_OUT, metrics=metrics)
    short = fit("short", held_out=HELD_OUT, metrics=metrics)
    assert full.summary.weights_sha256 == short.summary.weights_sha256
    assert full.metrics["mae"] == short.metrics["mae"]
    assert full.metrics["loss"] == pytest.approx(short.metrics["loss"], rel=1e-6)


def test_a_data_loader_is_taken_apart(fit: Fit, runs: Path) -> None:
    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return 100

        def __getitem__(self, i: int) -> Any:
            return X[i], Y[i]

    loader = DataLoader(Rows(), batch_size=20, shuffle=True, num_workers=1, drop_last=True)
    loaded = fit("loader", train_set=loader, batch_size=None)
    assert loaded.summary.weights_sha256 == fit("columns").summary.weights_sha256
    plan = json.loads((runs / "loader" / "plan.json").read_text())
    assert plan["data"]["workers"] == 1
    assert "train_set: an epoch's smaller last batch is used too" in plan["left_out"]


def test_torchmetrics_are_computed_over_all_samples(fit: Fit) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    score = torchmetrics.R2Score()
    result = fit("run", held_out=HELD_OUT, metrics={"r2": score})
    assert result.metrics["r2"] == pytest.approx(
        torchmetrics.R2Score()(result.model(X[100:]), Y[100:]).item(), abs=1e-6
    )


def test_keys_of_a_recipe_hold(fit: Fit, runs: Path) -> None:
    result = fit("run", held_out=HELD_OUT, overrides={"train.ema": 0.9, "train.duration": "3 steps"}, epochs=None)
    assert result.summary.step == 3
    assert {each["weights"] for each in result.history()} == {"model", "ema"}
    plan = json.loads((runs / "run" / "plan.json").read_text())
    assert plan["precision"] == "fp32"


def test_other_data_do_not_continue_a_run(fit: Fit) -> None:
    fit("run", overrides={"train.until": "1 epoch"})
    with pytest.raises(paceline.PacelineError, match=r"the run in .* had another train_set .*that of train_set\[0\]"):
        fit("run", train_set=(X[:100] + 1, Y[:100]))
    assert fit("run").status == "completed"


class Clock(Pairs):
    def __getitem__(self, i: int) -> Any:
        import time

        return X[i] * (1 + time.time() % 1e-3 * 1e3), Y[i]  # differs by a thousandth after a microsecond


def test_data_that_are_not_pure_are_named_before_the_first_step(fit: Fit, runs: Path, caplog: Any) -> None:
    fit("run", train_set=Clock())
    assert "train_set[0] differs each time that it is read: it reads the clock (time)" in caplog.text
    plan = json.loads((runs / "run" / "plan.json").read_text())
    assert plan["data"]["not_repeatable"][0].startswith("train_set[0]")


class Gone(Pairs):
    def __getitem__(self, i: int) -> Any:
        return torch.zeros(i % 3 + 1), Y[i]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"train_set": X}, "the samples have no targets"),
        ({"train_set": Gone()}, "give collate="),
        ({"train_set": (X.double(), Y)}, "give float32"),
        ({"train_set": (torch.zeros(100, 7), Y[:100])}, "the network failed on a tensor [2, 7]"),
        ({"model": lambda: 3}, "model returned a int"),
        ({"model": "resnet18"}, "model is a str"),
        ({"loss": None}, "loss is missing; give loss=torch.nn.functional.cross_entropy"),
        ({"loss": lambda outputs, targets: 1.0}, "loss returned a float"),
        (
            {"loss": lambda outputs, targets: outputs[:, None] - targets},
            "[2, 1] and [2], would compare each",
        ),
        ({"held_out": HELD_OUT, "metrics": {"error": F.l1_loss}}, "one value for each sample"),
        ({"metrics": {"error": 3}}, "metrics has 'error': int"),
        ({"metrics": {"error": F.l1_loss}}, "give held_out"),
        ({"optimizer": torch.optim.LBFGS}, "several times in a step"),
        ({"optimizer": torch.optim.Adam(Linear().parameters())}, "parameters that are not the model's"),
        ({"optimizer": lambda parameters: 3, "lr": None}, "optimizer gave a int"),
        ({"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1.0)}, "optimizer is a function that sets it"),
        ({"schedule": 3}, "schedule is a int"),
        ({"schedule": torch.optim.lr_scheduler.ReduceLROnPlateau}, "follows a metric"),
        (
            {"schedule": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3)},
            "ends before the run",
        ),
        ({"schedule_interval": "day"}, "choose 'step' or 'epoch'"),
        ({"schedule": torch.optim.lr_scheduler.CosineAnnealingLR}, "schedule failed with TypeError"),
        ({"optimizer": lambda _: torch.optim.SGD(OTHER.parameters(), lr=1.0), "lr": None}, "0 of the 2 parameters"),
        ({"optimizer": lambda p: torch.optim.SGD(list(p)[:1], lr=1.0), "lr": None}, "1 of the 2 parameters"),
        ({"loss": nn.MSELoss}, "give MSELoss()"),
        ({"loss": nn.Sequential(nn.Linear(1, 1))}, "its own parameters (0.weight"),
        ({"model": nn.Linear}, "model failed with TypeError"),
        ({"model": lambda: nn.LazyLinear(1)}, "layers without sizes"),
        ({"model": nn.Identity()}, "no parameter that can be trained"),
        ({"model": nn.Linear(5, 1, device="meta")}, "device meta"),
        ({"metrics": [F.l1_loss]}, "give a dict of functions"),
        ({"overrides": "train.ema=0.9"}, "give a dict, or a list of texts"),
        ({"processes": 0}, "a whole number from 1"),
        ({"weights": lambda sample: 1.5}, "one whole number"),
        ({"weights": np.ones(3, int)}, "3 numbers for 140 samples"),
        ({"weights": np.ones(140)}, "one whole number"),
        ({"overrides": {"train.duration": "3 steps"}}, "leave one out"),
        ({"overrides": {"model.name": "resnet18"}}, "an object of yours"),
        ({"batch_size": 0}, "batch_size: found 0"),
    ],
)
def test_mistakes_are_one_sentence_before_the_first_step(fit: Fit, runs: Path, given: Any, words: str) -> None:
    if "weights" in given:
        given = given | {"train_set": (X, Y)}
    with pytest.raises(paceline.PacelineError) as caught:
        fit("run", **given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list((runs / "run").glob("checkpoints/step-*"))
