"""The DataLoader back-end: the same bits for any number of workers, broken files reported, crashes named."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.data.batch import Batch
from paceline.data.image.source import FileSource, repeated
from paceline.data.image.transforms import View
from paceline.data.loaders.memory import MemoryBackend
from paceline.data.loaders.pytorch import PytorchBackend, explain_worker_deaths
from paceline.data.slices import SampleSlice
from paceline.errors import LostWorkerError, TrainingError
from paceline.recipe.data import Augment, Progressive

Slices = Callable[..., list[SampleSlice]]
Shuffled = Callable[[int, int], list[SampleSlice]]
Same = Callable[[Batch, Batch], bool]

AUGMENTS = [
    None,
    Augment(flip=0.5),
    Augment(crop="pad", padding=3, padding_mode="reflect", flip=0.5),
    Augment(flip=0.5, policy="trivialaugment", erase=0.5),
    Augment(crop="random_resized", flip=0.5),
]
NAMES = ["evaluation", "flip", "pad", "policy", "random_resized"]


def view(augment: Augment | None, size: int = 12) -> View:
    return View(image_size=size, channels=3, augment=augment, seed=3, mean=(0.2, 0.4, 0.6))


def read(source: FileSource, pieces: list[SampleSlice], the_view: View, workers: int) -> list[Batch]:
    with closing(PytorchBackend(source, the_view, workers=workers)) as backend:
        return list(backend.batches(iter(pieces)))


@pytest.mark.parametrize("augment", AUGMENTS, ids=NAMES)
def test_workers_change_nothing(mixed: FileSource, augment: Augment | None, shuffled: Shuffled, same: Same) -> None:
    pieces = shuffled(24, 5)
    torn = int(pieces[0].ids[1])  # in the batch that all workers read together
    Path(mixed.path(torn)).write_bytes(Path(mixed.path(torn)).read_bytes()[:100])
    alone = read(mixed, pieces, view(augment), 0)
    assert [batch.slice.step for batch in alone] == list(range(5))
    assert sum(len(batch.ids) for batch in alone) == 23
    assert [sample.id for batch in alone for sample in batch.broken] == [torn]
    for workers in (1, 3):
        for first, second in zip(alone, read(mixed, pieces, view(augment), workers), strict=True):
            assert same(first, second)


@pytest.mark.parametrize("size", [12, 16], ids=["as they are", "resized"])
@pytest.mark.parametrize("augment", AUGMENTS[:4], ids=NAMES[:4])
def test_agrees_with_memory_to_the_bit(
    request: pytest.FixtureRequest, augment: Augment | None, size: int, shuffled: Shuffled, same: Same
) -> None:
    source: FileSource = request.getfixturevalue("small" if size == 12 else "mixed")
    Path(source.path(7)).unlink()
    pieces = shuffled(len(source), 7)
    memory = MemoryBackend(source, view(augment, size)).batches(pieces)
    for first, second in zip(memory, read(source, pieces, view(augment, size), 0), strict=True):
        assert same(first, second)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("last", [False, True], ids=["rows", "channels last"])
@pytest.mark.parametrize("augment", AUGMENTS[1:4], ids=NAMES[1:4])
def test_agrees_with_memory_while_images_grow(
    mixed: FileSource, augment: Augment, last: bool, interpolation: str, slices: Slices, same: Same
) -> None:
    plain = replace(view(augment, 16), interpolation=interpolation)
    growing = replace(plain, progressive=Progressive(start_size=8, end=2, multiple=4))
    pieces = [each for epoch in range(3) for each in slices(range(9), [11], epoch=epoch)]
    memory = list(MemoryBackend(mixed, growing, channels_last=last).batches(pieces))
    assert [batch.inputs.shape[-1] for batch in memory] == [8, 8, 12, 12, 16, 16]
    assert all(same(one, other) for one, other in zip(memory, read(mixed, pieces, growing, 0), strict=True))


def test_repeats_are_one_image_varied_anew(small: FileSource, slices: Slices, same: Same) -> None:
    Path(small.path(7)).unlink()
    source = repeated(small, 3)
    pieces = slices([2, 42, 82], [7, 47], [47, 1])
    from_files = read(source, pieces, view(AUGMENTS[2]), 0)
    for first, second in zip(MemoryBackend(source, view(AUGMENTS[2])).batches(pieces), from_files, strict=True):
        assert same(first, second)
    assert from_files[0].targets.tolist() == [2, 2, 2]
    assert len({image.numpy().tobytes() for image in from_files[0].inputs}) == 3
    assert [[each.id for each in batch.broken] for batch in from_files] == [[], [7, 47], [47]]


@pytest.mark.parametrize("augment", [AUGMENTS[2], AUGMENTS[4]], ids=["pad", "random_resized"])
def test_growing_images_change_no_order_and_no_draw(
    mixed: FileSource, augment: Augment, slices: Slices, same: Same
) -> None:
    growing = replace(view(augment, 16), progressive=Progressive(start_size=8, end=2, multiple=4))
    pieces = [each for epoch in range(4) for each in slices([5, 3], [9, 1], epoch=epoch)]
    grown = read(mixed, pieces, growing, 2)
    assert [batch.inputs.shape[-1] for batch in grown] == [8, 8, 12, 12, 16, 16, 16, 16]
    full = read(mixed, pieces, view(augment, 16), 0)
    assert [batch.ids.tolist() for batch in grown] == [batch.ids.tolist() for batch in full]
    assert all(same(one, other) for one, other in zip(grown[4:], full[4:], strict=True))


def test_random_resized_does_not_depend_on_company(mixed: FileSource, slices: Slices) -> None:
    augment = AUGMENTS[4]
    together = read(mixed, slices(range(24)), view(augment), 0)[0].inputs
    apart = read(mixed, slices(*([sample] for sample in range(24))), view(augment), 0)
    assert torch.equal(torch.cat([batch.inputs for batch in apart]), together)
    other = read(mixed, slices(range(24), epoch=1), view(augment), 0)[0].inputs
    assert not torch.equal(other, together)


def test_all_broken_is_an_empty_batch(small: FileSource, slices: Slices) -> None:
    for sample in (0, 1):
        Path(small.path(sample)).write_bytes(b"")
    for workers in (0, 1):
        (batch,) = read(small, slices([1, 0]), view(AUGMENTS[2]), workers)
        assert batch.inputs.shape == (0, 3, 12, 12)
        assert [sample.id for sample in batch.broken] == [1, 0]


def test_workers_stay_and_a_left_stream_is_forgotten(small: FileSource, shuffled: Shuffled, same: Same) -> None:
    with closing(PytorchBackend(small, view(None), workers=2)) as backend:
        pieces, before = shuffled(40, 4), workers()
        assert len(before) == 2  # there before the first batch is asked for
        stream = backend.batches(iter(pieces * 100))
        first = next(stream)
        for _ in range(3):
            again = list(backend.batches(iter(pieces)))
            assert [batch.slice.step for batch in again] == list(range(10))
            assert same(first, again[0])
        assert workers() == before
        assert next(stream, None) is None
    assert workers() == set()


def test_random_state_is_left_alone(small: FileSource, shuffled: Shuffled) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    read(small, shuffled(40, 8), view(AUGMENTS[2]), 1)
    read(small, shuffled(40, 8), view(AUGMENTS[2]), 0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])  # noqa: NPY002


class Faulty(FileSource):
    """Fails on sample 3 as told."""

    def __init__(self, base: FileSource, fault: str) -> None:
        self.__dict__ = {**base.__dict__, "fault": fault}

    def read(self, sample: int) -> NDArray[np.uint8]:
        if sample == 3 and self.fault == "raise":
            raise KeyError("colour")
        if sample == 3 and self.fault == "hang":
            time.sleep(60)
        if sample == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(sample)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_defect_names_the_file(small: FileSource, workers: int, slices: Slices) -> None:
    with pytest.raises(TrainingError) as caught:
        read(Faulty(small, "raise"), slices([0, 1], [2, 3]), view(None), workers)
    assert str(caught.value) == f"Reading sample 3 ({small.path(3)}) failed: KeyError: 'colour'"
    assert "Traceback" in caught.value.__notes__[0]


# When a worker dies, torch opens ten temporary files to see whether descriptors are left, and its own handler of
# SIGCHLD may raise right after one was opened.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning")
def test_a_killed_worker_names_the_file(small: FileSource, slices: Slices) -> None:
    with pytest.raises(TrainingError, match=r"DataLoader worker .*sample 3 \(.*0003\.png\)"):
        read(Faulty(small, "kill"), slices([0, 1], [2, 3], [4]), view(None), 1)


NARROW = """
import glob, subprocess, sys
from pathlib import Path

subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", sys.argv[2], "tmpfs", "/dev/shm"], check=True)

import numpy as np
from PIL import Image

from paceline.data.loaders.pytorch import PytorchBackend
from paceline.data.image.source import FileSource
from paceline.data.image.transforms import View
from paceline.data.slices import SampleSlice

root = Path(sys.argv[1])
Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(root / "a.png")
source = FileSource(root, [b"a.png"] * 64, np.zeros(64, dtype=np.int64), 3)
try:
    backend = PytorchBackend(source, View(image_size=int(sys.argv[4]), channels=3), workers=int(sys.argv[3]))
    for batch in backend.batches([SampleSlice(step=0, epoch=0, logical_rank=0, ids=np.arange(64), step_weight=64)]):
        print(len(batch.ids))
except Exception as error:
    print(type(error).__name__, error, getattr(error, "__notes__", ""))
if "backend" in globals():
    backend.close()
print(glob.glob("/dev/shm/torch_*"))
"""


@pytest.mark.parametrize(
    ("mount", "workers", "size", "said"),
    [
        ("size=2m", 2, 256, "OneProcessError a loader process found too little shared memory (/dev/shm) for a batch "),
        # Room for 12 semaphores and 3 pages of images, not for the labels.
        ("size=60k", 1, 8, "OneProcessError a loader process found too little shared memory (/dev/shm) for a batch "),
        ("size=40k", 2, 8, "DataError 2 loader processes (data.workers) cannot start: No space left on device; "),
        ("ro", 2, 8, "DataError 2 loader processes (data.workers) cannot start: Read-only file system; "),
        ("ro", 0, 256, "64"),
    ],
)
def test_shared_memory_that_is_full_or_cannot_be_written_to(
    tmp_path: Path, mount: str, workers: int, size: int, said: str
) -> None:
    """It is told in a sentence, and nothing stays there; without loader processes none is needed."""
    program = ["unshare", "-m", sys.executable, "-c", NARROW, str(tmp_path), mount, str(workers), str(size)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=120)
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"cannot mount a file system of its own: {done.stderr.strip()}")
    first, *_, last = done.stdout.splitlines()
    assert first.startswith(said), done.stdout + done.stderr
    assert "Traceback" not in first + done.stderr
    assert last == "[]"


@pytest.mark.parametrize("first", [True, False], ids=["its own thread", "its queue's thread"])
def test_a_worker_that_cannot_start_a_thread_is_told_in_a_sentence(
    small: FileSource, slices: Slices, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], first: bool
) -> None:
    run, start, started = os.getpid(), threading.Thread.start, list[threading.Thread]()

    def start_some(thread: threading.Thread) -> None:
        if os.getpid() != run and (first or started):
            raise RuntimeError("can't start new thread")
        started.extend([thread] if os.getpid() != run else [])
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    with (
        closing(PytorchBackend(small, view(None), workers=1)) as backend,
        pytest.raises(LostWorkerError, match=r"could not start a thread: raise the limit .*ulimit -u"),
        explain_worker_deaths(),
    ):
        next(iter(backend.batches(iter(slices([0, 1], [2, 3])))))
    assert "Traceback" not in capfd.readouterr().err


def test_a_worker_that_dies_while_nothing_is_awaited_of_it(small: FileSource, slices: Slices) -> None:
    """torch raises it wherever the main thread is."""
    with closing(PytorchBackend(small, view(None), workers=2)) as backend:
        next(iter(backend.batches(iter(slices([0, 1], [2, 3])))))
        worker = multiprocessing.active_children()[0]
        threading.Timer(0.3, worker.kill).start()
        with (
            pytest.raises(LostWorkerError, match=r"DataLoader worker .*memory ran out, lower"),
            explain_worker_deaths(),
        ):
            time.sleep(20)
    with pytest.raises(RuntimeError, match=r"^other$"), explain_worker_deaths():
        raise RuntimeError("other")


def test_a_worker_whose_death_is_told_while_it_is_looked_for(small: FileSource, slices: Slices) -> None:
    """Its socket is missed first, and then torch's handler raises amid that."""
    with closing(PytorchBackend(small, view(None), workers=1)) as backend:
        assert len(list(backend.batches(iter(slices([0, 1]))))) == 1
        (worker,) = multiprocessing.active_children()
        threading.Timer(0.3, worker.kill).start()
        with pytest.raises(TrainingError, match=r"DataLoader worker .* is killed by signal"), backend._explained():
            raise ConnectionResetError


