"""Composer's Trainer without loggers and progress bar."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from composer import Callback, Evaluator, Trainer
from composer.core import Precision, State
from composer.loggers import Logger
from composer.models import ComposerModel
from given import CLASSES, Clock, Spec, begin, build, held_out, loader, sgd
from torchmetrics.classification import MulticlassAccuracy


class Network(ComposerModel):
    """The network with its loss."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.model = build(spec).to(memory_format=spec.layout)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def forward(self, batch: Any) -> torch.Tensor:
        # Composer's own bf16 is refused on a CPU.
        with self.spec.autocast():
            output: torch.Tensor = self.model(batch[0].contiguous(memory_format=self.spec.layout))
        return output.float()

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(outputs, batch[1])

    def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
        return {} if is_train else {"accuracy": self.accuracy}

    def update_metric(self, batch: Any, outputs: torch.Tensor, metric: Any) -> None:
        metric.update(outputs, batch[1])


class Ticking(Callback):
    """Calls the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.clock.spec.save_every:
            return  # a save comes after it
        self.clock.step()

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if self.clock.spec.save_every:
            self.clock.step()


def main() -> None:
    """Train as asked."""
    spec, clock, out = begin()
    rank = int(os.environ.get("RANK", "0"))
    model, folder = Network(spec), Path(spec.scratch) / "composer"
    trainer = Trainer(
        model=model,
        train_dataloader=loader(spec, rank),
        max_duration=f"{spec.total}ba",
        optimizers=sgd(model),
        device="cpu",
        precision=Precision.FP32,
        progress_bar=False,
        loggers=[],
        callbacks=[Ticking(clock)],
        save_folder=str(folder) if spec.save_every else None,
        save_interval=f"{spec.save_every}ba" if spec.save_every else "1ep",
        load_path=str(folder / "latest-rank0.pt") if spec.resume else None,
        device_train_microbatch_size=spec.local_batch,
        spin_dataloaders=False,
    )
    trainer.fit()
    if spec.evaluate:
        evaluator = Evaluator(
            label="held out",
            dataloader=held_out(spec),
            metric_names=["accuracy"],
            device_eval_microbatch_size=spec.batch,
        )
        with clock.evaluation():
            trainer.eval(eval_dataloader=evaluator)
    clock.write(out)
    trainer.close()


if __name__ == "__main__":
    main()
