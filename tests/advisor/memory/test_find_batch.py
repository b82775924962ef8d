"""Batches found by trying: real runs in processes of their own, with a real limit on their memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from paceline.errors import TrainingError
from paceline.recipe.load import load_recipe
from paceline.telemetry.clock import peak_private_of, peak_resident_of, private_bytes
from paceline_advisor.commands import FindBatch
from paceline_advisor.memory.estimate import estimate_memory
from paceline_advisor.memory.find_batch import SizeTrial, TrialRunner, find_batch, shortened
from paceline_advisor.memory.variants import outside

MIB = 2**20
# Images of 8 pixels through 64 channels: about a MiB of activations for each.
RECIPE = load_recipe(
    "digits",
    {"model.options": {"width": 64, "stages": 1, "depth": 3}, "batch.global_size": 1024, "parallel.device": "cpu"},
)


def trial_runner(memory: int | None, processes: int = 1) -> TrialRunner:
    return TrialRunner(
        recipe=RECIPE.recipe,
        processes=processes,
        share=1024 // processes,
        memory=memory,
        device_type="cpu",
        log=lambda _: None,
    )


@pytest.mark.slow
def test_a_trial_fits_with_enough_memory_and_not_with_little(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(runs))
    free = trial_runner(None)
    assert free.fits(1024)
    large = free.trials[0].peak
    assert large
    little = trial_runner(large - 100 * MIB)
    assert little.fits(2)
    assert not little.fits(1024)
    assert "of its" in little.trials[1].why
    small = little.trials[0].peak
    assert small
    assert small < large - 100 * MIB
    assert list(runs.iterdir()) == []


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.world_size(2)
def test_all_ranks_of_a_trial_are_held_to_their_limit() -> None:
    several = trial_runner(400 * 2**10, processes=2)  # less than Python takes
    assert not several.fits(4)
    assert several.trials[0].peak is not None


@pytest.mark.slow
def test_what_fails_for_another_reason_is_no_answer() -> None:
    requested = trial_runner(None)
    requested.recipe = replace(
        requested.recipe, model=replace(requested.recipe.model, name="no_such_network", options={})
    )
    with pytest.raises(TrainingError, match="a trial of 4 samples failed, but not for lack of memory: unknown model"):
        requested.fits(4)


def test_a_trial_is_the_recipe_s_step_and_learns_nothing() -> None:
    trial = shortened(RECIPE.recipe, 8, 16)
    requested = RECIPE.recipe
    assert (trial.batch.micro_size, trial.batch.global_size) == (8, 16)
    assert trial.model.options == requested.model.options
    assert trial.train.ema == requested.train.ema
    assert trial.optimizer.momentum == requested.optimizer.momentum
    assert trial.optimizer.lr < 1e-6
    assert str(trial.evaluate.every) == "2 steps"


@pytest.mark.slow
def test_the_global_batch_and_the_rate_stay() -> None:
    requested = ("model.options={width: 8, stages: 1}", "parallel.device=cpu", "evaluate.keep_examples=8")
    small = load_recipe("digits", requested)
    found = find_batch(FindBatch(recipe="digits", overrides=requested, processes=1), lambda _: None)
    assert (found.largest, found.refused) == (64, None)
    assert found.micro_size * found.accumulation_steps == 64
    assert found.recipe.optimizer == small.recipe.optimizer
    assert found.recipe.batch.global_size == 64
    # What is resident in this process, many tests old, is in the estimate, and not in what a trial took.
    assert found.estimated is not None
    assert found.measured is not None
    of_tensors = found.estimated - outside("cpu", 1)
    assert 0 < of_tensors < found.measured < 1.5e9


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    words = ["find-batch", "digits", "parallel.device=cpu", "batch.global_size=1024", "--processes", "1"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "paceline", *words]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("paceline-*/run")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode != 0
    assert list(tmp_path.glob("paceline-*")) == []  # torch leaves an empty folder for compiled kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "digits",
        pytest.param("shapes-segmentation", marks=pytest.mark.thorough),
        pytest.param("gpt-small-docs", marks=pytest.mark.thorough),
    ],
)
def test_the_search_starts_from_the_estimate_and_says_why_it_found_less(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ("model.options={width: 8, stages: 1, depth: 1}",) if name == "digits" else ()
    monkeypatch.setattr(
        "paceline_advisor.memory.estimate.forecast_apart",
        lambda *_: {"expected_memory_bytes": 700 * MIB, "expected_total_memory_bytes": 700 * MIB},
    )
    trials = partial(SizeTrial, fits=True, peak=300 * MIB, why="", seconds=0.0)
    monkeypatch.setattr(TrialRunner, "_tried", lambda _, size, *__: trials(micro_batch=size))
    told = estimate_memory(load_recipe(name, small), "cpu", measures=True)
    found = find_batch(FindBatch(recipe=name, overrides=small, processes=1, memory=told.memory), lambda _: None)
    assert found.expected == told.largest
    assert [each.micro_batch for each in found.trials] == [found.share]
    lines = found.__paceline__().blocks[0]
    assert lines["by estimate"] == (
        f"{told.largest:,} samples fit; a process has {found.share} samples of a step, and no more were tried"
    )


def test_the_peak_of_a_process_is_read() -> None:
    assert peak_resident_of(os.getpid()) > peak_private_of(os.getpid()) > 10 * MIB
    assert private_bytes() > 10 * MIB
    assert peak_private_of(2**22 + 1) == peak_resident_of(2**22 + 1) == 0


def test_a_size_is_tried_once() -> None:
    requested = trial_runner(None)
    requested.trials.append(SizeTrial(micro_batch=7, fits=True, peak=1, why="", seconds=0.0))
    assert requested.fits(7)
    assert len(requested.trials) == 1
