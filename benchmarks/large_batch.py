"""Is a small batch flatter than a large one on the digits, and what does the large-batch kit mend?

Trains the digits recipe (a narrower network; no augmentation, label smoothing or average, so that the loss that is
looked at is the loss that was trained) with a batch of 32, and with one of 256 in six ways, with several seeds each.
Then looks at each run as `paceline landscape` does: accuracies on all test samples, and on half of the training
samples; over those too Keskar's sharpness and the Hessian's largest eigenvalue. Seeds take turns.

Nothing decays but with LARS, which scales only what does; its rate of 8 is the smallest of 2, 4, 8, 16 and 32 that
trained about as far as any with a batch of 512, on a seed that is not among those that are measured. All other rates
follow from the rule.

    python benchmarks/large_batch.py [--seeds 3] [--epochs 20]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hardware import spread, write_result

import paceline
from paceline_advisor.commands import Landscape
from paceline_advisor.landscape.study import explore

SMALL, LARGE, RATE = 32, 256, 0.1
# Samples of each split over which sharpness is sought; accuracies too.
SAMPLES = 720

RECIPE: Mapping[str, Any] = {
    "model.options": {"width": 8, "stages": 2},
    "data.augment.crop": "none",
    "train.label_smoothing": 0.0,
    "train.ema": "off",
    "optimizer.lr": RATE,
    "optimizer.weight_decay": 0.0,
    "schedule.warmup": "0%",
    "evaluate.every": "off",
    "checkpoint.every": "off",
    "telemetry.trackers": [],
    "parallel.device": "cpu",
}
LINEAR = {"optimizer.lr_scaling": "linear", "optimizer.lr_reference_batch": SMALL}
ROOT = {"optimizer.lr_scaling": "sqrt", "optimizer.lr_reference_batch": SMALL}
WARMUP = {"schedule.warmup": "20%"}


def variants(epochs: int) -> dict[str, dict[str, Any]]:
    """What each way of training changes."""
    same_steps = {"train.duration": f"{-(-1438 // SMALL) * epochs} steps"}
    ghosts = {"model.ghost_batch_norm": SMALL}
    large: dict[str, Any] = {"batch.global_size": LARGE}
    return {
        f"batch {SMALL}": {"batch.global_size": SMALL},
        f"batch {LARGE}": large,
        f"batch {LARGE}, linear rate, warm-up": large | LINEAR | WARMUP,
        f"batch {LARGE}, LARS, warm-up": large
        | WARMUP
        | {"optimizer.name": "lars", "optimizer.lr": 8.0, "optimizer.weight_decay": 5e-4, "optimizer.nesterov": False},
        f"batch {LARGE}, ghosts of {SMALL}": large | ghosts,
        f"batch {LARGE}, as many steps": large | same_steps,
        f"batch {LARGE}, root rate, ghosts, as many steps": large | ROOT | ghosts | same_steps,
    }


def measure_landscape(run: Path) -> dict[str, float]:
    """The figures of one run."""
    command = Landscape(runs=(str(run),), samples=SAMPLES, measure=("sharpness", "curvature"), tolerance=0.02)
    (found,) = explore(command, print).runs
    assert found.curvature is not None
    assert found.gap is not None
    return {
        "steps": found.steps,
        "train_loss": found.results["train"]["loss"],
        "train_accuracy": found.results["train"]["top1_accuracy"],
        "test_loss": found.results["validation"]["loss"],
        "test_accuracy": found.results["validation"]["top1_accuracy"],
        "gap": found.gap,
        **{f"sharpness_{each.epsilon:g}": each.percent for each in found.sharpness},
        "top_eigenvalue": found.curvature.value,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, look, and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ways = variants(options.epochs)
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            for number, (name, changes) in enumerate(ways.items()):
                started, run = time.perf_counter(), Path(folder) / f"{number}-{seed}"
                overrides = {**RECIPE, "train.duration": f"{options.epochs} epochs", "seed": seed, **changes}
                paceline.train("digits", overrides=overrides, run_dir=run, quiet=True)
                figures[name].append(measure_landscape(run))
                print(f"{name}, seed {seed}, {time.perf_counter() - started:.0f} s: {figures[name][-1]}", flush=True)
    spreads = {name: {key: spread([run[key] for run in runs]) for key in runs[0]} for name, runs in figures.items()}
    lines = table(spreads)
    print("\n".join(lines))
    print(write_result("large-batch-digits", {"seeds": options.seeds, "runs": figures, "spread": spreads}, lines))


def table(spreads: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Median (least to most) of each figure, as Markdown."""
    columns = {
        "steps": "steps",
        "train_loss": "train loss",
        "train_accuracy": "train %",
        "test_accuracy": "test %",
        "gap": "gap",
        "sharpness_0.001": "sharpness 1e-3 (%)",
        "sharpness_0.0005": "sharpness 5e-4 (%)",
        "top_eigenvalue": "top eigenvalue",
    }
    head = ["| | " + " | ".join(columns.values()) + " |", "|---" * (len(columns) + 1) + "|"]
    rows = [
        f"| {name} | " + " | ".join(cell(key, found[key]) for key in columns) + " |" for name, found in spreads.items()
    ]
    return head + rows


def cell(key: str, found: Mapping[str, float]) -> str:
    """A median and its range."""
    if key == "steps":
        return f"{found['median']:.0f}"
    return f"{found['median']:.3g} ({found['minimum']:.3g} to {found['maximum']:.3g})"


if __name__ == "__main__":
    main()
