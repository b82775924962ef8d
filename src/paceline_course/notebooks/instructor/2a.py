# Answers of lab 2a, one cell for each exercise; `use_answer` runs them in the notebook.


# %% 2a.1
# %%writefile averaging.py
import torch.distributed as dist
from torch import nn


def average_gradients(model: nn.Module) -> None:
    """Replace the gradient of every parameter by its mean over all ranks."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


# %% 2a.2
# %%writefile ring_chunks.py
def reduce_scatter_chunk(rank: int, step: int, world_size: int) -> int:
    """The chunk that a rank sends in a step of the first half; steps count from 0."""
    return (rank - step) % world_size


def all_gather_chunk(rank: int, step: int, world_size: int) -> int:
    """The chunk that a rank sends in a step of the second half; steps count from 0 again."""
    return (rank + 1 - step) % world_size


# %% 2a.3
# %%writefile accumulate.py
from contextlib import nullcontext

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def accumulate(ddp: DistributedDataParallel, micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Compute the mean gradient of `mse_loss(ddp(x), y)` over all micro-batches and ranks, with one all-reduce."""
    for number, (x, y) in enumerate(micro_batches, start=1):
        is_last = number == len(micro_batches)
        with nullcontext() if is_last else ddp.no_sync():
            loss = mse_loss(ddp(x), y) / len(micro_batches)
            loss.backward()


# %% 2a.4
def dealt_twice(samples: int, world_size: int) -> int:
    return -samples % world_size


# %% 2a.5
def contribution(is_correct: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    mine = is_correct[rank::world_size]
    return torch.tensor([mine.sum(), len(mine)], dtype=torch.float64)


def accuracy(total: torch.Tensor) -> float:
    return 100 * (total[0] / total[1]).item()


# %% 2a.6
def different_seeds(ranks: int, workers: int) -> int:
    return ranks + workers - 1
