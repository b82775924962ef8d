"""Weights that are sharded leave no 16-bit copy of the network behind, and everything else is as it was."""

from __future__ import annotations

import pytest
import torch
from paceline.models.precision import Precision
from torch import nn

from paceline.recipe.training import GradScaler
from paceline_advisor.memory.allocations import COPIES, AllocationTrace

CPU = torch.device("cpu")


class Net(nn.Module):
    """Convolution, attention, a norm, a layer used twice, and weights that are views."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 4, stride=4), nn.BatchNorm2d(16)
        self.mix = nn.MultiheadAttention(16, 2, batch_first=True)
        self.twice, self.head = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.stem(x)).flatten(2).mT
        y = y + self.mix(y, y, y, need_weights=False)[0]
        found: torch.Tensor = self.head(self.twice(self.twice(y).relu()).mean(1))
        return found


def passes(network: nn.Module, *, is_sharded: bool) -> tuple[list[torch.Tensor], int]:
    """Return the gradients, and the bytes of 16-bit copies between the forward and the backward pass."""
    precision = Precision("bf16", CPU, GradScaler(), is_sharded=is_sharded)
    network.zero_grad()
    x = torch.linspace(-1, 1, 4 * 3 * 64).reshape(4, 3, 8, 8)
    with AllocationTrace(lambda: ("forward", "")) as trace:
        trace.hold(network.parameters(), "weights")
        loss = precision.applied_to(network)(x).square().mean()
        freed = {~event for event in trace.events if event < 0}
        kept = [each for number, each in enumerate(trace.allocations) if number not in freed]
    loss.backward()
    gradients = [each.grad for each in network.parameters() if each.grad is not None]
    return gradients, sum(each.size for each in kept if each.cause == COPIES)


def test_no_copy_outlives_its_use_and_the_gradients_are_the_same_bits() -> None:
    torch.manual_seed(0)
    network = Net()
    (ours, kept), (reference, held) = (passes(network, is_sharded=each) for each in (True, False))
    assert held > 2 * 16 * 16
    assert kept == 0
    assert len(ours) == len(reference) == len(list(network.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(ours, reference, strict=True))


def test_a_change_in_place_is_found_there_too() -> None:
    precision, layer = Precision("bf16", CPU, GradScaler(), is_sharded=True), nn.Linear(4, 4)
    y = precision.applied_to(lambda x: layer(x).exp().add_(1))(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
