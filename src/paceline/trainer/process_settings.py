"""State of the whole process: stop signals, freed memory, and the globals of torch, NumPy and Python.

A run and the user's code change some of it; every change is undone at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.backends import cuda

from paceline.host.system import STOP_SIGNALS

# A launcher and a terminal may both deliver one request; a second signal counts only after this many seconds.
_SAME_REQUEST_SECONDS = 1.0


class StopRequest:
    """Context that listens for stop signals; a second signal ends the process at once.

    Ending at once is safe at any moment: a checkpoint is complete or invisible.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._first_at = 0.0
        self._previous: dict[signal.Signals, object] = {}

    @property
    def requested(self) -> bool:
        """Whether a stop signal has arrived."""
        return self.signal_name is not None

    def __enter__(self) -> StopRequest:
        # Handlers belong to the main thread; elsewhere (a notebook's worker, say) the caller's stay in place.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._remember) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not set from Python, and cannot be set from here.
            if handler is not None:
                signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned
        self._previous = {}

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self.signal_name is None:
            self.signal_name, self._first_at = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._first_at > _SAME_REQUEST_SECONDS:
            os._exit(128 + number)


# Constants of <malloc.h> for mallopt: when freed memory is returned, from which size blocks may be mapped separately,
# and how many.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_NEVER, _NO_BLOCKS = -1, 0
# The values that the library reaches by itself when large blocks are freed, and its default number of mapped blocks.
_USUAL = {_TRIM_THRESHOLD: 64 * 2**20, _MMAP_THRESHOLD: 32 * 2**20, _MMAP_MAX: 65_536}
# Keep what the user has chosen for the process: the library's settings, or another allocator.
_MALLOC_SETTINGS = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_")
_REPORTED = ("LD_PRELOAD", "GLIBC_TUNABLES")
_keeping: list[torch.device] = []  # of nested runs, all that keep freed memory: the last to end releases it


@contextlib.contextmanager
def keep_freed_memory(device: torch.device, environment: Mapping[str, str] = os.environ) -> Iterator[bool]:
    """Keep freed memory in the process until the end, then release it; returns whether it is kept.

    It does not change any result. It does nothing on other devices, with a C library other than GNU's, or if the
    environment configures the allocator.

    Args:
        device: Where the network is.
        environment: Variables of this process.
    """
    is_chosen = any(environment.get(name) for name in _MALLOC_SETTINGS)
    is_chosen = is_chosen or any("malloc" in environment.get(name, "") for name in _REPORTED)
    if device.type != "cpu" or is_chosen or platform.libc_ver()[0] != "glibc":
        yield False
        return
    library = ctypes.CDLL(None)
    library.mallopt(_MMAP_MAX, _NO_BLOCKS)
    library.mallopt(_TRIM_THRESHOLD, _NEVER)
    _keeping.append(device)
    try:
        yield True
    finally:
        _keeping.pop()
        if not _keeping:
            for parameter, value in _USUAL.items():
                library.mallopt(parameter, value)
            library.malloc_trim(0)


Setting = tuple[Callable[[], Any], Callable[[Any], Any]]
"""Something that holds for the whole process: what reads it, and what sets it."""


def _torch_setting(names: str) -> Iterator[Setting]:
    """Attributes of torch, by dotted name."""
    for path, _, name in (each.rpartition(".") for each in names.split()):
        holder = attrgetter(path)(torch)
        yield partial(getattr, holder, name), partial(setattr, holder, name)


def _set_environment(settings: dict[str, str]) -> None:
    """Change only what differs: other threads may read meanwhile."""
    for name in os.environ.keys() - settings.keys():
        del os.environ[name]
    for name, value in settings.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _set_autocast(device: str, state: tuple[bool, torch.dtype]) -> None:
    torch.set_autocast_enabled(device, state[0])
    torch.set_autocast_dtype(device, state[1])


_TORCH_SETTINGS: tuple[Setting, ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    # The CPU's precision applies where nothing was set.
    (torch.get_default_device, lambda device: torch.set_default_device(None if device.type == "cpu" else device)),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda state: torch.autograd.set_detect_anomaly(*state),
    ),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    # Torch has old and new names for precisions. Set the old ones first, since they set the new ones too; of the new
    # ones set the general before the specific, which inherits if it has no value.
    *_torch_setting(
        """
        utils.deterministic.fill_uninitialized_memory
        backends.cudnn.benchmark backends.cudnn.benchmark_limit backends.cudnn.enabled backends.cudnn.deterministic
        backends.mkldnn.enabled backends.mkldnn.deterministic
        backends.cudnn.allow_tf32 backends.mkldnn.allow_tf32
        backends.fp32_precision
        backends.cudnn.fp32_precision backends.cudnn.conv.fp32_precision backends.cudnn.rnn.fp32_precision
        backends.cuda.matmul.fp32_precision
        backends.mkldnn.matmul.fp32_precision backends.mkldnn.conv.fp32_precision backends.mkldnn.rnn.fp32_precision
        backends.cuda.matmul.allow_fp16_reduced_precision_reduction
        backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        """
    ),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    *((partial(_autocast, device), partial(_set_autocast, device)) for device in ("cpu", "cuda")),
)
_OF_THE_PROCESS: tuple[Setting, ...] = (
    (lambda: dict(os.environ), _set_environment),
    (os.getcwd, os.chdir),
    (np.geterr, lambda kinds: np.seterr(**kinds)),
)


def _read(read: Callable[[], Any]) -> Any:
    """Return the value of a setting; None if torch refuses to read it because its old and new names disagree."""
    try:
        return read()
    except RuntimeError:
        return None


@contextlib.contextmanager
def restore_torch_settings(*extra: Setting) -> Iterator[None]:
    """Restore, also after an error, every torch setting that a run may change; for a command that ends afterwards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's old names, which are the only ones in some versions
        saved = [(read, write, _read(read)) for read, write in (*_TORCH_SETTINGS, *extra)]
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for read, write, value in saved:
                # Set only what differs: some of them are slow to set, because that imports torch's compiler.
                if value is not None and _read(read) != value:
                    write(value)


@contextlib.contextmanager
def restore_globals(device: str | None = None) -> Iterator[None]:
    """Restore, also after an error, all global state that a run or the code it calls may have used or changed.

    These are the settings of torch, NumPy and the process, and the random states.

    Args:
        device: As for :func:`restore_random_states`.
    """
    with restore_random_states(device), restore_torch_settings(*_OF_THE_PROCESS):
        yield


@contextlib.contextmanager
def restore_random_states(device: str | None) -> Iterator[None]:
    """Restore, also after an error, the random states of torch (those of its devices too), Python and NumPy.

    Args:
        device: ``parallel.device`` of the recipe that is about to run; the random states of other devices are left
            alone. None if no recipe will run: then devices in use are restored.
    """
    python = random.getstate()
    numpy = np.random.get_state()  # noqa: NPY002  # the caller's global state, which newer generators have none of
    states = [(torch.set_rng_state, torch.get_rng_state())]
    for kind in ("cuda", "xpu"):
        module = torch.get_device_module(kind)
        # A run would use the device anyway, so reading its state initialises nothing extra.
        if module.is_initialized() if device is None else device in ("auto", kind) and module.is_available():
            states.append((module.set_rng_state_all, module.get_rng_state_all()))
    if device in (None, "auto", "mps") and torch.backends.mps.is_available():
        states.append((torch.mps.set_rng_state, torch.mps.get_rng_state()))
    try:
        yield
    finally:
        for write, state in states:
            write(state)
        np.random.set_state(numpy)  # noqa: NPY002  # the global generator of user code
        random.setstate(python)
