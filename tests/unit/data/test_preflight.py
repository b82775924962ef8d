"""What the machine lacks for loader processes is found out before they start: with real limits of real systems."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.data.preflight import Loading, check_machine
from paceline.host.machine import available_cores

MIB = 2**20
SMALL = Loading(processes=1, workers=1, prefetch=2, train_batch_bytes=MIB, evaluation_batch_bytes=MIB)

LIMITED = """
import resource, sys

highest = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), highest))
from paceline.data.preflight import Loading, check_machine

found = check_machine(Loading(processes=1, workers=16, prefetch=8, train_batch_bytes=1))
print(found.refusal)
"""


@pytest.fixture
def sixteen_mib(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with room for 16 MiB."""
    path = tmp_path / "shm"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system of its own: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


def test_shared_memory_for_all_that_is_kept_ready(sixteen_mib: Path) -> None:
    fits = replace(SMALL, train_batch_bytes=4 * MIB - 2**15, evaluation_batch_bytes=4 * MIB - 2**15)
    assert 15.9 * MIB < fits.most_bytes <= 16 * MIB
    found = check_machine(fits, sixteen_mib)
    assert (found.refusal, found.warnings) == ("", ())
    (warning,) = check_machine(replace(fits, prefetch=3), sixteen_mib).warnings
    assert warning == (
        "the batches that 1 loader process (data.workers=1, data.prefetch=3) keep ready can take 23.9 MiB of shared "
        f"memory, and {sixteen_mib} has 16.0 MiB free; a run fails when it is full: give it "
        f"more (docker run --shm-size=1g; in Kubernetes an emptyDir of medium Memory at {sixteen_mib}), or lower "
        "data.workers, data.prefetch or batch.micro_size."
    )
    (sixteen_mib / "others").write_bytes(bytes(MIB))
    assert "has 15.0 MiB free" in check_machine(fits, sixteen_mib).warnings[0]


def test_shared_memory_for_one_batch_each(sixteen_mib: Path) -> None:
    # For each process 12 semaphores and places, and the labels, take a page; images take whole pages.
    pages = 13 * mmap.PAGESIZE
    loading = Loading(processes=2, workers=1, prefetch=1, train_batch_bytes=8 * MIB - pages)
    assert (loading.least_bytes, check_machine(loading, sixteen_mib).refusal) == (16 * MIB, "")
    refusal = check_machine(replace(loading, train_batch_bytes=8 * MIB - pages + 1), sixteen_mib).refusal
    assert refusal.startswith(
        "a batch from each of 2 loader processes (data.workers=1, data.prefetch=1) takes 16.0 MiB of shared memory"
    )
    assert "or lower data.workers, data.prefetch or batch.micro_size." in refusal


def test_batches_that_are_only_scored(sixteen_mib: Path) -> None:
    scoring = Loading(processes=1, workers=2, prefetch=2, train_batch_bytes=0, evaluation_batch_bytes=4 * MIB - 2**15)
    assert check_machine(scoring, sixteen_mib).warnings == ()
    refusal = check_machine(replace(scoring, evaluation_batch_bytes=9 * MIB), sixteen_mib).refusal
    assert refusal.startswith(
        "a batch from each of 2 loader processes (data.workers=2, data.prefetch=2) takes 18.1 MiB of "
    )
    assert refusal.endswith("or lower data.workers, data.prefetch or evaluate.batch_size.")
    assert scoring.descriptors < replace(scoring, train_batch_bytes=1).descriptors


def test_a_system_without_such_a_folder_is_not_asked(tmp_path: Path) -> None:
    assert check_machine(replace(SMALL, train_batch_bytes=2**50), tmp_path / "none").refusal == ""


@pytest.mark.parametrize(
    ("highest", "change"), [(4096, "run 'ulimit -n "), (128, "have the limit raised to ")], ids=["soft", "hard"]
)
def test_file_descriptors(highest: int, change: str) -> None:
    program = [sys.executable, "-c", LIMITED, "128", str(highest)]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=60)
    assert "16 loader processes (data.workers=16, data.prefetch=8) may need " in done.stdout
    assert f"open files per process, and 128 are allowed: {change}" in done.stdout
    enough = [sys.executable, "-c", LIMITED, "4096", "4096"]
    assert subprocess.run(enough, capture_output=True, text=True, check=True, timeout=60).stdout == "\n"


def test_more_workers_than_cores_are_told() -> None:
    cores = available_cores()
    assert check_machine(replace(SMALL, workers=cores)).warnings == ()
    (warning,) = check_machine(replace(SMALL, workers=cores + 1)).warnings
    assert warning.startswith(
        f"{cores + 1} loader processes (data.workers={cores + 1}) are requested, and {cores} core"
    )
    # One for each rank is what the least of recipes has.
    assert check_machine(replace(SMALL, processes=cores + 1)).warnings == ()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks into /proc")
def test_as_many_descriptors_are_foreseen_as_are_used(tmp_path: Path) -> None:
    """Where no batch is taken out of the workers' hands, a run that was let through does not run out of them."""
    done = subprocess.run(
        [sys.executable, "-c", USED, str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    used, foreseen = map(int, done.stdout.split())
    assert used <= foreseen < used + 64 + 100


USED = """
import os, sys, time
from pathlib import Path

import numpy as np
from PIL import Image

from paceline.data.loaders.pytorch import PytorchBackend
from paceline.data.image.source import FileSource
from paceline.data.image.transforms import View
from paceline.data.preflight import Loading
from paceline.data.slices import SampleSlice

root = Path(sys.argv[1])
Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(root / "a.png")
source = FileSource(root, [b"a.png"] * 400, np.zeros(400, dtype=np.int64), 3)
slices = [
    SampleSlice(step=k, epoch=0, logical_rank=0, ids=np.arange(4) + 4 * k, step_weight=4) for k in range(100)
]
before = len(os.listdir("/proc/self/fd"))
backends = [PytorchBackend(source, View(image_size=8, channels=3), workers=4, prefetch=4) for _ in range(2)]
streams = [backend.batches(slices) for backend in backends]
most = 0
kept = []
for _ in range(8):
    for stream in streams:
        kept.append(next(stream))
    kept = kept[-4:]
    time.sleep(0.05)
    most = max(most, len(os.listdir("/proc/self/fd")))
loading = Loading(processes=1, workers=4, prefetch=4, train_batch_bytes=1, evaluation_batch_bytes=1)
print(most - before, loading.descriptors)
for backend in backends:
    backend.close()
"""


def test_shared_memory_that_cannot_be_written_to(sixteen_mib: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", sixteen_mib], check=True)
    refusal = check_machine(SMALL, sixteen_mib).refusal
    assert refusal.endswith(f"{sixteen_mib} cannot be written to: mount it writable, or set data.workers=0.")
