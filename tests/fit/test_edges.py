"""`paceline.fit` at its edges: what is refused, what is named, and what is left as it was."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.golden_sentences import raises
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline
from paceline.data.objects.purity import Reading
from paceline.data.objects.samples import take_apart
from paceline.errors import DataError, ModelError, RecipeError, RunDirectoryError, TrainingError
from paceline.host.world import World
from paceline.tasks.given_objects import fingerprint
from paceline.tasks.object_checks import first_not_finite

Fit = Callable[..., Any]
X = torch.randn(140, 5, generator=torch.Generator().manual_seed(0))
Y, CLASSES = X.sum(dim=1), (X.sum(dim=1) > 0).long()
TRAIN, HELD_OUT = (X[:100], Y[:100]), (X[100:], Y[100:])
LABELLED = {"model": nn.Linear(5, 2), "train_set": (X[:100], CLASSES[:100]), "loss": F.cross_entropy}
WEIGHT = torch.tensor([1.0, 5.0])
DIVIDED = {"batch.micro_size": 10}


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

    def run(name: str = "run", **given: Any) -> Any:
        quick = {"parallel.device": "cpu", "parallel.threads": 1, "telemetry.report": False, "telemetry.trackers": []}
        arguments: dict[str, Any] = {"model": Linear, "train_set": TRAIN, "loss": F.mse_loss, "lr": 0.05, "quiet": True}
        arguments |= {"epochs": 2, "batch_size": 20, "run_dir": runs / name} | given
        if isinstance(arguments.get("overrides", {}), dict):
            arguments["overrides"] = quick | arguments.get("overrides", {})
        return paceline.fit(**arguments)

    return run


# Losses that are not means


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, weight=WEIGHT)


def with_ignored(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, ignore_index=0)


def of_the_batch(model: Any, batch: Any) -> Tensor:
    return summed(model(batch[0]), batch[1])


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(weight=WEIGHT), summed, weighted, with_ignored, of_the_batch])
def test_a_loss_that_is_not_a_mean_is_not_divided(fit: Fit, caplog: pytest.LogCaptureFixture, loss: Any) -> None:
    given = LABELLED | {"loss": loss}
    with raises(ModelError, key="loss", value=2):
        fit(**given, overrides=DIVIDED)
    assert "note: loss is not the mean" not in caplog.text
    assert fit(**given).status == "completed"
    assert "note: loss is not the mean" in caplog.text


def with_noise(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0] + torch.randn_like(batch[0])), batch[1])


def of_rows(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square()


@pytest.mark.parametrize(
    "given",
    [
        {},
        LABELLED,
        {"loss": with_noise},
        {"loss": of_rows, "weights": np.arange(1, 101)},
        {"loss": lambda model, batch: F.mse_loss(model(batch[0]), batch[1])},
    ],
)
def test_a_mean_may_be_divided(fit: Fit, caplog: pytest.LogCaptureFixture, given: Any) -> None:
    assert fit(**given, overrides=DIVIDED).status == "completed"
    assert not caplog.text


# A completed run


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs()


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square()


def test_a_completed_run_is_not_given_for_another(fit: Fit) -> None:
    first = {"held_out": HELD_OUT, "metrics": {"error": absolute}, "model": Linear, "loss": nn.HuberLoss()}
    result = fit(**first)
    assert fit(**first).was_complete
    others = {"loss": nn.HuberLoss(delta=2.0), "metrics": {"error": squares}, "model": lambda: Linear(5)}
    for name, other in others.items():
        with raises(RunDirectoryError, key=name, path=result.run_dir):
            fit(**(first | {name: other}))
    data = X[:100].clone()
    data[3, 2] += 1
    with raises(RunDirectoryError, key="train_set"):
        fit(**first, train_set=(data, Y[:100]))


class Focal(nn.Module):
    def __init__(self, gamma: float = 2.0) -> None:
        super().__init__()
        self._settings = {"gamma": (gamma,)}

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets) * self._settings["gamma"][0]


class Scaled(Linear):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.layer.scale = scale  # type: ignore[assignment]  # a setting, not a module


class Called:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs, targets) * self.scale


def given_optimizer(decay: float) -> dict[str, Any]:
    network = Linear()
    return {"model": network, "optimizer": torch.optim.AdamW(network.parameters(), weight_decay=decay), "lr": None}


def made_optimizer(decay: float) -> dict[str, Any]:
    return {"optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=decay), "lr": None}


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("loss", lambda setting: {"loss": Focal(setting)}),
        ("loss", lambda setting: {"loss": Called(setting)}),
        ("loss", lambda setting: {"loss": Called(setting).__call__}),
        ("loss", lambda setting: {"loss": lambda outputs, targets: setting * F.mse_loss(outputs, targets)}),
        ("model", lambda setting: {"model": Scaled(setting)}),
        ("optimizer", given_optimizer),
        ("optimizer", made_optimizer),
    ],
)
def test_a_completed_run_is_not_given_for_other_settings(
    fit: Fit, key: str, given: Callable[[float], dict[str, Any]]
) -> None:
    result = fit(**given(2.0), epochs=1)
    assert fit(**given(2.0), epochs=1).was_complete
    with raises(RunDirectoryError, key=key, path=result.run_dir):
        fit(**given(5.0), epochs=1)


def test_a_module_with_other_settings_has_no_name(fit: Fit) -> None:
    def names(**given: Any) -> Any:
        return fit(given["name"], loss=given["loss"], model=given["model"], epochs=1).task.recipe.objects

    default = names(name="default", loss=Focal(), model=Scaled())
    assert (default["loss"], default["model"]) == (f"{__name__}:Focal", f"{__name__}:Scaled")
    other = names(name="other", loss=Focal(5.0), model=Scaled(3.0))
    assert not {"loss", "model"} & {key for key, name in other.items() if ":" in name}


def test_a_digest_is_of_code_and_not_of_what_a_run_changes() -> None:
    network = nn.LSTM(3, 3)
    network.own = [network]  # type: ignore[assignment]  # a list that holds the network itself
    compiled = torch.compile(F.mse_loss, backend="eager")
    before = fingerprint(network), fingerprint(compiled)
    network.eval()(torch.zeros(2, 3))
    nn.init.zeros_(network.weight_hh_l0)
    compiled(X, X)
    assert (fingerprint(network), fingerprint(compiled)) == before


@pytest.mark.parametrize("held", ["all", "trained"])
def test_an_optimizer_may_hold_parameters_that_stay(fit: Fit, held: str) -> None:
    network = nn.Sequential(nn.Linear(5, 5), Linear())
    network[0].requires_grad_(requires_grad=False)
    before = network[0].weight.clone(), network[1].layer.weight.clone()
    parameters = {"all": network.parameters(), "trained": network[1].parameters()}[held]
    fit(model=network, optimizer=torch.optim.AdamW(parameters, lr=0.1), lr=None)
    assert torch.equal(network[0].weight, before[0])
    assert not torch.equal(network[1].layer.weight, before[1])


# Interrupted


class Interrupts:
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, step: int) -> None:
        if step == self.at:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_run_has_the_metrics_of_its_last_evaluation(fit: Fit) -> None:
    for step in (7, 8):  # the second launch evaluates nothing
        result = fit(held_out=HELD_OUT, callbacks=[Interrupts(step)])
        assert (result.status, result.summary.step, result.summary.details["ending"]) == ("stopped", step, "signal")
        assert result.metrics["loss"] == result.history()[-1]["loss"]
        assert "stopped by a signal" in repr(result)


# Arguments


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("resume", "maybe"), ("resume", True), ("run_dir", 5), ("epochs", "3"), ("epochs", -1), ("batch_size", "20")),
        *(("seed", -1), ("processes", 0), ("processes", True), ("workers", -1), ("lr", "fast"), ("callbacks", 5)),
        *(("overrides", ["train.ema"]), ("overrides", 5)),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named(fit: Fit, key: str, value: Any) -> None:
    with raises(RecipeError, key=key):
        fit(**{key: value})


def test_differences_are_named_by_argument(fit: Fit) -> None:
    fit()
    for given in ({"lr": 0.1}, {"batch_size": 10}):
        with raises(RunDirectoryError):
            fit(**given)


def test_records_of_an_unknown_kind_are_refused(fit: Fit) -> None:
    with raises(RecipeError, key="kind", value="bogus"):
        fit().history("bogus")


# Samples


class Short(Dataset[Any]):
    def __len__(self) -> int:
        return 120

    def __getitem__(self, i: int) -> Any:
        return TRAIN[0][i], TRAIN[1][i]


class Fractional(Short):
    def __len__(self) -> int:
        return 99.5  # type: ignore[return-value]  # noqa: PLE0303  # the mistake under test


def changed(column: Tensor, row: int, value: float) -> Tensor:
    column = column.clone()
    column[row] = value
    return column


WRONG_CLASS = (X[:100], changed(CLASSES[:100], 50, 7))
WITH_NAN = (changed(X[:100], 60, torch.nan), Y[:100])


class Labels(Dataset[Any]):
    """Class numbers of which one is wrong, where it is found only when it is read."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> Any:
        return WRONG_CLASS[0][i], WRONG_CLASS[1][i]


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (DataError, {"train_set": Short()}, "its len() is 120"),
        (DataError, {"train_set": Fractional()}, "a len() that fails"),
        (ModelError, {"train_set": {"a": X[:100], "label": Y[:100]}}, "forward takes 'x', and the samples have 'a'"),
        (ModelError, LABELLED | {"train_set": WRONG_CLASS}, "train_set[50] has the target 7"),
        (ModelError, LABELLED | {"train_set": Labels()}, "train_set[50] has the target 7"),
        (ModelError, LABELLED | {"held_out": WRONG_CLASS}, "held_out[50] has the target 7"),
        (TrainingError, {"train_set": WITH_NAN}, "lower lr"),
        (TrainingError, {"train_set": WITH_NAN}, "train_set[60] holds nan"),
        (TrainingError, {"held_out": WITH_NAN}, "held_out[60] holds nan"),
    ],
)
def test_the_sample_is_named(fit: Fit, kind: Any, given: Any, words: str) -> None:
    with raises(kind) as caught:
        fit(**given)
    assert words in str(caught.value)


