"""`paceline export` as a user calls it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_what_is_written_is_said(paceline_here: Callable[..., Any], finished: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    done = paceline_here("export", finished, "--format", "onnx", "--output", "a.onnx")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("a.onnx: ")
    assert "of the ema weights" in lines[0]
    assert lines[1].startswith("  ONNX Runtime answers as the network does: to ")
    again = paceline_here("export", finished, "--format", "onnx", "--output", "a.onnx")
    assert again.code == 2
    assert "exists already and is not written over" in again.err
    assert "Traceback" not in again.err
    done = paceline_here("export", finished, "--format", "onnx", "--quantize", "int8", "--output", "b.onnx", "--json")
    said = json.loads(done.out)
    assert said["bytes"] == (tmp_path / "b.onnx").stat().st_size
    assert said["samples"] == 359
    assert 0 <= said["top1_accuracy"] <= 100


def test_what_works_instead_is_named(paceline_here: Callable[..., Any], finished: Path, tmp_path: Path) -> None:
    done = paceline_here("export", finished, "--format", "timm", "--output", "hub")
    assert done.code == 2
    assert "model.name=small_resnet is none of timm's networks" in done.err
    assert "use --format safetensors, onnx or torch-export" in done.err
    missing = paceline_here("export", finished, "--format", "onnx", "--output", "nowhere/a.onnx")
    assert missing.code == 2
    assert "there is no directory 'nowhere'" in missing.err
    assert list(tmp_path.iterdir()) == []
