"""Text over processes and micro-batches: one big batch's gradient, and the same figures and bits."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calls import Call
from tiny_text import chats, reviews, tagged, tokenizer_folder, write_lines

pytestmark = pytest.mark.slow

COMMON: dict[str, Any] = {
    "seed": 3,
    "batch": {"global_size": 12},
    "optimizer": {"name": "sgd", "lr": 1.0, "momentum": 0.0},
    "schedule": {"name": "constant"},
    "train": {"duration": "2 steps", "precision": "fp32"},
    "evaluate": {"batch_size": 5},
    "checkpoint": {"every": "1 steps"},
    "parallel": {"device": "cpu", "threads": 1},
    "telemetry": {"log_every": "1 steps", "trackers": [], "report": False},
}
NETWORK = {"options": {"depth": 2, "width": 16, "heads": 2}}
RECIPES: dict[str, dict[str, Any]] = {
    "texts": {
        "task": "text_classification",
        "model": {"name": "bert", **NETWORK},
        "data": {"dataset": "text_table", "path": "reviews.jsonl", "text": {"context": 24, "rows": "single"}},
    },
    "tags": {
        "task": "token_classification",
        "model": {"name": "bert", **NETWORK},
        "data": {"dataset": "text_table", "path": "tagged.jsonl", "text": {"context": 24, "rows": "single"}},
    },
    "books": {  # very different lengths, one to a row, so that every micro-batch weighs something else
        "task": "language_modeling",
        "model": {"name": "bert", **NETWORK},
        "data": {
            "dataset": "text_folder",
            "path": "books",
            "validation_fraction": 0.3,
            "text": {"context": 48, "rows": "single", "objective": "masked"},
        },
    },
    "chats": {
        "task": "language_modeling",
        "model": {"name": "gpt", **NETWORK},
        "data": {
            "dataset": "chat",
            "path": "chats.jsonl",
            "text": {"context": 64, "rows": "single", "tokenizer": "tokenizer"},
        },
    },
}
DOUBLE = """
from paceline_text.language_modeling import LanguageModeling
from paceline_text.text_classification import TextClassification
from paceline_text.token_classification import TokenClassification

class Tags(TokenClassification):
    def build_model(self):
        return super().build_model().double()

class Texts(TextClassification):
    def build_model(self):
        return super().build_model().double()

class Chats(LanguageModeling):
    def build_model(self):
        return super().build_model().double()

Books = Chats
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tables")
    write_lines(root / "reviews.jsonl", reviews(60))
    write_lines(root / "chats.jsonl", chats(60))
    (root / "books").mkdir()
    for number in range(40):
        text = f"{number} is said of größer things, " * (1 + number % 7 * (number % 3)) + str(number)
        (root / "books" / f"{number:02d}.txt").write_text(text[: 3 + 7 * number])
    write_lines(root / "tagged.jsonl", tagged(60))
    tokenizer_folder(root / "tokenizer")
    (root / "double.py").write_text(DOUBLE)
    for name, recipe in RECIPES.items():
        (root / f"{name}.yaml").write_text(json.dumps({**COMMON, **recipe}))
    return root


