"""Twelve mistakes, each planted alone into a clean recipe: each is named first, with evidence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

Examined = Callable[..., Any]

ITEM = """
import paceline


class Task(paceline.ImageClassification):
    total = 0.0

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        self.total += loss.item()
        return loss
"""
ON_THE_HOST = """
import torch
import torch.nn.functional as F

import paceline


class Task(paceline.ImageClassification):
    def loss(self, model, batch):
        weights = torch.rand(64).to(batch.inputs.device)
        return F.cross_entropy(model(batch.inputs), batch.targets, weight=weights)
"""
ANOMALY = """
import torch

import paceline

torch.autograd.set_detect_anomaly(True)


class Task(paceline.ImageClassification):
    pass
"""
ANOMALY_IN_THE_LOSS = """
import torch

import paceline


class Task(paceline.ImageClassification):
    def loss(self, model, batch):
        with torch.autograd.detect_anomaly(check_nan=False):
            return super().loss(model, batch)
"""
NETWORK = """
from torch import nn


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias={bias})
        self.norm = nn.BatchNorm2d(outputs)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.blocks = nn.Sequential(Block(3, 64), Block(64, 128), Block(128, 128))
        self.head = nn.Linear(128, num_classes)
        {extra}

    def forward(self, x):
        return self.head(self.blocks(x).mean((2, 3)))
"""
UNUSED = "self.second_head = nn.Linear(128, num_classes)"


def network(*, bias: bool = False, extra: str = "pass") -> str:
    return NETWORK.format(bias=bias, extra=extra)


def folder(root: Path) -> Path:
    """A folder of small pictures of two classes."""
    noise = np.random.default_rng(0)
    for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (root / name).mkdir(parents=True)
        for number in range(8):
            pixels = noise.integers(0, 256, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


KEPT = """
import torch
import torch.nn.functional as F

import paceline


class Task(paceline.ImageClassification):
    weights = None

    def loss(self, model, batch):
        if self.weights is None:
            self.weights = torch.rand(64).to(batch.inputs.device)
            self.largest = self.weights.max().item()
        return F.cross_entropy(model(batch.inputs), batch.targets, weight=self.weights)
