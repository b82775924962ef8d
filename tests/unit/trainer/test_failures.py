"""A run that cannot go on says why, leaves its records whole, and leaves the process as it found it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.data.batch import Batch
from paceline.errors import RecipeError
from paceline.host.system import STOP_SIGNALS
from paceline.trainer.process_settings import StopRequest

Make = Callable[..., Any]


def test_an_error_of_ones_own_task_comes_out_as_it_is(train_tiny: Make, events: Make, runs: Path) -> None:
    def fail(batch: Batch, _: torch.Tensor) -> None:
        if batch.slice.step == 4:
            raise KeyError("of one's own")

    with pytest.raises(KeyError, match="of one's own"):
        train_tiny("run", on_loss=fail)
    assert [event["step"] for event in events(runs / "run", "step")] == [2, 4]


def test_an_error_before_training_leaves_nothing_open(train_tiny: Make) -> None:
    """Warnings of files left open are errors here."""

    def no_network() -> nn.Module:
        raise MemoryError("too large")

    with pytest.raises(MemoryError):
        train_tiny("run", make_network=no_network)
    assert train_tiny("run").status == "completed"


# --------------------------------------------------------------------------------------------- the tail


def normalised() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3))


def test_a_tail_batchnorm_cannot_take_is_found_before_training(train_tiny: Make, events: Make, runs: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        train_tiny("run", make_network=normalised, train_images=49)
    assert str(caught.value).startswith("a step of 1 sample(s) in 1 micro-batch(es) brings a micro-batch of one ")
    assert "choose another batch.global_size" in str(caught.value)
    with pytest.raises(RecipeError, match=r"a step of 4 sample\(s\) in 4 micro-batch\(es\)"):
        train_tiny("run", {"batch.micro_size": 4}, make_network=normalised)


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        ({}, {"train_images": 50}),
        ({"train.duration": "3 steps"}, {"train_images": 49}),
        ({}, {"train_images": 49, "make_network": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3))}),
        (
            {},
            {
                "train_images": 49,
                "make_network": lambda: nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3)),
            },
        ),
    ],
    ids=["two samples", "never reached", "no BatchNorm", "BatchNorm over many pixels"],
)
def test_a_tail_that_does_no_harm_is_taken(overrides: Any, changes: Any, train_tiny: Any) -> None:
    assert train_tiny("run", overrides, **{"make_network": normalised, **changes}).status == "completed"


# ------------------------------------------------------------------------------------------- the signals


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_remembered_by_name(number: signal.Signals) -> None:
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.signal_name == number.name


def test_one_request_delivered_twice_is_one_request() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal_name == "SIGINT"


def test_a_stop_is_recorded_with_its_signal(train_tiny: Make, events: Make) -> None:
    def ask(batch: Batch, _: torch.Tensor) -> None:
        if batch.slice.step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)

    result = train_tiny("run", on_loss=ask)
    assert (result.status, result.summary.status, result.summary.step) == ("stopped", "stopped", 3)
    (stop,) = events(result.run_dir, "stop")
    assert (stop["step"], stop["reason"]) == (3, "SIGUSR1")
    assert [event["event"] for event in events(result.run_dir)][-3:] == ["checkpoint", "stop", "finish"]


def test_asked_to_stop_in_its_last_step_it_is_complete(train_tiny: Make) -> None:
    def ask(batch: Batch, _: torch.Tensor) -> None:
        if batch.slice.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    result = train_tiny("run", on_loss=ask)
    assert (result.status, result.summary.step) == ("completed", 8)


def test_a_run_in_another_thread_trains_too(train_tiny: Make) -> None:
    """Only the main thread may handle signals; a notebook's worker still may train."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(train_tiny("run")))
    thread.start()
    thread.join()
    assert results[0].status == "completed"


def test_training_says_nothing_when_asked_to_be_quiet(train_tiny: Make, capfd: pytest.CaptureFixture[str]) -> None:
    train_tiny("run")
    assert capfd.readouterr() == ("", "")


def test_training_from_python_shows_its_progress(
    tiny_recipe: Path, tiny_task: Any, runs: Path, train_tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    paceline.train(tiny_recipe, run_dir=runs / "run", task=tiny_task(), overrides=["train.duration=2 steps"])
    assert "step" in capsys.readouterr().out
