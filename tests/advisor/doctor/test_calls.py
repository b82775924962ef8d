"""Which calls make the host wait, and which make tensors in the wrong place? Each by itself, on a few numbers."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline_advisor.doctor.behaviour import OURS, TORCH, Calls, CallWatcher, place_of
from paceline_advisor.prove.recorder import digest_of

NETWORK = nn.Linear(3, 2)
STORED = torch.tensor([1.0, 2.0, 3.0])


def watched(act: Callable[[Tensor], Any]) -> Calls:
    x = torch.arange(12.0).reshape(4, 3)
    watcher = CallWatcher([x])
    with watcher, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        act(x)
    return watcher.calls


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "control flow": lambda x: 1 if (x > 3).all() else 2,
    "float": lambda x: float(x.mean()),
    "an index": lambda x: [0, 1][x[0, 0].long()],
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x[0]),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "to cpu by name": lambda x: x.to(device="cpu"),
    "print": lambda x: str(x[0]),
    "a text": lambda x: f"{x.sum():.2f}",
    "in": lambda x: 1.0 in x,
    "nonzero": lambda x: x.nonzero(),
    "where of one": lambda x: torch.where(x > 3),
    "a mask": lambda x: x[x > 3],
    "one_hot": lambda x: F.one_hot(x[0].long()),
    "repeats": lambda x: x[0].repeat_interleave(x[0].long()),
    "unique": lambda x: x.unique(),
}


@pytest.mark.parametrize("act", READS.values(), ids=READS.keys())
def test_it_waits(act: Callable[[Tensor], Any]) -> None:
    calls = watched(act)
    assert sum(calls.reads.values()) == 1, calls
    ((file, line, what),) = calls.reads
    assert Path(file) == Path(__file__)
    assert line == act.__code__.co_firstlineno
    assert what


MADE: dict[str, Callable[[Tensor], Any]] = {
    "zeros": lambda x: x + torch.zeros(3),
    "rand and to": lambda x: torch.rand(3).to(x.device),
    "rand and cuda": lambda x: torch.rand(3).cuda(),
    "a list": lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    "a list on the device": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=x.device),
    "arange": lambda x: torch.arange(4),
    "from numpy": lambda x: torch.from_numpy(np.zeros(3)).to(x.device),
    "stored on the host": lambda x: x * STORED.to(x.device),
    "eye": lambda x: torch.eye(3),
    "where of a number": lambda x: torch.where(x > 3, x, torch.tensor(0.0)),
}


@pytest.mark.parametrize("act", MADE.values(), ids=MADE.keys())
def test_it_is_made_on_the_host(act: Callable[[Tensor], Any]) -> None:
    calls = watched(act)
    assert not calls.reads
    (((file, line, _), count),) = calls.made.items()  # told once, where it is made
    assert (Path(file), line, count) == (Path(__file__), act.__code__.co_firstlineno, 1)


GOOD: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda x: (x * 2 + 1).mean(),
    "one number": lambda x: x + torch.tensor(1.0),
    "where of Python's number": lambda x: torch.where(x > 3, x, 0.0),
    "zeros there": lambda x: x + torch.zeros(3, device=x.device),
    "zeros on a GPU": lambda x: torch.zeros(3, device="cuda"),
    "zeros_like": lambda x: torch.zeros_like(x) + x.new_zeros(3),
    "under a device": lambda x: _under(x) * 2,
    "one_hot of a number of classes": lambda x: F.one_hot(x[0].long(), 4),
    "other numbers": lambda x: x.to(torch.float64),
    "another tensor's place": lambda x: x.to(x),
    "its own list": lambda x: torch.linspace(0, 1, 3, device="cpu").tolist(),
    "a mask set to a number": lambda x: x.clone().__setitem__(x > 3, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 3, 0.0),
    "its shape": lambda x: x.shape[0] * x.size(1) * len(x),
    "a network": lambda x: NETWORK(x).sum().backward(),
}


def _under(x: Tensor) -> Tensor:
    with x.device:
        return x + torch.zeros(3)


@pytest.mark.parametrize("act", GOOD.values(), ids=GOOD.keys())
def test_it_does_neither(act: Callable[[Tensor], Any]) -> None:
    calls = watched(act)
    assert (dict(calls.reads), dict(calls.made)) == ({}, {})


def test_what_paceline_does_itself_is_no_finding() -> None:
    calls = watched(lambda x: digest_of([x]))
    assert (dict(calls.reads), dict(calls.made)) == ({}, {})


def test_what_torchvision_does_itself_is_no_finding() -> None:
    from torchvision.models.detection._utils import BalancedPositiveNegativeSampler

    sampler = BalancedPositiveNegativeSampler(4, 0.5)
    assert not watched(lambda x: sampler([x.flatten()])).reads
    assert watched(lambda x: torch.where(x > 0)).reads


def test_a_profiler_that_is_on() -> None:
    def act(x: Tensor) -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            x.sum()

    assert list(watched(act).debugging) == ["profiler"]


def test_results_are_what_they_would_have_been() -> None:
    network = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 1))
    x = torch.randn(5, 3)
    plain = torch.autograd.grad(network(x).square().mean(), list(network.parameters()))
    with CallWatcher([x, *network.parameters()]):
        seen = torch.autograd.grad(network(x).square().mean(), list(network.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(plain, seen, strict=True))


def test_libraries_whose_names_begin_like_torch_are_others() -> None:
    def from_file(path: str) -> str | None:
        space: dict[str, Any] = {"sys": sys}
        exec(compile("def here(): return sys._getframe()", path, "exec"), space)
        found = place_of(space["here"]())
        return None if found is None else found.file

    assert from_file(f"{TORCH}nn/functional.py") == __file__  # whoever called it
    assert all(from_file(f"{ours}task.py") is None for ours in OURS)
    for path in (f"{TORCH.rstrip('/')}audio/ops.py", f"{OURS[0].rstrip('/')}s/task.py"):
        assert from_file(path) == path
