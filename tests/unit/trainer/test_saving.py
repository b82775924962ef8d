"""Checkpoints are written while training goes on; a disk that refuses ends the run soon, and on purpose."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_directories import saved_steps
from safetensors.torch import load_file

from paceline.data.batch import Batch
from paceline.errors import TrainingError, UnreadableError

Make = Callable[..., Any]

EVERY_THIRD = {"checkpoint.every": "3 steps", "evaluate.every": "off", "checkpoint.keep": 9}


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """``disk(act)``: from now on ``act()`` is called before each fsync of the thread that writes checkpoints."""
    real = os.fsync

    def watch(act: Callable[[], None]) -> None:
        def fsync(descriptor: int) -> None:
            if threading.current_thread().name.startswith("checkpoint"):
                act()
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)

    return watch


def test_training_goes_on_while_a_checkpoint_is_written(train_tiny: Make, disk: Any, runs: Path) -> None:
    """The first save is held back until two further steps are under way; it is whole, and of its own step."""
    held = threading.Event()
    seen: list[tuple[int, list[int]]] = []

    def on_loss(batch: Batch, _: torch.Tensor) -> None:
        seen.append((batch.slice.step + 1, saved_steps(runs / "run")))
        if batch.slice.step + 1 == 5:
            held.set()

    disk(lambda: held.wait(60))
    result = train_tiny("run", EVERY_THIRD, on_loss=on_loss)
    assert dict(seen)[5] == []
    assert saved_steps(result.run_dir) == [3, 6, 8]
    plain = train_tiny("plain", {**EVERY_THIRD, "train.duration": "3 steps"})
    held_back, undisturbed = (
        load_file(each.run_dir / "checkpoints" / "step-00000003" / "model.safetensors") for each in (result, plain)
    )
    assert held_back.keys() == undisturbed.keys()
    assert all(torch.equal(held_back[name], undisturbed[name]) for name in held_back)
    assert plain.summary.weights_sha256 != result.summary.weights_sha256


def test_two_saves_never_overlap(train_tiny: Make, disk: Any) -> None:
    writing: set[int] = set()
    most = []

    def act() -> None:
        writing.add(threading.get_ident())
        most.append(len(writing))
        threading.Event().wait(0.005)
        writing.discard(threading.get_ident())

    disk(act)
    result = train_tiny("run", {**EVERY_THIRD, "checkpoint.every": "1 steps"})
    assert max(most) == 1
    assert saved_steps(result.run_dir) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_save_that_fails_ends_the_run_after_the_next_step(train_tiny: Make, disk: Any, runs: Path) -> None:
    steps: list[int] = []

    def refuse() -> None:
        if any((runs / "run" / "checkpoints").glob(".saving-step-00000006-*")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def on_loss(batch: Batch, _: torch.Tensor) -> None:
        steps.append(batch.slice.step + 1)
        threading.Event().wait(0.05)  # time to fail

    disk(refuse)
    overrides = {**EVERY_THIRD, "train.duration": "30 steps"}
    with pytest.raises(TrainingError, match=r"No space left.*Free some space"):
        train_tiny("run", overrides, on_loss=on_loss)
    assert steps[-1] in (7, 8)  # the save after step 6 failed while step 7 was under way
    assert saved_steps(runs / "run") == [3]
    assert json.loads((runs / "run" / "summary.json").read_text())["status"] == "failed"


def test_a_save_that_fails_is_told_beside_another_error(train_tiny: Make, disk: Any, runs: Path) -> None:
    refused = threading.Event()

    def refuse() -> None:
        refused.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def on_loss(batch: Batch, _: torch.Tensor) -> None:
        if batch.slice.step == 3:  # the step after the save
            assert refused.wait(20)
            raise ValueError("of one's own")

    disk(refuse)
    with pytest.raises(ValueError, match="of one's own") as caught:
        train_tiny("run", EVERY_THIRD, on_loss=on_loss)
    assert "(the checkpoint under way was not written either: " in caught.value.__notes__[-1]
    assert "No space left" in caught.value.__notes__[-1]


def test_a_save_that_fails_at_the_end_is_no_success(train_tiny: Make, disk: Any, runs: Path) -> None:
    def refuse() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk(refuse)
    with pytest.raises(TrainingError, match="EIO"):
        train_tiny("run", {"checkpoint.every": "off", "evaluate.every": "off"})
    assert saved_steps(runs / "run") == []


def test_after_a_full_disk_the_run_goes_on_to_the_same_end(
    train_tiny: Make, disk: Any, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_tiny("whole", EVERY_THIRD)

    def refuse() -> None:
        if any((runs / "run" / "checkpoints").glob(".saving-step-00000006-*")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk(refuse)
    with pytest.raises(TrainingError):
        train_tiny("run", EVERY_THIRD)
    monkeypatch.undo()
    again = train_tiny("run", EVERY_THIRD)
    assert again.summary.resumes == 1
    assert again.summary.weights_sha256 == whole.summary.weights_sha256


def test_checkpoints_that_were_moved_to_another_disk_are_resumed_from_and_pruned(
    train_tiny: Make, tmp_path: Path
) -> None:
    plain = train_tiny("plain", EVERY_THIRD)
    result = train_tiny("run", {**EVERY_THIRD, "train.until": "6 steps"})
    for step in saved_steps(result.run_dir):
        path = result.run_dir / "checkpoints" / f"step-{step:08d}"
        path.symlink_to(shutil.move(path, tmp_path))
    resumed = train_tiny("run", EVERY_THIRD, resume=str(result.run_dir / "checkpoints" / "step-00000003"))
    assert resumed.summary.weights_sha256 == plain.summary.weights_sha256
    assert saved_steps(result.run_dir) == [3, 6, 8]
    assert (result.run_dir / "checkpoints" / "step-00000003").is_symlink()
    train_tiny("run", {**EVERY_THIRD, "checkpoint.keep": 1, "train.duration": "9 steps"})
    assert saved_steps(result.run_dir) == [9]
    assert (tmp_path / "step-00000003" / "manifest.json").is_file()


def test_a_checkpoint_that_cannot_be_read_stops_the_next_start_and_changes_nothing(
    train_tiny: Make, tmp_path: Path
) -> None:
    run_dir = train_tiny("run", {**EVERY_THIRD, "train.until": "6 steps"}).run_dir
    newest = run_dir / "checkpoints" / "step-00000006"
    newest.symlink_to(shutil.move(newest, tmp_path))
    unmounted = (tmp_path / newest.name).rename(tmp_path / "unmounted")
    before = (run_dir / "events.jsonl").read_bytes()
    with pytest.raises(UnreadableError, match="step-00000006 is a link to"):
        train_tiny("run", EVERY_THIRD)
    assert (run_dir / "events.jsonl").read_bytes() == before
    assert saved_steps(run_dir) == [3, 6]
    unmounted.rename(tmp_path / newest.name)
    assert train_tiny("run", EVERY_THIRD).summary.status == "completed"
