"""The code of a detector's task, looked at on the CPU: on pictures that are small, whatever the recipe shows it."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn.modules.module import register_module_forward_pre_hook
from torchvision.models.detection import RetinaNet

from paceline.recipe.load import load_recipe
from paceline.trainer.fake_batch import with_stand_in_data
from paceline_advisor.doctor.behaviour import behave, untouched


@pytest.mark.parametrize(("sides", "shown_side"), [([640, 800], 128), ([64], 64)])
def test_pictures_of_a_detector_are_shown_small(sides: list[int], shown_side: int) -> None:
    overrides = {"model.name": "small_retinanet", "data.detection.short_sides": sides}
    recipe, _ = with_stand_in_data(load_recipe("retinanet_resnet50_fpn_coco", overrides).recipe)
    shown: set[tuple[int, ...]] = set()

    def see(module: Any, given: Any) -> None:
        if isinstance(module, RetinaNet):
            shown.update(tuple(each.shape[1:]) for each in given[0])

    watching = register_module_forward_pre_hook(see)
    try:
        with untouched():
            anatomy, _ = behave(recipe, channels_last=False)
    finally:
        watching.remove()
    assert anatomy.layers
    assert {min(each) for each in shown} == {shown_side}
