"""Two processes over NCCL: they stop together, two steps after they were asked, and end together when one fails."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import paceline
from paceline.distributed.strategy import VOTE_LAG
from paceline.records.ledger import ledger_files, read_ledger

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

STEP = 5
TASK = f"""
import os, signal
from paceline import ImageClassification

class Disturbed(ImageClassification):
    def loss(self, model, batch):
        if batch.slice.step == {STEP} and os.environ["RANK"] == "1":
            self.disturb()
        return super().loss(model, batch)

class Stopped(Disturbed):
    def disturb(self):
        os.kill(os.getpid(), signal.SIGTERM)

class Failing(Disturbed):
    def disturb(self):
        raise RuntimeError("this rank fails")
"""
# The host may run ahead of the device, but not by the whole run: a rank that fails is missed in the next step.
SHORT = ["train.duration=2000 steps", "evaluate.every=off", "model.options.width=4", "telemetry.log_every=10 steps"]


def train_on_two(folder: Path, task: str, device: str = "cuda") -> subprocess.CompletedProcess[str]:
    (folder / "disturbed.py").write_text(TASK)
    command = ["train", "digits", f"task=disturbed:{task}", *SHORT, f"parallel.device={device}"]
    return subprocess.run(
        [sys.executable, "-m", "paceline", *command, "--processes", "2", "--run-dir", "run"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={"PYTHONPATH": str(Path(paceline.__file__).parents[1]), "PATH": "/usr/bin:/bin"},
    )


def last_steps(run: Path) -> list[int]:
    return [max(entry.step for entry in read_ledger(path)) for path in ledger_files(run / "ledger")]


def test_both_ranks_stop_after_the_same_step_two_steps_after_one_was_asked(tmp_path: Path) -> None:
    done = train_on_two(tmp_path, "Stopped")
    assert done.returncode == 75, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    # The step that was under way when the signal came has the number STEP + 1.
    assert (summary["status"], summary["step"]) == ("stopped", STEP + 1 + VOTE_LAG)
    assert last_steps(tmp_path / "run") == [summary["step"]] * 2


def test_an_error_on_one_rank_ends_both_within_seconds_and_is_told(tmp_path: Path) -> None:
    begun = time.monotonic()
    done = train_on_two(tmp_path, "Failing")
    assert done.returncode == 1
    assert "rank 1 failed first" in done.stderr
    assert "RuntimeError: this rank fails" in done.stderr
    assert time.monotonic() - begun < 120  # starting up, and a grace of ten seconds: NCCL itself would wait for minutes
