"""State of the whole process: stop signals, freed memory, and the globals of torch, NumPy and Python.

A run changes some of it, and so does code of the user's own; every change is undone at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.backends import cuda

from paceline.trainer.precision import keeping_float32_matmul
from paceline.world import STOP_SIGNALS

# A launcher and a terminal may both deliver one request; a second one counts only after this.
_SAME_REQUEST_SECONDS = 1.0


class StopRequest:
    """Listens for stop signals while it is entered; a second signal ends the process at once.

    Ending at once is safe at any moment: a checkpoint is whole or invisible.
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


# Of <malloc.h>, for mallopt: when freed memory is returned; from which size on, and how many, blocks may be mapped each
# by itself.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_NEVER, _NO_BLOCKS = -1, 0
# What the library comes to by itself when large blocks are freed, and how many it maps unless told otherwise.
_USUAL = {_TRIM_THRESHOLD: 64 * 2**20, _MMAP_THRESHOLD: 32 * 2**20, _MMAP_MAX: 65_536}
# Whoever has chosen for the process itself keeps what was chosen: the library's settings, or another allocator.
_MALLOC_SETTINGS = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_")
_SAYING = ("LD_PRELOAD", "GLIBC_TUNABLES")
_keeping: list[torch.device] = []  # of runs within runs, all that keep it: the last to end gives it back


@contextlib.contextmanager
def keep_freed_memory(device: torch.device, environment: Mapping[str, str] = os.environ) -> Iterator[bool]:
    """Keep freed memory in the process until the end, and give back then what is free; whether it is kept.

    It changes no number. Nothing is done on other devices, with another C library than GNU's, or where the
    environment says how memory is to be had.

    Args:
        device: Where the network is.
        environment: Variables of this process.
    """
    library = None if device.type != "cpu" or _is_chosen(environment) else _gnu_library()
    if library is None:
        yield False
        return
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


def _is_chosen(environment: Mapping[str, str]) -> bool:
    settings = any(environment.get(name) for name in _MALLOC_SETTINGS)
    return settings or any("malloc" in environment.get(name, "") for name in _SAYING)


def _gnu_library() -> ctypes.CDLL | None:
    """The C library of this process, if it is GNU's."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return ctypes.CDLL(None)
    return None


@dataclass(frozen=True)
class Setting:
    """One thing that holds for the whole process.

    Attributes:
        name: What it is called.
        read: Returns its value.
        write: Sets it.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]

    def now(self) -> Any:
        """Its value; None where torch refuses to tell, as an old and a new name of it say two things."""
        try:
            return self.read()
        except RuntimeError:
            return None


def _of(path: str, *attributes: str) -> Iterator[Setting]:
    """Attributes of something in torch, by its dotted name there."""
    holder = attrgetter(path)(torch)
    for each in attributes:
        yield Setting(f"{path}.{each}", partial(getattr, holder, each), partial(setattr, holder, each))


def _set_device(device: torch.device) -> None:
    # The CPU is what holds where nothing was set.
    torch.set_default_device(None if device.type == "cpu" else device)


def _set_environment(wanted: dict[str, str]) -> None:
    """Change only what differs: other threads may read meanwhile."""
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _set_autocast(device: str, state: tuple[bool, torch.dtype]) -> None:
    torch.set_autocast_enabled(device, state[0])
    torch.set_autocast_dtype(device, state[1])


