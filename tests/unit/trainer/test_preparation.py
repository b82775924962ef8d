"""A network that cannot be trained as the recipe asks is refused before the run has a directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from paceline.errors import DataError, ModelError, RecipeError


def refused(train_tiny: Callable[..., Any], task: Any, runs: Path, overrides: dict[str, Any]) -> str:
    with pytest.raises(ModelError) as caught:
        train_tiny("refused", overrides, task=task)
    assert not (runs / "refused").exists()
    return str(caught.value)


def test_a_network_without_anything_to_train(
    train_tiny: Callable[..., Any], tiny_task: Callable[..., Any], runs: Path
) -> None:
    task = tiny_task(make_network=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).requires_grad_(False))
    assert "no parameter that can be trained" in refused(train_tiny, task, runs, {})


def test_a_sample_that_counts_for_nothing(
    train_tiny: Callable[..., Any], tiny_task: Callable[..., Any], runs: Path
) -> None:
    made = tiny_task()

    def weighted(recipe: Any) -> Any:
        task = made(recipe)
        task.sample_weights = lambda: np.array([2, 1, 0, *[1] * (len(task.dataset.train) - 3)])
        return task

    with pytest.raises(DataError, match=r"training sample 2 counts for 0 images .*leave them out"):
        train_tiny("refused", {}, task=weighted)
    assert not (runs / "refused").exists()


def test_an_exact_run_whose_norms_add_up_over_the_processes(
    train_tiny: Callable[..., Any], tiny_task: Callable[..., Any], runs: Path
) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 3, 8), nn.SyncBatchNorm(3), nn.Flatten())

    message = refused(train_tiny, tiny_task(make_network=network), runs, {"parallel.exact": True})
    assert "has SyncBatchNorm (1), whose statistics are sums over the processes" in message


def test_a_tail_of_one_sample_is_tried_at_the_size_of_training(
    train_tiny: Callable[..., Any], tiny_task: Callable[..., Any]
) -> None:
    """49 samples in steps of 16 end with one: BatchNorm has one number of each channel, but four in evaluation."""

    def network() -> nn.Module:
        pooled = (nn.AvgPool2d(8), nn.BatchNorm2d(1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 3))
        return nn.Sequential(*pooled)

    task = tiny_task(train_images=49, make_network=network)
    with pytest.raises(RecipeError, match="this model cannot train on a single one"):
        train_tiny("run", {"data.evaluation_size": 16}, task=task)
