"""The command line as a user calls it, small runs to call it on, and a folder of images."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from calls import LAUNCH_VARIABLES, SOURCES, Done, in_a_process
from PIL import Image

from paceline.cli.main import run as run_command_line

# Digits with a net so small that starting takes longer than training.
TINY = (
    "model.options={width: 4, stages: 1, dropout: 0.1}",
    "data.validation_fraction=0.2",
    "data.augment=null",
    "batch.global_size=128",
    "optimizer={name: sgd, lr: 0.1}",
    "schedule.warmup=0 steps",
    "train.duration=6 steps",
    "train.ema=0.9",
    "evaluate.every=3 steps",
    "checkpoint.every=2 steps",
    "telemetry.log_every=2 steps",
    "telemetry.trackers=[]",
    "parallel.device=cpu",
    "parallel.threads=1",
)


@pytest.fixture
def paceline(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Done]:
    """Run ``python -m paceline ARGUMENTS`` in a process of its own, by default in the test's directory.

    It is forked from a warm server, unless the test is marked ``real_processes``.
    """
    real = request.node.get_closest_marker("real_processes") is not None
    return lambda *arguments, cwd=tmp_path, **options: in_a_process(*arguments, cwd=cwd, real=real, **options)


@pytest.fixture
def paceline_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_commands: None, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Run the command line in this process: torch's import, paid once, is nearly all that a mistake costs."""
    monkeypatch.chdir(tmp_path)
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: object) -> Done:
        capfd.readouterr()
        return Done(run_command_line([str(each) for each in arguments]), *capfd.readouterr())

    return call


@pytest.fixture
def in_shell(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Exit code and standard error of a script of bash, whose ``"$@"`` is ``paceline ARGUMENTS`` in a new process."""

    def call(script: str, *arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-c", script, "bash", sys.executable, "-m", "paceline", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
            env={**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"},
        )
        return done.returncode, done.stderr

    return call


@pytest.fixture(scope="session")
def tiny() -> tuple[str, ...]:
    """Overrides that make any recipe a matter of milliseconds."""
    return TINY


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a completed run; to be read only."""
    root = tmp_path_factory.mktemp("finished")
    in_a_process("train", "digits", *TINY, "--run-dir", "run", cwd=root).ended(0)
    return root / "run"


def _write_images(folder: Path, count: int = 4, *, size: int = 12) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(len(folder.name))
    for number in range(count):
        Image.fromarray(generator.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return folder


@pytest.fixture
def write_images() -> Callable[..., Path]:
    """Fill a folder with small images."""
    return _write_images
