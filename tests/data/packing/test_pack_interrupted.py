"""Packing that is killed, stopped or refused by the disk loses nothing, and leaves nothing that is half a dataset."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fork_server
import numpy as np
import pytest
from golden_sentences import raises
from image_sets import files, packed

from paceline.data.image.sets.packed import MANIFEST, UNFINISHED, open_packed
from paceline.errors import DataError
from paceline_data.packing.shards import PackingError

pytest.importorskip("pyarrow")

SOURCES = Path(__file__).parents[4] / "src"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.slow
def test_killed_anywhere_it_goes_on_to_the_same_bytes(make_photos: Callable[..., Path], runs: Path) -> None:
    source, root = make_photos(runs / "photos", count=30), runs / "dest"
    options = {"mode": "jpeg", "max_side": 40, "shard_bytes": 20_000}
    packed(source, runs / "whole", **options)
    # Shards of that size cannot be asked for on the command line, whose unit is MiB.
    program = (
        "import time\nfrom pathlib import Path\nfrom paceline_data.packing import shards\n"
        "from paceline_data.packing.pack import Request, pack\nstored = shards.encode_sample\n"
        "shards.encode_sample = lambda *given: (time.sleep(0.03), stored(*given))[1]\n"  # else it ends before the kill
        f"pack(Request(source={str(source)!r}, destination=Path({str(root)!r}), workers=2, **{options!r}), "
        "lambda *_: None, lambda _: None)"
    )
    draws = np.random.default_rng(0)
    kills, total = 0, len(list((runs / "whole").glob("*-*.arrow")))
    assert total > 5
    while True:
        process = fork_server.Popen(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        target = made(root) + int(draws.integers(1, 3))
        while process.poll() is None and made(root) < target:
            time.sleep(0.001)
        time.sleep(float(draws.uniform(0, 0.01)))  # into the middle of the next
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        kills += 1
        if not (root / MANIFEST).exists():
            with pytest.raises(
                DataError, match="is an unfinished packed dataset: run the same `paceline pack` command again"
            ):
                open_packed(root)
    assert process.returncode == 0
    assert kills >= 2
    assert files(root) == files(runs / "whole")


def made(root: Path) -> int:
    return len(list(root.glob("*-*.arrow")))


def test_interrupted_at_every_file_operation_it_goes_on(
    make_photos: Callable[..., Path], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = make_photos(runs / "photos", count=2)
    packed(photos, runs / "whole")
    wanted = files(runs / "whole")

    class Death(BaseException):
        pass

    operations = ("replace", "fsync", "mkdir", "open")
    strikes = 0
    for strike in range(200):
        root = runs / f"dest-{strike}"
        count = 0

        def struck(name: str, strike: int = strike) -> Callable[..., object]:
            original = getattr(os, name)

            def operation(*args: object, **named: object) -> object:
                nonlocal count
                count += 1
                if count - 1 == strike:
                    raise Death
                return original(*args, **named)

            return operation

        with monkeypatch.context() as patched:
            for name in operations:
                patched.setattr(os, name, struck(name))
            try:
                packed(photos, root)
            except Death:
                strikes += 1
            else:
                break
        if (root / MANIFEST).exists():
            open_packed(root)
        packed(photos, root)
        assert files(root) == wanted, strike
    assert strikes > 20


def test_a_shard_that_was_damaged_in_between_is_made_again(
    photos: Path, tmp_path: Path, break_some: Callable[[], None]
) -> None:
    break_some()
    with pytest.raises(DataError, match="cannot be read"):
        packed(photos, tmp_path / "dest", shard_bytes=8000)
    shards = sorted((tmp_path / "dest").glob("train-*.arrow"))
    wanted = files(tmp_path / "dest")
    shards[0].write_bytes(shards[0].read_bytes()[:-9])
    shards[1].unlink()
    with pytest.raises(DataError, match="cannot be read"):
        packed(photos, tmp_path / "dest", shard_bytes=8000)
    assert files(tmp_path / "dest") == wanted


def test_a_full_disk_is_told_and_nothing_is_lost(
    photos: Path, tmp_path: Path, run_pack: Run, run_pack_here: Run
) -> None:
    limit = 8000

    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    # No bytecode: its files may not grow either, and pieces of it would be left to all others.
    environment = {"PYTHONDONTWRITEBYTECODE": "1"}
    done = run_pack(photos, tmp_path / "dest", environment=environment, preexec_fn=small_files)
    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot write" in done.stderr.splitlines()[-1]
    assert "EFBIG" in done.stderr
    assert "finished parts are kept" in done.stderr
    assert "Traceback" not in done.stderr
    assert run_pack_here(photos, tmp_path / "dest", "--verify").returncode == 0


def test_what_cannot_fit_is_not_begun(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with raises(DataError, path="dest"):
        packed(photos, tmp_path / "dest")
    assert not list((tmp_path / "dest").glob("*.arrow"))


def test_a_disk_that_fails_is_told(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(PackingError, match=r"No space left on device \(ENOSPC\); free some space"):
            packed(photos, tmp_path / "dest", workers=2, shard_bytes=5000)
    packed(photos, tmp_path / "dest", workers=2, shard_bytes=5000)


SLOW = """
import sys
import time
from paceline_data.packing import shards
shards.encode_sample = lambda *given, stored=shards.encode_sample: (time.sleep(2), stored(*given))[1]
from paceline.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


def test_asked_to_end_it_ends_in_the_middle_of_a_shard(photos: Path, tmp_path: Path) -> None:
    process = fork_server.Popen(
        [sys.executable, "-c", SLOW, "pack", photos, tmp_path / "dest", "--workers", "2"],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert "image_folder (found)" in process.stderr.readline()
        deadline = time.monotonic() + 20
        while not list((tmp_path / "dest").glob(".train-*.partial")) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=15)  # all of it would take 24 seconds
    finally:
        process.kill()
    assert (process.returncode, said.strip()) == (130, "")
    assert made(tmp_path / "dest") == 0


def test_two_commands_do_not_share_a_directory(photos: Path, tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "dest" / UNFINISHED).mkdir(parents=True)
    with open(tmp_path / "dest" / UNFINISHED / "lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with raises(DataError, path="dest"):
            packed(photos, tmp_path / "dest")
    packed(photos, tmp_path / "dest")
