"""What the doctor knows of a network's layers, looked at on the CPU: on small pictures, whatever the recipe shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models.detection import RetinaNet

from paceline.data.batch import Batch
from paceline.data.slices import SampleSlice
from paceline.recipe.load import load_recipe
from paceline.trainer.fake_batch import with_placeholder_data
from paceline_advisor.doctor.anatomy import class_places, observe_network
from paceline_advisor.doctor.behaviour import behave, preserved_state

SAMPLES = 3


class Silent(nn.Module):
    """It is given nothing and makes nothing."""

    def forward(self) -> tuple[Tensor, ...]:
        return ()


class Odd(nn.Module):
    """Layers whose arithmetic is no product of their two sizes; one is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 6, 3, 2, groups=2)
        self.mix = nn.Conv2d(6, 6, 3, padding=1, groups=3)
        self.over = nn.LSTM(11, 10, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(20, 5)
        self.silent = Silent()

    def forward(self, inputs: Tensor) -> Tensor:
        self.silent()
        out: Tensor = self.head(self.over(self.mix(self.mix(self.up(inputs))).mean(1))[0])
        return out


def test_their_arithmetic_is_what_is_counted() -> None:
    with torch.device("meta"):
        network, inputs = Odd(), torch.zeros(SAMPLES, 4, 5, 5)
    part = SampleSlice(step=0, epoch=0, logical_rank=0, ids=np.arange(SAMPLES), step_weight=SAMPLES)
    batch = Batch(inputs, torch.zeros(SAMPLES, device="meta"), part.ids, part)
    seen = observe_network(network, batch, lambda: network(inputs).sum().backward())
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


@pytest.mark.parametrize(("sides", "shown_side"), [([640, 800], 128), ([64], 64)])
def test_pictures_of_a_detector_are_shown_small(sides: list[int], shown_side: int) -> None:
    overrides = {"model.name": "small_retinanet", "data.detection.short_sides": sides}
    recipe, _ = with_placeholder_data(load_recipe("retinanet_resnet50_fpn_coco", overrides).recipe)
    shown: set[tuple[int, ...]] = set()

    def see(module: Any, given: Any) -> None:
        if isinstance(module, RetinaNet):
            shown.update(tuple(each.shape[1:]) for each in given[0])

    watching = register_module_forward_pre_hook(see)
    try:
        with preserved_state():
            anatomy, _ = behave(recipe, channels_last=False)
    finally:
        watching.remove()
    assert anatomy.layers
    assert {min(each) for each in shown} == {shown_side}
