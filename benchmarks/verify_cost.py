"""Measure what `paceline verify` costs next to the steps it computes again, and what training pays for it.

A short and a long run of one stretch each are trained and verified, in turns. Processor seconds are counted for
the training that `verify` starts, which is the same program, and for `verify` itself. The difference between long and
short is the cost of the steps; the rest is start-up. `verify.every` is compared with a run without it.
What a step pays where it is off is timed alone: it is too little to see in a step.

    python benchmarks/verify_cost.py [--pairs 4] [--steps 50 250] [--dry-run]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from hardware import facts, spread, write_result

import paceline
from paceline.data.batch import Batch
from paceline.records.environment import code_digests
from paceline.trainer.listeners import Listener
from paceline.trainer.run import Run
from paceline.trainer.verifying import StepVerifier

KEYS = ("digits", "schedule.name=constant", "evaluate.every=off", "checkpoint.keep=99", "parallel.threads=1")
KEYS += ("telemetry.report=false", "telemetry.trackers=[]")
BLOCKS, CALLS, CHECKS = 40, 2000, 30
SOURCES, SOURCE_BYTES = 20, 20_000


def processor_seconds(*words: str) -> float:
    """Processor seconds of a command and its processes.

    Raises:
        RuntimeError: If it fails.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"`paceline {' '.join(words)}` ended with {os.waitstatus_to_exitcode(status)}")
    return used.ru_utime + used.ru_stime


def verified(run: str) -> tuple[float, float]:
    """Processor seconds of `verify` itself, and of the training that it starts."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    before = [resource.getrusage(each) for each in kinds]
    paceline.verify(run, all=True)
    after = [resource.getrusage(each) for each in kinds]
    own, started = (b.ru_utime + b.ru_stime - a.ru_utime - a.ru_stime for a, b in zip(before, after, strict=True))
    return own, started


def warmed_up(scratch: Path) -> str:
    """A run whose verification imports what every later one needs."""
    run = str(scratch / "warm")
    processor_seconds("train", *KEYS, "train.duration=5 steps", "checkpoint.every=5 steps", "--run-dir", run)
    return run


def pair(scratch: Path, number: int, steps: Sequence[int]) -> dict[str, dict[int, float]]:
    """Processor seconds of training and verifying runs of these lengths."""
    found: dict[str, dict[int, float]] = {"train": {}, "own": {}, "again": {}}
    for count in steps:
        run = str(scratch / f"{number}-{count}")
        duration = f"{count} steps"
        found["train"][count] = processor_seconds(
            "train", *KEYS, f"train.duration={duration}", f"checkpoint.every={duration}", "--run-dir", run
        )
        found["own"][count], found["again"][count] = verified(run)
    return found


def checks(scratch: Path, number: int) -> tuple[float, float]:
    """Processor seconds of a run with a save every ten steps, without and with a check of each."""
    words = ("train", *KEYS, f"train.duration={10 * CHECKS + 5} steps", "checkpoint.every=10 steps")
    found = [
        processor_seconds(*words, f"verify.every={every}", "--run-dir", str(scratch / f"{number}-{every}"))
        for every in ("off", "10 steps")
    ]
    return found[0], found[1]


def call_nanoseconds() -> float:
    """What verify and diff add to the calls of a step, less an empty loop; the median of blocks in turns."""
    verifier = StepVerifier(cast(Run, SimpleNamespace(plan=SimpleNamespace(verify_every_steps=None))))
    batches, listener, loss, times = iter(()), Listener(), torch.zeros(()), list[float]()
    for _ in range(BLOCKS):
        begun = time.process_time_ns()
        for _ in range(CALLS):
            batches = verifier.after_step(batches)
            listener.after_loss(loss)
            with listener.around_backward(cast(Batch, None)):
                pass
        between = time.process_time_ns()
        for _ in range(CALLS):
            pass
        times.append((between - begun - (time.process_time_ns() - between)) / CALLS)
    return statistics.median(times)


def digest_milliseconds(scratch: Path) -> float:
    """Processor time of the digests of your source files, which a launch takes once."""
    for number in range(SOURCES):
        name = f"own_{number}"
        (scratch / f"{name}.py").write_text("#" * SOURCE_BYTES)
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__file__ = str(scratch / f"{name}.py")
    times = []
    for _ in range(BLOCKS):
        begun = time.process_time_ns()
        code_digests(f"own_{number}:object" for number in range(SOURCES))
        times.append((time.process_time_ns() - begun) / 1e6)
    return statistics.median(times)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, nargs=2, default=[50, 250])
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    known, (short, long) = facts(), options.steps
    with tempfile.TemporaryDirectory(prefix="verify-cost-") as scratch:
        folder = Path(scratch)
        verified(warmed_up(folder))
        pairs = [pair(folder, number, options.steps) for number in range(options.pairs)]
        checked = [checks(folder, number) for number in range(options.pairs)]
        digests = digest_milliseconds(folder)
    steps = {kind: [(one[kind][long] - one[kind][short]) / (long - short) for one in pairs] for kind in pairs[0]}
    start = {
        kind: [one[kind][short] - short * each for one, each in zip(pairs, steps[kind], strict=True)] for kind in steps
    }
    step = statistics.median(steps["train"])
    check = spread([(on - off) / CHECKS / step for off, on in checked])
    call = call_nanoseconds()
    result: dict[str, Any] = {
        "steps": options.steps,
        "train_milliseconds_per_step": spread([1000 * each for each in steps["train"]]),
        "again_milliseconds_per_step": spread([1000 * each for each in steps["again"]]),
        "own_milliseconds_per_step": spread([1000 * each for each in steps["own"]]),
        "own_percent_of_step": spread([100 * each / step for each in steps["own"]]),
        "start_seconds": {kind: spread(each) for kind, each in start.items()},
        "check_in_steps": check,
        "call_nanoseconds": call,
        "call_percent_of_step": call / step / 1e7,
        "digests_milliseconds": digests,
        "pairs": pairs,
        "checked": checked,
    }
    own, starts = result["own_percent_of_step"], {kind: statistics.median(each) for kind, each in start.items()}
    times = [result[f"{kind}_milliseconds_per_step"] for kind in ("train", "again")]
    first, again = (f"{each['median']:.1f} ms ({each['minimum']:.1f} to {each['maximum']:.1f})" for each in times)
    lines = [
        f"`verify` adds {own['median']:.2f} % of a step to each step that it computes again ({own['minimum']:.2f} to",
        f"{own['maximum']:.2f}; {options.pairs} pairs of {short} and {long} steps, processor time).",
        f"A step takes {first} in the run, and {again} again.",
        f"Start-up: {starts['train']:.1f} s to train; for a stretch {starts['again']:.1f} s to train it and",
        f"{starts['own']:.1f} s to open the data and compare.",
        "",
        f"For verify and diff, a step of a run records nothing, and calls functions of {call:.0f} ns,",
        f"{result['call_percent_of_step']:.4f} % of a step (median of {BLOCKS} pairs of {CALLS} calls).",
        "",
        f"A check of `verify.every` costs {check['median']:.1f} steps ({check['minimum']:.1f} to",
        f"{check['maximum']:.1f}).",
        f"Digests of {SOURCES} source files of {SOURCE_BYTES // 1000} kB take {digests:.1f} ms, once a launch.",
    ]
    print("\n".join(lines))
    if not options.dry_run:
        print(write_result("verify-cost", result, lines, known))


if __name__ == "__main__":
    main()
