"""`paceline estimate` and `paceline find-batch` as a user calls them."""

from __future__ import annotations

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
