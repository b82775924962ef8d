"""What `paceline.fit` is given: other forms of data, wrong arguments, and what it says before the first step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.golden_sentences import raises
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import paceline
from paceline.errors import DataError, ModelError, PacelineError, RecipeError, RunDirectoryError

Fit = Callable[..., Any]
X = torch.randn(140, 5, generator=torch.Generator().manual_seed(0))
Y = X.sum(dim=1)
CLASSES = (Y > 0).long()
HELD_OUT = (X[100:], Y[100:])
LABELLED = {"model": nn.Linear(5, 2), "train_set": (X[:100], CLASSES[:100]), "held_out": (X[100:], CLASSES[100:])}


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.layer(x)
        return answer.squeeze(1)


@pytest.fixture
def fit(runs: Path) -> Fit:
    """``fit("a", …)`` trains in ``runs/a``: a linear regression, where nothing else is given."""

    def run(name: str = "run", **given: Any) -> Any:
        quick = {"parallel.device": "cpu", "parallel.threads": 1, "telemetry.report": False, "telemetry.trackers": []}
        arguments: dict[str, Any] = {"model": Linear, "train_set": (X[:100], Y[:100]), "loss": F.mse_loss, "epochs": 1}
        arguments |= {"batch_size": 20, "lr": 0.05, "quiet": True, "run_dir": runs / name} | given
        if isinstance(arguments.get("overrides", {}), dict):
            arguments["overrides"] = quick | arguments.get("overrides", {})
        return paceline.fit(**arguments)

    return run


# Data

LISTS = (X[:100].tolist(), Y[:100].tolist())


@pytest.mark.parametrize(
    "data",
    [
        LISTS,
        (X[:100], LISTS[1]),
        (list(X[:100]), list(Y[:100])),
        (list(X[:100].numpy()), Y[:100].numpy()),
        {"x": LISTS[0], "targets": LISTS[1]},
    ],
)
def test_lists_of_numbers_are_columns(fit: Fit, data: Any) -> None:
    result = fit("lists", train_set=data)
    assert result.summary.weights_sha256 == fit("tensors").summary.weights_sha256
    assert result.predict(data).shape == (100,)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(X)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (RecipeError, None),
        (RecipeError, 5),
        (RecipeError, lambda needed: needed),
        (DataError, (each for each in X)),
        (DataError, Stream()),
        (DataError, [*LISTS]),
        (DataError, ([[1.0, 2.0], [3.0], [4.0]], [1, 2, 3])),
        (DataError, (LISTS[0], LISTS[1][:50])),
        (DataError, (X[:100].to_sparse(), Y[:100])),
    ],
)
def test_what_is_no_data_is_one_sentence(fit: Fit, kind: Any, data: Any) -> None:
    with raises(kind, key="train_set"):
        fit(train_set=data)


def test_samples_of_lists_are_named(fit: Fit) -> None:
    with raises(ModelError, key="the network"):
        fit(train_set=list(zip(*LISTS, strict=True)))


class Rows(Dataset[Any]):
    def __init__(self, shift: float) -> None:
        self.shift = shift

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> Any:
        return X[i] + self.shift, Y[i]


def test_it_is_said_which_data_differ(fit: Fit) -> None:
    def differs(first: Any, other: Any, key: str) -> None:
        fit(key, **first)
        with raises(RunDirectoryError, key=key):
            fit(key, **(first | other))

    columns: Any = {"held_out": HELD_OUT}
    differs(columns, {"held_out": (X[101:], Y[101:])}, "held_out")
    differs({"train_set": Rows(0)}, {"train_set": Rows(1)}, "train_set")
    with raises(RunDirectoryError, key="held_out"):
        fit("held_out", **(columns | {"held_out": (X[100:] + 1, Y[100:])}))
    with raises(RunDirectoryError, key="held_out"):
        fit("held_out")


# Loss and network


class ForTrainer(Linear):
    """A module as Lightning's users write it."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])


