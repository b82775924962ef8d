"""A profile on a GPU: it has the kernels, and the bits stay; Nsight's marks; the cores near the device."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

import paceline

SHORT = {
    "train.duration": "12 steps",
    "schedule.warmup": "2 steps",
    "parallel.device": "cuda",
    "train.deterministic": True,
    "evaluate.every": "off",
    "checkpoint.every": "off",
}
PROFILED = {"telemetry.profile.steps": 3, "telemetry.profile.after": "5 steps"}


@pytest.mark.parametrize("tool", ["torch", "nsys"])
def test_profiling_changes_no_weight(tmp_path: Path, tool: str) -> None:
    alone = paceline.train("digits", overrides=SHORT, run_dir=tmp_path / "alone", quiet=True)
    asked = {**SHORT, **PROFILED, "telemetry.profile.tool": tool}
    watched = paceline.train("digits", overrides=asked, run_dir=tmp_path / "watched", quiet=True)
    assert watched.summary.weights_sha256 == alone.summary.weights_sha256


def test_the_trace_has_kernels(tmp_path: Path) -> None:
    paceline.train("digits", overrides={**SHORT, **PROFILED}, run_dir=tmp_path, quiet=True)
    folder = tmp_path / "profile" / "step-00000005"
    with gzip.open(folder / "trace-rank0.json.gz", "rt") as file:
        trace = json.load(file)["traceEvents"]
    assert any(each.get("cat") == "kernel" for each in trace)
    assert "self ms, device" in (folder / "operators-rank0.md").read_text()


@pytest.mark.parametrize("mode", ["socket", "contiguous"])
def test_a_run_keeps_to_the_cores_near_its_device(tmp_path: Path, mode: str) -> None:
    before = os.sched_getaffinity(0)
    paceline.train("digits", overrides={**SHORT, "parallel.affinity": mode}, run_dir=tmp_path, quiet=True)
    assert os.sched_getaffinity(0) == before
    assert f"({mode})" in json.loads((tmp_path / "environment.json").read_text())["affinity"]
