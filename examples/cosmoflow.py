"""A 3D convolutional network infers the parameters of a universe from its galaxies, like MLPerf HPC's CosmoFlow.

Each universe is a generated cube of galaxy counts, periodic along each axis. Three parameters describe it: the slope of
its power spectrum, the scale below which matter is smooth, and the strength of clustering. In a recipe or on the
command line, the task is `task=cosmoflow:Universes`.

    python examples/cosmoflow.py
"""

import tempfile
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.tasks import Batch, DataFacts, Metric, Pipeline, Placement, SampleSlice, SimplePipeline, all_but, uniforms

TRAIN, HELD_OUT = 512, 128  # universes
SIDE = 24  # cells along each axis of a universe
GALAXIES = 4.0  # mean number of galaxies in a cell
RANGES = {"slope": (-3.0, 0.0), "smooth_cells": (0.4, 1.6), "clustering": (0.5, 1.5)}


def universe(number: int) -> tuple[Tensor, Tensor]:
    """Return log(1 + galaxies) in each cell, float [1, SIDE, SIDE, SIDE], and the parameters scaled to -1 to 1, [3]."""
    rng = np.random.default_rng(number)
    targets = rng.uniform(-1, 1, size=len(RANGES))
    lows, highs = np.array(list(RANGES.values())).T
    slope, smooth_cells, clustering = lows + (highs - lows) * (targets + 1) / 2

    # A random field with the power spectrum k^slope, smoothed by a Gaussian.
    kz, ky, kx = np.meshgrid(np.fft.fftfreq(SIDE), np.fft.fftfreq(SIDE), np.fft.rfftfreq(SIDE), indexing="ij")
    k = 2 * np.pi * np.sqrt(kz**2 + ky**2 + kx**2)
    k[0, 0, 0] = np.inf  # no power in the mean: all universes have the same density
    power = k**slope * np.exp(-((k * smooth_cells) ** 2))
    white_noise = rng.normal(size=(SIDE, SIDE, SIDE))
    field = np.fft.irfftn(np.fft.rfftn(white_noise) * np.sqrt(power), s=white_noise.shape, axes=(0, 1, 2))

    density = np.exp(clustering * field / field.std())
    galaxies = rng.poisson(GALAXIES * density / density.mean())
    return torch.from_numpy(np.log1p(galaxies)).float()[None], torch.from_numpy(targets).float()


class Universes(paceline.Task):
    """Predict the parameters of a universe from its galaxies."""

    unit, headline = "universes", "mae"
    metrics = (Metric(name="loss"), Metric(name="mae"), *(Metric(name=f"{each}_mae") for each in RANGES))

    def data_facts(self, world: Any) -> DataFacts:
        """Generate all universes; the last ones are held out."""
        universes = [universe(number) for number in range(TRAIN + HELD_OUT)]
        self.fields, self.parameters = (torch.stack(each) for each in zip(*universes, strict=True))
        unused = all_but([], "the universes are generated")
        return DataFacts(train_samples=TRAIN, evaluation_samples=HELD_OUT, unused=unused)

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Return batches created by `read`."""
        return SimplePipeline(self.read, evaluation_samples=HELD_OUT, placement=placement, name="universe")

    def read(self, part: SampleSlice, training: bool) -> tuple[Tensor, Tensor]:
        """Return universes with their parameters; for training, each universe is randomly flipped along each axis."""
        ids = torch.tensor(part.ids) + (0 if training else TRAIN)
        fields = list(self.fields[ids])
        if training:
            for row, draws in enumerate(uniforms(self.recipe.seed, part.epoch, part.ids, 3)):
                fields[row] = fields[row].flip([1 + axis for axis in range(3) if draws[axis] < 0.5])
        return torch.stack(fields), self.parameters[ids]

    def build_model(self) -> nn.Module:
        """Return three stages of convolution and pooling, and two linear layers; torch is already seeded."""
        layers: list[nn.Module] = []
        for inputs, outputs in ((1, 16), (16, 32), (32, 64)):
            # Circular padding, since universes are periodic.
            layers += [nn.Conv3d(inputs, outputs, 3, padding=1, padding_mode="circular"), nn.LeakyReLU()]
            layers += [nn.MaxPool3d(2)]
        head = [nn.Flatten(), nn.Linear(64 * (SIDE // 8) ** 3, 64), nn.LeakyReLU(), nn.Linear(64, len(RANGES))]
        return nn.Sequential(*layers, *head)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Return the mean squared error of a micro-batch."""
        return F.mse_loss(model(batch.inputs).float(), batch.targets)

    def score(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """Return, for each universe, its squared error, its absolute error, and that of each parameter."""
        errors = model(batch.inputs).float() - batch.targets
        by_parameter = {f"{name}_mae": errors[:, column].abs() for column, name in enumerate(RANGES)}
        return {"loss": errors.square().mean(dim=1), "mae": errors.abs().mean(dim=1), **by_parameter}

    def predict(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the parameters of each universe, scaled to -1 to 1, for `paceline predict`."""
        predicted = model(batch.inputs).float()
        return {name: predicted[:, column] for column, name in enumerate(RANGES)}


# Changes to the smallest shipped recipe, `digits`, whose network and data this task replaces.
OVERRIDES = {
    "train.duration": "20 epochs",
    "batch.global_size": 16,
    "optimizer.name": "adamw",
    "optimizer.lr": 0.001,
    "schedule.warmup": "5%",
    "evaluate.every": "10 epochs",
    "evaluate.batch_size": 16,
    "parallel.device": "cpu",
}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = paceline.train("digits", overrides=OVERRIDES, run_dir=f"{folder}/run", task=Universes, quiet=True)
    mae = result.metrics["mae"]
    print(f"mean absolute error {mae:.3f} after {result.summary.step} steps; guessing the middle has 0.5")
    assert mae < 0.22, f"expected less than 0.22, found {mae:.3f}"
