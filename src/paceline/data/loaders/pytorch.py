"""The back-end for image files: torch's DataLoader, whose workers decode whole micro-batches.

A worker receives the slice itself, with the ids and the epoch that key every random draw. So workers have no state, and
their number has no effect on results. They ignore the signals that stop a run, which reach its whole process group;
they exit when the run closes them or its process is gone.

Workers are forked when the back-end is created. Create it before the process has threads that hold locks (such as those
of a process group, autograd or a tracker): a fork copies a held lock, but not the thread that would release it.

All workers share the first batch before any of them reads another. Otherwise a single worker would read all of it, and
on few cores it would arrive only after the other workers' batches.

A slice is read sample by sample, in a worker or in the main process. Only the needed region of a file is decoded: its
header gives the picture's size, the sample's random draws choose the region, and that region is decoded, resized and
written into the batch.
"""

from __future__ import annotations

import atexit
import inspect
import itertools
import multiprocessing
import multiprocessing.queues
import multiprocessing.util
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.sharedctypes import RawArray
from types import TracebackType
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, get_worker_info

from paceline.data.batch import Batch, BrokenSample, joined_along_samples, tensors_in
from paceline.data.image.decode import DecodedImage, LazyImage, resizes
from paceline.data.image.image_store import shrunk, vary
from paceline.data.image.source import BrokenImageError, SampleSource, encoded_source, prefetch
from paceline.data.image.transforms import (
    Draws,
    Shape,
    Variation,
    View,
    draw,
    evaluation_image,
    has_variation,
    random_resized_box,
    resized_part,
    shrinkage,
    snapped,
)
from paceline.data.preflight import SHARED_MEMORY
from paceline.data.slices import SampleIds, SampleSlice
from paceline.data.splits import Source
from paceline.errors import DataError, LostWorkerError, OneProcessError
from paceline.host.system import STOP_SIGNALS, blocked_signals, receive_signals
from paceline.parsing.units import format_bytes
from paceline.recipe.data import Augment

# Size of the result: 64 images of 32x32. Their intermediate data stay in the cache.
_PIXELS_AT_ONCE = 2**16


class ReadFailure(Exception):  # noqa: N818 (handed over as a value)
    """An unexpected error while reading (not a broken file); sent from a worker instead of its batch.

    Attributes:
        message: One sentence that names the sample.
        trace: The traceback, as text; empty if the message suffices.
    """

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message, trace)
        self.message, self.trace = message, trace


class _Sample:
    """One sample in progress, from the file to its row in the batch."""

    __slots__ = ("image", "picture", "pixels", "resized", "row", "sample")

    picture: LazyImage | DecodedImage
    pixels: NDArray[np.uint8]
    image: torch.Tensor

    def __init__(self, row: int, sample: int) -> None:
        self.row = row
        self.sample = sample
        self.resized: NDArray[np.uint8] | None = None


