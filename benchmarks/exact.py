"""What do the same bits from any number of processes cost, beside torch's DistributedDataParallel?

The same recipe with the same micro-batches, exact and not, in turns (A B A B …), on as many processes of one machine.
The ratio is of seconds per step, warm-up steps left out, as each run's summary tells them. On a CPU an exact run uses
one thread per process; the other is given the same.

    python benchmarks/exact.py [--processes 2] [--logical-ranks 2 8] [--runs 5]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hardware import spread, write_result

GLOBAL_SIZE = 32


def seconds_per_step(model: str, processes: int, logical_ranks: int, *, exact: bool, steps: int) -> float:
    """Train on noise and return the mean time of a step."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "paceline", "train", "synthetic", f"model.name={model}", "data.image_size=64"]
        command += [f"batch.global_size={GLOBAL_SIZE}", f"parallel.logical_ranks={logical_ranks}", "parallel.threads=1"]
        command += ["train.precision=fp32", f"train.duration={steps} steps", "checkpoint.every=off"]
        command += ["parallel.exact=true"] if exact else []
        command += ["--processes", str(processes), "--run-dir", str(Path(scratch) / "run"), "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return GLOBAL_SIZE / float(json.loads(done.stdout)["throughput_samples_per_second"])


def measure(model: str, processes: int, logical_ranks: int, runs: int, steps: int) -> dict[str, Any]:
    """Both ways in turns."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(runs):
        for exact in (True, False):
            times[exact].append(seconds_per_step(model, processes, logical_ranks, exact=exact, steps=steps))
    return {
        "model": model,
        "processes": processes,
        "logical_ranks": logical_ranks,
        "ratio": spread([a / b for a, b in zip(times[True], times[False], strict=True)]),
        "exact_seconds_per_step": spread(times[True]),
        "ddp_seconds_per_step": spread(times[False]),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet18", "small_resnet"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--logical-ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    rows = [
        measure(model, options.processes, ranks, options.runs, options.steps)
        for model in options.models
        for ranks in options.logical_ranks
    ]
    lines = [
        f"{row['model']}, {row['processes']} processes, {row['logical_ranks']} logical ranks: an exact step takes "
        f"{row['ratio']['median']:.2f} times as long as one of DDP ({row['ratio']['minimum']:.2f} to "
        f"{row['ratio']['maximum']:.2f}, {row['ratio']['runs']} pairs of runs)."
        for row in rows
    ]
    print("\n".join(lines))
    if not options.dry_run:
        print(write_result("exact-cost", {"measurements": rows}, lines))


if __name__ == "__main__":
    main()
