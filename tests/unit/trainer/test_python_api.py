"""What a call of ``paceline.train`` leaves behind in the caller's process: nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.errors import TrainingError
from paceline.world import STOP_SIGNALS


def settings() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "products": (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32),
        "handlers": [signal.getsignal(number) for number in STOP_SIGNALS],
    }


@pytest.fixture
def of_ones_own() -> Iterator[dict[str, Any]]:
    """Settings that no run would choose; undone in the end."""
    threads, handlers = torch.get_num_threads(), [signal.getsignal(number) for number in STOP_SIGNALS]
    torch.set_num_threads(3)
    torch.set_float32_matmul_precision("high")
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
    yield settings()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(mode=False)
    torch.set_float32_matmul_precision("highest")
    for number, handler in zip(STOP_SIGNALS, handlers, strict=True):
        signal.signal(number, handler)


def test_settings_of_the_process_are_the_caller_s_again(
    of_ones_own: dict[str, Any], tiny_recipe: Path, tmp_path: Path, tiny_task: Callable[..., Any]
) -> None:
    seen: list[dict[str, Any]] = []
    paceline.train(
        tiny_recipe,
        overrides={"train.duration": "1 steps", "train.deterministic": True, "train.float32_matmul": "highest"},
        run_dir=tmp_path,
        task=tiny_task(on_loss=lambda *_: seen.append(settings())),
        quiet=True,
    )
    assert (seen[0]["threads"], seen[0]["deterministic"]) == (1, True)
    assert seen[0]["products"] == ("highest", False)
    assert seen[0]["handlers"] != of_ones_own["handlers"]
    assert settings() == of_ones_own


def test_they_are_also_after_a_failure(
    of_ones_own: dict[str, Any], tiny_recipe: Path, tmp_path: Path, tiny_task: Callable[..., Any]
) -> None:
    def fail(*_: Any) -> None:
        raise TrainingError("no more")

    with pytest.raises(TrainingError, match="no more"):
        paceline.train(tiny_recipe, run_dir=tmp_path, task=tiny_task(on_loss=fail), quiet=True)
    assert settings() == of_ones_own
