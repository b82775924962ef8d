"""On a GPU the first passes set up libraries and look for the fastest kernels, which is no part of a step."""

from __future__ import annotations

import json
from pathlib import Path

import paceline


def test_a_forecast_is_near_what_the_run_takes(tmp_path: Path) -> None:
    paceline.train("digits", overrides={"parallel.device": "cuda"}, run_dir=tmp_path / "run", quiet=True)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (forecast,) = [each for each in events if each.get("what") == "forecast"]
    (finish,) = [each for each in events if each["event"] == "finish"]
    assert 1 / 2 < forecast["expected_seconds"] / (finish["time"] - forecast["time"]) < 2
