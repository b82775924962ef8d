"""A network of distances and angles learns molecules' energies, as DimeNet++ in MLPerf's HPC benchmark.

Molecules are generated, and a rule gives their energies: a sum over pairs of atoms and over angles between bonds. The
network passes messages along pairs, and each message knows the angles to the others that meet it (Gasteiger et al.
2020). It has no dependency: torch-geometric's DimeNet++ needs compiled extensions. On the command line the class is
`task=dimenet:Energies`.

    python examples/dimenet.py
"""

import shlex
import tempfile
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import paceline
from paceline.data.batch import Batch
from paceline.data.pipeline import Pipeline, Placement, SimplePipeline
from paceline.data.slices import SampleSlice
from paceline.metrics.accumulator import Metric
from paceline.plan import DataFacts
from paceline.recipe.unused import all_but

TRAIN, HELD_OUT = 1500, 200
KINDS, MOST = 3, 8  # of atoms, numbered from 1; atoms of a molecule
BOND = 1.6  # greatest length of a bond, and of a message


def molecule(number: int) -> tuple[Tensor, Tensor]:
    """Return the kinds of atoms, int64 [MOST], 0 for none, and their places, float [MOST, 3]."""
    draws = np.random.default_rng(number)
    places = np.zeros((1, 3))
    while len(places) < draws.integers(4, MOST + 1):
        direction = draws.normal(size=3)
        place = places[draws.integers(len(places))] + direction / np.linalg.norm(direction) * draws.uniform(0.9, 1.3)
        if np.linalg.norm(places - place, axis=1).min() > 0.8:
            places = np.vstack([places, place])
    kinds, padded = torch.zeros(MOST, dtype=torch.long), torch.zeros(MOST, 3)
    kinds[: len(places)] = torch.from_numpy(draws.integers(1, KINDS + 1, len(places)))
    padded[: len(places)] = torch.from_numpy(places)
    return kinds, padded


def geometry(kinds: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return distances [N, A, A], which pairs are bonded, cosines of angles i-j-k [N, A, A, A], and which there are."""
    apart = places[:, None] - places[:, :, None]  # from i to j
    lengths = apart.norm(dim=-1).clamp(min=1e-6)
    there = kinds > 0
    differ = ~torch.eye(MOST, dtype=torch.bool, device=kinds.device)
    bonded = (lengths < BOND) & there[:, None] & there[:, :, None] & differ
    angles = bonded[..., None] & bonded[:, None] & differ[:, None]
    directions = apart / lengths[..., None]
    # The directions from j to i and from j to k.
    return lengths, bonded, torch.einsum("njid,njkd->nijk", directions, directions), angles


def energy(kinds: Tensor, places: Tensor) -> Tensor:
    """Return the energy by rule, [N]: bonds like to be as long as their atoms are large, and at right angles."""
    lengths, bonded, cosines, angles = geometry(kinds, places)
    wanted = 0.8 + 0.05 * (kinds[:, None] + kinds[:, :, None])
    pairs = (4 * (lengths - wanted).square() * bonded).sum(dim=(1, 2)) / 2
    stiffness = 0.5 * kinds[:, None, :, None]
    return pairs + (stiffness * cosines.square() * angles).sum(dim=(1, 2, 3)) / 2


def perceptron(inputs: int, outputs: int) -> nn.Module:
    """Return a layer, an activation and a layer."""
    return nn.Sequential(nn.Linear(inputs, outputs), nn.SiLU(), nn.Linear(outputs, outputs))


class DirectionalMessages(nn.Module):
    """Messages along bonds, each updated by those that arrive where it starts, with their distances and angles."""

    def __init__(self, width: int = 32, rounds: int = 2) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(0.8, BOND, 8))
        self.kinds = nn.Embedding(1 + KINDS, width)
        self.begin = perceptron(2 * width + 8, width)
        self.from_angle = nn.ModuleList(nn.Linear(4, width) for _ in range(rounds))
        self.arriving = nn.ModuleList(perceptron(width, width) for _ in range(rounds))
        self.update = nn.ModuleList(perceptron(2 * width, width) for _ in range(rounds))
        self.energy = perceptron(width, 1)

    def forward(self, kinds: Tensor, places: Tensor) -> Tensor:
        """Return energies [N], the sum over all messages."""
        lengths, bonded, cosines, angles = geometry(kinds, places)
        powers = torch.stack([cosines**power for power in range(4)], dim=-1)
        distances = torch.exp(-100 * (lengths[..., None] - self.centres).square())
        atoms = self.kinds(kinds)
        ends = (atoms[:, :, None].expand(-1, -1, MOST, -1), atoms[:, None].expand(-1, MOST, -1, -1))
        messages = self.begin(torch.cat([*ends, distances], dim=-1))  # from i to j
        for from_angle, arriving, update in zip(self.from_angle, self.arriving, self.update, strict=True):
            sent = arriving(messages) * bonded[..., None]
            # What the other bonds of j send to it from k, weighted by the angle i-j-k.
            met = torch.einsum("nijkw,nkjw,nijk->nijw", from_angle(powers), sent, angles.float())
            messages = messages + update(torch.cat([messages, met], dim=-1))
        return torch.as_tensor((self.energy(messages).squeeze(-1) * bonded).sum(dim=(1, 2)))


class Energies(paceline.Task):
    """Molecules in, energies out, in standard deviations of the training set."""

    unit, headline = "molecules", "mae"
    metrics = (Metric(name="loss"), Metric(name="mae"))

    def data_facts(self, world: Any) -> DataFacts:
        """All molecules; the last ones are held out."""
        kinds, places = zip(*map(molecule, range(TRAIN + HELD_OUT)), strict=True)
        self.kinds, self.places = torch.stack(kinds), torch.stack(places)
        energies = energy(self.kinds, self.places)
        self.energies = (energies - energies[:TRAIN].mean()) / energies[:TRAIN].std()
        unused = all_but([], "the molecules are generated")
        return DataFacts(train_samples=TRAIN, evaluation_samples=HELD_OUT, unused=unused)

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Batches that `read` makes when they are asked for."""
        return SimplePipeline(self.read, evaluation_samples=HELD_OUT, placement=placement, name="molecule")

    def read(self, part: SampleSlice, training: bool) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Atoms and their places, and the energies."""
        ids = torch.tensor(part.ids) + (0 if training else TRAIN)
        return (self.kinds[ids], self.places[ids]), self.energies[ids]

    def build_model(self) -> nn.Module:
        """The network; torch is seeded already."""
        return DirectionalMessages()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Mean absolute error of a micro-batch."""
        return (model(*batch.inputs).float() - batch.targets).abs().mean()

    def score(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """The error of each molecule."""
        error = (model(*batch.inputs).float() - batch.targets).abs()
        return {"loss": error, "mae": error}


OVERRIDES = """train.duration="12 epochs" batch.global_size=30 optimizer.name=adamw optimizer.lr=0.004
    train.precision=fp32 schedule.warmup="5%" evaluate.every="6 epochs" parallel.device=cpu parallel.threads=1"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asked = shlex.split(OVERRIDES)
        result = paceline.train("digits", overrides=asked, run_dir=f"{folder}/run", task=Energies, quiet=True)
    error = result.metrics["mae"]
    print(f"mean absolute error {error:.3f} standard deviations, after {result.summary.step} steps")
    assert error < 0.2, f"expected less than 0.2, found {error:.3f}"
