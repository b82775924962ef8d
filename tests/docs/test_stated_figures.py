"""Figures that pages of the guide state are those of their result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def result(claim: str) -> dict[str, Any]:
    (path,) = (ROOT / "benchmarks" / "results").glob(f"{claim}_*.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def page(name: str) -> str:
    return " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())


def test_samples_that_other_trainers_lose() -> None:
    found, said = result("resume-of-hosts"), page("other-trainers.md")
    ours = [row for row in found["rows"] if "BatchOrder" in row["program"]]
    assert len(ours) == 8
    assert {row["processes"] for row in ours} == {1, 2}
    assert not any(row["repeated"] or row["never_seen"] for row in ours)
    assert all(row["order_equal"] and row["weights_equal"] for row in ours)
    lost = {
        row["program"].partition(",")[0]: (row["repeated"], row["never_seen"])
        for row in found["rows"]
        if row not in ours and row["processes"] == 1
    }
    versions, accelerate = found["versions"], lost["accelerate"]
    stated = (
        f"Accelerate {versions['accelerate']} repeats {accelerate[0]} of 64 samples and misses {accelerate[1]}, "
        f"Lightning {versions['lightning']} {lost['lightning'][0]} and {lost['lightning'][1]}, Hugging Face's Trainer "
        f"(transformers {versions['transformers']}) {lost['trainer'][0]} and {lost['trainer'][1]} "
        f"(torch {versions['torch']})"
    )
    assert stated in said


def test_cost_of_a_loop_of_your_own() -> None:
    found = result("own-loop")
    rows = found["measurements"]
    ratios = [row["processor_time_ratio"] for row in rows]
    medians = [each["median"] for each in ratios]
    steps = {f"{row['plain_processor_time_milliseconds']['median'] / 1000:.1f}" for row in rows}
    seconds = {what: each["processor_time"]["median"] for what, each in found["starts"].items()}
    stated = (
        f"At batch 64 and {' or '.join(sorted(steps))} s a step, the loop takes {min(medians):.2f} to "
        f"{max(medians):.2f} times a plain loop's processor time (95 % intervals within "
        f"{min(each['low'] for each in ratios):.2f} to {max(each['high'] for each in ratios):.2f}); "
        f"importing takes {seconds['import']:.2f} s, opening a run "
        f"{seconds['open']:.1f} s"
    )
    assert stated in page("own-loop.md")
