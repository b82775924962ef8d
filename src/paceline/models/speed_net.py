"""The network of the CIFAR-10 speed runs: a whitening layer and three blocks of convolutions.

In the shape of the public records' (Page, "How to Train Your ResNet", 2018; Jordan, arXiv:2404.00498, 2024):

    image -> whitening -> activation -> blocks x [convolution, pool 2x2, norm, activation,
                                                  (depth - 1) x (convolution, norm, activation)]
          -> largest over the pixels -> linear, without bias -> x logit_scale

A block of three convolutions adds what its first gave to what its last gives. Convolutions begin as near to the
identity as they can: as many of their filters as they have inputs hand one input through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.models.factories import check_options
from paceline.models.whitening import Whitening

_SMALLEST_POOLED_SIDE = 4
_WITH_SHORTCUT = 3
_WIDEST = 16_384
_NORM_EPS = 1e-6
_NORM_MOMENTUM = 0.4  # weight of a batch in the running statistics: short runs need much of it
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": functional.gelu, "relu": functional.relu}


class Block(nn.Module):
    """Widen, halve the image, refine with further convolutions of the same width."""

    def __init__(self, in_channels: int, out_channels: int, *, depth: int, activation: str) -> None:
        super().__init__()
        widths = (in_channels, *(out_channels,) * depth)
        self.convs = nn.ModuleList(nn.Conv2d(n, m, 3, padding=1, bias=False) for n, m in pairwise(widths))
        self.norms = nn.ModuleList(
            nn.BatchNorm2d(out_channels, eps=_NORM_EPS, momentum=_NORM_MOMENTUM) for _ in range(depth)
        )
        self.activation = _ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, in_channels, H, W] to [N, out_channels, H / 2, W / 2]; sides below four are not halved."""
        x = first = self.activation(self.norms[0](_halved(self.convs[0](x))))
        for number in range(1, len(self.convs)):
            x = self.norms[number](self.convs[number](x))
            if number == _WITH_SHORTCUT - 1:
                x = x + first
            x = self.activation(x)
        return x


def _halved(x: Tensor) -> Tensor:
    return functional.max_pool2d(x, kernel_size=2) if min(x.shape[-2:]) >= _SMALLEST_POOLED_SIDE else x


class SpeedNet(nn.Module):
    """Whitening, blocks, the largest over the pixels, a linear classifier; see :func:`speed_net`."""

    def __init__(self, num_classes: int, whitening: Whitening, blocks: Sequence[Block], logit_scale: float) -> None:
        super().__init__()
        self.whitening = whitening
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(blocks[-1].norms[0].num_features, num_classes, bias=False)  # type: ignore[arg-type]  # an int
        self.logit_scale = logit_scale

    def forward(self, x: Tensor) -> Tensor:
        """Map float images [N, in_channels, H, W], sides of at least 4 pixels, to logits [N, num_classes]."""
        features = self.blocks(self.blocks[0].activation(self.whitening(x))).amax(dim=(2, 3))  # type: ignore[operator]  # a function
        logits: Tensor = self.head(features) * self.logit_scale
        return logits


def speed_net(
    num_classes: int,
    in_channels: int = 3,
    *,
    widths: Sequence[int] = (64, 256, 256),
    depth: int = 2,
    patch: int = 2,
    logit_scale: float | None = None,
    activation: str = "gelu",
) -> nn.Module:
    """Build a fast convolutional network for images of 8 to 32 pixels.

    Args:
        num_classes: Outputs of the classifier.
        in_channels: 1 for greyscale, 3 for colour.
        widths: Channels of each block.
        depth: Convolutions of each block, 1 to 3; the third is added to the first (He et al. 2015).
        patch: Side in pixels of the patches that the first layer whitens.
        logit_scale: Factor on the classifier's answers, which keeps the first ones small however large its weights
            and their learning rate are; by default one over its inputs, with weights of standard deviation 1.
        activation: ``gelu`` or ``relu``.

    Raises:
        ModelError: If an option is out of range.
    """
    are_widths = (
        isinstance(widths, list | tuple) and widths and all(isinstance(w, int) and 1 <= w <= _WIDEST for w in widths)
    )
    rules = (
        ("widths", widths, are_widths, f"as a list of whole numbers from 1 to {_WIDEST}"),
        ("depth", depth, depth in (1, 2, 3), "of 1, 2 or 3"),
        ("patch", patch, patch in (1, 2, 3), "of 1, 2 or 3"),
        ("activation", activation, activation in _ACTIVATIONS, "of " + " or ".join(_ACTIVATIONS)),
    )
    check_options("speed_net", rules)
    whitening = Whitening(in_channels, patch)
    blocks = [Block(n, m, depth=depth, activation=activation) for n, m in pairwise((whitening.out_channels, *widths))]
    model = SpeedNet(num_classes, whitening, blocks, 1 / widths[-1] if logit_scale is None else logit_scale)
    _initialize(model, unit_head=logit_scale is None)
    return model


@torch.no_grad()
def _initialize(model: SpeedNet, *, unit_head: bool) -> None:
    for block in model.blocks:
        for conv in block.convs:  # type: ignore[union-attr]  # a list of modules
            # As many filters as there are inputs hand one through; others keep torch's own draw.
            nn.init.dirac_(conv.weight[: conv.in_channels])
    if unit_head:
        model.head.weight.div_(model.head.weight.std())
