"""Who lists, sizes or reads checkpoints while another process saves and prunes sees whole ones and never fails."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fork_server
import pytest

from paceline.checkpoint.durable import size_of
from paceline.checkpoint.store import CheckpointStore
from paceline.checkpoint.weights import read_weights

SOURCES = Path(__file__).parents[3] / "src"
# Renames a step for a new one, replaces one, and prunes: as fast as it can, without waiting for the disk.
WRITER = """
import os, sys, torch
from pathlib import Path
os.fsync = lambda descriptor: None
from paceline.checkpoint.store import Best, CheckpointStore
store, step = CheckpointStore(Path(sys.argv[1])), 0
while True:
    step += 1
    for replace in (False, True):
        store.save(step, {"model": {"w": torch.full((3,), float(step))}}, {}, replace=replace)
        store.write_best(Best(step, "loss", 1.0))
        store.prune(keep=1)
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run that saves and prunes all the time in a process of its own."""
    directory = tmp_path / "run" / "checkpoints"
    variables = {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    writer = fork_server.Popen([sys.executable, "-c", WRITER, str(directory)], env={**os.environ, **variables})
    try:
        while not (directory / "best.json").exists():
            assert writer.poll() is None
            time.sleep(0.01)
        yield tmp_path / "run"
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()


def size(run: Path) -> None:
    assert size_of(run / "checkpoints") >= 0


def newest(run: Path) -> None:
    path, damaged = CheckpointStore(run / "checkpoints").newest_complete()
    assert path is not None
    assert damaged == []


def steps(run: Path) -> None:
    assert CheckpointStore(run / "checkpoints").steps()


def weights(run: Path) -> None:
    read_weights(run)


def best_weights(run: Path) -> None:
    read_weights(run, best=True)


@pytest.mark.parametrize("read", [size, steps, newest, weights, best_weights])
def test_a_reader_beside_a_save_never_fails(run: Path, read: Callable[[Path], Any]) -> None:
    store = CheckpointStore(run / "checkpoints")
    first, reads = store.steps()[-1], 0
    while reads < 50 or store.steps()[-1] <= first + 10:
        read(run)
        reads += 1
