"""A network of distances and angles predicts the energies of molecules, like DimeNet++ in MLPerf's HPC benchmark.

Each bond has a message, which is updated from the adjacent bonds with their angles, as in Gasteiger et al. (2020). The
network is plain PyTorch, since torch-geometric's needs compiled extensions. The molecules are generated, and a rule
gives their energies. In a recipe or on the command line, the task is `task=dimenet:Energies`.

    python examples/dimenet.py
"""

import tempfile
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.tasks import Batch, DataFacts, Metric, Pipeline, Placement, SampleSlice, SimplePipeline, all_but

TRAIN, HELD_OUT = 1500, 200  # molecules
ELEMENTS, ATOMS = 3, 8  # elements, numbered from 1, and atoms of the largest molecule
BOND = 1.6  # atoms closer than this are bonded


def molecule(number: int) -> tuple[Tensor, Tensor]:
    """Return the element of each atom, int64 [ATOMS], 0 for none, and the positions, float [ATOMS, 3]."""
    rng = np.random.default_rng(number)
    atoms = np.zeros((1, 3))
    while len(atoms) < rng.integers(4, ATOMS + 1):
        direction = rng.normal(size=3)
        candidate = atoms[rng.integers(len(atoms))] + direction / np.linalg.norm(direction) * rng.uniform(0.9, 1.3)
        if np.linalg.norm(atoms - candidate, axis=1).min() > 0.8:
            atoms = np.vstack([atoms, candidate])
    elements = rng.integers(1, ELEMENTS + 1, size=len(atoms))
    padding = ATOMS - len(atoms)
    return F.pad(torch.from_numpy(elements), (0, padding)), F.pad(torch.from_numpy(atoms).float(), (0, 0, 0, padding))


def geometry(elements: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return distances and bonds [N, i, j], and cosines of angles i-j-k with whether both bonds exist [N, i, j, k]."""
    offsets = positions[:, None] - positions[:, :, None]  # [N, i, j, 3]
    distances, directions = offsets.norm(dim=-1), F.normalize(offsets, dim=-1)
    exists = elements > 0
    distinct = ~torch.eye(ATOMS, dtype=torch.bool, device=elements.device)
    bonded = (distances < BOND) & exists[:, None] & exists[:, :, None] & distinct
    cosines = torch.einsum("njid,njkd->nijk", directions, directions)
    return distances, bonded, cosines, bonded[..., None] & bonded[:, None] & distinct[:, None]


def energy(elements: Tensor, positions: Tensor) -> Tensor:
    """Return energies [N]: lowest if bonds are as long as their elements want, and at right angles to each other."""
    distances, bonded, cosines, is_angle = geometry(elements, positions)
    preferred = 0.8 + 0.05 * (elements[:, None] + elements[:, :, None])
    stretching = (4 * (distances - preferred).square() * bonded).sum(dim=(1, 2)) / 2
    return stretching + (0.5 * elements[:, None, :, None] * cosines.square() * is_angle).sum(dim=(1, 2, 3)) / 2


def perceptron(inputs: int, outputs: int) -> nn.Module:
    """Return two linear layers with an activation in between."""
    return nn.Sequential(nn.Linear(inputs, outputs), nn.SiLU(), nn.Linear(outputs, outputs))


class DirectionalMessages(nn.Module):
    """Update a message for each bond from the adjacent bonds, several times; predict the energy from all messages."""

    def __init__(self, width: int = 32, rounds: int = 2) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(0.8, BOND, 8))
        self.elements = nn.Embedding(1 + ELEMENTS, width)
        self.first = perceptron(2 * width + 8, width)
        self.angle = nn.ModuleList(nn.Linear(4, width) for _ in range(rounds))
        self.send = nn.ModuleList(perceptron(width, width) for _ in range(rounds))
        self.update = nn.ModuleList(perceptron(2 * width, width) for _ in range(rounds))
        self.energy = perceptron(width, 1)

    def forward(self, elements: Tensor, positions: Tensor) -> Tensor:
        """Return energies [N]."""
        distances, bonded, cosines, is_angle = geometry(elements, positions)
        near = torch.exp(-100 * (distances[..., None] - self.centres).square())  # to each of eight distances
        powers = torch.stack([cosines**power for power in range(4)], dim=-1)
        atoms = self.elements(elements)
        pairs = atoms[:, :, None].expand(-1, -1, ATOMS, -1), atoms[:, None].expand(-1, ATOMS, -1, -1)
        messages = self.first(torch.cat([*pairs, near], dim=-1))  # [N, i, j, width]
        for angle, send, update in zip(self.angle, self.send, self.update, strict=True):
            sent = send(messages) * bonded[..., None]
            # The bond of i and j receives from the bonds of k and j, for all k; the angle at j gives the weight.
            received = torch.einsum("nijkw,nkjw,nijk->nijw", angle(powers), sent, is_angle.float())
            messages = messages + update(torch.cat([messages, received], dim=-1))
        return (self.energy(messages).squeeze(-1) * bonded).sum(dim=(1, 2))


class Energies(paceline.Task):
    """Predict the energy of a molecule, in standard deviations from the mean of the training set."""

    unit = "molecules"
    metrics = (Metric(name="loss"), Metric(name="error_of_mean"))

    def data_facts(self, world: Any) -> DataFacts:
        """Generate all molecules; the last ones are held out."""
        elements, positions = zip(*map(molecule, range(TRAIN + HELD_OUT)), strict=True)
        self.elements, self.positions = torch.stack(elements), torch.stack(positions)
        energies = energy(self.elements, self.positions)
        self.energies = (energies - energies[:TRAIN].mean()) / energies[:TRAIN].std()
        unused = all_but([], "the molecules are generated")
        return DataFacts(train_samples=TRAIN, evaluation_samples=HELD_OUT, unused=unused)

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Return batches created by `read`."""
        return SimplePipeline(self.read, evaluation_samples=HELD_OUT, placement=placement, name="molecule")

    def read(self, part: SampleSlice, training: bool) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return elements and positions, the inputs of the network, and energies."""
        ids = torch.tensor(part.ids) + (0 if training else TRAIN)
        return (self.elements[ids], self.positions[ids]), self.energies[ids]

    def build_model(self) -> nn.Module:
        """Return the network; torch is already seeded."""
        return DirectionalMessages()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Return the mean absolute error of a micro-batch."""
        return (model(*batch.inputs).float() - batch.targets).abs().mean()

    def score(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the absolute error of each molecule, and that of predicting the mean energy, which is 0."""
        return {"loss": (model(*batch.inputs).float() - batch.targets).abs(), "error_of_mean": batch.targets.abs()}


# Changes to the smallest shipped recipe, `digits`, whose network and data this task replaces.
OVERRIDES = {
    "train.duration": "12 epochs",
    "batch.global_size": 30,
    "optimizer.name": "adamw",
    "optimizer.lr": 0.004,
    "parallel.device": "cpu",
}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = paceline.train("digits", overrides=OVERRIDES, run_dir=f"{folder}/run", task=Energies, quiet=True)
    error, baseline = result.metrics["loss"], result.metrics["error_of_mean"]
    print(f"mean absolute error {error:.3f} after {result.summary.step} steps; predicting the mean has {baseline:.3f}")
    assert error < 0.2, f"expected less than 0.2, found {error:.3f}"
    assert error < baseline / 4, f"expected less than a quarter of {baseline:.3f}, found {error:.3f}"
