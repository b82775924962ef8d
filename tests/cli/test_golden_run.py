"""A run directory of each release opens, evaluates, exports, reports, resumes and passes the audit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from calls import Call

import paceline
from paceline.checkpoint.manifest import verify
from paceline.checkpoint.store import CheckpointStore
from paceline.checkpoint.weights import read_weights, weights_sha256

RELEASES = Path(__file__).parents[1] / "golden" / "releases"


@pytest.mark.everyday
@pytest.mark.parametrize("version", sorted({each.name for each in RELEASES.iterdir()} | {paceline.__version__}))
def test_the_golden_run_opens_and_resumes(version: str, paceline_here: Call) -> None:
    run = Path("run")
    shutil.copytree(RELEASES / version / "digits", run)
    before = json.loads((run / "summary.json").read_text())
    assert verify(CheckpointStore(run / "checkpoints").path(4)).step == 4
    for weights, expected in (("model", before["weights_sha256"]), ("ema", before["ema_sha256"])):
        assert weights_sha256(read_weights(run, weights).state) == expected
        evaluated = paceline_here("evaluate", "run", "--weights", weights, "--json").document
        for metric, value in before["metrics"]["last"][weights].items():
            assert evaluated[metric] == pytest.approx(value, rel=1e-3, abs=1e-3), metric
    assert paceline_here("report", "run").code == 0
    assert paceline_here("export", "run", "--output", "weights.safetensors").code == 0
    resumed = paceline_here("resume", "run", "train.until=null", "--json").document
    assert (resumed["status"], resumed["step"], resumed["resumes"]) == ("completed", 8, 1)
    assert paceline_here("audit", "run").code == 0
