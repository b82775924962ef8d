"""A checkpoint in parts comes out as the weights that the run ended with, in one process and without its launcher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
from calls import Call
from safetensors.torch import load_file

from paceline.checkpoint.weights import read_weights, weights_sha256
from paceline.inference.export import ExportRequest, export

pytestmark = pytest.mark.slow

PROGRAM = """
import datetime, json, os
import torch
import paceline

torch.distributed.init_process_group(
    "gloo", os.environ["PACELINE_RENDEZVOUS"], datetime.timedelta(seconds=240), 2, int(os.environ["RANK"])
)
paceline.train("recipe.yaml", overrides={"parallel.strategy": "fsdp"}, run_dir="run", quiet=True)
torch.distributed.destroy_process_group()
print(json.dumps("done"))
"""


def test_parts_are_exported_as_the_run_ended(on_two_ranks: Call, tiny_recipe: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe.read_text().replace(
        "model: {name: small_resnet, channels_last: false, options: {width: 4, stages: 1, depth: 1}}",
        "model: {name: test_vit, channels_last: false, options: {img_size: 8, patch_size: 4}}",
    )
    assert "test_vit" in recipe
    (tmp_path / "recipe.yaml").write_text(recipe.replace("train: {", "train: {ema: 0.9, "))
    on_two_ranks(["-c", PROGRAM], tmp_path, seconds=300)
    run = tmp_path / "run"
    assert list(run.glob("checkpoints/*/model/part-00001.safetensors"))
    summary = json.loads((run / "summary.json").read_text())
    for weights, digest in (("model", "weights_sha256"), ("ema", "ema_sha256")):
        output = tmp_path / f"{weights}.safetensors"
        export(ExportRequest(target=run, output=output, weights=weights))
        assert weights_sha256(load_file(output)) == summary[digest]
    export(ExportRequest(target=run, output=tmp_path / "hub", form="timm"))
    network = timm.create_model(f"local-dir:{tmp_path / 'hub'}", pretrained=True).eval()
    whole = timm.create_model("test_vit", img_size=8, patch_size=4, num_classes=10, in_chans=1).eval()
    whole.load_state_dict(read_weights(tmp_path / "ema.safetensors").state)
    images = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(network(images), whole(images), rtol=0, atol=1e-5)
