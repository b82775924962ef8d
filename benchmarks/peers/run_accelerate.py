"""Accelerate around a plain loop, as its documentation shows it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from given import begin, build, endless, held_out, loader, sgd


def main() -> None:
    """Train as asked."""
    spec, clock, out = begin()
    accelerator = Accelerator(
        cpu=spec.device == "cpu",
        mixed_precision="bf16" if spec.precision == "bf16" else "no",
        # Batches that are cut for each rank already are not to be shared out again.
        dataloader_config=DataLoaderConfiguration(dispatch_batches=False),
    )
    model = build(spec).to(memory_format=spec.layout)
    batches = loader(spec, accelerator.process_index)
    if spec.data == "tensors":
        model, optimizer = accelerator.prepare(model, sgd(model))
    else:
        model, optimizer, batches = accelerator.prepare(model, sgd(model), batches)
    done, folder = 0, Path(spec.scratch) / "accelerate"
    if spec.resume:
        accelerator.load_state(str(folder))
        done = int((folder / "step").read_text())
    stream = endless(batches)
    model.train()
    for step in range(done + 1, spec.total + 1):
        inputs, labels = next(stream)
        with accelerator.autocast():
            loss = F.cross_entropy(model(inputs.contiguous(memory_format=spec.layout)), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if spec.save_every and step % spec.save_every == 0:
            accelerator.save_state(str(folder))
            (folder / "step").write_text(str(step))
        clock.step()
    if spec.evaluate:
        model.eval()
        batches_held_out = held_out(spec)
        with clock.evaluation(), torch.inference_mode():
            for inputs, labels in batches_held_out:
                found, targets = accelerator.gather_for_metrics((model(inputs).argmax(1), labels))
                clock.seen += int((found == targets).sum())
    clock.write(out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
