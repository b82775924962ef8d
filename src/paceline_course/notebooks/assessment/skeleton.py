"""Your answer to the assessment: data-parallel training on any number of processes.

    torchrun --standalone --nproc-per-node=2 skeleton.py --output out
    paceline labs grade skeleton.py

The arguments, what is written and what is asked of it are the contract (lab 5 explains it); functions and classes are
yours to change. It is marked by what it does with 1, 2 and 3 processes, not by how it is written.
"""

from __future__ import annotations

import argparse
import json  # noqa: F401  # you will need it
import os  # noqa: F401  # you will need it
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: F401  # you will need it
from safetensors.torch import save_file  # noqa: F401  # you will need it
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel  # noqa: F401  # you may want it
from torch.utils.data import TensorDataset

from paceline_course.assignment import build_model, training_set, validation_set  # noqa: F401  # you will need them


def read_arguments() -> argparse.Namespace:
    """The arguments of the contract. Nothing to do here."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True, help="directory for all that is written")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=48, help="samples in a step, over all ranks")
    parser.add_argument("--base-lr", type=float, default=0.05, help="learning rate that suits a batch of 32")
    parser.add_argument("--warmup", type=int, default=6, help="steps until the full learning rate")
    parser.add_argument("--network", choices=["plain", "batchnorm"], default="plain")
    return parser.parse_args()


def global_batches(epoch: int, samples: int, batch: int) -> list[Tensor]:
    """Return the sample numbers of each step of an epoch; the last step may have fewer.

    TODO: every sample exactly once; another order in each epoch; the same list on every rank.
    """
    raise NotImplementedError  # yours to write


def share_of(samples: Tensor) -> Tensor:
    """Return the part of some samples that this rank takes.

    TODO: each sample belongs to exactly one rank. Sizes differ by one at most, and a share can be empty; its rank takes
    part in the step all the same, or the others wait for it.
    """
    raise NotImplementedError  # yours to write


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return the learning rate of a step; steps count from 0 and go on over epochs.

    TODO: args.base_lr suits a batch of 32; scale it linearly with the global batch. Warm up: step 0 has 1 / args.warmup
    of it, the next 2 / args.warmup, and so on.
    """
    raise NotImplementedError  # yours to write


def train_epoch(epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> float:
    """Train for one epoch and return the mean loss over all its samples.

    TODO: each step takes the gradient of the mean loss over the global batch, also where shares differ in size (by what
    does DDP divide?). The loss that is returned is the mean over the samples of all ranks.
    """
    raise NotImplementedError  # yours to write


def validate(network: nn.Module, data: TensorDataset) -> float:
    """Return the accuracy in percent on a data set.

    TODO: all ranks take a share, and each sample counts once.
    """
    raise NotImplementedError  # yours to write


def save_checkpoint(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer, epochs_done: int) -> None:
    """Write all that is needed to go on, so that there is a whole checkpoint at any moment.

    TODO: whoever is killed while writing leaves the one before.
    """
    raise NotImplementedError  # yours to write


def load_checkpoint(path: Path, network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take up the checkpoint, if there is one, and return how many epochs are done. TODO."""
    raise NotImplementedError  # yours to write


def main() -> None:
    args = read_arguments()  # noqa: F841  # you will need them
    dist.init_process_group("gloo")
    # TODO: the same weights on every rank, an optimizer (SGD with momentum 0.9), the checkpoint if there is one.
    # TODO: for each epoch that is left: train, make the statistics of BatchNorm the same on all ranks, validate; and on
    #       one rank, add a line to args.output / "log.jsonl" and save a checkpoint. The line has these three numbers:
    #       {"epoch": 0, "train_loss": 2.27, "validation_accuracy": 14.6}
    # TODO: on one rank, write network.state_dict(), its names without DDP's "module.", to "weights.safetensors" there.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
