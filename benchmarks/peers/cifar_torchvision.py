"""torchvision's reference training with its defaults: batches of 32, SGD at 0.1, divided by ten after each third."""

from __future__ import annotations

import torch
import torchvision
from cifar_given import CLASSES, MEAN, SIDE, STD, Fast, begin, fit_steps, loader
from torch import nn
from torchvision import transforms

_BATCH = 32


def main() -> None:
    """Train as asked."""
    budget = begin()
    shown = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIDE),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    model = Fast(torchvision.models.resnet18(num_classes=CLASSES), budget.precision)

    def sgd(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)

    steps = fit_steps(budget, model, lambda count: loader(budget, shown, _BATCH, count), sgd)
    optimizer, criterion = sgd(model.parameters()), nn.CrossEntropyLoss()
    # Its defaults are 90 epochs and a fall after every 30.
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=max(steps // 3, 1), gamma=0.1)
    with budget.race():
        model.train()
        for images, labels in loader(budget, shown, _BATCH, steps):
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    budget.write(model, _BATCH)


if __name__ == "__main__":
    main()