@pytest.fixture
def paceline_in(folder: Path, run: Call, run_here: Call, monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    """Run a command in the folder, alone in this process or in several others; returns how it ended, with ``code``."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)

    def runner(*arguments: object, processes: int = 1, code: int = 0) -> Any:
        if processes == 1:
            return run_here(*arguments).ended(code)
        return run(*arguments, "--processes", processes, where=folder).ended(code)

    yield runner
    sys.modules.pop("double", None)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", RECIPES)
def test_parts_of_different_weight_add_up_to_one_big_batch(name: str, folder: Path, paceline_in: Call) -> None:
    """Plain SGD with a rate of 1: the weights are the gradients. Two processes of three micro-batches each."""
    import torch

    from paceline.checkpoint.weights import read_weights

    double = f"task=double:{name.capitalize()}"
    paceline_in("train", f"{name}.yaml", double, "--run-dir", f"{name}-whole")
    paceline_in("train", f"{name}.yaml", double, "batch.micro_size=2", "--run-dir", f"{name}-parts", processes=2)
    whole, parts = (read_weights(folder / f"{name}-{which}").state for which in ("whole", "parts"))
    for key, value in whole.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(parts[key], value, rtol=0, atol=1e-10, msg=key)


@pytest.mark.thorough
@pytest.mark.world_size(3)
@pytest.mark.parametrize("name", RECIPES)
def test_an_evaluation_is_the_same_by_any_number_of_processes(name: str, paceline_in: Call) -> None:
    paceline_in("train", f"{name}.yaml", "--run-dir", f"{name}-scored")
    answers = []
    for processes in (1, 2, 3):
        found = paceline_in("evaluate", f"{name}-scored", "--json", processes=processes).document
        measured = ("samples", "loss", "top1_accuracy", "token_accuracy", "entity_f1", "bits_per_byte", "perplexity")
        answers.append({key: value for key, value in found.items() if key in measured})
    assert answers[0] == answers[1] == answers[2]
    assert answers[0]["samples"] > 5
    assert "loss" in answers[0]


FINE_TUNED = [pytest.param(name, marks=pytest.mark.thorough) for name in RECIPES if name != "books"]


@pytest.mark.everyday
@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["books", *FINE_TUNED])
def test_exact_runs_have_the_same_bits_in_any_world(name: str, folder: Path, paceline_in: Call, summary: Call) -> None:
    asked = ("parallel.exact=true", "batch.global_size=16", "model.options.dropout=0.1", "train.duration=6 steps")
    paceline_in("train", f"{name}.yaml", *asked, "--run-dir", f"{name}-one")
    paceline_in("train", f"{name}.yaml", *asked, "--run-dir", f"{name}-two", processes=2)
    one, two = (summary(folder / f"{name}-{which}") for which in ("one", "two"))
    assert two["weights_sha256"] == one["weights_sha256"]
    assert two["metrics"] == one["metrics"]


@pytest.mark.needs("peft", "transformers")
@pytest.mark.thorough
@pytest.mark.world_size(2)
def test_sharded_adapters_learn_as_replicas_do(folder: Path, paceline_in: Call, summary: Call) -> None:
    """GPT-2's layers are transposed and its output layer is tied; the run goes on where it was cut off."""
    import torch

    from paceline.checkpoint.weights import read_weights

    asked = ("model.name=transformers:gpt2", "model.options={n_layer: 2, n_embd: 16, n_head: 2}")
    asked += ("model.adapters.rank=2", "train.duration=6 steps", "optimizer.lr=0.1")
    fsdp = (*asked, "parallel.strategy=fsdp")
    cut = (*fsdp, "train.until=3 steps")
    for name, given, code in (("ddp", asked, 0), ("fsdp", fsdp, 0), ("cut", cut, 75), ("cut", fsdp, 0)):
        paceline_in("train", "chats.yaml", *given, "--run-dir", f"adapted-{name}", processes=2, code=code)
    replicas, shards = (read_weights(folder / f"adapted-{name}").plain for name in ("ddp", "fsdp"))
    assert replicas.keys() == shards.keys()
    for key, value in replicas.items():
        torch.testing.assert_close(shards[key], value, rtol=0, atol=1e-6, msg=key)
    whole, resumed = (summary(folder / f"adapted-{name}") for name in ("fsdp", "cut"))
    assert resumed["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.world_size(2)
@pytest.mark.thorough
def test_killed_and_resumed_it_ends_with_the_same_bits(
    folder: Path, paceline_in: Call, start: Call, summary: Call, steps_recorded: Call
) -> None:
    command = ("train", "books.yaml", "parallel.exact=true", "batch.global_size=16", "train.duration=40 steps")
    command += ("optimizer.lr=0.1", "model.options.dropout=0.1", "--run-dir")
    paceline_in(*command, "whole")
    launched = start(*command, "killed", "--processes", 2, where=folder)
    launched.wait_for(lambda: steps_recorded(folder / "killed") >= 7)
    launched.kill()
    assert not (folder / "killed" / "summary.json").exists()
    paceline_in(*command, "killed", processes=2)
    keys = ("status", "step", "weights_sha256", "metrics", "ledger")
    resumed, whole = (summary(folder / name) for name in ("killed", "whole"))
    assert {key: resumed[key] for key in keys} == {key: whole[key] for key in keys}
