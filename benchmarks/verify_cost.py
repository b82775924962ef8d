"""What does `paceline verify` cost next to the steps it computes again, and what does training pay for it?

A short and a long run of one stretch each are trained and verified, in turns. Processor seconds of all processes are
counted: the difference between long and short is the cost of the steps, the rest is start-up. `verify.every` is
compared with a run without it. What a step pays where it is off is timed alone: it is too little to see in a step.

    python benchmarks/verify_cost.py [--pairs 5] [--steps 40 240] [--dry-run]
"""

from __future__ import annotations

import argparse
import os
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

from paceline.data.batch import Batch
from paceline.records.environment import code_digests
from paceline.trainer.listeners import Listener
from paceline.trainer.run import Run
from paceline.trainer.verifying import StepVerifier

KEYS = ("digits", "schedule.name=constant", "evaluate.every=off", "checkpoint.keep=99", "parallel.threads=1")
KEYS += ("telemetry.report=false", "telemetry.trackers=[]")
BLOCKS, CALLS, CHECKS = 40, 2000, 12
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


def pair(scratch: Path, number: int, steps: Sequence[int]) -> dict[str, dict[int, float]]:
    """Processor seconds of training and verifying runs of these lengths."""
    found: dict[str, dict[int, float]] = {"train": {}, "verify": {}}
    for count in steps:
        run = str(scratch / f"{number}-{count}")
        duration = f"{count} steps"
        found["train"][count] = processor_seconds(
            "train", *KEYS, f"train.duration={duration}", f"checkpoint.every={duration}", "--run-dir", run
        )
        found["verify"][count] = processor_seconds("verify", run, "--all")
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
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, nargs=2, default=[40, 240])
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    known, (short, long) = facts(), options.steps
    with tempfile.TemporaryDirectory(prefix="verify-cost-") as scratch:
        folder = Path(scratch)
        pairs = [pair(folder, number, options.steps) for number in range(options.pairs)]
        checked = [checks(folder, number) for number in range(options.pairs)]
        digests = digest_milliseconds(folder)
    steps = {kind: [(one[kind][long] - one[kind][short]) / (long - short) for one in pairs] for kind in pairs[0]}
    start = {
        kind: [one[kind][short] - short * each for one, each in zip(pairs, steps[kind], strict=True)] for kind in steps
    }
    ratios = [again / first for first, again in zip(steps["train"], steps["verify"], strict=True)]
    step = statistics.median(steps["train"])
    check = spread([(on - off) / CHECKS / step for off, on in checked])
    call = call_nanoseconds()
    result: dict[str, Any] = {
        "steps": options.steps,
        "ratio": spread(ratios),
        "train_milliseconds_per_step": spread([1000 * each for each in steps["train"]]),
        "verify_milliseconds_per_step": spread([1000 * each for each in steps["verify"]]),
        "train_start_seconds": spread(start["train"]),
        "verify_start_seconds": spread(start["verify"]),
        "check_in_steps": check,
        "call_nanoseconds": call,
        "call_percent_of_step": call / step / 1e7,
        "digests_milliseconds": digests,
        "pairs": pairs,
        "checked": checked,
    }
    ratio, starts = result["ratio"], [result[f"{kind}_start_seconds"]["median"] for kind in steps]
    lines = [
        f"A step that `verify` computes again takes {ratio['median']:.3f} times the processor time of a training's step.",
        f"Median of {options.pairs} pairs, {short} and {long} steps of {1000 * step:.1f} ms; {ratio['minimum']:.3f} to",
        f"{ratio['maximum']:.3f}. Start-up: {starts[0]:.1f} s to train, {starts[1]:.1f} s to verify one stretch.",
        "",
        f"For verify and diff, a step calls functions of {call:.0f} ns, {result['call_percent_of_step']:.4f} % of it",
        f"(median of {BLOCKS} pairs of {CALLS} calls), and records nothing.",
        "",
        f"A check of `verify.every` costs {check['median']:.1f} steps ({check['minimum']:.1f} to {check['maximum']:.1f}).",
        f"Digests of {SOURCES} source files of {SOURCE_BYTES // 1000} kB take {digests:.1f} ms, once a launch.",
    ]
    print("\n".join(lines))
    if not options.dry_run:
        print(write_result("verify-cost", result, lines, known))


if __name__ == "__main__":
    main()
