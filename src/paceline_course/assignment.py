"""Data and networks of the assessment.

The data are scikit-learn's digits. The sizes are chosen so that nothing divides evenly: 578 training images
(578 = 12 x 48 + 2 = 11 x 50 + 28) and 301 validation images (301 = 2 x 150 + 1 = 3 x 100 + 1).
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

# Called with each new network; the grader observes networks through it.
OBSERVERS: list[Callable[[nn.Module], None]] = []


def training_set() -> TensorDataset:
    """Return 578 pairs of an image (float32, shape [64], values 0 to 1) and its label (0 to 9)."""
    return _part(0, TRAINING_SAMPLES)


def validation_set() -> TensorDataset:
    """Return 301 pairs as in :func:`training_set`; none is in the training set."""
    return _part(TRAINING_SAMPLES, TRAINING_SAMPLES + VALIDATION_SAMPLES)


def build_model(network: str = "plain") -> nn.Module:
    """Build a network that turns images [n, 64] into logits [n, 10], with random weights.

    Args:
        network: ``plain`` (two linear layers) or ``batchnorm`` (batch normalisation between them).

    Raises:
        ValueError: If the name is unknown.
    """
    if network not in ("plain", "batchnorm"):
        raise ValueError(f"Unknown network {network!r}; use plain or batchnorm.")
    normalisation = [nn.BatchNorm1d(32)] if network == "batchnorm" else []
    model = nn.Sequential(nn.Linear(PIXELS, 32), *normalisation, nn.ReLU(), nn.Linear(32, CLASSES))
    for observe in OBSERVERS:
        observe(model)
    return model


@cache
def _digits() -> tuple[Tensor, Tensor]:
    source = read_digits()
    # The file is ordered by writer, so shuffle: both sets should contain all writers.
    order = np.random.default_rng(0).permutation(len(source.labels))
    images = source.images[order].reshape(len(order), PIXELS).astype(np.float32) / 255
    return torch.from_numpy(images), torch.from_numpy(source.labels[order].astype(np.int64))


def _part(begin: int, end: int) -> TensorDataset:
    images, labels = _digits()
    return TensorDataset(images[begin:end].clone(), labels[begin:end].clone())
