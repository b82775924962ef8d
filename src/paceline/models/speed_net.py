"""The network of the CIFAR-10 speed runs: a whitening layer and three blocks of convolutions.

Modelled on the public record runs (Page, "How to Train Your ResNet", 2018; Jordan, arXiv:2404.00498, 2024):

    image -> whitening -> activation -> blocks x [convolution, pool 2x2, norm, activation,
                                                  (depth - 1) x (convolution, norm, activation)]
          -> largest over the pixels -> linear, without bias -> x logit_scale

A block of three convolutions adds its first convolution's output to its last one's. Convolutions are initialised close
to the identity: for each input, one filter passes that input through.

The first layer whitens the training images' patches. Neighbouring pixels are similar, so a plain first layer mostly
sees one direction of its input: the brightness. The filters here are the eigenvectors of the patches' second moments,
each divided by ``sqrt(eigenvalue + eps)``, and their negatives. So all outputs have about the same size and none
repeats another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import ModelError
from paceline.models.factories import check_options

_SMALLEST_POOLED_SIDE = 4
_WITH_SHORTCUT = 3
_WIDEST = 16_384
_NORM_EPS = 1e-6
_NORM_MOMENTUM = 0.4  # momentum of the running statistics: short runs need a large one
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": functional.gelu, "relu": functional.relu}


class ConvGroup(nn.Module):
    """Widen, halve the image, and refine with further convolutions of the same width."""

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
        x = self.convs[0](x)
        if min(x.shape[-2:]) >= _SMALLEST_POOLED_SIDE:
            x = functional.max_pool2d(x, kernel_size=2)
        x = first = self.activation(self.norms[0](x))
        for number in range(1, len(self.convs)):
            x = self.norms[number](self.convs[number](x))
            if number == _WITH_SHORTCUT - 1:
                x = x + first
            x = self.activation(x)
        return x


class SpeedNet(nn.Module):
    """Whitening, blocks, global max pooling, linear classifier; see :func:`speed_net`."""

    def __init__(self, num_classes: int, whitening: Whitening, blocks: Sequence[ConvGroup], logit_scale: float) -> None:
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
        depth: Convolutions per block, 1 to 3; with 3, the first one's output is added to the last one's (He et al.
            2015).
        patch: Side in pixels of the whitened patches.
        logit_scale: Factor on the logits, which keeps the initial ones small for any size of the weights and their
            learning rate; by default 1 / inputs, with weights of standard deviation 1.
        activation: ``gelu`` or ``relu``.

    Raises:
        ModelError: If an option is out of range.
    """
    are_widths = len(widths) > 0 and all(1 <= width <= _WIDEST for width in widths)
    rules = (
        ("widths", widths, are_widths, f"as a list of whole numbers from 1 to {_WIDEST}"),
        ("depth", depth, depth in (1, 2, 3), "of 1, 2 or 3"),
        ("patch", patch, patch in (1, 2, 3), "of 1, 2 or 3"),
        ("activation", activation, activation in _ACTIVATIONS, "of " + " or ".join(_ACTIVATIONS)),
    )
    check_options("speed_net", rules)
    whitening = Whitening(in_channels, patch)
    blocks = [
        ConvGroup(n, m, depth=depth, activation=activation) for n, m in pairwise((whitening.out_channels, *widths))
    ]
    model = SpeedNet(num_classes, whitening, blocks, 1 / widths[-1] if logit_scale is None else logit_scale)
    _initialize(model, unit_head=logit_scale is None)
    return model


@torch.no_grad()
def _initialize(model: SpeedNet, *, unit_head: bool) -> None:
    for block in model.blocks:
        for conv in block.convs:  # type: ignore[union-attr]  # a list of modules
            # One filter per input passes it through; the others keep torch's initialisation.
            nn.init.dirac_(conv.weight[: conv.in_channels])
    if unit_head:
        model.head.weight.div_(model.head.weight.std())


# Added to the eigenvalues; directions below it are treated as noise and not amplified. Images are normalised.
_EPS = 5e-4
WHITENING_IMAGES = 2048
"""Number of training images for the patches' second moments: at 32 pixels they contain two million patches."""


class Whitening(nn.Conv2d):
    """A convolution with filters computed from training images: one per patch direction, and its negative.

    Before :meth:`begin_from` its filters are random, as in any convolution. To keep the computed filters, use
    ``model.frozen``.
    """

    def __init__(self, in_channels: int, kernel_size: int) -> None:
        super().__init__(in_channels, 2 * in_channels * kernel_size**2, kernel_size)
        # The bias starts at 0: whitened data has zero mean.
        nn.init.zeros_(self.bias)  # type: ignore[arg-type]  # there is one

    @torch.no_grad()
    def begin_from(self, images: Tensor) -> None:
        """Compute the filters from normalised images [N, C, H, W]: the same images give the same filters.

        Raises:
            ModelError: If images are smaller than a patch, or not finite.
        """
        filters = whitening_filters(images, self.kernel_size[0])
        self.weight.copy_(torch.cat((filters, -filters)))


def whitening_filters(images: Tensor, kernel_size: int) -> Tensor:
    """Return filters [C k k, C, k, k] whose outputs on these images are uncorrelated with mean square near 1.

    Computed in float64. Each eigenvector's sign is chosen so that its entry of largest magnitude is positive, so the
    result does not depend on the linear algebra library.

    Args:
        images: Normalised, [N, C, H, W].
        kernel_size: Side of a patch.

    Raises:
        ModelError: If images are smaller than a patch, or not finite.
    """
    channels = images.shape[1]
    if min(images.shape[-2:]) < kernel_size or len(images) == 0:
        raise ModelError(
            f"a whitening layer of {kernel_size} x {kernel_size} pixels finds no patches for its initialisation in "
            f"{len(images)} images of {images.shape[-2]} x {images.shape[-1]}; make it smaller (model.options)."
        )
    moments = _second_moments(images, kernel_size)
    if not moments.isfinite().all():
        raise ModelError("the images that initialise a whitening layer are not finite; see data.mean and data.std.")
    values, vectors = torch.linalg.eigh(moments)
    vectors = vectors.T.flip(0)  # largest eigenvalue first, one per row
    largest = vectors.gather(1, vectors.abs().argmax(dim=1, keepdim=True))
    scaled = vectors * largest.sign() / (values.flip(0).clamp_min(0) + _EPS).sqrt()[:, None]
    filters: Tensor = scaled.reshape(-1, channels, kernel_size, kernel_size).float()
    return filters


def _second_moments(images: Tensor, kernel_size: int) -> Tensor:
    """Mean outer product of the patches with themselves, float64 [C k k, C k k]."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for part in torch.split(images, 256):  # all patches at once would take more than four times the images' memory
        patches = nn.functional.unfold(part.double(), kernel_size).transpose(1, 2).flatten(0, 1)
        total, count = total + patches.T @ patches, count + len(patches)
    return total / count


def whitening_layers(network: nn.Module) -> list[Whitening]:
    """Return the layers of a network that are initialised from images."""
    return [module for module in network.modules() if isinstance(module, Whitening)]
