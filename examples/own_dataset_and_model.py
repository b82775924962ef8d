"""Data and a network of one's own: stripes in three directions, told apart by a net of two layers.

A recipe names both as `package.module:factory`; the module is found in the current directory or on the path. A
dataset's factory takes the recipe's `data` section and returns an `ImageDataset`: two sources of labelled uint8 images,
and how to show them. A network's factory takes `num_classes` and `in_channels`, and what `model.options` says.

    python examples/own_dataset_and_model.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from torch import nn

import paceline
from paceline.tasks import ArraySource, Data, ImageDataset

SIDE = 12
CLASSES = ("horizontal", "vertical", "diagonal")


def stripes(data: Data) -> ImageDataset:
    """Make the images; `data` is there for a factory that reads a path or a size from the recipe."""
    return ImageDataset(
        name="stripes",
        train=_draw(600, seed=1),
        validation=_draw(150, seed=2),
        classes=CLASSES,
        channels=1,
        image_size=SIDE,
        native_size=(SIDE, SIDE),
        # A run goes on only with the data it began with: this text says which data they are.
        digest="stripes 1",
        mean=(0.5,),
        std=(0.3,),
    )


def _draw(count: int, *, seed: int) -> ArraySource:
    """Draw stripes of random phase in noise, uint8 [count, SIDE, SIDE, 1]."""
    draws = np.random.default_rng(seed)
    labels = np.arange(count) % len(CLASSES)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    directions = np.stack([rows, columns, rows + columns])
    phases = draws.uniform(0, 2 * np.pi, (count, 1, 1))
    waves = np.sin(directions[labels] * (2 * np.pi / 4) + phases)
    grey = 127 + 60 * waves + draws.normal(0, 20, (count, SIDE, SIDE))
    return ArraySource(grey.clip(0, 255).astype(np.uint8)[..., None], labels, "stripes")


def two_layers(num_classes: int, in_channels: int, *, width: int = 8) -> nn.Module:
    """Build the network: one convolution, the strongest answer anywhere, one linear layer."""
    return nn.Sequential(
        nn.Conv2d(in_channels, width, kernel_size=5),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(width, num_classes),
    )


RECIPE = """
model: {name: "own_dataset_and_model:two_layers", options: {width: 12}}
data: {dataset: "own_dataset_and_model:stripes"}
batch: {global_size: 30}
optimizer: {name: adamw, lr: 0.01}
train: {duration: 8 epochs}
parallel: {device: cpu, threads: 1}
telemetry: {trackers: []}
"""


def main() -> None:
    """Train, and hold the run to its number."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "stripes.yaml"
        recipe.write_text(RECIPE, encoding="utf-8")
        result = paceline.train(recipe, run_dir=Path(folder) / "run", quiet=True)
    accuracy = result.metrics["top1_accuracy"]
    print(f"top-1 accuracy {accuracy:.2f} % with {result.summary.parameters} parameters")
    assert accuracy > 95, f"expected more than 95 % on the held-out stripes, found {accuracy:.2f} %"


if __name__ == "__main__":
    main()
