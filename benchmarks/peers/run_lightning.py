"""Lightning's Trainer with all that it does besides training turned off: no logger, no progress bar, no summary."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from given import Clock, Spec, begin, build, held_out, loader, sgd
from lightning.pytorch.callbacks import Callback, ModelCheckpoint


class Network(lightning.LightningModule):
    """The network with its loss."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.model = build(spec).to(memory_format=spec.layout)

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.model(inputs.contiguous(memory_format=self.spec.layout)), labels)

    def validation_step(self, batch: Any, _index: int) -> None:
        inputs, labels = batch
        correct = (self.model(inputs).argmax(1) == labels).float().mean()
        self.log("accuracy", correct, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.model)


class Ticking(Callback):
    """Calls the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_end(self, *_: Any) -> None:
        self.clock.step()

    def on_validation_start(self, *_: Any) -> None:
        self._begun = time.time()

    def on_validation_end(self, *_: Any) -> None:
        self.clock.evaluations.append((self._begun, time.time()))


def main() -> None:
    """Train as asked."""
    warnings.filterwarnings("ignore")
    spec, clock, out = begin()
    callbacks: list[Callback] = []
    if spec.save_every:
        callbacks.append(
            ModelCheckpoint(spec.scratch, every_n_train_steps=spec.save_every, save_last="link", save_top_k=1)
        )
    trainer = lightning.Trainer(
        accelerator=spec.device,
        devices=spec.processes,
        strategy="ddp" if spec.processes > 1 else "auto",
        precision="bf16-mixed" if spec.precision == "bf16" else "32-true",
        max_steps=spec.total,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=spec.data != "tensors",
        limit_val_batches=0,
        callbacks=[*callbacks, Ticking(clock)],
        default_root_dir=spec.scratch,
    )
    model = Network(spec)
    last = Path(spec.scratch) / "last.ckpt"
    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
    trainer.fit(model, loader(spec, rank), ckpt_path=str(last) if spec.resume else None)
    if spec.evaluate:
        scorer = lightning.Trainer(
            accelerator="cpu",
            precision=trainer.precision,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            callbacks=[Ticking(clock)],
        )
        scorer.validate(model, held_out(spec), verbose=False)
    clock.write(out)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
