"""In the manner of torchvision's reference training: averages and accuracies of every batch, read at every step."""

from __future__ import annotations

import os
from collections import defaultdict, deque
from pathlib import Path

import torch
from given import begin, build, endless, held_out, loader, sgd
from torch import nn


def accuracies(output: torch.Tensor, target: torch.Tensor, tops: tuple[int, ...]) -> list[torch.Tensor]:
    """Top-k accuracies of a batch in percent."""
    with torch.inference_mode():
        _, found = output.topk(max(tops), 1, largest=True, sorted=True)
        correct = found.t().eq(target[None])
        return [correct[:k].flatten().sum(dtype=torch.float32) * (100 / len(target)) for k in tops]


def main() -> None:
    """Train as asked."""
    spec, clock, out = begin()
    rank = int(os.environ.get("RANK", "0"))
    model: nn.Module = build(spec).to(memory_format=spec.layout)
    criterion = nn.CrossEntropyLoss()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    saved, done = Path(spec.scratch) / "checkpoint.pth", 0
    bare = model
    if spec.resume:
        state = torch.load(saved, map_location="cpu", weights_only=True)
        bare.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["lr_scheduler"])
        done = state["step"]
    if spec.processes > 1:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    model.train()
    meters: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=20))
    batches = endless(loader(spec, rank))
    for step in range(done + 1, spec.total + 1):
        image, target = next(batches)
        with spec.autocast():
            output = model(image.contiguous(memory_format=spec.layout))
            loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        top1, top5 = accuracies(output, target, (1, 5))
        meters["loss"].append(loss.item())
        meters["lr"].append(optimizer.param_groups[0]["lr"])
        meters["acc1"].append(top1.item())
        meters["acc5"].append(top5.item())
        if spec.save_every and step % spec.save_every == 0 and rank == 0:
            state = {
                "model": bare.state_dict(),
                "optimizer": optimizer.state_dict(),
                "lr_scheduler": schedule.state_dict(),
                "step": step,
            }
            torch.save(state, Path(spec.scratch) / f"model_{step}.pth")
            torch.save(state, saved)
        clock.step()
    if spec.evaluate:
        model.eval()
        batches_held_out = held_out(spec)
        with clock.evaluation(), torch.inference_mode(), spec.autocast():
            for image, target in batches_held_out:
                output = model(image)
                meters["loss"].append(criterion(output, target).item())
                top1, _ = accuracies(output, target, (1, 5))
                meters["acc1"].append(top1.item())
    clock.write(out)
    if spec.processes > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
