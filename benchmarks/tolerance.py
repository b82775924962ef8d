"""How far apart are two trainings of one recipe whose arithmetic rounds differently, after how many steps?

`paceline verify` compares within a tolerance where bits may differ. Here each recipe is trained three times with a
checkpoint after every step: as usual with one thread, with two threads, and with the instructions of AVX2 only. For
each tensor of weights, moving average and optimizer, the norm of the difference is divided by the tensor's norm.

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

ADAMW = ("optimizer.name=adamw", "optimizer.lr=0.002")
SMALL = ("batch.global_size=16", "schedule.name=constant")
RECIPES: dict[str, tuple[str, ...]] = {
    "digits, SGD": ("digits", *SMALL),
    "digits, AdamW": ("digits", *SMALL, *ADAMW),
    "ResNet-18, SGD": ("figures", "batch.global_size=8", "model.name=torchvision:resnet18", "optimizer.name=sgd"),
    "language model, AdamW": (
        *("gpt-small-docs", "batch.global_size=4", "data.text.context=32"),
        *("model.options.depth=2", "model.options.width=64", "model.options.heads=2"),
    ),
    "digits, bf16": ("digits", *SMALL, "train.precision=bf16"),
}
SETTINGS: dict[str, tuple[int, dict[str, str]]] = {
    "one thread": (1, {}),
    "two threads": (2, {}),
    "AVX2": (1, {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}),
}
AT = (1, 2, 4, 8, 16, 32, 64, 128, 256)
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
    """Yield the relative difference of each tensor of two checkpoints that holds more than one number."""
    for component in COMPONENTS:
        tensors = [encode(read_components(each, (component,))[component], where=component)[1] for each in (one, other)]
        for name, tensor in tensors[0].items():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel() > 1:
                pair = tensor.double(), tensors[1][name].double()
                yield f"{component} {name}", float((pair[0] - pair[1]).norm() / pair[1].norm().clamp_min(1e-30))


def measure(scratch: Path, words: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """The differences of one recipe, by pair and step."""
    runs = {setting: scratch / str(number) for number, setting in enumerate(SETTINGS)}
    for setting, run in runs.items():
        train(run, words, steps, setting)
    first, *others = SETTINGS
    found = []
    for setting in others:
        for step in (each for each in AT if each <= steps):
            paths = (runs[each] / "checkpoints" / checkpoint_name(step) for each in (first, setting))
            tensors = dict(differences(*paths))
            name = max(tensors, key=tensors.__getitem__)
            largest = sorted(tensors.values(), reverse=True)
            row = {"pair": setting, "step": step, "largest": tensors[name], "tensor": name, "tensors": len(tensors)}
            row["top"] = {each: tensors[each] for each in sorted(tensors, key=tensors.__getitem__, reverse=True)[:6]}
            found.append({**row, "median": statistics.median(largest)})
    return found
