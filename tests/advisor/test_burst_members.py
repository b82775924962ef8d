"""What several processes measured becomes one answer, and those that cannot be started leave nothing behind."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import LaunchError
from paceline.recipe.load import load_recipe
from paceline_advisor.bench.interleaved import of_all, run_interleaved
from paceline_advisor.launches import CommandProcess


def answer(seconds: float, joules: float | None = None, counter: str = "", peak: int | None = None) -> dict[str, Any]:
    return {
        "steps": 10,
        "samples": 320,
        "seconds": seconds,
        "phases": {"data_wait": seconds / 10},
        "joules": joules,
        "energy_counter": counter,
        "peak_memory_bytes": peak,
    }


def test_the_slowest_process_says_how_long_it_took() -> None:
    # Of batches alone, nothing makes the first process wait for the others.
    found = of_all([answer(1.0, peak=5), answer(4.0, peak=3), answer(2.0)])
    assert (found["seconds"], found["phases"], found["samples"]) == (4.0, {"data_wait": 0.4}, 320)
    assert found["peak_memory_bytes"] == 5
    assert found["joules"] is None


def test_each_device_counts_once() -> None:
    boards = [answer(1.0, 100.0, "GPU-a"), answer(1.0, 120.0, "GPU-b"), answer(1.0, 90.0, "GPU-c")]
    assert of_all(boards)["joules"] == 310.0
    # Processes on one machine's processors read the same counter.
    assert of_all([answer(1.0, 50.0, "rapl"), answer(1.1, 51.0, "rapl")])["joules"] == 51.0
    assert of_all([answer(1.0, 100.0, "GPU-a"), answer(1.0, None, "GPU-b")])["joules"] is None


@pytest.fixture
def no_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses to: a variable that is longer than it hands over."""
    monkeypatch.setenv("PACELINE_TEST_TOO_LONG", "x" * 200_000)


@pytest.mark.usefixtures("no_process_starts")
def test_a_variant_that_cannot_be_started_is_reported_and_leaves_nothing(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gc.collect()  # other tests' files are not closed meanwhile
    before = set(os.listdir("/proc/self/fd"))
    found = run_interleaved({"a": load_recipe(tiny_recipe).recipe}, rounds=1, block_seconds=0.05, processes=2)["a"]
    assert found.trouble == "a process cannot be started (Argument list too long)"
    assert set(os.listdir("/proc/self/fd")) <= before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_process_starts")
def test_a_launch_that_cannot_be_started_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot be started"):
        CommandProcess(["environment"], tmp_path / "launch", limit_seconds=10)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
