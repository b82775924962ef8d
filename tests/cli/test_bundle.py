"""`report --bundle`: a file for a bug report that holds neither data nor weights, secrets or paths."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.reports.bundle import write_bundle

TOKEN, PLACE = "x9-very-secret-value", "the-private-clinic"


def paceline(*arguments: object, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on private pictures, whose recipe and command name a path and a token."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("left", "right"):
        (folder / PLACE / name).mkdir(parents=True)
        for number in range(12):
            pixels = np.random.default_rng(number).integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / PLACE / name / f"patient-{name}-{number}.png")
    trained = paceline("train", PLACE, "train.duration=2 steps", "--run-dir", "run", folder=folder)
    assert trained.returncode == 0, trained.stderr
    environment = folder / "run" / "environment.json"
    program = {"program": str(folder / "patient_study.py"), "code": {"patient_study.py": "0", "patient_parts.py": "0"}}
    environment.write_text(json.dumps(json.loads(environment.read_text()) | program))
    events = folder / "run" / "events.jsonl"
    file = folder / PLACE / "left" / "patient-left-3.png"
    sentence = f"{PLACE} is odd: cannot read {file} with {TOKEN} and hf_abcdefghijklmnop in patient_parts.py"
    with events.open("a") as records:
        records.write(json.dumps({"event": "warning", "step": 2, "time": 1.0, "message": sentence}) + "\n")
        records.write('{"event": "st')  # a kill cut it off
    return folder


def test_a_bundle_holds_no_path_secret_host_or_data(home: Path) -> None:
    made = paceline("report", "run", "--bundle", "--output", "bug.zip", folder=home, WANDB_API_KEY=TOKEN)
    assert made.returncode == 0, made.stderr
    with zipfile.ZipFile(home / "bug.zip") as archive:
        held = {name: archive.read(name).decode() for name in archive.namelist()}
    assert {name.removeprefix("bug/") for name in held} == {
        "recipe.yaml", "plan.json", "run.json", "environment.json", "events.jsonl", "summary.json",
    }  # fmt: skip
    environment = json.loads((home / "run" / "environment.json").read_text())
    for private in (TOKEN, PLACE, "patient", str(home), "hf_abcdefghijklmnop", environment["command"]):
        assert not any(private in text for text in held.values()), private
    assert json.loads(held["bug/environment.json"])["host"] == "(host)"
    assert "(path) is odd: cannot read (path) with (secret) and (secret) in (file)" in held["bug/events.jsonl"]
    assert json.loads(held["bug/environment.json"])["versions"] == environment["versions"]
    listed = [line.split("  ")[0] for line in made.stderr.splitlines()][: len(held)]
    assert [f"bug/{name}" for name in listed] == list(held), "named before it is written"


def test_damage_and_a_folder_named_as_a_key(home: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(home / "run", tmp_path / "run"))
    (run / "plan.json").write_text('{"loss": 1')
    (run / "recipe.yaml").write_text("data:\n  path: /clinic/loss\n  split: test\n  teacher: /clinic/test\n")
    (run / "events.jsonl").write_bytes(b'\xff\n{"loss": 2.0, "message": "the loss of the latest test"}\n')
    write_bundle(run, tmp_path / "bug.zip", lambda _: None)
    with zipfile.ZipFile(tmp_path / "bug.zip") as archive:
        plan, events = (archive.read(f"bug/{name}").decode() for name in ("plan.json", "events.jsonl"))
    assert json.loads(plan) == {"unreadable_characters": 10}
    lines = [json.loads(line) for line in events.splitlines()]
    assert lines == [{"unreadable_characters": 1}, {"loss": 2.0, "message": "the loss of the latest (teacher)"}]


def test_a_bundle_never_replaces_a_file(home: Path) -> None:
    (home / "kept.zip").write_text("mine")
    made = paceline("report", "run", "--bundle", "--output", "kept.zip", folder=home)
    assert made.returncode == 2
    assert "kept.zip exists: remove it, or give another --output." in made.stderr
    assert (home / "kept.zip").read_text() == "mine"


@pytest.mark.parametrize("more", [["--timing"], ["run"]])
def test_a_bundle_is_of_one_run(home: Path, more: list[str]) -> None:
    made = paceline("report", "run", "--bundle", *more, folder=home)
    assert made.returncode == 2
    assert "--bundle is for one run" in made.stderr
