"""Pictures of the first training batch are kept for the report, and keeping them changes nothing."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.tasks.image_classification import ImageClassification
from paceline.trainer import run_records

Make = Callable[..., Any]
SHOWN = {"telemetry.report": True}


def kept(run_dir: Path) -> list[dict[str, str]]:
    examples: list[dict[str, str]] = json.loads((run_dir / "first_batch.json").read_text())["examples"]
    return examples


def pixels(example: dict[str, str]) -> Any:
    packed = base64.b64decode(example["image"].removeprefix("data:image/png;base64,"))
    return np.asarray(Image.open(io.BytesIO(packed)))


def test_each_has_its_class_and_is_what_the_network_saw(train_tiny: Make) -> None:
    seen: list[Any] = []
    run = train_tiny(
        "run", SHOWN | {"data.augment.flip": 1.0}, on_loss=lambda batch, _: seen.append(batch.inputs.clone())
    )
    examples = kept(run.run_dir)
    assert len(examples) == min(12, len(seen[0]))
    assert all(each["caption"] in list("0123456789") for each in examples)
    for example, image in zip(examples, seen[0], strict=False):
        shown, fed = pixels(example).astype(float), image[0].numpy()
        assert np.corrcoef(shown.ravel(), fed.ravel())[0, 1] > 0.999


def test_a_mixed_image_has_the_shares_of_its_classes(train_tiny: Make) -> None:
    captions = [each["caption"] for each in kept(train_tiny("run", SHOWN | {"data.mix.mixup": 1.0}).run_dir)]
    shares = [[int(each) for each in re.findall(r"(\d+)%", caption)] for caption in captions]
    assert any(shares)
    assert all(99 <= sum(each) <= 101 for each in shares if each)


def test_a_run_that_goes_on_keeps_those_of_its_beginning(train_tiny: Make, runs: Path) -> None:
    train_tiny("run", SHOWN | {"train.until": "4 steps"})
    first = (runs / "run" / "first_batch.json").read_bytes()
    train_tiny("run", SHOWN)
    assert (runs / "run" / "first_batch.json").read_bytes() == first


@pytest.mark.parametrize("overrides", [{"evaluate.keep_examples": 0, **SHOWN}, {"telemetry.report": False}])
def test_none_are_kept_where_none_are_shown(train_tiny: Make, overrides: dict[str, Any]) -> None:
    assert not (train_tiny("run", overrides).run_dir / "first_batch.json").exists()


@pytest.mark.parametrize(("where", "name"), [(ImageClassification, "shown"), (run_records, "write_text")])
def test_where_they_cannot_be_shown_or_written_the_run_trains_as_before(
    where: Any, name: str, train_tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train_tiny("plain").summary.weights_sha256

    def fail(*_: Any) -> Any:
        raise ValueError("no pictures")

    monkeypatch.setattr(where, name, fail)
    run = train_tiny("failing", SHOWN)
    assert run.summary.weights_sha256 == plain
    assert not (run.run_dir / "first_batch.json").exists()


def drawn(model: Any) -> list[tuple[torch.Tensor, str]]:
    """What a task draws: noise, and whether the model was in evaluation mode."""
    assert not torch.is_grad_enabled()
    return [((torch.rand(1, 8, 8) * 255).to(torch.uint8), f"training: {model.training}")]


def test_a_task_draws_figures_after_each_evaluation(train_tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    often = {"evaluate.every": "2 steps", "train.ema": 0.9}
    plain = train_tiny("plain", often).summary.weights_sha256
    calls: list[Any] = []

    def figures(_: Any, model: Any) -> list[tuple[torch.Tensor, str]]:
        calls.append(model)
        return drawn(model)

    monkeypatch.setattr(ImageClassification, "figures", figures)
    runs = [train_tiny(name, SHOWN | often) for name in ("run", "alike")]
    assert len(calls) > 4
    for run in runs:
        assert run.summary.weights_sha256 == plain
        found = json.loads((run.run_dir / "evaluation" / "figures.json").read_text())["examples"]
        assert [each["caption"] for each in found] == ["training: False"]
        assert "Drawn by the task" in (run.run_dir / "report.html").read_text()
    first, second = ((run.run_dir / "evaluation" / "figures.json").read_bytes() for run in runs)
    assert first == second, "their draws are the recipe's"


def test_figures_that_fail_do_not_end_the_run(train_tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageClassification, "figures", lambda *_: [(torch.zeros(3), "no picture")])
    run = train_tiny("run", SHOWN)
    assert run.status == "completed"
    assert not (run.run_dir / "evaluation" / "figures.json").exists()
