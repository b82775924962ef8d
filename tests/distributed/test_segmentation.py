"""Segmentation over processes: the same bits of weights and of intersection over union, after a kill too."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")

TINY = (
    *("model.options={width: 2, stages: 1}", "data.image_size=16", "data.augment.crop=random_resized"),
    *("data.detection.generated.samples=50", "data.detection.generated.evaluation_samples=7"),
    *("batch.global_size=12", "evaluate.batch_size=2", "train.duration=3 epochs", "checkpoint.every=2 steps"),
    *("telemetry.log_every=1 steps", "telemetry.trackers=[]", "telemetry.report=off"),
    *("parallel.exact=true", "parallel.logical_ranks=6", "parallel.device=cpu"),
)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.world_size(3)
def test_one_two_and_three_processes_and_a_killed_run_come_to_the_same(
    tmp_path: Path,
    start: Callable[..., Any],
    run: Callable[..., Any],
    run_here: Callable[..., Any],
    steps_recorded: Callable[[Path], int],
    summary: Callable[[Path], Any],
) -> None:
    def outcome(run_dir: Path) -> tuple[Any, ...]:
        found = summary(run_dir)
        details = json.loads((run_dir / "evaluation" / "details.json").read_text())
        assert run_here("audit", run_dir).code == 0
        return found["weights_sha256"], found["metrics"], details

    recipe = ("train", "shapes-segmentation", *TINY)
    alone = tmp_path / "alone"
    assert run_here(*recipe, "--run-dir", alone).code == 0
    together = tmp_path / "together"
    done = run(*recipe, "data.workers=1", "--processes", 2, "--run-dir", together, where=tmp_path)
    assert done.code == 0, done.err
    assert outcome(together) == outcome(alone)
    killed = tmp_path / "killed"
    launched = start(*recipe, "--processes", 3, "--run-dir", killed, where=tmp_path)
    launched.wait_for(lambda: steps_recorded(killed) >= 5)
    launched.kill()
    done = run(*recipe, "--processes", 3, "--run-dir", killed, where=tmp_path)
    assert done.code == 0, done.err
    assert outcome(killed) == outcome(alone)
    scored = run("evaluate", alone, "--json", "--processes", 3, where=tmp_path)
    found, kept = json.loads(scored.out), summary(alone)["metrics"]
    assert {key: found[key] for key in ("loss", "miou")} == {key: kept[key] for key in ("loss", "miou")}
