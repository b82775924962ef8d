"""Losses of samples that have one class, or shares of several, and the rank of a class among the scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import PacelineError, RecipeError
from paceline.plugins.references import call_reference
from paceline.plugins.registry import load
from paceline.recipe.training import TrainSection


def rank_of_target(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return how many classes rank before the target, [N]: higher scores, and equal scores with a lower index.

    So ties are not all counted as correct, and NaN scores count against the target.
    """
    target_logit = logits.gather(1, targets[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < targets[:, None]
    return (~(logits <= target_logit) | ((logits == target_logit) & earlier)).sum(dim=1)


class ClassificationLoss:
    """The recipe's training loss, a mean over samples, in nats.

    With class weights it is a micro-batch's contribution to the step's weighted mean: the sum of w_i * l_i, divided by
    the micro-batch's samples and by the step's mean weight. w_i is the weight of the sample's class, for a mixed sample
    the mean over its classes by their shares. ``torch.nn.CrossEntropyLoss`` weighs smoothed targets instead: with
    unequal weights, the rarest class is then the best answer for every sample.

    * cross_entropy, with label smoothing (Szegedy et al. 2015)
    * bce: binary cross-entropy per class, averaged over classes (Wightman et al. 2021); targets are smoothed in the
      same way, and with ``target_threshold`` become 1 above it, else 0
    * focal, and losses of other packages or the user: called with the same targets as probabilities [N, classes], they
      return l_i

    Raises:
        RecipeError: If the recipe's loss cannot be imported or built with ``train.loss_options``.
    """

    def __init__(self, train: TrainSection, class_weights: Sequence[float] = ()) -> None:
        self._weights = torch.tensor(class_weights, dtype=torch.float64) if class_weights else None
        self._name = train.loss
        self._sample_loss: Callable[[Tensor, Tensor], Tensor] | None = None
        if train.loss not in ("cross_entropy", "bce"):
            make = load("losses", train.loss, RecipeError)
            try:
                self._sample_loss = make(**train.loss_options)
            except (TypeError, ValueError) as error:
                raise RecipeError(
                    f"train.loss_options {train.loss_options} do not fit train.loss={train.loss}: {error}. Name a "
                    "factory that takes them and returns a function of (logits, targets)."
                ) from error
        self._smoothing = train.label_smoothing
        self._threshold = train.target_threshold

    def __call__(self, logits: Tensor, targets: Tensor, mean_class_weight: float | None = None) -> Tensor:
        """Return the loss of logits [N, classes] on classes, int64 [N], or probabilities [N, classes].

        Args:
            logits: Logits.
            targets: Target classes or probabilities.
            mean_class_weight: Mean weight of the step's samples; None outside a training step.
        """
        if self._weights is not None or self._sample_loss is not None:
            return self.mean(self._losses(logits, targets), targets, mean_class_weight)
        if self._name == "cross_entropy":
            return F.cross_entropy(logits, targets, label_smoothing=self._smoothing)
        return F.binary_cross_entropy_with_logits(logits.float(), self._distribution(targets, logits.shape[1]))

    def check(self, classes: int, device: torch.device) -> None:
        """Test an external loss on two samples.

        Raises:
            RecipeError: If it does not return one loss per sample, with a gradient.
        """
        if self._sample_loss is None:
            return
        if isinstance(self._sample_loss, nn.Module):
            if any(each.requires_grad for each in self._sample_loss.parameters()):
                raise RecipeError(
                    f"train.loss={self._name} has parameters, which no optimizer updates; put them in the network."
                )
            self._sample_loss.to(device)
        samples = 2 + (classes == 2)  # differs from the number of classes, so that a loss per class has another shape
        logits = torch.zeros(samples, classes, device=device, requires_grad=True)
        try:
            with torch.enable_grad():
                tried = self._each(logits, self._distribution(torch.zeros_like(logits[:, 0]).long(), classes))
        except PacelineError:
            raise
        except Exception as error:  # an external loss may raise anything
            raise RecipeError(
                f"train.loss={self._name} does not take logits and probabilities of shape [{samples}, {classes}] "
                f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); correct it."
            ) from error
        if not tried.requires_grad:
            raise RecipeError(f"train.loss={self._name} gave losses without a gradient; compute them with torch.")

    def mean(self, losses: Tensor, targets: Tensor, mean_class_weight: float | None = None) -> Tensor:
        """Return the mean of losses [N], of this or another kind, weighted by the samples' classes."""
        if self._weights is not None:
            weights = self._weights = self._weights.to(losses)
            losses = losses * (targets.to(weights) @ weights if targets.is_floating_point() else weights[targets])
        return losses.sum() / (len(losses) * (mean_class_weight or 1.0))

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return l_i, [N]."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        targets = targets.to(logits.dtype) if targets.is_floating_point() else targets
        if self._name == "cross_entropy":
            return F.cross_entropy(logits, targets, label_smoothing=self._smoothing, reduction="none")
        distribution = self._distribution(targets, logits.shape[1], logits.dtype)
        if self._name == "bce":
            return F.binary_cross_entropy_with_logits(logits, distribution, reduction="none").mean(dim=1)
        return self._each(logits, distribution)

    def _each(self, logits: Tensor, distribution: Tensor) -> Tensor:
        """Return the loss of each sample, [N], from a loss that is not torch's.

        Raises:
            RecipeError: If it returns anything else.
        """
        losses: Tensor = call_reference("train.loss", self._name, self._sample_loss, RecipeError, logits, distribution)
        if isinstance(losses, Tensor) and losses.shape == logits.shape[:1]:
            return losses
        problem = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else f"type {type(losses).__name__}"
        raise RecipeError(
            f"train.loss={self._name} gave a result of {problem} for {len(logits)} samples, but a loss is a tensor of "
            "one number for each sample (torch's: train.loss_options={reduction: none}); leave out the mean."
        )

    def _distribution(self, targets: Tensor, classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the binary targets, [N, classes]."""
        distribution = targets if targets.is_floating_point() else F.one_hot(targets, classes).to(dtype)
        if self._smoothing:
            distribution = distribution * (1 - self._smoothing) + self._smoothing / classes
        if self._threshold is not None:
            distribution = (distribution > self._threshold).to(distribution.dtype)
        return distribution.to(dtype)


class FocalLoss:
    """The focal loss (Lin et al. 2017) of a softmax: the sum over classes of t * (1 - p) ** gamma * -log p.

    With gamma 0 it is the cross-entropy, also for mixed and smoothed targets t.

    Args:
        gamma: Focusing parameter: how strongly probable classes are down-weighted.
    """

    def __init__(self, gamma: float = 2.0) -> None:
        if isinstance(gamma, bool) or not isinstance(gamma, int | float) or not 0 <= gamma < math.inf:
            raise ValueError(f"found gamma={gamma}, but it must be a number of 0 or more")
        self._gamma = gamma

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, [N], in nats, from logits and targets [N, classes]."""
        logs = logits.log_softmax(dim=1)
        # Above 0: a power below 1 has no finite derivative at 0.
        complement = (-logs.expm1()).clamp(min=torch.finfo(logs.dtype).tiny)
        return -(targets * complement**self._gamma * logs).sum(dim=1)
