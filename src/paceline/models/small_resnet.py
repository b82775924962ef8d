"""The network of the digits and CIFAR-10 recipes: a residual network for images of 8 to 32 pixels.

A basic-block ResNet (He et al., "Deep Residual Learning for Image Recognition", CVPR 2016) in the shape of Page's "How
to Train Your ResNet" (2018): a stage changes the width with one plain convolution, then refines with residual blocks.
Unlike in that network, the image is pooled before the widening convolution's BatchNorm, so that the norm and its ReLU
process a quarter of the pixels.

    image -> stem (width) -> stages x [widen x2, pool 2x2, depth x residual block] -> mean -> classifier
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.models.factories import check_options

_SMALLEST_POOLED_SIDE = 4
_MOST_STAGES, _DEEPEST, _WIDEST = 12, 1000, 16_384


class ConvNorm(nn.Module):
    """3x3 convolution, optional 2x2 max-pooling, BatchNorm; the norm's shift replaces a bias."""

    def __init__(self, in_channels: int, out_channels: int, *, pool: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, in_channels, H, W] to [N, out_channels, H, W], with halved sides if pooled."""
        x = self.conv(x)
        # An 8-pixel image would shrink to one pixel, leaving BatchNorm one value per sample: stop at two.
        if self.pool and min(x.shape[-2:]) >= _SMALLEST_POOLED_SIDE:
            x = functional.max_pool2d(x, kernel_size=2)
        normalized: Tensor = self.norm(x)
        return normalized


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with an identity shortcut; width and image size stay the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = ConvNorm(channels, channels)
        self.second = ConvNorm(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, channels, H, W] to the same shape."""
        return functional.relu(x + self.second(functional.relu(self.first(x))))


class Stage(nn.Module):
    """Widen, halve the image, and refine with ``depth`` residual blocks."""

    def __init__(self, in_channels: int, out_channels: int, depth: int) -> None:
        super().__init__()
        self.widen = ConvNorm(in_channels, out_channels, pool=True)
        self.refine = nn.Sequential(*(ResidualBlock(out_channels) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, in_channels, H, W] to [N, out_channels, H / 2, W / 2]; sides stay at least 2."""
        refined: Tensor = self.refine(functional.relu(self.widen(x)))
        return refined


class SmallResNet(nn.Module):
    """Stem, stages, global mean pooling, dropout, linear classifier; see :func:`small_resnet`."""

    def __init__(
        self, num_classes: int, in_channels: int, *, widths: Sequence[int], depth: int, dropout: float
    ) -> None:
        super().__init__()
        self.stem = ConvNorm(in_channels, widths[0])
        self.stages = nn.Sequential(*(Stage(narrow, wide, depth) for narrow, wide in pairwise(widths)))
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map float images [N, in_channels, H, W], sides of at least 4 pixels, to logits [N, num_classes]."""
        features = self.stages(functional.relu(self.stem(x))).mean(dim=(2, 3))
        logits: Tensor = self.classifier(self.dropout(features))
        return logits


def small_resnet(
    num_classes: int,
    in_channels: int = 3,
    *,
    width: int = 16,
    stages: int = 3,
    depth: int = 1,
    dropout: float = 0.0,
    zero_init_residual: bool = True,
) -> nn.Module:
    """Build a small residual network for images of 8 to 32 pixels.

    Args:
        num_classes: Outputs of the classifier.
        in_channels: 1 for greyscale, 3 for colour.
        width: Channels of the stem; each stage doubles them.
        stages: Number of stages; each halves the image down to a minimum side of 2; three reduce 32 pixels to 4.
        depth: Residual blocks per stage; the net has ``2 + stages * (1 + 2 * depth)`` weighted layers.
        dropout: Probability in [0, 1) of dropping a feature before the classifier.
        zero_init_residual: Start each residual block as the identity (Goyal et al., "Accurate, Large
            Minibatch SGD: Training ImageNet in 1 Hour", 2017, section 5.1).

    Raises:
        ModelError: If an option is out of range.
    """
    rules = (
        ("width", width, width >= 1, "at least 1"),
        ("stages", stages, 1 <= stages <= _MOST_STAGES, f"from 1 to {_MOST_STAGES}"),
        ("width", width, width * 2 ** min(stages, _MOST_STAGES) <= _WIDEST, f"at most {_WIDEST} after the last stage"),
        ("depth", depth, 0 <= depth <= _DEEPEST, f"from 0 to {_DEEPEST}"),
        ("dropout", dropout, 0 <= dropout < 1, "in [0, 1)"),
    )
    check_options("small_resnet", rules)
    widths = [width * 2**index for index in range(stages + 1)]
    model = SmallResNet(num_classes, in_channels, widths=widths, depth=depth, dropout=dropout)
    _initialize(model, zero_init_residual=zero_init_residual)
    return model


@torch.no_grad()
def _initialize(model: nn.Module, *, zero_init_residual: bool) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            # He et al., "Delving Deep into Rectifiers" (ICCV 2015), in the fan-out form used for ResNets.
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, ResidualBlock) and zero_init_residual:
            nn.init.zeros_(module.second.norm.weight)
