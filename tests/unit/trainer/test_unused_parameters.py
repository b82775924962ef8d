"""A parameter that takes no part in the loss is named at the first step, with one process as with many."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import ModelError, RecipeError

Make = Callable[..., Any]

SAID = r"2 parameter\(s\) did not contribute to the loss: spare.weight, spare.bias; freeze them \(model.frozen\)"


class Spare(nn.Module):
    """Has a layer that nobody asks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
        self.spare = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@pytest.mark.parametrize("exact", [False, True])
def test_it_is_named_before_the_weights_move(train_tiny: Make, runs: Path, exact: bool) -> None:
    with pytest.raises(ModelError, match=SAID):
        train_tiny("run", {"parallel.exact": exact}, make_network=Spare)
    assert not list((runs / "run" / "checkpoints").glob("step-*"))


def test_it_may_be_allowed_and_stays_as_it_was(train_tiny: Make, weights: Make) -> None:
    made: list[torch.Tensor] = []

    def make() -> nn.Module:
        network = Spare()
        made.append(network.spare.weight.detach().clone())
        return network

    asked = {"parallel.unused_parameters": "allow", "optimizer.weight_decay": 0.1}
    assert torch.equal(weights(train_tiny("run", asked, make_network=make))["spare.weight"], made[-1])


def test_a_frozen_one_is_none(train_tiny: Make) -> None:
    class Frozen(Spare):
        def __init__(self) -> None:
            super().__init__()
            self.spare.requires_grad_(requires_grad=False)

    assert train_tiny("run", make_network=Frozen).status == "completed"


def test_an_exact_run_cannot_allow_it(train_tiny: Make) -> None:
    with pytest.raises(RecipeError, match=r"does not work with parallel\.exact=true"):
        train_tiny("run", {"parallel.exact": True, "parallel.unused_parameters": "allow"})
