"""One file of weights, from whole checkpoints and from parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint.format import Part
from paceline.checkpoint.sharded import ShardedSave
from paceline.checkpoint.store import CheckpointStore
from paceline.checkpoint.weights import SavedWeights
from paceline.errors import CheckpointError
from paceline.inference.export import ExportRequest, export

WEIGHTS = {"weight": torch.arange(12.0).reshape(4, 3).t(), "steps": torch.tensor(3)}


def export_safetensors(target: Path, output: Path, weights: str = "auto") -> SavedWeights:
    return export(ExportRequest(target=target, output=output, weights=weights)).saved


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    store = CheckpointStore(root / "checkpoints")
    average = {key: each + 1 for key, each in WEIGHTS.items()}
    store.save(1, {"model": WEIGHTS, "ema": average}, {"precision": "fp32"}, file_metadata={"recipe": "{}"})
    return root


def test_the_average_and_the_weights(run: Path, tmp_path: Path) -> None:
    for asked, written, more in (("auto", "ema", 1), ("ema", "ema", 1), ("model", "model", 0)):
        output = tmp_path / f"{asked}.safetensors"
        assert export_safetensors(run, output, weights=asked).weights == written
        found = load_file(output)
        assert found.keys() == WEIGHTS.keys()
        assert all(torch.equal(found[key], each + more) for key, each in WEIGHTS.items())
        # What was exported can be exported: it says what it belongs to.
        assert export_safetensors(output, tmp_path / f"{asked}-again.safetensors").metadata["recipe"] == "{}"


def test_parts_are_put_together(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    staging_dir = store.make_staging_dir(1)
    whole = WEIGHTS["weight"]
    for rank in (1, 0):
        part = Part(whole[:2] if rank == 0 else whole[2:], tuple(whole.shape), (2 * rank, 0))
        components = {"model": {"weight": part, "steps": WEIGHTS["steps"]}}
        sharded = ShardedSave(staging_dir, rank, 2, patience_seconds=1)
        if rank == 0:
            store.save(1, components, {}, sharded=sharded)
        else:
            store.write_share(1, components, {}, file_metadata={}, sharded=sharded)
    export_safetensors(tmp_path, tmp_path / "whole.safetensors")
    found = load_file(tmp_path / "whole.safetensors")
    assert torch.equal(found["weight"], whole)
    assert found["steps"] == 3


def test_nothing_is_written_over(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "mine.safetensors"
    output.write_text("mine")
    with pytest.raises(CheckpointError, match="exists already and is not written over"):
        export_safetensors(run, output)
    assert output.read_text() == "mine"
    with pytest.raises(CheckpointError, match=r"must end in \.safetensors"):
        export_safetensors(run, tmp_path / "weights.bin")
    with pytest.raises(CheckpointError, match=r"mine.safetensors' is no directory"):
        export_safetensors(run, output / "weights.safetensors")


def test_folders_above_the_file_are_made(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "deep" / "weights.safetensors"
    with pytest.raises(CheckpointError, match="holds no 'other' weights"):
        export_safetensors(run, output, weights="other")
    assert not (tmp_path / "new").exists()
    export_safetensors(run, output)
    assert [each.name for each in (tmp_path / "new").rglob("*")] == ["deep", "weights.safetensors"]


def test_adapters_are_merged(tmp_path: Path) -> None:
    down, up, weight = torch.randn(2, 3), torch.randn(4, 2), torch.randn(4, 3)
    state = {
        "fc.base_layer.weight": weight,
        "fc.base_layer.bias": torch.ones(4),
        "fc.lora_A.default.weight": down,
        "fc.lora_B.default.weight": up,
    }
    metadata = {"recipe": json.dumps({"model": {"adapters": {"rank": 2, "alpha": 6.0}}})}
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(1, {"model": state}, {}, file_metadata=metadata)
    first, again = tmp_path / "plain.safetensors", tmp_path / "again.safetensors"
    export_safetensors(tmp_path, first)
    export_safetensors(first, again)
    for path in (first, again):
        found = load_file(path)
        assert found.keys() == {"fc.weight", "fc.bias"}
        assert torch.allclose(found["fc.weight"], weight + 3 * up @ down, atol=1e-5)
