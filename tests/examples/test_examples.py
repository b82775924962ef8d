"""Examples after MLPerf's benchmarks: each learns, survives SIGKILL, and is scored alike by one to three processes."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fork_server
import pytest
import torch
from calls import in_a_process

import paceline

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("_threads")]


@pytest.fixture
def _threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# By name: the recipe it starts from, what is overridden to be shorter, and a metric with the range it must be in; None
# where the loss says as much, which must fall by a tenth.
SMALL: dict[str, tuple[str, dict[str, Any], str, tuple[float, float] | None]] = {
    "unet3d": ("digits", {"task": "unet3d:OrganAndTumour", "train.duration": "40 steps"}, "organ_dice", (50, 100)),
    "cosmoflow": ("digits", {"task": "cosmoflow:Universes", "train.duration": "40 steps"}, "mae", (0, 0.45)),
    "deepcam": ("shapes-segmentation", {"train.duration": "60 steps"}, "miou", (45, 100)),
    "ssd": (
        "shapes-maskrcnn",
        {"train.duration": "8 steps", "data.detection.generated.samples": 40},
        "loss",
        None,
    ),
    "rnnt": ("digits", {"task": "rnnt:Transcription", "train.duration": "60 steps"}, "loss", None),
    "diffusion": ("digits", {"task": "diffusion:Denoising", "train.duration": "40 steps"}, "loss", (0, 0.6)),
    "dimenet": ("digits", {"task": "dimenet:Energies", "train.duration": "120 steps"}, "loss", (0, 0.5)),
    "minigo": ("digits", {"task": "minigo:Go", "train.duration": "60 steps"}, "move_accuracy", (10, 100)),
}
# By the example that needs it: its import name, and its package.
LIBRARIES = {
    "unet3d": ("monai", "MONAI", "monai"),
    "rnnt": ("torchaudio", "torchaudio", "torchaudio"),
    "diffusion": ("diffusers", "diffusers", "diffusers"),
    "minigo": ("pyspiel", "OpenSpiel", "open_spiel"),
}
# Trains until a checkpoint is in place, and then kills itself.
KILLED = """
import json, os, pathlib, signal, sys, paceline

recipe, overrides, run_dir = json.loads(sys.argv[1])

class Killed:
    def on_step_end(self, step):
        if list(pathlib.Path(run_dir).glob("checkpoints/step-*")):
            os.kill(os.getpid(), signal.SIGKILL)

paceline.train(recipe, overrides=overrides, run_dir=run_dir, callbacks=[Killed()], quiet=True)
"""


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import an example, also for the processes that are started; skipped without the library that it needs."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(each for each in (str(EXAMPLES), *sys.path) if each))

    def imported(name: str) -> Any:
        if name in LIBRARIES:
            module = LIBRARIES[name][0]
            pytest.importorskip(module, reason=f"needs {module}")
        return importlib.import_module(name)

    return imported


def evaluated(run_dir: Path, processes: int) -> dict[str, Any]:
    words = ("evaluate", run_dir, "--trust-code", "--json", "--processes", processes)
    answer: dict[str, Any] = in_a_process(*words, cwd=EXAMPLES, timeout=600).ended(0).document
    return {name: value for name, value in answer.items() if name not in ("seconds", "path")}


def check_estimate(name: str, recipe: str, overrides: dict[str, Any]) -> None:
    """The memory is estimated without running it; where that cannot be, one message says why."""
    words = (f"{key}={each if isinstance(each, str) else json.dumps(each)}" for key, each in overrides.items())
    done = in_a_process("estimate", recipe, *words, "--json", cwd=EXAMPLES, timeout=600)
    if name == "rnnt":  # its loss and its search depend on the lengths and letters of the batch
        words = ("task=rnnt:Transcription cannot be run without values", " at rnnt.py:", "find-batch")
        assert all(each in done.ended(2).err for each in words)
    else:
        assert done.ended(0).document["needed_bytes"] > 0


@pytest.mark.parametrize("name", SMALL)
def test_it_learns_survives_sigkill_and_is_scored_alike_by_one_to_three_processes(
    name: str, example: Callable[[str], Any], runs: Path
) -> None:
    recipe, changes, metric, allowed = SMALL[name]
    overrides = {**example(name).OVERRIDES, **changes, "telemetry.log_every": "4 steps"}
    check_estimate(name, recipe, overrides)
    overrides["checkpoint.every"] = "3 steps"
    whole = paceline.train(recipe, overrides=overrides, run_dir=runs / "whole", quiet=True)
    assert allowed is None or allowed[0] < whole.metrics[metric] < allowed[1]
    losses = [each["loss"] for each in whole.history("step")]
    assert losses[-1] < 0.9 * losses[0]

    asked = json.dumps([recipe, overrides, str(runs / "killed")])
    killed = fork_server.run([sys.executable, "-c", KILLED, asked], cwd=EXAMPLES, env=dict(os.environ), timeout=600)
    assert killed.returncode == -signal.SIGKILL
    resumed = paceline.train(recipe, overrides=overrides, run_dir=runs / "killed", quiet=True)
    assert [each["step"] > 0 for each in resumed.history("resume")] == [True]
    assert resumed.summary.weights_sha256 == whole.summary.weights_sha256

    alone = evaluated(whole.run_dir, processes=1)
    assert [evaluated(whole.run_dir, processes) for processes in (2, 3)] == [alone, alone]
    in_a_process("audit", resumed.run_dir, cwd=EXAMPLES, timeout=600).ended(0)
    in_a_process("report", resumed.run_dir, cwd=EXAMPLES, timeout=600).ended(0)
    page = (resumed.run_dir / "report.html").read_text(encoding="utf-8")
    assert "sample 24" in page or name != "diffusion"
    assert "loss" in page


@pytest.mark.parametrize("name", LIBRARIES)
def test_an_example_whose_library_is_missing_says_what_to_install(name: str) -> None:
    module, title, package = LIBRARIES[name]
    hidden = f"import sys, runpy; sys.modules[{module!r}] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    words = [sys.executable, "-c", hidden, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, f"This example needs {title}: pip install {package}")
