"""SIGKILL at any moment, the same command again, and in the end nobody can tell: bit for bit, record for record.

Each chain is one run that is killed five times, whole family at once, and then let to its end.
"""

from __future__ import annotations

import json
import random
import signal
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
    pytest.mark.world_size(2),
]

TRAIN = ("train", "recipe.yaml", "--processes", "2")
KILLS = 5
HEADER = struct.Struct("<4sB3xIQII")


class Moments:
    """When to kill: after a step, or in a save, or whenever; drawn from a seed."""

    def __init__(self, seed: int, run_dir: Path, steps_recorded: Callable[[Path], int]) -> None:
        self._random = random.Random(seed)
        self._run_dir = run_dir
        self._steps_recorded = steps_recorded

    def wait(self, launched: Any, *, least: int) -> str:
        """Wait for the next moment, at a step of at least ``least``; returns what it was."""
        match self._random.choice(("step", "step", "step", "save", "launch")):
            case "step":
                step = least + self._random.randint(0, 10)
                launched.wait_for(lambda: self._steps_recorded(self._run_dir) >= step)
                delay = self._random.uniform(0, 0.15)
                time.sleep(delay)
                return f"{delay:.3f} s after the record of step {step}"
            case "save":
                launched.wait_for(lambda: self._steps_recorded(self._run_dir) >= least)
                launched.wait_for(lambda: any((self._run_dir / "checkpoints").glob(".saving-*")))
                return "in a save"
            case _:
                delay = self._random.uniform(0.5, 8)
                time.sleep(delay)
                return f"{delay:.3f} s after the launch"


def newest_checkpoint(run_dir: Path) -> int:
    found = [int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-????????")]
    return max(found, default=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_killed_five_times_and_resumed(
    studio: Path,
    start: Callable[..., Any],
    run: Callable[..., Any],
    steps_recorded: Callable[[Path], int],
    same_outcome: Callable[[Path], None],
    summary: Callable[[Path], dict[str, Any]],
    seed: int,
) -> None:
    run_dir = studio / f"chain-{seed}"
    command = (*TRAIN, "--run-dir", run_dir)
    moments = Moments(seed, run_dir, steps_recorded)
    resumed = 0
    for number in range(KILLS):
        launched = start(*command, where=studio)
        moment = moments.wait(launched, least=10 * number + 1)
        launched.kill()
        resumed += newest_checkpoint(run_dir) > 0
        print(f"killed {moment}; newest checkpoint: step {newest_checkpoint(run_dir)}")
        assert not launched.family()
    done = run(*command, where=studio)
    assert done.code == 0, done.err
    same_outcome(run_dir)
    assert summary(run_dir)["resumes"] >= 1
    audit = run("audit", run_dir, "--json", where=studio)
    assert (audit.code, json.loads(audit.out)["passed"]) == (0, True), audit.out
