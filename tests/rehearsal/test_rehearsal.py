"""Training as on a GPU, on a device made for it: no step waits for it, and batches arrive on the side stream."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import paceline

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
GPT = ("gpt-small-docs", "model.options.depth=1", "batch.global_size=4", "data.text.context=64")


def rehearse(run_dir: Path, recipe: str, *overrides: str, fault: str = "-") -> Any:
    command = [sys.executable, str(HERE / "rehearse.py"), recipe, str(run_dir), fault, *overrides]
    variables = {
        "PYTHONPATH": str(SOURCE),
        "OMP_NUM_THREADS": "1",
        "PATH": "/usr/bin:/bin",
        "HOME": str(run_dir.parent),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False, timeout=300)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


def losses(run_dir: Path) -> list[float]:
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [each["loss"] for each in events if each["event"] == "step"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(48):
        folder = tmp_path / "photos" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (48, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg")
    return tmp_path / "photos"


@pytest.mark.everyday
def test_no_step_waits_for_the_device(tmp_path: Path) -> None:
    found = rehearse(tmp_path / "run", "digits", "train.duration=30 steps")
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["device"] == "rehearsed"
    assert (found["step"], found["waits"]) == (30, [])


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_batches_are_copied_ahead_from_page_locked_memory(tmp_path: Path, photos: Path, precision: str) -> None:
    small = ("data.image_size=32", "model.name=small_resnet", "batch.global_size=8")
    images = ("image_folder", f"data.path={photos}", *small)
    recipes: dict[str, tuple[str, ...]] = {
        "read by loader processes": (*images, "data.workers=1"),
        "read in the main process": (*images, "data.workers=0"),
        "noise": ("synthetic", "data.samples=64", *small),
        "text": GPT,
    }
    for name, recipe in recipes.items():
        asked = ("train.duration=24 steps", f"train.precision={precision}", "evaluate.every=off")
        found = rehearse(tmp_path / name, *recipe, *asked)
        assert found["waits"] == [], name
        # Inputs and targets of each step.
        assert found["copies"].count(["side", True]) >= 2 * 24, name
        # Once, the two factors of the normalisation.
        assert found["copies"].count(["side", False]) <= 2, name


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", ["dlrm-synthetic", "shapes-segmentation", "figures"])
def test_other_tasks_do_not_wait_either(tmp_path: Path, recipe: str) -> None:
    found = rehearse(tmp_path / "run", recipe, "train.duration=22 steps", "evaluate.every=off")
    assert (found["step"], found["waits"]) == (22, [])


@pytest.mark.thorough
def test_loss_scaling_waits_once_a_step(tmp_path: Path) -> None:
    found = rehearse(tmp_path / "run", "digits", "train.duration=24 steps", "train.precision=fp16")
    # And once more for each step whose gradients overflowed, to see whether a scale is left to try.
    assert 24 <= len(found["waits"]) <= 24 + 24 - found["step"]
    assert {tuple(functions) for _, functions in found["waits"]} == {("train_step", "_update", "step")}


@pytest.mark.thorough
def test_it_trains_as_on_a_cpu_and_resumes_to_the_bit(tmp_path: Path) -> None:
    asked = ("train.duration=40 steps", "train.precision=fp32", "telemetry.log_every=1 steps")
    whole = rehearse(tmp_path / "whole", "digits", *asked)
    rehearse(tmp_path / "run", "digits", *asked, "train.until=17 steps")
    assert rehearse(tmp_path / "run", "digits", *asked)["weights_sha256"] == whole["weights_sha256"]
    paceline.train("digits", overrides=[*asked, "telemetry.trackers=[]"], run_dir=tmp_path / "cpu", quiet=True)
    # Fused optimizers round differently, and the difference grows.
    assert losses(tmp_path / "whole")[:10] == pytest.approx(losses(tmp_path / "cpu")[:10], rel=1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("wait_for_a_number", "_local_scalar_dense"),
        ("use_a_mask_of_the_host", "index"),
        ("wait_for_the_device", "synchronize"),
    ],
)
def test_a_planted_wait_is_found(tmp_path: Path, fault: str, what: str) -> None:
    found = rehearse(tmp_path / "run", "digits", "train.duration=22 steps", fault=fault)
    assert [each[0] for each in found["waits"]].count(what) == 22


@pytest.mark.thorough
def test_a_planted_copy_from_pageable_memory_is_found(tmp_path: Path) -> None:
    # More steps than the forecast reads batches ahead.
    asked = (*GPT, "train.duration=60 steps", "evaluate.every=off")
    found = rehearse(tmp_path / "run", *asked, fault="copy_from_pageable_memory")
    assert {what for what, _ in found["waits"]} == {"copy from pageable memory"}


@pytest.mark.thorough
def test_a_tensor_on_the_wrong_device_is_found(tmp_path: Path) -> None:
    found = rehearse(tmp_path / "run", "digits", "train.duration=22 steps", fault="use_a_tensor_of_the_host")
    assert "found at least two devices, rehearsed:0 and cpu" in found
