"""How near to the best possible answer does `dlrm-synthetic` come, in what time? What does reading Criteo's text cost?

Trains the shipped recipe by the command line, once per seed, and reads each run's plan and summary. Then turns lines of
Criteo's format into the binary copy and reads rows of it in the order of an epoch, both in processor time of one
thread; and times steps of one network with large tables, with dense and with sparse gradients in turns.

    python benchmarks/clicks.py --seeds 0 1 2
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

import numpy as np
import torch
from hardware import spread, write_result

from paceline.data.order import epoch_order
from paceline.recipe.data import Data
from paceline_recsys.networks import Dlrm
from paceline_recsys.sets.synthetic import open_clicks

LINES, BATCH, ROWS, PAIRS = 100_000, 2048, 100_000, 7


def train(seed: int, run: Path) -> dict[str, Any]:
    """One run by the command line."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "paceline", "train", "dlrm-synthetic", f"seed={seed}", "--run-dir", str(run)]
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, check=True)
    whole = time.perf_counter() - started
    summary, plan = json.loads(done.stdout), json.loads((run / "plan.json").read_text())
    figures = {key: summary["metrics"][key] for key in ("auc", "loss", "normalized_entropy")}
    best = plan["data"]["best_possible_auc"]
    return {"seed": seed, **figures, "best": best, "train_seconds": summary["train_seconds"], "command_seconds": whole}


def reading(folder: Path) -> dict[str, float]:
    """Microseconds of processor time for a line that is converted, and for a row that is read in random order."""
    draws = np.random.default_rng(0)
    numbers, values = draws.integers(0, 1000, (LINES, 13)), draws.integers(0, 2**32, (LINES, 26))
    lines = ("\t".join(["0", *map(str, n), *(f"{v:08x}" for v in c)]) for n, c in zip(numbers, values, strict=True))
    (folder / "clicks.tsv").write_text("".join(f"{line}\n" for line in lines))
    started = time.process_time()
    source = open_clicks(Data(dataset="criteo", path=str(folder / "clicks.tsv"), validation_fraction=0.0)).train
    converted = time.process_time() - started
    order = epoch_order(0, 0, LINES)
    started = time.process_time()
    for at in range(0, LINES, BATCH):
        source.read(order[at : at + BATCH])
    return {"convert": 1e6 * converted / LINES, "read": 1e6 * (time.process_time() - started) / LINES}


def steps() -> dict[str, Any]:
    """Times of a step with plain SGD, dense over sparse, in pairs."""
    torch.set_num_threads(1)
    made = {sparse: Dlrm(13, (ROWS,) * 26, sparse=sparse) for sparse in (False, True)}
    optimizers = {sparse: torch.optim.SGD(model.parameters(), lr=0.1) for sparse, model in made.items()}
    dense, categories = torch.randn(128, 13), torch.randint(0, ROWS, (128, 26))

    def step(sparse: bool) -> float:
        started = time.process_time()
        made[sparse](dense, categories).square().mean().backward()
        optimizers[sparse].step()
        optimizers[sparse].zero_grad()
        return time.process_time() - started

    step(sparse=True), step(sparse=False)
    pairs = [(step(sparse=False), step(sparse=True)) for _ in range(PAIRS)]
    return {
        "dense_seconds": spread([a for a, _ in pairs]),
        "sparse_seconds": spread([b for _, b in pairs]),
        "ratio": spread([a / b for a, b in pairs]),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        runs = [train(seed, Path(scratch) / f"seed-{seed}") for seed in options.seeds]
        read = reading(Path(scratch))
    step = steps()
    auc, seconds = spread([r["auc"] for r in runs]), spread([r["train_seconds"] for r in runs])
    whole = spread([r["command_seconds"] for r in runs])
    lines = [
        (
            f"dlrm-synthetic: AUC {auc['median']:.4f} over seeds {', '.join(map(str, options.seeds))} "
            f"({auc['minimum']:.4f} to {auc['maximum']:.4f}), the best possible {runs[0]['best']:.4f}; "
            f"{seconds['median']:.1f} s of training ({seconds['minimum']:.1f} to {seconds['maximum']:.1f}), "
            f"{whole['median']:.1f} s for the whole command."
        ),
        (
            f"Criteo's text, processor time: {read['convert']:.1f} us to convert a line, {read['read']:.2f} us to read "
            f"a row of the copy in random order, batches of {BATCH:,}."
        ),
        (
            f"A step of 128 samples with 26 tables of {ROWS:,} rows and SGD, processor time of one thread: "
            f"{1e3 * step['dense_seconds']['median']:.0f} ms with dense gradients, "
            f"{1e3 * step['sparse_seconds']['median']:.1f} ms with sparse ones; "
            f"{step['ratio']['median']:.0f} times ({step['ratio']['minimum']:.0f} to {step['ratio']['maximum']:.0f})."
        ),
    ]
    print("\n".join(lines))
    print(write_result("clicks", {"runs": runs, "reading": read, "steps": step}, lines))


if __name__ == "__main__":
    main()
