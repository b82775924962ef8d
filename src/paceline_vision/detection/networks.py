"""Detectors by their recipe names: torchvision's, and small ones for small pictures with less than a million
parameters.

The small ones are built from torchvision's components: Mask R-CNN (He et al. 2017), Faster R-CNN (Ren et al. 2015) and
RetinaNet (Lin et al. 2017), each on a feature pyramid (Lin et al. 2017). They add a narrow residual backbone with
GroupNorm, which trains from scratch with few pictures per micro-batch (Wu and He 2018), anchors for small objects, and
narrow heads.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import ModelError, StorageError, did_you_mean
from paceline.models.factories import (
    BACKBONE_WEIGHTS,
    TORCHVISION,
    call_factory,
    check_options,
    named_factory,
    no_weights,
    unknown_model,
)
from paceline.plugins.loading import without_compiler
from paceline.plugins.references import is_reference
from paceline.recipe.data import Boxes
from paceline.recipe.model import ModelSection
from paceline.storage.hub import limited_waits

_GROUP = 8  # channels per GroupNorm group
_RATIOS = (0.5, 1.0, 2.0)
_MOST_LEVELS, _WIDEST = 8, 16_384
_HIDDEN = 128  # units of the box head
# About an eighth of torchvision's numbers: pictures of a hundred pixels hold few objects.
_FEWER = {
    "rpn_pre_nms_top_n_train": 256,
    "rpn_post_nms_top_n_train": 128,
    "rpn_pre_nms_top_n_test": 256,
    "rpn_post_nms_top_n_test": 64,
    "rpn_batch_size_per_image": 64,
    "box_batch_size_per_image": 32,
    "box_detections_per_img": 20,
}


class _Block(nn.Module):
    """Two 3x3 convolutions with a shortcut; the first may downsample and widen."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(narrow, wide, 3, stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(wide // _GROUP, wide)
        self.second = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(wide // _GROUP, wide)
        self.shortcut = nn.Conv2d(narrow, wide, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        refined = self.second_norm(self.second(functional.relu(self.first_norm(self.first(x)))))
        return functional.relu(refined + self.shortcut(x))


class SmallPyramid(nn.Module):
    """A residual backbone with a feature pyramid on its stages, at 1/4, 1/8, … of the picture's size.

    Attributes:
        out_channels: Channels of every level.
    """

    def __init__(self, *, width: int, levels: int, channels: int) -> None:
        from torchvision.ops import FeaturePyramidNetwork

        super().__init__()
        widths = [width * 2**index for index in range(levels + 1)]
        self.out_channels = channels
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, padding=1, bias=False), nn.GroupNorm(width // _GROUP, width), nn.ReLU()
        )
        self.stages = nn.ModuleList(_Block(narrow, wide, stride=2) for narrow, wide in pairwise(widths))
        self.pyramid = FeaturePyramidNetwork(widths[1:], channels)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Map [N, 3, H, W] to levels [N, channels, H / 4, W / 4] and coarser, by name."""
        outputs: OrderedDict[str, Tensor] = OrderedDict()
        x = self.stem(x)
        for index, stage in enumerate(self.stages):
            x = outputs[str(index)] = stage(x)
        levels: dict[str, Tensor] = self.pyramid(outputs)
        return levels


def small_fasterrcnn(
    num_classes: int, *, width: int = 16, levels: int = 3, channels: int = 32, smallest: int = 12, **options: Any
) -> nn.Module:
    """Build a small Faster R-CNN.

    Args:
        num_classes: Number of classes, including the background.
        width: Channels of the stem, a multiple of 8; each stage doubles them.
        levels: Number of stages and pyramid levels; the first level has 1/4 of the picture's size.
        channels: Channels of each level.
        smallest: Side in pixels of the first level's anchors; each level doubles it.
        options: Further options of torchvision's ``FasterRCNN``.
    """
    from torchvision.models.detection import FasterRCNN

    backbone = _backbone(width, levels, channels)
    network: nn.Module = FasterRCNN(backbone, **(_two_stages(num_classes, levels, channels, smallest) | options))
    return network


def small_maskrcnn(
    num_classes: int, *, width: int = 16, levels: int = 3, channels: int = 32, smallest: int = 12, **options: Any
) -> nn.Module:
    """Build a small Mask R-CNN; arguments as for :func:`small_fasterrcnn`."""
    from torchvision.models.detection import MaskRCNN
    from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
    from torchvision.ops import MultiScaleRoIAlign

    backbone = _backbone(width, levels, channels)
    masks = {
        "mask_roi_pool": MultiScaleRoIAlign(_names(levels), output_size=14, sampling_ratio=1),
        "mask_head": MaskRCNNHeads(channels, (channels, channels), dilation=1),
        "mask_predictor": MaskRCNNPredictor(channels, channels, num_classes),
    }
    arguments = _two_stages(num_classes, levels, channels, smallest) | masks
    network: nn.Module = MaskRCNN(backbone, **(arguments | options))
    return network


def small_retinanet(
    num_classes: int, *, width: int = 16, levels: int = 3, channels: int = 32, smallest: int = 12, **options: Any
) -> nn.Module:
    """Build a small RetinaNet; arguments as for :func:`small_fasterrcnn`, with further options of ``RetinaNet``."""
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    backbone = _backbone(width, levels, channels)
    # Three sizes per level, as in the paper: there is no second stage to refine a box.
    sizes = tuple(tuple(int(smallest * 2**level * 2 ** (k / 3)) for k in range(3)) for level in range(levels))
    defaults = {"anchor_generator": AnchorGenerator(sizes, (_RATIOS,) * levels), "detections_per_img": 20}
    network: nn.Module = RetinaNet(backbone, num_classes, **(defaults | options))
    return network


def _backbone(width: int, levels: int, channels: int) -> SmallPyramid:
    is_wide = _GROUP <= width <= _WIDEST and width % _GROUP == 0
    rules = (
        ("width", width, is_wide, f"as a multiple of {_GROUP} up to {_WIDEST}"),
        ("levels", levels, 1 <= levels <= _MOST_LEVELS, f"from 1 to {_MOST_LEVELS}"),
        ("channels", channels, 1 <= channels <= _WIDEST, f"from 1 to {_WIDEST}"),
    )
    check_options("a small detector", rules)
    return SmallPyramid(width=width, levels=levels, channels=channels)


def _two_stages(num_classes: int, levels: int, channels: int, smallest: int) -> dict[str, Any]:
    """Return the components of a small R-CNN as keyword arguments."""
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.ops import MultiScaleRoIAlign

    sizes = tuple((smallest * 2**level,) for level in range(levels))
    return {
        **_FEWER,
        "rpn_anchor_generator": AnchorGenerator(sizes, (_RATIOS,) * levels),
        "box_roi_pool": MultiScaleRoIAlign(_names(levels), output_size=7, sampling_ratio=1),
        "box_head": TwoMLPHead(channels * 7**2, _HIDDEN),
        "box_predictor": FastRCNNPredictor(_HIDDEN, num_classes),
    }


def _names(levels: int) -> list[str]:
    return [str(level) for level in range(levels)]


OWN_DETECTORS: dict[str, Callable[..., nn.Module]] = {
    "small_fasterrcnn": small_fasterrcnn,
    "small_maskrcnn": small_maskrcnn,
    "small_retinanet": small_retinanet,
}

_FAMILIES = ("fasterrcnn", "maskrcnn", "retinanet", "fcos", "ssd")  # keypoint networks have other targets
_SIZES = ("min_size", "max_size")
_WHOLE = 512  # in pixels, a multiple of every pyramid level's stride


@without_compiler()
def build_detector(model: ModelSection, boxes: Boxes, *, num_classes: int) -> nn.Module:
    """Build the recipe's detector.

    Args:
        model: The recipe's `model` section.
        boxes: Picture sizes: in evaluation the network itself resizes pictures, and maps its detections back.
        num_classes: Number of classes, without the background.

    Raises:
        ModelError: If the name is unknown, the factory does not accept the options, the network does not have
            torchvision's detector interface, or requested pretrained weights are not available.
    """
    sizes = [name for name in _SIZES if name in model.options]
    if sizes:
        raise ModelError(
            f"model.options.{sizes[0]} has no effect: set data.detection.short_sides and "
            "data.detection.long_side, which set the picture size."
        )
    factory = named_factory(model, OWN_DETECTORS)
    if factory is not None:
        network = call_factory(model, factory, num_classes=num_classes + 1)
    elif model.name.removeprefix(TORCHVISION) in _published() and model.name.startswith(TORCHVISION):
        network = build_published(model, num_classes + 1)
    else:
        raise unknown_model(model, "detector", detector_names())
    if not hasattr(network, "transform"):
        raise ModelError(
            f"model.name={model.name} gave a {type(network).__name__}, which is not a torchvision detector "
            "(GeneralizedRCNN, RetinaNet, FCOS, SSD).",
            key="model.name",
            value=model.name,
        )
    _refuse_unknown(model, network)
    transform: Any = network.transform
    if transform.fixed_size is not None and boxes.short_sides is not None:
        width, height = transform.fixed_size
        raise ModelError(
            f"model.name={model.name} resizes each picture to {width}x{height} pixels, so data.detection.short_sides "
            "must be off.",
            key="model.name",
            value=model.name,
        )
    from paceline_vision.detection.shown_pictures import FixedSizeTransform

    network.transform = FixedSizeTransform(transform, boxes)
    _fix_scales(network)
    return network


def detector_names() -> list[str]:
    """Return the names of all detectors; imports torchvision."""
    return [*OWN_DETECTORS, *(f"{TORCHVISION}{name}" for name in _published())]


def predicts_masks(name: str) -> bool:
    """Whether a model's name implies that it predicts masks."""
    return "mask" in name.lower()


def _published() -> list[str]:
    from torchvision.models import detection, list_models

    return [name for name in list_models(module=detection) if name.startswith(_FAMILIES)]


def build_published(model: ModelSection, classes: int) -> nn.Module:
    """Build one of torchvision's networks; ``model.pretrained`` loads ImageNet weights into its backbone.

    Raises:
        ModelError: If the weights are not available, or the network does not accept the options.
    """
    from torchvision.models import get_model

    # torchvision publishes whole networks for COCO's classes and backbones for ImageNet's; training starts from the
    # latter.
    name = model.name.removeprefix(TORCHVISION)
    backbone = BACKBONE_WEIGHTS.get(name, "DEFAULT") if model.pretrained else None
    sizes = {"weights": None, "weights_backbone": backbone, "num_classes": classes}
    try:
        with limited_waits() if model.pretrained else nullcontext():
            network: nn.Module = get_model(name, **sizes, **model.options)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"model.name={model.name}: model.options {model.options} do not fit: {error}.",
            key="model.name",
            value=model.name,
        ) from error
    except (EOFError, OSError, RuntimeError, UnpicklingError, StorageError) as error:
        if not model.pretrained:
            raise
        raise no_weights(model, error, "the backbone of ") from error
    return network


