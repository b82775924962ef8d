"""Runs, checkpoints, mirrors and hub folders of earlier versions open, evaluate and resume."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.reading import verify
from paceline.checkpoint.store import CheckpointStore
from paceline.checkpoint.weights import read_weights, weights_sha256
from paceline.cli.main import run as run_command_line
from paceline.records.reader import read_summary
from paceline.records.run_directory import RunDirectory

V01 = Path(__file__).parent / "v0.1"
RUNS = ("digits", "text", "detection", "sharded")


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with copies of everything, which is the current directory."""
    shutil.copytree(V01, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command in this process; returns what it prints."""

    def call(*arguments: object) -> str:
        capsys.readouterr()
        code = run_command_line([str(each) for each in arguments])
        out, err = capsys.readouterr()
        assert code == 0, err
        return str(out)

    return call


def resumed(run: Path, command: Callable[..., str], recipe: Path, *changes: str) -> Any:
    """Resume to the end and return the summary."""
    command("train", recipe, "train.until=null", *changes, "--run-dir", run)
    command("audit", run)
    summary = read_summary(RunDirectory(run))
    assert (summary.status, summary.step, summary.resumes) == ("completed", 8, 1)
    return summary


@pytest.mark.parametrize("name", RUNS)
def test_a_run_opens_evaluates_and_resumes(name: str, old: Path, command: Callable[..., str]) -> None:
    run, where = old / name, [f"data.path={old / 'books'}"] if name == "text" else []
    before = json.loads((run / "summary.json").read_text())
    checkpoint = CheckpointStore(run / "checkpoints").path(4)
    assert verify(checkpoint).step == 4
    for weights in ("model", "ema")[: 1 + bool(before["ema_sha256"])]:
        expected = before["weights_sha256" if weights == "model" else "ema_sha256"]
        # A sharded run of several processes records no digest.
        assert weights_sha256(read_weights(run, weights).state) == expected or name == "sharded"
        evaluated = json.loads(command("evaluate", checkpoint, *where, "--weights", weights, "--json"))
        for metric, value in before["metrics"]["last"][weights].items():
            assert evaluated[metric] == pytest.approx(value, rel=1e-3, abs=1e-3), metric
    resumed(run, command, run / "recipe.yaml", *where, *(["parallel.strategy=auto"] if name == "sharded" else []))


def test_a_run_resumes_from_its_mirror(old: Path, command: Callable[..., str]) -> None:
    (recipe,) = (old / "mirror" / "records").glob("*/recipe.yaml/*")
    shutil.copy(recipe, old / "recipe.yaml")
    resumed(old / "new", command, old / "recipe.yaml", f"checkpoint.mirror=file://{old}/mirror")


def test_a_hub_folder_opens(old: Path, command: Callable[..., str]) -> None:
    assert read_weights(old / "hub").weights == "ema"
    assert json.loads(command("evaluate", old / "hub", "--json"))["samples"] == 179
