"""Runs that are killed with their run directory gone each time, and go on from the copy at an address.

``python object_runs.py FOLDER JSON`` writes what happened to FOLDER/outcome.json. Launches are copies of this process,
so that torch is imported once; nothing here may reach for the address itself, whose library has threads.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from paceline.cli.main import run as run_command_line
from paceline.records.reader import strip_timings

# Loaded once for all launches: what a run loads, and several processes (DDP and FSDP load the compiler). The library of
# the address begins its thread when it is first asked for something.
for module in ("paceline.trainer.train", "s3fs", "torch._dynamo", "torch.distributed.fsdp"):
    importlib.import_module(module)

RECIPE = (
    "digits",
    "model.options={width: 4, stages: 1, depth: 1, dropout: 0.2}",
    "data.validation_fraction=0.1",
    "batch.global_size=16",
    "train.ema=0.9",
    "schedule.warmup=2 steps",
    "evaluate.every=7 steps",
    "checkpoint.every=10 steps",
    "telemetry.log_every=1 steps",
    "telemetry.trackers=[]",
    "telemetry.report=false",
    "parallel.device=cpu",
    "parallel.threads=1",
)


def fork(arguments: list[str], folder: Path, rank: int, ranks: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    output = os.open(folder / f"said-{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if ranks > 1:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({name: str(value) for name, value in places.items()})
        os.environ["PACELINE_RENDEZVOUS"] = f"file://{folder}/rendezvous"
    code = 70
    try:
        code = run_command_line(["train", *RECIPE, *arguments])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Launch:
    def __init__(self, arguments: list[str], folder: Path, ranks: int) -> None:
        (folder / "rendezvous").unlink(missing_ok=True)
        self.pids = [fork(arguments, folder, rank, ranks) for rank in range(ranks)]
        self.codes: dict[int, int] = {}

    def is_over(self) -> bool:
        for pid in self.pids:
            if pid not in self.codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
        return len(self.codes) == len(self.pids)

    def wait(self, seconds: float) -> list[int]:
        deadline = time.monotonic() + seconds
        while not self.is_over():
            if time.monotonic() > deadline:
                self.kill()
                raise SystemExit("a launch did not end")
            time.sleep(0.05)
        return list(self.codes.values())

    def kill(self) -> None:
        for pid in self.pids:
            if pid not in self.codes:
                os.kill(pid, signal.SIGKILL)
        while not self.is_over():
            time.sleep(0.01)


def records(run_dir: Path) -> list[dict[str, Any]]:
    try:
        lines = (run_dir / "events.jsonl").read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def outcome(run_dir: Path) -> dict[str, Any]:
    summary = json.loads((run_dir / "summary.json").read_text())
    kept = ("status", "step", "samples", "weights_sha256", "ema_sha256", "metrics", "ledger")
    found = {key: summary[key] for key in kept}
    found["records"] = [strip_timings(event) for event in records(run_dir) if event["event"] in ("step", "evaluation")]
    return found


def wait_for_the_moment(launch: Launch, run_dir: Path, commits: Path, draw: random.Random) -> None:
    """Wait for a few records, or for a few more commits at the address, as the test counts them, and a while longer."""
    # At first something is to be there that the next launch goes on from.
    more = 1 if counted(commits) == 0 else draw.choice((0, 1, 1, 2))
    expected = counted(commits) + more
    while not launch.is_over() and (counted(commits) < expected if more else len(records(run_dir)) < 9):
        time.sleep(0.01)
    time.sleep(draw.uniform(0, 0.5))


def counted(path: Path) -> int:
    try:
        return int(path.read_text() or 0)
    except FileNotFoundError:
        return 0


def main(folder: Path, requested: dict[str, Any]) -> dict[str, Any]:
    draw = random.Random(requested["seed"])
    ranks, steps = requested["ranks"], requested["steps"]
    length = [f"train.duration={steps} steps", *requested["overrides"]]
    if not Launch([*length, "--run-dir", str(folder / "undisturbed")], folder, ranks).wait(120) == [0] * ranks:
        raise SystemExit("the undisturbed run failed")
    run_dir, begun_at = folder / "run", []
    arguments = [*length, f"checkpoint.mirror={requested['mirror']}", "--run-dir", str(run_dir)]
    for _ in range(requested["kills"]):
        shutil.rmtree(run_dir, ignore_errors=True)
        launch = Launch(arguments, folder, ranks)
        wait_for_the_moment(launch, run_dir, folder / "commits", draw)
        found = [event["step"] for event in records(run_dir) if event["event"] in ("start", "resume")]
        begun_at.append(found[-1] if found else None)
        launch.kill()
    shutil.rmtree(run_dir, ignore_errors=True)
    codes = Launch(arguments, folder, ranks).wait(200)
    output = "".join(path.read_text() for path in sorted(folder.glob("said-*.txt")))
    if codes != [0] * ranks:
        raise SystemExit(f"the last launch ended with {codes}: {output[-3000:]}")
    found = records(run_dir)
    return {
        "begun_at": begun_at,
        "mine": outcome(run_dir),
        "theirs": outcome(folder / "undisturbed"),
        "resumes": [event["step"] for event in found if event["event"] == "resume"],
        "positions": [event["position"] for event in found if event["event"] == "step"],
        "said": output,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    (Path(sys.argv[1]) / "outcome.json").write_text(json.dumps(main(Path(sys.argv[1]), json.loads(sys.argv[2]))))
