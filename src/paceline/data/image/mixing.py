"""How are the samples of a batch mixed with one another? By mixup or CutMix, drawn for the step.

A sample's partner is the one before it in its micro-batch, or before its own repeats there. What is drawn, the weight
and the part, is a function of (seed, step) alone, the same for all micro-batches of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.data.batch import Batch
from paceline.data.random_draws import seed_of, uniforms
from paceline.recipe.data import Mix

# Sets these draws apart from others that are keyed by numbers of the same kind.
_PURPOSE = 0x4D49_58


@dataclass(frozen=True)
class Mixture:
    """How a step's samples are mixed.

    Attributes:
        share: Weight of the sample itself; its partner has the rest.
        box: The part that comes from the partner, (top, bottom, left, right) in pixels; None to add whole images.
    """

    share: float
    box: tuple[int, int, int, int] | None = None


class Mixing:
    """Mixes normalised batches on their device; their targets become probabilities [N, classes]."""

    def __init__(self, mix: Mix, classes: int, seed: int, *, repeats: int = 1) -> None:
        """Mix as a recipe's `data.mix` says, for so many classes.

        Args:
            mix: The recipe's section.
            classes: Their number.
            seed: The run's seed.
            repeats: How many samples that follow one another are one image: they are no partners for one another.
        """
        self._mix = mix
        self._distance = repeats
        self._classes = classes
        self._seed = seed

    @property
    def is_asked_for(self) -> bool:
        """Whether any step is mixed."""
        return (self._mix.mixup > 0 or self._mix.cutmix > 0) and self._mix.probability > 0

    def __call__(self, batch: Batch) -> Batch:
        """Mix a batch, or leave it as it is if its step or epoch is none that is mixed."""
        if self._mix.epochs is not None and batch.slice.epoch >= self._mix.epochs:
            return batch
        mixture = self.draw(batch.slice.step, batch.inputs.shape[-2], batch.inputs.shape[-1])
        if mixture is None:
            return batch
        targets = F.one_hot(batch.targets, self._classes).to(batch.inputs.dtype)
        partners = targets.roll(self._distance, 0)
        return replace(
            batch,
            inputs=_mixed(batch.inputs, batch.inputs.roll(self._distance, 0), mixture),
            targets=targets.mul_(mixture.share).add_(partners, alpha=1 - mixture.share),
        )

    def draw(self, step: int, height: int, width: int) -> Mixture | None:
        """What a step does to images of a size; None if it mixes nothing."""
        mix = self._mix
        happens, kind, share, down, across = uniforms(
            seed_of(self._seed, _PURPOSE), 0, np.array([step], dtype=np.int64), 5
        )[0].tolist()
        if happens >= mix.probability:
            return None
        cuts = mix.cutmix > 0 and (mix.mixup == 0 or kind < mix.switch)
        own = _beta(mix.cutmix if cuts else mix.mixup, share)
        return _cut(own, height, width, down, across) if cuts else Mixture(own)


def _beta(alpha: float, uniform: float) -> float:
    """A draw from Beta(alpha, alpha), by the inverse of its distribution function."""
    from scipy.special import betaincinv

    return float(betaincinv(alpha, alpha, uniform))


def _cut(share: float, height: int, width: int, down: float, across: float) -> Mixture:
    """Cut out a part with an area of ``1 - share`` around a random pixel; the share is what is left of the image."""
    middle, centre = int(down * height), int(across * width)
    reach = 0.5 * math.sqrt(1 - share)
    tall, wide = int(reach * height), int(reach * width)
    top, bottom = max(middle - tall, 0), min(middle + tall, height)
    left, right = max(centre - wide, 0), min(centre + wide, width)
    return Mixture(1 - (bottom - top) * (right - left) / (height * width), (top, bottom, left, right))


def _mixed(images: Tensor, partners: Tensor, mixture: Mixture) -> Tensor:
    """Mix images with their partners, which may be written to."""
    if mixture.box is None:
        return partners.mul_(1 - mixture.share).add_(images, alpha=mixture.share)
    top, bottom, left, right = mixture.box
    mixed = images.clone(memory_format=torch.preserve_format)
    mixed[..., top:bottom, left:right] = partners[..., top:bottom, left:right]
    return mixed
