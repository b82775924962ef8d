"""Runs that read with DALI: killed, resumed, spread over processes, and scored by another back-end."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import numpy as np
import pytest
from calls import Call
from own_networks import DIES, network_that
from PIL import Image

from paceline_ops.dali.choice import import_problem

pytestmark = pytest.mark.skipif(bool(import_problem()), reason=f"needs DALI: {import_problem()}")
TRAIN_SAMPLES, VALIDATION_SAMPLES = 300, 300
SETTINGS = (
    "data.path=jpegs",
    "data.backend=dali",
    "data.image_size=24",
    "data.augment=null",
    "data.augment.crop=random_resized",
    "data.augment.scale=[0.4, 1.0]",
    "data.augment.flip=0.5",
)


@pytest.fixture(scope="session")
def jpegs(studio: Path) -> Path:
    """JPEG files of several sizes in two classes: stripes that rise or fall, under noise."""
    generator = np.random.default_rng(0)
    for split, count in (("train", TRAIN_SAMPLES), ("val", VALIDATION_SAMPLES)):
        for name in ("across", "down"):
            (studio / "jpegs" / split / name).mkdir(parents=True)
        for number in range(count):
            height, width = generator.integers(30, 60, 2)
            rows, columns = np.mgrid[:height, :width]
            across = number % 2 == 0
            wave = np.sin((rows if across else columns) * generator.uniform(0.4, 0.8) + generator.uniform(0, 6))
            pixels = 128 + 12 * wave[:, :, None] + generator.normal(0, 40, (height, width, 3))
            path = studio / "jpegs" / split / ("across" if across else "down") / f"{number:03d}.jpg"
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)
    return studio


@pytest.mark.slow
@pytest.mark.world_size(1)
def test_killed_and_resumed_to_the_bit_with_nothing_left(
    jpegs: Path, run: Call, run_here: Call, same_end: Call
) -> None:
    """Nineteen steps an epoch of four micro-batches each: the kill falls in step 23, in the second epoch."""
    (jpegs / "fatal.py").write_text(network_that(DIES, pixels=576))
    model = ("model.name=fatal:Net", "model.options=null", "train.duration=30 steps", "checkpoint.every=5 steps")
    command = ("train", "recipe.yaml", *SETTINGS, *model, "--run-dir")
    whole, run_dir = jpegs / "dali-whole", jpegs / "dali-killed"
    assert run_here(*command, whole).code == 0
    assert run(*command, run_dir, where=jpegs, variables={"DIE_AT": "90"}).code == -signal.SIGKILL
    # Other threads and another depth of prefetching, too.
    done = run_here(*command[:-1], "data.workers=1", "data.prefetch=3", "--run-dir", run_dir)
    assert (done.code, "resumed from step" in done.out) == (0, True), done.err
    same_end(run_dir, whole)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_an_exact_run_is_the_same_on_two_processes(jpegs: Path, run: Call, run_here: Call, summary: Call) -> None:
    exact = ("parallel.exact=true", "parallel.logical_ranks=4", "batch.micro_size=auto", "train.duration=25 steps")
    command = ("train", "recipe.yaml", *SETTINGS, *exact, "--run-dir")
    assert run_here(*command, jpegs / "dali-alone").code == 0
    run(*command, jpegs / "dali-together", "--processes", "2", where=jpegs).ended(0)
    alone, together = summary(jpegs / "dali-alone"), summary(jpegs / "dali-together")
    assert together["weights_sha256"] == alone["weights_sha256"]
    assert together["metrics"] == alone["metrics"]


@pytest.mark.slow
@pytest.mark.world_size(1)
def test_a_model_scores_alike_whoever_reads(jpegs: Path, run_here: Call) -> None:
    """Trained on each back-end, scored on both: within 0.1 points and what chance allows of so many images."""
    learns = ("train.duration=6 epochs", "train.ema=off", "train.precision=fp32", "evaluate.every=6 epochs")
    accuracy = {}
    for trained in ("dali", "pytorch"):
        run_dir = jpegs / f"scored-{trained}"
        command = ("train", "recipe.yaml", *SETTINGS, *learns, f"data.backend={trained}", "data.workers=1")
        assert run_here(*command, "--run-dir", run_dir).code == 0
        for scored in ("dali", "pytorch"):
            done = run_here("evaluate", run_dir, f"data.backend={scored}", "--json").ended(0)
            accuracy[trained, scored] = done.document["top1_accuracy"]
    print(accuracy)
    for trained in ("dali", "pytorch"):  # the same weights: what differs are single grey levels
        assert abs(accuracy[trained, "dali"] - accuracy[trained, "pytorch"]) <= 100 / VALIDATION_SAMPLES + 0.1
    share = accuracy["pytorch", "pytorch"] / 100
    assert share > 0.75  # of two classes: it has learned something
    noise = 100 * math.sqrt(2 * share * (1 - share) / VALIDATION_SAMPLES)
    assert abs(accuracy["dali", "dali"] - accuracy["pytorch", "pytorch"]) <= 0.1 + 2 * noise
