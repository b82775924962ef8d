"""Checkpoints of several processes, of whole weights or of parts, come out as the weights that the run ended with."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file

from paceline.checkpoint.weights import read_weights
from paceline.inference.export import ExportRequest, export
from paceline.models.digest import weights_sha256

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="processes meet through gloo")]

PROGRAM = """
import datetime, json, os
import torch
import paceline

torch.distributed.init_process_group(
    "gloo", os.environ["PACELINE_RENDEZVOUS"], datetime.timedelta(seconds=240), 2, int(os.environ["RANK"])
)
for strategy in ("fsdp", "ddp"):
    paceline.train("recipe.yaml", overrides={"parallel.strategy": strategy}, run_dir=strategy, quiet=True)
torch.distributed.destroy_process_group()
print(json.dumps("done"))
"""


@pytest.mark.thorough
def test_parts_and_copies_are_exported_as_the_run_ended(
    on_two_ranks: Callable[..., list[Any]], tiny_recipe: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe.read_text().replace(
        "model: {name: small_resnet, channels_last: false, options: {width: 4, stages: 1, depth: 1}}",
        "model: {name: test_vit, channels_last: false, options: {img_size: 8, patch_size: 4}}",
    )
    assert "test_vit" in recipe
    (tmp_path / "recipe.yaml").write_text(recipe.replace("train: {", "train: {ema: 0.9, "))
    on_two_ranks(["-c", PROGRAM], tmp_path, seconds=300)
    for strategy in ("fsdp", "ddp"):
        run = tmp_path / strategy
        assert bool(list(run.glob("checkpoints/*/model/part-00001.safetensors"))) == (strategy == "fsdp")
        summary = json.loads((run / "summary.json").read_text())
        for weights, digest in (("model", "weights_sha256"), ("ema", "ema_sha256")):
            output = tmp_path / f"{strategy}-{weights}.safetensors"
            export(ExportRequest(target=run, output=output, weights=weights))
            assert weights_sha256(load_file(output)) == summary[digest]
        hub = tmp_path / f"{strategy}-hub"
        export(ExportRequest(target=run, output=hub, form="timm"))
        network = timm.create_model(f"local-dir:{hub}", pretrained=True).eval()
        whole = timm.create_model("test_vit", img_size=8, patch_size=4, num_classes=10, in_chans=1).eval()
        whole.load_state_dict(read_weights(tmp_path / f"{strategy}-ema.safetensors").state)
        images = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            torch.testing.assert_close(network(images), whole(images), rtol=0, atol=1e-5)
