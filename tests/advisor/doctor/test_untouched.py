"""A look leaves no trace: no state of the process, no file, no method of torch."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.backends import cuda, cudnn, mkldnn
from torch.utils.data import DataLoader

RUDE = """
import os
import random

import numpy as np
import torch
from torch.backends import cudnn

import paceline

torch.autograd.set_detect_anomaly(True)
assert cudnn.benchmark == bool(cudnn.benchmark)
cudnn.benchmark = False
os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
os.environ.pop("PACELINE_TEST_STAYS")


class Task(paceline.ImageClassification):
    def loss(self, model, batch):
        torch.manual_seed(1)
        torch.rand(3, device=batch.inputs.device)
        np.random.seed(1)
        random.seed(1)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(2)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_default_dtype(torch.float32)
        np.seterr(all="raise")
        torch.set_autocast_enabled("cpu", True)
        return super().loss(model, batch)

    def build_model(self):
        network = super().build_model()
        {switches}
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        return network
"""
SWITCHES = {
    "old names": """
        torch.set_float32_matmul_precision("high")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        cudnn.allow_tf32 = False
        torch.backends.mkldnn.deterministic = True
""",
    "new names": """
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.mkldnn.conv.fp32_precision = "bf16"
        cudnn.conv.fp32_precision = "ieee"
        torch.backends.cuda.enable_flash_sdp(False)
""",
    "both": """
        torch.set_float32_matmul_precision("medium")
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.backends.fp32_precision = "tf32"
""",
}


_WITH_A_PRECISION: tuple[Any, ...] = (
    *(torch.backends, cuda.matmul, cudnn, cudnn.conv, cudnn.rnn),
    *(mkldnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn),
)


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
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_default_device(),
        (cudnn.benchmark, cudnn.enabled, cudnn.deterministic, cudnn.allow_tf32),
        (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32),
        [each.fp32_precision for each in _WITH_A_PRECISION],
        (mkldnn.deterministic, cuda.flash_sdp_enabled(), cuda.matmul.allow_bf16_reduced_precision_reduction),
        (torch.is_autocast_enabled("cpu"), np.geterr()),
        dict(os.environ),
        Path.cwd(),
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
        DataLoader.__init__,
    )


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize("switches", SWITCHES)
def test_a_rude_task_changes_nothing(examined: Any, tmp_path: Path, switches: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("PACELINE_TEST_STAYS", "yes")
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    before, files = state(), set(tmp_path.iterdir())
    requested = {"task": "mine:Task"}
    diagnosis = examined(requested, code=RUDE.replace("        {switches}\n", SWITCHES[switches]), device="a100")
    assert state() == before
    assert diagnosis.findings[0].name == "anomaly_mode"
    found = {each.name: each for each in diagnosis.findings}
    assert "debug_environment" in found
    (place,) = found["autotune_off"].places
    assert (place.line, place.what) == (13, "cudnn.benchmark = False")
    own = set(tmp_path.glob("mine_*.py"))  # what the test itself has written
    assert {path.name for path in set(tmp_path.iterdir()) - files - own} <= {"__pycache__"}


def test_a_network_that_sets_the_default_device_when_it_is_imported(examined: Callable[..., Any]) -> None:
    before = state()
    code = "import torch\ntorch.set_default_device('meta')\nfrom torch import nn\ndef net(num_classes):\n"
    code += "    return nn.Sequential(nn.Flatten(), nn.Linear(3072, num_classes))\n"
    examined({"model.name": "mine:net", "model.options": "{}"}, code=code, device="a100")
    assert state() == before


def test_a_task_that_fails_is_no_reason_to_say_nothing(examined: Callable[..., Any]) -> None:
    code = (
        "import paceline\nclass Task(paceline.ImageClassification):\n    def loss(self, model, batch):\n        1 / 0\n"
    )
    before = state()
    diagnosis = examined({"task": "mine:Task", "train.precision": "fp32"}, code=code, device="a100")
    assert state() == before
    assert "ZeroDivisionError" in diagnosis.unseen["code"]
    assert [each.name for each in diagnosis.findings] == ["precision"]
