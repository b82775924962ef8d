"""A proof of a task that lies in no file, in this process: half a second each."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn


class Perceptron(nn.Module):
    """A network for 8x8 greyscale images without BatchNorm, with dropout."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 10)
        self.norm = nn.LayerNorm(10)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.head(self.drop(F.gelu(self.norm(self.hidden(x.flatten(1))))))
        return answer


@pytest.fixture
def perceptron() -> type[Perceptron]:
    """The network above."""
    return Perceptron


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_recipe: Path, tiny_task: Any) -> Callable[..., Any]:
    """``proof(make_network=..., overrides={...})``: the checks of a proof by name; other names change the tiny task."""
    from paceline_advisor.commands import Prove
    from paceline_advisor.prove.study import prove

    def run(*, task: Any = None, overrides: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        planted = types.ModuleType("planted")
        planted.task = tiny_task(**{"make_network": Perceptron, **changes}) if task is None else task
        monkeypatch.setitem(sys.modules, "planted", planted)
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr("tempfile.tempdir", None)
        requested = {"task": "planted:task", "train.ema": 0.9, **(overrides or {})}
        pairs = tuple(f"{key}={value}" for key, value in requested.items())
        report = prove(Prove(recipe=str(tiny_recipe), overrides=pairs, processes=1), lambda _: None)
        assert list(tmp_path.glob("paceline-*")) == []
        return {check.name: check for check in report.checks}

    return run


@pytest.fixture
def failed() -> Callable[[Mapping[str, Any]], set[str]]:
    """The names of the checks that failed; a failed one gives advice, others none."""

    def names(checks: Mapping[str, Any]) -> set[str]:
        for check in checks.values():
            assert bool(check.advice) == (check.verdict == "failed"), check
            assert check.found or check.verdict == "passed", check
        return {name for name, check in checks.items() if check.verdict == "failed"}

    return names
