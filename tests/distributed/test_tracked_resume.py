"""A run that is killed and goes on is one run to every tracker, each step once, as their own libraries read it back."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Of two processes that load every tracker's library; the run must be long enough to be killed while it goes on.
pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(900)]

RECIPE = """
model: {name: small_resnet, channels_last: false, options: {width: 4, stages: 1, depth: 1}}
data: {dataset: digits}
batch: {global_size: 16}
optimizer: {lr: 0.05, groups: {"*.bias": {weight_decay: 0.0}}}
train: {duration: 400 steps, precision: fp32, ema: 0.9}
evaluate: {every: 50 steps}
checkpoint: {every: 20 steps}
parallel: {device: cpu, threads: 1}
telemetry:
  log_every: 2 steps
  trackers: [%s]
  mlperf: true
  submission: {org: Us, platform: here, division: open, status: research, target_accuracy: 99.9}
"""


def missing(name: str) -> bool:
    return importlib.util.find_spec(name) is None


# The end of a run waits 30 seconds for its trackers; here they must be complete, however slow the machine is.
PATIENT = """
from paceline.cli.main import main
from paceline.trainer import recorder

recorder._PATIENCE_SECONDS = 300.0
main()
"""

TRACKERS = ["tensorboard", "csv", *(name for name in ("mlflow", "wandb") if not missing(name))]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run for all of them: killed beyond a checkpoint, and resumed."""
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "recipe.yaml").write_text(RECIPE % ", ".join(TRACKERS))
    command = [sys.executable, "-c", PATIENT, "train", "recipe.yaml", "--run-dir", "run"]
    # Weights & Biases gives its own service 30 seconds to start.
    patience = {"WANDB__SERVICE_WAIT": "300", "WANDB_X_SERVICE_WAIT": "300"}
    environment = {**os.environ, "MLFLOW_TRACKING_URI": "", "WANDB_MODE": "offline", **patience}
    events, saved = folder / "run" / "events.jsonl", folder / "run" / "checkpoints"
    begun = [folder / "run" / name / "paceline.json" for name in TRACKERS if name in ("mlflow", "wandb")]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 250
        while time.monotonic() < deadline and process.poll() is None:
            # Beyond a whole checkpoint, so that it goes back to it; if possible when every tracker has begun.
            steps = events.read_bytes() if any(saved.glob("step-*")) else b""
            if b'"step": 46,' in steps and (all(known.is_file() for known in begun) or b'"step": 300,' in steps):
                os.kill(process.pid, signal.SIGKILL)
                break
            time.sleep(0.001)
    assert process.returncode == -signal.SIGKILL
    assert not (folder / "run" / "mlperf").exists()
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=500)
    told = [json.loads(line) for line in events.read_text().splitlines()]
    assert [each["message"] for each in told if each["event"] == "incident"] == []
    assert [each["resumes"] for each in told if each["event"] == "resume"] == [1]
    return folder / "run"


def expected(run: Path) -> tuple[dict[int, float], dict[int, float]]:
    told = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    loss = {each["step"]: each["loss"] for each in told if each["event"] == "step"}
    top1 = {each["step"]: each["top1_accuracy"] for each in told if each.get("weights") == "ema"}
    assert list(loss) == list(range(2, 401, 2))
    assert list(top1) == list(range(50, 401, 50))
    return loss, top1


