"""How does a network begin with a first layer that whitens the training images' patches?

Neighbouring pixels are nearly alike, so that a plain first layer sees mostly one direction of its input: the
brightness. The filters here are the eigenvectors of the patches' second moments, each divided by the square root of
its eigenvalue, so that every output is of about the same size and none repeats another. The idea is from the public
CIFAR-10 records: Page, "How to Train Your ResNet 8" (2019); Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU"
(arXiv:2404.00498, 2024), whose division by ``sqrt(eigenvalue + eps)`` and mirrored filters are used.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.errors import ModelError

# Added to the eigenvalues; below it a direction is taken for noise, and not blown up. Images are normalised.
_EPS = 5e-4
IMAGES = 2048
"""How many training images tell the patches' second moments well enough: of 32 pixels they have two million patches."""


class Whitening(nn.Conv2d):
    """A convolution whose filters are made of the training images: one for each direction of a patch, and its negative.

    Until :meth:`begin_from` its filters are drawn, as any convolution's. A recipe keeps them as they begin with
    ``model.frozen``.
    """

    def __init__(self, in_channels: int, kernel_size: int) -> None:
        super().__init__(in_channels, 2 * in_channels * kernel_size**2, kernel_size)
        # The bias begins at 0: what is whitened has no side that it leans to.
        nn.init.zeros_(self.bias)  # type: ignore[arg-type]  # there is one

    @torch.no_grad()
    def begin_from(self, images: Tensor) -> None:
        """Set the filters by normalised images [N, C, H, W]: the same images give the same filters.

        Raises:
            ModelError: If they are smaller than a patch, or not finite.
        """
        filters = whitening_filters(images, self.kernel_size[0])
        self.weight.copy_(torch.cat((filters, -filters)))


def whitening_filters(images: Tensor, kernel_size: int) -> Tensor:
    """Filters [C k k, C, k, k] whose answers to the patches of these images are uncorrelated and of mean square near 1.

    Computed in float64. Of each eigenvector and its negative, that is taken whose entry of the largest magnitude is
    positive, so that the result does not depend on the linear algebra library's choice.

    Args:
        images: Normalised, [N, C, H, W].
        kernel_size: Side of a patch.

    Raises:
        ModelError: If images are smaller than a patch, or not finite.
    """
    channels = images.shape[1]
    if min(images.shape[-2:]) < kernel_size or len(images) == 0:
        raise ModelError(
            f"a whitening layer of {kernel_size} x {kernel_size} pixels has no patches to begin from in "
            f"{len(images)} images of {images.shape[-2]} x {images.shape[-1]}; make it smaller (model.options)."
        )
    moments = _second_moments(images, kernel_size)
    if not moments.isfinite().all():
        raise ModelError("the images that a whitening layer begins from are not finite; see data.mean and data.std.")
    values, vectors = torch.linalg.eigh(moments)
    vectors = vectors.T.flip(0)  # the strongest first, one a row
    largest = vectors.gather(1, vectors.abs().argmax(dim=1, keepdim=True))
    scaled = vectors * largest.sign() / (values.flip(0).clamp_min(0) + _EPS).sqrt()[:, None]
    filters: Tensor = scaled.reshape(-1, channels, kernel_size, kernel_size).float()
    return filters


def _second_moments(images: Tensor, kernel_size: int) -> Tensor:
    """Mean outer product of the patches with themselves, float64 [C k k, C k k]."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for part in torch.split(images, 256):  # all patches at once would take four times the images' memory and more
        patches = nn.functional.unfold(part.double(), kernel_size).transpose(1, 2).flatten(0, 1)
        total, count = total + patches.T @ patches, count + len(patches)
    return total / count


def whitening_layers(network: nn.Module) -> list[Whitening]:
    """The layers of a network that are to begin from images."""
    return [module for module in network.modules() if isinstance(module, Whitening)]
