"""Detection over processes: the same bits of weights, and of mean average precision, from one, two and three."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from calls import Call

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
    pytest.mark.slow,
    pytest.mark.world_size(3),
]

RECIPE = {
    "task": "detection",
    "model": {"name": "small_maskrcnn", "options": {"width": 8, "levels": 2, "channels": 8}},
    "data": {
        "dataset": "shapes",
        "boxes": {
            "short_sides": "off",
            "generated": {"samples": 16, "evaluation_samples": 7, "smallest_side": 32, "largest_side": 48},
        },
    },
    "batch": {"global_size": 6, "micro_size": 1},
    "optimizer": {"name": "adamw", "lr": 0.003},
    "train": {"duration": "4 steps", "precision": "fp32"},
    "evaluate": {"every": "4 steps", "batch_size": 2},
    "parallel": {"device": "cpu", "threads": 1},
    "telemetry": {"trackers": [], "report": False},
}


@pytest.fixture
def recipe(studio: Path) -> Path:
    path = studio / "boxes.yaml"
    path.write_text(json.dumps(RECIPE))
    return path


@pytest.mark.parametrize("several", [2, 3])
def test_exact_runs_of_one_two_and_three_processes_are_the_same(
    several: int, recipe: Path, studio: Path, run: Call, run_here: Call, summary: Call
) -> None:
    exact = ("train", recipe.name, "parallel.exact=true", "parallel.logical_ranks=6")
    found = []
    for processes in (1, several):
        run_dir = studio / f"boxes-{processes}"
        where = (*exact, "--run-dir", run_dir)
        done = run_here(*where) if processes == 1 else run(*where, "--processes", processes, where=studio)
        assert done.code == 0, done.err
        told = summary(run_dir)
        found.append({key: told[key] for key in ("step", "weights_sha256", "metrics", "ledger")})
        assert run_here("audit", run_dir).code == 0
    assert found[0] == found[1]
    assert found[0]["metrics"]["box_map"] >= 0


@pytest.mark.thorough
def test_ddp_sees_the_same_samples_and_takes_a_step_with_an_empty_share(
    recipe: Path, studio: Path, run: Call, run_here: Call, summary: Call
) -> None:
    # 16 samples in batches of 5 by one each: the last step of an epoch has one sample for two processes.
    plain = ("train", recipe.name, "batch.global_size=10", "batch.micro_size=5", "data.detection.generated.samples=11")
    done = run(*plain, "--processes", 2, "--run-dir", studio / "boxes-ddp", where=studio)
    assert done.code == 0, done.err
    assert run_here("audit", studio / "boxes-ddp").code == 0
    assert summary(studio / "boxes-ddp")["ledger"]["duplicates"] == 0
