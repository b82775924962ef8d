"""The reference answer to the assessment: data-parallel training with the same result on any number of processes.

torchrun --standalone --nproc-per-node=2 reference.py --output out
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from paceline_course.assignment import build_model, training_set, validation_set

SEED = 0


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True, help="directory for all output files")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=48, help="samples per step, over all ranks")
    parser.add_argument("--base-lr", type=float, default=0.05, help="learning rate for a batch of 32")
    parser.add_argument("--warmup", type=int, default=6, help="steps until the full learning rate")
    parser.add_argument("--network", choices=["plain", "batchnorm"], default="plain")
    return parser.parse_args()


def global_batches(epoch: int, samples: int, batch: int) -> list[Tensor]:
    """Return the sample indices of each step of an epoch: the same on every rank, different in each epoch."""
    generator = torch.Generator().manual_seed(SEED * 100_003 + epoch)
    return list(torch.randperm(samples, generator=generator).split(batch))


def share_of(samples: Tensor) -> Tensor:
    """Return every world_size-th sample, so that each belongs to one rank. A share of a small batch can be empty."""
    return samples[dist.get_rank() :: dist.get_world_size()]


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return the rate of the linear scaling rule (Goyal et al. 2017) with linear warm-up; steps count from 0."""
    return args.base_lr * args.batch / 32 * min(1.0, (step + 1) / args.warmup)


def train_epoch(epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> float:
    """Train for one epoch and return the mean loss over all its samples, on every rank."""
    images, labels = training_set().tensors
    total_loss = torch.zeros(1, dtype=torch.float64)
    batches = global_batches(epoch, len(images), args.batch)
    model.train()
    for index, batch in enumerate(batches):
        share = share_of(batch)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(epoch * len(batches) + index, args)
        loss_sum = F.cross_entropy(model(images[share]), labels[share], reduction="sum")
        optimizer.zero_grad()
        # DDP divides by the number of ranks, but the mean divides by the number of samples, and shares differ in size.
        (loss_sum * dist.get_world_size() / len(batch)).backward()
        optimizer.step()
        total_loss += loss_sum.detach()
    dist.all_reduce(total_loss)
    return total_loss.item() / len(images)


def share_statistics(network: nn.Module) -> None:
    """Copy rank 0's BatchNorm statistics to every rank.

    DDP does this before each training step. After the last step they differ again: each rank normalises its own share.
    """
    for buffer in network.buffers():
        dist.broadcast(buffer, src=0)


@torch.no_grad()
def validate(network: nn.Module, data: TensorDataset) -> float:
    """Return the accuracy in percent: count correct answers and samples over all ranks, then divide once."""
    images, labels = data.tensors
    share = share_of(torch.arange(len(images)))
    network.eval()
    correct = (network(images[share]).argmax(dim=1) == labels[share]).sum()
    counts = torch.tensor([int(correct), len(share)])
    dist.all_reduce(counts)
    return 100 * int(counts[0]) / int(counts[1])


def save_checkpoint(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer, epochs_done: int) -> None:
    """Write another file and rename it, so that the checkpoint is always complete, either the old or the new one."""
    state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "epochs_done": epochs_done}
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def load_checkpoint(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint, if there is one, on every rank, and return the number of finished epochs."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["epochs_done"])


def main() -> None:
    args = read_arguments()
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    if is_first:
        args.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    network = build_model(args.network)
    optimizer = torch.optim.SGD(network.parameters(), lr=args.base_lr, momentum=0.9)
    epochs_done = load_checkpoint(args.output / "checkpoint.pt", network, optimizer)
    model = DistributedDataParallel(network)
    for epoch in range(epochs_done, args.epochs):
        train_loss = train_epoch(epoch, model, optimizer, args)
        share_statistics(network)
        accuracy = validate(network, validation_set())
        if is_first:
            record = {"epoch": epoch, "train_loss": train_loss, "validation_accuracy": accuracy}
            with (args.output / "log.jsonl").open("a") as log:
                log.write(json.dumps(record) + "\n")
            save_checkpoint(args.output / "checkpoint.pt", network, optimizer, epoch + 1)
    if is_first:
        save_file(network.state_dict(), args.output / "weights.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
