"""Is what a network of timm's says of its images what timm's train.py goes by?"""

from __future__ import annotations

import pytest
import timm
from timm.data import resolve_data_config

from paceline.models.build import published_settings


@pytest.mark.parametrize("name", ["resnet50.a3_in1k", "tf_efficientnet_b4", "resnet10t"])
def test_the_settings_are_those_that_train_py_resolves(name: str) -> None:
    found = published_settings(name)
    assert found is not None
    wanted = resolve_data_config({}, pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    assert (3, found.image_size, found.image_size) == wanted["input_size"]
    assert (found.interpolation, found.crop) == (wanted["interpolation"], wanted["crop_pct"])
    assert (found.mean, found.std) == (wanted["mean"], wanted["std"])


@pytest.mark.parametrize("name", ["my_own_net", "resnet50.no_such_weights", "hf-hub:user/net", ""])
def test_a_name_that_timm_does_not_have_has_none(name: str) -> None:
    assert published_settings(name) is None
