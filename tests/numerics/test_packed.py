"""Packing changes nothing that is learned: a folder and its packed originals give the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import Call
from paceline.reports.audit import audit_run
from PIL import Image

import paceline
from paceline.records.reader import read_plan
from paceline.records.run_directory import RunDirectory
from paceline_data.packing.pack import Request, pack

pytest.importorskip("pyarrow")

RECIPE = """
model: {name: small_resnet, channels_last: false, options: {width: 4, stages: 1, depth: 1, dropout: 0.2}}
batch: {global_size: 8}
optimizer: {lr: 0.05}
schedule: {name: constant}
train: {duration: 9 steps, precision: fp32}
evaluate: {every: 3 steps}
checkpoint: {every: 3 steps, keep: 5}
parallel: {device: cpu, threads: 1}
telemetry: {log_every: 1 steps, trackers: [], report: off}
"""
CROPS = {
    "data.image_size": 16,
    "data.backend": "pytorch",
    "data.augment.crop": "random_resized",
    "data.augment.flip": 0.5,
    "data.augment.policy": "trivialaugment",
}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    draws = np.random.default_rng(0)
    for split, count in (("train", 11), ("val", 6)):
        for value, label in enumerate(("cat", "dog")):
            folder = tmp_path / "photos" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                height, width = (int(side) for side in draws.integers(24, 48, 2))
                pixels = draws.integers(0, 120, (height, width, 3)) + 120 * value
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.jpg")
    return tmp_path / "photos"


def packed(source: Path, destination: Path, **options: Any) -> Path:
    request = Request(source=str(source), destination=destination, **options)
    pack(request, lambda done, total: None, lambda line: None)
    return destination


@pytest.fixture
def train(tmp_path: Path, runs: Path) -> Call:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)

    def run(name: str, dataset: str, path: Path, **overrides: Any) -> Any:
        given = {"data.dataset": dataset, "data.path": str(path), **overrides}
        return paceline.train(recipe, overrides=given, run_dir=runs / name)

    return run


@pytest.mark.parametrize("workers", [0, 2])
def test_a_folder_and_its_packed_originals_give_the_same_weights(
    photos: Path, tmp_path: Path, runs: Path, train: Call, workers: int
) -> None:
    root = packed(photos, tmp_path / "packed", shard_bytes=4000)
    folder = train("folder", "image_folder", photos, **CROPS, **{"data.workers": workers})
    ours = train("packed", "packed", root, **CROPS, **{"data.workers": workers})
    assert ours.summary.weights_sha256 == folder.summary.weights_sha256
    assert ours.summary.metrics == folder.summary.metrics


def test_a_packed_run_goes_on_with_the_same_bits(photos: Path, tmp_path: Path, runs: Path, train: Call) -> None:
    root = packed(photos, tmp_path / "packed", shard_bytes=4000)
    whole = train("whole", "packed", root, **CROPS, **{"data.workers": 0})
    # At an epoch's end, and in the midst of one.
    for step in (3, 4):
        name = f"parts-{step}"
        train(name, "packed", root, **CROPS, **{"data.workers": 0, "train.until": f"{step} steps"})
        ended = train(name, "packed", root, **CROPS, **{"data.workers": 0, "train.until": "off"})
        assert ended.summary.weights_sha256 == whole.summary.weights_sha256
        assert ended.summary.resumes == 1
    assert audit_run(runs / name).passed


def test_what_was_packed_otherwise_is_no_continuation(photos: Path, tmp_path: Path, runs: Path, train: Call) -> None:
    root = packed(photos, tmp_path / "packed", shard_bytes=4000)
    whole = train("whole", "packed", root, **CROPS)
    # Other shards hold the same images; other pixels are other data.
    train("moved", "packed", root, **CROPS, **{"train.until": "3 steps"})
    other = packed(photos, tmp_path / "other", mode="jpeg")
    with pytest.raises(paceline.PacelineError, match="data"):
        train("moved", "packed", other, **CROPS, **{"train.until": "off"})
    same = packed(photos, tmp_path / "same")
    ended = train("moved", "packed", same, **CROPS, **{"train.until": "off"})
    assert ended.summary.weights_sha256 == whole.summary.weights_sha256
    # Bits are no accident: another seed has others.
    assert train("seed", "packed", root, **CROPS, seed=1).summary.weights_sha256 != whole.summary.weights_sha256


def test_small_pixels_are_held_in_memory_and_learned_alike(
    photos: Path, tmp_path: Path, runs: Path, train: Call
) -> None:
    root = packed(photos, tmp_path / "packed", mode="raw", size=16)
    small = {"data.augment.crop": "pad", "data.augment.padding": 2, "data.augment.flip": 0.5}
    in_memory = train("memory", "packed", root, **small)
    by_workers = train("pytorch", "packed", root, **small, **{"data.backend": "pytorch", "data.workers": 1})
    assert read_plan(RunDirectory(runs / "memory"))["data"]["backend"] == "memory"
    assert in_memory.summary.weights_sha256 == by_workers.summary.weights_sha256


def test_shapes_come_from_the_index(photos: Path, tmp_path: Path, runs: Path, train: Call) -> None:
    root = packed(photos, tmp_path / "packed")
    shown = {**CROPS, "data.evaluation_shape": "rectangular", "data.evaluation_multiple": 4}
    folder = train("folder", "image_folder", photos, **shown)
    assert train("packed", "packed", root, **shown).summary.metrics == folder.summary.metrics
    plans = [read_plan(RunDirectory(runs / name))["data"]["evaluation_shapes"] for name in ("folder", "packed")]
    assert plans[0] == plans[1]
    assert len(plans[0]) > 1