class SliceReader:
    """Reads the samples of a slice in order; stateless, so that any process can read any slice."""

    is_divisible = True

    def __init__(self, source: SampleSource, view: View, note: Callable[[int], None] | None = None) -> None:
        """Read samples from ``source`` for ``view``; ``note`` is called with each sample's id before it is read."""
        self._source = source
        self._files = encoded_source(source)
        self._view = view
        self._note = note
        self._augment = view.augment or Augment()
        self._variation = Variation(self._augment, view.mean, view.seed)
        self._shifts = self._augment.crop == "pad"

    def __getitem__(self, piece: SampleSlice) -> Batch | ReadFailure:
        view = self._view
        prefetch(self._source, piece.ids)
        draws = None if view.augment is None else draw(view.augment, view.seed, piece.epoch, piece.variation_keys)
        size = view.read_size_at(piece.epoch)
        shape = piece.shape or (size, size)
        try:
            inputs = self._empty(len(piece.ids), shape)
            broken = self._fill(inputs, piece.ids, shape, draws)
        except ReadFailure as failure:
            return failure
        ids, keys = piece.ids, piece.variation_keys
        if broken:
            intact = ~np.isin(np.arange(len(ids)), list(broken))
            inputs, ids, keys = inputs[: len(ids) - len(broken)], ids[intact], keys[intact]
            draws = None if draws is None else draws.select(intact)
        if draws is not None:
            if self._shifts:
                inputs = vary(inputs, self._augment, draws)
            if (smaller := view.size_at(piece.epoch)) != size:
                inputs = shrunk(inputs, smaller, view.interpolation)
            inputs = self._variation(inputs, keys, piece.epoch)
        in_order = tuple(broken[row] for row in sorted(broken))
        return Batch(inputs, torch.from_numpy(self._source.labels[ids]), ids, piece, in_order)

    def _fill(self, inputs: torch.Tensor, ids: SampleIds, shape: Shape, draws: Draws | None) -> dict[int, BrokenSample]:
        """Read samples into the first rows of a batch; return the broken ones, which are left out, by row.

        Small images are processed in groups, step by step: alternating between file system, decoder and torch per image
        would add 50 % to the time.
        """
        broken: dict[int, BrokenSample] = {}
        rows, pixels, filled = inputs.unbind(), inputs.permute(0, 2, 3, 1).numpy(), 0
        at_once = max(1, _PIXELS_AT_ONCE // (shape[0] * shape[1]))
        samples = list(enumerate(ids.tolist()))
        for begin in range(0, len(samples), at_once):
            group = [_Sample(row, sample) for row, sample in samples[begin : begin + at_once]]
            for step in (self._open, partial(self._decode, shape, draws), partial(self._resize, shape, draws)):
                group = [each for each in group if self._run_step(step, each, broken)]
            for each in group:
                if each.resized is None:
                    rows[filled].copy_(each.image)
                else:
                    pixels[filled] = each.resized
                filled += 1
        return broken

    def _run_step(self, step: Callable[[_Sample], None], state: _Sample, broken: dict[int, BrokenSample]) -> bool:
        sample = state.sample
        if self._note is not None:
            self._note(sample)
        try:
            step(state)
        except BrokenImageError as error:
            broken[state.row] = BrokenSample(sample, error.path or self._source.path(sample), error.reason)
            return False
        except Exception as error:  # noqa: BLE001 (raised by the training process, which knows what to stop)
            sample_text = f"Reading sample {sample} ({self._source.path(sample)})"
            message = f"{sample_text} failed: {type(error).__name__}: {error}"
            raise ReadFailure(message, traceback.format_exc()) from None
        return True

    def _open(self, state: _Sample) -> None:
        if self._files is None:
            state.picture = DecodedImage(self._source.read(state.sample))
        else:
            state.picture = LazyImage(self._files.encoded(state.sample), self._view.channels)

    def _decode(self, shape: Shape, draws: Draws | None, state: _Sample) -> None:
        """Decode the region of a picture that the model sees, or all of it."""
        picture, augment = state.picture, self._augment
        if draws is None or draws.attempts is None:
            state.pixels = picture.part()
            return
        box = random_resized_box(draws.attempts[state.row], picture.size, augment.scale, augment.ratio)
        shrink = shrinkage(box, shape[0]) if augment.shrink_on_load and picture.shrinks else 1
        box = snapped(box, shrink) if shrink > 1 else box
        if resizes(*shape) and isinstance(picture, LazyImage):
            bicubic, flip = self._view.interpolation == "bicubic", bool(draws.flip[state.row])
            state.resized = picture.resized_part(box, shrink, shape, bicubic=bicubic, flip=flip)
        if state.resized is None:
            state.pixels = picture.part(box, shrink)

    def _resize(self, shape: Shape, draws: Draws | None, state: _Sample) -> None:
        """Resize to the model's input and flip as drawn, unless already done."""
        if state.resized is not None:
            return
        view = self._view
        if draws is None or draws.attempts is None:
            image = evaluation_image(state.pixels, shape, view.evaluation_crop, view.interpolation)
        else:
            image = resized_part(state.pixels, shape[0], view.interpolation)
        flips = draws is not None and bool(draws.flip[state.row]) and not self._shifts
        state.image = image.flip(-1) if flips else image

    def _empty(self, count: int, shape: Shape) -> torch.Tensor:
        """Allocate a batch, uint8 [N, C, H, W]; in a worker, in memory shared with the main process."""
        channels, (height, width) = self._view.channels, shape
        size = count * channels * height * width
        if get_worker_info() is None:
            flat = torch.empty(size, dtype=torch.uint8)
        else:
            # As in torch's collation: a batch in other memory would be copied on transfer.
            try:
                storage = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]  # noqa: SLF001 (torch's collation calls it)
            except RuntimeError as error:
                raise unshared(error, size) from None
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        if self._shifts or has_variation(self._augment):
            # Shifts use rows of one channel, and torchvision's operations may round differently with channels last.
            return flat.view(count, channels, height, width)
        return flat.view(count, height, width, channels).permute(0, 3, 1, 2)


