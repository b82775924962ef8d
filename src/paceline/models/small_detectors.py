"""Detectors for small pictures, of less than a million parameters, made of torchvision's parts.

The parts are torchvision's: Mask R-CNN (He et al. 2017), Faster R-CNN (Ren et al. 2015) and RetinaNet (Lin et al.
2017), each on a feature pyramid (Lin et al. 2017). Ours are a narrow residual backbone with GroupNorm, which trains
from scratch with few pictures in a micro-batch (Wu and He 2018), anchors for small objects, and narrow heads.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from paceline.models.factories import check_options

_GROUP = 8  # channels that GroupNorm looks at together
_RATIOS = (0.5, 1.0, 2.0)
_MOST_LEVELS, _WIDEST = 8, 16_384
_HIDDEN = 128  # units of the box head
# Of torchvision's numbers an eighth or so: pictures of a hundred pixels hold few objects.
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
    """Two 3x3 convolutions around a shortcut; the first may halve the picture and widen it."""

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
    """A residual backbone with a feature pyramid on its stages, at a quarter, an eighth, … of the picture.

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
        found: OrderedDict[str, Tensor] = OrderedDict()
        x = self.stem(x)
        for index, stage in enumerate(self.stages):
            x = found[str(index)] = stage(x)
        levels: dict[str, Tensor] = self.pyramid(found)
        return levels


def small_fasterrcnn(
    num_classes: int, *, width: int = 16, levels: int = 3, channels: int = 32, smallest: int = 12, **options: Any
) -> nn.Module:
    """Build a small Faster R-CNN.

    Args:
        num_classes: Classes, the background among them.
        width: Channels of the stem, a multiple of 8; each stage doubles them.
        levels: Stages, and levels of the pyramid, the first of which has a quarter of the picture's sides.
        channels: Of each level.
        smallest: Side in pixels of the first level's anchors; each level doubles it.
        options: Further ones of torchvision's ``FasterRCNN``.
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
    both = _two_stages(num_classes, levels, channels, smallest) | masks
    network: nn.Module = MaskRCNN(backbone, **(both | options))
    return network


def small_retinanet(
    num_classes: int, *, width: int = 16, levels: int = 3, channels: int = 32, smallest: int = 12, **options: Any
) -> nn.Module:
    """Build a small RetinaNet; arguments as for :func:`small_fasterrcnn`, further ones of ``RetinaNet``."""
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    backbone = _backbone(width, levels, channels)
    # Three sizes a level, as in the paper: there is no second stage to refine a box.
    sizes = tuple(tuple(int(smallest * 2**level * 2 ** (k / 3)) for k in range(3)) for level in range(levels))
    anchors = AnchorGenerator(sizes, (_RATIOS,) * levels)
    own = {"anchor_generator": anchors, "detections_per_img": 20}
    network: nn.Module = RetinaNet(backbone, num_classes, **(own | options))
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
    """What a small R-CNN is made of, as keyword arguments."""
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
