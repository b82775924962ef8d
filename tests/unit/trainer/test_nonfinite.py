"""A loss that is no number moves nothing: the run ends before it does, or goes on as if the step had not been."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_sentences import raises
from run_directories import saved_steps
from safetensors.numpy import load_file
from torch import nn

from paceline.data.batch import Batch
from paceline.distributed.strategy import FlagReader
from paceline.errors import RecipeError, TrainingError
from paceline.optim.build import build_optimizer
from paceline.reports.audit import audit_run, used_samples
from paceline.trainer import build
from paceline.trainer.nonfinite import NonFiniteGuard

Make = Callable[..., Any]

NAN, INFINITE = float("nan"), float("inf")
CPU = torch.device("cpu")
SKIP = {
    "train.nonfinite": "skip",
    "telemetry.log_every": "1 steps",
    "evaluate.every": "off",
    "schedule.name": "linear",
    "train.duration": "10 steps",
    "train.ema": 0.8,
}


class Poisoned(nn.Module):
    """A network whose input is no number in some forward passes of training, counted from 1.

    It has buffers that a forward pass changes (BatchNorm's), and one that it puts another tensor in the place of.
    """

    mean: torch.Tensor

    def __init__(self, calls: set[int]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.poisoned, self.calls = calls, 0
        self.body = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training and torch.is_grad_enabled()
        x = x * NAN if self.training and self.calls in self.poisoned else x
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return self.body(x)


def spoiled(positions: set[int], by: float = NAN) -> Callable[[Batch, torch.Tensor], torch.Tensor | None]:
    """Spoil the loss at these positions, counted from 1."""
    return lambda batch, loss: loss * by if batch.slice.step + 1 in positions else None


def steep(positions: set[int]) -> Callable[[Batch, torch.Tensor], torch.Tensor | None]:
    """Leave the loss at these positions a number, but not its gradient."""
    return lambda batch, loss: loss + (loss * 0).sqrt() if batch.slice.step + 1 in positions else None


def used_at(run_dir: Path, position: int) -> list[int]:
    entries = used_samples(run_dir, 0)
    return sorted(sample for entry in entries if entry.step == position for sample in entry.ids.tolist())


@pytest.mark.parametrize("by", [NAN, INFINITE, -INFINITE])
def test_the_run_ends_before_the_weights_have_moved(train_tiny: Make, runs: Path, events: Make, by: float) -> None:
    made: list[nn.Module] = []

    def network() -> nn.Module:
        made.append(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))
        return made[-1]

    overrides = {"telemetry.log_every": "8 steps", "checkpoint.every": "off", "evaluate.every": "off"}
    train_tiny("short", {**overrides, "train.duration": "4 steps"}, make_network=network)
    short = made[-1]
    with pytest.raises(TrainingError, match=rf"the training loss became {-by if by < 0 else by}|-inf at step 5;"):
        train_tiny("run", overrides, make_network=network, on_loss=spoiled({5}, by))
    assert all(torch.equal(a, b) for a, b in zip(short.parameters(), made[-1].parameters(), strict=True))
    (incident,) = events(runs / "run", "incident")
    assert (incident["incident"], incident["step"], incident["position"]) == ("nonfinite_loss", 4, 5)
    assert incident["samples"] == used_at(runs / "run", 5)
    assert json.loads((runs / "run" / "summary.json").read_text())["status"] == "failed"


def test_a_step_left_out_advances_nothing_but_the_data(train_tiny: Make, events: Make) -> None:
    result = train_tiny("run", SKIP, on_loss=spoiled({3, 4, 9}))
    assert (result.status, result.summary.step, result.summary.samples) == ("completed", 7, 2 * 52 + 2 * 16)
    found = {event["position"]: event for event in events(result.run_dir, "step")}
    assert [found[position]["step"] for position in range(1, 11)] == [1, 2, 2, 2, 3, 4, 5, 6, 6, 7]
    rates = [0.05 * (1 - step / 10) for step in range(7)]
    assert [found[position]["lr"] for position in (1, 2, 5, 6, 7, 8, 10)] == pytest.approx(rates)
    assert [found[position]["loss"] is None for position in range(1, 11)] == [p in (3, 4, 9) for p in range(1, 11)]
    assert found[10]["skipped_steps"] == 3
    incidents = events(result.run_dir, "incident")
    assert [each["incident"] for each in incidents] == ["nonfinite_loss"] * 3
    assert [(each["step"], each["position"]) for each in incidents] == [(2, 3), (2, 4), (6, 9)]
    assert [each["samples"] for each in incidents] == [used_at(result.run_dir, p) for p in (3, 4, 9)]
    assert audit_run(result.run_dir).passed


@pytest.mark.parametrize(
    ("passes", "rehearsals", "more"),
    [(1, 0, {}), (4, 0, {"batch.micro_size": 4}), (8, 1, {"parallel.exact": True})],
    ids=["plain", "micro-batches", "exact"],
)
def test_weights_average_statistics_and_momentum_stay(
    train_tiny: Make, passes: int, rehearsals: int, more: dict[str, Any]
) -> None:
    """A run that leaves out its last two steps ends where it would have ended without them."""
    # In a middle pass of the sixth step, and the last of the seventh: those before have moved the statistics.
    calls = {rehearsals + 5 * passes + (passes + 1) // 2, rehearsals + 7 * passes}
    overrides = {**SKIP, "schedule.name": "constant", "train.duration": "7 steps", **more}
    long = train_tiny("long", overrides, make_network=lambda: Poisoned(calls), train_images=112)
    short = train_tiny(
        "short", {**overrides, "train.duration": "5 steps"}, make_network=lambda: Poisoned(set()), train_images=112
    )
    assert (long.summary.step, short.summary.step) == (5, 5)
    assert long.summary.weights_sha256 == short.summary.weights_sha256
    assert long.summary.ema_sha256 == short.summary.ema_sha256
    for name in ("optimizer.safetensors", "model.safetensors"):
        mine, theirs = (load_file(each.run_dir / "checkpoints" / "step-00000005" / name) for each in (long, short))
        assert mine.keys() == theirs.keys()
        assert all(mine[key].tobytes() == theirs[key].tobytes() for key in mine), name


def test_too_many_end_the_run(train_tiny: Make, runs: Path) -> None:
    overrides = {**SKIP, "train.max_nonfinite": 2}
    assert train_tiny("two", overrides, on_loss=spoiled({3, 7})).summary.step == 8
    with pytest.raises(TrainingError, match=r"at step 6, and 3 steps were skipped .* train.max_nonfinite=2;"):
        train_tiny("three", overrides, on_loss=spoiled({3, 7, 8}))


@pytest.mark.everyday
def test_a_resume_tells_and_counts_the_same(train_tiny: Make, course: Make, runs: Path) -> None:
    """Interrupted after a step that was left out and before its checkpoint, and once more after it."""
    overrides = {**SKIP, "checkpoint.every": "4 steps", "train.max_nonfinite": 3}
    positions = {3, 6, 9}
    whole = train_tiny("whole", overrides, on_loss=spoiled(positions))
    for last in (7, 10):

        def interrupted(batch: Batch, loss: torch.Tensor, last: int = last) -> torch.Tensor | None:
            if batch.slice.step + 1 == last:
                raise KeyError("interrupted")
            return spoiled(positions)(batch, loss)

        with pytest.raises(KeyError, match="interrupted"):
            train_tiny("run", overrides, on_loss=interrupted)
    resumed = train_tiny("run", overrides, on_loss=spoiled(positions))
    assert resumed.summary.resumes == 2
    assert resumed.summary.weights_sha256 == whole.summary.weights_sha256
    assert resumed.summary.ema_sha256 == whole.summary.ema_sha256
    assert course(resumed.run_dir) == course(whole.run_dir)
    with pytest.raises(TrainingError, match="4 steps were skipped"):
        train_tiny("run", {**overrides, "train.duration": "12 steps"}, on_loss=spoiled({11}))


def test_a_run_that_has_ended_goes_on_without_the_step(train_tiny: Make, tiny_task: Make) -> None:
    """What the message proposes is done in the same directory."""
    task = tiny_task(on_loss=spoiled({6}))
    skipping = train_tiny("skipping", {"train.nonfinite": "skip"}, task=task)
    with pytest.raises(TrainingError, match=r"with train\.nonfinite=skip"):
        train_tiny("run", task=task)
    again = train_tiny("run", {"train.nonfinite": "skip"}, task=task)
    assert again.summary.resumes == 1
    assert again.summary.weights_sha256 == skipping.summary.weights_sha256


def test_a_gradient_that_is_clipped_is_looked_at_too(train_tiny: Make, events: Make, runs: Path) -> None:
    result = train_tiny("run", {**SKIP, "optimizer.clip_norm": 1.0}, on_loss=steep({4}))
    assert result.summary.step == 9
    (incident,) = events(result.run_dir, "incident")
    assert (incident["incident"], incident["position"]) == ("nonfinite_gradient", 4)
    with pytest.raises(TrainingError, match="the gradient norm became infinite or NaN at step 4;"):
        train_tiny("stopped", {"optimizer.clip_norm": 1.0}, on_loss=steep({4}))


@pytest.mark.everyday
def test_weights_that_are_no_numbers_are_never_saved(train_tiny: Make, runs: Path) -> None:
    """Their loss was a number; what is saved after them would fail for ever."""
    overrides = {"checkpoint.every": "1 steps", "telemetry.log_every": "8 steps", "evaluate.every": "off"}
    with pytest.raises(TrainingError, match=r"the weight '.*' became infinite or nan by step 3; .*step-00000002"):
        train_tiny("run", overrides, on_loss=steep({3}))
    whole = train_tiny("whole", overrides)
    assert train_tiny("run", overrides).summary.weights_sha256 == whole.summary.weights_sha256


class Overflowing(nn.Module):
    """A network whose statistics overflow in its third training step, while its output stays finite."""

    running_mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.ones(()))
        self.register_buffer("mask", torch.full((2,), INFINITE))
        self.calls = 0
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.running_mean.mul_(INFINITE if self.calls == 3 else 1)
        return self.body(x)


def test_statistics_that_are_not_finite_are_never_saved(train_tiny: Make, runs: Path, events: Make) -> None:
    """Only evaluation uses them: training goes on as if nothing had happened."""
    overrides = {"checkpoint.every": "2 steps", "evaluate.every": "off"}
    with pytest.raises(TrainingError, match=r"'running_mean' .* by step 4; .*step-00000002"):
        train_tiny("run", overrides, make_network=Overflowing)
    assert [each["incident"] for each in events(runs / "run", "incident")] == ["nonfinite_weights"]
    assert saved_steps(runs / "run") == [2]
    assert json.loads((runs / "run" / "summary.json").read_text())["status"] == "failed"


class Sparse(nn.Module):
    """A network some of whose state is empty, as a process's part of a small weight may be under FSDP."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
        self.nothing = nn.Parameter(torch.zeros(0))
        self.register_buffer("running_nothing", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.nothing.sum()


def test_state_that_is_empty_is_saved(train_tiny: Make) -> None:
    assert train_tiny("run", {"checkpoint.every": "2 steps"}, make_network=Sparse).status == "completed"


@pytest.mark.parametrize("value", [NAN, INFINITE])
def test_a_run_fails_whose_last_evaluation_is_not_finite(
    train_tiny: Make, tiny_task: Make, runs: Path, events: Make, value: float
) -> None:
    """At once again if it is run again; one that has recovered by then completes."""
    spoilt = {2, 3, 4, 8}
    calls = [-1]  # the trial before the first step

    def on_score(_: Any, __: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        calls[0] += 1
        return {**values, "loss": values["loss"] * value} if calls[0] in spoilt else values

    overrides = {"evaluate.every": "1 steps", "train.ema": "off", "evaluate.batch_size": 64}
    task = tiny_task(on_score=on_score)
    for _ in range(2):
        with pytest.raises(TrainingError, match=rf"held-out loss \(model weights\) is {value} since .* step 8"):
            train_tiny("run", overrides, task=task)
    assert calls == [8]
    summary = json.loads((runs / "run" / "summary.json").read_text())
    assert (summary["status"], summary["step"], summary["metrics"]["loss"]) == ("failed", 8, None)
    found = [(each["incident"], each["step"]) for each in events(runs / "run", "incident")]
    assert found[:2] == [("nonfinite_metric", 2), ("nonfinite_metric", 8)]
    spoilt.remove(8)
    calls[0] = 0
    assert train_tiny("recovered", overrides, task=task).status == "completed"


def test_a_run_that_took_no_step_at_all_fails(train_tiny: Make) -> None:
    overrides = {**SKIP, "train.duration": "4 steps"}
    with pytest.raises(TrainingError, match="none of the 4 steps"):
        train_tiny("run", overrides, on_loss=spoiled({1, 2, 3, 4}))


@pytest.mark.parametrize("last", [1.0, 1e20])
def test_losses_that_explode_are_told_at_the_end(train_tiny: Make, tiny_task: Make, events: Make, last: float) -> None:
    """Also if the schedule brings the loss back to where it began, and across a resume; not if something is learned."""

    def course(factors: list[float]) -> Callable[[Any], Any]:
        return tiny_task(on_loss=lambda batch, loss: loss * 0 + factors[min(batch.slice.step, 4)])

    overrides = {"telemetry.log_every": "1 steps", "optimizer.lr": 1e-3}
    train_tiny("run", {**overrides, "train.until": "4 steps"}, task=course([1.1, 5, 1e8, 1e3, last]))
    result = train_tiny("run", overrides, task=course([1.1, 5, 1e8, 1e3, last]))
    assert result.status == "completed"
    assert "began at 1.1, rose to 1e+" in result.summary.details["warning"]
    assert [each["incident"] for each in events(result.run_dir, "incident")] == ["diverged"]
    recovered = train_tiny("recovered", overrides, task=course([1.1, 5, 1e8, 1e3, 0.3]))
    assert "warning" not in recovered.summary.details


def test_the_keys_have_an_effect_or_are_refused(train_tiny: Make) -> None:
    with raises(RecipeError, rule="with effect"):
        train_tiny("a", {"train.max_nonfinite": 3})
    with raises(RecipeError, key="train.nonfinite", rule="with effect"):
        train_tiny("b", {"train.nonfinite": "skip", "train.precision": "fp16"})


# ------------------------------------------------------------- where the host does not wait for the device


class Arrived:
    """The event of a copy that is done when it is asked for."""

    def record(self) -> None:
        """Nothing is under way."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the run as on a GPU: the flag is read two steps late, and fused kernels leave the update out."""
    reader = functools.partial(FlagReader, CPU, make_slot=lambda: (torch.zeros(1), Arrived()))

    def guard(train: Any, optimizer: Any, network: Any, _: torch.device, **more: Any) -> NonFiniteGuard:
        return NonFiniteGuard(train, optimizer, network, torch.device("cuda"), reader=reader(), **more)

    monkeypatch.setattr(build, "NonFiniteGuard", guard)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    def optimizer(network: nn.Module, asked: Any, device: torch.device) -> torch.optim.Optimizer:
        made = build_optimizer(network, asked, device)
        kind: Any = type(made)
        parameters = [parameter for group in made.param_groups for parameter in group["params"]]
        rest = {key: value for key, value in made.defaults.items() if key in ("lr", "momentum", "betas")}
        return kind(parameters, fused=True, **rest)

    monkeypatch.setattr("paceline.tasks.task.build_optimizer", optimizer)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_read_late_the_weights_have_still_not_moved(
    train_tiny: Make, tiny_task: Make, runs: Path, events: Make, request: pytest.FixtureRequest, optimizer: str
) -> None:
    made: list[nn.Module] = []

    def network() -> nn.Module:
        made.append(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))
        return made[-1]

    task = tiny_task(make_network=network, on_loss=spoiled({6}))
    common = {"telemetry.log_every": "20 steps", "checkpoint.every": "off", "evaluate.every": "off"}
    common["optimizer.name"] = optimizer
    # The eighth batch is the last that is used before the host knows of the sixth.
    train_tiny("at once", {**common, "train.nonfinite": "skip", "train.duration": "8 steps"}, task=task)
    expected = made[-1]
    request.getfixturevalue("late")
    with pytest.raises(TrainingError, match="the training loss became nan at step 6;"):
        train_tiny("late", {**common, "train.duration": "20 steps"}, task=task)
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), made[-1].parameters(), strict=True))
    (incident,) = events(runs / "late", "incident")
    assert incident["position"] == 8
    assert incident["samples"] == used_at(runs / "late", 6)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("position", [7, 8])
def test_found_in_the_last_steps_the_run_fails_all_the_same(train_tiny: Make, runs: Path, position: int) -> None:
    """They end before the host would have known, but not before their record."""
    with pytest.raises(TrainingError, match="the training loss became nan"):
        train_tiny("run", {"telemetry.log_every": "8 steps"}, on_loss=spoiled({position}))
    assert not (runs / "run" / "checkpoints" / "step-00000008").exists()
