"""What a program of the assessment starts from: training and validation data, and a network.

The digits of scikit-learn, in numbers that go evenly into nothing: 578 = 12 x 48 + 2 = 11 x 50 + 28 images to train on,
and 301 = 2 x 150 + 1 = 3 x 100 + 1 to validate with.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.data.image.sets.digits import read_digits

TRAINING_SAMPLES, VALIDATION_SAMPLES, CLASSES, PIXELS = 578, 301, 10, 64

# Called with each network that is built; the grader watches through it.
OBSERVERS: list[Callable[[nn.Module], None]] = []


def training_set() -> TensorDataset:
    """Return 578 pairs of an image, float32 [64] in 0 … 1, and its label, 0 … 9."""
    return _part(0, TRAINING_SAMPLES)


def validation_set() -> TensorDataset:
    """Return 301 such pairs, none of which is in the training set."""
    return _part(TRAINING_SAMPLES, TRAINING_SAMPLES + VALIDATION_SAMPLES)


def build_model(network: str = "plain") -> nn.Module:
    """Build a network that turns images [n, 64] into logits [n, 10], with random weights.

    Args:
        network: ``plain``, two linear layers, or ``batchnorm``, with a batch normalisation between them.

    Raises:
        ValueError: If there is no such network.
    """
    if network not in ("plain", "batchnorm"):
        raise ValueError(f"The networks are plain and batchnorm; there is no {network!r}.")
    normalisation = [nn.BatchNorm1d(32)] if network == "batchnorm" else []
    model = nn.Sequential(nn.Linear(PIXELS, 32), *normalisation, nn.ReLU(), nn.Linear(32, CLASSES))
    for observe in OBSERVERS:
        observe(model)
    return model


@cache
def _digits() -> tuple[Tensor, Tensor]:
    source = read_digits()
    # The file has writer after writer; the parts should have all of them.
    order = np.random.default_rng(0).permutation(len(source.labels))
    images = source.images[order].reshape(len(order), PIXELS).astype(np.float32) / 255
    return torch.from_numpy(images), torch.from_numpy(source.labels[order].astype(np.int64))


def _part(begin: int, end: int) -> TensorDataset:
    images, labels = _digits()
    return TensorDataset(images[begin:end].clone(), labels[begin:end].clone())
