"""Estimated memory against a GPU's own count, and batches found by trying there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.devices import recognise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from estimate import compared  # noqa: E402
from memory_cases import on_gpu  # noqa: E402

CASES = tuple(on_gpu())


def test_there_are_enough_steps() -> None:
    assert len(CASES) >= 20


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_estimate_is_within_3_per_cent_of_what_pytorch_allocates(case: object) -> None:
    row = compared(case, torch.device("cuda", 0))
    assert abs(row["error"]) <= 0.03, row


def test_what_is_said_to_fit_fits(tmp_path: Path) -> None:
    """The largest micro-batch that is estimated for a quarter of the device survives a trial there."""
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