def _refuse_unknown(model: ModelSection, network: nn.Module) -> None:
    """Reject unknown options: torchvision's classes pass them on and then ignore them."""
    if is_reference(model.name):
        return
    readers: list[Callable[..., Any]] = [kind for kind in type(network).__mro__ if kind not in (nn.Module, object)]
    readers += [OWN_DETECTORS[model.name]] if model.name in OWN_DETECTORS else []
    known = {"trainable_backbone_layers", "size_divisible"}
    for each in readers:
        known |= set(inspect.signature(each).parameters) - {"args", "kwargs", "options"}
    unknown = [name for name in model.options if name not in known]
    if unknown:
        raise ModelError(
            f"model.options.{unknown[0]} is unknown to {model.name}.{did_you_mean(unknown[0], known)} It has "
            f"{', '.join(sorted(known))}."
        )


@torch.no_grad()
def _fix_scales(network: nn.Module) -> None:
    """Set each region pooling's scales of the pyramid levels now.

    torchvision infers them once, from the first pictures, and rounds wrongly if these are small and padded. The output
    would then depend on the first pictures, and a resumed run would differ.
    """
    from torchvision.ops import MultiScaleRoIAlign

    pools = [each for each in network.modules() if isinstance(each, MultiScaleRoIAlign)]
    if not pools:
        return
    backbone: Any = copy.deepcopy(network.backbone)
    features = backbone.eval()(torch.zeros(1, 3, _WHOLE, _WHOLE))
    levels = {"0": features} if isinstance(features, torch.Tensor) else features
    # Only the levels' sizes matter, and a network on the meta device has no data to pool.
    with torch.device("cpu"):
        sizes = {name: torch.zeros(1, 1, *level.shape[-2:]) for name, level in levels.items()}
        for pool in pools:
            pool(sizes, [torch.tensor([[0.0, 0.0, 8.0, 8.0]])], [(_WHOLE, _WHOLE)])
