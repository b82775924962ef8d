"""A network that cannot be trained as the recipe asks is refused before the run has a directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from paceline.errors import ModelError


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


def test_an_exact_run_whose_norms_add_up_over_the_processes(
    train_tiny: Callable[..., Any], tiny_task: Callable[..., Any], runs: Path
) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 3, 8), nn.SyncBatchNorm(3), nn.Flatten())

    message = refused(train_tiny, tiny_task(make_network=network), runs, {"parallel.exact": True})
    assert "has SyncBatchNorm (1), whose statistics are sums over the processes" in message
