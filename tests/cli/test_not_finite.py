"""Weights, means and deviations that are not finite are refused by name, and outputs that are not are no answers."""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calls import Call
from PIL import Image
from run_directories import newest_weights, rewrite_weights

COMMON = """
optimizer: {name: adamw, lr: 0.003}
train: {duration: 1 steps, precision: fp32}
evaluate: {every: off}
parallel: {device: cpu, threads: 1}
telemetry: {trackers: [], report: off}
"""
RECIPES = {
    "clicks": """
task: recommendation
model: {name: dlrm, options: {embedding: 4, bottom: [8], top: [8]}}
data:
  dataset: synthetic_clicks
  recommendation: {dense_features: 4, categories: 2, max_rows: 30, evaluation_samples: 8}
batch: {global_size: 8}
""",
    "boxes": """
task: detection
model: {name: small_retinanet, options: {width: 8, levels: 2, channels: 8}}
data:
  dataset: shapes
  detection: {generated: {samples: 4, evaluation_samples: 2, smallest_side: 32, largest_side: 48, objects: 2}}
batch: {global_size: 2}
""",
    "text": """
task: language_modeling
model: {name: gpt, options: {depth: 1, width: 8, heads: 2}}
data: {dataset: docs, text: {context: 16}}
batch: {global_size: 2}
""",
}
Write = Callable[..., Path]


@pytest.fixture
def written(tmp_path: Path) -> Write:
    """Write the weights of a run once more, changed."""

    def write(run: Path, change: Callable[[str, torch.Tensor], torch.Tensor], **data: Any) -> Path:
        def changed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: change(name, each) for name, each in state.items()}

        return rewrite_weights(
            newest_weights(run), tmp_path / "changed.safetensors", changed, **({"data": data} if data else {})
        )

    return write


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) * 4).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


def corrupted(at: str, value: float) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """One value of the tensor whose name ends so."""

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name.endswith(at):
            tensor = tensor.clone()
            tensor.view(-1)[0] = value
        return tensor

    return change


def unchanged(_: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def huge(_: str, tensor: torch.Tensor, value: float = 3e38) -> torch.Tensor:
    return torch.full_like(tensor, value) if tensor.is_floating_point() else tensor


def questions(weights: Path, picture: Path, here: Path) -> dict[str, tuple[object, ...]]:
    return {
        "predict": ("predict", weights, picture),
        "serve": ("serve", weights, "--port", 0),
        "evaluate": ("evaluate", weights),
        "safetensors": ("export", weights, "--output", here / "out.safetensors"),
        "program": ("export", weights, "--format", "torch-export", "--output", here / "out.pt2"),
    }


@pytest.mark.parametrize(
    ("at", "value"), [("stem.conv.weight", float("nan")), ("running_var", float("inf")), ("bias", float("-inf"))]
)
def test_weights_are_refused_by_name(
    paceline_here: Call, finished: Path, written: Write, picture: Path, at: str, value: float
) -> None:
    weights = written(finished, corrupted(at, value))
    for command, question in questions(weights, picture, picture.parent).items():
        done = paceline_here(*question)
        assert (done.code, done.out) == (1, ""), command
        assert f"{at} holds" in done.err, command
        assert "Traceback" not in done.err
    assert not list(picture.parent.glob("out.*"))


@pytest.mark.parametrize(("key", "value"), [("std", 0.0), ("std", float("nan")), ("mean", float("inf"))])
def test_so_are_means_and_deviations(
    paceline_here: Call, finished: Path, written: Write, picture: Path, key: str, value: float
) -> None:
    weights = written(finished, unchanged, **{key: [value]})
    for command, question in questions(weights, picture, picture.parent).items():
        done = paceline_here(*question)
        assert (done.code, done.out) == (1, ""), command
        assert f"{key} is [{value}]" in done.err, command


def test_a_mask_of_zeros_and_minus_infinity_is_meant_so() -> None:
    from paceline.checkpoint.weights import check_tensors
    from paceline.errors import NotFiniteError

    check_tensors({"mask": torch.full((3, 3), -torch.inf).triu(1), "count": torch.tensor(3)}, "file")
    with pytest.raises(NotFiniteError, match="weight"):
        check_tensors({"fine": torch.ones(2), "weight": torch.full((2, 2), -torch.inf)}, "file")


def test_outputs_that_overflow_are_no_answer(
    paceline_here: Call, finished: Path, written: Write, picture: Path
) -> None:
    requested = questions(written(finished, huge), picture, picture.parent)
    done = paceline_here(*requested["predict"]).ended(1)
    assert "picture.png" in done.out
    assert "not a finite number" in done.out
    assert "nan %" not in done.out
    document = paceline_here(*requested["predict"], "--json").ended(1)
    assert "NaN" not in document.out
    assert "not a finite number" in document.document[0]["error"]
    assert paceline_here(*requested["predict"], "--output", picture.parent / "answers.csv").code == 1
    (row,) = csv.DictReader((picture.parent / "answers.csv").read_text().splitlines())
    assert (row["label"], row["probability"]) == ("", "")
    done = paceline_here(*requested["program"]).ended(1)
    assert "finite" in done.err
    lines = picture.parent / "lines.jsonl"
    done = paceline_here(*requested["evaluate"], "--predictions", lines).ended(1)
    assert "loss" in done.err
    assert "NaN" not in lines.read_text()


@pytest.mark.parametrize("task", list(RECIPES))
def test_so_it_is_for_every_task(paceline_here: Call, written: Write, picture: Path, tmp_path: Path, task: str) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPES[task] + COMMON)
    done = paceline_here("train", "recipe.yaml", "--run-dir", "run").ended(0)
    (tmp_path / "lines.jsonl").write_text('{"dense": [1, 2, 3, 4], "categories": [0, 1]}\n')
    sources, first = {
        "clicks": (("lines.jsonl",), "bottom.0.weight"),
        "boxes": ((picture,), "backbone.stem.0.weight"),
        "text": (("--prompt", "The"), "tokens.weight"),
    }[task]
    weights = written(tmp_path / "run", corrupted("weight", float("nan")))
    for question in (("predict", weights, *sources), ("evaluate", weights)):
        done = paceline_here(*question)
        assert (done.code, done.out) == (1, ""), done.err
        assert f"{first} holds" in done.err
    # Larger ones are zeros after a norm by root mean square.
    overflowing = partial(huge, value=1e18 if task == "text" else 3e38)
    done = paceline_here("predict", written(tmp_path / "run", overflowing), *sources).ended(1)
    assert "not a finite number" in done.out + done.err
    assert "Traceback" not in done.err
