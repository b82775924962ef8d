"""A run that is killed and goes on is one run in MLflow and in Weights & Biases, each step once."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

RECIPE = """
model: {name: small_resnet, channels_last: false, options: {width: 4, stages: 1, depth: 1}}
data: {dataset: digits}
batch: {global_size: 16}
optimizer: {lr: 0.05, groups: {"*.bias": {weight_decay: 0.0}}}
train: {duration: 400 steps, precision: fp32, ema: 0.9}
evaluate: {every: 50 steps}
checkpoint: {every: 20 steps}
parallel: {device: cpu, threads: 1}
telemetry: {log_every: 2 steps, trackers: [%s]}
"""


def missing(name: str) -> bool:
    return importlib.util.find_spec(name) is None


def run_killed_and_resumed(folder: Path, tracker: str) -> Path:
    (folder / "recipe.yaml").write_text(RECIPE % tracker)
    command = [sys.executable, "-m", "paceline", "train", "recipe.yaml", "--run-dir", "run"]
    environment = {**os.environ, "MLFLOW_TRACKING_URI": "", "WANDB_MODE": "offline"}
    events, saved = folder / "run" / "events.jsonl", folder / "run" / "checkpoints"
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            # Beyond a whole checkpoint, so that it goes back to it.
            if any(saved.glob("step-*")) and b'"step": 46,' in events.read_bytes():
                os.kill(process.pid, signal.SIGKILL)
                break
            time.sleep(0.001)
    assert process.returncode == -signal.SIGKILL
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=240)
    told = [json.loads(line) for line in events.read_text().splitlines()]
    assert [each for each in told if each["event"] == "incident"] == []
    assert [each["resumes"] for each in told if each["event"] == "resume"] == [1]
    return folder / "run"


def expected(run: Path) -> tuple[dict[int, float], dict[int, float]]:
    told = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    loss = {each["step"]: each["loss"] for each in told if each["event"] == "step"}
    top1 = {each["step"]: each["top1_accuracy"] for each in told if each.get("weights") == "ema"}
    assert list(loss) == list(range(2, 401, 2))
    assert list(top1) == list(range(50, 401, 50))
    return loss, top1


@pytest.mark.skipif(missing("mlflow"), reason="needs MLflow: pip install 'paceline[mlflow]'")
def test_in_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_killed_and_resumed(tmp_path, "mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    # In a process of its own: the library warns in many ways, and warnings are errors here.
    program = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri=sys.argv[1])
(experiment,) = [each for each in client.search_experiments() if each.name == "paceline"]
(found,) = client.search_runs([experiment.experiment_id])
def history(name):
    return [(each.step, each.value) for each in client.get_metric_history(found.info.run_id, name)]
print(json.dumps({
    "status": found.info.status, "name": found.info.run_name, "params": found.data.params, "tags": found.data.tags,
    "loss": history("train/loss"), "top1": history("evaluation/ema/top1_accuracy"),
}))
"""
    place = (run / "mlflow").resolve().as_uri()
    said = subprocess.run(
        [sys.executable, "-c", program, place], check=True, capture_output=True, text=True, timeout=120
    )
    found = json.loads(said.stdout.splitlines()[-1])
    loss, top1 = expected(run)
    assert [tuple(each) for each in found["loss"]] == list(loss.items())
    assert [tuple(each) for each in found["top1"]] == list(top1.items())
    assert (found["status"], found["name"]) == ("FINISHED", "run")
    assert found["params"]["optimizer.lr"] == "0.05"
    assert any(key.startswith("optimizer.groups._.bias") for key in found["params"])  # MLflow knows no asterisk
    assert "versions.torch" in found["tags"]


def history(file: Path) -> list[dict[str, Any]]:
    """Read what Weights & Biases has written: LevelDB's log format, of protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    content, at, whole, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a record's only part, or its last
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                found.append({each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in items})
    return found


@pytest.mark.skipif(missing("wandb"), reason="needs Weights & Biases: pip install 'paceline[wandb]'")
def test_in_weights_and_biases(tmp_path: Path) -> None:
    run = run_killed_and_resumed(tmp_path, "wandb")
    files = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1  # one run, told of in two parts
    rows = [row for file in files for row in history(file)]
    assert all(one["_step"] <= other["_step"] for one, other in itertools.pairwise(rows))
    loss, top1 = expected(run)
    assert [(row["_step"], row["train/loss"]) for row in rows if "train/loss" in row] == list(loss.items())
    name = "evaluation/ema/top1_accuracy"
    assert [(row["_step"], row[name]) for row in rows if name in row] == list(top1.items())
