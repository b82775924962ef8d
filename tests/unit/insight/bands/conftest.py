"""Run directories written by hand: a loss that falls, with the scatter of its seed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

RunMaker = Callable[..., Path]


def _events(
    seed: int, total: int, log_every: int, until: int, change: Callable[[int, dict[str, Any]], dict[str, Any]]
) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    shift = 0.01 * rng.normal()
    found: list[dict[str, Any]] = [
        {"event": "start", "step": 0, "recipe": "mine", "total_steps": total, "version": "0.1.0"}
    ]
    for step in range(log_every, until + 1, log_every):
        loss = (0.5 + 2 / (1 + step / 20)) * np.exp(shift + 0.005 * rng.normal())
        rate = min(1.0, step / (total / 10)) * (1 - step / total)
        record = {"event": "step", "step": step, "loss": loss, "lr": rate, "grad_norm": np.exp(0.1 * rng.normal())}
        found.append(change(step, record))
        if step % (total // 16) == 0:
            scored = {"loss": loss, "top1_accuracy": 90.0, "input_mean": 0.0, "input_std": 1.0}
            evaluation = {"event": "evaluation", "step": step, "weights": "model", "samples": 500, **scored}
            found.append(change(step, evaluation))
    return found


@pytest.fixture
def make_run(tmp_path: Path) -> RunMaker:
    """Write a run of 320 steps, and return its directory."""

    def make(
        seed: int,
        *,
        name: str = "",
        log_every: int = 10,
        until: int = 320,
        change: Callable[[int, dict[str, Any]], dict[str, Any]] = lambda step, record: record,
        **keys: Any,
    ) -> Path:
        run = tmp_path / (name or f"seed-{seed}")
        run.mkdir()
        recipe = {"seed": seed, "optimizer": {"lr": 1.0}, "telemetry": {"log_every": "10 steps"}, **keys}
        (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        plan = {"total_steps": 320, "train_samples": 1000, "evaluation_samples": 500, "headline": "top1_accuracy"}
        (run / "plan.json").write_text(json.dumps(plan))
        lines = [json.dumps(each) for each in _events(seed, 320, log_every, until, change)]
        (run / "events.jsonl").write_text("\n".join(lines) + "\n")
        return run

    return make
