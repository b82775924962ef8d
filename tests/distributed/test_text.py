"""Ragged, masked rows of text over processes and micro-batches: one big batch's gradient, figures and bits."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calls import Call

pytestmark = pytest.mark.slow

# Documents of very different lengths, one to a row, so that every micro-batch weighs something else.
RECIPE: dict[str, Any] = {
    "task": "language_modeling",
    "seed": 3,
    "model": {"name": "bert", "options": {"depth": 2, "width": 16, "heads": 2}},
    "data": {
        "dataset": "text_folder",
        "path": "books",
        "validation_fraction": 0.3,
        "text": {"context": 48, "rows": "single", "objective": "masked"},
    },
    "batch": {"global_size": 12},
    "optimizer": {"name": "sgd", "lr": 1.0, "momentum": 0.0},
    "schedule": {"name": "constant"},
    "train": {"duration": "2 steps", "precision": "fp32"},
    "evaluate": {"batch_size": 5},
    "checkpoint": {"every": "1 steps"},
    "parallel": {"device": "cpu", "threads": 1},
    "telemetry": {"log_every": "1 steps", "trackers": [], "report": False},
}
DOUBLE = """
from paceline.tasks.language_modeling import LanguageModeling

class Double(LanguageModeling):
    def build_model(self):
        return super().build_model().double()
"""
CAUSAL = ("data.text.objective=causal", "model.name=gpt", "model.options={depth: 2, width: 16, heads: 2}")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("library")
    (root / "books").mkdir()
    for number in range(40):
        text = f"{number} is said of größer things, " * (1 + number % 7 * (number % 3)) + str(number)
        (root / "books" / f"{number:02d}.txt").write_text(text[: 3 + 7 * number])
    (root / "double.py").write_text(DOUBLE)
    (root / "recipe.yaml").write_text(json.dumps(RECIPE))
    return root


@pytest.fixture
def paceline_in(library: Path, run: Call, run_here: Call, monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    """Run a command in the library, alone in this process or in several others; returns how it ended, which is well."""
    monkeypatch.chdir(library)
    monkeypatch.syspath_prepend(library)

    def runner(*arguments: object, processes: int) -> Any:
        if processes == 1:
            return run_here(*arguments).ended(0)
        return run(*arguments, "--processes", processes, where=library).ended(0)

    yield runner
    sys.modules.pop("double", None)


@pytest.fixture
def train(library: Path, paceline_in: Call) -> Call:
    def trainer(name: str, *overrides: str, processes: int = 1) -> Path:
        paceline_in("train", "recipe.yaml", *overrides, "--run-dir", name, processes=processes)
        return library / name

    return trainer


@pytest.mark.world_size(2)
@pytest.mark.parametrize("objective", [(), pytest.param(CAUSAL, marks=pytest.mark.thorough)])
def test_parts_of_different_weight_add_up_to_one_big_batch(train: Call, objective: tuple[str, ...]) -> None:
    """Plain SGD with a rate of 1: two steps' weights are the gradients. Two processes of three micro-batches each."""
    import torch

    from paceline.checkpoint.weights import read_weights

    name = "gpt" if objective else "bert"
    whole = read_weights(train(f"{name}-whole", "task=double:Double", *objective)).state
    halves = ("task=double:Double", "batch.micro_size=2", *objective)
    parts = read_weights(train(f"{name}-parts", *halves, processes=2)).state
    assert whole.keys() == parts.keys()
    for key, value in whole.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(parts[key], value, rtol=0, atol=1e-10, msg=key)


@pytest.mark.thorough
@pytest.mark.world_size(3)
def test_an_evaluation_is_the_same_by_any_number_of_processes(train: Call, paceline_in: Call) -> None:
    run_dir = train("scored", *CAUSAL)
    answers = []
    for processes in (1, 2, 3):
        found = paceline_in("evaluate", run_dir, "--json", processes=processes).document
        answers.append([found[key] for key in ("samples", "loss", "bits_per_byte", "perplexity")])
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.world_size(2)
@pytest.mark.everyday
def test_exact_runs_have_the_same_bits_in_any_world(train: Call, summary: Call) -> None:
    asked = ("parallel.exact=true", "batch.global_size=16", "model.options.dropout=0.1", "train.duration=6 steps")
    alone, together = train("one", *asked), train("two", *asked, processes=2)
    assert summary(together)["weights_sha256"] == summary(alone)["weights_sha256"]
    assert summary(together)["metrics"] == summary(alone)["metrics"]


@pytest.mark.world_size(2)
def test_killed_and_resumed_it_ends_with_the_same_bits(
    library: Path, train: Call, start: Call, summary: Call, steps_recorded: Call
) -> None:
    asked = ("train.duration=40 steps", "optimizer.lr=0.1", "model.options.dropout=0.1", "parallel.exact=true")
    asked = (*asked, "batch.global_size=16")
    whole = train("whole", *asked)
    command = ("train", "recipe.yaml", *asked, "--run-dir", "killed", "--processes", 2)
    launched = start(*command, where=library)
    launched.wait_for(lambda: steps_recorded(library / "killed") >= 7)
    launched.kill()
    assert not (library / "killed" / "summary.json").exists()
    resumed = train("killed", *asked, processes=2)
    keys = ("status", "step", "weights_sha256", "metrics", "ledger")
    assert {key: summary(resumed)[key] for key in keys} == {key: summary(whole)[key] for key in keys}