def unlink_shared_memory(pid: int) -> None:
    """Unlink shared memory that a loader process left behind when it failed or was killed; torch does not.

    Transferred memory is not affected, since its name is unlinked at once.
    """
    for left in SHARED_MEMORY.glob(f"torch_{pid}_*"):
        left.unlink(missing_ok=True)


def unshared(error: BaseException, size: int) -> ReadFailure:
    """Return why a loader process could not hand over a batch of ``size`` bytes."""
    unlink_shared_memory(os.getpid())
    if "No space" in str(error):
        return ReadFailure(
            f"a loader process found too little shared memory ({SHARED_MEMORY}) for a batch of {format_bytes(size)}: "
            "give it more (docker run --shm-size=…; in Kubernetes an emptyDir of medium Memory), or lower "
            "data.workers, data.prefetch or batch.micro_size."
        )
    return ReadFailure(
        f"a loader process could not hand over a batch ({type(error).__name__}: {error}); data.workers=0 reads without "
        "loader processes."
    )


def split_slice(piece: SampleSlice, parts: int) -> list[SampleSlice]:
    """Split a slice into at most ``parts`` non-empty parts."""
    count = min(parts, len(piece.ids))
    if count < 2:
        return [piece]
    keys: Sequence[SampleIds | None] = [None] * count if piece.keys is None else np.array_split(piece.keys, count)
    ids = np.array_split(piece.ids, count)
    return [replace(piece, ids=ids[part], keys=keys[part]) for part in range(count)]


