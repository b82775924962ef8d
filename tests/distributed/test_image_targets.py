"""Images with other targets than one class: the same run and figures from 1, 2 and 3 processes, after a kill too."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from calls import Call

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")

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


@pytest.mark.slow
@pytest.mark.world_size(3)
@pytest.mark.parametrize(
    ("headline", "recipe"),
    [("mae", ("discs", *_DRAWN)), ("map", ("figures", *_DRAWN)), ("miou", ("shapes-segmentation", *_SHAPES))],
)
def test_one_two_and_three_processes_and_a_killed_run_come_to_the_same(
    headline: str,
    recipe: tuple[str, ...],
    tmp_path: Path,
    start: Call,
    run: Call,
    run_here: Call,
    steps_recorded: Call,
    summary: Call,
) -> None:
    def outcome(run_dir: Path) -> tuple[Any, ...]:
        found = summary(run_dir)
        details = json.loads((run_dir / "evaluation" / "details.json").read_text())
        assert run_here("audit", run_dir).code == 0
        return found["weights_sha256"], found["metrics"], details

    alone = tmp_path / "alone"
    assert run_here("train", *recipe, *TINY, "--run-dir", alone).code == 0
    together = tmp_path / "together"
    done = run("train", *recipe, *TINY, "--processes", 2, "--run-dir", together, where=tmp_path)
    assert done.code == 0, done.err
    assert outcome(together) == outcome(alone)
    killed = tmp_path / "killed"
    launched = start("train", *recipe, *TINY, "--processes", 3, "--run-dir", killed, where=tmp_path)
    launched.wait_for(lambda: steps_recorded(killed) >= 5)
    launched.kill()
    done = run("train", *recipe, *TINY, "--processes", 3, "--run-dir", killed, where=tmp_path)
    assert done.code == 0, done.err
    assert outcome(killed) == outcome(alone)
    scored = run("evaluate", alone, "--json", "--processes", 3, where=tmp_path)
    found, kept = json.loads(scored.out), summary(alone)["metrics"]
    figures = ("loss", headline)
    assert {key: found[key] for key in figures} == {key: kept[key] for key in figures}  # to the bit
