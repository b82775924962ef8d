"""Estimated memory against a GPU's own count, and what is said to fit against real runs that may take no more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.distributed.device import describe_machine
from paceline.host.devices import recognise
from paceline.recipe.load import load_recipe
from paceline.trainer.fake_step import fake_step
from paceline_advisor.memory.allocator import MIB
from paceline_advisor.memory.find_batch import TrialRunner
from paceline_advisor.memory.job import SimulatedRun, allocator_settings
from paceline_advisor.memory.trace import STEP, trace_steps, without_collection

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from estimate import compared  # noqa: E402  # of the folder named above
from memory_cases import on_gpu  # noqa: E402  # the same

CASES = tuple(on_gpu())
GIB = 1024 * MIB
# What decides: layouts, precisions, dropout, attention, mixing, recomputing, an average, a large evaluation, many small
# blocks. Each with the bytes that PyTorch may have.
LIMITED: dict[str, tuple[dict[str, Any], int]] = {
    "resnet50 in bf16": ({"model.name": "resnet50"}, 6 * GIB),
    "resnet50 in fp32, channels first": (
        {"model.name": "resnet50", "train.precision": "fp32", "model.channels_last": False},
        8 * GIB,
    ),
    "resnet50 that scores many at once": ({"model.name": "resnet50", "evaluate.batch_size": 1024}, 6 * GIB),
    "resnet50, recomputed": ({"model.name": "resnet50", "model.activation_checkpointing": "full"}, 4 * GIB),
    "resnet50 with an average": ({"model.name": "resnet50", "train.ema": 0.999}, 5 * GIB),
    "vit_small with mixing": (
        {"model.name": "vit_small_patch16_224", "data.mix.mixup": 0.2, "data.mix.cutmix": 1.0},
        6 * GIB,
    ),
    "vit_small in fp32": ({"model.name": "vit_small_patch16_224", "train.precision": "fp32"}, 6 * GIB),
    "efficientnet_b0": ({"model.name": "efficientnet_b0"}, 5 * GIB),
    "convnext_tiny in fp16": ({"model.name": "convnext_tiny", "train.precision": "fp16"}, 6 * GIB),
    "vgg16, most of it weights": ({"model.name": "torchvision:vgg16"}, 6 * GIB),
}
SETTINGS = ("", "expandable_segments:True", "max_split_size_mb:128", "roundup_power2_divisions:4")


def test_there_are_enough_steps() -> None:
    assert len(CASES) >= 20


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_estimate_is_within_3_per_cent_of_what_pytorch_allocates(case: Any) -> None:
    for row in compared(case, torch.device("cuda", 0)):
        assert abs(row["error"]) <= (0.03 if row["part"] == STEP else 0.1), row


def limited_run(overrides: dict[str, Any], room: int, variables: dict[str, str]) -> tuple[int, TrialRunner]:
    """The largest micro-batch that is said to fit, and where it can be tried with no more memory than that."""
    asked = {
        "data.samples": 65536,
        "data.image_size": 224,
        "batch.global_size": 8192,
        "evaluate.every": "1 epochs",
        "optimizer": None,
        "optimizer.name": "adamw",
        "optimizer.lr": 1e-4,
        "train.precision": "bf16",
        **overrides,
    }
    recipe = load_recipe("synthetic", asked).recipe
    machine = describe_machine(torch.device("cuda", 0))
    allocator, _ = allocator_settings(variables)
    with without_collection(), fake_step(recipe, machine=machine, scores=True) as step:
        job = SimulatedRun(step, trace_steps(step), machine, shards=1, allocator=allocator)
        # PyTorch's limit counts its own segments only; the driver's and libraries' share is beside it.
        largest = job.largest(room + job.outside)
    ground = TrialRunner(recipe=recipe, processes=1, share=job.share, memory=room, device_type="cuda", log=print)
    return largest, ground


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITED)
def test_nothing_that_is_said_to_fit_runs_out_of_memory(name: str) -> None:
    """A real run with the largest micro-batch under `set_per_process_memory_fraction`: never wrong on this side."""
    largest, ground = limited_run(*LIMITED[name], {})
    assert 0 < largest < ground.share
    assert ground.fits(largest), ground.trials


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
def test_that_holds_however_the_allocator_is_set(settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"PYTORCH_CUDA_ALLOC_CONF": settings}
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)  # for the trial, which is a process of its own
    largest, ground = limited_run({"model.name": "resnet50"}, 6 * GIB, variables)
    assert ground.fits(largest), ground.trials


@pytest.mark.slow
def test_it_is_not_far_on_the_other_side() -> None:
    """Half as much again does not fit: what is said to fit is no small part of what does."""
    largest, ground = limited_run(*LIMITED["resnet50 in bf16"], {})
    assert not ground.fits(largest + largest // 2), ground.trials


def test_what_is_found_is_what_is_estimated(tmp_path: Path) -> None:
    """The largest micro-batch that is found in a quarter of the device takes what the estimate says."""
    whole = torch.cuda.get_device_properties(0).total_memory
    memory = f"{whole // 4 // 2**20}MiB"
    overrides = ["model.name=resnet50", "data.samples=65536", "batch.global_size=8192", "train.precision=bf16"]
    words = ["find-batch", "synthetic", *overrides, "--memory", memory, "--processes", "1", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["largest_micro_batch"] < 8192
    assert abs(found["estimate_error"]) <= 0.1


def test_this_device_is_known_with_no_more_memory_than_it_has() -> None:
    known = recognise(torch.cuda.get_device_name(0))
    if known is None:
        pytest.skip(f"{torch.cuda.get_device_name(0)} is not in the table")
    assert known.memory_bytes <= torch.cuda.get_device_properties(0).total_memory
