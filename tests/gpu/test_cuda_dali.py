"""DALI on a GPU: it shows what the CPU shows, on the device, and a resumed run ends with the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import paceline
from paceline.data.batch import Batch
from paceline.data.image.datasets import open_dataset
from paceline.data.image.pipeline import open_backend
from paceline.data.order import StepGeometry
from paceline.data.pipeline import Placement
from paceline.host.world import World
from paceline.recipe.data import Augment, Data
from paceline_ops.dali.choice import import_problem

pytestmark = pytest.mark.skipif(bool(import_problem()), reason=f"needs DALI: {import_problem()}")
# nvJPEG's inverse cosine transform rounds otherwise than libjpeg's.
LARGEST_MEAN = 2.0


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of smooth pictures, one bright at the left, one at the right."""
    generator = np.random.default_rng(0)
    across, down = np.meshgrid(np.linspace(0, 1, 160), np.linspace(0, 1, 120))
    for name, slope in (("left", 1 - across), ("right", across)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(24):
            pixels = 255 * generator.uniform(0.3, 1, 3) * (0.8 * slope + 0.2 * down)[:, :, None]
            path = tmp_path / "photos" / name / f"{number:02d}.jpg"
            Image.fromarray(pixels.astype(np.uint8)).save(path, quality=92)
    return tmp_path / "photos"


def batches(name: str, data: Data, device: str) -> list[Batch]:
    dataset = open_dataset(data)
    geometry = StepGeometry(seed=0, samples=len(dataset.train), global_batch_size=16, logical_ranks=1)
    placement = Placement(device=torch.device(device))
    backend = open_backend(name, data, dataset, "train", seed=0, workers=2, placement=placement)
    made = list(backend.batches(geometry.stream(0, 6, World())))
    backend.close()
    return made


@pytest.mark.parametrize("decode_on", ["gpu", "cpu"])
def test_boxes_and_flips_are_those_of_the_cpu(photos: Path, decode_on: Any) -> None:
    augment = Augment(crop="random_resized", flip=0.5)
    data = Data(backend="dali", path=str(photos), image_size=64, augment=augment, decode_on=decode_on)
    reference = Data(backend="pytorch", path=str(photos), image_size=64, augment=augment)
    for ours, theirs in zip(batches("dali", data, "cuda:0"), batches("pytorch", reference, "cpu"), strict=True):
        assert ours.inputs.device.type == ("cuda" if decode_on == "gpu" else "cpu")
        assert ours.inputs.device.type == "cuda" or ours.inputs.is_pinned()
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert (ours.inputs.cpu().float() - theirs.inputs.float()).abs().mean() < LARGEST_MEAN


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, photos: Path) -> None:
    exact: Mapping[str, Any] = {
        "data.path": str(photos),
        "data.backend": "dali",
        "data.image_size": 64,
        "model.name": "small_resnet",
        "model.options": {"width": 8, "stages": 1, "depth": 1},
        "batch.global_size": 8,
        "train.duration": "12 steps",
        "train.deterministic": True,
        "schedule.warmup": "2 steps",
        "checkpoint.every": "5 steps",
        "checkpoint.keep": 5,
        "parallel.device": "cuda",
    }
    whole = paceline.train("image_folder", overrides=exact, run_dir=tmp_path / "whole", quiet=True)
    paceline.train("image_folder", overrides=exact, run_dir=tmp_path / "again", quiet=True)
    again = paceline.train(
        "image_folder",
        overrides=exact,
        run_dir=tmp_path / "again",
        resume=str(tmp_path / "again" / "checkpoints" / "step-00000005"),
        quiet=True,
    )
    assert again.summary.resumes == 1
    assert again.summary.weights_sha256 == whole.summary.weights_sha256
