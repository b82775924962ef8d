"""How wrong are class scores? Losses for one label per image, or for a mixture of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.recipe.training import Train


class ClassificationLoss:
    """The recipe's training loss, a mean over samples, in nats.

    * cross_entropy, with label smoothing (Szegedy et al. 2015)
    * bce: one yes-or-no question for each class, and the mean over them (Wightman et al. 2021); targets are smoothed
      in the same way, and with ``target_threshold`` become 1 where they are above it, else 0
    """

    def __init__(self, train: Train) -> None:
        self._is_bce = train.loss == "bce"
        self._smoothing = train.label_smoothing
        self._threshold = train.target_threshold

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of logits [N, classes] on classes, int64 [N], or probabilities [N, classes]."""
        if not self._is_bce:
            return F.cross_entropy(logits, targets, label_smoothing=self._smoothing)
        wanted = targets if targets.is_floating_point() else F.one_hot(targets, logits.shape[1]).to(torch.float32)
        if self._smoothing:
            wanted = wanted * (1 - self._smoothing) + self._smoothing / logits.shape[1]
        if self._threshold is not None:
            wanted = (wanted > self._threshold).to(wanted.dtype)
        return F.binary_cross_entropy_with_logits(logits.float(), wanted.float())
