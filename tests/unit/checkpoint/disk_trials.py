"""Saves under a disk that refuses, or a process that dies, at a chosen file operation.

Run as a program, because the patched functions and the kills must not reach the test runner:
``python disk_trials.py DIRECTORY faults deaths kills trace`` prints one JSON object of what happened.
"""

from __future__ import annotations

import builtins
import errno
import itertools
import json
import os
import random
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.manifest import read_components
from paceline.checkpoint.store import Best, CheckpointStore
from paceline.errors import CheckpointError

Act = Callable[[str, object], None]
PATCHED = ("mkdir", "rename", "fsync", "open", "unlink", "rmdir")


class WatchedFile:
    """A real file whose writes are announced; half of the bytes are written before a write can fail."""

    def __init__(self, file: Any, act: Act) -> None:
        self.file, self.act = file, act

    def write(self, chunk: Any) -> int:
        half = memoryview(chunk)[: len(chunk) // 2]
        self.file.write(half)
        self.file.flush()
        self.act("write", self.file.name)
        return self.file.write(memoryview(chunk)[len(half) :])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> WatchedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


@contextmanager
def watched_disk(act: Act) -> Iterator[None]:
    """Call ``act(operation, path)`` before each file operation."""
    real = {name: getattr(os, name) for name in PATCHED}
    real_open = builtins.open

    def patched(name: str) -> Callable[..., Any]:
        def operation(target: Any, *args: Any, **kwargs: Any) -> Any:
            act(name, target)
            return real[name](target, *args, **kwargs)

        return operation

    def opened(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        act("create" if "x" in mode else "read", path)
        file = real_open(path, mode, *args, **kwargs)
        return WatchedFile(file, act) if "x" in mode else file

    for name in PATCHED:
        setattr(os, name, patched(name))
    builtins.open = opened
    try:
        yield
    finally:
        for name in PATCHED:
            setattr(os, name, real[name])
        builtins.open = real_open


def components(value: float) -> dict[str, dict[str, Any]]:
    return {"model": {"w": torch.full((300,), value), "n": torch.tensor(int(value))}, "counters": {"value": value}}


def value_of(path: Path) -> float:
    states = read_components(path)
    value = states["counters"]["value"]
    assert torch.equal(states["model"]["w"], components(value)["model"]["w"])
    return float(value)


def prepare(directory: Path) -> CheckpointStore:
    shutil.rmtree(directory, ignore_errors=True)
    store = CheckpointStore(directory)
    for step in (1, 2):
        store.save(step, components(step), {})
    store.write_best(Best(1, "accuracy", 1.0))
    # What a killed save leaves, so that its removal is among the operations.
    (directory / ".saving-step-00000003-0123abcd").mkdir()
    (directory / ".saving-step-00000003-0123abcd" / "model.json").write_text("{")
    return store


ACTIONS: dict[str, Callable[[CheckpointStore], object]] = {
    "save": lambda store: store.save(3, components(3), {}),
    "replace": lambda store: store.save(2, components(22), {}, replace=True),
    "prune": lambda store: store.prune(keep=1),
    "best": lambda store: store.write_best(Best(2, "accuracy", 2.0)),
}


def outcome(store: CheckpointStore) -> dict[str, Any]:
    """Say what is found afterwards, before and after the next save."""
    path, damaged = store.newest_complete()
    steps = store.steps()
    best = store.read_best()
    found = {
        "newest": None if path is None else value_of(path),
        "damaged": [one.reason for one in damaged],
        "values": [value_of(store.path(step)) for step in steps],
        "best": None if best is None else best.value,
    }
    store.save(9, components(9), {})
    store.write_best(Best(9, "accuracy", 9.0))
    found["left"] = sorted(entry.name for entry in store.directory.iterdir())
    return found


def refusal(seen: list[str], at: int, code: int) -> Act:
    def refuse(name: str, path: object) -> None:
        seen.append(name)
        if len(seen) == at:
            raise OSError(code, os.strerror(code), None if isinstance(path, int) else path)

    return refuse


def death(at: int) -> Act:
    count = iter(range(1, 1000))

    def die(name: str, path: object) -> None:
        if next(count) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return die


def faults(directory: Path) -> list[dict[str, Any]]:
    """Refuse the k-th operation, for every k."""
    trials = []
    for action, code in itertools.product(ACTIONS, (errno.ENOSPC, errno.EACCES)):
        for at in range(1, 200):
            trial = one_fault(directory, action, at, code)
            if trial is None:
                break
            trials.append(trial)
    return trials


def one_fault(directory: Path, action: str, at: int, code: int) -> dict[str, Any] | None:
    """Refuse one operation; None if the action has fewer."""
    store, error = prepare(directory), None
    operations: list[str] = []
    with watched_disk(refusal(operations, at, code)):
        try:
            ACTIONS[action](store)
        except CheckpointError as caught:
            error = {"message": str(caught), "cause": type(caught.__cause__).__name__}
    if len(operations) < at:
        return None
    names = [entry.name for entry in directory.iterdir()]
    trial = {"action": action, "code": errno.errorcode[code], "operation": operations[at - 1]}
    return {**trial, "error": error, "names": names, **outcome(store)}


def deaths(directory: Path) -> list[dict[str, Any]]:
    """Die by SIGKILL before the k-th operation, for every k."""
    trials = []
    for action, perform in ACTIONS.items():
        for at in range(1, 200):
            store = prepare(directory)
            child = os.fork()
            if child == 0:
                with watched_disk(death(at)):
                    perform(store)
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            if not os.WIFSIGNALED(status):
                assert os.WEXITSTATUS(status) == 0
                break
            trials.append({"action": action, "at": at, **outcome(store)})
    return trials


def kills(directory: Path, count: int = 18) -> list[dict[str, Any]]:
    """Kill a loop of saves and deletions, and go on from what is left.

    By turns after none, one or two saves and a random delay, so that some advance however slow the machine is.
    """
    draw = random.Random()
    trials = []
    store = CheckpointStore(directory)
    for number in range(count):
        path, damaged = store.newest_complete()
        first = 1 if path is None else int(value_of(path)) + 1
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            for step in range(first, first + 10_000):
                store.save(step, components(step), {})
                os.write(writer, struct.pack("q", step))
                store.write_best(Best(step, "accuracy", step))
                store.prune(keep=2)
        os.close(writer)
        heard = b"".join(os.read(reader, 8) for _ in range(number % 3))
        time.sleep(draw.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the loop ended by itself"
        with open(reader, "rb") as pipe:
            acknowledged = [step for (step,) in struct.iter_unpack("q", heard + pipe.read())]
        path, damaged = store.newest_complete()
        best = store.read_best()
        trials.append(
            {
                "acknowledged": acknowledged[-1] if acknowledged else first - 1,
                "newest": 0 if path is None else value_of(path),
                "damaged": [one.reason for one in damaged],
                "best": 0 if best is None else best.step,
            }
        )
    store.save(10_000_000, components(0), {})
    trials[-1]["pruned"] = store.prune(keep=2)
    trials[-1]["kept"] = store.steps()
    return trials


def trace(directory: Path) -> list[list[str]]:
    """List the file operations of one save and one deletion, with paths relative to the store."""
    store = CheckpointStore(directory)
    store.save(1, components(1), {})
    seen: list[list[str]] = []

    def note(name: str, target: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
        seen.append([name, os.path.relpath(path, directory) if os.path.isabs(path) else path])

    with watched_disk(note):
        store.save(2, components(2), {})
        store.prune(keep=1)
    return seen


MODES: dict[str, Callable[[Path], Any]] = {"faults": faults, "deaths": deaths, "kills": kills, "trace": trace}

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({mode: MODES[mode](Path(sys.argv[1]) / mode) for mode in sys.argv[2:]}))
