"""Recommendation over processes: the same figures from any number, the same bits in an exact run, after any kill."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
SPARSE = (
    "train",
    "clicks.yaml",
    "model.options={embedding: 4, bottom: [8], top: [8], sparse: true}",
    "optimizer.tables=sparse_adam",
    "train.duration=200 steps",
    "evaluate.every=100 steps",
)


@pytest.fixture
def clicks(studio: Path) -> Path:
    (studio / "clicks.yaml").write_text(json.dumps(RECIPE))
    return studio


@pytest.mark.slow
@pytest.mark.world_size(4)
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_exact_runs_have_the_same_bits_and_figures(
    clicks: Path, run: Callable[..., Any], run_here: Callable[..., Any], summary: Callable[[Path], Any], processes: int
) -> None:
    if not (clicks / "clicks-1").exists():
        assert run_here(*EXACT, "--run-dir", "clicks-1").code == 0
    run_dir = clicks / f"clicks-{processes}"
    done = run(*EXACT, "--processes", processes, "--run-dir", run_dir, where=clicks)
    assert done.code == 0, done.err
    alone, together = summary(clicks / "clicks-1"), summary(run_dir)
    assert together["weights_sha256"] == alone["weights_sha256"]
    assert together["metrics"] == alone["metrics"]
    assert {"auc", "normalized_entropy", "accuracy", "loss"} <= together["metrics"].keys()
    assert run_here("audit", run_dir).code == 0


@pytest.mark.slow
@pytest.mark.world_size(3)
def test_three_processes_score_as_one(
    clicks: Path, run: Callable[..., Any], run_here: Callable[..., Any], summary: Callable[[Path], Any]
) -> None:
    if not (clicks / "clicks-1").exists():
        assert run_here(*EXACT, "--run-dir", "clicks-1").code == 0
    done = run("evaluate", clicks / "clicks-1", "--json", torchrun=3, where=clicks)  # one has no samples
    assert done.code == 0, done.err
    found = json.loads(done.out)["results"]["model"]
    expected = summary(clicks / "clicks-1")["metrics"]
    assert {name: found[name] for name in ("auc", "loss", "normalized_entropy")} == {
        name: expected[name] for name in ("auc", "loss", "normalized_entropy")
    }


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_sparse_gradients_over_processes_survive_a_kill(
    clicks: Path,
    start: Callable[..., Any],
    run: Callable[..., Any],
    run_here: Callable[..., Any],
    steps_recorded: Callable[[Path], int],
    summary: Callable[[Path], Any],
) -> None:
    for name in ("whole", "killed"):
        run_dir = clicks / f"sparse-{name}"
        command = (*SPARSE, "--processes", 2, "--run-dir", run_dir)
        if name == "killed":
            launched = start(*command, where=clicks)
            launched.wait_for(lambda run_dir=run_dir: steps_recorded(run_dir) >= 20)
            launched.kill()
            assert not (run_dir / "summary.json").exists()
        done = run(*command, where=clicks)
        assert done.code == 0, done.err
    whole, killed = summary(clicks / "sparse-whole"), summary(clicks / "sparse-killed")
    assert killed["weights_sha256"] == whole["weights_sha256"]
    assert killed["metrics"] == whole["metrics"]
    assert run_here("audit", clicks / "sparse-killed").code == 0
    # Processes add up the same gradients that one does.
    assert run_here(*SPARSE, "--run-dir", "sparse-1").code == 0
    assert whole["metrics"]["loss"] == pytest.approx(summary(clicks / "sparse-1")["metrics"]["loss"], rel=1e-3)