@pytest.mark.everyday
def test_a_hung_worker_names_the_file(small: FileSource, slices: Slices) -> None:
    hangs = pytest.raises(TrainingError, match=r"no batch came for 5 s: .*sample 3 \(.*0003\.png\)")
    with closing(PytorchBackend(Faulty(small, "hang"), view(None), workers=2, wait_seconds=5)) as backend, hangs:
        list(backend.batches(slices([0, 1], [2, 3], [4])))


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="shared memory has no names here")  # torch's
def test_the_name_of_memory_whose_worker_was_killed_goes_with_it(small: FileSource) -> None:
    backend = PytorchBackend(small, view(None), workers=2)
    mine, other = (Path(f"/dev/shm/torch_{pid}_1_0") for pid in (max(filter(None, workers())), 1))
    try:
        mine.touch()
        other.touch()
        backend.close()
        assert not mine.exists()
        assert other.exists()
    finally:
        backend.close()
        mine.unlink(missing_ok=True)
        other.unlink(missing_ok=True)


def test_an_error_in_the_slices_is_not_a_workers(small: FileSource, slices: Slices) -> None:
    def failing() -> object:
        yield from slices([1])
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        read(small, failing(), view(None), 1)  # type: ignore[arg-type]


def workers() -> set[int | None]:
    """The loader processes of this one, but for what multiprocessing starts for itself."""
    return {child.pid for child in multiprocessing.active_children()}
