"""Saving beside training: one at a time, and no failure is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.checkpoint.manifest import read_manifest
from paceline.checkpoint.publish import BackgroundWriter, Cadence, LocalCheckpoint, Publisher
from paceline.checkpoint.store import Best, CheckpointStore
from paceline.errors import CheckpointError
from paceline.recipe.load import load_recipe
from paceline.records.reader import read_identity
from paceline.records.run_directory import Identity, RunDirectory


def test_the_caller_goes_on_while_it_is_written() -> None:
    writer = BackgroundWriter()
    resume = threading.Event()
    writer.submit(lambda: "written" if resume.wait(10) else "never told")
    resume.set()
    assert writer.wait() == "written"
    assert writer.wait() is None
    writer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux only")
def test_the_thread_that_writes_gives_way_to_those_that_compute() -> None:
    writer = BackgroundWriter()
    mine = os.getpriority(os.PRIO_PROCESS, 0)

    def of_both() -> tuple[int, int]:
        with ThreadPoolExecutor(1) as another:
            return os.getpriority(os.PRIO_PROCESS, 0), another.submit(os.getpriority, os.PRIO_PROCESS, 0).result()

    writer.submit(of_both)
    # Of two threads that want the same core it gets a quarter; so does the one that it begins to hash beside it.
    expected = max(mine, 5)
    assert writer.wait() == (expected, expected)
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine
    writer.close()


def test_a_failure_is_seen_without_waiting_and_raised_once() -> None:
    writer = BackgroundWriter()

    def fail() -> None:
        raise CheckpointError("no space")

    assert not writer.has_failed
    writer.submit(fail)
    for _ in range(1000):
        if writer.has_failed:
            break
        threading.Event().wait(0.01)
    assert writer.has_failed
    with pytest.raises(CheckpointError, match="no space"):
        writer.wait()
    assert not writer.has_failed
    writer.close()


def test_waiting_can_be_given_up() -> None:
    writer = BackgroundWriter()
    resume = threading.Event()
    writer.submit(lambda: resume.wait(10) and None)
    assert not writer.is_over(within_seconds=0.01)
    resume.set()
    assert writer.is_over(within_seconds=10)
    writer.close()


def test_two_saves_never_overlap() -> None:
    writer = BackgroundWriter()
    writer.submit(lambda: None)
    with pytest.raises(RuntimeError, match="under way"):
        writer.submit(lambda: None)
    writer.close()


def test_a_failure_is_not_lost_at_the_end() -> None:
    writer = BackgroundWriter()
    writer.submit(lambda: (_ for _ in ()).throw(CheckpointError("no space")))
    with pytest.raises(CheckpointError, match="no space"):
        writer.close()


def test_a_save_under_way_is_finished_at_the_interpreters_end(tmp_path: Path) -> None:
    code = (
        "import time, pathlib, sys\n"
        "from paceline.checkpoint.publish import BackgroundWriter\n"
        "BackgroundWriter().submit(lambda: (time.sleep(0.5), pathlib.Path(sys.argv[1]).write_text('whole')))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "file")], check=True, timeout=60)
    assert (tmp_path / "file").read_text() == "whole"


class Subscribed:
    """Needs the checkpoint of the first step, and keeps what was there whenever it was notified."""

    def __init__(self, directory: RunDirectory) -> None:
        self.needed = [1]
        self.seen: list[tuple[int, int | None, list[str]]] = []
        self._directory = directory

    def submit(self, item: LocalCheckpoint) -> None:
        names = sorted(path.name for path in self._directory.checkpoints.iterdir())
        self.seen.append((item.step, None if item.best is None else item.best.step, names))


def test_a_subscriber_learns_of_a_checkpoint_once_older_ones_are_pruned(tmp_path: Path) -> None:
    directory, recipe = RunDirectory(tmp_path), load_recipe("digits", {"checkpoint.keep": 1}).recipe
    subscribed = Subscribed(directory)
    publisher = Publisher(
        store=(store := CheckpointStore(directory.checkpoints)),
        directory=directory,
        recipe=recipe,
        facts={"run": "a run"},
        file_metadata={},
        cadence=Cadence(recipe.checkpoint),
        patience_seconds=1,
        needed=lambda: subscribed.needed,
        subscribers=[subscribed.submit],
    )
    for step in (1, 2, 3):
        best = Best(2, "loss", 0.5) if step > 1 else None
        facts = {"position": step}
        publisher.publish(step, {"model": {"step": step}}, facts, best=best, records=({}, ()), sharded=None)
    first, second, third = (f"step-{step:08d}" for step in (1, 2, 3))
    assert subscribed.seen == [
        (1, None, [first]),
        (2, 2, ["best.json", first, second]),
        (3, 2, ["best.json", first, second, third]),
    ]
    subscribed.needed = []
    publisher.publish(4, {"model": {"step": 4}}, {"position": 4}, best=None, records=({}, ()), sharded=None)
    assert subscribed.seen[-1] == (4, None, ["step-00000004"])
    assert list(read_manifest(store.path(4)).facts) == ["run", "position"]
    assert read_identity(directory) == Identity("a run", has_checkpoint=True)
    assert directory.recipe.exists()
