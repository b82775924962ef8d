"""`paceline estimate` and `paceline find-batch` as a user calls them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from calls import Call

from paceline.recipe.load import load_recipe


def test_an_estimate_tells_causes_sizes_devices_and_a_verdict(paceline_here: Call, tiny: tuple[str, ...]) -> None:
    done = paceline_here("estimate", "digits", *tiny, "--device", "h100").ended(0)
    assert done.out.startswith("Memory of a training step of digits on NVIDIA H100 SXM5 80 GB\n")
    for message in ("activations", "optimizer", "average", "largest micro-batch", "b200", "On 8 processes: ddp, since"):
        assert message in done.out


def test_what_ends_a_search_and_what_a_device_lacks_is_said(paceline_here: Call, tiny: tuple[str, ...]) -> None:
    done = paceline_here("estimate", "digits", *tiny, "train.precision=bf16", "--device", "b200").ended(0)
    largest = next(line for line in done.out.splitlines() if "largest micro-batch" in line)
    assert "at least 1,048,576 samples" in largest
    assert "lacks this precision; with train.precision=auto a run there takes fp32: --device t4" in done.out
    assert " 0.0" not in done.out.split("\nOn 8 processes")[1].split(" GiB")[0]


def test_an_estimate_is_one_document(paceline_here: Call, tiny: tuple[str, ...]) -> None:
    found = paceline_here("estimate", "digits", *tiny, "--device", "t4", "--json").document
    assert found["recipe"] == "digits"
    assert found["fits"] is True
    assert found["peak"]["allocated_bytes"] == sum(found["peak"]["causes"].values())
    assert found["needed_bytes"] == found["peak"]["reserved_bytes"] + found["outside_bytes"]
    assert {each["device"] for each in found["devices"]} >= {"h100", "mi300x"}


LONGER = ("train.duration=24 steps", "evaluate.every=12 steps", "batch.global_size=64")


@pytest.mark.slow
@pytest.mark.real_processes
def test_three_commands_say_one_total_and_the_run_takes_it(
    paceline: Call, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    asked = ("digits", *tiny, *LONGER)
    estimate = paceline("estimate", *asked, "--device", "cpu", "--json").ended(0)
    plan = paceline("train", *asked, "--plan-only", "--json").document
    run = paceline("train", *asked, "--run-dir", "run", "--json").document
    total = estimate.document["needed_bytes"]
    assert plan["expected_memory_bytes"] == total
    said = re.search(r"expected: .*, (\d+) MiB of memory", (tmp_path / "run" / "events.jsonl").read_text())
    assert said is not None
    assert int(said[1]) == round(total / 2**20)
    assert 0.95 <= total / run["peak_memory_bytes"] <= 1.1
    # What the commands do meanwhile.
    for line in ("running steps and an evaluation on fake tensors", "starting the run's processes"):
        assert line in estimate.err


def test_without_a_measured_process_there_is_no_total(paceline_here: Call, tiny: tuple[str, ...]) -> None:
    asked = ("batch.global_size=256", "--processes", "256", "--device", "cpu")
    done = paceline_here("estimate", "digits", *tiny, *asked).ended(0)
    assert "peak allocated" in done.out
    assert "was not measured: the run has 256 processes, and this machine has" in done.out
    for word in ("total", "it fits", "largest micro-batch", "overhead", "minimum"):
        assert word not in done.out


@pytest.mark.slow
def test_commands_agree_on_the_largest_micro_batch(paceline_here: Call) -> None:
    asked = ("synthetic", "model.name=small_resnet", "data.image_size=32", "data.samples=200000")
    asked += ("batch.global_size=131072", "train.precision=fp32", "--device", "t4")
    found = paceline_here("estimate", *asked, "--json").document
    largest, divisor = found["largest_micro_batch"], found["micro_size"]
    assert found["fits"] is False
    assert f"{largest:,} do" in paceline_here("doctor", *asked).out
    roofline = paceline_here("roofline", *asked)
    assert f"{largest:,} samples do: computed with batch.micro_size={divisor}" in roofline.out
    assert f"A micro-batch of {divisor} samples" in roofline.out


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_found_batch_can_be_applied(paceline_here: Call, tiny: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "found.yaml"
    requested = (*tiny, "batch.global_size=16", "--processes", "2", "--apply", path, "--json")
    found = paceline_here("find-batch", "digits", *requested).ended(0).document
    assert (found["largest_micro_batch"], found["refused_micro_batch"]) == (8, None)
    assert found["trials"][-1]["fits"] is True
    recipe = load_recipe(path).recipe
    assert (recipe.batch.micro_size, recipe.batch.global_size) == (8, 16)
