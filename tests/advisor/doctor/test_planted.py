"""Twelve mistakes, each planted alone into a clean recipe: each is named where the guide says, with evidence."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

Examined = Callable[..., Any]

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "doctor.md"
LOSS = "return super().loss(model, batch)"
TASK_CODE = """import torch
import torch.nn.functional as F
import paceline
{above}
class Task(paceline.ImageClassification):
    total, weights = 0.0, None
    def loss(self, model, batch):
{loss}
"""


def task(loss: str = LOSS, above: str = "") -> str:
    """A task of one's own, whose loss begins in line 8."""
    return TASK_CODE.format(above=above, loss=textwrap.indent(loss, " " * 8))


ITEM = task("loss = super().loss(model, batch)\nself.total += loss.item()\nreturn loss")
WEIGHTED = "return F.cross_entropy(model(batch.inputs), batch.targets, weight=self.weights)"
ON_THE_HOST = task(f"self.weights = torch.rand(64).to(batch.inputs.device)\n{WEIGHTED}")
ANOMALY = task(above="torch.autograd.set_detect_anomaly(True)")
ANOMALY_IN_THE_LOSS = task(f"with torch.autograd.detect_anomaly(check_nan=False):\n    {LOSS}")
KEPT = task(
    "if self.weights is None:\n"
    "    self.weights = torch.rand(64).to(batch.inputs.device)\n"
    f"    self.largest = self.weights.max().item()\n{WEIGHTED}"
)
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


# A task with a DataLoader of its own, as a user may bring one along.
OWN_LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.data.batch import Batch

OPTIONS = {options}


class Samples(Dataset):
    def __getitem__(self, ids):
        return torch.zeros(len(ids), 3, 32, 32), torch.zeros(len(ids), dtype=torch.int64)


class Own:
    def __init__(self, placement):
        self.placement = placement

    def start(self, *, training, evaluation):
        pass

    def train_batches(self, geometry, first, last, world):
        parts = list(geometry.stream(first, last, world))
        loader = DataLoader(Samples(), sampler=[part.ids for part in parts], batch_size=None, **OPTIONS)
        layout = torch.channels_last if self.placement.channels_last else torch.contiguous_format
        for part, (images, labels) in zip(parts, loader):
            yield Batch(images.to(memory_format=layout), labels, part.ids, part)

    def close(self):
        pass


class Task(paceline.ImageClassification):
    def open_pipeline(self, placement):
        return Own(placement)
