"""`paceline band`, and what `paceline train` says of a run that left its band."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import run

SHORT = ("model.options.width=4", "train.duration=20 steps", "telemetry.report=false", "telemetry.trackers=[]")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One training, and copies of its records as if other seeds had made them."""
    folder = tmp_path_factory.mktemp("runs")
    first = folder / "seed-0"
    asked = [*SHORT, "seed=0", "telemetry.log_every=1 step", "evaluate.every=10 steps", "checkpoint.every=20 steps"]
    assert run(["train", "digits", *asked, "--run-dir", str(first)]) == 0
    events = [json.loads(line) for line in (first / "events.jsonl").read_text().splitlines()]
    recipe = (first / "recipe.yaml").read_text()
    for seed in range(1, 6):
        other = folder / f"seed-{seed}"
        other.mkdir()
        shutil.copy(first / "plan.json", other)
        (other / "recipe.yaml").write_text(recipe.replace("seed: 0", f"seed: {seed}"))
        changed = [_scattered(each, 1 + 0.01 * (seed % 3)) for each in events]
        (other / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in changed))
    return [folder / f"seed-{seed}" for seed in range(6)]


def _scattered(event: dict[str, Any], factor: float) -> dict[str, Any]:
    return {key: value * factor if key in ("loss", "grad_norm") else value for key, value in event.items()}


def test_a_band_of_ones_own_runs(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    band = tmp_path / "mine.band.json"
    assert run(["band", "make", *map(str, runs[:5]), "--output", str(band), "--name", "mine", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["band"], made["runs"], made["file"]) == ("mine", 5, str(band))
    assert "training loss" in made["curves"]
    assert run(["band", "check", str(runs[5]), "--band", str(band), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["points"] >= 20
    assert (found["departures"], found["left"], found["differences"]) == ([], False, [])


def test_where_a_run_is_outside(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    band, changed = tmp_path / "mine.band.json", tmp_path / "changed"
    assert run(["band", "make", *map(str, runs[:5]), "-o", str(band)]) == 0
    assert "5 runs of digits" in capsys.readouterr().out
    shutil.copytree(runs[5], changed)
    events = [json.loads(line) for line in (changed / "events.jsonl").read_text().splitlines()]
    worse = [{**each, "loss": 20.0} if each["event"] == "step" else each for each in events]
    (changed / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in worse))
    assert run(["band", "check", str(changed), "--band", str(band)]) == 0
    said = capsys.readouterr().out
    assert "training loss  1-1 " in said
    assert "inside the band of 5 runs of digits" in said


def test_another_training_is_left_in_peace(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["band", "check", str(runs[0])]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Not compared: ")
    assert "model.options.width" in said


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["check", "nowhere"], "there is no run directory 'nowhere'"),
        (["check", "RUN", "--band", "nowhere.json"], "nowhere.json"),
        (["make", "RUN", "RUN", "-o", "x.json"], "found 2 runs"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    runs: list[Path], arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["band", *(str(runs[0]) if each == "RUN" else each for each in arguments)]) == 2
    assert told in capsys.readouterr().err


def test_training_says_so_at_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["digits", "seed=7", "schedule.warmup=0 steps", "train.until=46 steps", "telemetry.trackers=[]"]
    assert run(["train", *asked, "--run-dir", str(tmp_path / "run")]) == 75
    [note] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: this run has left")]
    assert note.startswith("note: this run has left the band of ")
    assert note.endswith("schedule.warmup differs from the recipe whose band this is.")
    assert "left the band of" in (tmp_path / "run" / "report.html").read_text()


def test_a_run_as_it_should_be_hears_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["digits", "seed=3", "train.until=46 steps", "telemetry.report=false", "telemetry.trackers=[]", "--json"]
    assert run(["train", *asked, "--run-dir", str(tmp_path / "run")]) == 75
    assert json.loads(capsys.readouterr().out)["band"] == ""