def join_parts(parts: Sequence[Batch], full_slice: SampleSlice) -> Batch:
    """Join the parts of one slice: bit-identical to reading it whole."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        inputs=joined_along_samples([part.inputs for part in parts]),
        targets=joined_along_samples([part.targets for part in parts]),
        ids=np.concatenate([part.ids for part in parts]),
        slice=full_slice,
        broken=tuple(broken for part in parts for broken in part.broken),
    )


_CHECK_SECONDS = 0.5
_CLOSING_CHECKS = 4  # a worker that is still reading after this many checks is terminated
_LONGEST_WAIT_SECONDS = 600  # for one batch; storage that stalls for longer is unlikely to recover

_DEATH = "DataLoader worker"  # start of torch's error message about a worker
_NO_THREAD = -2  # in place of the sample that a worker is reading

# sizeof(sun_path) on Linux, without its terminating null; slightly less on macOS.
_SOCKET_PATH = 107 if sys.platform == "linux" else 103


class Reader(Protocol):
    """Reads micro-batches; stateless, so that any process can read any of them."""

    is_divisible: bool
    """Whether a micro-batch may be read in parts, which are then joined."""

    def __getitem__(self, piece: SampleSlice) -> Batch | ReadFailure:
        """Read the samples of a slice."""
        ...


class LoaderBackend:
    """Serves one split, read in loader processes; implements :class:`paceline.data.batch.Backend`.

    Workers start immediately and serve all calls of :meth:`batches`, one call at a time.
    """

    def __init__(
        self,
        source: Source[Any],
        make_reader: Callable[[Callable[[int], None]], Reader],
        *,
        workers: int,
        prefetch: int = 2,
        pin_memory: bool = False,
        wait_seconds: int = _LONGEST_WAIT_SECONDS,
    ) -> None:
        """Read ``source`` in ``workers`` processes, or in the main process if 0.

        Args:
            source: Names the split's samples in messages.
            make_reader: Makes what reads them, given a function to call with each sample's number before it is read.
            workers: Loader processes.
            prefetch: Batches to prefetch per worker.
            pin_memory: Whether the batches of workers are moved to pinned memory, by a thread, for copies to a GPU.
            wait_seconds: Maximum wait for one batch before the workers count as hung.
        """
        self._pin_memory = pin_memory
        self._wait_seconds = wait_seconds
        self._order = _Order()
        self._stream: Generator[Batch, None, None] | None = None
        with _starting(workers):
            self._worker_state = _WorkerState(workers, source)
            self._reader = make_reader(self._worker_state.note)
            self._loader = self._make_loader(workers, prefetch) if workers else None
            if self._loader is not None:
                iter(self._loader)  # requests nothing yet: the order is empty
        _OPEN.add(self)

    def batches(self, slices: Iterable[SampleSlice]) -> Iterator[Batch]:
        """Yield one uint8 batch per slice, in order; a new call ends an earlier call's stream.

        Raises:
            OneProcessError: If a worker dies, hangs, or fails for a reason other than a broken file; the message names
                the sample.
        """
        if self._stream is not None:
            self._stream.close()
        if self._loader is None:
            self._stream = self._in_process(slices)
        else:
            self._stream = self._from_workers(slices)
        return self._stream

    def reading(self) -> str:
        """Describe which sample is being read, or was read last, and by which worker."""
        return self._worker_state.explain_place()

    def explain_death(self, reason: str) -> str:
        """Describe what a dead worker of this back-end was reading; nothing if none died."""
        return self._worker_state.explain_death(reason) if self._worker_state.dead() else ""

    def close(self) -> None:
        """Stop the workers; a hung one gets two seconds."""
        _OPEN.discard(self)
        self._worker_state.closing[0] = 1
        if self._stream is not None and inspect.getgeneratorstate(self._stream) != inspect.GEN_RUNNING:
            self._stream.close()
        self._stream = None
        self._loader = None  # the last reference: torch stops the workers and waits
        self._worker_state.kill_survivors()

    def _make_loader(self, workers: int, prefetch: int) -> DataLoader[Batch | ReadFailure]:
        with _quiet():
            return DataLoader(
                cast("Dataset[Batch | ReadFailure]", self._reader),
                batch_size=None,
                sampler=self._order,
                num_workers=workers,
                pin_memory=self._pin_memory,
                worker_init_fn=self._worker_state.enter,
                # Spawned workers would import torch again, taking seconds and hundreds of MiB each.
                multiprocessing_context="fork" if sys.platform == "linux" else None,
                # A separate generator, because creating an iterator would otherwise advance torch's global one.
                generator=torch.Generator(),
                prefetch_factor=prefetch,
                persistent_workers=True,
                timeout=self._wait_seconds,
            )

    def _in_process(self, slices: Iterable[SampleSlice]) -> Generator[Batch, None, None]:
        for piece in slices:
            yield _batch_of(self._reader[piece])

    def _from_workers(self, slices: Iterable[SampleSlice]) -> Generator[Batch, None, None]:
        assert self._loader is not None
        coming = iter(slices)
        first = next(coming, None)
        if first is None:
            return
        parts = split_slice(first, self._loader.num_workers) if self._reader.is_divisible else [first]
        self._order.slices = itertools.chain(parts, coming)
        with self._explained():
            results = iter(self._loader)
        waiting: list[Batch] = []
        while True:
            with self._explained():
                result = next(results, None)
            if result is None:
                return
            waiting.append(_batch_of(result))
            if len(waiting) == len(parts):
                yield join_parts(waiting, first)
                waiting, parts = [], parts[:1]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn torch's error about a dead or hung worker into a sentence that names the sample."""
        state = self._worker_state
        try:
            try:
                yield
            except (ConnectionError, EOFError, FileNotFoundError) as error:
                # Batches come through the worker's socket, so a dying worker is noticed there first.
                if not state.has_lost_a_worker():
                    raise
                raise LostWorkerError(state.explain_death(f"{_DEATH} died handing over a batch")) from error
        except RuntimeError as error:  # including torch's SIGCHLD handler's errors, raised anywhere inside
            if str(error).startswith(_DEATH):
                raise LostWorkerError(state.explain_death(str(error))) from error
            if str(error).startswith("DataLoader timed out"):
                place = state.explain_place() or "no worker has started"
                raise OneProcessError(f"no batch came for {self._wait_seconds} s: {place}.") from error
            raise


class PytorchBackend(LoaderBackend):
    """Serves one split of images from files.

    Args:
        source: The split's images.
        view: Preprocessing.
        settings: Settings of :class:`LoaderBackend`.
    """

    def __init__(self, source: SampleSource, view: View, **settings: Any) -> None:
        super().__init__(source, partial(SliceReader, source, view), **settings)


class _Order:
    """The loader's sampler: yields the slices to read now."""

    slices: Iterable[SampleSlice] = ()

    def __iter__(self) -> Iterator[SampleSlice]:
        return iter(self.slices)


