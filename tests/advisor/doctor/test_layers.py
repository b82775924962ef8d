"""What the doctor knows of a network's layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.data.batch import Batch
from paceline.data.slices import SampleSlice
from paceline_advisor.doctor.anatomy import class_places, look_at

SAMPLES = 3


class Odd(nn.Module):
    """Layers whose arithmetic is no product of their two sizes; one is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 6, 3, 2, groups=2)
        self.mix = nn.Conv2d(6, 6, 3, padding=1, groups=3)
        self.over = nn.LSTM(11, 10, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(20, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.mix(self.mix(self.up(inputs))).mean(1)
        out: Tensor = self.head(self.over(hidden)[0])
        return out


def test_their_arithmetic_is_what_is_counted() -> None:
    with torch.device("meta"):
        network, inputs = Odd(), torch.zeros(SAMPLES, 4, 5, 5)
    part = SampleSlice(step=0, epoch=0, logical_rank=0, ids=np.arange(SAMPLES), step_weight=SAMPLES)
    batch = Batch(inputs, torch.zeros(SAMPLES, device="meta"), part.ids, part)
    seen = look_at(network, batch, lambda: network(inputs).sum().backward())
    with FlopCounterMode(display=False) as counter:
        network(inputs)
    theirs = {name: sum(each.values()) for name, each in counter.get_flop_counts().items()}
    for layer in seen.layers:
        assert layer.flops * SAMPLES == pytest.approx(theirs[f"Odd.{layer.name}"]), layer.name
    assert {layer.name: layer.calls for layer in seen.layers} == {"up": 1, "mix": 2, "over": 1, "head": 1}


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3))


def test_layers_are_placed_in_the_class_that_made_them_and_never_in_torchs_own() -> None:
    (place,) = class_places(Held(), ["layers.0"])
    assert (place.file, place.what) == (__file__, "class Held")
    assert class_places(nn.Sequential(nn.Conv2d(3, 4, 3)), ["0"]) == ()
