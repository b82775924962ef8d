"""Is there always a whole checkpoint, whatever the disk or a kill does at whichever moment?"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fork_server
import pytest
import torch
from golden_sentences import raises

from paceline.checkpoint import durable
from paceline.checkpoint.manifest import read_components
from paceline.checkpoint.store import Best, CheckpointStore, choose_resume_point
from paceline.checkpoint.weights import read_weights
from paceline.errors import CheckpointError, UnreadableError

PROGRAM = Path(__file__).with_name("disk_trials.py")


def run(directory: Path, *modes: str) -> dict[str, Any]:
    command = [sys.executable, str(PROGRAM), str(directory), *modes]
    done = fork_server.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    trials: dict[str, Any] = json.loads(done.stdout)
    return trials


@pytest.fixture(scope="module")
def trials() -> dict[str, Any]:
    """All deterministic trials, in memory where that can be: hundreds of saves wait for no device."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="checkpoint-trials-", dir=base) as directory:
        return run(Path(directory), "faults", "deaths", "trace")


def check_outcome(trial: dict[str, Any]) -> None:
    """Old or new, whole, and nothing else; the next save cleans up."""
    old_and_new = {"save": [[1, 2], [1, 2, 3]], "replace": [[1, 2], [1, 22]], "prune": [[1, 2], [2]], "best": [[1, 2]]}
    assert trial["damaged"] == [], trial
    assert trial["values"] in old_and_new[trial["action"]], trial
    assert trial["newest"] == trial["values"][-1], trial
    assert trial["best"] in ([1, 2] if trial["action"] == "best" else [1]), trial
    assert not [name for name in trial["left"] if name.startswith(".")], trial


@pytest.mark.everyday
def test_a_fault_at_any_file_operation_raises_and_costs_nothing_older(trials: dict[str, Any]) -> None:
    faults = trials["faults"]
    assert {trial["operation"] for trial in faults} == {
        *("create", "write", "fsync", "mkdir", "rename", "open", "read", "unlink", "rmdir")
    }
    for trial in faults:
        check_outcome(trial)
        assert "step-00000002" in trial["names"], trial
        # Once the new files are being written, only the removal of what is superseded may fail in silence.
        changed = trial["values"] in ([1, 2, 3], [1, 22]) or trial["action"] == "prune"
        assert trial["error"] or changed, trial
        if trial["operation"] in ("create", "write", "fsync", "mkdir"):
            assert trial["error"]["cause"] == ("OSError" if trial["code"] == "ENOSPC" else "PermissionError")
            assert f"({trial['code']})" in trial["error"]["message"]
            assert "/faults" in trial["error"]["message"]
            assert not [name for name in trial["names"] if ".saving" in name and "0123abcd" not in name], trial
    assert len(faults) > 100


def test_a_kill_before_any_file_operation_leaves_the_old_or_the_new(trials: dict[str, Any]) -> None:
    for trial in trials["deaths"]:
        check_outcome(trial)
    assert len(trials["deaths"]) > 60
    assert {trial["values"][-1] for trial in trials["deaths"]} == {2, 3, 22}


@pytest.mark.everyday
def test_kills_at_random_moments_never_lose_a_finished_save(tmp_path: Path) -> None:
    trials = run(tmp_path, "kills")["kills"]
    for trial in trials:
        assert trial["damaged"] == []
        assert trial["acknowledged"] <= trial["newest"] <= trial["acknowledged"] + 1
        assert trial["best"] <= trial["newest"]
    assert trials[-1]["newest"] >= len(trials) == 18  # of three trials, one waits for a save and one for two
    assert trials[-1]["kept"] == [trials[-1]["newest"], 10_000_000]


def test_everything_is_flushed_before_it_is_relied_upon(trials: dict[str, Any]) -> None:
    operations = [(name, path) for name, path in trials["trace"]]
    hidden = next(path for name, path in operations if name == "mkdir")
    publish = operations.index(("rename", hidden))
    created = [path for name, path in operations if name == "create"]
    assert created[-1] == f"{hidden}/manifest.json"
    for path in created:
        flushed = operations.index(("fsync", path))
        assert all(at < flushed for at, each in enumerate(operations) if each == ("write", path))
        assert flushed < operations.index(("fsync", hidden)) < publish
    durable = operations.index(("fsync", "."), publish)
    unnamed = operations.index(("rename", "step-00000001"))
    assert publish < durable < unnamed
    first_deletion = next(at for at, (name, _) in enumerate(operations) if name == "unlink")
    assert unnamed < operations.index(("fsync", "."), unnamed) < first_deletion


STATE = {"model": {"w": torch.arange(50_000.0)}}


