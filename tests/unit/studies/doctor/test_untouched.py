"""A look leaves no trace: no state of the process, no file, no method of torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.backends import cudnn
from torch.utils.data import DataLoader

RUDE = """
import random

import numpy as np
import torch
from torch.backends import cudnn

import paceline

torch.autograd.set_detect_anomaly(True)
cudnn.benchmark = False


class Task(paceline.ImageClassification):
    def loss(self, model, batch):
        torch.manual_seed(1)
        torch.rand(3, device=batch.inputs.device)
        np.random.seed(1)
        random.seed(1)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(2)
        torch.use_deterministic_algorithms(True)
        torch.set_default_dtype(torch.float32)
        return super().loss(model, batch)
"""


def state() -> tuple[Any, ...]:
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # noqa: NPY002  # the state that old code shares
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        (cudnn.benchmark, cudnn.enabled, cudnn.deterministic),
        DataLoader.__init__,
    )


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_a_rude_task_changes_nothing(examined: Callable[..., Any], tmp_path: Path) -> None:
    before, files = state(), set(tmp_path.iterdir())
    diagnosis = examined({"task": "mine:Task"}, code=RUDE, device="a100")
    assert state() == before
    assert diagnosis.findings[0].name == "anomaly_mode"
    assert "autotune_off" in {each.name for each in diagnosis.findings}
    (place,) = next(each.places for each in diagnosis.findings if each.name == "autotune_off")
    assert (place.line, place.what) == (11, "cudnn.benchmark = False")
    assert {path.name for path in set(tmp_path.iterdir()) - files} <= {"__pycache__", *tmp_path_code(tmp_path)}


def tmp_path_code(tmp_path: Path) -> set[str]:
    """What the test itself has written."""
    return {path.name for path in tmp_path.glob("mine_*.py")}


def test_a_task_that_fails_is_no_reason_to_say_nothing(examined: Callable[..., Any]) -> None:
    code = (
        "import paceline\nclass Task(paceline.ImageClassification):\n    def loss(self, model, batch):\n        1 / 0\n"
    )
    before = state()
    diagnosis = examined({"task": "mine:Task", "train.precision": "fp32"}, code=code, device="a100")
    assert state() == before
    assert "ZeroDivisionError" in diagnosis.unseen["code"]
    assert [each.name for each in diagnosis.findings] == ["precision"]
