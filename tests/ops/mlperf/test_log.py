"""The published checker of logs takes those of real runs, and would refuse them with any of their lines left out."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.errors import RecipeError, RunDirectoryError
from paceline.records.run_directory import RunDirectory
from paceline_ops.mlperf.log import TOKEN, mlperf_log, write_mlperf_log

RECIPE = """
model: {name: small_resnet, channels_last: false, options: {width: 4, stages: 1, depth: 1}}
data: {dataset: digits}
batch: {global_size: 64}
optimizer: {name: sgd, lr: 0.4, weight_decay: 0.0002}
schedule: {name: polynomial, end_lr: 0.0001, warmup: 1 epochs}
train: {duration: 8 epochs, precision: fp32}
evaluate: {every: 1 epochs}
checkpoint: {every: 10 steps}
parallel: {device: cpu, threads: 1}
telemetry:
  {trackers: [], report: off, mlperf: true, submission: {org: Us, platform: here, division: closed, status: research}}
"""
LARS = {"optimizer.name": "lars", "optimizer.eps": 0, "optimizer.lr": 8.0}
OPEN = {
    "optimizer.name": "adamw",
    "optimizer.lr": 0.01,
    "schedule.name": "cosine",
    "train.ema": 0.9,
    "evaluate.every": "10 steps",
    "telemetry.submission.division": "open",
    "telemetry.submission.target_accuracy": 60.0,
    "telemetry.submission.cache_cleared": True,
}
# What the checker does without, as long as there is the rest.
NOT_ASKED_FOR = {"seed", "eval_start", "eval_stop"}
# In a process of its own: the checker keeps what it has to look at in its module.
CHECK = """
import json, sys
from mlperf_logging.compliance_checker import mlp_compliance
for file in sys.argv[1:]:
    mlp_compliance.enqueued_configs.clear()
    checker = mlp_compliance.make_checker("training", "4.0.0", True, True)
    print(json.dumps(mlp_compliance.main(file, "training_4.0.0/common.yaml", checker)[0]))
