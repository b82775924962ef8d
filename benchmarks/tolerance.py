"""Measure how far apart two trainings of one recipe are whose arithmetic rounds differently, step by step.

`paceline verify` compares within a tolerance where bits may differ. Here each recipe is trained three times with a
checkpoint after every step: as usual with one thread, with two threads, and with the instructions of AVX2 only. For
each tensor of weights, moving average and optimizer, the norm of the difference is divided by the tensor's norm. The
tolerance that one pair gives is then tried on the other.

    python benchmarks/tolerance.py [--steps 128] [--only RECIPE ...] [--dry-run]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from hardware import facts, write_result

from paceline.checkpoint.format import encode
from paceline.checkpoint.manifest import read_components
from paceline.checkpoint.store import checkpoint_name
from paceline_advisor.replay.compare import Tolerance

ADAMW = ("optimizer.name=adamw", "optimizer.lr=0.002")
FP32 = "train.precision=fp32"
DIGITS = ("digits", "batch.global_size=16", "schedule.name=constant")
RESNET = ("model.name=small_resnet", "model.options={width: 16, stages: 3, depth: 2}", "batch.global_size=8")
TEXT = ("gpt-small-docs", "batch.global_size=4", "data.text.context=32")
TEXT += ("model.options.depth=2", "model.options.width=64", "model.options.heads=2", *ADAMW)
RECIPES: dict[str, tuple[str, ...]] = {
    "digits, SGD": (*DIGITS, FP32),
    "digits, AdamW": (*DIGITS, *ADAMW, FP32),
    "ResNet with BatchNorm, SGD": ("figures", *RESNET, "optimizer.name=sgd", "optimizer.lr=0.05", FP32),
    "language model, AdamW": (*TEXT, FP32),
    "digits in bf16, SGD": (*DIGITS, "train.precision=bf16"),
    "language model in bf16, AdamW": (*TEXT, "train.precision=bf16"),
}
SETTINGS: dict[str, tuple[int, dict[str, str]]] = {
    "one thread": (1, {}),
    "two threads": (2, {}),
    "AVX2": (1, {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}),
}
AT = (1, 2, 4, 8, 16, 32, 64)
COMPONENTS = ("model", "ema", "optimizer")


def train(run: Path, words: Sequence[str], steps: int, setting: str) -> None:
    """Train a recipe with a checkpoint after every step."""
    threads, variables = SETTINGS[setting]
    keys = (f"train.duration={steps} steps", "checkpoint.every=1 steps", f"checkpoint.keep={steps}", "train.ema=0.9")
    keys += ("evaluate.every=off", "telemetry.report=false", "telemetry.trackers=[]", f"parallel.threads={threads}")
    subprocess.run(
        [sys.executable, "-m", "paceline", "train", *words, *keys, "--run-dir", str(run)],
        env={**os.environ, "OMP_NUM_THREADS": str(threads), **variables},
        stdout=subprocess.DEVNULL,
        check=True,
    )


def differences(one: Path, other: Path) -> Iterator[tuple[str, float]]:
    """Yield the relative difference of each tensor of two checkpoints."""
    for component in COMPONENTS:
        tensors = [encode(read_components(each, (component,))[component], where=component)[1] for each in (one, other)]
        for name, tensor in tensors[0].items():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                pair = tensor.double(), tensors[1][name].double()
                yield f"{component} {name}", float((pair[0] - pair[1]).norm() / pair[1].norm().clamp_min(1e-30))


def measure(scratch: Path, words: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """The differences of one recipe, by step, and how many tensors of each pair exceed the tolerance of the other."""
    runs = {setting: scratch / str(number) / "checkpoints" for number, setting in enumerate(SETTINGS)}
    for setting, checkpoints in runs.items():
        train(checkpoints.parent, words, steps, setting)
    usual, *settings = SETTINGS
    found = []
    for step in (each for each in AT if each <= steps):
        paths = {setting: each / checkpoint_name(step) for setting, each in runs.items()}
        by_pair = {setting: dict(differences(paths[usual], paths[setting])) for setting in settings}
        row: dict[str, Any] = {"step": step}
        for setting, other in zip(settings, reversed(settings), strict=True):
            tolerance, tensors = Tolerance.measured(paths[usual], paths[other]), by_pair[setting]
            name = max(tensors, key=tensors.__getitem__)
            row[setting] = {
                "largest": tensors[name],
                "tensor": name,
                "median": statistics.median(tensors.values()),
                "tensors": len(tensors),
                "beyond_the_other_pair": sum(each > tolerance.of(*key.split(" ", 1)) for key, each in tensors.items()),
            }
        found.append(row)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    known, found = facts(), dict[str, list[dict[str, Any]]]()
    lines = ["| recipe | pair | step | largest | median | beyond the tolerance of the other pair |"]
    lines.append("|---|---|---|---|---|---|")
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="tolerance-") as scratch:
            found[name] = measure(Path(scratch), RECIPES[name], options.steps)
        for row in found[name]:
            for pair in (each for each in row if each != "step"):
                one = row[pair]
                beyond = f"{one['beyond_the_other_pair']} of {one['tensors']}"
                cells = (name, pair, row["step"], f"{one['largest']:.1e}", f"{one['median']:.1e}", beyond)
                lines.append(f"| {' | '.join(map(str, cells))} |")
                print(lines[-1], flush=True)
    rows = [row[pair] for each in found.values() for row in each for pair in row if pair != "step"]
    within = sum(each["beyond_the_other_pair"] == 0 for each in rows)
    lines[:0] = [
        "Relative difference of tensors from training with one thread and all instructions (norm over norm). The rule:",
        "ten times the difference of another pair, at least 1e-5 and at most 0.1, for each tensor.",
        f"In {within} of {len(rows)} comparisons every tensor is within it; in the others `verify` cannot tell.",
        "",
    ]
    if not options.dry_run:
        result = {"recipes": found, "within": within, "comparisons": len(rows)}
        print(write_result("tolerance", result, lines, known))


if __name__ == "__main__":
    main()
