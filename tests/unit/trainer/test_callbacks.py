"""Observers hear of every step, evaluation and checkpoint, may stop a run, and change no bit of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.errors import RecipeError

Make = Callable[..., Any]


class Notes:
    """Notes what it hears, draws at random, and asks to stop after a step."""

    def __init__(self, stop_at: int = 0) -> None:
        self.heard: list[tuple[str, int]] = []
        self.stop_at = stop_at

    def on_step_end(self, step: int) -> bool:
        torch.rand(3)
        self.heard.append(("step", step))
        return step == self.stop_at

    def on_evaluation(self, step: int, results: dict[str, dict[str, float]]) -> None:
        assert 0 <= results["model"]["top1_accuracy"] <= 100
        results["model"].clear()
        self.heard.append(("evaluation", step))

    def on_checkpoint(self, step: int) -> None:
        self.heard.append(("checkpoint", step))


@pytest.fixture
def observe(tiny_recipe: Path, runs: Path, tiny_task: Make) -> Make:
    def train(name: str, *callbacks: object) -> Any:
        overrides = {"model.options.dropout": 0.3}
        return paceline.train(
            tiny_recipe, overrides=overrides, run_dir=runs / name, task=tiny_task(), callbacks=callbacks, quiet=True
        )

    return train


def test_they_hear_everything_and_change_no_bit(observe: Make) -> None:
    notes = Notes()
    observed, plain = observe("observed", notes), observe("plain")
    expected = [("step", step) for step in range(1, 9)]
    for step in (4, 8):
        at = expected.index(("step", step)) + 1
        expected[at:at] = [("evaluation", step), ("checkpoint", step)]
    assert notes.heard == expected
    assert observed.summary.weights_sha256 == plain.summary.weights_sha256
    assert observed.metrics == plain.metrics


def test_one_may_stop_the_run_which_resumes_to_the_same_bits(observe: Make, events: Make) -> None:
    stopped = observe("stopped", Notes(stop_at=3))
    assert (stopped.status, stopped.summary.step) == ("stopped", 3)
    (stop,) = events(stopped.run_dir, "stop")
    assert stop["reason"] == "Notes"
    assert observe("stopped").summary.weights_sha256 == observe("plain").summary.weights_sha256


def test_what_they_raise_ends_the_run(observe: Make, runs: Path) -> None:
    class Failing:
        def on_step_end(self, step: int) -> None:
            raise KeyError(step)

    with pytest.raises(KeyError):
        observe("failed", Failing())
    assert json.loads((runs / "failed" / "summary.json").read_text())["status"] == "failed"


def test_an_object_without_any_of_the_methods_is_refused(observe: Make) -> None:
    with pytest.raises(RecipeError, match="callback object has none of the methods on_step_end"):
        observe("none", object())


class Printer:
    def on_evaluation(self, step: int, results: object) -> None:
        print(f"evaluated after step {step}")


def test_they_are_sent_to_several_processes(tiny_recipe: Path, runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paceline.train(tiny_recipe, run_dir=runs / "run", callbacks=[Printer()], processes=2)
    assert capfd.readouterr().out.count("evaluated after step 4") == 1


STOP_ON_ONE_RANK = """
import os, sys
import paceline, torch
class Stops:
    def on_step_end(self, step):
        return os.environ["RANK"] == "1" and step == 2
result = paceline.train(sys.argv[1], overrides={"train.duration": "40 steps", "parallel.threads": 1},
    run_dir="run", callbacks=[Stops()], quiet=True)
print(result.summary.step)
"""


def test_one_rank_stops_all(on_two_ranks: Callable[..., list[Any]], tiny_recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "stops.py").write_text(STOP_ON_ONE_RANK)
    first, second = on_two_ranks(["stops.py", str(tiny_recipe)], tmp_path)
    assert first == second < 6
