"""Your answer to the assessment: data-parallel training on any number of processes.

    torchrun --standalone --nproc-per-node=2 skeleton.py --output out
    paceline labs grade skeleton.py

Keep to the contract in lab 5: the arguments, the output files and the requirements. You may change functions and
classes. The grader marks what the program does with 1, 2 and 3 processes, not how it is written.
"""

from __future__ import annotations

import argparse
import json  # you will need it
import os  # you will need it
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # you will need it
from safetensors.torch import save_file  # you will need it
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel  # you may want it
from torch.utils.data import TensorDataset

from paceline_course.assignment import build_model, training_set, validation_set  # you will need them


def read_arguments() -> argparse.Namespace:
    """Return the arguments of the contract. Nothing to do here."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True, help="directory for all output files")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=48, help="samples per step, over all ranks")
    parser.add_argument("--base-lr", type=float, default=0.05, help="learning rate for a batch of 32")
    parser.add_argument("--warmup", type=int, default=6, help="steps until the full learning rate")
    parser.add_argument("--network", choices=["plain", "batchnorm"], default="plain")
    return parser.parse_args()


def global_batches(epoch: int, samples: int, batch: int) -> list[Tensor]:
    """Return the sample indices of each step of an epoch; the last step may have fewer.

    TODO: every sample exactly once; a different order in each epoch; the same list on every rank.
    """
    raise NotImplementedError  # yours to write


def share_of(samples: Tensor) -> Tensor:
    """Return this rank's share of the samples.

    TODO: each sample belongs to exactly one rank. Sizes differ by at most one. A share can be empty; its rank must
    still take part in the step, or the others wait for it.
    """
    raise NotImplementedError  # yours to write


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return the learning rate of a step; steps count from 0 over all epochs.

    TODO: args.base_lr is for a batch of 32; scale it linearly with the global batch. Warm up linearly: step 0 has
    1 / args.warmup of it, step 1 has 2 / args.warmup, and so on.
    """
    raise NotImplementedError  # yours to write


def train_epoch(epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> float:
    """Train for one epoch and return the mean loss over all its samples.

    TODO: each step uses the gradient of the mean loss over the global batch, also if shares differ in size (by which
    number does DDP divide?). Return the mean loss over the samples of all ranks.
    """
    raise NotImplementedError  # yours to write


def validate(network: nn.Module, data: TensorDataset) -> float:
    """Return the accuracy in percent on a data set.

    TODO: every rank evaluates a share, and each sample counts once.
    """
    raise NotImplementedError  # yours to write


def save_checkpoint(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer, epochs_done: int) -> None:
    """Write everything that is needed to resume.

    TODO: a kill during writing must leave the previous checkpoint intact.
    """
    raise NotImplementedError  # yours to write


def load_checkpoint(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint, if there is one, and return the number of finished epochs. TODO."""
    raise NotImplementedError  # yours to write


def main() -> None:
    args = read_arguments()  # noqa: F841  # you will need them
    dist.init_process_group("gloo")
    # TODO: create the same weights on every rank and an optimizer (SGD with momentum 0.9); load a checkpoint if any.
    # TODO: for each remaining epoch, train, make BatchNorm's statistics the same on all ranks, and validate. Then, on
    #       one rank, append a line to args.output / "log.jsonl" and save a checkpoint. The line has these values:
    #       {"epoch": 0, "train_loss": 2.27, "validation_accuracy": 14.6}
    # TODO: on one rank, write network.state_dict() to args.output / "weights.safetensors" (no "module." in names).
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
