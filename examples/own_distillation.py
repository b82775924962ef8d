"""A small network learns from a teacher of yours and from an average of itself, in a loop of your own.

The teacher does not change and is not kept; the average is. If it were forgotten, the loop would name it.

    python examples/own_distillation.py
"""

from __future__ import annotations

import copy
import tempfile

import torch
import torch.nn.functional as F
from torch import nn

import paceline


def points(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of two rings, [count, 2], and their ring."""
    draws = torch.Generator().manual_seed(seed)
    rings = torch.randint(0, 2, (count,), generator=draws)
    angles = 2 * torch.pi * torch.rand(count, generator=draws)
    radii = 1 + rings + 0.1 * torch.randn(count, generator=draws)
    return torch.stack([radii * angles.cos(), radii * angles.sin()], dim=1), rings


class Teacher(nn.Module):
    """Knows that the radius tells."""

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        """Return logits, [N, 2]."""
        beyond = 20 * (places.norm(dim=1) - 1.5)
        return torch.stack([-beyond, beyond], dim=1)


def main() -> None:
    """Train, and hold the run to its number."""
    with tempfile.TemporaryDirectory() as folder:
        loop = paceline.Loop(f"{folder}/run", points(2000, seed=1), batch_size=50, epochs=4, seed=1)
        network = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
        average = loop.keep(copy.deepcopy(network))
        student, teacher = loop.prepare(network), Teacher()
        optimizer = loop.keep(torch.optim.Adam(student.parameters(), 1e-2))
        for _, (places, rings) in loop:
            with torch.no_grad():
                wanted = teacher(places).softmax(dim=1)
            logits = student(places)
            loss = 0.5 * F.cross_entropy(logits, wanted) + 0.5 * F.cross_entropy(logits, rings)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mean, value in zip(average.parameters(), network.parameters(), strict=True):
                    mean.lerp_(value, 0.05)
            loop.log(loss=loss)
            if loop.due("1 epoch"):
                with loop.evaluation(points(500, seed=2)) as scores:
                    for places, rings in scores:  # noqa: PLW2901  # the same names, of other samples
                        scores.add(correct=average(places).argmax(1) == rings)
    accuracy = 100 * scores.results["correct"]
    print(f"{accuracy:.1f} % of the held-out points by the average of the student")
    assert accuracy > 97, f"expected more than 97 %, found {accuracy:.1f} %"


if __name__ == "__main__":
    main()
