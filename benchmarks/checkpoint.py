"""How long does a save hold training back, and how long until it is on the disk, beside ``torch.save`` and ``fsync``?

Both save the same state: weights and optimizer state after one step. ``pause`` is the copy to host memory, after which
training goes on; ``total`` adds what happens beside training: encoding, writing, digests, fsync of every file and
folder, and the rename that makes the checkpoint visible. The plain way holds training back for all of its time. The two
take turns (A B A B …) on one disk; each writes new files, and removes those before once they are whole. A virtual
machine's host takes free memory back after seconds and is slow to give it out again, so both begin after a rest, as
saves do that are minutes apart: else one would write into pages that the other has just freed.

The processor time of a save is then counted by part: the copy, the conversion of channels_last tensors to the layout of
files, the digest (BLAKE3; SHA-256 for comparison), and writing with ``fsync``, by one call per tensor and, as Paceline
does, by calls of 1 MiB; then all of ``torch.save`` with ``fsync``. Where all cores compute, this time is taken from the
steps.

    python benchmarks/checkpoint.py [--runs 9] [--rest 5] [--directory FOLDER]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from hardware import spread, write_result
from torch import nn

from paceline.checkpoint.durable import size_of
from paceline.checkpoint.state import OptimizerComponent, Registry
from paceline.checkpoint.store import CheckpointStore
from paceline.parsing.units import format_bytes


def trained(name: str, optimizer: Callable[[Any], torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network with an optimizer that has moved once, so that its state is there."""
    import timm

    model = timm.create_model(name)
    made = optimizer(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    made.step()
    made.zero_grad(set_to_none=True)
    return model, made


CASES: dict[str, tuple[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "ResNet-50 with SGD and momentum": ("resnet50", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "ViT-B/16 with AdamW": ("vit_base_patch16_224", lambda p: torch.optim.AdamW(p, lr=1e-3)),
}


def plain_seconds(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> float:
    """``torch.save`` of both states to one file, flushed to the disk."""
    path, before = directory / "plain.pt", directory / "before.pt"
    if path.exists():
        path.rename(before)
    started = time.perf_counter()
    with path.open("wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    before.unlink(missing_ok=True)
    return seconds


def parts(runs: int, rest_seconds: float, directory: Path) -> dict[str, Any]:
    """Processor seconds of each part of a save of a ResNet-50 with momentum, and of the plain way."""
    case = next(iter(CASES))
    model, optimizer = trained(*CASES[case])
    model = model.to(memory_format=torch.channels_last)
    registry = Registry()
    registry.add("model", model)
    registry.add("optimizer", OptimizerComponent(optimizer))
    registry.snapshot()  # makes the memory that later ones copy into
    state = [*model.state_dict().values()] * 2  # momentum is as large
    strided = [tensor.numpy() for tensor in state if not tensor.is_contiguous()]
    buffer = np.empty(max(each.size for each in strided), np.float32)
    pieces = [memoryview(tensor.contiguous().numpy().tobytes()) for tensor in state]
    path, draw, spent = directory / "bytes", random.Random(0), dict[str, list[float]]()

    def count(part: str, does: Callable[[], Any]) -> None:
        time.sleep(rest_seconds)
        started = time.process_time()
        does()
        spent.setdefault(part, []).append(time.process_time() - started)

    def write(at_once: int) -> None:
        with path.open("wb", buffering=0) as file:
            for piece in pieces:
                for start in range(0, len(piece), at_once):
                    file.write(piece[start : start + at_once])
            os.fsync(file.fileno())

    variants = {
        "writing each tensor by one call": partial(write, max(map(len, pieces))),
        "writing by calls of 1 MiB": partial(write, 2**20),
        "torch.save": partial(plain_seconds, model, optimizer, directory),
    }
    for run in range(runs + 1):
        count("copy", registry.snapshot)
        count("layout", lambda: [np.copyto(buffer[: each.size].reshape(each.shape), each) for each in strided])
        count("BLAKE3", lambda: [blake3(piece).digest() for piece in pieces])
        count("SHA-256", lambda: [hashlib.sha256(piece).digest() for piece in pieces])
        # In an order drawn anew: who comes after another writes into pages that the other has freed.
        for variant in draw.sample(list(variants), len(variants)):
            count(variant, variants[variant])
            path.unlink(missing_ok=True)
        if run == 0:  # makes memory and files
            spent.clear()
    seconds = {part: spread(each) for part, each in spent.items()}
    return {"case": case, "size_bytes": sum(map(len, pieces)), "processor_seconds": seconds}


def measure(case: str, runs: int, rest_seconds: float, directory: Path) -> dict[str, Any]:
    """Pause and total of our save, and the plain way's time, in turns."""
    model, optimizer = trained(*CASES[case])
    registry = Registry()
    registry.add("model", model)
    registry.add("optimizer", OptimizerComponent(optimizer))
    store = CheckpointStore(directory / "checkpoints")
    pauses, totals, plains, size = [], [], [], 0
    for run in range(runs + 1):
        time.sleep(rest_seconds)
        plain = plain_seconds(model, optimizer, directory)
        time.sleep(rest_seconds)
        started = time.perf_counter()
        states = registry.snapshot()
        pause = time.perf_counter() - started
        size = size_of(store.save(run, states, {}))
        total = time.perf_counter() - started
        store.prune(keep=1)
        if run:  # the first of each makes memory and files
            plains.append(plain)
            pauses.append(pause)
            totals.append(total)
    shutil.rmtree(store.directory)
    return {
        "case": case,
        "size_bytes": size,
        "plain_seconds": spread(plains),
        "pause_seconds": spread(pauses),
        "total_seconds": spread(totals),
        "pause_over_plain": spread([a / b for a, b in zip(pauses, plains, strict=True)]),
        "total_over_plain": spread([a / b for a, b in zip(totals, plains, strict=True)]),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--rest", type=float, default=5.0, help="seconds of rest before each save")
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to be measured")
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        rows = [measure(case, options.runs, options.rest, Path(scratch)) for case in CASES]
        part_costs = parts(options.runs, options.rest, Path(scratch))
    lines = [
        f"{row['case']} ({format_bytes(row['size_bytes'])}): training pauses for "
        f"{row['pause_over_plain']['median']:.3f} of the time of torch.save and fsync "
        f"({row['pause_over_plain']['minimum']:.3f} to {row['pause_over_plain']['maximum']:.3f}), and the checkpoint "
        f"is on the disk after {row['total_over_plain']['median']:.2f} of it "
        f"({row['total_over_plain']['minimum']:.2f} to {row['total_over_plain']['maximum']:.2f}); "
        f"medians of {row['pause_over_plain']['runs']} pairs; torch.save and fsync: "
        f"{row['plain_seconds']['median']:.2f} s. Held for it in host memory: one copy of the state."
        for row in rows
    ]
    each = ", ".join(
        f"{part} {found['median']:.3f} ({found['minimum']:.3f} to {found['maximum']:.3f})"
        for part, found in part_costs["processor_seconds"].items()
    )
    lines.append(f"{part_costs['case']}, channels_last, processor seconds of each part: {each}.")
    print("\n".join(lines))
    if not options.dry_run:
        print(write_result("checkpoint-pause", {"measurements": rows, "parts": part_costs}, lines))


if __name__ == "__main__":
    main()
