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
from paceline.data.batch import Batch
from paceline.tasks.task import Model


class BrierScore(paceline.ImageClassification):
    """Image classification by the squared distance between the predicted probabilities and the one-hot label."""

    def loss(self, model: Model, batch: Batch) -> torch.Tensor:
        """Mean Brier score over the micro-batch, in [0, 2] (Brier 1950)."""
        probabilities = model(batch.inputs).float().softmax(dim=1)
        wanted = F.one_hot(batch.targets, probabilities.shape[1])
        return (probabilities - wanted).square().sum(dim=1).mean()


OVERRIDES = {
    "model.options": {"width": 4, "stages": 2},
    "optimizer.lr": 0.1,
    "batch.global_size": 32,
    "train.duration": "4 epochs",
    "parallel.device": "cpu",
    "parallel.threads": 1,
    "telemetry.trackers": [],
}


def main() -> None:
    """Train, and hold the run to its number."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "brier"
        result = paceline.train("digits", overrides=OVERRIDES, run_dir=run_dir, task=BrierScore, quiet=True)
    accuracy = result.metrics["top1_accuracy"]
    print(f"top-1 accuracy {accuracy:.2f} % after {result.summary.step} steps on the Brier score")
    assert accuracy > 90, f"expected more than 90 % on the held-out digits, found {accuracy:.2f} %"


if __name__ == "__main__":
    main()
