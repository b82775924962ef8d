"""timm's training script with its defaults: its crops and colours, SGD at 0.05 for a batch of 128, a cosine."""

from __future__ import annotations

import torch
from cifar_given import CLASSES, MEAN, SIDE, STD, Fast, Pictures, begin, fit_steps
from timm.data import create_loader
from timm.loss import LabelSmoothingCrossEntropy
from timm.models import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

_BATCH, _LR = 128, 0.1 * 128 / 256
_WARMUP = 5 / 300  # epochs, of its defaults


def main() -> None:
    """Train as asked."""
    budget = begin()
    model = Fast(create_model("resnet18", num_classes=CLASSES), budget.precision)

    def batches(count: int) -> object:
        return create_loader(
            Pictures(budget, None, count * _BATCH),
            input_size=(3, SIDE, SIDE),
            batch_size=_BATCH,
            is_training=True,
            interpolation="random",
            mean=MEAN,
            std=STD,
            num_workers=budget.workers,
            device=torch.device("cpu"),
            use_prefetcher=False,
            persistent_workers=False,
        )

    def sgd(parameters: object) -> torch.optim.Optimizer:
        return create_optimizer_v2(parameters, opt="sgd", lr=_LR, momentum=0.9, weight_decay=2e-5)

    steps = fit_steps(budget, model, batches, sgd)
    optimizer, criterion = sgd(model), LabelSmoothingCrossEntropy(0.1)
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched="cosine",
        num_epochs=steps,
        warmup_epochs=round(steps * _WARMUP),
        warmup_lr=1e-5,
        step_on_epochs=False,
        updates_per_epoch=1,
    )
    with budget.race():
        model.train()
        for done, (images, labels) in enumerate(batches(steps), start=1):
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step_update(num_updates=done)
    budget.write(model, _BATCH)


if __name__ == "__main__":
    main()
