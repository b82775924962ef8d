"""Run directories made of whatever a test wants to have happened, and the figures of the page made of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.telemetry.meter import PHASES

SUMMARY = {
    "status": "completed",
    "step": 40,
    "epoch": 2,
    "samples": 640,
    "world_size": 1,
    "weights_sha256": "0" * 64,
    "train_seconds": 4.0,
    "total_seconds": 5.5,
    "throughput_samples_per_second": 160.0,
    "data_wait_fraction": 0.04,
    "peak_memory_bytes": 3 * 2**20,
    "parameters": 1234,
    "ledger": {"epochs_complete": 2, "duplicates": 0, "missing": 0, "broken": 0},
}
PLAN = {"device": "cpu", "device_name": "A CPU", "strategy": "single", "precision": "fp32", "parameters": 1234}
RECIPE = {"task": "image_classification", "seed": 0, "model": {"name": "small_resnet"}, "optimizer": {"lr": 0.1}}


class RecordedRun:
    """What happened, to be written down."""

    def __init__(self, world_size: int = 1) -> None:
        self.events: list[dict[str, Any]] = []
        self.world_size = world_size
        self.time = 1.79e9

    def tell(self, event: str, step: int, **more: Any) -> RecordedRun:
        self.time += 1.5
        self.events.append({"event": event, "step": step, "position": step, "time": self.time, **more})
        return self

    def start(self, step: int = 0) -> RecordedRun:
        return self.tell("start", step, recipe="r", world_size=self.world_size, total_steps=40, version="0")

    def record(self, step: int, loss: float | None = 1.0, **more: Any) -> RecordedRun:
        seconds = {f"{phase}_seconds": 0.001 * (at + 1) for at, phase in enumerate(PHASES)}
        rates = {"throughput_samples_per_second": 160.0, "data_wait_fraction": 0.04}
        facts = {"epoch": 1, "samples": 16 * step, "loss": loss, "lr": 0.1 / step, "grad_norm": 2.0, "grad_scale": 1.0}
        return self.tell("step", step, **{**facts, "step_seconds": sum(seconds.values()), **seconds, **rates, **more})

    def evaluation(self, step: int, weights: str = "model", **metrics: float) -> RecordedRun:
        facts = {"epoch": 1, "split": "validation", "weights": weights, "samples": 9, "seconds": 0.1}
        return self.tell("evaluation", step, **facts, train_seconds=1.0, **metrics)

    def finish(self, step: int, status: str = "completed", **more: Any) -> RecordedRun:
        return self.tell("finish", step, status=status, train_seconds=4.0, total_seconds=5.5, **more)


def _write(
    folder: Path, recorded_run: RecordedRun | None, *, summary: Any = (), recipe: Any = RECIPE, plan: Any = PLAN
) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(dict(recipe)))
    (folder / "plan.json").write_text(json.dumps(plan))
    if recorded_run is not None:
        (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in recorded_run.events))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps({**SUMMARY, **dict(summary)}))
    return folder


def _figures(text: str) -> dict[str, Any]:
    """Plotly's figures by the titles of their charts."""
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    titles = re.findall(r'id="(chart-\d+)-title"><span class="count">Figure \d+</span> (.*?)\n', text)
    figures = json.loads(found[1]) if found else {}
    return {title: figures[name] for name, title in titles}


@pytest.fixture
def recorded_run() -> type[RecordedRun]:
    return RecordedRun


@pytest.fixture
def write() -> Callable[..., Path]:
    """``write(folder, story, summary=…, recipe=…)`` makes a run directory; ``summary`` is what is unusual in it."""
    return _write


@pytest.fixture
def figures() -> Callable[[str], dict[str, Any]]:
    """``figures(text)``: the charts' figures by title."""
    return _figures


@pytest.fixture
def points() -> Callable[[Mapping[str, Any], str], Sequence[tuple[float, float | None]]]:
    """``points(figure, name)``: the points of a series."""

    def find(figure: Mapping[str, Any], name: str) -> Sequence[tuple[float, float | None]]:
        trace = next(each for each in figure["data"] if each["name"] == name)
        return list(zip(trace["x"], trace["y"], strict=True))

    return find
