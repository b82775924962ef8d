"""timm's pieces in the order of its training script: loader, model, optimizer, scheduler, meters, saver."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from given import CLASSES, LR, MEAN, MOMENTUM, STD, Clock, InMemory, Spec, begin, build, endless, held_out, loader
from timm.data import create_dataset, create_loader
from timm.data.transforms import ToNumpy
from timm.models import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, CheckpointSaver, accuracy
from torch import nn
from torchvision import transforms


def network(spec: Spec) -> nn.Module:
    """timm's own of that name where it has one."""
    return build(spec) if spec.network == "lecture_net" else create_model(spec.network, num_classes=CLASSES)


def batches(spec: Spec, rank: int) -> Any:
    """timm's loader, with the crops and flips of the others and no colours changed."""
    if spec.data in ("tensors", "resident"):
        return loader(spec, rank)
    dataset = InMemory(spec, None) if spec.data == "memory" else create_dataset("", spec.folder, split="train")
    batches = create_loader(
        dataset,
        input_size=(3, spec.image_size, spec.image_size),
        batch_size=spec.local_batch,
        is_training=True,
        color_jitter=0.0,
        interpolation="bilinear",
        mean=MEAN,
        std=STD,
        num_workers=spec.workers,
        distributed=spec.processes > 1,
        device=torch.device(spec.device),
        persistent_workers=spec.workers > 0,
    )
    if spec.data == "memory":  # it has no random shifts; its loader normalises whole batches
        dataset.transform = transforms.Compose(
            [transforms.RandomCrop(spec.image_size, padding=4), transforms.RandomHorizontalFlip(), ToNumpy()]
        )
    return batches


def validate(model: nn.Module, criterion: nn.Module, spec: Spec, clock: Clock) -> None:
    """As the script scores: loss and accuracies of every batch, read at every batch."""
    model.eval()
    losses, top1 = AverageMeter(), AverageMeter()
    batches_held_out = held_out(spec)
    with clock.evaluation(), torch.inference_mode():
        for inputs, target in batches_held_out:
            with spec.autocast():
                output = model(inputs)
                loss = criterion(output, target)
            acc1, _ = accuracy(output, target, topk=(1, 5))
            losses.update(loss.item(), inputs.size(0))
            top1.update(acc1.item(), inputs.size(0))


def main() -> None:
    """Train as asked."""
    spec, clock, out = begin()
    rank = int(os.environ.get("RANK", "0"))
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    model = network(spec).to(spec.device, memory_format=spec.layout)
    optimizer = create_optimizer_v2(model, opt="momentum", lr=LR, momentum=MOMENTUM, weight_decay=0.0)
    scheduler, _ = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=1_000, step_on_epochs=False, updates_per_epoch=1_000
    )
    criterion, done = nn.CrossEntropyLoss(), 0
    saver = CheckpointSaver(model, optimizer, SimpleNamespace(model=spec.network), checkpoint_dir=spec.scratch)
    if spec.resume:
        state = torch.load(f"{spec.scratch}/last.pth.tar", map_location="cpu", weights_only=False)
        model.load_state_dict(state["state_dict"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["epoch"]
    if spec.processes > 1:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    losses, stream = AverageMeter(), endless(batches(spec, rank))
    model.train()
    for step in range(done + 1, spec.total + 1):
        inputs, target = spec.placed(*next(stream))
        with spec.autocast():
            loss = criterion(model(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step_update(num_updates=step, metric=losses.avg)
        if step % 50 == 0:  # the script's --log-interval
            losses.update(loss.item(), inputs.size(0))
        if spec.save_every and step % spec.save_every == 0 and rank == 0:
            saver.save_checkpoint(step, metric=float(step))
        clock.step()
    if spec.evaluate:
        validate(model, criterion, spec, clock)
    clock.write(out)
    if spec.processes > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
