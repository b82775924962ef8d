"""Documents of unequal length over two processes: what one process computes, however the step is shared out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calls import Call

from paceline.checkpoint.weights import read_weights
from paceline.report.audit import audit_run

pytestmark = pytest.mark.thorough

TASK = """
from paceline.tasks.language_modeling import LanguageModeling

class Double(LanguageModeling):
    def build_model(self):
        return super().build_model().double()
"""
# 61 documents, seven steps of 8 and one of 5 for eight micro-batches: the second process has fewer, and phantoms.
RECIPE = """
seed: 3
task: doubled:Double
model: {name: gpt, options: {depth: 1, width: 16, heads: 2}}
data: {dataset: text_folder, path: PATH, text: {context: 160, rows: single}}
batch: {global_size: 8}
optimizer: {name: sgd, lr: 0.5, momentum: 0.0, weight_decay: 0.0}
schedule: {name: constant}
train: {duration: 9 steps, precision: fp32}
evaluate: {every: off}
checkpoint: {every: off}
parallel: {device: cpu, threads: 1, logical_ranks: 8}
telemetry: {log_every: 1 steps, trackers: [], report: off}
"""
EXACT = {"parallel.exact": True}
FSDP = {"parallel.strategy": "fsdp"}
PACKED = {"data.text.rows": "packed"}


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    drawn = np.random.default_rng(0)
    for split, count in (("train", 61), ("val", 2)):
        (tmp_path / "texts" / split).mkdir(parents=True)
        for number, size in enumerate(np.clip(drawn.lognormal(3, 1, count), 5, 150).astype(int)):
            text = "".join(map(chr, drawn.integers(97, 123, size)))
            (tmp_path / "texts" / split / f"{number:02}.txt").write_text(text)
    (tmp_path / "doubled.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return read_weights(run_dir, "model").state


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == "step"]


def test_two_processes_compute_what_one_does(ground: Path, train_in_ranks: Call) -> None:
    recipe = RECIPE.replace("PATH", str(ground / "texts"))
    cases: dict[str, dict[str, Any]] = {"plain": {}, "exact": EXACT, "packed": PACKED}
    alone = train_in_ranks(ground, recipe, 1, *cases.items())
    for name in cases:
        (ground / name).rename(ground / f"{name}-alone")
    together = train_in_ranks(ground, recipe, 2, *cases.items(), ("fsdp", FSDP))
    assert together["exact"] == alone["exact"], "the same bits, with any number of processes"
    for name, other in (("plain", "plain"), ("packed", "packed"), ("fsdp", "plain")):
        mine, theirs = weights(ground / name), weights(ground / f"{other}-alone")
        assert max((mine[key] - theirs[key]).abs().max().item() for key in theirs) <= 1e-10, name
    for name in (*cases, "fsdp"):
        assert audit_run(ground / name).passed
        for mine, theirs in zip(
            steps_of(ground / name), steps_of(ground / f"{name if name in cases else 'plain'}-alone"), strict=True
        ):
            assert mine["padding_fraction"] == theirs["padding_fraction"]
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-10)
            assert theirs["token_imbalance"] == 1
            assert 1 <= mine["token_imbalance"] <= 2