@pytest.mark.parametrize("kind", [Linear, ForTrainer])
def test_without_a_loss_it_is_said_what_to_give(runs: Path, kind: Any) -> None:
    with raises(RecipeError, key="loss"):
        paceline.fit(kind(), (X, Y), run_dir=runs / "run")


def test_a_training_step_is_a_loss(fit: Fit) -> None:
    step = fit("step", model=ForTrainer, loss=lambda model, batch: model.training_step(batch, 0))
    assert step.summary.weights_sha256 == fit("plain").summary.weights_sha256


def test_a_list_of_pairs_is_a_data_set(fit: Fit) -> None:
    pairs = fit("pairs", train_set=[*zip(X[:100], Y[:100], strict=True)])
    assert pairs.summary.weights_sha256 == fit("tensors").summary.weights_sha256


def with_noise(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def of_changed_targets(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - (targets.double() + 1).float()).square().mean()


def of_the_batch(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def by_hand(model: Any, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


@pytest.mark.parametrize("loss", [F.mse_loss, nn.HuberLoss(), with_noise, of_changed_targets, of_the_batch, by_hand])
@pytest.mark.parametrize("held_out", [False, True])
def test_spread_targets_are_refused_before_the_first_step(fit: Fit, runs: Path, loss: Any, *, held_out: bool) -> None:
    wrong = (X[:100], Y[:100, None])
    with pytest.raises(ModelError) as caught:
        fit(loss=loss, **{"held_out" if held_out else "train_set": wrong})
    assert "of shapes [2] and [2, 1], would compare each sample with all 2" in str(caught.value)
    assert not (runs / "run").exists()


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_targets_with_fewer_dimensions_are_refused_before_the_first_step(fit: Fit, runs: Path, shape: Any) -> None:
    x = torch.ones(100, *shape[:-1], 5)
    with raises(ModelError):
        fit(model=nn.Linear(5, shape[-1]), train_set=(x, x.flatten(1)[:, : len(shape)].squeeze(1)))
    assert not (runs / "run").exists()


def ranked(outputs: Tensor, targets: Tensor) -> Tensor:
    differences = targets.float()[:, None] - targets.double()
    return (differences * (outputs[:, None] - outputs)).mean()


def test_targets_may_be_compared_with_one_another(fit: Fit) -> None:
    assert fit(loss=ranked).status == "completed"


class Unmade(nn.Module):
    def __init__(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return x


class Normalised(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 1))  # type: ignore[assignment]  # another network


@pytest.mark.parametrize(
    "given", [{"train_set": (X[:101], Y[:101])}, {"batch_size": 1}, {"overrides": {"batch.micro_size": 1}}]
)
def test_one_sample_is_too_few_for_batch_normalisation(fit: Fit, given: Any) -> None:
    with raises(ModelError, key="batch_size"):
        fit(model=Normalised, **given)


class Broken(Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise AttributeError("this layer has no weights")


def fails(*_: Any) -> Any:
    raise ZeroDivisionError("division by zero")


# Optimizer, schedule and other arguments


class Bare(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        self.parameters, self.lr = list(parameters), lr


BARE = Bare(Linear().parameters())


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})


class OwnGroups(Bare):
    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        self.param_groups = [{"params": [*parameters], "lr": lr}]


class Matrices(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        if any(each.ndim != 2 for group in self.param_groups for each in group["params"]):
            raise RuntimeError("matrices only")


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(9, 5, sparse=True), Linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.table(x.long() % 9).mean(dim=1))


def diverging(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda move: 1.0 - move)


def failing(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda move: 1 / (3 - move))


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("optimizer", {"optimizer": Bare}),
        ("optimizer", {"optimizer": Bare, "model": Linear()}),
        ("optimizer", {"optimizer": lambda parameters: Bare(parameters, 0.1), "lr": None}),
        ("optimizer", {"optimizer": BARE, "lr": None}),
        ("optimizer", {"optimizer": OwnGroups}),
        ("optimizer", {"optimizer": functools.partial(WithoutRate), "lr": None}),
        ("model", {"model": Unmade}),
        ("model", {"model": Unmade()}),
        ("optimizer", {"optimizer": torch.optim.SparseAdam}),
        ("optimizer", {"optimizer": torch.optim.Adam, "model": Words}),
        ("optimizer", {"optimizer": Matrices}),
        ("schedule", {"schedule": diverging}),
        ("schedule", {"schedule": failing}),
        ("schedule", {"schedule": "cosine"}),
        ("collate", {"collate": 5}),
        ("weights", {"weights": fails}),
        ("metrics", {"metrics": {1: F.l1_loss}, "held_out": HELD_OUT}),
        ("metrics['error']", {"metrics": {"error": fails}, "held_out": HELD_OUT}),
        ("metrics['error']", {"metrics": {"error": lambda *_: None}, "held_out": HELD_OUT}),
        ("loss", {"loss": fails}),
        ("the network", {"model": Broken}),
        ("model", {"model": fails}),
        ("model", {"model": fails, "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1), "lr": None}),
        ("run_dir", {"run_dir": "a\0b"}),
        ("run_dir", {"run_dir": "a" * 300}),
        ("overrides", {"overrides": {1: 2}}),
        ("overrides", {"overrides": [1]}),
        ("lr", {"overrides": {"lr": 0.1}}),
    ],
)
def test_a_mistake_is_one_sentence_of_its_argument(fit: Fit, key: str, given: Any) -> None:
    with raises(PacelineError, key=key) as caught:
        fit(**given)
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_numbers(fit: Fit) -> None:
    assert fit(batch_size=np.int64(50), seed=np.int64(3)).summary.step == 2


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_torchscript_is_refused(fit: Fit) -> None:
    with raises(RecipeError, key="model"):
        fit(model=torch.jit.script(nn.Linear(5, 1)))


# After a run


def test_all_mistakes_are_those_of_the_network(fit: Fit) -> None:
    result = fit(**LABELLED, loss=F.cross_entropy, lr=0.001)
    wrong = (result.model(X[100:]).argmax(dim=1) != CLASSES[100:]).nonzero().flatten()
    every = result.mistakes(every=True)
    assert sorted(each["sample"] for each in every) == wrong.tolist()
    kept = {each["sample"]: each for each in result.mistakes()}
    assert all(kept[each["sample"]] == pytest.approx(each) for each in every if each["sample"] in kept)


def test_a_regression_has_no_mistakes(fit: Fit, tmp_path: Path) -> None:
    result = fit(held_out=HELD_OUT)
    for ask in (result.mistakes, result.confusion, lambda: result.mistakes(every=True)):
        with raises(DataError):
            ask()
    result.evaluate(predictions=tmp_path / "held_out.csv")
    first = (tmp_path / "held_out.csv").read_text().splitlines()[1].split(",")
    assert float(first[-1]) == pytest.approx(Y[100].item())
    with raises(DataError):
        fit("none", **LABELLED, loss=F.cross_entropy, overrides={"evaluate.keep_examples": 0}).mistakes()


def test_the_result_refuses_what_it_cannot_use(fit: Fit) -> None:
    result = fit(held_out=HELD_OUT)
    for size in (0, 1.5, None):
        with raises(DataError, key="batch_size"):
            result.predict(X, batch_size=size)
    with raises(RecipeError, key="data"):
        result.predict(None)
    with raises(ModelError):
        result.predict(X[0])
    with raises(RecipeError, key="output"):
        result.export(None)
    with raises(RecipeError, key="format"):
        result.export("model", format=["onnx"])
    with raises(RecipeError, key="predictions"):
        result.evaluate(predictions=5)


def test_a_result_stands_for_its_run(fit: Fit) -> None:
    result = fit()
    assert paceline.audit(result).passed
    assert paceline.report([result]).parent == result.run_dir