"""

TASK, NET = {"task": "mine:Task"}, {"model.name": "mine:Net", "model.options": "{}"}


def first(diagnosis: Any) -> Any:
    assert diagnosis.findings, diagnosis
    assert not any(diagnosis.unseen), diagnosis.unseen
    return diagnosis.findings[0]


@pytest.mark.parametrize("device", ["a100", "cpu"])
def test_nothing_is_found_in_a_clean_recipe(examined: Examined, device: str) -> None:
    diagnosis = examined(device=device, room=True)
    assert (diagnosis.findings, diagnosis.unseen) == ((), {})
    assert diagnosis.is_healthy


def test_nothing_is_found_in_it_for_other_accelerators_at_their_precision(examined: Examined) -> None:
    assert examined({"train.precision": "fp16"}, device="t4").findings == examined(device="mi300x").findings == ()


def test_nothing_is_found_in_clean_code_of_ones_own(examined: Examined, own_loader: Callable[..., str]) -> None:
    for code, asked in ((network(), NET), (own_loader(), TASK), (KEPT, TASK)):
        assert examined(asked, code=code, device="a100").findings == ()
    assert examined(TASK, code=own_loader(pin_memory=False), device="cpu").findings == ()


# What is planted in code and recipe, the first finding, and its places: line, what, count. What else is found of all of
# them, and where the command places them for a CPU too, is in tests/cli/test_doctor_planted.py.
DETECTED = "with torch.autograd.detect_anomaly(check_nan=False):"
PLANTED: dict[str, tuple[str, dict[str, Any], str, list[tuple[int, str, int]]]] = {
    "a value read in every step": (ITEM, TASK, "synchronisation", [(10, ".item()", 1)]),
    "biases": (network(bias=True), NET, "bias_before_batchnorm", [(5, "class Block", 3)]),
    "anomaly mode": (ANOMALY, TASK, "anomaly_mode", [(6, "torch.autograd.set_detect_anomaly(True)", 1)]),
    "anomaly mode in the loss": (*(ANOMALY_IN_THE_LOSS, TASK, "anomaly_mode"), [(9, DETECTED, 1)]),
    "tensors of the host": (ON_THE_HOST, TASK, "host_tensors", [(10, "torch.rand without device=", 1)]),
}


@pytest.mark.parametrize("case", PLANTED)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_a_finding_says_where(examined: Examined, case: str) -> None:
    code, asked, name, places = PLANTED[case]
    found = first(examined(asked, code=code, device="a100"))
    assert (found.name, found.severity) == (name, "slows")
    assert [(place.line, place.what, place.count) for place in found.places] == places


def test_what_waits_on_a_gpu_is_a_notice_on_a_cpu(examined: Examined) -> None:
    assert first(examined(TASK, code=ITEM, device="cpu")).severity == "notice"


@pytest.mark.everyday
def test_no_loader_processes(examined: Examined, tmp_path: Path) -> None:
    files = {"data.dataset": "image_folder", "data.path": folder(tmp_path / "photos"), "data.samples": "null"}
    files |= {"data.classes": "null", "data.augment.crop": "random_resized", "batch.global_size": 8}
    files |= {"train.duration": "4 epochs"}
    clean = examined(files, device="a100")
    assert {each.name for each in clean.findings} <= {"memory_bound_layers", "evaluation_often"}, clean.findings
    found = first(examined(files | {"data.workers": 0}, device="a100"))
    assert found.name == "no_workers"
    assert "data.workers=0" in found.evidence
    assert found.advice.overrides == {"data.workers": "auto"}


LOADERS = {
    "no_workers": {"num_workers": 0, "persistent_workers": False},
    "unpinned": {"pin_memory": False},
    "no_persistent_workers": {"persistent_workers": False},
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_of_ones_own(examined: Examined, own_loader: Callable[..., str], name: str) -> None:
    found = first(examined(TASK, code=own_loader(**LOADERS[name]), device="a100"))
    assert found.name == name
    assert [(place.line, place.what) for place in found.places] == [(25, "DataLoader")]
    if name == "no_persistent_workers":
        assert found.evidence == "persistent_workers=False in your own DataLoader, 1 process"


def test_channels_first_and_records_of_every_step(examined: Examined) -> None:
    found = first(examined({"model.channels_last": "false"}, device="a100"))
    assert (found.name, "7 convolutions" in found.evidence) == ("channels_last", True)
    assert found.advice.overrides == {"model.channels_last": "auto"}
    found = first(examined({"telemetry.log_every": "1 step"}, device="a100"))
    assert (found.name, found.advice.overrides) == ("log_every_step", {"telemetry.log_every": "10 steps"})


def test_fp32(examined: Examined) -> None:
    for device, precision in {"a100": "auto", "t4": "fp16"}.items():
        found = first(examined({"train.precision": "fp32"}, device=device))
        assert found.name == "precision"
        assert found.advice.overrides == {"train.precision": precision}
        assert "TFLOP/s" in found.evidence


def test_fp32_on_a_processor_with_bf16(examined: Examined) -> None:
    if examined().precision != "bf16":
        pytest.skip("this processor has no bf16 products")
    assert first(examined({"train.precision": "fp32"})).name == "precision"


def test_odd_shapes(examined: Examined) -> None:
    found = first(examined({"model.options": "{width: 61, stages: 2}"}, device="a100"))
    assert (found.name, found.predicted) == ("dimension_alignment", True)
    assert "61→122" in found.evidence
    assert "61 to 64" in found.advice.words


def test_unused_parameters(examined: Examined) -> None:
    found = first(examined(NET, code=network(extra=UNUSED), device="a100"))
    assert (found.name, found.severity) == ("unused_parameters", "breaks")
    assert found.layers == ("second_head.weight", "second_head.bias")
    assert found.advice.overrides == {"model.frozen": ["second_head.*"]}
