"""`paceline doctor` as a user calls it: findings for people or one document, an exit code, and a better recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
from calls import Call

from paceline.recipe.load import load_recipe
from paceline_advisor.doctor.study import runs_here

SMALL = (
    "model.options={width: 64, stages: 1}",
    "batch.global_size=256",
    "parallel.threads=auto",
    "train.precision=auto",
)
SLOW = (*SMALL, "train.precision=fp32", "telemetry.log_every=1 step", "--device", "a100")


def test_a_healthy_run(paceline_here: Call) -> None:
    done = paceline_here("doctor", "digits", *SMALL, "--device", "a100").ended(0)
    assert "no bottleneck found" in done.out
    assert "NVIDIA A100 SXM4 80 GB (not here: predictions)" in done.out.splitlines()[0]


def test_findings_are_told_with_evidence_reason_and_change(paceline_here: Call) -> None:
    done = paceline_here("doctor", "digits", *SLOW).ended(1)
    first, *rest = [line for line in done.out.splitlines() if line.startswith(("breaks", "slows", "spoils", "notice"))]
    assert first.startswith("slows   precision: train.precision=fp32 resolves to fp32")
    assert any(line.split()[1] == "log_every_step:" for line in rest)
    assert "change: train.precision=auto (bf16)" in done.out
    assert "expected, not measured: 1.5 to 3 times as fast" in done.out


def test_one_document(paceline_here: Call) -> None:
    document = paceline_here("doctor", "digits", *SLOW, "--json").document
    assert document["healthy"] is False
    assert document["device"] == "NVIDIA A100 SXM4 80 GB"
    assert document["unseen"] == {}
    names = [each["name"] for each in document["findings"]]
    assert names[0] == "precision"
    assert "log_every_step" in names
    assert document["findings"][0]["advice"] == {
        "words": "train.precision=auto (bf16); or, nearer to fp32, train.float32_matmul=high (TF32)",
        "overrides": {"train.precision": "auto"},
        "keeps": "rounding",
    }
    assert document["check_seconds"] < document["seconds"]


def test_the_improved_recipe_trains_the_same(paceline_here: Call, tmp_path: Path) -> None:
    done = paceline_here("doctor", "digits", *SLOW, "batch.global_size=1024", "--apply", "better.yaml")
    _, _, shown = done.out.partition("better.yaml: the recipe with precision, log_every_step changed:\n")
    assert shown.splitlines() == [
        *("  - train.precision=fp32", "  + train.precision=auto"),
        *('  - telemetry.log_every="1 step"', '  + telemetry.log_every="10 steps"'),
    ], done.out
    text = (tmp_path / "better.yaml").read_text()
    assert "train.precision=auto  (precision; the same training except for rounding; not measured)" in text
    better = load_recipe(tmp_path / "better.yaml").recipe
    assert (better.train.precision, str(better.telemetry.log_every)) == ("auto", "10 steps")
    assert better.batch.global_size == 1024


def test_nothing_to_apply(paceline_here: Call, tmp_path: Path) -> None:
    done = paceline_here("doctor", "digits", *SMALL, "--device", "a100", "--apply", "better.yaml").ended(0)
    assert "better.yaml was not written: there is no change to make" in done.out
    assert not (tmp_path / "better.yaml").exists()


def test_a_run_that_was_made(paceline_here: Call, finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    done = paceline_here("doctor", finished, "--device", "cpu", "--json")
    assert done.code in (0, 1), done.err
    assert done.document["unseen"] == {}
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_the_device_that_is_here_may_be_named_to_measure_on() -> None:
    assert runs_here("cpu", load_recipe("digits", ["parallel.device=cpu"]).recipe)
    assert not runs_here("a100", load_recipe("digits", ["parallel.device=cpu"]).recipe)


def test_what_a_change_is_worth_is_measured(paceline_here: Call, tmp_path: Path) -> None:
    requested = ("model.options={width: 4, stages: 1}", "telemetry.log_every=1 step", "train.duration=100 steps")
    done = paceline_here(
        "doctor", "digits", *requested, "--measure", "--rounds", "4", "--json", "--apply", "better.yaml"
    )
    document = done.document
    (found,) = [each for each in document["findings"] if each["name"] == "log_every_step"]
    gain = found["gain"]
    assert gain["low"] <= gain["middle"] <= gain["high"]
    assert gain["rounds"] == 4
    assert (tmp_path / "better.yaml").exists() == bool(document["applied"]) == (gain["low"] > 1)


def test_a_line_of_code_is_told_once(paceline_here: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counting_loss.py").write_text(
        "import paceline\n\n\nclass Counting(paceline.ImageClassification):\n    total = 0.0\n\n"
        "    def loss(self, model, batch):\n        loss = super().loss(model, batch)\n"
        "        self.total += loss.item()\n        return loss\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    done = paceline_here("doctor", "digits", *SMALL, "task=counting_loss:Counting", "--device", "a100").ended(1)
    assert done.out.count("counting_loss.py:9") == 1


def test_of_a_small_network_little_is_expected(paceline_here: Call) -> None:
    done = paceline_here("doctor", "digits", "--device", "a100", "--json")
    (found,) = [each for each in done.document["findings"] if each["name"] == "precision"]
    assert found["severity"] == "notice"
    assert "launched" in found["expected"]
    assert found["speedup"][1] < 1.1


def test_a_run_that_diverged_is_told_and_found(paceline_here: Call, tiny: tuple[str, ...]) -> None:
    rate = ("optimizer={name: sgd, lr: 30}", "train.duration=12 steps", "--run-dir", "run")
    for _ in range(2):
        done = paceline_here("train", "digits", *tiny, *rate)
        assert (done.code, "became" in done.err) == (1, True) or "The run diverged" in done.err
    assert "spoils  diverged: " in paceline_here("doctor", "run").ended(1).out
