"""A clean recipe, and the diagnosis of it with something planted: in the recipe, or in code of the user's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.distributed.device import describe_machine

# Wide enough for an A100, of noise that is read from nowhere; nothing of it is ever trained.
CLEAN = """
model: {name: small_resnet, options: {width: 64, stages: 2}}
data: {dataset: synthetic, image_size: 32, classes: 64, samples: 8192}
batch: {global_size: 256}
train: {duration: 4 epochs}
telemetry: {trackers: [], report: off}
"""


@pytest.fixture
def examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """``examined({"train.precision": "fp32"}, code=..., device="a100")`` is a diagnosis; ``code`` is ``mine``'s.

    Whether a step fits is estimated, which takes longer than all else, only with ``room=True``.
    """
    from paceline_advisor.commands import Doctor
    from paceline_advisor.doctor import study

    estimate = study.memory_shortage
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    recipe = tmp_path / "clean.yaml"
    recipe.write_text(CLEAN)
    names: list[str] = []

    def run(
        overrides: Mapping[str, Any] | None = None, *, code: str = "", device: Any = None, room: bool = False
    ) -> Any:
        monkeypatch.setattr(study, "memory_shortage", estimate if room else lambda *_: None)
        requested = dict(overrides or {})
        is_fast = device == "a100" or (device == "cpu" and describe_machine(torch.device("cpu")).fast_bf16)
        if "task" in requested and is_fast:  # of your own: `auto` is fp32
            requested.setdefault("train.precision", "bf16")
        if code:
            # A name of its own for each: what was imported stays imported.
            names.append(f"mine_{abs(hash((request.node.nodeid, len(names))))}")
            (tmp_path / f"{names[-1]}.py").write_text(code)
            requested = {key: str(value).replace("mine:", f"{names[-1]}:") for key, value in requested.items()}
        pairs = tuple(f"{key}={value}" for key, value in requested.items())
        return study.examine(Doctor(recipe=str(recipe), overrides=pairs, device=device), lambda _: None)

    yield run
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The diagnosis of the clean recipe for an A100."""
    from paceline_advisor.commands import Doctor
    from paceline_advisor.doctor.study import examine

    recipe = tmp_path_factory.mktemp("clean") / "clean.yaml"
    recipe.write_text(CLEAN)
    return examine(Doctor(recipe=str(recipe), overrides=(), device="a100"), lambda _: None)