"""


def train(folder: Path, overrides: Mapping[str, Any], name: str = "run") -> Path:
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE)
    return paceline.train(recipe, overrides=overrides, run_dir=folder / name, quiet=True).run_dir


def lines_of(run: Path) -> list[dict[str, Any]]:
    head, *lines = (run / "mlperf" / "result_0.txt").read_text().splitlines()
    assert "not an MLPerf result" in head
    assert all(line.startswith(TOKEN) for line in lines)
    return [json.loads(line.removeprefix(TOKEN)) for line in lines]


def values(run: Path) -> dict[str, Any]:
    return {line["key"]: line["value"] for line in lines_of(run)}


def accepted(files: list[Path]) -> list[bool]:
    pytest.importorskip("mlperf_logging", reason="needs mlperf_logging")
    done = subprocess.run(
        [sys.executable, "-c", CHECK, *map(str, files)], check=True, capture_output=True, text=True, timeout=120
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("closed"), {})


def test_the_published_checker_takes_a_closed_log(closed: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlperf_logging", reason="needs mlperf_logging")
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", "4.0.0"]
    log = closed / "mlperf" / "result_0.txt"
    done = subprocess.run([*command, str(log)], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "SUCCESS" in done.stderr
    assert "training_3.1.0/closed_resnet_sgd.yaml" in done.stderr


def test_it_would_not_without_any_of_the_lines(closed: Path, tmp_path: Path) -> None:
    whole = (closed / "mlperf" / "result_0.txt").read_text().splitlines()
    keys = list(dict.fromkeys(line["key"] for line in lines_of(closed)))
    files = []
    for key in keys:
        left = [line for line in whole if f'"key": "{key}"' not in line]
        assert len(left) < len(whole)
        files.append(tmp_path / key)
        files[-1].write_text("\n".join(left))
    assert {key for key, is_accepted in zip(keys, accepted(files), strict=True) if is_accepted} == NOT_ASKED_FOR


@pytest.mark.parametrize("overrides", [LARS, OPEN], ids=["lars", "open"])
def test_it_takes_other_optimizers_and_the_open_division(tmp_path: Path, overrides: dict[str, Any]) -> None:
    run = train(tmp_path, overrides)
    assert accepted([run / "mlperf" / "result_0.txt"]) == [True]
    logged = values(run)
    assert logged["opt_name"] == overrides["optimizer.name"]
    assert logged["cache_clear"] is overrides.get("telemetry.submission.cache_cleared", False)


def test_every_line_says_what_the_run_did(closed: Path) -> None:
    logged = values(closed)
    plan = json.loads((closed / "plan.json").read_text())
    expected = {
        "submission_org": "Us",
        "submission_platform": "here",
        "submission_division": "closed",
        "submission_status": "research",
        "submission_benchmark": "resnet",
        "cache_clear": False,
        "seed": 0,
        "global_batch_size": 64,
        "gradient_accumulation_steps": 1,
        "train_samples": plan["train_samples"],
        "eval_samples": plan["evaluation_samples"],
        "model_bn_span": 64,
        "opt_name": "sgd",
        "sgd_opt_base_learning_rate": 0.4,
        "sgd_opt_end_learning_rate": 0.0001,
        "sgd_opt_learning_rate_decay_poly_power": 2.0,
        "sgd_opt_learning_rate_decay_steps": plan["total_steps"] - plan["steps_per_epoch"],
        "sgd_opt_weight_decay": 0.0002,
        "sgd_opt_momentum": 0.9,
        "opt_learning_rate_warmup_epochs": 1,
    }
    assert {key: logged[key] for key in expected} == expected


def test_its_clock_leaves_nothing_out_and_stops_at_the_target(closed: Path) -> None:
    lines, run = lines_of(closed), RunDirectory(closed)
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    scored = [each for each in events if each["event"] == "evaluation"]
    first = next(number for number, each in enumerate(scored, start=1) if each["top1_accuracy"] >= 75.9)
    assert first < len(scored)  # else there is nothing to leave out
    logged = [(each["value"], each["metadata"]["epoch_num"]) for each in lines if each["key"] == "eval_accuracy"]
    assert logged == [(each["top1_accuracy"] / 100, each["epoch"]) for each in scored[:first]]
    times = [each["time_ms"] for each in lines]
    assert times == sorted(times)
    start, ended = (next(each for each in lines if each["key"] == key) for key in ("run_start", "run_stop"))
    assert ended["metadata"] | {"status": "success", "epoch_num": first, "resumes": 0} == ended["metadata"]
    assert ended["time_ms"] == round(1000 * scored[first - 1]["time"])
    finish, total = events[-1], json.loads(run.summary.read_text())["total_seconds"]
    assert start["time_ms"] / 1000 == pytest.approx(finish["time"] - total, abs=1.0)


def test_a_run_that_was_stopped_and_resumed_logs_what_one_that_was_not_does(closed: Path, tmp_path: Path) -> None:
    run = train(tmp_path, {"train.until": "30 steps"})
    assert lines_of(run)[-1]["metadata"]["status"] == "aborted"
    train(tmp_path, {})

    def without_clock(run: Path) -> list[Any]:
        left = [(each["key"], each["value"], each["metadata"]) for each in lines_of(run)]
        return [(key, value, {**more, "resumes": 0}) for key, value, more in left]

    assert without_clock(run) == without_clock(closed)
    assert lines_of(run)[-1]["metadata"]["resumes"] == 1


def test_an_evaluation_between_epochs_says_where_it_was(tmp_path: Path) -> None:
    run = train(tmp_path, {"evaluate.every": "10 steps", "train.duration": "20 steps", "schedule.warmup": "0 steps"})
    lines = lines_of(run)
    places = [each["metadata"] for each in lines if each["key"] == "eval_accuracy"]
    assert places[0] == {"epoch_num": round(10 / 23, 6), "samples_count": 640}
    blocks = [each["metadata"] for each in lines if each["key"] == "block_start"]
    assert [each["first_epoch_num"] for each in blocks] == [1, 1]
    assert sum(each["epoch_count"] for each in blocks) == pytest.approx(20 / 23, abs=1e-5)


def test_a_run_without_an_end_has_no_log(closed: Path, tmp_path: Path) -> None:
    for name in ("recipe.yaml", "plan.json"):
        (tmp_path / name).write_text((closed / name).read_text())
    whole = (closed / "events.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "events.jsonl").write_text("".join(whole[:-1]))
    with pytest.raises(RunDirectoryError, match="has not ended"):
        mlperf_log(RunDirectory(tmp_path))


def test_a_stop_that_was_resumed_is_no_end(tmp_path: Path) -> None:
    """A run that is killed after it has gone on from a stop still has that stop's record."""
    run = train(tmp_path, {"train.until": "30 steps"})
    train(tmp_path, {"train.until": "60 steps"})
    events = (run / "events.jsonl").read_text().splitlines(keepends=True)
    assert sum('"event": "finish"' in each or '"event":"finish"' in each for each in events) == 2
    (run / "events.jsonl").write_text("".join(events[:-1]))
    with pytest.raises(RunDirectoryError, match="has not ended"):
        mlperf_log(RunDirectory(run))


def test_afterwards_only_the_submission_can_be_said_otherwise(closed: Path, tmp_path: Path) -> None:
    directory, output = RunDirectory(closed), tmp_path / "there" / "result_3.txt"
    write_mlperf_log(directory, ["telemetry.submission.org=Others"], output)
    assert '"Others"' in output.read_text()
    with pytest.raises(RecipeError, match=r"'optimizer\.lr=1'.*only telemetry\.submission keys"):
        write_mlperf_log(directory, ["optimizer.lr=1"], output)


def test_a_new_launch_takes_the_old_outcome_away(tmp_path: Path) -> None:
    run = train(tmp_path, {"train.until": "10 steps"})
    assert (run / "mlperf" / "result_0.txt").is_file()
    train(tmp_path, {"telemetry.mlperf": False, "telemetry.submission": None, "train.until": "20 steps"})
    assert not (run / "mlperf" / "result_0.txt").exists()


def test_one_that_cannot_be_written_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    short = {"train.duration": "2 steps", "schedule.warmup": "0 steps"}
    run = tmp_path / "run"
    paceline.train(tmp_path / "recipe.yaml", overrides={**short, "train.until": "1 steps"}, run_dir=run, quiet=True)
    shutil.rmtree(run / "mlperf")
    (run / "mlperf").write_text("in the way")
    assert paceline.train(tmp_path / "recipe.yaml", overrides=short, run_dir=run).status == "completed"
    assert "note: the log in MLPerf's format could not be written: Cannot make" in capsys.readouterr().out
