"""The small files of a run: summary, plan, recipe and environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import RunDirectoryError
from paceline.records.environment import capture_environment, git_facts
from paceline.records.reader import LedgerFacts, Summary, read_plan, read_recipe, read_summary
from paceline.records.run_directory import RunDirectory, write_json, write_text

SUMMARY = Summary(
    status="completed",
    step=135,
    epoch=3,
    samples=4311,
    world_size=2,
    weights_sha256="ab" * 32,
    metrics={"top1_accuracy": 97.5, "best": {"step": 90, "top1_accuracy": 98.0}},
    train_seconds=3.5,
    total_seconds=5.0,
    throughput_samples_per_second=1231.7,
    data_wait_fraction=0.02,
    peak_memory_bytes=123_456_789,
    parameters=12_345,
    ledger=LedgerFacts(epochs_complete=3, duplicates=0, missing=0),
)
INTERFACE_KEYS = {
    *("status", "step", "epoch", "samples", "world_size", "weights_sha256", "ema_sha256", "metrics"),
    *("train_seconds", "total_seconds", "throughput_samples_per_second", "data_wait_fraction"),
    *("peak_memory_bytes", "parameters", "ledger", "resumes"),
}


def test_summary_has_the_keys_of_the_interface_and_comes_back(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    write_json(run.summary, SUMMARY.to_json())
    document = json.loads(run.summary.read_text(encoding="utf-8"))
    assert document.keys() >= INTERFACE_KEYS
    assert document["ledger"] == {"epochs_complete": 3, "duplicates": 0, "missing": 0, "broken": 0}
    assert read_summary(run) == SUMMARY
    write_json(run.summary, {**document, "from_the_future": 1})
    assert read_summary(run) == SUMMARY


def test_summary_without_a_key_is_damaged(tmp_path: Path) -> None:
    document = SUMMARY.to_json()
    del document["step"]
    write_json(RunDirectory(tmp_path).summary, document)
    with pytest.raises(RunDirectoryError, match=r"summary.json is damaged: .*'step'"):
        read_summary(RunDirectory(tmp_path))


def test_plan_and_recipe_are_read_and_their_absence_is_told(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for read in (read_plan, read_recipe):
        with pytest.raises(
            RunDirectoryError,
            match=r"holds no (plan.json: name|run \(no recipe.yaml\); give) the directory of a (started )?run",
        ):
            read(run)
    write_json(run.plan, {"total_steps": 10})
    write_text(run.recipe, "seed: 1\n")
    assert read_plan(run) == {"total_steps": 10}
    assert read_recipe(run) == {"seed": 1}


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"- 1", b"a: ["])
def test_damaged_files_are_named(tmp_path: Path, content: bytes) -> None:
    run = RunDirectory(tmp_path)
    run.plan.write_bytes(content)
    run.recipe.write_bytes(content)
    for read in (read_plan, read_recipe):
        with pytest.raises(RunDirectoryError, match="is damaged"):
            read(run)


def test_environment_describes_the_machine_and_keeps_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "hunter2")
    environment = capture_environment({"devices": ["cpu"]})
    write_json(tmp_path / "environment.json", environment)
    text = (tmp_path / "environment.json").read_text(encoding="utf-8")
    assert "hunter2" not in text
    assert "API_TOKEN" not in text
    assert environment["devices"] == ["cpu"]
    assert environment["versions"]["numpy"]
    assert environment["cpu"]["cores"] >= environment["cpu"]["usable_cores"] >= 1
    assert environment["memory_bytes"] > 1 << 28


def test_git_revision_and_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_facts(tmp_path) is None

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    assert git_facts(tmp_path) is None
    (tmp_path / "file").write_text("1", encoding="utf-8")
    git("add", "file")
    git("commit", "--quiet", "-m", "first")
    assert git_facts(tmp_path) == {"revision": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "file").write_text("2", encoding="utf-8")
    assert git_facts(tmp_path) == {"revision": git("rev-parse", "HEAD"), "dirty": True}
    (tmp_path / os.fsdecode(b"\xff")).touch()
    git("config", "core.quotePath", "false")
    git("add", ".")
    assert git_facts(tmp_path) == {"revision": git("rev-parse", "HEAD"), "dirty": True}
    monkeypatch.setenv("PATH", "")
    assert git_facts(tmp_path) is None


def test_records_load_no_torch() -> None:
    program = (
        "import sys, importlib\n"
        "for name in ('run_directory', 'events', 'reader', 'ledger', 'environment'):\n"
        "    importlib.import_module('paceline.records.' + name)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
