"""What do torch, NumPy and Python keep for the whole process, and how is it put back?

Code of the user's own sets what it likes, when it is imported or when it computes a loss, and so does what prepares a
run. What is imported stays imported.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.backends import cuda


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


def _anomaly() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _set_anomaly(state: tuple[bool, bool]) -> None:
    torch.autograd.set_detect_anomaly(mode=state[0], check_nan=state[1])


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
    Setting("anomaly mode", _anomaly, _set_anomaly),
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
def settings_kept() -> Iterator[None]:
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