@pytest.mark.parametrize("limit", [0, 1, 1000, 100_000, 200_100, 200_300])
def test_a_file_that_may_not_grow_further_is_a_failed_save(tmp_path: Path, limit: int) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, STATE, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(CheckpointError, match=r"Cannot write the checkpoint of step 2 .*File too large \(EFBIG\)"):
            store.save(2, {**STATE, "other": {"text": "x" * 300_000}}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert store.newest_complete() == (store.path(1), [])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "small"
    disk.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=700k", "none", str(disk)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not mount a small disk to fill")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints")
    for step in (1, 2, 3):
        store.save(step, STATE, {})
    with raises(CheckpointError, path="small/checkpoints/step-00000004") as caught:
        store.save(4, STATE, {})
    assert isinstance(caught.value.__cause__, OSError)
    assert store.newest_complete() == (store.path(3), [])
    with raises(CheckpointError, path="small/checkpoints/step-00000003"):
        store.save(3, STATE, {}, replace=True)
    assert torch.equal(read_components(store.path(3), ("model",))["model"]["w"], STATE["model"]["w"])
    assert store.prune(keep=2) == [1]
    assert store.save(4, STATE, {}) == store.path(4)


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """A directory with one checkpoint that this process may read and not write, even if started by root."""
    directory = tmp_path / "locked"
    CheckpointStore(directory).save(1, STATE, {})
    if os.geteuid() == 0:
        moved = Path(tempfile.mkdtemp(prefix="checkpoint-locked-")) / "locked"
        shutil.copytree(directory, moved)
        moved.parent.chmod(0o755)
        os.seteuid(65534)
        try:
            yield moved
        finally:
            os.seteuid(0)
            shutil.rmtree(moved.parent)
    else:
        directory.chmod(0o555)
        try:
            yield directory
        finally:
            directory.chmod(0o755)


def test_a_directory_without_the_right_to_write(locked: Path) -> None:
    store = CheckpointStore(locked)
    advice = r"Permission denied \(EACCES\)\. Give this user permission for it, or choose another directory"
    with pytest.raises(CheckpointError, match=rf"Cannot write the checkpoint of step 2 .*{advice}"):
        store.save(2, STATE, {})
    with pytest.raises(CheckpointError, match=rf"Cannot write .*best\.json.*{advice}"):
        store.write_best(Best(1, "loss", 1.0))
    with pytest.raises(CheckpointError, match=rf"Cannot write the checkpoint of step 1 .*{advice}"):
        store.save(1, STATE, {}, replace=True)
    assert store.newest_complete() == (store.path(1), [])


def test_a_directory_that_cannot_be_entered_is_not_an_empty_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(1, STATE, {})
    store.directory.chmod(0)
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        for attempt in (store.newest_complete, store.read_best, lambda: store.save(2, STATE, {})):
            with pytest.raises(CheckpointError, match="Permission denied"):
                attempt()
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        store.directory.chmod(0o755)


@pytest.fixture
def as_user() -> Iterator[CheckpointStore]:
    """Two checkpoints, and this process without root's right to read everything."""
    is_root = os.geteuid() == 0
    with tempfile.TemporaryDirectory(prefix="checkpoint-unreadable-") as directory:
        store = CheckpointStore(Path(directory) / "checkpoints")
        for step in (1, 2):
            store.save(step, STATE, {})
        if is_root:
            for path in (Path(directory), *Path(directory).rglob("*")):
                os.chown(path, 65534, -1)
            os.seteuid(65534)
        try:
            yield store
        finally:
            if is_root:
                os.seteuid(0)


@pytest.mark.parametrize("name", ["model.safetensors", "model.json", "manifest.json", "."])
def test_a_read_error_is_not_damage(as_user: CheckpointStore, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_PAUSES_SECONDS", (0.01,))
    store, file = as_user, as_user.path(2) / name
    mode = file.stat().st_mode
    file.chmod(0)
    for attempt in (
        store.newest_complete,
        lambda: choose_resume_point(store),
        lambda: choose_resume_point(store, requested=store.path(2)),
    ):
        with pytest.raises(UnreadableError, match=r"step-00000002/.* cannot be read: Permission denied \(EACCES\)"):
            attempt()
    if name != "model.json":
        with pytest.raises(CheckpointError, match=r"Permission denied \(EACCES\)"):
            read_weights(store.directory)
        with pytest.raises(CheckpointError, match=r"Permission denied \(EACCES\)"):
            read_weights(store.path(2))
    if name in ("manifest.json", "."):
        assert store.prune(keep=1) == []
    file.chmod(mode)
    assert store.newest_complete() == (store.path(2), [])


def test_a_read_error_that_passes_goes_unnoticed(as_user: CheckpointStore) -> None:
    file = as_user.path(2) / "model.safetensors"
    file.chmod(0)
    mended = threading.Timer(0.3, file.chmod, (0o644,))
    mended.start()
    assert as_user.newest_complete() == (as_user.path(2), [])
    mended.join()


def test_without_free_file_descriptors_nothing_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_PAUSES_SECONDS", (0.01,))
    store = CheckpointStore(tmp_path)
    store.save(1, STATE, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(UnreadableError, match=r"manifest\.json cannot be read: Too many open files \(EMFILE\)"):
            choose_resume_point(store, requested=store.path(1))
        with pytest.raises(CheckpointError, match="Too many open files"):
            store.newest_complete()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
