"""Whoever only watches changes nothing: evaluation, records, trackers, displays, checkpoints, the metric."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.recipe.load import load_recipe
from paceline.telemetry.display import Display
from paceline.trainer.train import Options, train_recipe

Make = Callable[..., Any]

# Dropout, BatchNorm, augmentation, moving average, clipping: whatever an observer could disturb.
SENSITIVE = {
    "model.options.dropout": 0.3,
    "data.augment.crop": "pad",
    "data.augment.flip": 0.5,
    "train.ema": 0.9,
    "train.precision": "bf16",
    "batch.micro_size": 8,
    "optimizer.clip_norm": 1.0,
    "evaluate.every": "off",
    "checkpoint.every": "off",
    "telemetry.log_every": "1000 steps",
}


@pytest.mark.parametrize(
    "watching",
    [
        {"evaluate.every": "1 steps"},
        {"evaluate.every": "1 steps", "evaluate.batch_size": 1},
        {"telemetry.log_every": "1 steps"},
        {"telemetry.trackers": ["tensorboard", "csv"], "telemetry.log_every": "1 steps"},
        {"checkpoint.every": "1 steps"},
        {"checkpoint.every": "1 steps", "evaluate.every": "1 steps", "telemetry.log_every": "1 steps"},
    ],
    ids=" ".join,
)
@pytest.mark.everyday
def test_watching_changes_nothing(watching: dict[str, Any], train_tiny: Make) -> None:
    alone = train_tiny("alone", SENSITIVE)
    watched = train_tiny("watched", {**SENSITIVE, **watching})
    assert watched.summary.weights_sha256 == alone.summary.weights_sha256
    assert watched.summary.ema_sha256 == alone.summary.ema_sha256


def test_measuring_the_gradient_changes_nothing(train_tiny: Make) -> None:
    """Without clipping the norm is computed for the record only."""
    plain = {**SENSITIVE, "optimizer.clip_norm": "off"}
    often = train_tiny("often", {**plain, "telemetry.log_every": "1 steps"})
    assert often.summary.weights_sha256 == train_tiny("never", plain).summary.weights_sha256


def test_an_observer_may_draw_random_numbers(train_tiny: Make) -> None:
    def draw(*_: Any) -> None:
        torch.rand(3)
        torch.manual_seed(99)

    alone = train_tiny("alone", SENSITIVE)
    watched = train_tiny("watched", {**SENSITIVE, "evaluate.every": "1 steps"}, on_score=draw)
    assert watched.summary.weights_sha256 == alone.summary.weights_sha256


def test_a_display_sees_every_record(
    tiny_recipe: Path, tiny_task: Any, runs: Path, train_tiny: Any, events: Any
) -> None:
    class Watcher(Display):
        def record(self, event: Any) -> None:
            torch.manual_seed(1)
            records.append(event)

        def advance(self, step: int) -> None:
            steps.append(step)

    records: list[Any] = []
    steps: list[int] = []
    loaded = load_recipe(tiny_recipe, SENSITIVE)
    watched = train_recipe(loaded, Options(run_dir=runs / "run", display=Watcher(), task=tiny_task()))
    assert watched.summary.weights_sha256 == train_tiny("alone", SENSITIVE).summary.weights_sha256
    assert steps == list(range(1, 9))
    assert [event["event"] for event in records] == [event["event"] for event in events(watched.run_dir)]
