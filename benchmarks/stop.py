"""How long after SIGTERM has a run made its last step, saved everything, and left?

A run of steps that take long is asked to stop at a moment drawn by lot. The step is timed by its records, the save from
its record to the manifest that makes it whole. One process ends the step at hand. Several agree when their gradients
have been reduced: a process that is asked later than that makes one more step.

    python benchmarks/stop.py [--trials 10] [--processes 1 2] [--seed 0] [--dry-run]
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hardware import spread, write_result
from resume import Launch, events_of, last_step

LONGEST_STEP_SECONDS = 2.0
RECIPE: dict[str, Any] = {
    "model": {"name": "resnet18"},
    "data": {"dataset": "synthetic", "image_size": 112},
    "batch": {"global_size": 32},
    "optimizer": {"lr": 0.01},
    "train": {"duration": "1000 steps", "precision": "fp32"},
    "evaluate": {"every": "off"},
    "checkpoint": {"every": "off"},
    "parallel": {"device": "cpu", "threads": 1},
    "telemetry": {"log_every": "1 steps", "trackers": []},
}


def trial(run: Path, processes: int, rng: random.Random) -> dict[str, float]:
    """Stop a run once; seconds from the signal, and what a step and the save took."""
    launch = Launch(run.parent, run, processes=processes)
    try:
        launch.wait_for(lambda: last_step(run) >= 3)
        time.sleep(rng.uniform(0, LONGEST_STEP_SECONDS))
        requested = time.time()
        launch.process.send_signal(signal.SIGTERM)
        if (code := launch.wait()) != 75:
            raise RuntimeError(f"the run ended with exit code {code}:\n{launch.log()}")
        left = time.time()
    finally:
        launch.end()
    steps = [event["time"] for event in events_of(run) if event["event"] == "step"]
    saving = [event["time"] for event in events_of(run) if event["event"] == "checkpoint"][-1]
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    saved = (checkpoint / "manifest.json").stat().st_mtime
    step = statistics.median(after - before for before, after in pairwise(steps))
    return {
        "step_seconds": step,
        "save_seconds": saved - saving,
        "last_step_after_steps": max(0.0, steps[-1] - requested) / step,
        "saved_after_seconds": saved - requested,
        "left_after_seconds": left - requested,
    }


def measure(studio: Path, processes: int, trials: int, rng: random.Random) -> dict[str, Any]:
    """Several stops of runs of so many processes."""
    found = [trial(studio / f"run-{processes}-{number}", processes, rng) for number in range(trials)]
    return {"processes": processes, **{key: spread([each[key] for each in found]) for key in found[0]}}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0, help="of the lots")
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="stop-") as scratch:
        studio = Path(scratch)
        (studio / "recipe.yaml").write_text(json.dumps(RECIPE))
        rows = [measure(studio, processes, options.trials, rng) for processes in options.processes]
    lines = [
        f"{row['processes']} process{'es' if row['processes'] > 1 else ''}: after SIGTERM the last step ended within "
        f"{row['last_step_after_steps']['maximum']:.2f} times a step's time (median "
        f"{row['last_step_after_steps']['median']:.2f}; a step takes {row['step_seconds']['median']:.2f} s), the "
        f"checkpoint was whole after {row['saved_after_seconds']['median']:.2f} s (at most "
        f"{row['saved_after_seconds']['maximum']:.2f}; the save alone {row['save_seconds']['median']:.2f}), and the "
        f"processes had left after {row['left_after_seconds']['median']:.2f} s (at most "
        f"{row['left_after_seconds']['maximum']:.2f}); {row['left_after_seconds']['runs']} trials."
        for row in rows
    ]
    print("\n".join(lines))
    if not options.dry_run:
        print(write_result("stop-latency", {"measurements": rows, "recipe": RECIPE}, lines))


if __name__ == "__main__":
    main()