# Torch has an old and a new name for each of these. The old ones come first, as they set the new ones too; of the new
# ones the general before the particular, which takes its value where it has none of its own.
_PRECISIONS = (
    Setting("float32_matmul_precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    *_of("backends.cudnn", "allow_tf32"),
    *_of("backends.mkldnn", "allow_tf32"),
    *_of("backends", "fp32_precision"),
    *_of("backends.cudnn", "fp32_precision"),
    *_of("backends.cudnn.conv", "fp32_precision"),
    *_of("backends.cudnn.rnn", "fp32_precision"),
    *_of("backends.cuda.matmul", "fp32_precision"),
    *_of("backends.mkldnn.matmul", "fp32_precision"),
    *_of("backends.mkldnn.conv", "fp32_precision"),
    *_of("backends.mkldnn.rnn", "fp32_precision"),
)
_SETTINGS: tuple[Setting, ...] = (
    Setting("threads", torch.get_num_threads, torch.set_num_threads),
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("default device", torch.get_default_device, _set_device),
    Setting(
        "anomaly mode",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda state: torch.autograd.set_detect_anomaly(*state),
    ),
    Setting("determinism", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *_of("utils.deterministic", "fill_uninitialized_memory"),
    *_of("backends.cudnn", "benchmark", "benchmark_limit", "enabled", "deterministic"),
    *_of("backends.mkldnn", "enabled", "deterministic"),
    *_PRECISIONS,
    *_of("backends.cuda.matmul", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"),
    Setting("flash attention", cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    Setting("memory-efficient attention", cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    Setting("plain attention", cuda.math_sdp_enabled, cuda.enable_math_sdp),
    Setting("cuDNN's attention", cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    Setting("autocast on a CPU", partial(_autocast, "cpu"), partial(_set_autocast, "cpu")),
    Setting("autocast on a GPU", partial(_autocast, "cuda"), partial(_set_autocast, "cuda")),
    Setting("environment", lambda: dict(os.environ), _set_environment),
    Setting("working directory", os.getcwd, os.chdir),
    Setting("NumPy's errors", np.geterr, lambda kinds: np.seterr(**kinds)),
)


@contextlib.contextmanager
def restore_settings() -> Iterator[None]:
    """Put back, also after an error, every setting that is otherwise at the end."""
    with _without_warnings():
        before = [(each, each.now()) for each in _SETTINGS]
    try:
        yield
    finally:
        with _without_warnings():
            _put_back(before)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Torch warns of its old names; they are all that some of its versions have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _put_back(before: list[tuple[Setting, Any]]) -> None:
    # Only what is otherwise: to set some of them takes long, as it imports torch's compiler.
    for setting, value in before:
        if value is not None and setting.now() != value:
            setting.write(value)


_SHARED_OUT = ("cuda", "xpu")


@contextlib.contextmanager
def restore_torch_settings() -> Iterator[None]:
    """Give back what a run sets for the whole process; a command ends after it, a caller goes on."""
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with keeping_float32_matmul():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = benchmark
        if torch.are_deterministic_algorithms_enabled() != deterministic[0]:
            # Only then: the call imports torch's compiler, which takes seconds.
            torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])


@contextlib.contextmanager
def restore_globals(device: str | None = None) -> Iterator[None]:
    """Give back, also after an error, every state that a run or the code it calls may have drawn from or set.

    These are the settings of torch, NumPy and the process, and the random states of torch (those of its devices too),
    Python and NumPy.

    Args:
        device: ``parallel.device`` of the recipe that is about to run; the random states of devices that it cannot mean
            are left alone. None if nothing will: then those of devices that are in use count.
    """
    python = random.getstate()
    numpy = np.random.get_state()  # noqa: NPY002  # the caller's global state, which newer generators have none of
    host, devices = torch.get_rng_state(), _states_of_devices(device)
    try:
        with restore_settings():
            yield
    finally:
        torch.set_rng_state(host)
        _set_states_of_devices(devices)
        np.random.set_state(numpy)  # noqa: NPY002  # as above
        random.setstate(python)


def _states_of_devices(asked: str | None) -> dict[str, Any]:
    # A run would use the device, so that asking it for its state begins nothing that would not be begun.
    modules = {kind: torch.get_device_module(kind) for kind in _SHARED_OUT}
    kinds = [
        kind
        for kind, module in modules.items()
        if (module.is_initialized() if asked is None else asked in ("auto", kind) and module.is_available())
    ]
    found: dict[str, Any] = {kind: modules[kind].get_rng_state_all() for kind in kinds}
    if asked in (None, "auto", "mps") and torch.backends.mps.is_available():
        found["mps"] = torch.mps.get_rng_state()
    return found


def _set_states_of_devices(states: dict[str, Any]) -> None:
    for kind, state in states.items():
        if kind == "mps":
            torch.mps.set_rng_state(state)
        else:
            torch.get_device_module(kind).set_rng_state_all(state)
