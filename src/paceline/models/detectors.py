"""Detectors by their names in recipes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.errors import ModelError, did_you_mean
from paceline.models.factories import check_types, named_factory
from paceline.models.small_detectors import small_fasterrcnn, small_maskrcnn, small_retinanet
from paceline.recipe.data import Boxes
from paceline.recipe.model import Model
from paceline.references import is_reference

OWN_DETECTORS: dict[str, Callable[..., nn.Module]] = {
    "small_fasterrcnn": small_fasterrcnn,
    "small_maskrcnn": small_maskrcnn,
    "small_retinanet": small_retinanet,
}

_TORCHVISION = "torchvision:"
# Those that take pictures of any size. Its SSDs take one, and its keypoint networks learn other things.
_FAMILIES = ("fasterrcnn", "maskrcnn", "retinanet", "fcos")
_SIZES = ("min_size", "max_size")
_WHOLE = 512  # pixels, of which every level is a whole part


def build_detector(model: Model, boxes: Boxes, *, num_classes: int) -> nn.Module:
    """Build the detector of a recipe.

    Args:
        model: The recipe's `model` section.
        boxes: How pictures are shown: in evaluation the network itself resizes them, and its answers back.
        num_classes: Classes of the data, without the background.

    Raises:
        ModelError: If the name is unknown, the options are not the factory's, the network is no detector of
            torchvision's kind, or published weights are asked for and cannot be had.
    """
    taken = [name for name in _SIZES if name in model.options]
    if taken:
        raise ModelError(
            f"model.options.{taken[0]} has no effect: set data.detection.short_sides and "
            "data.detection.long_side, which say how large pictures are shown."
        )
    factory = named_factory(model, OWN_DETECTORS)
    if factory is None and not model.name.startswith(_TORCHVISION):
        known = detector_names()
        raise ModelError(
            f"unknown detector '{model.name}'.{did_you_mean(model.name, known)} Detectors: {', '.join(known)}, or "
            "package.module:factory of your own."
        )
    try:
        if factory is None:
            network = _torchvision(model, num_classes + 1)
        else:
            if model.name in OWN_DETECTORS:
                check_types(model, factory)
            network = factory(num_classes=num_classes + 1, **model.options)
    except (TypeError, ValueError) as error:
        raise ModelError(f"model.name={model.name}: model.options {model.options} do not fit: {error}.") from error
    if not isinstance(network, nn.Module) or not hasattr(network, "transform"):
        raise ModelError(
            f"model.name={model.name} gave a {type(network).__name__}, which is no detector made of torchvision's "
            "parts (GeneralizedRCNN, RetinaNet, FCOS)."
        )
    _refuse_unknown(model, network)
    from paceline.models.shown_pictures import ShownPictures

    network.transform = ShownPictures(network.transform, boxes)
    _settle_scales(network)
    return network


def detector_names() -> list[str]:
    """All detectors that have a name; imports torchvision."""
    return [*OWN_DETECTORS, *(f"{_TORCHVISION}{name}" for name in _published())]


def says_masks(name: str) -> bool:
    """Whether a model's name says that it is for masks."""
    return "mask" in name.lower()


def _published() -> list[str]:
    from torchvision.models import detection, list_models

    return [name for name in list_models(module=detection) if name.startswith(_FAMILIES)]


def _torchvision(model: Model, classes: int) -> nn.Module:
    from torchvision.models import get_model

    name = model.name.removeprefix(_TORCHVISION)
    known = _published()
    if name not in known:
        raise ModelError(
            f"unknown detector '{model.name}'.{did_you_mean(name, known)} Torchvision's are {', '.join(known)}."
        )
    # Published are a whole detector for COCO's classes and a backbone for ImageNet's; training begins with the latter.
    backbone = "DEFAULT" if model.pretrained else None
    try:
        network: nn.Module = get_model(
            name, weights=None, weights_backbone=backbone, num_classes=classes, **model.options
        )
    except (OSError, RuntimeError) as error:
        if not model.pretrained:
            raise
        raise ModelError(
            f"model.pretrained=true: the published weights of the backbone of {model.name} could not be had "
            f"({' '.join(str(error).split())[:200]}); set model.pretrained=false, or model.initialize_from to a local "
            "file."
        ) from error
    return network


def _refuse_unknown(model: Model, network: nn.Module) -> None:
    """Refuse an option that nobody reads: torchvision's classes hand on what they do not know, and then drop it."""
    if is_reference(model.name):
        return
    readers: list[Callable[..., Any]] = [kind for kind in type(network).__mro__ if kind not in (nn.Module, object)]
    readers += [OWN_DETECTORS[model.name]] if model.name in OWN_DETECTORS else []
    known = {"trainable_backbone_layers", "size_divisible"}
    for each in readers:
        known |= set(inspect.signature(each).parameters) - {"args", "kwargs", "options"}
    wrong = [name for name in model.options if name not in known]
    if wrong:
        raise ModelError(
            f"model.options.{wrong[0]} is unknown to {model.name}.{did_you_mean(wrong[0], known)} It knows "
            f"{', '.join(sorted(known))}."
        )


@torch.no_grad()
def _settle_scales(network: nn.Module) -> None:
    """Have each pooling of regions find out now by how much the pyramid's levels are smaller than a picture.

    It does so once, by the first pictures that it sees, and where these are small and padded it rounds wrongly: what
    a network answers would depend on what it was first shown, and a resumed run would not go on as it was.
    """
    from torchvision.ops import MultiScaleRoIAlign

    pools = [each for each in network.modules() if isinstance(each, MultiScaleRoIAlign)]
    if not pools:
        return
    backbone: Any = copy.deepcopy(network.backbone)
    found = backbone.eval()(torch.zeros(1, 3, _WHOLE, _WHOLE))
    levels = {"0": found} if isinstance(found, torch.Tensor) else found
    # Only the levels' sizes matter; and a network that is built without memory (`meta`) has no numbers to pool.
    with torch.device("cpu"):
        sizes = {name: torch.zeros(1, 1, *level.shape[-2:]) for name, level in levels.items()}
        for pool in pools:
            pool(sizes, [torch.tensor([[0.0, 0.0, 8.0, 8.0]])], [(_WHOLE, _WHOLE)])
