"""Does a run that is killed at any step, and started again, end with the bits of one that never was?

A run of two processes with everything that could lose its place (accumulation, augmentation, dropout, BatchNorm,
bf16, a moving average, loader processes, a ragged last step) is trained once without a stop. Then, trial by trial,
the same command is started anew, ended by SIGKILL (of everyone, of all ranks, of one rank, of one loader process) at
a step drawn by lot, started again and let to its end. Digests of weights and average, metrics, and every step and
evaluation record without its clock fields must be equal to those of the first run, and ``paceline audit`` must have
no objection.

Recovery is the time from the second start to the record of a step that the killed run had not recorded yet.

On a GPU (``--device cuda``) one process trains deterministically, and who is killed is everyone, it, or a loader.

    python benchmarks/resume.py [--trials 20] [--seed 0] [--steps 40] [--device cuda] [--dry-run]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hardware import spread, write_result
from PIL import Image

from paceline.records.reader import strip_timings

MARK = "PACELINE_BENCHMARK_FAMILY"
PROCESSES = 2
TRAIN_SAMPLES, VALIDATION_SAMPLES = 90, 33  # five steps of 16 an epoch, and a last one of 10
VICTIMS = ("everyone", "a loader process", "all ranks", "rank 0", "rank 1")
LIMIT = 300.0
RECIPE: dict[str, Any] = {
    "seed": 3,
    "model": {"name": "small_resnet", "options": {"width": 8, "stages": 1, "dropout": 0.2}},
    "data": {
        "dataset": "image_folder",
        "path": "photos",
        "backend": "pytorch",
        "workers": 2,
        "augment": {"crop": "pad", "padding": 2, "flip": 0.5},
    },
    "batch": {"global_size": 16, "micro_size": 4},
    "optimizer": {"lr": 0.02, "weight_decay": 0.0005, "clip_norm": 1.0},
    "schedule": {"warmup": "5 steps"},
    "train": {"precision": "bf16", "ema": 0.9, "label_smoothing": 0.1},
    "evaluate": {"every": "5 steps", "batch_size": 8},
    "checkpoint": {"every": "7 steps"},
    "parallel": {"device": "cpu", "threads": 1},
    "telemetry": {"log_every": "1 steps", "trackers": []},
}


def write_photos(root: Path) -> None:
    """Three classes of noisy JPEG images, each a little redder, greener or bluer than noise."""
    generator = np.random.default_rng(0)
    for split, count in (("train", TRAIN_SAMPLES // 3), ("val", VALIDATION_SAMPLES // 3)):
        for channel, name in enumerate(("red", "green", "blue")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 226, (16, 16, 3), dtype=np.uint8)
                pixels[..., channel] += 30
                Image.fromarray(pixels).save(folder / f"{number:03d}.jpg", quality=90)


class Launch:
    """``paceline train`` with all its processes, known by a mark in their environment."""

    def __init__(
        self,
        studio: Path,
        run: Path,
        *,
        processes: int | None = None,
        torchrun: Sequence[str] = (),
        before: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start it; with options of torchrun by that, and behind words that take it to another host."""
        self._mark = uuid.uuid4().hex
        self._log = studio / f"{self._mark}.log"
        head = ["-m", "torch.distributed.run", *torchrun] if torchrun else []
        tail = [] if torchrun else ["--processes", str(processes or PROCESSES)]
        command = [*before, sys.executable, *head, "-m", "paceline", "train", "recipe.yaml", *tail]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--run-dir", str(run)],
                cwd=studio,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **(variables or {}), MARK: self._mark},
            )

    def family(self) -> dict[int, dict[str, str]]:
        """Process ids that are alive, with their environments."""
        found = {}
        for entry in Path("/proc").iterdir():
            variables = environment_of(int(entry.name)) if entry.name.isdigit() else {}
            if variables.get(MARK) == self._mark:
                found[int(entry.name)] = variables
        return found

    def _ranks_and_loaders(self) -> tuple[dict[int, int], list[int]]:
        alone = {} if PROCESSES > 1 else {"RANK": "0"}  # one process is the command itself
        variables = {pid: {**alone, **each} for pid, each in self.family().items()}
        inside = {pid: int(each["RANK"]) for pid, each in variables.items() if "RANK" in each}
        parents = {pid: parent_of(pid) for pid in inside}
        ranks = {rank: pid for pid, rank in inside.items() if parents[pid] not in inside}
        loaders = [
            pid for pid in inside if parents[pid] in ranks.values() and command_of(pid) == command_of(parents[pid])
        ]
        return ranks, sorted(loaders)

    def victims(self, which: str, rng: random.Random) -> list[int]:
        """The processes that ``which`` stands for, as soon as all are started."""
        wanted = PROCESSES * (1 + int(RECIPE["data"]["workers"]))
        self.wait_for(lambda: sum(map(len, self._ranks_and_loaders())) >= wanted)
        ranks, loaders = self._ranks_and_loaders()
        match which:
            case "everyone":
                return list(self.family())
            case "all ranks":
                return list(ranks.values())
            case "a loader process":
                return [rng.choice(loaders)]
            case _:
                return [ranks[int(which.removeprefix("rank "))]]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so; the launch must not end before."""
        deadline = time.monotonic() + LIMIT
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise RuntimeError(f"it ended, or {LIMIT:.0f} s went by, too early:\n{self._log.read_text()}")
            time.sleep(0.001)

    def wait(self) -> int:
        """Wait for the end of the launch and of its last process; returns the exit code."""
        code = self.process.wait(LIMIT)
        deadline = time.monotonic() + 30
        while self.family():
            if time.monotonic() > deadline:
                raise RuntimeError("processes are left 30 s after the end of their launch")
            time.sleep(0.02)
        return code

    def end(self) -> None:
        """SIGKILL whoever is left."""
        while family := self.family():
            kill(list(family))
            time.sleep(0.02)
        self.process.wait()

    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")


def environment_of(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty if it is gone."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def parent_of(pid: int) -> int:
    """The parent's process id; 0 if the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def command_of(pid: int) -> bytes:
    """Its command line: a fork has its parent's, a helper of Python's own does not."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def kill(pids: Sequence[int]) -> None:
    """SIGKILL them all."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def events_of(run: Path) -> list[dict[str, Any]]:
    """Records of a run; what a kill left of a last one does not count."""
    try:
        lines = (run / "events.jsonl").read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def last_step(run: Path) -> int:
    """The last step that a run has a record of."""
    return max((event["step"] for event in events_of(run) if event["event"] == "step"), default=0)


