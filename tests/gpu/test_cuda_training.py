"""The same run on a GPU: it trains, resumes to the bit, and prefetches what the CPU would compute."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.data.batch import Normalize, Placement, to_device
from paceline.data.image.datasets import open_dataset
from paceline.data.image.pipeline import open_backend
from paceline.data.order import StepGeometry
from paceline.host.world import World
from paceline.recipe.data import Data

SHORT = {
    "train.duration": "20 steps",
    "schedule.warmup": "2 steps",
    "parallel.device": "cuda",
    "telemetry.log_every": "5 steps",
}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_digits_trains_on_the_gpu(tmp_path: Path, precision: str) -> None:
    result = paceline.train("digits", overrides={**SHORT, "train.precision": precision}, run_dir=tmp_path, quiet=True)
    assert result.status == "completed"
    assert result.summary.peak_memory_bytes > 0
    assert result.metrics["top1_accuracy"] > 20


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    exact = {**SHORT, "train.deterministic": True, "checkpoint.every": "10 steps"}
    whole = paceline.train("digits", overrides=exact, run_dir=tmp_path / "whole", quiet=True)
    first = {**exact, "checkpoint.keep": 5}
    paceline.train("digits", overrides=first, run_dir=tmp_path / "resumed", quiet=True)
    again = paceline.train(
        "digits",
        overrides=first,
        run_dir=tmp_path / "resumed",
        resume=str(tmp_path / "resumed" / "checkpoints" / "step-00000010"),
        quiet=True,
    )
    assert again.summary.resumes == 1
    assert again.summary.weights_sha256 == whole.summary.weights_sha256


def test_prefetched_batches_equal_the_cpu_s() -> None:
    data = Data(dataset="digits")
    dataset = open_dataset(data)
    geometry = StepGeometry(seed=0, samples=len(dataset.train), global_batch_size=64, logical_ranks=1)

    def batches(device: str) -> list[torch.Tensor]:
        placement = Placement(device=torch.device(device))
        backend = open_backend("memory", data, dataset, "train", seed=0, placement=placement)
        stream = backend.batches(geometry.stream(0, 10, World()))
        normalize = Normalize(dataset.mean, dataset.std, placement)
        return [batch.inputs.cpu() for batch in to_device(stream, normalize, placement)]

    for ours, reference in zip(batches("cuda"), batches("cpu"), strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-6)


def waits(run_dir: Path, steps: int, changes: dict[str, Any]) -> Counter[str]:
    """Where the host waited for the device in a run with one record, how often."""
    overrides = {**SHORT, "telemetry.log_every": f"{steps} steps", "checkpoint.every": "off", "evaluate.every": "off"}
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            paceline.train(
                "digits",
                overrides={**overrides, **changes, "train.duration": f"{steps} steps"},
                run_dir=run_dir,
                quiet=True,
            )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Counter(f"{each.filename}:{each.lineno}" for each in caught if "synchronizing" in str(each.message))


@pytest.mark.parametrize(
    "changes",
    [
        {"train.precision": "bf16"},
        {"train.precision": "fp32", "optimizer.clip_norm": 1.0},
        {"train.precision": "fp32", "optimizer.name": "adamw"},
    ],
    ids=["bf16", "clipped", "adamw"],
)
def test_a_step_without_a_record_does_not_wait_for_the_device(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Building, measuring, the one record and the last save wait as often however many steps there are."""
    few, many = (waits(tmp_path / str(steps), steps, changes) for steps in (20, 50))
    assert many - few == Counter()