"""


def own_loader(**changes: Any) -> str:
    options = {"num_workers": 1, "pin_memory": True, "persistent_workers": True, **changes}
    return OWN_LOADER.replace("{options}", repr(options))


TASK, NET = {"task": "mine:Task"}, {"model.name": "mine:Net", "model.options": "{}"}
# What is planted in the code, what in the recipe, and what the doctor calls it.
FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "`item()` in every step": (ITEM, TASK, "synchronisation"),
    "no loader processes": (own_loader(num_workers=0, persistent_workers=False), TASK, "no_workers"),
    "batches from pageable memory": (own_loader(pin_memory=False), TASK, "unpinned"),
    "images as NCHW": ("", {"model.channels_last": "false"}, "channels_last"),
    "fp32": ("", {"train.precision": "fp32"}, "precision"),
    "biases before BatchNorm": (network(bias=True), NET, "bias_before_batchnorm"),
    "odd widths": ("", {"model.options": "{width: 61, stages: 2}"}, "dimension_alignment"),
    "anomaly mode": (ANOMALY, TASK, "anomaly_mode"),
    "tensors made on the host": (ON_THE_HOST, TASK, "host_tensors"),
    "unused parameters": (network(extra=UNUSED), NET, "unused_parameters"),
    "a record for every step": ("", {"telemetry.log_every": "1 step"}, "log_every_step"),
    "loader processes that do not persist": (own_loader(persistent_workers=False), TASK, "no_persistent_workers"),
}
# What costs a GPU something, and a CPU nothing or not in any case.
GPU_ONLY = {"batches from pageable memory", "fp32", "odd widths"}
# What the finding says for a GPU: lines of code, what stands there and how often; words of the evidence; the change.
LOADER = {"places": [(25, "DataLoader", 1)]}
SAYS: dict[str, dict[str, Any]] = {
    "`item()` in every step": {"places": [(9, ".item()", 1)]},
    "no loader processes": LOADER,
    "batches from pageable memory": LOADER,
    "images as NCHW": {"evidence": "7 convolutions", "overrides": {"model.channels_last": "auto"}},
    "fp32": {"evidence": "TFLOP/s", "overrides": {"train.precision": "auto"}},
    "biases before BatchNorm": {"places": [(5, "class Block", 3)]},
    "odd widths": {"evidence": "61→122", "words": "61 to 64", "predicted": True},
    "anomaly mode": {"places": [(4, "torch.autograd.set_detect_anomaly(True)", 1)]},
    "tensors made on the host": {"places": [(8, "torch.rand without device=", 1)]},
    "unused parameters": {
        "severity": "breaks",
        "layers": ("second_head.weight", "second_head.bias"),
        "overrides": {"model.frozen": ["second_head.*"]},
    },
    "a record for every step": {"overrides": {"telemetry.log_every": "10 steps"}},
    "loader processes that do not persist": {
        **LOADER,
        "evidence": "persistent_workers=False in your own DataLoader, 1 process",
    },
}


def place_in_the_guide(fault: str, device: str) -> int:
    """At which place of the findings the guide's table says that a fault's finding stands."""
    row = rf"^\| {re.escape(fault)} \| `{FAULTS[fault][2]}` \| (\d+) \| (\S+) \|$"
    found = re.search(row, GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, fault
    return int(found[["a100", "cpu"].index(device) + 1])


@pytest.mark.parametrize(
    ("fault", "device"),
    [*((fault, "a100") for fault in FAULTS), *((fault, "cpu") for fault in FAULTS if fault not in GPU_ONLY)],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_a_fault_is_named_where_the_guide_says_and_told_with_evidence(
    examined: Examined, fault: str, device: str
) -> None:
    code, requested, name = FAULTS[fault]
    diagnosis = examined(requested, code=code, device=device)
    assert diagnosis.unseen == {}
    assert all(each.evidence and each.source for each in diagnosis.findings)
    names = [each.name for each in diagnosis.findings]
    assert names.index(name) + 1 == place_in_the_guide(fault, device)
    if device == "a100":
        found = diagnosis.findings[names.index(name)]
        message = {"severity": found.severity, "layers": found.layers, "predicted": found.predicted}
        message |= {"evidence": found.evidence, "words": found.advice.words, "overrides": found.advice.overrides}
        message["places"] = [(place.line, place.what, place.count) for place in found.places]
        for key, expected in {"severity": "slows", **SAYS[fault]}.items():
            assert expected in message[key] if isinstance(expected, str) else expected == message[key], key


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_anomaly_mode_in_the_loss_is_found_at_its_line(examined: Examined) -> None:
    found = examined(TASK, code=ANOMALY_IN_THE_LOSS, device="a100").findings[0]
    assert (found.name, [place.line for place in found.places]) == ("anomaly_mode", [8])


@pytest.mark.parametrize("device", ["a100", "cpu"])
def test_nothing_is_found_in_a_clean_recipe(examined: Examined, device: str) -> None:
    diagnosis = examined(device=device, room=True)
    assert (diagnosis.findings, diagnosis.unseen) == ((), {})
    assert diagnosis.is_healthy


def test_nothing_is_found_in_it_for_other_accelerators_at_their_precision(examined: Examined) -> None:
    assert examined({"train.precision": "fp16"}, device="t4").findings == examined(device="mi300x").findings == ()


@pytest.mark.parametrize("device", ["a100", "cpu"])
def test_nothing_is_found_in_clean_code_of_ones_own(examined: Examined, device: str) -> None:
    for code, requested in ((network(), NET), (own_loader(), TASK), (KEPT, TASK)):
        assert examined(requested, code=code, device=device).findings == ()


def test_what_costs_a_gpu_alone_is_less_or_nothing_on_a_cpu(examined: Examined) -> None:
    assert examined(TASK, code=own_loader(pin_memory=False), device="cpu").findings == ()
    assert examined(TASK, code=ITEM, device="cpu").findings[0].severity == "notice"


def folder(root: Path) -> Path:
    """A folder of small pictures of two classes."""
    noise = np.random.default_rng(0)
    for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (root / name).mkdir(parents=True)
        for number in range(8):
            pixels = noise.integers(0, 256, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


@pytest.mark.everyday
def test_no_loader_processes(examined: Examined, tmp_path: Path) -> None:
    files = {"data.dataset": "image_folder", "data.path": folder(tmp_path / "photos"), "data.samples": "null"}
    files |= {"data.classes": "null", "data.augment.crop": "random_resized", "batch.global_size": 8}
    files |= {"train.duration": "4 epochs"}
    clean = examined(files, device="a100")
    assert {each.name for each in clean.findings} <= {"evaluation_often"}, clean.findings
    found = examined(files | {"data.workers": 0}, device="a100").findings[0]
    assert (found.name, found.advice.overrides) == ("no_workers", {"data.workers": "auto"})
    assert "data.workers=0" in found.evidence


def test_fp32_where_another_precision_is_faster(examined: Examined) -> None:
    found = examined({"train.precision": "fp32"}, device="t4").findings[0]
    assert (found.name, found.advice.overrides) == ("precision", {"train.precision": "fp16"})
    if examined().precision != "bf16":
        pytest.skip("this processor has no bf16 products")
    assert examined({"train.precision": "fp32"}).findings[0].name == "precision"


def test_fp32_is_no_mistake_where_a_cpu_computes_a_network_faster_so(examined: Examined) -> None:
    depthwise = {"model.name": "mobilenetv2_100", "model.options": {}, "data.image_size": 96}
    found = examined(depthwise | {"train.precision": "fp32"})
    assert "precision" not in {each.name for each in found.findings}
