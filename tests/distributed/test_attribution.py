"""Runs of two processes tell who waits for whom, and for how long; where it cannot be known, they say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from calls import Call
from paceline.reports.attribution import Attribution, attribute_run

pytestmark = [pytest.mark.thorough, pytest.mark.world_size(2)]

RECIPE = """
model: {name: "sluggish:Sluggish", options: {late: [1]}}
data: {dataset: digits}
batch: {global_size: 32}
optimizer: {lr: 0.05}
schedule: {name: constant}
train: {duration: 12 steps, precision: fp32}
evaluate: {every: off}
checkpoint: {every: off}
parallel: {device: cpu, threads: 1}
telemetry: {log_every: 2 steps, trackers: [], report: off}
"""
SLUGGISH = """
import os, time
import torch
from torch import nn

SLEPT = []

class Sluggish(nn.Module):
    def __init__(self, num_classes, in_channels, late, seconds=0.15):
        super().__init__()
        self.late, self.seconds = late, seconds
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(in_channels * 64, num_classes))

    def forward(self, x):
        if torch.is_grad_enabled() and int(os.environ["RANK"]) in self.late:
            begun = time.perf_counter()
            time.sleep(self.seconds)
            SLEPT.append(time.perf_counter() - begun)
        return self.body(x)
"""
PROGRAM = """
import json, os, sys, time
import paceline, sluggish

answer = {}
for number, (name, overrides) in enumerate(json.loads(sys.argv[1]).items()):
    os.environ["PACELINE_RENDEZVOUS"] = f"file://{os.getcwd()}/meet-{number}"
    sluggish.SLEPT.clear()
    paceline.train("recipe.yaml", overrides=overrides, run_dir=name, quiet=True)
    answer[name] = sluggish.SLEPT[-8:]
print(json.dumps(answer), flush=True)
os._exit(0)  # threads of a group that something still holds would abort the interpreter's own end
"""
RUNS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "first": {"model.options.late": [0]},
    "exact": {"parallel.exact": True, "parallel.logical_ranks": 2},
    "fsdp": {"parallel.strategy": "fsdp", "train.duration": "8 steps"},
    # So long that other work on the machine makes neither a quarter slower than the other.
    "even": {"model.options.late": [0, 1], "model.options.seconds": 0.25},
}


@pytest.fixture(scope="module")
def done(on_two_ranks: Call, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, list[float]]]]:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "sluggish.py").write_text(SLUGGISH)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder, on_two_ranks(["-c", PROGRAM, json.dumps(RUNS)], folder)


def seconds(found: Attribution) -> dict[str, Any]:
    return {each.name: each for each in found.phases}


@pytest.mark.parametrize(("name", "late"), [("ddp", 1), ("first", 0), ("exact", 1)])
def test_who_waits_for_whom_and_how_long(name: str, late: int, done: Any) -> None:
    folder, slept = done
    planted = sum(slept[late][name]) / len(slept[late][name])
    found = attribute_run(folder / name)
    phases = seconds(found)
    waits, forward = phases["communication"].over_ranks, phases["forward"].over_ranks
    # Other work on the machine delays both now and then; tests/unit/distributed holds this against the arrivals.
    assert 0.5 * planted < waits.maximum < 3 * planted
    assert waits.minimum < 0.5 * waits.maximum
    assert waits.most_rank == 1 - late
    assert 0.95 * planted < forward.maximum < 3 * planted
    assert forward.most_rank == late
    assert found.waiting is not None
    assert (found.waiting.rank, found.waiting.phase, found.waiting.waiting_rank) == (late, "forward", 1 - late)
    assert found.bottleneck is not None
    assert f"waiting for rank {late}" in found.bottleneck
    assert sum(each.seconds for each in found.phases) == pytest.approx(found.step_seconds, rel=1e-6)


def test_nobody_is_waited_for_where_all_are_alike(done: Any) -> None:
    found = attribute_run(done[0] / "even")
    assert found.bottleneck is None or "rank" not in found.bottleneck


def test_what_cannot_be_told_is_said(done: Any) -> None:
    folder, _ = done
    found = attribute_run(folder / "fsdp")
    assert "communication" not in seconds(found)
    assert any("forward and backward" in note for note in found.notes)
    records = [json.loads(line) for line in (folder / "fsdp" / "events.jsonl").read_text().splitlines()]
    assert {each["communication_seconds"] for each in records if each["event"] == "step"} == {None}
    summary = json.loads((folder / "fsdp" / "summary.json").read_text())
    assert "communication" not in summary["phase_fractions"]
