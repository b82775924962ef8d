"""A 3D convolutional network reads parameters off a map of matter, as in MLPerf HPC's benchmark CosmoFlow.

Each universe is a cube of galaxy counts, periodic along each axis. Three parameters describe it: the slope of its
power spectrum, the scale below which matter is smooth, and how strongly it clusters. On the command line the class is
`task=cosmoflow:Universes`.

    python examples/cosmoflow.py
"""

import shlex
import tempfile
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.data.batch import Batch
from paceline.data.pipeline import Pipeline, Placement, SimplePipeline
from paceline.data.random_draws import uniforms
from paceline.data.slices import SampleSlice
from paceline.metrics.accumulator import Metric
from paceline.plan import DataFacts
from paceline.recipe.unused import all_but

TRAIN, HELD_OUT = 512, 128
SIDE = 24  # cells along each axis of a universe
GALAXIES = 4.0  # mean number in a cell
PARAMETERS = {"slope": (-3.0, 0.0), "smooth_cells": (0.4, 1.6), "clustering": (0.5, 1.5)}  # ranges


def universe(number: int) -> tuple[Tensor, Tensor]:
    """Return log(1 + galaxies) of each cell, float [1, SIDE, SIDE, SIDE], and its parameters between -1 and 1, [3]."""
    draws = np.random.default_rng(number)
    wanted = draws.uniform(-1, 1, len(PARAMETERS))
    slope, smooth_cells, clustering = (
        low + (high - low) * (each + 1) / 2 for each, (low, high) in zip(wanted, PARAMETERS.values(), strict=True)
    )
    waves = np.fft.fftfreq(SIDE)[:, None, None], np.fft.fftfreq(SIDE)[:, None], np.fft.rfftfreq(SIDE)
    k = 2 * np.pi * np.sqrt(sum(each**2 for each in waves))
    k[0, 0, 0] = 1
    power = k**slope * np.exp(-((k * smooth_cells) ** 2))
    power[0, 0, 0] = 0  # the mean density is that of all universes
    field = np.fft.irfftn(np.fft.rfftn(draws.normal(size=[SIDE] * 3)) * np.sqrt(power), [SIDE] * 3, axes=(0, 1, 2))
    density = np.exp(clustering * field / field.std())
    galaxies = draws.poisson(GALAXIES * density / density.mean())
    return torch.from_numpy(np.log1p(galaxies)).float()[None], torch.from_numpy(wanted).float()


class Universes(paceline.Task):
    """Cubes of galaxies in, the parameters of the universe out."""

    unit, headline = "universes", "mae"
    metrics = (Metric(name="loss"), Metric(name="mae"), *(Metric(name=f"{each}_mae") for each in PARAMETERS))

    def data_facts(self, world: Any) -> DataFacts:
        """All universes; the last ones are held out."""
        universes = [universe(number) for number in range(TRAIN + HELD_OUT)]
        self.fields, self.parameters = (torch.stack(each) for each in zip(*universes, strict=True))
        unused = all_but([], "the universes are generated")
        return DataFacts(train_samples=TRAIN, evaluation_samples=HELD_OUT, unused=unused)

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Batches that `read` makes when they are asked for."""
        return SimplePipeline(self.read, evaluation_samples=HELD_OUT, placement=placement, name="universe")

    def read(self, part: SampleSlice, training: bool) -> tuple[Tensor, Tensor]:
        """Universes with their parameters; in training, the directions are the same to the laws: mirrored at random."""
        chosen = torch.tensor(part.ids) + (0 if training else TRAIN)
        fields = self.fields[chosen]
        if training:
            draws = uniforms(self.recipe.seed, part.epoch, part.ids, 3)
            axes = [[1 + axis for axis in range(3) if row[axis] < 0.5] for row in draws]
            fields = torch.stack([field.flip(each) for field, each in zip(fields, axes, strict=True)])
        return fields, self.parameters[chosen]

    def build_model(self) -> nn.Module:
        """Three times convolution and pooling, then two linear layers; periodic padding, since space is."""
        layers: list[nn.Module] = []
        for narrow, wide in ((1, 16), (16, 32), (32, 64)):
            layers += [nn.Conv3d(narrow, wide, 3, padding=1, padding_mode="circular"), nn.LeakyReLU(), nn.MaxPool3d(2)]
        head = [nn.Flatten(), nn.Linear(64 * (SIDE // 8) ** 3, 64), nn.LeakyReLU(), nn.Linear(64, len(PARAMETERS))]
        return nn.Sequential(*layers, *head)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Mean squared error of a micro-batch."""
        return F.mse_loss(model(batch.inputs).float(), batch.targets)

    def score(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """One value for each universe: squared error, and absolute errors of all and of each parameter."""
        errors = model(batch.inputs).float() - batch.targets
        each = {f"{name}_mae": error for name, error in zip(PARAMETERS, errors.abs().unbind(1), strict=True)}
        return {"loss": errors.square().mean(dim=1), "mae": errors.abs().mean(dim=1), **each}

    def predict(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """The parameters of each universe, between -1 and 1."""
        return dict(zip(PARAMETERS, model(batch.inputs).float().unbind(1), strict=True))


OVERRIDES = """train.duration="20 epochs" batch.global_size=16 optimizer.name=adamw optimizer.lr=0.001
    schedule.name=cosine schedule.warmup="5%" evaluate.every="10 epochs" evaluate.batch_size=16
    parallel.device=cpu parallel.threads=1"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asked = shlex.split(OVERRIDES)
        result = paceline.train("digits", overrides=asked, run_dir=f"{folder}/run", task=Universes, quiet=True)
    mae = result.metrics["mae"]
    print(f"mean absolute error {mae:.3f} after {result.summary.step} steps; guessing the middle has 0.5")
    assert mae < 0.22, f"expected less than 0.22, found {mae:.3f}"
