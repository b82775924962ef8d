"""A loss of one's own: train the digits on the Brier score instead of cross-entropy.

A task says what is learned; the loop stays the same. Subclass the nearest task, change the method that differs, and
hand the class to `paceline.train`. In a recipe or on the command line the same class is `task: own_task:BrierScore`.

    python examples/own_task.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import paceline
from paceline.tasks import Batch, Model


class BrierScore(paceline.ImageClassification):
    """Image classification by the squared distance between the predicted probabilities and the one-hot label."""

    def loss(self, model: Model, batch: Batch) -> torch.Tensor:
        """Mean Brier score over the micro-batch, in [0, 2] (Brier 1950)."""
        probabilities = model(batch.inputs).float().softmax(dim=1)
        wanted = F.one_hot(batch.targets, probabilities.shape[1])
        return (probabilities - wanted).square().sum(dim=1).mean()


RECIPE = """
model: {name: small_resnet, options: {width: 4, stages: 2}}
data: {dataset: digits}
batch: {global_size: 32}
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
train: {duration: 6 epochs}
parallel: {device: cpu, threads: 1}
telemetry: {trackers: []}
"""


def main() -> None:
    """Train, and hold the run to its number."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "brier.yaml"
        recipe.write_text(RECIPE, encoding="utf-8")
        result = paceline.train(recipe, run_dir=Path(folder) / "run", task=BrierScore, quiet=True)
    accuracy = result.metrics["top1_accuracy"]
    print(f"top-1 accuracy {accuracy:.2f} % after {result.summary.step} steps on the Brier score")
    assert accuracy > 90, f"expected more than 90 % on the held-out digits, found {accuracy:.2f} %"


if __name__ == "__main__":
    main()
