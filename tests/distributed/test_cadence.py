"""Two processes agree on a checkpoint that only the first one's clock asks for."""

from __future__ import annotations

from pathlib import Path

import pytest
from calls import Call


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.parametrize("exact", ["false", "true"])
def test_both_save_after_the_same_steps(studio: Path, run: Call, summary: Call, exact: str) -> None:
    run_dir = studio / f"by-the-clock-{exact}"
    asked = ("checkpoint.every=0.001 seconds", "checkpoint.keep=99", "evaluate.every=off", f"parallel.exact={exact}")
    asked += ("train.duration=20 steps",)
    run("train", "recipe.yaml", *asked, "--processes", "2", "--run-dir", run_dir, where=studio).ended(0)
    assert len(list((run_dir / "checkpoints").glob("step-*"))) > 1  # also before the last step
    assert summary(run_dir)["status"] == "completed"
