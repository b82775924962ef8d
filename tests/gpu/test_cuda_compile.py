"""Compiled runs on a GPU: inductor, CUDA graphs, TF32, fp8. Written without one, and not yet run."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline

pytestmark = [
    pytest.mark.slow,
    # torch 2.11 imports a deprecated part of its own.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]
SHORT = {
    "train.duration": "12 steps",
    "schedule.warmup": "2 steps",
    "train.precision": "fp32",
    "train.ema": 0.9,
    "evaluate.every": "6 steps",
    "parallel.device": "cuda",
    "telemetry.log_every": "1 steps",
    "model.options": {"dropout": 0.2},
}


@pytest.fixture(autouse=True)
def _forget_what_was_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def train(run_dir: Path, **changes: Any) -> Any:
    overrides = {**SHORT, **{key.replace("__", "."): value for key, value in changes.items()}}
    return paceline.train("digits", overrides=overrides, run_dir=run_dir, quiet=True)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_a_compiled_run_is_nearly_the_uncompiled_one(tmp_path: Path, mode: str) -> None:
    plain = train(tmp_path / "plain")
    compiled = train(tmp_path / "compiled", model__compile=True, model__compile_mode=mode)
    assert compiled.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-2)
    assert "recompile" not in [each["incident"] for each in events(compiled.run_dir, "incident")]
    measured, *_ = events(compiled.run_dir, "measurement")
    assert measured["gradient_error"] < 1e-3


def test_a_resumed_compiled_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    asked = {"model__compile": True, "train__deterministic": True, "checkpoint__every": "4 steps"}
    whole = train(tmp_path / "whole", **asked)
    train(tmp_path / "parts", **asked, train__until="5 steps")
    assert train(tmp_path / "parts", **asked).summary.weights_sha256 == whole.summary.weights_sha256


def test_tf32_changes_the_bits_and_is_put_back(tmp_path: Path) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    exact = train(tmp_path / "highest", train__float32_matmul="highest")
    fast = train(tmp_path / "high", train__float32_matmul="high")
    assert exact.summary.weights_sha256 != fast.summary.weights_sha256
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs fp8 products"
)
@pytest.mark.parametrize("compiled", [False, True])
def test_linear_layers_train_in_fp8(tmp_path: Path, compiled: bool) -> None:
    vit = {
        "model__name": "vit_tiny_patch16_224",
        "model__options": {"img_size": 8, "patch_size": 2, "depth": 2, "embed_dim": 64, "num_heads": 2},
        "train__precision": "fp8",
        "model__compile": compiled,
        "batch__global_size": 50,
    }
    result = train(tmp_path, **vit)
    assert json.loads((tmp_path / "plan.json").read_text())["fp8_layers"]
    assert result.status == "completed"
    assert result.metrics["loss"] < 3
