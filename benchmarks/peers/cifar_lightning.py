"""Lightning's own CIFAR-10 tutorial ("~94 % baseline"): a ResNet-18 without its first halvings, SGD, OneCycleLR."""

from __future__ import annotations

import warnings
from typing import Any

import lightning
import torch
import torch.nn.functional as F
import torchvision
from cifar_given import CLASSES, Fast, begin, fit_steps, loader, shifted
from torch import nn

_BATCH = 256


def network(precision: str) -> nn.Module:
    """torchvision's ResNet-18 with a first convolution for small images."""
    model = torchvision.models.resnet18(num_classes=CLASSES)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return Fast(model, precision)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """As in the tutorial."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)


class Network(lightning.LightningModule):
    """The network with its loss and its schedule."""

    def __init__(self, steps: int, model: nn.Module) -> None:
        super().__init__()
        self.steps, self.model = steps, model

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        """The loss of a batch."""
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """One cycle over the steps that fit."""
        optimizer = sgd(self.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    """Train as asked."""
    warnings.filterwarnings("ignore")
    budget = begin()
    model = network(budget.precision)
    steps = fit_steps(budget, model, lambda count: loader(budget, shifted(), _BATCH, count), sgd)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with budget.race():
        trainer.fit(Network(steps, model), loader(budget, shifted(), _BATCH, steps))
    budget.write(model, _BATCH)


if __name__ == "__main__":
    main()
