"""Two-process runs under a disk that refuses, or a death, at a chosen file operation of one save.

Run as a program, because the patched functions and the kills must not reach the test runner:
``python disk_runs.py DIRECTORY`` prints one JSON object of what happened. Every rank is a copy of this process, so
that torch is imported once for hundreds of runs.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.store import CheckpointStore
from paceline.cli.main import run as run_command_line
from paceline.records.reader import strip_timings

# What watches the file operations of a single save elsewhere.
sys.path.append(str(Path(__file__).parents[1] / "unit" / "checkpoint"))
import disk_trials

RANKS = 2
# Saves at steps 3, 6 and 8; the one of step 6 is disturbed, and deletes that of step 3 when it is done.
RECIPE = (
    "digits",
    "model.options={width: 4, stages: 1, depth: 1, dropout: 0.2}",
    "data.validation_fraction=0.1",
    "batch.global_size=16",
    "train.duration=8 steps",
    "train.ema=0.9",
    "schedule.warmup=2 steps",
    "evaluate.every=4 steps",
    "checkpoint.every=3 steps",
    "checkpoint.keep=1",
    "checkpoint.keep_best=false",
    "telemetry.log_every=1 steps",
    "telemetry.trackers=[]",
    "parallel.device=cpu",
    "parallel.threads=1",
)
DISTURBED, BEFORE = "step-00000006", "step-00000003"
COMPONENTS = (".safetensors", ".json")
LIMIT_SECONDS = 60.0
ERRORS = (errno.ENOSPC, errno.EACCES, errno.EIO)

Act = Callable[[str, object], None]


def path_of(target: object) -> str:
    return os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)  # type: ignore[call-overload,no-any-return]


class Fault:
    """Strikes at the k-th file operation: of the disturbed save's thread, or of the flushes of records before it."""

    def __init__(self, where: str, at: int, code: int | None, note: Path) -> None:
        self.where, self.at, self.code, self.note = where, at, code, note
        self.begun = False
        self.seen: list[str] = []

    def __call__(self, operation: str, target: object) -> None:
        in_writer = threading.current_thread().name.startswith("checkpoint")
        path = path_of(target)
        if self.where == "writer":
            self.begun |= in_writer and f".saving-{DISTURBED}" in path
            counts = in_writer and self.begun
        else:
            counts = not in_writer and operation == "fsync" and path.endswith((".jsonl", ".ids"))
        if not counts:
            return
        self.seen.append(f"{operation} {path}")
        if len(self.seen) <= self.at:
            self.note.write_text("\n".join(self.seen))
        if len(self.seen) != self.at:
            return
        if self.code is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(self.code, os.strerror(self.code), None if isinstance(target, int) else path)


def rank(number: int, run_dir: Path, scratch: Path, fault: Act | None) -> int:
    """Fork a rank; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    err = os.open(scratch / f"{number}.err", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(err, 2)
    os.dup2(err, 1)
    places = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    os.environ |= {name: str(value) for name, value in places.items()}
    os.environ |= {"PACELINE_RENDEZVOUS": f"file://{scratch}/rendezvous", "GLOO_SOCKET_IFNAME": "lo"}
    code = 70
    try:
        if fault is None:
            code = run_command_line(["train", *RECIPE, "--run-dir", str(run_dir)])
        else:
            with disk_trials.watched_disk(fault):
                code = run_command_line(["train", *RECIPE, "--run-dir", str(run_dir)])
    finally:
        (scratch / f"{number}.modules").write_text("\n".join(sys.modules))
        sys.stderr.flush()
        os._exit(code)


def launch(run_dir: Path, faults: dict[int, Act] | None = None) -> dict[str, Any]:
    """Run all ranks to their end; returns exit codes (negative: by that signal) and what they said."""
    scratch = run_dir.with_name(f"{run_dir.name}-scratch")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    pids = [rank(number, run_dir, scratch, (faults or {}).get(number)) for number in range(RANKS)]
    codes: dict[int, int] = {}
    deadline = time.monotonic() + LIMIT_SECONDS
    while len(codes) < RANKS:
        for number, pid in enumerate(pids):
            if number not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[number] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for number, pid in enumerate(pids):
                if number not in codes:
                    os.kill(pid, signal.SIGABRT)
            deadline += 5
        time.sleep(0.002)
    said = [(scratch / f"{number}.err").read_text() for number in range(RANKS)]
    return {"codes": [codes[number] for number in range(RANKS)], "said": [text[-2000:] for text in said]}


def import_what_a_run_imports(scratch: Path) -> None:
    """Once, here, instead of in every rank: most of a short run's time."""
    for name in (scratch / "0.modules").read_text().splitlines():
        if name.startswith(("torch.", "paceline.", "sklearn.")) and name not in sys.modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def outcome(run_dir: Path) -> dict[str, Any]:
    """What a run came to, without what a clock decided."""
    summary = json.loads((run_dir / "summary.json").read_text())
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    records = [strip_timings(line) for line in lines if line["event"] in ("step", "evaluation")]
    keys = ("status", "step", "weights_sha256", "ema_sha256", "metrics", "ledger")
    return {**{key: summary[key] for key in keys}, "records": records}


