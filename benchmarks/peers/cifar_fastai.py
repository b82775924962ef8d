"""fastai's fit_one_cycle as its authors trained on CIFAR-10: batches of 512, Adam at 0.003, decay 0.4.

Their network was a WRN-22, which has left the package and takes many times the arithmetic. Of the networks that are in
it, this one sees an image at a quarter of its width, and so many more epochs fit into the budget.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from cifar_given import CLASSES, Fast, begin, fit_steps, loader, shifted
from fastai.callback import progress as _no_bar  # noqa: F401  # gives a Learner the method of that name
from fastai.callback import schedule as _one_cycle  # noqa: F401  # gives a Learner fit_one_cycle
from fastai.callback.core import Callback, CancelValidException
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.vision.models.xresnet import xresnet18

_BATCH, _LR, _DECAY = 512, 3e-3, 0.4


def main() -> None:
    """Train as asked."""
    budget = begin()
    model = Fast(xresnet18(n_out=CLASSES), budget.precision)

    def adam(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=_LR)

    steps = fit_steps(budget, model, lambda count: loader(budget, shifted(), _BATCH, count), adam)
    batches = loader(budget, shifted(), _BATCH, steps)
    dls = DataLoaders(batches, batches, device=torch.device("cpu"))
    learner = Learner(dls, model, loss_func=F.cross_entropy, path=".", model_dir=".")
    with learner.no_bar(), learner.no_logging(), budget.race():
        learner.fit_one_cycle(1, lr_max=_LR, wd=_DECAY, cbs=[_NoValidation()])
    budget.write(model, _BATCH)


class _NoValidation(Callback):
    """The test images are scored once, at the end, and not on the learner's clock."""

    def before_validate(self) -> None:
        raise CancelValidException


if __name__ == "__main__":
    main()
