"""A loop of your own that survives kills: digits, with gradients accumulated by hand over several parts of a batch.

Kill it and start it again with the same RUN_DIR: it continues with the same samples, and ends with the same bits.

    python examples/own_loop.py [RUN_DIR]
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, Subset

import paceline

PARTS = 4


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """Handwritten digits, [1, 8, 8], with noise that is drawn when they are read."""

    def __init__(self, noise: float) -> None:
        found: Any = load_digits()
        self.images, self.labels, self.noise = found.images, found.target, noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.tensor(self.images[index] / 16, dtype=torch.float32)[None]
        return image + self.noise * torch.randn(image.shape), int(self.labels[index])


def main() -> None:
    """Train, and hold the run to its number."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = sys.argv[1] if len(sys.argv) > 1 else f"{folder}/run"
        train, held_out = Subset(Digits(noise=0.1), range(1437)), Subset(Digits(noise=0), range(1437, 1797))
        loop = paceline.Loop(run_dir, train, batch_size=64, epochs=8, seed=1)
        model = loop.prepare(
            nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 10))
        )
        optimizer = loop.keep(torch.optim.AdamW(model.parameters(), lr=5e-3))
        schedule = loop.keep(torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, loop.total_steps))
        accuracy = 0.0
        for _, (images, labels) in loop:
            optimizer.zero_grad()
            total = torch.zeros(())
            for part, wanted in zip(images.chunk(PARTS), labels.chunk(PARTS), strict=True):
                loss = F.cross_entropy(model(part), wanted) * len(part) / len(images)
                loss.backward()
                total += loss.detach()
            optimizer.step()
            schedule.step()
            loop.log(loss=total)
            if loop.due("1 epoch"):
                with loop.evaluation(held_out) as scores:
                    for images, labels in scores:  # noqa: PLW2901  # the same names, of other samples
                        scores.add(correct=model(images).argmax(1) == labels)
                accuracy = 100 * scores.results["correct"]
    print(f"{accuracy:.1f} % of the held-out digits after {loop.total_steps} steps")
    assert accuracy > 85, f"expected more than 85 % on the held-out digits, found {accuracy:.1f} %"


if __name__ == "__main__":
    main()
