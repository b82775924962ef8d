"""Recommendation over processes: the same figures from any number, the same bits in an exact run, after any kill."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from calls import Call

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")

RECIPE: dict[str, Any] = {
    "task": "recommendation",
    "model": {"name": "dlrm", "options": {"embedding": 4, "bottom": [8], "top": [8]}},
    "data": {
        "dataset": "synthetic_clicks",
        "samples": 150,
        # Fewer batches than processes, the second of them short.
        "clicks": {"dense_features": 3, "categories": 4, "max_rows": 30, "evaluation_samples": 50},
    },
    "batch": {"global_size": 16, "micro_size": 4},
    "optimizer": {"name": "adamw", "lr": 0.01, "tables": "rowwise_adagrad"},
    "train": {"duration": "21 steps", "precision": "fp32"},
    "evaluate": {"every": "7 steps", "batch_size": 32},
    "checkpoint": {"every": "3 steps"},
    "parallel": {"device": "cpu", "threads": 1},
    "telemetry": {"log_every": "2 steps", "trackers": [], "report": False},
}
EXACT = ("train", "clicks.yaml", "parallel.exact=true")
# Three processes, of which the last has no samples to score.
SPARSE = (
    "train",
    "clicks.yaml",
    "model.options={embedding: 4, bottom: [8], top: [8], sparse: true}",
    "optimizer.tables=sparse_adam",
    "batch.global_size=24",
)


@pytest.fixture
def clicks(studio: Path) -> Path:
    (studio / "clicks.yaml").write_text(json.dumps(RECIPE))
    return studio


@pytest.fixture
def alone(clicks: Path, run_here: Call, summary: Call) -> dict[str, Any]:
    """What an exact run by one process came to; it is trained once."""
    if not (clicks / "clicks-1").exists():
        assert run_here(*EXACT, "--run-dir", "clicks-1").code == 0
    found: dict[str, Any] = summary(clicks / "clicks-1")
    assert {"auc", "normalized_entropy", "accuracy", "loss"} <= found["metrics"].keys()
    return found


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_killed_with_two_processes_and_resumed_with_one(
    clicks: Path, start: Call, run_here: Call, steps_recorded: Call, summary: Call, alone: dict[str, Any]
) -> None:
    run_dir = clicks / "clicks-killed"
    launched = start(*EXACT, "train.until=14 steps", "--processes", 2, "--run-dir", run_dir, where=clicks)
    launched.wait_for(lambda: steps_recorded(run_dir) >= 8)
    launched.kill()
    until = time.monotonic() + 60
    while True:  # on a busy machine a killed process may hold the directory for a moment
        done = run_here(*EXACT, "--run-dir", run_dir)
        if "another process is training" not in done.err or time.monotonic() > until:
            break
        time.sleep(0.1)
    assert done.code == 0, done.err
    found = summary(run_dir)
    assert found["weights_sha256"] == alone["weights_sha256"]
    assert found["metrics"] == alone["metrics"]
    assert run_here("audit", run_dir).code == 0


@pytest.mark.slow
@pytest.mark.world_size(4)
def test_four_processes_have_the_same_bits_and_figures(
    clicks: Path, run: Call, summary: Call, alone: dict[str, Any]
) -> None:
    run_dir = clicks / "clicks-4"
    done = run(*EXACT, "--processes", 4, "--run-dir", run_dir, where=clicks)
    assert done.code == 0, done.err
    assert summary(run_dir)["weights_sha256"] == alone["weights_sha256"]
    assert summary(run_dir)["metrics"] == alone["metrics"]


@pytest.mark.slow
@pytest.mark.world_size(3)
def test_sparse_gradients_over_three_processes_that_score_as_one_does(
    clicks: Path, run: Call, run_here: Call, summary: Call
) -> None:
    done = run(*SPARSE, "--processes", 3, "--run-dir", "sparse-3", where=clicks)
    assert done.code == 0, done.err
    together = summary(clicks / "sparse-3")["metrics"]
    assert run_here("audit", "sparse-3").code == 0
    scored = run_here("evaluate", "sparse-3", "--json")
    assert scored.code == 0, scored.err
    figures = ("loss", "auc", "accuracy", "normalized_entropy")
    found = json.loads(scored.out)
    assert {name: found[name] for name in figures} == {name: together[name] for name in figures}  # to the bit
    # And they add up the gradients that one process has.
    assert run_here(*SPARSE, "--run-dir", "sparse-1").code == 0
    assert together["loss"] == pytest.approx(summary(clicks / "sparse-1")["metrics"]["loss"], rel=1e-4)
