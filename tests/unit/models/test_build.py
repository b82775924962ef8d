"""Every way to name a network gives one that fits the data, and a wrong name is answered with the nearest."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.data import resolve_data_config
from torch import nn

from paceline.errors import ModelError
from paceline.models.build import (
    _replace_stem,
    build_model,
    check_accepts,
    check_published,
    model_names,
    parameter_count,
)
from paceline.models.small_resnet import small_resnet
from paceline.recipe.model import ModelSection
from paceline_ops.published import published_settings
from paceline_recsys.networks import build_click_model
from paceline_text.models import build_language_model

NETWORKS = ("squeezenet1_1", "googlenet", "resnet18")
OWN = """
import torch
from torch import nn

def plain(num_classes, in_channels):
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * 64, num_classes))

def choosy(num_classes, *, width=3):
    return nn.Linear(width, num_classes)

def anything(**sizes):
    net = nn.Linear(2, 2)
    net.sizes = sizes
    return net

def nothing(**sizes):
    return "a network"

constant = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of the user's own in the current directory."""
    (tmp_path / "my_networks.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield "my_networks"
    sys.path[:] = path
    sys.modules.pop("my_networks", None)


def refusal(model: ModelSection) -> str:
    with pytest.raises(ModelError) as caught:
        build_model(model, num_classes=5, in_channels=3)
    return str(caught.value)


@pytest.mark.parametrize("in_channels", [1, 3])
@pytest.mark.parametrize("name", ["small_resnet", *map("torchvision:{}".format, NETWORKS), "test_vit"])
def test_it_fits_the_data(name: str, in_channels: int) -> None:
    torch.manual_seed(0)
    options = {"test_vit": {"img_size": 64}, "torchvision:googlenet": {"init_weights": False}}.get(name, {})
    network = build_model(ModelSection(name=name, options=options), num_classes=5, in_channels=in_channels)
    for training in (True, False):
        assert network.train(training)(torch.zeros(2, in_channels, 64, 64)).shape == (2, 5)


def test_a_factory_of_ones_own_is_given_what_it_takes(own: str) -> None:
    plain, choosy, anything = (
        build_model(ModelSection(name=f"{own}:{name}", options=options), num_classes=5, in_channels=3)
        for name, options in (("plain", {}), ("choosy", {"width": 7}), ("anything", {}))
    )
    assert plain(torch.zeros(2, 3, 8, 8)).shape == (2, 5)
    assert (choosy.in_features, choosy.out_features) == (7, 5)
    assert anything.sizes == {"num_classes": 5, "in_channels": 3}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"options": {"widht": 4}}, r"model.options \['widht'\] are unknown to small_resnet. Did you mean 'width'"),
        ({"name": "test_resnet", "options": {"drop_rat": None}}, "model.options.drop_rat=null has no effect"),
        ({"name": "resnet51"}, "unknown model 'resnet51'. Did you mean .*'resnet50'"),
        ({"name": "small_resnt"}, "unknown model 'small_resnt'. Did you mean .*'small_resnet'"),
        ({"name": "torchvision:resnet51"}, "unknown torchvision model 'resnet51'. Did you mean .*'resnet50'"),
        ({"name": "torchvision:vit_b_16", "options": {"image_size": 100}}, r"\{'image_size': 100\} do not fit"),
        ({"name": "torchvision:googlenet", "options": {"aux_logits": True, "init_weights": False}}, "has no effect on"),
        ({"name": "my_networks:plan"}, "Did you mean 'plain'"),
        ({"name": "my_networks:nothing"}, "model.name=my_networks:nothing: the factory returned a str"),
        ({"name": "my_networks:constant"}, "model.name=my_networks:constant: "),
        ({"pretrained": True}, "model.pretrained=true has no effect with model.name=small_resnet: "),
        ({"name": "my_networks:plain", "pretrained": True}, "has no effect with model.name=my_networks:plain: "),
    ],
)
@pytest.mark.usefixtures("own")
def test_what_cannot_be_built(asked: dict[str, Any], said: str) -> None:
    assert re.search(said, refusal(ModelSection(**asked)))


def test_names_are_found_by_pattern() -> None:
    assert model_names("small_res*") == ["small_resnet"]
    assert "resnet50" in model_names("resnet50")
    assert "torchvision:resnet18" in model_names("torchvision:resnet1?")
    detectors = ["small_maskrcnn", "torchvision:maskrcnn_resnet50_fpn", "torchvision:maskrcnn_resnet50_fpn_v2"]
    assert model_names("*maskrcnn*") == detectors
    assert model_names("dlrm") == ["dlrm"]
    assert model_names("no_such_network_at_all") == []


def test_parameters_are_counted_once_and_only_trainable_ones() -> None:
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    assert parameter_count(tied) == 9 + 3 + 3
    tied[0].bias.requires_grad_(requires_grad=False)
    assert parameter_count(tied) == 9 + 3