def test_in_tensorboard(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    loss, top1 = expected(run)
    for name, values in (("train/loss", loss), ("evaluation/ema/top1_accuracy", top1)):
        found = accumulator.Scalars(name)
        assert [each.step for each in found] == list(values)
        assert [each.value for each in found] == pytest.approx(list(values.values()), rel=1e-6)  # it keeps 32 bits


def test_in_tables(run: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    loss, top1 = expected(run)
    steps = pandas.read_csv(run / "csv" / "step.csv")
    assert dict(zip(steps["step"].tolist(), steps["loss"].tolist(), strict=True)) == loss
    assert len(steps) == len(loss)
    scored = pandas.read_csv(run / "csv" / "evaluation.csv")
    of_ema = scored[scored["weights"] == "ema"]
    assert list(zip(of_ema["step"].tolist(), of_ema["top1_accuracy"].tolist(), strict=True)) == list(top1.items())
    assert len(scored) == 2 * len(top1)
    assert pandas.read_csv(run / "csv" / "resume.csv")["resumes"].tolist() == [1]


@pytest.mark.needs("mlflow")
def test_in_mlflow(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a SQLite database where the packages for it are installed, else in files."""
    database = run / "mlflow" / "mlflow.db"
    assert database.is_file() != (missing("sqlalchemy") or missing("alembic"))
    place = f"sqlite:///{database.resolve()}" if database.is_file() else (run / "mlflow").resolve().as_uri()
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
    said = subprocess.run(
        [sys.executable, "-c", program, place], check=True, capture_output=True, text=True, timeout=120, cwd=run.parent
    )
    found = json.loads(said.stdout.splitlines()[-1])
    loss, top1 = expected(run)
    assert [tuple(each) for each in found["loss"]] == list(loss.items())
    assert [tuple(each) for each in found["top1"]] == list(top1.items())
    assert (found["status"], found["name"]) == ("FINISHED", "run")
    assert found["params"]["optimizer.lr"] == "0.05"
    assert any(key.startswith("optimizer.groups._.bias") for key in found["params"])  # MLflow knows no asterisk
    assert "versions.torch" in found["tags"]
    # It would keep its files where the run was started.
    assert {each.name for each in run.parent.iterdir()} == {"recipe.yaml", "run"}


def records(file: Path) -> Iterator[Any]:
    """Read what Weights & Biases has written: LevelDB's log format, of protocol buffers of its own.

    Its Python has no reader of them any more (0.31): the program that does sends them to a server.
    """
    from wandb.proto import wandb_internal_pb2

    content, at, whole = file.read_bytes(), 7, b""
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
            yield record


def items(entry: Any) -> dict[str, Any]:
    return {each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in entry}


@pytest.mark.needs("wandb")
def test_in_weights_and_biases(run: Path) -> None:
    files = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) in (1, 2)  # one, if the first launch was killed before the library was imported
    assert len({file.name for file in files}) == 1  # one run, in two parts
    told = [record for file in files for record in records(file)]
    rows = [items(each.history.item) for each in told if each.WhichOneof("record_type") == "history"]
    assert all(one["_step"] <= other["_step"] for one, other in itertools.pairwise(rows))
    loss, top1 = expected(run)
    assert [(row["_step"], row["train/loss"]) for row in rows if "train/loss" in row] == list(loss.items())
    name = "evaluation/ema/top1_accuracy"
    assert [(row["_step"], row[name]) for row in rows if name in row] == list(top1.items())
    asked = [items(each.run.config.update) for each in told if each.WhichOneof("record_type") == "run"]
    assert [each["optimizer.lr"] for each in asked] == [0.05] * len(files)
    summaries = [items(each.summary.update) for each in told if each.WhichOneof("record_type") == "summary"]
    assert [each["status"] for each in summaries if "status" in each] == ["completed"]


def test_in_a_log_in_mlperfs_format(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlperf_logging", reason="needs mlperf_logging")
    log = run / "mlperf" / "result_0.txt"
    lines = [json.loads(line.split(" ", 1)[1]) for line in log.read_text().splitlines()[1:]]
    _, top1 = expected(run)
    assert [each["value"] * 100 for each in lines if each["key"] == "eval_accuracy"] == pytest.approx(
        list(top1.values())
    )
    assert lines[-1]["metadata"]["resumes"] == 1
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", "4.0.0"]
    done = subprocess.run([*command, str(log)], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert "SUCCESS" in done.stderr, done.stderr
