"""`paceline mlperf` writes logs that MLPerf's own checkers take, and says of them what those do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
def five(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Five runs that differ by their seed alone, and know nothing of MLPerf."""
    folder = tmp_path_factory.mktemp("five")
    (folder / "recipe.yaml").write_text(RECIPE)
    for seed in range(5):
        paceline.train(folder / "recipe.yaml", overrides={"seed": seed}, run_dir=folder / f"seed-{seed}", quiet=True)
    return [str(folder / f"seed-{seed}") for seed in range(5)]


def reference(folder: Path, batch: int, epochs: list[float]) -> Path:
    point = {"Benchmark": "resnet", "BS": batch, "Hyperparams": {}, "Epochs to converge": epochs}
    path = folder / "points.json"
    path.write_text(json.dumps({"ours": point}))
    return path


@pytest.mark.parametrize("factor", [0.5, 0.99, 1.01, 2.0])
def test_runs_beside_points_of_ones_own(
    five: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], factor: float
) -> None:
    theirs = pytest.importorskip("mlperf_logging.rcp_checker.rcp_checker", reason="pip install mlperf-logging")
    output = tmp_path / "results"
    assert run(["mlperf", *five, *SAID, "--output", str(output), "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["convergence"] is None
    assert "of ImageNet's 1,281,167 training samples" in told["remark"]
    needed = sorted(each["epochs"] for each in told["runs"])
    assert needed[0] < needed[-1] <= 2
    points = reference(tmp_path, 64, [factor * each for each in (*needed, *needed)])
    code = run(["mlperf", *map(str, sorted(output.iterdir())), "--reference", str(points), "--json"])
    found = json.loads(capsys.readouterr().out)["convergence"]
    with points.open() as file:
        passed, _, scaling = theirs.check_directory(
            *(str(output), "training", "4.0.0"),
            verbose=False,
            bert_train_samples=False,
            rcp_file=file,
            rcp_pass="pruned_rcps",
        )
    assert found["passed"] is passed is (code == 0)
    assert found["scaling"] == pytest.approx(scaling)
    # Their runs may be as fast as those of the reference may be by chance.
    assert passed is (factor < 1.5)


def test_what_is_told_on_a_terminal(five: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = reference(tmp_path, 64, [0.5] * 10)
    assert run(["mlperf", *five[:4], *SAID, "--reference", str(points)]) == 0
    told = capsys.readouterr().out
    assert (Path(five[0]) / "mlperf" / "result_0.txt").is_file()
    assert (Path(five[0]) / "mlperf" / "README.md").is_file()
    assert "Passed: " in told
    assert "MLPerf asks for 5 runs; found 4" in told
    assert "a log in MLPerf's format, not an MLPerf result" in told


def test_a_reference_that_is_not_there_is_told_whatever_the_number_of_runs(
    five: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--output", str(tmp_path / "results")]
    assert run(["mlperf", five[0], *SAID, *output, "--reference", str(tmp_path / "nope.json")]) == 2
    assert "nope.json" in capsys.readouterr().err


def test_a_folder_of_logs_is_of_one_set_of_runs(
    five: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for runs in (five[:2], five[:2]):
        assert run(["mlperf", *runs, *SAID, "--output", str(tmp_path)]) == 0
    assert run(["mlperf", five[0], *SAID, "--output", str(tmp_path)]) == 2
    assert "result_1.txt' is of other runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{0}"], "nothing is said of telemetry.submission.org"),
        (["{0}", "{0}", *SAID], "was named twice"),
        (["{0}", *SAID, "optimizer.lr=1"], "only keys of telemetry.submission"),
        (["nowhere"], "there is no run directory 'nowhere'"),
        (["{0}/recipe.yaml"], "is no whole log in MLPerf's format"),
        ([*SAID], "name a run directory"),
        (["{0}", "{1}", "{2}", *SAID, "--reference", "{0}/plan.json"], "holds no reference points"),
    ],
)
def test_mistakes_are_one_sentence(
    five: list[str], capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert run(["mlperf", *(word.format(*five) for word in words)]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert said.out == ""
