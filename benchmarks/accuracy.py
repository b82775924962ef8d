"""What accuracy does a shipped recipe reach, in what time?

Runs ``paceline train RECIPE`` as a user would, once per seed, and reads each run's summary. The training seconds
count steps only (no start-up, evaluation or saving); the whole command's seconds are given beside them. With
``--evaluate-processes`` the last run is scored again with other numbers of processes: the counts must agree.

    python benchmarks/accuracy.py digits --seeds 0 1 2 3 4
    python benchmarks/accuracy.py cifar10 data.path=PATH --seeds 0 --evaluate-processes 1 2 3
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hardware import spread, write_result


def train(recipe: str, overrides: Sequence[str], seed: int, run: Path) -> dict[str, Any]:
    """One run by the command line."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "paceline", "train", recipe, *overrides, f"seed={seed}"]
    done = subprocess.run([*command, "--run-dir", str(run), "--json"], stdout=subprocess.PIPE, text=True, check=True)
    summary = json.loads(done.stdout)
    return {
        "seed": seed,
        "top1_accuracy": summary["metrics"]["top1_accuracy"],
        "weights": summary["metrics"]["weights"],
        "train_seconds": summary["train_seconds"],
        "command_seconds": time.perf_counter() - started,
        "throughput_samples_per_second": summary["throughput_samples_per_second"],
        "data_wait_fraction": summary["data_wait_fraction"],
        "ledger": summary["ledger"],
    }


def evaluate(run: Path, processes: int) -> dict[str, Any]:
    """The run's weights scored by so many processes."""
    command = [sys.executable, "-m", "paceline", "evaluate", str(run), "--processes", str(processes), "--json"]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return {"processes": processes, "samples": report["samples"], "top1_correct": report["top1_correct"]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--evaluate-processes", type=int, nargs="*", default=[])
    options = parser.parse_intermixed_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / f"seed-{seed}" for seed in options.seeds]
        pairs = zip(options.seeds, folders, strict=True)
        runs = [train(options.recipe, options.overrides, seed, folder) for seed, folder in pairs]
        scored = [evaluate(folders[-1], count) for count in options.evaluate_processes]
    accuracy, seconds = spread([r["top1_accuracy"] for r in runs]), spread([r["train_seconds"] for r in runs])
    mean = sum(r["top1_accuracy"] for r in runs) / len(runs)
    whole = spread([r["command_seconds"] for r in runs])
    lines = [
        (
            f"{options.recipe}: mean top-1 {mean:.2f} % over seeds {', '.join(map(str, options.seeds))} "
            f"({accuracy['minimum']:.2f} to {accuracy['maximum']:.2f}, {runs[0]['weights']} weights); "
            f"{seconds['median']:.1f} s of training ({seconds['minimum']:.1f} to {seconds['maximum']:.1f}), "
            f"{whole['median']:.1f} s for the whole command."
        ),
        *(
            f"Scored by {s['processes']} process(es): {s['samples']} samples, {s['top1_correct']} correct."
            for s in scored
        ),
    ]
    print("\n".join(lines))
    print(
        write_result(f"accuracy-{options.recipe}", {"mean_top1_accuracy": mean, "runs": runs, "scored": scored}, lines)
    )


if __name__ == "__main__":
    main()
