"""`paceline noise-scale` and `paceline sweep-batch` as a user calls them."""

from __future__ import annotations

from pathlib import Path

import pytest
from calls import Call


def test_the_noise_scale_is_told_with_a_range(paceline_here: Call, tiny: tuple[str, ...]) -> None:
    done = paceline_here("noise-scale", "digits", *tiny, "--steps", "5", "--output", "noise").ended(0)
    assert done.out.startswith("Gradient noise scale: digits, batches of 128 in micro-batches of 32\n")
    assert "critical batch" in done.out
    assert "written: noise/noise-scale.html" in done.out


def test_the_noise_scale_is_one_document(paceline_here: Call, tiny: tuple[str, ...]) -> None:
    found = paceline_here("noise-scale", "digits", *tiny, "--steps", "5", "--json").document
    (point,) = found["points"]
    scale = point["noise_scale"]
    assert scale["low"] < scale["middle"]
    assert scale["high"] is None or scale["middle"] < scale["high"]
    assert point["critical_batch"]["low"] == pytest.approx(scale["low"] / 8)
    assert found["costs"]["examples_ratio"] == pytest.approx(1 + 128 / scale["middle"])


@pytest.mark.thorough
def test_processes_share_the_batch_of_a_noise_scale(paceline: Call, tiny: tuple[str, ...]) -> None:
    two = paceline("noise-scale", "digits", *tiny, "--steps", "4", "--processes", "2", "--json").ended(0).document
    one = paceline("noise-scale", "digits", *tiny, "--steps", "4", "--json").document
    assert (two["processes"], one["processes"]) == (2, 1)
    assert two["points"][0]["gradient_variance"] == pytest.approx(one["points"][0]["gradient_variance"], rel=1e-4)


def test_a_run_that_measures_its_noise_says_so_in_plan_and_records(
    paceline_here: Call, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    words = (*tiny, "telemetry.noise_scale=2 steps")
    paceline_here("train", "digits", *words).refused("set batch.micro_size=64")
    done = paceline_here("train", "digits", *words, "batch.micro_size=32", "--plan-only")
    assert "every 2 steps" in next(line for line in done.out.splitlines() if "noise scale" in line)


def test_a_sweep_prints_each_rule_and_goes_on(paceline_here: Call, tiny: tuple[str, ...], tmp_path: Path) -> None:
    words = ("sweep-batch", "digits", *tiny, "--batch-sizes", "64,128", "--to", "top1_accuracy=10")
    done = paceline_here(*words, "--lr-rules", "linear,sqrt", "--seeds", "1", "--output", "sweep").ended(0)
    assert done.out.startswith("Steps and samples by batch size: digits to top1_accuracy=10, 1 runs each\n")
    assert "linear rule: no knee: the target was reached with 2 batch sizes" in done.out
    again = paceline_here(*words, "--lr-rules", "linear,sqrt", "--seeds", "1", "--output", "sweep", "--json")
    assert "3 of 3 runs are already done" in again.err
    assert [each["rule"] for each in again.document["rules"]] == ["linear", "sqrt"]


def test_plan_and_run_say_the_same_of_a_batch_larger_than_the_data(paceline_here: Call, tiny: tuple[str, ...]) -> None:
    requested = (*tiny, "data.subset=12", "batch.global_size=64", "train.duration=2 steps")
    planned = paceline_here("train", "digits", *requested, "--plan-only")
    run = paceline_here("train", "digits", *requested, "--run-dir", "run")
    assert (planned.code, run.code) == (0, 0), run.err
    reported = "batch.global_size=64: larger than the 12 training samples, so the global batch is 12"
    assert reported in " ".join(planned.out.split())
    assert reported in " ".join(run.out.split())
    assert "2 steps of 12 " in run.out
    assert "12: all training samples, instead of 64 = 1 process x 1 micro-batch x 64 samples" in planned.out
