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
    done = paceline_here("export", finished, "--quantize", "bf16", "--output", "b.safetensors", "--json")
    said = json.loads(done.out)
    assert said["bytes"] == (tmp_path / "b.safetensors").stat().st_size
    assert said["format"] == "safetensors"


def test_what_works_instead_is_named(paceline_here: Callable[..., Any], finished: Path, tmp_path: Path) -> None:
    done = paceline_here("export", finished, "--format", "timm", "--output", "hub")
    assert done.code == 2
    assert "model.name=small_resnet is none of timm's networks" in done.err
    assert "use --format safetensors, onnx or torch-export" in done.err
    assert list(tmp_path.iterdir()) == []


def test_folders_above_the_output_are_made_at_last(
    paceline_here: Callable[..., Any], finished: Path, tmp_path: Path
) -> None:
    refused = paceline_here("export", finished, "--format", "timm", "--output", "new/hub")
    assert (refused.code, list(tmp_path.iterdir())) == (2, [])
    missing = paceline_here("export", "nowhere", "--output", "new/weights.onnx")
    assert missing.code == 2
    assert "there is no run directory 'nowhere'" in missing.err
    done = paceline_here("export", finished, "--output", "new/deep/weights.safetensors")
    assert done.code == 0, done.err
    assert [each.name for each in tmp_path.rglob("*")] == ["new", "deep", "weights.safetensors"]
    in_a_file = paceline_here("export", finished, "--output", "new/deep/weights.safetensors/again.safetensors")
    assert in_a_file.code == 2
    assert "'new/deep/weights.safetensors' is no directory" in in_a_file.err
