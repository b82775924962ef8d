"""`paceline export` as a user calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
from calls import Call


def test_what_is_written_is_said(paceline_here: Call, finished: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    done = paceline_here("export", finished, "--format", "onnx", "--output", "a.onnx").ended(0)
    lines = done.out.splitlines()
    assert lines[0].startswith("a.onnx: ")
    assert "of the ema weights" in lines[0]
    assert lines[1].startswith("  ONNX Runtime matches the network: largest difference ")
    paceline_here("export", finished, "--format", "onnx", "--output", "a.onnx").refused(
        "already exists and is not overwritten"
    )
    for words, said in {
        ("nowhere", "--output", "new/weights.onnx"): "there is no run directory 'nowhere'",
        (finished, "--format", "timm", "--output", "new/hub"): "use --format safetensors, onnx or torch-export",
    }.items():
        paceline_here("export", *words).refused(said)
    assert [each.name for each in tmp_path.iterdir()] == ["a.onnx"]
    said = paceline_here("export", finished, "--quantize", "bf16", "--output", "new/b.safetensors", "--json").document
    assert said["bytes"] == (tmp_path / "new" / "b.safetensors").stat().st_size
    assert said["format"] == "safetensors"
