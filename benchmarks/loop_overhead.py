"""Cost of ``paceline.Loop``: the same training loop with and without it, and what importing and opening it takes.

Both train the network of `overhead.py` with batches of 64 on one thread, and take turns: a block of steps each (A B A B
…), so that a machine whose speed drifts slows both alike. The plain loop reads with a DataLoader. The data: whole
tensors, and samples that are read one by one and flipped at random, in a loader process and without one.

    python benchmarks/loop_overhead.py [--blocks 24] [--steps 20] [--starts 9]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from hardware import spread, write_result
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import paceline
from paceline.models.lecture_net import lecture_net

SAMPLES, BATCH = 6_400, 64
# A program that has imported torch prints the seconds and the processor's seconds of what follows.
START = """
import json, sys, tempfile, time
import torch
began = time.perf_counter(), time.process_time()
import paceline
loop_class = paceline.Loop
if "open" in sys.argv:
    data = torch.randn(640, 4), torch.zeros(640)
    loop = loop_class(tempfile.mkdtemp(dir=sys.argv[1]), data, batch_size=64, epochs=1)
print(json.dumps([time.perf_counter() - began[0], time.process_time() - began[1]]))
"""


class Flipped(Dataset[tuple[torch.Tensor, int]]):
    """Random images in memory, of which a random half is flipped."""

    def __init__(self) -> None:
        self.images, self.labels = torch.randn(SAMPLES, 3, 32, 32), [i % 10 for i in range(SAMPLES)]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index]
        return (image.flip(-1) if random.random() < 0.5 else image), self.labels[index]


def tensors() -> TensorDataset:
    """The images as a data set, without augmentation."""
    data = Flipped()
    return TensorDataset(data.images, torch.tensor(data.labels))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    """The body of both loops."""
    images, labels = batch
    loss = F.cross_entropy(model(images.to(memory_format=torch.channels_last)), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    """What both train."""
    model = lecture_net(10).to(memory_format=torch.channels_last)
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def plain(data: Dataset[Any], workers: int, steps: int) -> Iterator[None]:
    """Train without Paceline, a block of steps for each turn."""
    (model, optimizer), step = network(), 0
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    while True:
        for batch in loader:
            train(model, optimizer, batch)
            step += 1
            if step % steps == 0:
                yield


def with_loop(data: Dataset[Any], workers: int, steps: int, blocks: int, folder: str) -> Iterator[None]:
    """Train with Paceline, a block of steps for each turn."""
    epochs = blocks * steps * BATCH / SAMPLES
    loop = paceline.Loop(Path(folder) / "run", data, batch_size=BATCH, epochs=epochs, workers=workers)
    model, optimizer = network()
    model, optimizer = loop.prepare(model), loop.keep(optimizer)
    for step, batch in loop:
        loop.log(loss=train(model, optimizer, batch))
        if step % steps == 0:
            yield


def of_median(values: Sequence[float]) -> dict[str, float]:
    """Median and range, with an interval that holds the true median with 95 % confidence."""
    ordered, count = sorted(values), len(values)
    least = max(0, int((count - 1.96 * count**0.5) / 2))
    return {**spread(values), "low": ordered[least], "high": ordered[count - 1 - least]}


def measure(data: Dataset[Any], workers: int, blocks: int, steps: int) -> dict[str, Any]:
    """Ratios of the time and of the processor's time with Paceline to those without, block by block."""
    with tempfile.TemporaryDirectory() as folder:
        own = with_loop(data, workers, steps, blocks + 1, folder)
        loops, took = (own, plain(data, workers, steps)), []
        for _ in range(blocks + 1):
            for loop in loops:
                began = time.perf_counter(), time.process_time()
                next(loop)
                took.append((time.perf_counter() - began[0], time.process_time() - began[1]))
        next(own, None)  # to the end of the run
    ours, theirs = took[2::2], took[3::2]  # the first block of either warms up
    row: dict[str, Any] = {"steps_per_block": steps}
    for index, clock in enumerate(("time", "processor_time")):
        row[f"{clock}_ratio"] = of_median([a[index] / b[index] for a, b in zip(ours, theirs, strict=True)])
        row[f"plain_{clock}_milliseconds"] = spread([1000 * each[index] / steps for each in theirs])
    return row


def starts(count: int) -> dict[str, dict[str, dict[str, float]]]:
    """Seconds that importing, and importing and opening, take after ``import torch``, in fresh processes in turns."""
    took: dict[str, list[list[float]]] = {"import": [], "open": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(count + 1):
            for what, each in took.items():
                command = [sys.executable, "-c", START, folder, what]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                each.append(json.loads(done.stdout))
    # The first ones fill the file cache.
    return {
        what: {
            clock: spread([one[index] for one in each[1:]]) for index, clock in enumerate(("time", "processor_time"))
        }
        for what, each in took.items()
    }


def sentences(rows: Sequence[dict[str, Any]], started: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """Return what was measured, for people."""
    lines = []
    for row in rows:
        wall, processor = row["time_ratio"], row["processor_time_ratio"]
        milliseconds = [row[f"plain_{clock}_milliseconds"]["median"] for clock in ("time", "processor_time")]
        lines.append(
            f"{row['data']}: {wall['median']:.4f} times the plain loop's time per step (95 % interval of the median "
            f"{wall['low']:.3f} to {wall['high']:.3f}), {processor['median']:.4f} times its processor time "
            f"({processor['low']:.3f} to {processor['high']:.3f}; without loader processes); {wall['runs']} pairs of "
            f"blocks of {row['steps_per_block']} steps, plain loop {milliseconds[0]:.1f} ms, {milliseconds[1]:.1f} ms "
            "of the processor."
        )
    for what, title in (("import", "Importing"), ("open", "Importing and opening a run")):
        wall, processor = started[what]["time"], started[what]["processor_time"]
        lines.append(
            f"{title} after torch: {wall['median']:.2f} s ({wall['minimum']:.2f} to {wall['maximum']:.2f}), processor "
            f"{processor['median']:.2f} s; {wall['runs']} processes."
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--starts", type=int, default=9)
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # threads that wait for one another would measure what else the machine does
    kinds: dict[str, tuple[Dataset[Any], int]] = {
        "tensors": (tensors(), 0),
        "samples, 1 loader process": (Flipped(), 1),
        "samples, no loader process": (Flipped(), 0),
    }
    rows = [{"data": name, **measure(*kind, options.blocks, options.steps)} for name, kind in kinds.items()]
    started = starts(options.starts)
    lines = sentences(rows, started)
    print("\n".join(lines))
    if not options.dry_run:
        print(write_result("own-loop", {"measurements": rows, "starts": started}, lines))


if __name__ == "__main__":
    main()
