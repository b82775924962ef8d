"""Examples after MLPerf's benchmarks: each learns, resumes, and is scored alike by two processes."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("_threads")]


@pytest.fixture
def _threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# By name: the recipe it starts from, what is overridden to be shorter, a metric, and the range it must be in.
SMALL: dict[str, tuple[str, str, str, tuple[float, float]]] = {
    "unet3d": ("digits", 'task=unet3d:OrganAndTumour train.duration="40 steps"', "organ_dice", (50, 100)),
    "cosmoflow": ("digits", 'task=cosmoflow:Universes train.duration="40 steps"', "mae", (0, 0.45)),
    "deepcam": ("shapes-segmentation", 'train.duration="60 steps"', "miou", (45, 100)),
    "ssd": ("shapes-maskrcnn", 'train.duration="8 steps" data.detection.generated.samples=40', "loss", (0, 16)),
    "rnnt": ("digits", 'task=rnnt:Dictation train.duration="60 steps"', "loss", (0, 14)),
    "diffusion": ("digits", 'task=diffusion:Denoising train.duration="40 steps"', "loss", (0, 0.6)),
    "dimenet": ("digits", 'task=dimenet:Energies train.duration="120 steps"', "mae", (0, 0.5)),
    "minigo": ("digits", 'task=minigo:Go train.duration="60 steps"', "move_accuracy", (10, 100)),
}
# By the example that needs it: its import name, and its package.
LIBRARIES = {
    "unet3d": ("monai", "MONAI", "monai"),
    "rnnt": ("torchaudio", "torchaudio", "torchaudio"),
    "diffusion": ("diffusers", "diffusers", "diffusers"),
    "minigo": ("pyspiel", "OpenSpiel", "open_spiel"),
}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import an example, also for the processes that are started; skipped without the library that it needs."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(each for each in (str(EXAMPLES), *sys.path) if each))

    def imported(name: str) -> Any:
        if name in LIBRARIES:
            module, _, package = LIBRARIES[name]
            pytest.importorskip(module, reason=f"the example needs it: pip install {package}")
        return importlib.import_module(name)

    return imported


def evaluated(run_dir: Path, processes: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "paceline", "evaluate", str(run_dir), "--trust-code", "--json"]
    done = subprocess.run([*command, "--processes", str(processes)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return {name: value for name, value in answer.items() if name not in ("seconds", "path")}


class StopsAt:
    """A callback that stops the run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, step: int) -> bool:
        return step == self.step


@pytest.mark.parametrize("name", SMALL)
def test_it_learns_resumes_and_is_scored_alike_by_two_processes(
    name: str, example: Callable[[str], Any], runs: Path
) -> None:
    recipe, changes, metric, (lowest, highest) = SMALL[name]
    overrides = shlex.split(f"{example(name).OVERRIDES} {changes} telemetry.log_every='4 steps' telemetry.report=off")
    asked: dict[str, Any] = {"overrides": overrides, "quiet": True}
    whole = paceline.train(recipe, run_dir=runs / "whole", **asked)
    assert lowest < whole.metrics[metric] < highest
    losses = [each["loss"] for each in whole.history("step")]
    assert losses[-1] < 0.9 * losses[0]
    stopped = paceline.train(recipe, run_dir=runs / "resumed", callbacks=[StopsAt(3)], **asked)
    assert stopped.summary.step == 3
    resumed = paceline.train(recipe, run_dir=runs / "resumed", **asked)
    assert resumed.summary.weights_sha256 == whole.summary.weights_sha256
    assert evaluated(whole.run_dir, processes=2) == evaluated(whole.run_dir, processes=1)


@pytest.mark.parametrize("name", LIBRARIES)
def test_an_example_whose_library_is_missing_says_what_to_install(name: str) -> None:
    module, title, package = LIBRARIES[name]
    hidden = f"import sys, runpy; sys.modules[{module!r}] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    words = [sys.executable, "-c", hidden, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, f"This example needs {title}: pip install {package}")