def newest_checkpoint(run: Path) -> int:
    """The step a run will resume from."""
    found = (run / "checkpoints").glob("step-????????")
    return max((int(path.name.removeprefix("step-")) for path in found), default=0)


def outcome(run: Path) -> dict[str, Any]:
    """Everything in which two runs of the same thing must be equal."""
    summary = json.loads((run / "summary.json").read_text())
    keys = ("status", "step", "epoch", "samples", "weights_sha256", "ema_sha256", "metrics", "ledger")
    records = [strip_timings(event) for event in events_of(run) if event["event"] in ("step", "evaluation")]
    return {**{key: summary[key] for key in keys}, "records": records}


def audit_problems(run: Path) -> list[str]:
    """What ``paceline audit`` has to object."""
    command = [sys.executable, "-m", "paceline", "audit", str(run), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    document = json.loads(done.stdout)
    return [] if document["passed"] and done.returncode == 0 else document["objections"] or [done.stderr]


def trial(run: Path, at: int, which: str, expected: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Kill a run once, as soon as it has recorded a step, resume it, and compare."""
    studio = run.parent
    launch = Launch(studio, run)
    try:
        victims = launch.victims(which, rng)  # looked up before: a run would go on meanwhile
        launch.wait_for(lambda: last_step(run) >= at)
        kill(victims)
        if which == "everyone":
            launch.end()
        ended_with = launch.wait()
        if ended_with == 0:
            raise RuntimeError(f"the run was not ended by the death of {which}:\n{launch.log()}")
    finally:
        launch.end()
    reached, resumed_from = last_step(run), newest_checkpoint(run)
    started = time.perf_counter()
    launch = Launch(studio, run)
    try:
        launch.wait_for(lambda: last_step(run) > reached)
        seconds = time.perf_counter() - started
        if launch.wait():
            raise RuntimeError(f"the resumed run failed:\n{launch.log()}")
    finally:
        launch.end()
    found, objections = outcome(run), audit_problems(run)
    return {
        "kill_step": reached,
        "killed": which,
        "resumed_from": resumed_from,
        "steps_lost": reached - resumed_from,
        "seconds_to_recover": seconds,
        "differs_in": [key for key in expected if found[key] != expected[key]],
        "audit_objections": objections,
        "equal": found == expected and not objections,
    }


def undisturbed(studio: Path) -> dict[str, Any]:
    """Train without a stop."""
    run = studio / "undisturbed"
    launch = Launch(studio, run)
    try:
        if launch.wait():
            raise RuntimeError(f"the undisturbed run failed:\n{launch.log()}")
    finally:
        launch.end()
    return outcome(run)


def row(cells: Sequence[object]) -> str:
    """A line of the table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def table_row(number: int, found: dict[str, Any]) -> str:
    """A trial as a line of the table."""
    differs = ", ".join(found["differs_in"] + found["audit_objections"])
    verdict = "yes" if found["equal"] else f"no: {differs}"
    seconds = f"{found['seconds_to_recover']:.1f}"
    return row((number, found["kill_step"], found["killed"], found["steps_lost"], seconds, verdict))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials, write the result files; 1 if a trial differs."""
    global PROCESSES  # noqa: PLW0603  # what every launch and victim of this program is counted by
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the lots: the steps, and the order of who is killed")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    if options.device == "cuda":
        PROCESSES = 1
        RECIPE["parallel"]["device"] = "cuda"
        RECIPE["train"]["deterministic"] = True
    rng = random.Random(options.seed)
    table = [row(("trial", "kill step", "killed", "steps lost", "seconds to recover", "equal")), row(["---"] * 6)]
    trials: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="resume-") as scratch:
        studio = Path(scratch)
        write_photos(studio / "photos")
        recipe = {**RECIPE, "train": {**RECIPE["train"], "duration": f"{options.steps} steps"}}
        (studio / "recipe.yaml").write_text(json.dumps(recipe))
        expected = undisturbed(studio)
        print("\n".join(table), flush=True)
        # Each kind equally often.
        victims = VICTIMS[: 3 + PROCESSES]
        kinds = [victims[number % len(victims)] for number in range(options.trials)]
        for number, which in enumerate(rng.sample(kinds, len(kinds)), start=1):
            at = rng.randint(1, options.steps - 1)
            trials.append(trial(studio / f"trial-{number}", at, which, expected, rng))
            table.append(table_row(number, trials[-1]))
            print(table[-1], flush=True)
    equal = sum(one["equal"] for one in trials)
    lost = spread([one["steps_lost"] for one in trials])
    seconds = spread([one["seconds_to_recover"] for one in trials])
    line = (
        f"{equal} of {len(trials)} runs on {PROCESSES} rank(s) that were killed at a random step of {options.steps} "
        f"and resumed ended bit for bit as the undisturbed run; {lost['median']:.0f} recorded steps were lost (median; "
        f"{lost['minimum']:.0f} to {lost['maximum']:.0f}), {seconds['median']:.1f} s until the run was further than "
        f"before ({seconds['minimum']:.1f} to {seconds['maximum']:.1f})."
    )
    print(f"\n{line}")
    if not options.dry_run:
        result = {"steps": options.steps, "recipe": recipe, "trials": trials, "steps_lost": lost}
        print(write_result("kill-and-resume", {**result, "seconds_to_recover": seconds}, [line, "", *table]))
    return int(equal < len(trials))


if __name__ == "__main__":
    sys.exit(main())
