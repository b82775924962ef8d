"""Tasks with other targets than one class: the same run and figures from 1, 2 and 3 processes, after a kill too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from calls import Call

pytestmark = [pytest.mark.slow, pytest.mark.world_size(3)]

TINY = (
    *("batch.global_size=24", "evaluate.batch_size=4", "train.duration=3 epochs"),
    *("checkpoint.every=2 steps", "telemetry.log_every=1 steps", "telemetry.trackers=[]"),
    *("parallel.exact=true", "parallel.logical_ranks=6", "parallel.device=cpu"),
)
_DRAWN = ("data.samples=150", "model.options={channels: 2}")
_SHAPES = (
    *("data.detection.generated={samples: 150, evaluation_samples: 50}", "data.augment.crop=random_resized"),
    *("data.image_size=16", "model.options={width: 2, stages: 1}", "evaluate.every=3 epochs"),
)
SHARED = {
    "parallel": {"device": "cpu", "threads": 1},
    "telemetry": {"log_every": "2 steps", "trackers": [], "report": False},
}
CLICKS: dict[str, Any] = {
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
    **SHARED,
}
BOXES: dict[str, Any] = {
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
    "train": {"duration": "7 steps", "precision": "fp32"},
    "evaluate": {"every": "7 steps", "batch_size": 2},
    **SHARED,
}
EXACT = ("parallel.exact=true", "telemetry.log_every=1 steps")
# Three processes, of which the last has no samples to score.
SPARSE = (
    *("train", "clicks.yaml", "model.options={embedding: 4, bottom: [8], top: [8], sparse: true}"),
    *("optimizer.tables=sparse_adam", "batch.global_size=24"),
)


@pytest.fixture
def ground(tmp_path: Path, run_here: Call, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's folder, with both recipes, as the current one (which ``run_here`` sets before)."""
    (tmp_path / "clicks.yaml").write_text(json.dumps(CLICKS))
    (tmp_path / "boxes.yaml").write_text(json.dumps(BOXES))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("headline", "recipe"),
    [
        ("mae", ("discs", *TINY, *_DRAWN)),
        ("map", ("figures", *TINY, *_DRAWN)),
        ("miou", ("shapes-segmentation", *TINY, *_SHAPES)),
        ("auc", ("clicks.yaml", *EXACT, "batch.global_size=24", "parallel.logical_ranks=6")),
        ("box_map", ("boxes.yaml", *EXACT, "parallel.logical_ranks=6", "checkpoint.every=2 steps")),
    ],
)
def test_one_two_and_three_processes_and_a_killed_run_come_to_the_same(
    headline: str,
    recipe: tuple[str, ...],
    ground: Path,
    start: Call,
    run: Call,
    run_here: Call,
    steps_recorded: Call,
    summary: Call,
) -> None:
    def outcome(run_dir: Path) -> tuple[Any, ...]:
        found = summary(run_dir)
        details = [json.loads(path.read_text()) for path in run_dir.glob("evaluation/details.json")]
        assert len(details) == (headline != "auc")
        run_here("audit", run_dir).ended(0)
        return found["step"], found["weights_sha256"], found["metrics"], found["ledger"], details

    alone = ground / "alone"
    run_here("train", *recipe, "--run-dir", alone).ended(0)
    together = ground / "together"
    run("train", *recipe, "--processes", 2, "--run-dir", together, where=ground).ended(0)
    assert outcome(together) == outcome(alone)
    killed = ground / "killed"
    launched = start("train", *recipe, "--processes", 3, "--run-dir", killed, where=ground)
    launched.wait_for(lambda: steps_recorded(killed) >= 5)
    launched.kill()
    run("train", *recipe, "--processes", 3, "--run-dir", killed, where=ground).ended(0)
    assert outcome(killed) == outcome(alone)
    found = run("evaluate", alone, "--json", "--processes", 3, where=ground).document
    figures = ("loss", headline)
    assert {key: found[key] for key in figures} == {
        key: summary(alone)["metrics"][key] for key in figures
    }  # to the bit


def test_sparse_gradients_over_three_processes_that_score_as_one_does(
    ground: Path, run: Call, run_here: Call, summary: Call
) -> None:
    run(*SPARSE, "--processes", 3, "--run-dir", "sparse-3", where=ground).ended(0)
    together = summary(ground / "sparse-3")["metrics"]
    run_here("audit", "sparse-3").ended(0)
    found = run_here("evaluate", "sparse-3", "--json").ended(0).document
    figures = ("loss", "auc", "accuracy", "normalized_entropy")
    assert {name: found[name] for name in figures} == {name: together[name] for name in figures}  # to the bit
    # And they add up the gradients that one process has.
    run_here(*SPARSE, "--run-dir", "sparse-1").ended(0)
    assert together["loss"] == pytest.approx(summary(ground / "sparse-1")["metrics"]["loss"], rel=1e-4)


@pytest.mark.thorough
def test_ddp_sees_the_same_samples_and_takes_a_step_with_an_empty_share(
    ground: Path, run: Call, run_here: Call, summary: Call
) -> None:
    # 11 samples in batches of 10: the last step of an epoch has one sample for two processes.
    plain = ("train", "boxes.yaml", "batch.global_size=10", "batch.micro_size=5", "data.boxes.generated.samples=11")
    run(*plain, "--processes", 2, "--run-dir", "ddp", where=ground).ended(0)
    run_here("audit", "ddp").ended(0)
    assert summary(ground / "ddp")["ledger"]["duplicates"] == 0