class Masked(Labels):
    """Slow samples, of which a late one holds nan."""

    reads = 0

    def __getitem__(self, i: int) -> Any:
        self.reads += 1
        return WITH_NAN[0][i], WITH_NAN[1][i]


def test_little_is_read_to_name_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Masked()
    samples = take_apart(data, "train_set")
    assert first_not_finite(samples, [3, 60]) == 60
    assert data.reads <= 3
    monkeypatch.setattr("paceline.tasks.object_checks._SECONDS", 0)
    assert first_not_finite(samples, range(100)) is None
    assert data.reads <= 4


class Rows(Short):
    def __len__(self) -> int:
        return 100


def test_several_processes_choose_loader_processes_alike(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    result = fit(train_set=Rows())
    found = set()
    for seconds in (1e-7, 1.0):
        reading = Reading(seconds=seconds)
        monkeypatch.setattr("paceline.tasks.objects.read_again", lambda _, reading=reading: reading)
        facts = result.make_task(result.task.recipe).data_facts(World(world_size=2, local_world_size=2))
        found.add(facts.description["workers"])
    assert len(found) == 1


# After a run


def test_the_generators_are_left_as_they_were(fit: Fit, tmp_path: Path) -> None:
    def states() -> Any:
        # NumPy's global generator is the one that users share with fit; its state is a tuple, typed as tuple or dict.
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]  # noqa: NPY002

    before = states()
    fit(held_out=HELD_OUT).predict(X)
    assert states() == before
    small = {"model.options": {"width": 4, "stages": 1, "depth": 1}, "train.duration": "1 steps"}
    quick = {"parallel.device": "cpu", "telemetry.report": False, "telemetry.trackers": []}
    paceline.train("digits", overrides=small | quick, run_dir=tmp_path / "train", quiet=True).model  # noqa: B018  # building it draws
    assert states() == before


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(9, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        answer: Tensor = self.layer(x + self.embed(token))
        return answer.squeeze(1)


TOKENS = torch.arange(100) % 9


@pytest.mark.parametrize("form", ["safetensors", "torch-export", "onnx"])
@pytest.mark.parametrize(
    "given", [{}, {"model": Pair, "train_set": {"token": TOKENS, "x": X[:100], "labels": Y[:100]}}]
)
def test_a_network_of_tensors_is_exported(fit: Fit, tmp_path: Path, form: str, given: Any) -> None:
    if form == "onnx":
        for library in ("onnx", "onnxruntime", "onnxscript"):
            pytest.importorskip(library)
    result = fit(**given)
    file = result.export(tmp_path / f"model.{ {'torch-export': 'pt2'}.get(form, form) }", format=form)
    inputs = (X[:7], TOKENS[:7])[: 1 + bool(given)]
    if form == "torch-export":
        answers = torch.export.load(file).module()(*inputs)
        assert torch.allclose(answers, result.model(*inputs), atol=1e-5)
    assert file.is_file()


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        answer: Tensor = self.layer(x - z)
        return answer.squeeze(1)


def test_a_loss_of_the_whole_batch_needs_no_targets(fit: Fit, tmp_path: Path) -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        outputs: Tensor = model(**batch)
        return outputs.square().mean()

    columns = {"x": X[:100], "z": X[:100].flip(1)}
    result = fit(model=Both, train_set=columns, held_out=columns, loss=loss)
    expected = result.model(**columns)
    assert torch.equal(result.predict(columns), expected)
    exported = torch.export.load(result.export(tmp_path / "model.pt2", format="torch-export")).module()
    assert torch.allclose(exported(*columns.values()), expected, atol=1e-5)


def test_what_cannot_be_exported_is_named(fit: Fit, tmp_path: Path) -> None:
    result = fit(train_set=(X[:100].double(), Y[:100]), model=lambda: nn.Sequential(Linear()).double(), loss=by_float)
    with raises(ModelError, key="format", value="torch-export"):
        result.export(tmp_path / "model.pt2", format="torch-export")
    with raises(RecipeError, key="format", value="bogus"):
        result.export(tmp_path / "model.pt2", format="bogus")


def by_float(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs.float(), targets)


def samples() -> Any:
    return TRAIN


def test_commands_point_to_the_result(fit: Fit) -> None:
    with raises(RecipeError, key="objects.loss"):  # by name, its setting would be lost
        paceline.evaluate(fit("other", train_set=samples, loss=nn.HuberLoss(delta=2.0)).run_dir, trust_code=True)
    result = fit(model=lambda: Linear(5))
    with raises(RecipeError, key="objects.model"):
        paceline.evaluate(result.run_dir, trust_code=True)
    with raises(RecipeError, key="objects.model"):
        paceline.check_data(result.run_dir, trust_code=True)
    with raises(DataError):
        result.evaluate()
    with raises(DataError):
        result.mistakes()


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        answer: Tensor = self.layer(left + right)
        return answer


def test_examples_of_a_network_with_named_inputs_are_kept(fit: Fit) -> None:
    data = {"left": X[:100], "right": X[:100].flip(1), "targets": (Y[:100] > 0).long()}
    result = fit(model=Named, train_set=data, held_out=data, loss=F.cross_entropy)
    assert (result.run_dir / "evaluation").is_dir()
    assert result.confusion() is not None


def test_a_name_that_scores_use_is_no_metric(fit: Fit) -> None:
    with raises(RecipeError, key="metrics"):
        fit(metrics={"weight": lambda outputs, targets: outputs})
