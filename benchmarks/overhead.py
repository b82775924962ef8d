"""How much slower is Paceline's loop than a plain PyTorch loop doing the same arithmetic?

Both train the network of a public lecture's CPU-against-GPU demonstration (PyTorch's CIFAR-10 tutorial network
with 128 channels in its first layer: 120,078 parameters) on the same images in memory, in one process. They take
turns, a block of steps each (A B A B …), so that a machine whose speed drifts slows both alike. Paceline runs as
it always does: step records, TensorBoard, ledger and clock on.

    python benchmarks/overhead.py [--batch-size 64 4] [--blocks 30] [--steps 40]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hardware import spread, write_result

from paceline.data.image.datasets import ImageDataset
from paceline.data.image.source import ArraySource
from paceline.models.lecture_net import lecture_net
from paceline.recipe.data import Data
from paceline.recipe.load import load_recipe
from paceline.telemetry.display import Display
from paceline.trainer.train import Options, train_recipe

SAMPLES = 10_000
MEAN, STD = 0.5, 0.25


def noise(data: Data) -> ImageDataset:
    """Random 32x32 images, in memory."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (SAMPLES, 32, 32, 3), dtype=np.uint8)
    labels = generator.integers(0, 10, SAMPLES)
    train = ArraySource(images, labels, "noise")
    return ImageDataset(
        name="noise",
        train=train,
        validation=ArraySource(images[:100], labels[:100], "noise"),
        classes=tuple("0123456789"),
        channels=3,
        image_size=32,
        native_size=(32, 32),
        mean=(MEAN,) * 3,
        std=(STD,) * 3,
    )


def raw_steps(batch_size: int, *, channels_last: bool) -> Callable[[int], None]:
    """The plain loop: index, normalise, forward, backward, step."""
    dataset = noise(Data())
    images = torch.from_numpy(dataset.train.images.transpose(0, 3, 1, 2).copy())
    labels = torch.from_numpy(dataset.train.labels)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    torch.manual_seed(0)
    model = lecture_net(10).to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    order = torch.randperm(SAMPLES)
    position = 0

    def run(steps: int) -> None:
        nonlocal position
        for _ in range(steps):
            if position + batch_size > SAMPLES:
                position = 0
            ids = order[position : position + batch_size]
            position += batch_size
            inputs = images[ids].to(torch.float32, memory_format=layout).mul_(1 / (255 * STD)).add_(-MEAN / STD)
            loss = F.cross_entropy(model(inputs), labels[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return run


class TakingTurns(Display):
    """A display that, at block boundaries, lets the plain loop run a block of its own and times both."""

    def __init__(self, raw: Callable[[int], None], steps: int) -> None:
        self.raw, self.steps = raw, steps
        self.raw_seconds: list[float] = []
        self.own_seconds: list[float] = []
        self._resumed: float | None = None

    def advance(self, step: int) -> None:
        """Count a block of ours, then time a block of the plain loop."""
        if step % self.steps:
            return
        now = _now()
        if self._resumed is not None:
            self.own_seconds.append(now - self._resumed)
        self.raw(self.steps)
        self._resumed = _now()
        self.raw_seconds.append(self._resumed - now)


def _now() -> float:
    """The time at which the device has done what it was given, in seconds of a clock."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(batch_size: int, blocks: int, steps: int) -> dict[str, Any]:
    """Ratio of Paceline's time to the plain loop's, block by block."""
    overrides: Mapping[str, Any] = {
        "model.name": "lecture_net",
        "data.dataset": "overhead:noise",
        "model.channels_last": True,
        "train.precision": "fp32",
        "batch.global_size": batch_size,
        "optimizer.lr": 0.001,
        "schedule.name": "constant",
        "train.duration": f"{(blocks + 2) * steps} steps",
        "evaluate.every": "off",
        "checkpoint.every": "off",
        "telemetry.log_every": "50 steps",
    }
    turns = TakingTurns(raw_steps(batch_size, channels_last=True), steps)
    with tempfile.TemporaryDirectory() as scratch:
        recipe = Path(scratch) / "overhead.yaml"
        recipe.write_text("task: image_classification\n")
        loaded = load_recipe(recipe, overrides)
        train_recipe(loaded, Options(run_dir=Path(scratch) / "run", display=turns))
    # The first block of either warms up.
    own, raw = turns.own_seconds[1:], turns.raw_seconds[1:-1]
    ratios = [a / b for a, b in zip(own, raw, strict=False)]
    return {
        "batch_size": batch_size,
        "steps_per_block": steps,
        "ratio": spread(ratios),
        "paceline_milliseconds_per_step": spread([1000 * s / steps for s in own]),
        "raw_milliseconds_per_step": spread([1000 * s / steps for s in raw]),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[64, 4])
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    rows = [measure(size, options.blocks, options.steps) for size in options.batch_size]
    lines = [
        f"Batch {row['batch_size']}: {row['ratio']['median']:.4f} times the plain loop's time per step "
        f"(median of {row['ratio']['runs']} pairs of blocks of {row['steps_per_block']} steps; "
        f"{row['ratio']['minimum']:.3f} to {row['ratio']['maximum']:.3f}; plain loop "
        f"{row['raw_milliseconds_per_step']['median']:.2f} ms)."
        for row in rows
    ]
    print("\n".join(lines))
    if not options.dry_run:
        print(write_result("loop-overhead", {"measurements": rows}, lines))


if __name__ == "__main__":
    main()
