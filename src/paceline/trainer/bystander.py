"""What does a run change in the process that it is called from, and how is that given back?"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from paceline.trainer.precision import keeping_float32_matmul
from paceline.trainer.process_settings import settings_kept

_SHARED_OUT = ("cuda", "xpu")


@contextlib.contextmanager
def torch_as_it_was() -> Iterator[None]:
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
def process_as_it_was(device: str | None = None) -> Iterator[None]:
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
        with settings_kept():
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
