"""What the doctor calls a synchronisation is one: CUDA itself refuses it where none is allowed, and allows the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline_advisor.doctor.behaviour import CallWatcher

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")

# Each is legal on a GPU, and on the CPU, where the doctor looks.
ACTS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "control flow": lambda x: 1 if (x > 3).all() else 2,
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "print": lambda x: str(x[0]),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 3],
    "one_hot": lambda x: F.one_hot(x[0].long()),
    "repeats": lambda x: x[0].repeat_interleave(x[0].long()),
    "a list on the device": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=x.device),
    "rand and to": lambda x: torch.rand(3).to(x.device),
    "arithmetic": lambda x: (x * 2 + 1).mean(),
    "where of a number": lambda x: torch.where(x > 3, x, torch.tensor(0.0)),
    "one number": lambda x: x + torch.tensor(1.0),
    "where of Python's number": lambda x: torch.where(x > 3, x, 0.0),
    "zeros there": lambda x: x + torch.zeros(3, device=x.device),
    "one_hot of a number of classes": lambda x: F.one_hot(x[0].long(), 4),
    "a mask set to a number": lambda x: x.clone().__setitem__(x > 3, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 3, 0.0),
}


@pytest.fixture
def refusing() -> Iterator[None]:
    """CUDA raises where it would wait."""
    before = torch.cuda.get_sync_debug_mode()
    yield
    torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS.keys())
def test_the_doctor_and_cuda_agree(act: Callable[[Tensor], Any], refusing: None) -> None:
    host = torch.arange(12.0).reshape(4, 3)
    watcher = CallWatcher([host])
    with watcher:
        act(host)
    device = torch.arange(12.0, device="cuda").reshape(4, 3)
    act(device)  # once without, as kernels are loaded
    torch.cuda.set_sync_debug_mode("error")
    waits = False
    try:
        act(device)
    except RuntimeError as error:
        waits = "synchroniz" in str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waits == bool(watcher.calls.reads or watcher.calls.made)
