"""The classifier is found in the networks of timm, torchvision and Transformers, and in those around them."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import nn
from torchvision import models

from paceline.classifier import classifier_layers

NETWORKS = {
    "resnet10t": ["fc"],
    "tf_efficientnet_lite0": ["classifier"],
    "vit_tiny_patch16_224": ["head"],
    "test_convnext": ["head.fc"],
    "deit_tiny_distilled_patch16_224": ["head", "head_dist"],
    "torchvision:resnet18": ["fc"],
    "torchvision:mobilenet_v3_small": ["classifier.3"],
    "torchvision:vgg11": ["classifier.6"],
    "torchvision:vit_b_32": ["heads.head"],
    "torchvision:swin_t": ["head"],
    "torchvision:retinanet_resnet50_fpn": ["head.classification_head.cls_logits"],
    "torchvision:maskrcnn_resnet50_fpn": ["roi_heads.box_predictor", "roi_heads.mask_predictor"],
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_timm_and_torchvision(name: str) -> None:
    library, _, kind = name.rpartition(":")
    detector = {"weights_backbone": None} if "fpn" in name else {}
    with torch.device("meta"):
        network = models.get_model(kind, **detector) if library else timm.create_model(kind, num_classes=7)
    assert classifier_layers(network) == NETWORKS[name]


@pytest.mark.parametrize(
    ("kind", "sizes", "expected"),
    [
        ("Roberta", {"hidden_size": 8, "intermediate_size": 8}, ["classifier.dense", "classifier.out_proj"]),
        ("GPT2", {"n_embd": 8, "n_head": 2, "n_layer": 1}, ["score"]),
    ],
)
def test_networks_of_transformers(kind: str, sizes: dict[str, Any], expected: list[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(vocab_size=9, num_hidden_layers=1, num_attention_heads=2, **sizes)
    network = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    assert classifier_layers(network) == expected
    assert classifier_layers(nn.Sequential(network)) == [f"0.{name}" for name in expected]


def test_any_other_network() -> None:
    assert classifier_layers(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.ReLU())) == ["1"]
    assert classifier_layers(nn.Sequential(nn.Conv2d(1, 1, 1))) == []