def trial(directory: Path, where: str, number: int, at: int, code: int | None) -> dict[str, Any] | None:
    """One fault, and the same command again; None if there are not that many operations."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    run_dir, note = directory / "run", directory / "struck"
    first = launch(run_dir, {number: Fault(where, at, code, note)})
    if not note.exists() or len(note.read_text().splitlines()) < at:
        return None
    store = CheckpointStore(run_dir / "checkpoints")
    path, damaged = store.newest_complete()
    found = {
        "where": where,
        "rank": number,
        "at": at,
        "fault": "SIGKILL" if code is None else errno.errorcode[code],
        "struck": note.read_text().splitlines()[-1],
        **first,
        "newest": None if path is None else path.name,
        "damaged": [one.reason for one in damaged],
        "names": sorted(entry.name for entry in store.directory.iterdir()),
    }
    again = launch(run_dir)
    found["again"] = again
    found["same"] = again["codes"] == [0] * RANKS and outcome(run_dir) == UNDISTURBED
    found["left"] = sorted(entry.name for entry in store.directory.iterdir())
    return found


def operations(directory: Path, where: str, number: int) -> list[str]:
    """The file operations of a run that nothing happens to."""
    directory.mkdir()
    fault = Fault(where, sys.maxsize, None, directory / "seen")
    done = launch(directory / "run", {number: fault})
    assert done["codes"] == [0] * RANKS, done
    return (directory / "seen").read_text().splitlines()


def first_of_each_kind(seen: list[str]) -> list[int]:
    """Where each kind of operation on each kind of file comes first, counted from 1."""
    kinds: dict[tuple[str, str], int] = {}
    for at, line in enumerate(seen, start=1):
        operation, _, path = line.partition(" ")
        name = re.sub("[0-9a-f]{8}", "#", Path(path).name)
        kinds.setdefault((operation, Path(path).suffix if name.endswith(COMPONENTS) else name), at)
    return sorted(kinds.values())


def trials(directory: Path) -> list[dict[str, Any]]:
    """At each kind of operation on each kind of file a refusal, by one error after the other, or a death, in turn."""
    found = []
    for where, number in (("writer", 0), ("records", 0), ("records", 1)):
        seen = operations(directory / f"{where}-{number}", where, number)
        # The records are flushed before every save; those of the first two tell enough.
        places = first_of_each_kind(seen) if where == "writer" else range(1, 3 + (number == 0))
        for turn, at in enumerate(places):
            refusal = ERRORS[turn // 2 % len(ERRORS)]
            for code in (refusal, None) if where == "records" else (None if turn % 2 else refusal,):
                one = trial(directory / "trial", where, number, at, code)
                assert one is not None, (where, number, at)
                found.append(one)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    ROOT = Path(sys.argv[1])
    first = launch(ROOT / "undisturbed")
    assert first["codes"] == [0] * RANKS, first
    import_what_a_run_imports(ROOT / "undisturbed-scratch")
    UNDISTURBED = outcome(ROOT / "undisturbed")
    print(json.dumps(trials(ROOT)))
