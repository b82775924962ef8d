"""The thread that copies: behind, failing, back again; it is told, and nobody waits for it but the end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fork_server
import pytest
import torch
from calls import Call

from paceline.checkpoint.mirror import CommitListing, Mirror, list_commits
from paceline.checkpoint.publish import LocalCheckpoint
from paceline.checkpoint.store import CheckpointStore
from paceline.errors import StorageError
from paceline.parsing.units import TimeSpan
from paceline.recipe.running import Checkpoint
from paceline.storage.remote import Remote, Retries
from paceline.trainer import mirroring
from paceline.trainer.mirroring import Mirroring


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirroring, "REQUEST_PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(mirroring, "_PAUSE_SECONDS", 0.2)


@pytest.fixture
def copying(s3: Any, quick: None, tmp_path: Path) -> Iterator[Call]:
    started: list[Mirroring] = []

    def begin(address: str, **keys: Any) -> Mirroring:
        def open_mirror(retries: Retries) -> Mirror:
            remote = Remote(address, retries)
            return Mirror(remote, "a run", list_commits(remote))

        started.append(Mirroring(open_mirror, tmp_path, Checkpoint(mirror=address, **keys)))
        return started[-1]

    yield begin
    for each in started:
        each.close()


def saved(root: Path, step: int) -> LocalCheckpoint:
    (root / "recipe.yaml").write_text("seed: 1\n")
    store = CheckpointStore(root / "checkpoints")
    path = store.save(step, {"model": {"weight": torch.full((2, 2), float(step))}}, {"position": step})
    return LocalCheckpoint(step=step, path=path, growing={}, small=("recipe.yaml",))


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_address_that_fails_is_told_and_the_newest_is_copied_when_it_is_back(
    s3: Any, copying: Call, tmp_path: Path
) -> None:
    copy = copying("s3://bucket/away")
    s3.down()
    started = time.monotonic()
    copy.submit(saved(tmp_path, 1))
    copy.submit(saved(tmp_path, 2))
    assert time.monotonic() - started < 30  # nobody waits for the address
    wait_until(lambda: copy.is_failing)
    copy.submit(saved(tmp_path, 3))
    assert not copy.has_failed
    assert copy.problem
    s3.up()
    assert copy.is_over(within_seconds=60)
    assert [incident for incident, _ in copy.take_incidents() if incident != "mirror_retries"] == [
        "mirror",
        "mirror_back",
    ]
    assert copy.take_incidents() == []
    assert copy.problem == ""
    assert list_commits(Remote("s3://bucket/away")).commits[0].step == 3


def test_patience_comes_to_an_end_if_the_recipe_says_so(s3: Any, copying: Call, tmp_path: Path) -> None:
    copy = copying("s3://bucket/impatient", mirror_patience=TimeSpan(1, "seconds"))
    s3.share = 1.0
    copy.submit(saved(tmp_path, 1))
    wait_until(lambda: copy.has_failed)


def test_what_went_and_cannot_be_copied_has_not_failed(s3: Any, copying: Call, tmp_path: Path) -> None:
    """Between that and the next checkpoint nothing is tried: the address is given its patience anew."""
    copy = copying("s3://bucket/gone", mirror_patience=TimeSpan(2, "seconds"))
    s3.share = 1.0
    what = saved(tmp_path, 1)
    copy.submit(what)
    wait_until(lambda: copy.is_failing)
    shutil.rmtree(what.path)
    s3.share = 0.0
    assert copy.is_over(within_seconds=60)
    assert copy.is_failing
    assert "step-00000001" in copy.problem  # it is not there, and never will be
    time.sleep(2.5)
    assert not copy.has_failed
    s3.share = 1.0
    copy.submit(saved(tmp_path, 2))
    assert not copy.has_failed
    wait_until(lambda: copy.has_failed)


def test_what_is_still_to_be_copied_is_needed(s3: Any, copying: Call, tmp_path: Path) -> None:
    copy = copying("s3://bucket/needed")
    s3.down()
    copy.submit(saved(tmp_path, 1))
    wait_until(lambda: 1 in copy.needed())
    s3.up()
    assert copy.is_over(within_seconds=60)
    assert copy.needed() == []


def test_a_server_that_says_nothing_is_told_and_holds_up_nobody(
    s3: Any, copying: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.storage.remote._MIN_READ_TIMEOUT", 1.0)
    s3.share, s3.only, s3.fates = 1.0, "PUT .*/checkpoints/", ("silent",)
    copy = copying("s3://bucket/silent")
    copy.submit(saved(tmp_path, 1))
    wait_until(lambda: copy.is_failing, 30)
    # Two files, once each, perhaps begun again since: s3fs by itself would try each five times, and tell nobody.
    assert s3.failed <= 6
    copy.close()
    assert not any(thread.name == "mirror" and not thread.daemon for thread in threading.enumerate())


class Remembering(Remote):
    """Fails at first; then sends a little more of a file each time it is looked at, or always the same."""

    def __init__(self, address: str, *, gets_on: bool) -> None:
        super().__init__(address)
        self.gets_on, self.tries = gets_on, 0

    def upload(self, source: Path, name: str, progress: Callable[[int], None] | None = None) -> None:
        self.tries += 1
        assert progress is not None
        if self.tries == 1 or not self.gets_on:
            progress(1)
            raise StorageError("it broke off")
        for sent in range(2, 12):
            progress(sent)
            time.sleep(0.3)
        super().upload(source, name, progress)


@pytest.mark.parametrize("gets_on", [True, False])
def test_an_upload_that_gets_on_is_no_failure(quick: None, tmp_path: Path, *, gets_on: bool) -> None:
    remote = Remembering(f"file://{tmp_path}/copy", gets_on=gets_on)
    checkpoint = Checkpoint(mirror="file:///x", mirror_patience=TimeSpan(1.5, "seconds"))
    copy = Mirroring(lambda _: Mirror(remote, "a run", CommitListing()), tmp_path, checkpoint)
    copy.submit(saved(tmp_path, 1))
    failed = False
    deadline = time.monotonic() + 60
    while not copy.is_over(within_seconds=0.1) and not failed:
        failed = copy.has_failed
        assert time.monotonic() < deadline
    copy.close()
    assert failed is not gets_on


ARGUMENTS = (
    *("image_folder", "data.path=s3://bucket/shapes", "model.name=small_resnet", "model.pretrained=false"),
    *("model.options={width: 4, stages: 1}", "data.workers=0", "batch.global_size=8", "data.image_size=16"),
    *("evaluate.every=off", "telemetry.trackers=[]", "parallel.device=cpu", "parallel.threads=1"),
    *("checkpoint.mirror=s3://bucket/stopped", "train.duration=2000 steps"),
)


@pytest.mark.slow
def test_data_from_an_address_and_a_stop_that_waits_for_the_copy(
    s3: Any, put: Any, variables: dict[str, str], tmp_path: Path, secret: str
) -> None:
    import io

    import numpy as np
    from PIL import Image

    for number in range(24):
        content = io.BytesIO()
        Image.fromarray(np.full((20, 20, 3), number * 10, np.uint8)).save(content, "PNG")
        put(f"shapes/{('train', 'val')[number % 3 == 2]}/{'ab'[number % 2]}/{number}.png", content.getvalue())
    command = [sys.executable, "-m", "paceline", "train", *ARGUMENTS, "--run-dir", str(tmp_path / "run")]
    with fork_server.Popen(
        command, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        wait_until(lambda: '"event": "step"' in _text(tmp_path / "run/events.jsonl") or process.poll(), 120)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert "copied s3://bucket/shapes: 24 files" in output
    newest = list_commits(Remote("s3://bucket/stopped")).commits[0]
    assert newest.step == CheckpointStore(tmp_path / "run/checkpoints").steps()[-1]
    assert "data:\n" in _text(tmp_path / "run/recipe.yaml")
    assert "path: s3://bucket/shapes" in _text(tmp_path / "run/recipe.yaml")
    assert secret not in output
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
