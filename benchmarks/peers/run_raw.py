"""A loop written by hand, with nothing that it does not need."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from given import begin, build, endless, held_out, loader, sgd
from torch import nn


def main() -> None:
    """Train as asked."""
    spec, clock, out = begin()
    rank, tuned = int(os.environ.get("RANK", "0")), "TUNED" in os.environ
    torch.backends.cudnn.benchmark = tuned
    model: nn.Module = build(spec).to(spec.device, memory_format=spec.layout)
    optimizer = sgd(model, fused=tuned and spec.device == "cuda")
    saved, done = Path(spec.scratch) / "raw.pt", 0
    if spec.resume:
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    bare = model
    if spec.processes > 1:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=not tuned, gradient_as_bucket_view=tuned)
    batches = endless(loader(spec, rank))
    for step in range(done + 1, spec.total + 1):
        inputs, labels = spec.placed(*next(batches))
        with spec.autocast():
            loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if spec.save_every and step % spec.save_every == 0 and rank == 0:
            state = {"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            with saved.with_suffix(".new").open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            saved.with_suffix(".new").rename(saved)
        clock.step()
    if spec.evaluate:
        model.eval()
        batches_held_out = held_out(spec)
        with clock.evaluation(), torch.inference_mode(), spec.autocast():
            for inputs, labels in batches_held_out:
                clock.seen += int((model(inputs).argmax(1) == labels).sum())
    clock.write(out)
    if spec.processes > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
