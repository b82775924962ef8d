"""On GPUs the phases are the stream's: they add up to the time around them, and a late process shows in the other's."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from paceline.reports.attribution import attribute_run

import paceline
from paceline.recipe.load import load_recipe
from paceline.records.reader import read_events
from paceline.telemetry.display import Display
from paceline.telemetry.meter import PHASES
from paceline.trainer.train import Options, train_recipe

SHORT = {"train.duration": "40 steps", "evaluate.every": "off", "checkpoint.every": "off", "parallel.device": "cuda"}


class Watch(Display):
    """When each record was due and the device was done, by the host's clock."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def record(self, event: Any) -> None:
        if event["event"] == "step":
            self.moments.append(time.perf_counter())


def test_the_phases_add_up_and_the_host_is_told_beside_them(tmp_path: Path) -> None:
    watch = Watch()
    loaded = load_recipe("digits", {**SHORT, "telemetry.log_every": "10 steps", "train.ema": 0.9})
    train_recipe(loaded, Options(run_dir=tmp_path / "run", display=watch))
    found = attribute_run(tmp_path / "run")
    records = list(read_events(tmp_path / "run" / "events.jsonl", kinds=("step",)))
    wall = watch.moments[-1] - watch.moments[-4]  # three records of ten steps each
    assert 10 * sum(each["step_seconds"] for each in records[-3:]) == pytest.approx(wall, rel=0.1)
    for each in records:
        assert sum(each[f"{phase}_seconds"] for phase in PHASES) == pytest.approx(each["step_seconds"], rel=1e-3)
    assert all(each.launch_seconds is not None for each in found.phases)
    assert found.phases[0].name == "data_wait"


LATE = """
import os, time
from paceline import ImageClassification

class Late(ImageClassification):
    def loss(self, model, batch):
        if os.environ["RANK"] == "1":
            time.sleep(0.1)
        return super().loss(model, batch)
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_waiting_for_a_late_process_is_communication(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    asked = ["task=late:Late", "telemetry.log_every=5 steps", *(f"{key}={value}" for key, value in SHORT.items())]
    subprocess.run(
        [sys.executable, "-m", "paceline", "train", "digits", *asked, "--processes", "2", "--run-dir", "run"],
        cwd=tmp_path,
        check=True,
        timeout=240,
        env={"PYTHONPATH": f"{Path(paceline.__file__).parents[1]}:{tmp_path}", "PATH": "/usr/bin:/bin"},
    )
    found = attribute_run(tmp_path / "run")
    seconds = {each.name: each.over_ranks for each in found.phases}
    assert seconds["communication"].maximum == pytest.approx(0.1, rel=0.1)
    assert seconds["communication"].most_rank == 0
    assert found.waiting is not None
    assert found.waiting.rank == 1
