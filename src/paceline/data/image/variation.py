"""How are training images varied beyond crop and flip? By torchvision's transforms, each image with draws of its own.

torchvision draws from torch's generator. Here that is keyed by (seed, epoch, sample) before each image, so that the
draws depend on nothing else, and put back afterwards, so that nothing else depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.data.random_draws import seed_of
from paceline.data.slices import SampleIds
from paceline.recipe.data import Augment

# Sets these draws apart from others that are keyed by numbers of the same kind.
_PURPOSE = 0x5641_5259


class Variation:
    """Varies uint8 images [C, H, W] one by one, in the order in which torchvision's own recipes do.

    What an operation uncovers, and what is erased, becomes the data's mean, which the model sees as zero (to within
    half a grey level).
    """

    def __init__(self, augment: Augment, mean: Sequence[float], seed: int) -> None:
        """Prepare the transforms that a recipe asks for.

        Args:
            augment: The recipe's `data.augment` section.
            mean: Of each channel, in [0, 1].
            seed: The run's seed.
        """
        self._seed = seed
        self._transforms = _transforms(augment, [round(255 * each) for each in mean])

    def __call__(self, images: Tensor, ids: SampleIds, epoch: int) -> Tensor:
        """Vary a batch, uint8 [N, C, H, W], in place; row *n* is sample ``ids[n]``."""
        if not self._transforms:
            return images
        before = torch.get_rng_state()
        try:
            for row, sample in enumerate(ids.tolist()):
                torch.default_generator.manual_seed(seed_of(self._seed, _PURPOSE, epoch, sample))
                image = images[row]
                for transform in self._transforms:
                    image = transform(image)
                images[row] = image
        finally:
            torch.set_rng_state(before)
        return images


def asks_for_variation(augment: Augment) -> bool:
    """Whether a recipe asks for any of this."""
    return bool(variations(augment))


def variations(augment: Augment) -> list[str]:
    """The keys of `data.augment` by which a recipe asks for any of this, in the order in which they are applied."""
    jitter = augment.jitter
    asked = {
        "vertical_flip": augment.vertical_flip > 0,
        "policy": augment.policy != "none",
        "jitter": any((jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)),
        "grayscale": augment.grayscale > 0,
        "blur": augment.blur > 0,
        "erase": augment.erase > 0,
    }
    return [name for name, is_asked in asked.items() if is_asked]


def _transforms(augment: Augment, fill: list[int]) -> list[Callable[[Tensor], Tensor]]:
    names = variations(augment)
    if not names:
        return []
    from torchvision.transforms import v2

    jitter = augment.jitter
    make: dict[str, Callable[[], Any]] = {
        "vertical_flip": lambda: v2.RandomVerticalFlip(augment.vertical_flip),
        "policy": lambda: _policy(augment, fill),
        "jitter": lambda: v2.RandomApply(
            [v2.ColorJitter(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)], jitter.probability
        ),
        "grayscale": lambda: v2.RandomGrayscale(augment.grayscale),
        "blur": lambda: v2.RandomApply([v2.GaussianBlur(kernel_size=9, sigma=(0.1, 2.0))], augment.blur),
        "erase": lambda: v2.RandomErasing(augment.erase, augment.erase_scale, augment.erase_ratio, fill),
    }
    return [make[name]() for name in names]


def _policy(augment: Augment, fill: list[int]) -> Any:
    from torchvision.transforms import v2

    shared: dict[str, Any] = {"interpolation": v2.InterpolationMode.BILINEAR, "fill": fill}
    match augment.policy:
        case "randaugment":
            return v2.RandAugment(augment.operations, augment.magnitude, **shared)
        case "trivialaugment":
            return v2.TrivialAugmentWide(**shared)
        case "autoaugment":
            name = {"imagenet": "IMAGENET", "cifar10": "CIFAR10", "svhn": "SVHN"}[augment.policy_dataset]
            return v2.AutoAugment(v2.AutoAugmentPolicy[name], **shared)
    return v2.AugMix(augment.severity, **shared)