def test_a_stem_for_other_channels_differs_in_nothing_else() -> None:
    options = {"stride": 2, "padding": 1, "dilation": 2, "padding_mode": "reflect", "bias": False}
    network = nn.Sequential(nn.Conv2d(3, 6, 3, **options))
    _replace_stem(network, 1, "torchvision:any")
    assert repr(network[0]) == repr(nn.Conv2d(1, 6, 3, **options))


def test_a_stem_whose_groups_the_channels_cannot_form_is_refused() -> None:
    with pytest.raises(ModelError, match=r"in 3 groups, which 1 cannot form; set data\.channels=3"):
        _replace_stem(nn.Sequential(nn.Conv2d(3, 6, 3, groups=3)), 1, "torchvision:any")


def test_a_size_that_a_network_does_not_take_is_named() -> None:
    fixed = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=2).train()
    said = r"VisionTransformer \(model\.name=vit\) does not take images of 256 pixels .*data\.evaluation_size"
    with pytest.raises(ModelError, match=said):
        check_accepts(fixed, 256, channels=3, name="vit")
    assert fixed.training
    check_accepts(small_resnet(2, 3, width=4), 64, channels=3, name="small_resnet")


def test_what_would_let_a_network_take_any_size_is_said() -> None:
    flat = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 32 * 32, 2))
    check_accepts(flat, 32, channels=3, name="flat")
    with pytest.raises(ModelError, match=r"does not take images of 32x48 pixels .*global average pooling"):
        check_accepts(flat, (32, 48), channels=3, name="flat")
    swin = timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1), num_classes=2)
    with pytest.raises(ModelError, match=r"images of 256 pixels .*strict_img_size: false"):
        check_accepts(swin, 256, channels=3, name="swin")
    options = {"depths": (1, 1, 1, 1), "num_classes": 2, "strict_img_size": False}
    check_accepts(timm.create_model("swin_tiny_patch4_window7_224", **options), 256, channels=3, name="swin")


@pytest.mark.parametrize("error", [IndexError, TypeError, KeyError])
def test_whatever_a_network_of_ones_own_raises_is_named(error: type[Exception]) -> None:
    class Small(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[2] > 16:
                raise error("no such place")
            return x

    with pytest.raises(ModelError, match=rf"does not take images of 32 pixels \({error.__name__}: .*no such place"):
        check_accepts(Small(), 32, channels=3, name="small")


def test_finding_out_leaves_the_network_as_it_was() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x

    network = Counting()
    check_accepts(network, 8, channels=3, name="counting")
    assert (network.calls.item(), network.training) == (0, True)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("width", each) for each in (1.5, "abc", True, None, [4])),
        *(("stages", each) for each in (1.5, "3")),
        *(("dropout", each) for each in ("abc", True, math.nan)),
        ("zero_init_residual", 1),
    ],
)
def test_an_option_of_another_type_is_refused_by_name(option: str, value: Any) -> None:
    message = refusal(ModelSection(options={option: value}))
    assert message.startswith(f"model.options.{option}={value!r}: small_resnet needs {option} as ")


def test_options_of_every_network_of_ours_are_checked_by_type() -> None:
    for name, option in (("speed_net", "logit_scale"), ("lecture_net", "channels")):
        assert refusal(ModelSection(name=name, options={option: "abc"})).startswith(f"model.options.{option}='abc': ")
    with pytest.raises(ModelError, match=r"model.options.dropout='abc': gpt needs dropout as a number"):
        build_language_model(ModelSection(name="gpt", options={"dropout": "abc"}), vocabulary=20, context=12)
    with pytest.raises(ModelError, match=r"model.options.embedding=1.5: dlrm needs embedding as a whole number"):
        build_click_model(ModelSection(name="dlrm", options={"embedding": 1.5}), dense_features=2, table_rows=[3])


@pytest.mark.parametrize("name", ["resnet50.a3_in1k", "tf_efficientnet_b4", "resnet10t"])
def test_the_settings_are_those_that_train_py_resolves(name: str) -> None:
    found = published_settings(name)
    assert found is not None
    wanted = resolve_data_config({}, pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    assert (3, found["image_size"], found["image_size"]) == wanted["input_size"]
    assert (found["interpolation"], found["crop"]) == (wanted["interpolation"], wanted["crop_pct"])
    assert (found["mean"], found["std"]) == (wanted["mean"], wanted["std"])


@pytest.mark.parametrize("name", ["my_own_net", "resnet50.no_such_weights", "hf-hub:user/net", ""])
def test_a_name_that_timm_does_not_have_has_none(name: str) -> None:
    assert published_settings(name) is None


def test_weights_of_a_network_whose_backbone_has_no_default_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.models.build.urlopen", lambda *_, **__: BytesIO())
    monkeypatch.setattr("torch.hub.get_dir", lambda: "nowhere")
    assert check_published(ModelSection(name="torchvision:fasterrcnn_resnet50_fpn_v2", pretrained=True))
