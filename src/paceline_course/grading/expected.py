"""What should a step have computed? The loss, its gradient and the accuracy, from weights and sample numbers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from paceline_course.assignment import build_model, training_set, validation_set
from paceline_course.grading.findings import UnseenError
from paceline_course.grading.runs import Run, Vector

Shares = Sequence[tuple[Vector, Sequence[int]]]


def mean_loss_and_gradient(shares: Shares) -> tuple[float, Vector]:
    """Return the mean loss over all samples of a global batch, and its gradient, for the network ``plain``.

    Args:
        shares: The weights of each rank, flat, and the samples of the training set that it took.

    Raises:
        ValueError: If there is no sample at all.
        UnseenError: If these are weights of another network.
    """
    count = sum(len(samples) for _, samples in shares)
    if count == 0:
        raise ValueError("a global batch without samples has no mean")
    images, labels = training_set().tensors
    network = _network(len(shares[0][0]))
    total_loss, total_gradient = 0.0, np.zeros(len(shares[0][0]), dtype=np.float64)
    for weights, samples in shares:
        network.zero_grad()
        vector_to_parameters(torch.from_numpy(weights.copy()), network.parameters())
        index = torch.tensor(list(samples), dtype=torch.long)
        loss = cross_entropy(network(images[index]), labels[index], reduction="sum")
        torch.autograd.backward(loss)
        total_loss += loss.item()
        total_gradient += parameters_to_vector([w.grad for w in network.parameters() if w.grad is not None]).numpy()
    return total_loss / count, (total_gradient / count).astype(np.float32)


def step_shares(run: Run, step: int) -> list[tuple[Vector, list[int]]]:
    """Return the weights and the training samples of each rank at a step."""
    return [
        (rank.steps[step].weights, [sample for sample in rank.steps[step].samples if sample >= 0]) for rank in run.ranks
    ]


def accuracy_of_vector(weights: Vector) -> float:
    """Return the accuracy in percent on the validation set of the network ``plain`` with these weights."""
    network = _network(len(weights))
    vector_to_parameters(torch.from_numpy(weights.copy()), network.parameters())
    return _accuracy(network)


def accuracy_of_state(state: Mapping[str, Vector]) -> float | None:
    """Return the accuracy in percent on the validation set of saved weights; None if they fit neither network."""
    network = build_model("batchnorm" if any("running_mean" in name for name in state) else "plain")
    try:
        network.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in state.items()})
    except RuntimeError:
        return None
    return _accuracy(network)


def flat_state(state: Mapping[str, Vector]) -> Vector | None:
    """Return saved weights as one vector, in the order of the network's parameters; None if they do not fit it."""
    network = build_model("batchnorm" if any("running_mean" in name for name in state) else "plain")
    names = [name for name, _ in network.named_parameters()]
    if any(name not in state for name in names):
        return None
    return np.concatenate([np.asarray(state[name], dtype=np.float32).reshape(-1) for name in names])


def _network(weights: int) -> nn.Module:
    network = build_model("plain")
    asked = sum(parameter.numel() for parameter in network.parameters())
    if asked != weights:
        raise UnseenError(f"the network that was trained has {weights} weights, and the one asked for has {asked}")
    return network


@torch.no_grad()
def _accuracy(network: nn.Module) -> float:
    images, labels = validation_set().tensors
    network.eval()
    return 100 * float((network(images).argmax(dim=1) == labels).double().mean())
