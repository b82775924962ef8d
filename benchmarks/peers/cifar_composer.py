"""Composer with its introduction's settings for CIFAR-10: a batch of 1024, smoothing, BlurPool, growing images.

Its ResNet-56 is no longer in the library; torchvision's ResNet-18 takes its place. Its flat rate falls to 0 here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from cifar_given import CLASSES, Fast, begin, fit_steps, loader, shifted
from composer import Trainer
from composer.algorithms import BlurPool, LabelSmoothing, ProgressiveResizing
from composer.core import Precision
from composer.loss import soft_cross_entropy
from composer.models import ComposerModel
from composer.optim import DecoupledSGDW, LinearWithWarmupScheduler
from torch import nn

_BATCH = 1024
# Smaller images save about so much of the steps' time.
_SHARE = 0.8


class Network(ComposerModel):
    """The network with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> torch.Tensor:
        """The answers to a batch."""
        answers: torch.Tensor = self.model(batch[0])
        return answers

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        """Of labels, or of what smoothing made of them."""
        whole = batch[1].ndim == 1
        return F.cross_entropy(outputs, batch[1]) if whole else soft_cross_entropy(outputs, batch[1])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """As in its introduction."""
    return DecoupledSGDW(parameters, lr=0.05, momentum=0.9, weight_decay=2e-3)


def main() -> None:
    """Train as asked."""
    budget = begin()
    model = Fast(torchvision.models.resnet18(num_classes=CLASSES), budget.precision)
    fitting = fit_steps(budget, model, lambda count: loader(budget, shifted(), _BATCH, count), sgd)
    budget.steps = steps = int(fitting / _SHARE)
    trainer = Trainer(
        model=Network(model),
        train_dataloader=loader(budget, shifted(), _BATCH, steps),
        max_duration=f"{steps}ba",
        optimizers=sgd(model.parameters()),
        schedulers=LinearWithWarmupScheduler(t_warmup=f"{max(steps // 10, 1)}ba"),
        algorithms=[
            LabelSmoothing(0.1),
            BlurPool(replace_convs=True, replace_maxpools=True, blur_first=True),
            ProgressiveResizing(initial_scale=0.6, finetune_fraction=0.34),
        ],
        device="cpu",
        precision=Precision.FP32,  # its own bf16 is refused on a CPU
        progress_bar=False,
        loggers=[],
        spin_dataloaders=False,
    )
    with budget.race():
        trainer.fit()
    budget.write(model, _BATCH)
    trainer.close()


if __name__ == "__main__":
    main()
