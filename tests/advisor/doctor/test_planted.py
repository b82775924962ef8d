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

DEVICES = pytest.mark.parametrize("device", ["a100", pytest.param("cpu", marks=pytest.mark.thorough)])
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


@pytest.mark.parametrize("device", ["t4", "mi300x"])
def test_nothing_is_found_in_it_for_other_accelerators_at_their_precision(examined: Examined, device: str) -> None:
    asked = {"train.precision": "fp16"} if device == "t4" else {}
    assert examined(asked, device=device).findings == ()


def test_nothing_is_found_in_clean_code_of_ones_own(examined: Examined, own_loader: Callable[..., str]) -> None:
    for code, asked in ((network(), NET), (own_loader(), TASK), (KEPT, TASK)):
        assert examined(asked, code=code, device="a100").findings == ()


@DEVICES
def test_1_a_value_read_in_every_step(examined: Examined, device: str) -> None:
    found = first(examined(TASK, code=ITEM, device=device))
    assert found.name == "synchronisation"
    (place,) = found.places
    assert (place.line, place.what, place.count) == (10, ".item()", 1)
    assert found.severity == ("slows" if device == "a100" else "notice")


@DEVICES
@pytest.mark.everyday
def test_2_no_loader_processes(examined: Examined, tmp_path: Path, device: str) -> None:
    files = {"data.dataset": "image_folder", "data.path": folder(tmp_path / "photos"), "data.samples": "null"}
    files |= {"data.classes": "null", "data.augment.crop": "random_resized", "batch.global_size": 8}
    files |= {"train.duration": "4 epochs"}
    clean = examined(files, device=device)
    assert {each.name for each in clean.findings} <= {"memory_bound_layers", "evaluation_often"}, clean.findings
    found = first(examined(files | {"data.workers": 0}, device=device))
    assert found.name == "no_workers"
    assert "data.workers=0" in found.evidence
    assert found.advice.overrides == {"data.workers": "auto"}


def test_2_no_loader_processes_in_a_loader_of_ones_own(examined: Examined, own_loader: Callable[..., str]) -> None:
    code = own_loader(num_workers=0, persistent_workers=False)
    found = first(examined(TASK, code=code, device="a100"))
    assert found.name == "no_workers"
    assert [place.what for place in found.places] == ["DataLoader"]


def test_3_batches_from_pageable_memory(examined: Examined, own_loader: Callable[..., str]) -> None:
    found = first(examined(TASK, code=own_loader(pin_memory=False), device="a100"))
    assert found.name == "unpinned"
    assert found.places[0].line == 25
    assert examined(TASK, code=own_loader(pin_memory=False), device="cpu").findings == ()


@DEVICES
def test_4_channels_first(examined: Examined, device: str) -> None:
    found = first(examined({"model.channels_last": "false"}, device=device))
    assert found.name == "channels_last"
    assert "7 convolutions" in found.evidence
    assert found.advice.overrides == {"model.channels_last": "auto"}


def test_5_fp32(examined: Examined) -> None:
    for device, precision in {"a100": "auto", "t4": "fp16"}.items():
        found = first(examined({"train.precision": "fp32"}, device=device))
        assert found.name == "precision"
        assert found.advice.overrides == {"train.precision": precision}
        assert "TFLOP/s" in found.evidence


def test_5_fp32_on_a_processor_with_bf16(examined: Examined) -> None:
    if examined().precision != "bf16":
        pytest.skip("this processor has no bf16 products")
    found = first(examined({"train.precision": "fp32"}))
    assert found.name == "precision"


@DEVICES
def test_6_biases_before_batchnorm(examined: Examined, device: str) -> None:
    found = first(examined(NET, code=network(bias=True), device=device))
    assert found.name == "bias_before_batchnorm"
    assert found.layers == ("blocks.0.conv", "blocks.1.conv", "blocks.2.conv")
    assert [(place.line, place.what, place.count) for place in found.places] == [(5, "class Block", 3)]


def test_7_odd_shapes(examined: Examined) -> None:
    found = first(examined({"model.options": "{width: 61, stages: 2}"}, device="a100"))
    assert found.name == "dimension_alignment"
    assert "61→122" in found.evidence
    assert "61 to 64" in found.advice.words
    assert found.predicted


@pytest.mark.parametrize(("code", "line"), [(ANOMALY, 6), (ANOMALY_IN_THE_LOSS, 9)])
@DEVICES
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_8_anomaly_mode(examined: Examined, code: str, line: int, device: str) -> None:
    found = first(examined(TASK, code=code, device=device))
    assert found.name == "anomaly_mode"
    assert found.places[0].line == line


@DEVICES
def test_9_tensors_made_on_the_host(examined: Examined, device: str) -> None:
    found = first(examined(TASK, code=ON_THE_HOST, device=device))
    assert found.name == "host_tensors"
    assert [(place.line, place.count) for place in found.places] == [(10, 1)]


@DEVICES
def test_10_unused_parameters(examined: Examined, device: str) -> None:
    found = first(examined(NET, code=network(extra=UNUSED), device=device))
    assert found.name == "unused_parameters"
    assert found.severity == "breaks"
    assert found.layers == ("second_head.weight", "second_head.bias")
    assert found.advice.overrides == {"model.frozen": ["second_head.*"]}


@DEVICES
def test_11_a_record_for_every_step(examined: Examined, device: str) -> None:
    found = first(examined({"telemetry.log_every": "1 step"}, device=device))
    assert found.name == "log_every_step"
    assert found.advice.overrides == {"telemetry.log_every": "10 steps"}


@DEVICES
def test_12_processes_that_do_not_persist(examined: Examined, own_loader: Callable[..., str], device: str) -> None:
    found = first(examined(TASK, code=own_loader(persistent_workers=False), device=device))
    assert found.name == "no_persistent_workers"
    assert found.evidence == "persistent_workers=False in a DataLoader of your own, 1 process"
