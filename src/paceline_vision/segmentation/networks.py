"""Networks that predict a class for each pixel: torchvision's, and a small U-Net."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import ModelError
from paceline.models.factories import TORCHVISION, call_factory, check_options, named_factory, unknown_model
from paceline.plugins.loading import without_compiler
from paceline.recipe.model import ModelSection
from paceline_vision.detection.networks import build_published

_MOST_STAGES, _WIDEST = 8, 16_384


class _Twice(nn.Sequential):
    """Two 3x3 convolutions, each with BatchNorm and ReLU; [N, narrow, H, W] to [N, wide, H, W]."""

    def __init__(self, narrow: int, wide: int) -> None:
        layers: list[nn.Module] = []
        for each in (narrow, wide):
            layers += [nn.Conv2d(each, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide), nn.ReLU(inplace=True)]
        super().__init__(*layers)


class SmallUNet(nn.Module):
    """A U-Net (Ronneberger et al. 2015); see :func:`small_unet`."""

    def __init__(self, num_classes: int, in_channels: int, *, width: int, stages: int) -> None:
        super().__init__()
        widths = [width * 2**index for index in range(stages + 1)]
        self.stem = _Twice(in_channels, width)
        self.down = nn.ModuleList(_Twice(narrow, wide) for narrow, wide in pairwise(widths))
        self.up = nn.ModuleList(_Twice(wide + narrow, narrow) for narrow, wide in reversed(list(pairwise(widths))))
        self.classifier = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Map float images [N, C, H, W] to logits [N, classes, H, W]."""
        x = self.stem(images)
        skipped = []
        for stage in self.down:
            skipped.append(x)
            x = stage(functional.max_pool2d(x, 2, ceil_mode=True))
        for stage in self.up:
            skip = skipped.pop()
            x = functional.interpolate(x, skip.shape[-2:], mode="bilinear", align_corners=False)
            x = stage(torch.cat((skip, x), dim=1))
        logits: Tensor = self.classifier(x)
        return logits


def small_unet(num_classes: int, in_channels: int = 3, *, width: int = 16, stages: int = 3) -> nn.Module:
    """Build a small U-Net.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        width: Channels at full size; each stage doubles them.
        stages: Number of stages; each halves the image.

    Raises:
        ModelError: If an option is out of range.
    """
    rules = (
        ("stages", stages, 1 <= stages <= _MOST_STAGES, f"from 1 to {_MOST_STAGES}"),
        ("width", width, 1 <= width <= _WIDEST // 2 ** min(stages, _MOST_STAGES), f"of 1 to {_WIDEST} / 2^stages"),
    )
    check_options("small_unet", rules)
    return SmallUNet(num_classes, in_channels, width=width, stages=stages)


OWN_SEGMENTERS: dict[str, Callable[..., nn.Module]] = {"small_unet": small_unet}


def segmenter_names() -> list[str]:
    """Return the names of all segmentation networks; imports torchvision."""
    return [*OWN_SEGMENTERS, *(f"{TORCHVISION}{name}" for name in _published())]


def _published() -> list[str]:
    from torchvision.models import list_models, segmentation

    found: list[str] = list_models(module=segmentation)
    return found


@without_compiler()
def build_segmenter(model: ModelSection, *, num_classes: int, in_channels: int = 3) -> nn.Module:
    """Build the recipe's network.

    Raises:
        ModelError: If the name is unknown, the factory does not accept the options, or requested pretrained weights are
            not available.
    """
    if factory := named_factory(model, OWN_SEGMENTERS):
        return call_factory(model, factory, num_classes=num_classes, in_channels=in_channels)
    name = model.name.removeprefix(TORCHVISION)
    if not model.name.startswith(TORCHVISION) or name not in _published():
        raise unknown_model(model, "segmentation network", segmenter_names())
    from torchvision.models import get_model_builder

    taken = set(inspect.signature(get_model_builder(name)).parameters)
    taken -= {"weights", "weights_backbone", "progress", "num_classes", "kwargs"}
    if wrong := [option for option in model.options if option not in taken]:
        raise ModelError(
            f"model.options.{wrong[0]} is unknown to {model.name}, which has {', '.join(sorted(taken)) or 'none'}; "
            "leave it out."
        )
    return build_published(model, num_classes)


def pixel_logits(answer: Any) -> Tensor:
    """Return a network's pixel logits, [N, classes, H, W]: its output, or the entry `out` as in torchvision."""
    logits: Tensor = answer["out"] if isinstance(answer, dict) and "out" in answer else answer
    return logits


class LogitsOnly(nn.Module):
    """Wraps a network to drop its auxiliary output, for programs that expect one tensor."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Map images [N, 3, H, W] to logits [N, classes, H, W]."""
        return pixel_logits(self.network(images))
