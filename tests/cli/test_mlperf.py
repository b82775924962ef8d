"""`paceline mlperf` writes a log for each run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import paceline
from paceline.cli.main import run

RECIPE = """
model: {name: small_resnet, channels_last: false, options: {width: 4, stages: 1, depth: 1}}
data: {dataset: digits}
batch: {global_size: 64}
optimizer: {lr: 0.4}
train: {duration: 2 epochs, precision: fp32}
evaluate: {every: 4 steps, keep_examples: 0}
checkpoint: {every: off, keep_best: off}
parallel: {device: cpu, threads: 1}
telemetry: {trackers: [], report: off}
"""
SAID = [f"telemetry.submission.{each}" for each in ("org=Us", "platform=here", "division=open", "status=research")]
SAID.append("telemetry.submission.target_accuracy=40")  # so that the seeds need not the same


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Runs that differ by their seed alone, and know nothing of MLPerf."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "recipe.yaml").write_text(RECIPE)
    for seed in range(2):
        paceline.train(folder / "recipe.yaml", overrides={"seed": seed}, run_dir=folder / f"seed-{seed}", quiet=True)
    return [str(folder / f"seed-{seed}") for seed in range(2)]


def test_logs_are_written_where_they_are_listed(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["mlperf", *runs, *SAID]) == 0
    reported = capsys.readouterr().out
    log = Path(runs[0]) / "mlperf" / "result_0.txt"
    assert log.is_file()
    assert (Path(runs[0]) / "mlperf" / "README.md").is_file()
    assert str(log) in reported
    assert "a log in MLPerf's format, not an MLPerf result" in reported
    assert run(["mlperf", *runs, *SAID, "--output", str(tmp_path), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["runs"]
    assert [each["run_dir"] for each in written] == runs
    assert [Path(each["log"]).read_text() for each in written] == [
        (Path(each) / "mlperf" / "result_0.txt").read_text() for each in runs
    ]


def test_a_folder_of_logs_is_of_one_set_of_runs(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert run(["mlperf", *runs, *SAID, "--output", str(tmp_path)]) == 0
    assert run(["mlperf", runs[0], *SAID, "--output", str(tmp_path)]) == 2
    assert "result_1.txt' belongs to other runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["{0}"], "these are not set: telemetry.submission.org"),
        (["{0}", "{0}", *SAID], "is named twice"),
        (["{0}", *SAID, "optimizer.lr=1"], "only telemetry.submission keys"),
        (["nowhere"], "there is no run directory 'nowhere'"),
        ([*SAID], "name a run directory"),
    ],
)
def test_mistakes_are_one_sentence(
    runs: list[str], capsys: pytest.CaptureFixture[str], words: list[str], reported: str
) -> None:
    assert run(["mlperf", *(word.format(*runs) for word in words)]) == 2
    message = capsys.readouterr()
    assert reported in message.err
    assert message.out == ""
