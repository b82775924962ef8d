"""`paceline export` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calls import Call


def test_what_is_written_is_said(paceline_here: Call, finished: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    done = paceline_here("export", finished, "--format", "onnx", "--output", "a.onnx")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("a.onnx: ")
    assert "of the ema weights" in lines[0]
    assert lines[1].startswith("  ONNX Runtime answers as the network does: to ")
    again = paceline_here("export", finished, "--format", "onnx", "--output", "a.onnx")
    assert again.code == 2
    assert "already exists and is not overwritten" in again.err
    assert "Traceback" not in again.err
    for words, said in {
        ("nowhere", "--output", "new/weights.onnx"): "there is no run directory 'nowhere'",
        (finished, "--format", "timm", "--output", "new/hub"): "use --format safetensors, onnx or torch-export",
    }.items():
        refused = paceline_here("export", *words)
        assert (refused.code, said in refused.err) == (2, True)
    assert [each.name for each in tmp_path.iterdir()] == ["a.onnx"]
    done = paceline_here("export", finished, "--quantize", "bf16", "--output", "b.safetensors", "--json")
    said = json.loads(done.out)
    assert said["bytes"] == (tmp_path / "b.safetensors").stat().st_size
    assert said["format"] == "safetensors"
