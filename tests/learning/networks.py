"""Data and networks in which faults are planted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]


@cache
def digits() -> tuple[Pair, Pair]:
    """Training and held-out samples: 64 pixels of zero mean and unit spread, and ten classes."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.from_numpy(images).float()[order], torch.from_numpy(labels).long()[order]
    x = (x - x.mean()) / x.std()
    return (x[:1400], y[:1400]), (x[1400:], y[1400:])


def shuffled(targets: Tensor, seed: int = 1) -> Tensor:
    """Targets that belong to other inputs."""
    return targets[torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))]


def partly_wrong(targets: Tensor, share: float, seed: int = 2) -> Tensor:
    """Targets of which a share was drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    is_wrong = torch.rand(len(targets), generator=generator) < share
    return torch.where(is_wrong, torch.randint(0, 10, targets.shape, generator=generator), targets)


class Perceptron(nn.Module):
    """Two hidden layers.

    Args:
        outputs: Size of the answer.
        normed: Whether to normalise over the batch.
        dropout: The rate.
        end: Applied to the answer.
        inputs: Size of an input.
    """

    def __init__(
        self,
        outputs: int = 10,
        *,
        normed: bool = True,
        dropout: float = 0.0,
        end: Callable[[Tensor], Tensor] | None = None,
        inputs: int = 64,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, 64)
        self.norm = nn.BatchNorm1d(64) if normed else nn.Identity()
        self.second, self.drop, self.head = nn.Linear(64, 64), nn.Dropout(dropout), nn.Linear(64, outputs)
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        """Answers [N, outputs] to inputs [N, inputs]."""
        hidden = self.drop(F.relu(self.second(F.relu(self.norm(self.first(x))))))
        answer: Tensor = self.head(hidden)
        return answer if self.end is None else self.end(answer)


class Pixels(nn.Module):
    """Two convolutions over images of 8 by 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.other_norm = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Answers [N, 10] to inputs [N, 64]."""
        hidden = F.relu(self.norm(self.first(x.reshape(-1, 1, 8, 8))))
        hidden = F.max_pool2d(F.relu(self.other_norm(self.second(hidden))), 2)
        answer: Tensor = self.head(hidden.mean((2, 3)))
        return answer


class Sequences(nn.Module):
    """Predicts the next token with a recurrent layer."""

    def __init__(self, tokens: int, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(tokens, width), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        """Answers [N, tokens, length] to tokens [N, length]."""
        hidden, _ = self.layer(self.embedding(x))
        answer: Tensor = self.head(hidden)
        return answer.transpose(1, 2)


@cache
def sentences() -> tuple[Pair, Pair]:
    """Bytes of Python's documentation, and for each the next one."""
    text = "".join(topics[name] for name in sorted(topics)).encode()[: 33 * 1000]
    rows = torch.tensor(list(text)).reshape(-1, 33)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    x, y = rows[:, :-1].long(), rows[:, 1:].long()
    cut = int(0.8 * len(x))
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])