class _WorkerState:
    """Shared memory of the workers: whether the back-end is closing, and the sample that each worker is reading."""

    def __init__(self, workers: int, source: Source[Any]) -> None:
        self._source = source
        self._run_process = os.getpid()
        # Without workers, shared memory is unnecessary and may be unavailable (read-only /dev/shm).
        share: Any = partial(RawArray, "q") if workers else list[int]
        self.closing = share([0])  # 1: batches are no longer needed
        self._pids = share([0] * max(workers, 1))
        self._reading = share([-1] * max(workers, 1))
        self._worker = 0
        if workers:
            # Shared when created here: the last of the run and its workers removes it.
            _check_socket_path(multiprocessing.util.get_temp_dir())

    def enter(self, worker: int) -> None:
        """Set up worker number ``worker``; runs in its process."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        receive_signals()
        sys.excepthook = self._tell_unless_orphaned
        # Python's hook for subclasses; torch makes the queue, so that it cannot be one.
        multiprocessing.queues.Queue._on_queue_feeder_error = _put_failure  # type: ignore[attr-defined]  # noqa: SLF001
        self._worker = worker
        self._pids[worker] = os.getpid()
        # For the same reason: the queue starts its thread at its first put, where no thread may be left.
        start_feeder = multiprocessing.queues.Queue._start_thread  # type: ignore[attr-defined]  # noqa: SLF001
        feed = self._unless_out_of_threads(start_feeder)
        multiprocessing.queues.Queue._start_thread = feed  # type: ignore[attr-defined]  # noqa: SLF001
        self._unless_out_of_threads(threading.Thread.start)(threading.Thread(target=self._leave_in_time, daemon=True))

    def _unless_out_of_threads(self, start: Callable[[Any], None]) -> Callable[[Any], None]:
        """Exit quietly where a thread cannot start: the run's process reports it."""

        def start_or_exit(thread: Any) -> None:
            try:
                start(thread)
            except RuntimeError:
                self.note(_NO_THREAD)
                os._exit(1)

        return start_or_exit

    def note(self, sample: int) -> None:
        """Record which sample this worker reads next."""
        self._reading[self._worker] = sample

    def has_lost_a_worker(self) -> bool:
        """Whether a worker has died, or dies within a second: its socket may close before the process ends."""
        deadline = time.monotonic() + 1
        while not self.dead() and time.monotonic() < deadline:
            time.sleep(0.01)
        return bool(self.dead())

    def explain_death(self, reason: str) -> str:
        """Add the sample that it was reading to torch's message about a dead worker."""
        samples = [self._reading[k] for k in self.dead() if self._reading[k] >= 0]
        names = " and ".join(f"{sample} ({self._source.path(sample)})" for sample in samples)
        where = f", while it read sample {names}" if names else ""
        sentence = re.split(r"\. |\.$", reason.strip(), maxsplit=1)[0]
        cause = ""
        if any(self._reading[k] == _NO_THREAD for k in self.dead()):
            cause = " It could not start a thread: raise the limit of processes and threads (ulimit -u)."
        elif sentence.endswith("Bus error"):
            cause = " It ran out of shared memory: give it more, or lower data.workers or data.prefetch."
        elif sentence.endswith(("Killed", "exited unexpectedly")):
            cause = " If it was killed because memory ran out, lower data.workers or data.prefetch."
        return f"{sentence}{where}.{cause}"

    def explain_place(self) -> str:
        """Report the sample that each worker, or this process without workers, was last reading."""
        last = [f"worker {k} (pid {pid}) {self._last_read(k)}" for k, pid in enumerate(self._pids) if pid]
        if not last and self._reading[0] >= 0:
            return f"the run's own process {self._last_read(0)}"
        return "; ".join(last)

    def dead(self) -> list[int]:
        """Return the numbers of the workers that have died."""
        alive = {child.pid for child in multiprocessing.active_children()}
        return [k for k, pid in enumerate(self._pids) if pid and pid not in alive]

    def _last_read(self, worker: int) -> str:
        sample = self._reading[worker]
        return (
            "had not started a sample" if sample < 0 else f"was last at sample {sample} ({self._source.path(sample)})"
        )

    def kill_survivors(self) -> None:
        """Kill workers that torch could not end: they ignore its SIGTERM and delay the interpreter's exit."""
        pids = [pid for pid in self._pids if pid]
        for child in multiprocessing.active_children():
            if child.pid in pids:
                child.kill()
                child.join()
        for pid in pids:
            unlink_shared_memory(pid)

    def _tell_unless_orphaned(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Print an error, unless its cause is that the run is gone, which needs no report."""
        if isinstance(error, ConnectionError | EOFError):
            time.sleep(_CHECK_SECONDS)  # a dying process closes its sockets before its children are reparented
        if os.getppid() == self._run_process:
            sys.__excepthook__(kind, error, trace)

    def _leave_in_time(self) -> None:
        """Exit when the run's process is gone, or when the worker hangs while the back-end closes."""
        closing = 0
        while os.getppid() == self._run_process and closing < _CLOSING_CHECKS:
            time.sleep(_CHECK_SECONDS)
            closing += self.closing[0]
        if os.getppid() != self._run_process:
            shutil.rmtree(multiprocessing.util.get_temp_dir(), ignore_errors=True)
        # The other thread may be allocating a batch.
        unlink_shared_memory(os.getpid())
        os._exit(0)


def _put_failure(queue: Any, error: Exception, item: Any) -> None:
    """Send the reason in place of a batch that could not be sent, which the run would wait for, and nothing after it.

    What follows may name a socket that no thread serves.
    """
    if isinstance(item, tuple):  # else its pipe is closed
        number, batch = item
        queue._sem.acquire(block=False)  # noqa: SLF001 (the reader releases it)
        with queue._wlock:  # noqa: SLF001 (as the thread's own sends do)
            queue._writer.send((number, unshared(error, _size(batch))))  # noqa: SLF001 (`put` needs this thread)
    raise SystemExit  # this thread


def _size(batch: Any) -> int:
    """Return the bytes of a batch's tensors."""
    return sum(each.nbytes for each in tensors_in(batch.inputs, batch.targets)) if isinstance(batch, Batch) else 0


def _check_socket_path(directory: str) -> None:
    """Check the length of the workers' socket path in the temporary directory, which is limited.

    With a longer path every batch would be lost silently, and the run would wait forever.
    """
    longest = _SOCKET_PATH - len("/listener-12345678")
    if len(os.fsencode(directory)) > longest:
        raise DataError(
            f"the temporary directory '{directory}' has a path of {len(os.fsencode(directory))} bytes, but loader "
            f"workers need one of at most {longest}; set TMPDIR to a shorter one, or data.workers=0."
        )


_OPEN: weakref.WeakSet[LoaderBackend] = weakref.WeakSet()


@contextmanager
def explain_worker_deaths() -> Iterator[None]:
    """Turn torch's error about a dead worker into a sentence on that worker, wherever the main thread is.

    Raises:
        LostWorkerError: Instead of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith(_DEATH):
            raise
        explanations = (each.explain_death(str(error)) for each in list(_OPEN))
        raise LostWorkerError(next(filter(None, explanations), str(error))) from error


@atexit.register
def _close_all() -> None:
    # Registered after multiprocessing's hook, so it runs first: that hook waits forever for hung workers.
    for backend in list(_OPEN):
        backend.close()


@contextmanager
def _starting(workers: int) -> Iterator[None]:
    """Block signals while starting workers, until they ignore them.

    Raises:
        DataError: If there is no room for their semaphores, pipes or processes.
    """
    others = multiprocessing.active_children()
    try:
        with blocked_signals(), _quiet():
            yield
    except OSError as error:
        for child in {*multiprocessing.active_children()} - {*others}:
            child.kill()  # it ignores SIGTERM, and would delay the interpreter's exit for ever
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        traceback.clear_frames(error.__traceback__)  # deletes torch's unfinished iterator, which prints a traceback
        sys.unraisablehook = hook
        raise DataError(
            f"{workers} loader process{'es' * (workers > 1)} (data.workers) cannot start: {error.strerror}; raise that "
            f"limit, give {SHARED_MEMORY} more space, or set data.workers=0."
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress two warnings that users cannot act on."""
    with warnings.catch_warnings():
        # Python's warning about forking with other threads; a worker takes none of the locks that they may hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        # torch's warning about more workers than cores: the recipe requests them.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


def _batch_of(result: Batch | ReadFailure) -> Batch:
    if isinstance(result, Batch):
        return result
    error = OneProcessError(result.message)
    if result.trace:
        error.add_note(result.trace)
    raise error
