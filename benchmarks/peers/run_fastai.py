"""fastai's Learner on torch's own loader, with its progress bar off and no metrics but those that are asked for."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from fastai.callback import progress as _no_bar  # noqa: F401  # gives a Learner the method of that name
from fastai.callback.core import Callback, CancelFitException, CancelValidException
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.metrics import accuracy
from fastai.optimizer import SGD
from given import LR, MOMENTUM, Clock, Spec, begin, build, held_out, loader


class Ticking(Callback):
    """Calls the clock, saves, applies layout and precision, and ends after so many steps."""

    order = 100

    def __init__(self, spec: Spec, clock: Clock, done: int) -> None:
        self.spec, self.clock, self.done = spec, clock, done
        self._autocast: Any = nullcontext()

    def before_batch(self) -> None:
        self.learn.xb = tuple(x.contiguous(memory_format=self.spec.layout) for x in self.learn.xb)
        self._autocast = self.spec.autocast()
        self._autocast.__enter__()

    def after_loss(self) -> None:
        self._autocast.__exit__(None, None, None)

    def after_batch(self) -> None:
        if not self.training:
            return
        self.done += 1
        if self.spec.save_every and self.done % self.spec.save_every == 0:
            self.learn.save("last", with_opt=True)
            (Path(self.spec.scratch) / "step").write_text(str(self.done))
        self.clock.step()
        if self.done >= self.spec.total:
            raise CancelFitException


class NoValidation(Callback):
    """The held-out images are scored after the training, if at all."""

    def before_validate(self) -> None:
        raise CancelValidException


def main() -> None:
    """Train as asked."""
    spec, clock, out = begin()
    if spec.processes > 1:
        torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank() if spec.processes > 1 else 0
    batches = loader(spec, rank)
    dls = DataLoaders(batches, held_out(spec) if spec.evaluate else batches, device=torch.device("cpu"))
    model = build(spec).to(memory_format=spec.layout)
    learner = Learner(
        dls,
        model if spec.processes == 1 else torch.nn.parallel.DistributedDataParallel(model),
        loss_func=F.cross_entropy,
        opt_func=lambda parameters, lr: SGD(parameters, lr, mom=MOMENTUM),
        lr=LR,
        metrics=[accuracy],
        path=spec.scratch,
        model_dir=".",
    )
    done = 0
    if spec.resume:
        learner.load("last", with_opt=True)
        done = int((Path(spec.scratch) / "step").read_text())
    ticking = Ticking(spec, clock, done)
    with learner.no_bar(), learner.no_logging():
        learner.fit(1000, cbs=[ticking, NoValidation()])
        if spec.evaluate:
            with clock.evaluation():
                learner.validate(cbs=[ticking])
    clock.write(out)
    if spec.processes > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
