# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["slide"]
# # Lab 2a: Data parallelism, step by step
#
# Several processes train one network, each on a part of every batch.
#
# What must they communicate, what does it cost, and what fails without an error message?

# %% [markdown]
# **After this lab you can**
#
# - start a group of processes, and explain rank, local rank and world size;
# - average gradients over processes by hand, and prove that the result equals training in one process;
# - calculate the cost of an all-reduce from the latency and the bandwidth of your machine;
# - use `DistributedDataParallel` and `DistributedSampler`, and know the traps that give no error message;
# - evaluate exactly with any number of processes, and find the process that hangs.
#
# **You need to know** Python, and how a network is trained with PyTorch: model, loss, `backward()`, optimizer step,
# batch, epoch. Lab 1 explains why to train with more than one device, and what a larger batch changes.
#
# **Time:** about 120 minutes. There are six exercises of five minutes. The notebook itself runs in a few minutes on two
# processor cores; no graphics processor (GPU) is needed. Run the cells from top to bottom: some of them write files
# into the current folder, and later cells start them.

# %% tags=["setup"]
import json
import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from torch import nn
from torch.utils.data.distributed import DistributedSampler

from paceline_course import exercise, run, use_answer, use_style

use_style()
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"

# %% [markdown] tags=["slide"]
# ## 1. Who takes part
#
# - **process**: a running program with its own memory; one per device
# - **rank**: the number of a process; **world size**: the number of processes
# - **local rank**: its number on its **node** (a computer)


# %% tags=["slide"] jupyter={"source_hidden": true}
def box(
    axis: plt.Axes, x: float, y: float, width: float, height: float, text: str, colour: str, alpha: float = 0.25
) -> None:
    axis.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.02", fc=colour, ec=colour, alpha=alpha))
    axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=10)


figure, axis = plt.subplots(figsize=(9, 4.2))
axis.set(xlim=(0, 9), ylim=(0, 4.3))
axis.axis("off")
box(axis, 0.2, 3.65, 8.6, 0.45, "process group: world size 4", PINK)
for node in range(2):
    left = 0.2 + 4.4 * node
    box(axis, left, 0.1, 4.2, 3.3, "", "#000000", alpha=0.06)
    axis.text(left + 2.1, 3.15, f"node {node}", ha="center", weight="bold")
    for local_rank in range(2):
        x = left + 0.2 + 2.05 * local_rank
        box(axis, x, 1.75, 1.75, 1.1, f"process\nrank {2 * node + local_rank}\nlocal rank {local_rank}", BLUE)
        box(axis, x, 0.3, 1.75, 0.7, f"device {local_rank}", GREEN)
        axis.add_patch(FancyArrowPatch((x + 0.87, 1.7), (x + 0.87, 1.05), arrowstyle="<->", mutation_scale=12))
axis.set_title("Two nodes with two devices each")
plt.show()

# %% [markdown]
# A **process group** is a set of processes that can communicate. A **launcher**, here `torchrun`, starts them and
# gives each its numbers. The local rank tells a process which device of the node to use.
#
# The launcher passes the numbers in environment variables: `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, and `MASTER_ADDR` and
# `MASTER_PORT`, the address where the processes first connect. `init_process_group` reads them.
#
# A **backend** transfers the messages: NCCL between NVIDIA GPUs, gloo between CPUs. The file below chooses NCCL if
# there is a GPU for every process on this machine, else gloo. All scripts of this lab begin with its `join` and end
# with its `leave`: all processes wait for each other, then each exits immediately. (Gloo runs background threads,
# which can crash Python during a normal exit.) A cell that begins with `%%writefile` does not run the code below; it
# writes it to a file.

# %% tags=["setup"]
# %%writefile group.py
"""Join the group of processes that torchrun describes, and leave it."""

import os
import sys
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist


def join(seconds: float = 60, cpu: bool = False) -> tuple[int, int, torch.device]:
    """Return rank, world size and device; communication fails after `seconds` without an answer."""
    local_rank = int(os.environ["LOCAL_RANK"])
    gpu_each = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) and not cpu
    if gpu_each:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if gpu_each else "gloo", timeout=timedelta(seconds=seconds))
    device = torch.device("cuda", local_rank) if gpu_each else torch.device("cpu")
    return dist.get_rank(), dist.get_world_size(), device


def leave() -> NoReturn:
    """Wait for all ranks, leave the group, and end this process with exit code 0."""
    dist.barrier()  # no rank leaves while another still waits for its message
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # exit immediately: gloo's threads can crash a normal exit


# %% [markdown]
# Here is the smallest program for two processes. Every process runs the **same file**; only `if rank == 0` makes them
# differ. `send` and `recv` (receive) transfer a message from one process to another, **point to point**: the receiver
# must provide a tensor of the right shape, and waits until it is filled. `barrier` waits until every process has
# reached it; here it orders the printed lines.

# %%
# %%writefile hello.py
import os

import torch
import torch.distributed as dist
from group import join, leave

rank, world_size, device = join()
for turn in range(world_size):
    if turn == rank:
        local = f"local rank {os.environ['LOCAL_RANK']}, process {os.getpid()}"
        print(f"rank {rank} of {world_size}, {local}, computes on {device}")
    dist.barrier()

if rank == 0:
    dist.send(torch.tensor([3.0, 4.0], device=device), dst=1)
if rank == 1:
    received = torch.zeros(2, device=device)
    dist.recv(received, src=0)
    print(f"rank 1 received {received.tolist()} from rank 0")
leave()

# %%
hello = run("torchrun --standalone --nproc-per-node=2 hello.py", seconds=300)
assert "rank 1 received [3.0, 4.0] from rank 0" in hello

# %% [markdown]
# `--standalone` means that all processes are on this machine; `--nproc-per-node` sets their number. On two machines
# you run the same command on both, with `--nnodes=2` and the address of one of them; lab 2b does that.

# %% [markdown] tags=["slide"]
# ## 2. One step of data parallelism
#
# 1. All ranks hold the **same weights**: a *replica* each.
# 2. Each takes **its part of the batch**, and computes gradients from it.
# 3. The gradients are **averaged** over all ranks.
# 4. Each takes the same optimizer step: the weights are the same again.
#
# The mean over equal parts is the mean over the whole batch. So this is *one* training run, not several.

# %% [markdown]
# We use a very small network: 10 inputs, 10 hidden units and 5 outputs, as in PyTorch's first example of data
# parallelism. One batch has forty samples.

# %% tags=["setup"]
# %%writefile toy.py
"""A toy network, forty samples to learn from, and a rank's part of them."""

import torch
from torch import nn
from torch.nn.functional import mse_loss


class ToyModel(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net1 = nn.Linear(10, 10)
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(torch.relu(self.net1(x)))


def samples(count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(count, 10, generator=draw)
    return x, torch.sin(x @ torch.randn(10, 5, generator=draw))


def part(batch: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    return batch.chunk(world_size)[rank].clone()


def backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    model.zero_grad()
    loss = mse_loss(model(x), y)
    loss.backward()
    return loss.item()


def descend(model: nn.Module, lr: float = 0.3) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(lr * parameter.grad)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# %% [markdown]
# First we do it by hand, with only `send` and `recv`: rank 0 collects the gradients of all other ranks, averages
# them, and sends the mean back.

# %%
# %%writefile at_rank_0.py
import torch
import torch.distributed as dist
from torch import nn


def average_at_rank_0(model: nn.Module) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for parameter in model.parameters():
        if rank == 0:
            theirs = torch.empty_like(parameter.grad)
            for source in range(1, world_size):
                dist.recv(theirs, src=source)
                parameter.grad += theirs
            parameter.grad /= world_size
            for target in range(1, world_size):
                dist.send(parameter.grad, dst=target)
        else:
            dist.send(parameter.grad, dst=0)
            dist.recv(parameter.grad, src=0)


# %% [markdown]
# This works, but rank 0 is the bottleneck: with *p* ranks it receives *p − 1* messages and sends *p − 1*, while the
# others wait. A **collective** is an operation that all ranks of a group call together and that distributes the work
# among them. `dist.all_reduce(tensor)` replaces the tensor on *every* rank by the sum over all ranks.
#
# **Exercise 2a.1.** Write `average_gradients` with `dist.all_reduce`. Edit the cell, run it (it writes
# `averaging.py`), then run the check, which starts two processes with it.

# %% tags=["setup"]
# %%writefile judge.py
"""Run a student's code on every rank; the notebook reads the lines that begin with PROBLEM."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def judged() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  # show the student any error
        text = str(error).splitlines() or [type(error).__name__]
        said = text[0] if isinstance(error, AssertionError) else f"{type(error).__name__}: {text[0]}"
        if "Timed out" in said:
            said = "it timed out waiting for a message from another rank: does every rank call the same operations?"
        sys.stdout.write(f"PROBLEM on rank {dist.get_rank()}: {said}\n")  # one call, so that ranks' lines do not mix
    sys.stdout.flush()
    os._exit(0)  # not `leave()`: after a problem, ranks must not wait for each other


# %% tags=["setup"]
# %%writefile check_averaging.py
import torch
from group import join
from judge import judged
from toy import ToyModel

rank, world_size, device = join(seconds=30, cpu=True)
with judged():
    from averaging import average_gradients

    model = ToyModel(seed=0).to(device)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(number + 10 * (rank + 1)))
    average_gradients(model)
    for number, parameter in enumerate(model.parameters()):
        expected = number + 10 * (world_size + 1) / 2
        found = parameter.grad.mean().item()
        assert found != number + 10 * (rank + 1), f"gradient number {number} is still the rank's own"
        assert found != world_size * expected, (
            f"a gradient is the sum over the ranks, {found:g}, not the mean, {expected:g}"
        )
        assert torch.all(parameter.grad == expected), (
            f"a gradient is {found:g}, but the mean over the ranks is {expected:g}"
        )


# %% tags=["setup"]
def check_on_ranks(script: str, written_in: str, processes: int = 2) -> str:
    """Run a check on several ranks and return its output; fail with the first problem that a rank reports."""
    if "raise NotImplementedError" in Path(written_in).read_text():
        raise NotImplementedError  # reported as "not yet"
    output = run(f"torchrun --standalone --nproc-per-node={processes} {script}", quiet=True, seconds=300)
    problems = [line for line in output.splitlines() if line.startswith("PROBLEM ")]
    assert not problems, problems[0].removeprefix("PROBLEM ")
    return output


# %% tags=["exercise"]
# %%writefile averaging.py
import torch.distributed as dist
from torch import nn


def average_gradients(model: nn.Module) -> None:
    """Replace the gradient of every parameter by its mean over all ranks."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("2a.1"):
    check_on_ranks("check_averaging.py", "averaging.py")

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# Two lines in a loop over <code>model.parameters()</code>: all-reduce <code>parameter.grad</code>, which gives the
# sum, then divide it in place by <code>dist.get_world_size()</code>. <code>x = x / 2</code> would create a new tensor
# and not change the gradient; <code>x /= 2</code> changes it.
#
# </details>

# %% tags=["answer"]
use_answer("2a.1")

# %% [markdown]
# *Learnt: data parallelism adds only one collective and one division to a training step.*
#
# Now the proof. The script below trains the toy network in five ways, for 40 steps unless stated otherwise, and
# compares the final weights:
#
# 1. one process, the whole batch;
# 2. one process, the same two halves one after the other, with averaged gradients;
# 3. two ranks, averaging at rank 0;
# 4. two ranks, averaging with `average_gradients` from exercise 2a.1;
# 5. two ranks, averaging in the same way, but each starts from **its own** random weights (150 steps).

# %%
# %%writefile by_hand.py
import json
from pathlib import Path

import torch
import torch.distributed as dist
from at_rank_0 import average_at_rank_0
from averaging import average_gradients
from group import join, leave
from torch.nn.functional import mse_loss
from toy import ToyModel, backward, descend, part, samples, weights

STEPS = 40
rank, world_size, device = join()
x, y = (tensor.to(device) for tensor in samples())
parts = [(part(x, other, world_size), part(y, other, world_size)) for other in range(world_size)]


def whole_batch() -> torch.Tensor:
    model = ToyModel(seed=0).to(device)
    for _ in range(STEPS):
        backward(model, x, y)
        descend(model)
    return weights(model)


def same_halves() -> torch.Tensor:
    model = ToyModel(seed=0).to(device)
    for _ in range(STEPS):
        gradients = []
        for half_x, half_y in parts:
            backward(model, half_x, half_y)
            gradients.append([parameter.grad for parameter in model.parameters()])
        for parameter, first, second in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = (first + second) / 2
        descend(model)
    return weights(model)


def apart(model: torch.nn.Module) -> float:
    """Return the largest difference between a weight and rank 0's."""
    theirs = weights(model)
    dist.broadcast(theirs, src=0)
    difference = (weights(model) - theirs).abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return difference.item()


def on_ranks(average, seed: int, steps: int = STEPS) -> tuple[torch.Tensor, list[float], list[float]]:
    """Train; return the weights, and for each step the loss over all samples and the difference between ranks."""
    model = ToyModel(seed).to(device)
    losses, distances = [], []
    for _ in range(steps):
        with torch.no_grad():
            loss = mse_loss(model(x), y) / world_size
        dist.all_reduce(loss)
        losses.append(loss.item())
        distances.append(apart(model))
        backward(model, *parts[rank])
        average(model)
        descend(model)
    return weights(model), losses, distances


found = {"whole": whole_batch(), "halves": same_halves()}
found["at rank 0"], *_ = on_ranks(average_at_rank_0, seed=0)
found["all-reduce"], *_ = on_ranks(average_gradients, seed=0)
_, *same_start = on_ranks(average_gradients, seed=0, steps=150)
_, *own_start = on_ranks(average_gradients, seed=rank, steps=150)
if rank == 0:
    differences = {name: (value - found["whole"]).abs().max().item() for name, value in found.items()}
    same_bits = {name: torch.equal(value, found["halves"]) for name, value in found.items()}
    curves = {"same_start": same_start, "own_start": own_start}
    Path("by_hand.json").write_text(json.dumps({"differences": differences, "same_bits": same_bits, **curves}))
leave()

# %%
run("torchrun --standalone --nproc-per-node=2 by_hand.py", seconds=300)
by_hand = json.loads(Path("by_hand.json").read_text())
print("largest difference of a weight after 40 steps")
print(f"{'':14}{'from the whole batch':>22}   same bits as the same halves in one process")
for name in ("halves", "at rank 0", "all-reduce"):
    print(f"{name:14}{by_hand['differences'][name]:22.1e}   {'yes' if by_hand['same_bits'][name] else 'no'}")
    assert by_hand["differences"][name] < 1e-6
assert by_hand["differences"]["at rank 0"] == by_hand["differences"]["all-reduce"]

# %% [markdown]
# Two ranks and one process have trained the same network. The last digits may differ between the whole batch and its
# halves: floating-point sums are rounded, and another order of addition gives other last digits. With the *same*
# halves the order is the same too, and so are the bits. (With more than two ranks, an all-reduce may add in a
# different order.)
#
# Here all parts had the same size. With unequal parts, the mean of the parts' means is **not** the mean of the whole
# batch: rank 0 with 3 samples and rank 1 with 1 sample would each count one half. Instead, each rank sends the sum of
# its samples' gradients and the number of its samples. Then all ranks divide the summed gradients by the summed number.
#
# What happened in the fifth way?

# %% [markdown] tags=["slide"]
# ### If the initial weights differ
#
# An initial difference **never goes away**. No error is raised.
#
# So rank 0 first sends its weights to all: `dist.broadcast(tensor, src=0)`

# %% tags=["slide"]
figure, (apart, training) = plt.subplots(1, 2, figsize=(10, 3.8))
for name, colour, label in (
    ("own_start", ORANGE, "different initial weights"),
    ("same_start", BLUE, "the same initial weights"),
):
    losses, distances = by_hand[name]
    apart.plot(distances, color=colour, label=label)
    training.plot(losses, color=colour, label=label)
apart.set(xlabel="step", ylabel="largest difference of a weight", title="Difference between ranks", ylim=(-0.05, None))
training.set(xlabel="step", ylabel="loss over all samples", title="Training loss", ylim=(0, None))
apart.legend(loc="center right")
plt.show()

# %%
(own_losses, own_distances), (same_losses, same_distances) = by_hand["own_start"], by_hand["same_start"]
print(f"last loss: {same_losses[-1]:.3f} with the same initial weights, {own_losses[-1]:.3f} with different ones")
assert max(same_distances) == 0
assert min(own_distances) > 0.1
assert own_losses[-1] > 1.2 * same_losses[-1]

# %% [markdown]
# Both ranks subtract the same mean gradient, so the difference between their weights stays. Half of each averaged
# gradient comes from another network, so training suffers, although the loss falls at first.

# %% [markdown] tags=["slide"]
# ## 3. The ring: no rank is a bottleneck
#
# The tensor is cut into *p* chunks; each rank sends to its right neighbour.
#
# - **Reduce-scatter**, *p − 1* steps: chunks travel and are added up.
# - **All-gather**, *p − 1* steps: complete chunks travel and are copied.

# %% [markdown]
# The *p* ranks form a ring. After the first half each rank has one complete chunk, after the second half all of them.
#
# In the first step rank *r* sends chunk *r*. It receives chunk *r − 1* from its left neighbour and adds it to its
# own. In the next step it sends the chunk that it has just updated. All indices are modulo *p*: the left neighbour of
# rank 0 is rank *p − 1*.
#
# **Exercise 2a.2.** Which chunk does a rank send in each step? Write both functions; each is one line. The check
# simulates rings of 2, 3, 4 and 7 ranks without starting any process.


# %% tags=["setup"]
def follow_ring(world_size: int) -> list[np.ndarray]:
    """Simulate the ring; after each step, count each rank's contributions: [rank with the chunk, chunk, origin]."""
    written = runpy.run_path("ring_chunks.py")
    held = np.zeros((world_size, world_size, world_size), dtype=int)
    for rank in range(world_size):
        held[rank, :, rank] = 1
    history = [held]
    for name in ("reduce_scatter_chunk", "all_gather_chunk"):
        for step in range(world_size - 1):
            before, held = held, held.copy()
            for rank in range(world_size):
                chunk, right = written[name](rank, step, world_size), (rank + 1) % world_size
                assert chunk in range(world_size), (
                    f"{name} gives {chunk}; chunks are 0 to {world_size - 1}: take % world_size"
                )
                is_sum = name == "reduce_scatter_chunk"
                held[right, chunk] = before[rank, chunk] + (before[right, chunk] if is_sum else 0)
            history.append(held)
    return history


# %% tags=["exercise"]
# %%writefile ring_chunks.py
def reduce_scatter_chunk(rank: int, step: int, world_size: int) -> int:
    """The chunk that a rank sends in a step of the first half; steps count from 0."""
    raise NotImplementedError  # yours to write


def all_gather_chunk(rank: int, step: int, world_size: int) -> int:
    """The chunk that a rank sends in a step of the second half; steps count from 0 again."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("2a.2"):
    for ranks in (2, 3, 4, 7):
        history = follow_ring(ranks)
        halfway, end = history[ranks - 1], history[-1]
        complete = np.all(halfway == 1, axis=2).any(axis=0)
        nowhere = f"after {ranks - 1} steps of reduce-scatter, chunk {int(np.argmin(complete))} is complete on no rank"
        assert complete.all(), f"with {ranks} ranks, {nowhere}"
        assert np.all(end == 1), f"with {ranks} ranks, some rank ends without all sums: check all_gather_chunk"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# In step 0, rank <i>r</i> sends chunk <i>r</i> and adds to chunk <i>r</i> − 1, which it received from its left
# neighbour. It sends that chunk in step 1. After <i>p</i> − 1 steps, rank <i>r</i> has completed chunk <i>r</i> −
# (<i>p</i> − 1), which is <i>r</i> + 1 modulo <i>p</i>. It sends this chunk first in the all-gather. Python's
# <code>%</code> with a positive divisor is never negative: <code>-1 % 4</code> is 3.
#
# </details>


# %% tags=["answer"]
use_answer("2a.2")

# %% [markdown]
# *Learnt: in every step every rank sends one chunk and receives one; all links are used equally.*

# %% tags=["slide"] jupyter={"source_hidden": true}
ring_of_4 = follow_ring(4)
figure, axes = plt.subplots(2, 4, figsize=(10, 5))
ring = axes[0, 0]
ring.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
ring.axis("off")
ring.set_title("the ring of ranks", fontsize=11)
corners = [(np.sin(turn), np.cos(turn)) for turn in 2 * np.pi * np.arange(4) / 4]
for rank, here in enumerate(corners):
    there = corners[(rank + 1) % 4]
    bent = {"connectionstyle": "arc3,rad=-0.3", "shrinkA": 14, "shrinkB": 14, "linewidth": 2}
    ring.add_patch(FancyArrowPatch(here, there, arrowstyle="-|>", mutation_scale=15, **bent))
    ring.text(*here, rank, ha="center", va="center", bbox={"boxstyle": "circle", "fc": "#cfe3f1", "ec": BLUE})
titles = [
    "start",
    "reduce-scatter 1",
    "reduce-scatter 2",
    "reduce-scatter 3",
    "all-gather 1",
    "all-gather 2",
    "all-gather 3",
]
for axis, title, held in zip(axes.flat[1:], titles, ring_of_4, strict=True):
    added = held.sum(axis=2)
    axis.imshow(added, cmap="Blues", vmin=0, vmax=5)
    for (rank, chunk), count in np.ndenumerate(added):
        axis.text(chunk, rank, count, ha="center", va="center", color="white" if count == 4 else "black")
    axis.set(xticks=range(4), yticks=range(4), xlabel="chunk", ylabel="rank")
    axis.set_title(title, fontsize=11)
    axis.grid(visible=False)
figure.suptitle("How many ranks' numbers each chunk holds (4 = complete)")
plt.show()

# %% [markdown] tags=["slide"]
# ### What it costs
#
# A message of *n* bytes takes **latency + n / bandwidth**. With *p* ranks:
#
# - at rank 0: `2 (p − 1) · (latency + n / bandwidth)`
# - ring: `2 (p − 1) · latency + 2 (p − 1) / p · n / bandwidth`
#
# The ring's second term hardly grows with *p*: more ranks, smaller chunks. Its first term does.

# %% [markdown]
# (The ring's formula is from Patarasuk and Yuan, 2009, who also show that no all-reduce can send fewer bytes;
# `paceline scale` uses it. The formula for rank 0 counts its messages.) The next script runs the ring with the chunks
# of `ring_chunks.py` on four ranks, and compares the result with `dist.all_reduce`. Then two ranks measure how long
# an all-reduce takes on this machine for tensors of 1 KB to 4 MB. The script runs on the CPU, because it only
# measures communication.

# %%
# %%writefile ring.py
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from group import join, leave
from ring_chunks import all_gather_chunk, reduce_scatter_chunk

rank, world_size, device = join(cpu=True)
right, left = (rank + 1) % world_size, (rank - 1) % world_size


def ring_all_reduce(tensor: torch.Tensor) -> int:
    """Add up a tensor over all ranks in place; return how many bytes this rank sent."""
    chunks, sent = tensor.tensor_split(world_size), 0
    for chunk_of in (reduce_scatter_chunk, all_gather_chunk):
        for step in range(world_size - 1):
            mine = chunks[chunk_of(rank, step, world_size)]
            place = chunks[chunk_of(left, step, world_size)]  # for the chunk from the left neighbour
            received = torch.empty_like(place)
            sending = dist.isend(mine, right)  # starts sending without waiting
            dist.recv(received, left)
            sending.wait()
            sent += mine.nbytes
            if chunk_of is reduce_scatter_chunk:
                place += received
            else:
                place.copy_(received)
    return sent


def all_reduce(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor, group=pair)


def at_rank_0(tensor: torch.Tensor) -> None:
    if rank == 0:
        theirs = torch.empty_like(tensor)
        dist.recv(theirs, src=1)
        tensor += theirs
        dist.send(tensor, dst=1)
    else:
        dist.send(tensor, dst=0)
        dist.recv(tensor, src=0)


def seconds(action, tensor: torch.Tensor, repeats: int = 15) -> float:
    """Return the shortest of several times, which other programs disturbed least."""
    times = []
    for _ in range(repeats):
        dist.barrier(pair)
        start = time.perf_counter()
        action(tensor)
        times.append(time.perf_counter() - start)
    return min(times)


pair = dist.new_group([0, 1])
numbers = torch.arange(1000.0) * (rank + 1)
expected = numbers.clone()
dist.all_reduce(expected)
sent = ring_all_reduce(numbers)
assert torch.equal(numbers, expected), "the ring's sum differs from that of dist.all_reduce"

if rank < 2:
    tensors = [torch.zeros(2**power) for power in range(8, 21, 2)]
    found = {
        "p": world_size,
        "tensor_bytes": numbers.nbytes,
        "sent_bytes": sent,
        "bytes": [tensor.nbytes for tensor in tensors],
        "all_reduce": [seconds(all_reduce, tensor) for tensor in tensors],
        "at_rank_0": [seconds(at_rank_0, tensor) for tensor in tensors],
    }
    if rank == 0:
        Path("ring.json").write_text(json.dumps(found))
leave()

# %%
run("torchrun --standalone --nproc-per-node=4 ring.py", seconds=300)
measured = json.loads(Path("ring.json").read_text())
p, tensor_bytes = measured["p"], measured["tensor_bytes"]
print(f"{p} ranks, a tensor of {tensor_bytes} bytes: every rank sent {measured['sent_bytes']} bytes,")
print(f"by the formula 2 (p - 1) / p x {tensor_bytes} = {2 * (p - 1) / p * tensor_bytes:.0f}.")
print(f"When averaging at rank 0, that rank would send and receive {2 * (p - 1) * tensor_bytes} bytes.")
assert measured["sent_bytes"] == 2 * (p - 1) * tensor_bytes // p

# %% [markdown]
# With two ranks the ring's formula is *2 · latency + n / bandwidth*: a straight line in *n*. So a line fitted to the
# measured times gives both numbers. The fit uses relative errors; otherwise only the largest tensor would matter.

# %%
from scipy.optimize import nnls

sizes, times = np.array(measured["bytes"], dtype=float), np.array(measured["all_reduce"])
(latency, per_byte), _ = nnls(np.stack([2 / times, sizes / times], axis=1), np.ones_like(times))
per_byte = max(per_byte, 1e-15)  # the fit may give 0 on a busy machine
fitted = 2 * latency + sizes * per_byte
print(f"this machine, two ranks over gloo: latency {1e6 * latency:.0f} us, bandwidth {1e-9 / per_byte:.2f} GB/s;")
print(f"the line differs from the measured times by {100 * np.median(np.abs(fitted / times - 1)):.0f} % (median).")
by_rank_0 = np.array(measured["at_rank_0"])
predicted = 2 * (latency + sizes * per_byte)
print(f"Its prediction for averaging at rank 0 is off by {100 * np.median(np.abs(predicted / by_rank_0 - 1)):.0f} %.")


# %% tags=["slide"]
def at_rank_0_seconds(n: float, p: np.ndarray) -> np.ndarray:
    return 2 * (p - 1) * (latency + n * per_byte)


def ring_seconds(n: float, p: np.ndarray) -> np.ndarray:
    return 2 * (p - 1) * latency + 2 * (p - 1) / p * n * per_byte


figure, (line, growth) = plt.subplots(1, 2, figsize=(10, 4))
line.loglog(sizes, 1e3 * times, "o", color=BLUE, label="all-reduce, measured")
line.loglog(sizes, 1e3 * fitted, color=BLUE, label="line fitted to it")
line.loglog(sizes, 1e3 * by_rank_0, "s", color=ORANGE, label="at rank 0, measured")
line.loglog(sizes, 1e3 * predicted, "--", color=ORANGE, label="at rank 0, predicted")
line.set(xlabel="bytes", ylabel="milliseconds", title="Two ranks on this machine")
line.legend(fontsize=9)
devices = 2 ** np.arange(1, 9)
for n, style in ((100e6, "-"), (10e3, ":")):
    name = f"{n / 1e6:g} MB" if n >= 1e6 else f"{n / 1e3:g} KB"
    growth.loglog(
        devices, 1e3 * at_rank_0_seconds(n, devices), style, color=ORANGE, lw=5, alpha=0.5, label=f"at rank 0, {name}"
    )
    growth.loglog(devices, 1e3 * ring_seconds(n, devices), style, color=BLUE, label=f"ring, {name}")
growth.set(xlabel="ranks p", ylabel="milliseconds", title="Predicted, if every link were like this")
growth.set_xticks(devices, labels=devices)
growth.minorticks_off()
growth.legend(fontsize=9)
plt.show()

# %%
from paceline_advisor.formulas.scaling import ring_all_reduce_seconds

assert np.isclose(ring_seconds(100e6, np.array(64)), ring_all_reduce_seconds(100e6, 64, 1 / per_byte, latency))
ratio = at_rank_0_seconds(100e6, np.array(64)) / ring_seconds(100e6, np.array(64))
print(f"100 MB of gradients over 64 such ranks: by the formulas the ring is {ratio:.0f} times as fast as rank 0 alone.")

# %% [markdown]
# With two ranks there is little to gain; the difference grows with more ranks. The prediction for rank 0 may be
# inaccurate, because part of the fitted latency is not network time. A collective is queued and runs in a separate
# thread; a plain `send` does not. Remember this for every cost model: it is valid only for the operation it was
# fitted to.
#
# Look at the dotted lines too: for a *small* tensor only latency matters, and a ring has as many steps as averaging
# at rank 0. So a few large tensors are better than many small ones. The next section uses this. (Where latency
# dominates, libraries use trees instead of rings.)

# %% [markdown] tags=["slide"]
# ## 4. DistributedDataParallel
#
# `DDP(model)` does what you did by hand, and more:
#
# - **at construction** it broadcasts rank 0's weights and *buffers* (other tensors of the network);
# - it packs gradients into **buckets**: few large messages;
# - it sends a bucket **while the backward pass still computes** the earlier layers.

# %% [markdown]
# The backward pass begins at the last layer. So the last layers' gradients are ready first, and can be sent while
# those of the first layers are still being computed. This is called **overlap**. A *communication hook* is a function
# that DDP calls with each full bucket. Ours does what DDP does by default and records the time, so we see what was
# sent and when. (We use the CPU even if there are GPUs: a GPU runs its work asynchronously, so a plain clock could
# not time it.)

# %% tags=["setup"]
# %%writefile watched.py
"""DDP with a record of every bucket that it sends."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


def watched(model: nn.Module, device: torch.device, bucket_cap_mb: float = 25) -> tuple[nn.Module, list[dict]]:
    """Wrap a model; the list gets an entry for each bucket that is all-reduced."""
    messages: list[dict] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        message = {"bucket": bucket.index(), "bytes": bucket.buffer().nbytes, "start": time.perf_counter()}
        messages.append(message)

        def arrived(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            message["end"] = time.perf_counter()
            return future.value()

        return allreduce_hook(None, bucket).then(arrived)

    gpus = [device.index] if device.type == "cuda" else None
    ddp = DistributedDataParallel(model, device_ids=gpus, bucket_cap_mb=bucket_cap_mb)
    ddp.register_comm_hook(None, hook)
    return ddp, messages


# %%
# %%writefile ddp.py
import json
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from group import join, leave
from torch import nn
from torch.nn.functional import mse_loss
from toy import ToyModel, part, samples, weights
from watched import watched

rank, world_size, device = join(cpu=True)
found = {}


def apart(model: nn.Module) -> float:
    """Return the largest difference between a weight and rank 0's."""
    theirs = weights(model)
    dist.broadcast(theirs, src=0)
    difference = (weights(model) - theirs).abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return difference.item()


# 1. What DDP does at construction.
model = ToyModel(seed=rank).to(device)
before = apart(model)
ddp, messages = watched(model, device)
found["apart"] = {"before": before, "after": apart(model)}

# 2. A loop that is often copied: gradients of four micro-batches are added up, then one optimizer step.
x, y = (part(tensor.to(device), rank, world_size) for tensor in samples())
micro_batches = list(zip(x.chunk(4), y.chunk(4), strict=True))
for micro_x, micro_y in micro_batches:
    loss = mse_loss(ddp(micro_x), micro_y) / len(micro_batches)
    loss.backward()
whole = ToyModel(seed=0).to(device)
mse_loss(whole(samples()[0]), samples()[1]).backward()
gradients = zip(ddp.parameters(), whole.parameters(), strict=True)
found["accumulation"] = {
    "difference": max((mine.grad - theirs.grad).abs().max().item() for mine, theirs in gradients),
    "micro_batches": len(micro_batches),
    "all_reduces": len(messages),
    "bytes": sum(message["bytes"] for message in messages),
}

# 3. When the buckets of a larger network are sent.
layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())]
ddp, messages = watched(nn.Sequential(*layers).to(device), device, bucket_cap_mb=2)
ready: dict[str, float] = {}
for number, layer in enumerate(layers[::2], start=1):
    note = partial(lambda name, _: ready.update({name: time.perf_counter()}), f"layer {number}")
    layer.weight.register_post_accumulate_grad_hook(note)
batch = torch.randn(256, 512, device=device)
for _ in range(4):  # after the first backward pass, DDP orders its buckets by when gradients became ready
    messages.clear()
    loss = ddp(batch).square().mean()
    dist.barrier()
    start = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
found["timeline"] = {
    "layers": {name: moment - start for name, moment in ready.items()},
    "buckets": [{**m, "start": m["start"] - start, "end": m["end"] - start} for m in messages],
    "end": end - start,
}
if rank == 0:
    Path("ddp.json").write_text(json.dumps(found))
leave()

# %%
run("torchrun --standalone --nproc-per-node=2 ddp.py", seconds=300)
seen = json.loads(Path("ddp.json").read_text())
before, after = seen["apart"]["before"], seen["apart"]["after"]
print(f"largest difference between the ranks' weights before DDP was constructed: {before:.2f}, after: {after:g}")
assert before > 0
assert after == 0
assert len(seen["timeline"]["buckets"]) > 1

# %% tags=["slide"] jupyter={"source_hidden": true}
timeline = seen["timeline"]
figure, axis = plt.subplots(figsize=(9, 3.3))
begin = 0.0
for place, (name, moment) in enumerate(sorted(timeline["layers"].items(), key=lambda item: item[1])):
    axis.barh(
        0, 1e3 * (moment - begin), left=1e3 * begin, color=BLUE, alpha=0.45 + 0.3 * (place % 2), edgecolor="white"
    )
    axis.text(
        1e3 * (begin + moment) / 2,
        0,
        name.removeprefix("layer "),
        ha="center",
        va="center",
        color="white",
        weight="bold",
    )
    begin = moment
buckets = sorted(timeline["buckets"], key=lambda bucket: bucket["start"])
for row, bucket in enumerate(buckets, start=1):
    axis.barh(row, 1e3 * (bucket["end"] - bucket["start"]), left=1e3 * bucket["start"], color=ORANGE)
labels = ["backward (layer)"] + [
    f"bucket {row}, {bucket['bytes'] / 1e6:.1f} MB" for row, bucket in enumerate(buckets, start=1)
]
axis.axvline(1e3 * timeline["end"], color="black", linestyle="--", linewidth=1)
axis.set(
    yticks=range(len(labels)), yticklabels=labels, xlabel="milliseconds since the backward pass began (dashed: its end)"
)
axis.invert_yaxis()
axis.set_title("One backward pass of rank 0, measured")
plt.show()

# %%
last_gradient = max(timeline["layers"].values())
early = sum(bucket["start"] < last_gradient for bucket in buckets)
print(f"{early} of {len(buckets)} buckets were sent before the last gradient was ready.")
assert early >= 1

# %% [markdown]
# The size of a bucket (`bucket_cap_mb`, default 25 MB) is a compromise: small buckets can be sent earlier, large ones
# pay the latency less often. Nothing is left to overlap with the last bucket. Here computing and sending share two
# cores, so do not expect much gain from overlap.
#
# DDP averages **only gradients**. *Buffers*, such as the running mean and variance of BatchNorm (a layer that
# normalises with the statistics of its batch), are computed by every rank from its own part. DDP only copies rank 0's
# buffers to all ranks before each forward pass.

# %% [markdown] tags=["slide"]
# ### Several backward passes for one step
#
# **Micro-batches**: a rank's part, split into pieces that fit into memory.
#
# **Accumulation**: add up their gradients, then take one optimizer step.
#
# How often do the ranks communicate if the loop calls `backward()` for each micro-batch?

# %% [markdown]
# Widely copied reference trainers have this loop, with a counter that decides when to step. The second part of
# `ddp.py` is such a loop, and it counted the all-reduces:

# %% tags=["slide"]
naive = seen["accumulation"]
count = naive["all_reduces"]
print(f"{naive['micro_batches']} micro-batches, one optimizer step: {count} all-reduces, {naive['bytes']} bytes.")
print(f"The gradients differ from those of the whole batch by at most {naive['difference']:.0e}.")
assert naive["difference"] < 1e-6
assert naive["all_reduces"] == naive["micro_batches"]

# %% [markdown]
# DDP cannot know which backward pass is the last of a step, so it averages after each one. The result is right, but
# most of the communication is wasted. Inside `with ddp.no_sync():` it only accumulates. The **forward** pass must be
# inside too, because DDP decides there.
#
# **Exercise 2a.3.** Write `accumulate` so that gradients are averaged over the ranks once, and are the mean over all
# micro-batches. All micro-batches have the same size.

# %% tags=["setup"]
# %%writefile check_accumulate.py
import torch
import torch.distributed as dist
from group import join
from judge import judged
from torch.nn.functional import mse_loss
from toy import ToyModel, part, samples
from watched import watched

rank, world_size, device = join(seconds=30, cpu=True)
with judged():
    from accumulate import accumulate

    x, y = (tensor.to(device) for tensor in samples())
    whole = ToyModel(seed=0).to(device)
    mse_loss(whole(x), y).backward()
    ddp, messages = watched(ToyModel(seed=0).to(device), device)
    order: list[str] = []
    ddp.module.register_forward_pre_hook(lambda *_: order.append("forward"))
    ddp.module.net1.weight.register_post_accumulate_grad_hook(lambda _: order.append("backward"))
    accumulate(ddp, list(zip(part(x, rank, world_size).chunk(4), part(y, rank, world_size).chunk(4), strict=True)))
    dist.barrier()
    assert len(messages) > 0, "the gradients were not averaged over the ranks: the last backward pass must do it"
    assert len(messages) == 1, (
        f"{len(messages)} all-reduces for 4 micro-batches, but one is enough: is the forward pass in no_sync too?"
    )
    assert order == ["forward", "backward"] * 4, (
        f"take one micro-batch after the other, forward then backward, so that only one is in memory; yours: {order}"
    )
    for found, expected in zip(ddp.module.parameters(), whole.parameters(), strict=True):
        assert found.grad is not None, "a parameter has no gradient"
        ratio = (found.grad.norm() / expected.grad.norm()).item()
        assert abs(ratio - 1) < 1e-3, (
            f"the gradients are {ratio:.2f} times as large as those of the whole batch: divide the loss"
        )
        assert torch.allclose(found.grad, expected.grad, rtol=1e-4, atol=1e-6), (
            "the gradients are not the whole batch's"
        )
    if rank == 0:
        print(f"{len(messages)} all-reduce of {messages[0]['bytes']} bytes, and the gradients of the whole batch")


# %% tags=["exercise"]
# %%writefile accumulate.py
from contextlib import nullcontext  # a `with` that does nothing

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def accumulate(ddp: DistributedDataParallel, micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Compute the mean gradient of `mse_loss(ddp(x), y)` over all micro-batches and ranks, with one all-reduce."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("2a.3"):
    check_on_ranks("check_accumulate.py", "accumulate.py")

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# Loop with <code>enumerate</code>; <code>with nullcontext() if is_last else ddp.no_sync():</code> around forward,
# loss and backward. Divide the loss by the number of micro-batches.
#
# </details>

# %% tags=["answer"]
use_answer("2a.3")

# %% [markdown]
# Now count the all-reduces of `accumulate`:

# %%
counted = check_on_ranks("check_accumulate.py", "accumulate.py")
print(counted)
assert counted.startswith("1 all-reduce")

# %% [markdown]
# *Learnt: do everything that belongs to a step once per optimizer step: averaging gradients, updating the learning
# rate, and updating a moving average of the weights.*
#
# ### "Build DDP on a side stream"?
#
# Some training scripts construct DDP inside `with torch.cuda.stream(side)` and call it an optimisation, "DDP with
# overlap". It is not: the buckets give overlap, on any stream. A *stream* is a queue of work for a GPU, and a *CUDA
# graph* is a recording of such work that can be replayed. PyTorch's documentation (notes, "CUDA semantics", section
# "CUDA Graphs", *Usage with DistributedDataParallel*) requires the side stream in one case: to **record** a whole
# backward pass with DDP in a CUDA graph, after at least 11 warm-up steps. Otherwise, leave it out. Streams exist only
# on GPUs, so there is no experiment here.

# %% [markdown] tags=["slide"]
# ## 5. Which rank gets which samples
#
# `DistributedSampler` distributes indices to ranks. It has two traps:
#
# - without `sampler.set_epoch(epoch)` every epoch has **the same order**;
# - if the samples do not divide evenly it **pads**: some samples are used twice.

# %%
ten = range(10)
sampler = DistributedSampler(ten, num_replicas=2, rank=0, seed=1)
orders = {"without set_epoch": [list(sampler), list(sampler)], "with set_epoch": []}
for epoch in range(2):
    sampler.set_epoch(epoch)
    orders["with set_epoch"].append(list(sampler))
for name, (first, second) in orders.items():
    print(f"rank 0 {name:18} epoch 0: {first}   epoch 1: {second}")
assert orders["without set_epoch"][0] == orders["without set_epoch"][1]
assert orders["with set_epoch"][0] != orders["with set_epoch"][1]


# %% tags=["setup"]
def dealt(samples: int, world_size: int, **options: bool) -> list[list[int]]:
    """Return the indices that each rank gets."""
    data = range(samples)
    return [list(DistributedSampler(data, world_size, rank, shuffle=False, **options)) for rank in range(world_size)]


# %% tags=["slide"] jupyter={"source_hidden": true}
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
for axis, drop_last in zip(axes, (False, True), strict=True):
    seen_before: set[int] = set()
    parts = dealt(10, 4, drop_last=drop_last)
    for turn in range(len(parts[0])):
        for rank in range(4):
            index = parts[rank][turn]
            again = index in seen_before
            seen_before.add(index)
            colour, alpha = (ORANGE, 0.8) if again else (BLUE, 0.35)
            axis.add_patch(plt.Rectangle((turn, rank), 0.92, 0.92, fc=colour, alpha=alpha))
            axis.text(turn + 0.46, rank + 0.46, index, ha="center", va="center")
    left_out = sorted(set(range(10)) - seen_before)
    axis.set(xlim=(0, 3), ylim=(4, -0.1), xticks=[], yticks=np.arange(4) + 0.46)
    axis.set_yticklabels([f"rank {rank}" for rank in range(4)])
    axis.set_title(
        f"drop_last=True leaves out {left_out}" if drop_last else "default: orange = used twice", fontsize=11
    )
    axis.grid(visible=False)
figure.suptitle("Ten samples for four ranks")
plt.show()

# %% [markdown]
# All ranks must have the same number of batches, or one of them waits forever (section 7). So a sampler either pads
# or drops samples. In training, with a different order in every epoch, a few repeats do little harm. In evaluation
# they make the result wrong.
#
# **Exercise 2a.4.** Predict before you measure: how many samples are used a second time? Write it as a function of
# the number of samples and the world size.


# %% tags=["exercise"]
def dealt_twice(samples: int, world_size: int) -> int:
    """Return how many indices DistributedSampler adds, over all ranks, with drop_last=False."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("2a.4"):
    for count, ranks in ((10, 4), (12, 4), (1797, 8), (359, 64), (7, 3)):
        real = sum(map(len, dealt(count, ranks))) - count
        answered = dealt_twice(count, ranks)
        assert answered == real, (
            f"{count} samples over {ranks} ranks: the sampler adds {real}, your function says {answered}"
        )

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# Every rank gets the same number of samples, rounded up. How many are missing to the next multiple of the world size?
# <code>-10 % 4</code> is 2.
#
# </details>


# %% tags=["answer"]
use_answer("2a.4")

# %% [markdown]
# *Learnt: padding silently adds up to (world size − 1) samples.*

# %% [markdown] tags=["slide"]
# ### The effect: one network, evaluated on more and more ranks
#
# 1. padded parts, mean of the ranks' accuracies
# 2. parts without padding, mean of the ranks' accuracies
# 3. **sums and counts**: all correct answers, divided by all samples

# %% [markdown]
# The images are scikit-learn's handwritten digits, 8 × 8 pixels; the classifier is a single linear layer, trained
# once. Only its **evaluation** is distributed over ranks. The first way is the usual one: `DistributedSampler` pads,
# and the means are averaged with an all-reduce.

# %%
from sklearn.datasets import load_digits

digits = load_digits()
pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
held_out = 359
torch.manual_seed(0)
classifier = nn.Linear(64, 10)
optimizer = torch.optim.SGD(classifier.parameters(), lr=0.5)
for _ in range(60):
    optimizer.zero_grad()
    nn.functional.cross_entropy(classifier(pixels[:-held_out]), labels[:-held_out]).backward()
    optimizer.step()
is_correct = classifier(pixels[-held_out:]).argmax(1) == labels[-held_out:]

# %% tags=["slide"]
world_sizes = range(1, 65)
right = is_correct.numpy()
padded = [np.mean([right[indices].mean() for indices in dealt(held_out, ranks)]) for ranks in world_sizes]
mean_of_means = [np.mean([right[rank::ranks].mean() for rank in range(ranks)]) for ranks in world_sizes]
exact = right.sum() / held_out
figure, axis = plt.subplots()
axis.plot(
    world_sizes, 100 * np.array(padded), "o-", color=ORANGE, markersize=3, linewidth=1, label="padded, mean over ranks"
)
axis.plot(
    world_sizes,
    100 * np.array(mean_of_means),
    "s-",
    color=PINK,
    markersize=3,
    linewidth=1,
    label="not padded, mean over ranks",
)
axis.axhline(100 * exact, color=BLUE, label="sums and counts")
axis.set(
    xlabel="number of ranks that evaluate", ylabel="accuracy in %", title=f"One network, the same {held_out} images"
)
axis.legend()
plt.show()

# %%
wrong = sum(abs(value - exact) > 1e-6 for value in padded)
print(f"exact: {100 * exact:.2f} %. Padded, it is wrong for {wrong} of {len(padded)} world sizes:")
print(f"from {100 * min(padded):.2f} to {100 * max(padded):.2f} %.")
assert abs(padded[0] - exact) < 1e-6
assert wrong > len(padded) // 2

# %% [markdown]
# Which of these would you report? The orange and pink curves change although only the number of processes changes.
#
# **Exercise 2a.5.** Write both parts of an exact evaluation: a rank's contribution, and the accuracy from the sum of
# all contributions. Some ranks may have no samples: `is_correct[rank::world_size]` is empty then, whereas `chunk`
# would return fewer parts than there are ranks.


# %% tags=["exercise"]
def contribution(is_correct: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Return a tensor of two numbers that can be summed over ranks, from this rank's part without padding."""
    raise NotImplementedError  # yours to write


def accuracy(total: torch.Tensor) -> float:
    """Return the accuracy in percent, from the sum of all ranks' contributions."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("2a.5"):
    answers = torch.arange(23) % 3 > 0
    for ranks in (1, 2, 3, 8, 40):
        contributions = [contribution(answers, rank, ranks) for rank in range(ranks)]
        assert all(len(one) == 2 for one in contributions), "a contribution is a tensor of two numbers"
        total = torch.stack([torch.as_tensor(one, dtype=torch.float64) for one in contributions]).sum(
            dim=0
        )  # as all_reduce would
        found = float(accuracy(total))
        expected = 100 * answers.double().mean().item()
        assert any(abs(each - len(answers)) < 1e-6 for each in total.tolist()), (
            f"the ranks' numbers add up to {total.tolist()}, and neither is {len(answers)}, the number of images: "
            "does each rank take only its own part, and return counts?"
        )
        assert not np.isnan(found), "a rank without samples must contribute zeros, not a mean of nothing"
        assert abs(found - expected / 100) > 1e-3, "return the accuracy in percent"
        assert abs(found - expected) < 1e-3, (
            f"with {ranks} ranks the accuracy is {found:.3f} %, but it should be {expected:.3f} %"
        )

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# A rank's part is <code>is_correct[rank::world_size]</code>. Two numbers that can be summed: how many are correct,
# and how many there are. Means cannot be summed.
#
# </details>


# %% tags=["answer"]
use_answer("2a.5")

# %%
by_world_size = []
for ranks in world_sizes:
    total = torch.stack([contribution(is_correct, rank, ranks) for rank in range(ranks)]).sum(dim=0)
    by_world_size.append(accuracy(total))
print(f"sums and counts on 1 to 64 ranks: from {min(by_world_size):.2f} to {max(by_world_size):.2f} %")
assert max(by_world_size) == min(by_world_size)

# %% [markdown]
# *Learnt: sum totals and counts over ranks, and divide once, at the end.* The same is true for the loss that you
# print during training. Keep two numbers on the device, and reduce them only when you print a line:
#
# ```python
# totals = torch.zeros(2, device=device)          # sum of losses, number of samples
# for step, (x, y) in enumerate(loader, start=1):
#     ...
#     totals += torch.stack([loss.detach() * len(x), torch.tensor(float(len(x)), device=device)])
#     if step % log_every == 0:                   # the same steps on every rank
#         dist.all_reduce(totals)                 # every rank calls it
#         if rank == 0:                           # only one rank prints
#             print(f"step {step}: loss {(totals[0] / totals[1]).item():.4f}")
#         totals.zero_()
# ```
#
# Do not do this in *every* step: the all-reduce, and `.item()`, which waits for the device, would slow down the
# training that you measure.

# %% [markdown] tags=["slide"]
# ## 6. Seeds: which worker draws which random numbers
#
# Often copied, "so that no two workers draw the same numbers":
#
# `np.random.seed(seed + local_rank + worker_id)`
#
# 8 ranks with 5 workers each are 40 workers. How many different seeds do they get?

# %% [markdown]
# *Augmentation* varies training images at random. *Workers* read the images: additional processes of each rank, each
# with its own random numbers.
#
# **Exercise 2a.6.** Predict: how many different values does `seed + local_rank + worker_id` have? Both numbers start
# at 0.


# %% tags=["exercise"]
def different_seeds(ranks: int, workers: int) -> int:
    """Return how many different seeds the workers of one node get."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("2a.6"):
    for ranks, workers in ((8, 5), (1, 4), (4, 1), (3, 3)):
        real = len({42 + local_rank + worker for local_rank in range(ranks) for worker in range(workers)})
        answered = different_seeds(ranks, workers)
        assert answered == real, (
            f"{ranks} ranks with {workers} workers get {real} different seeds, your function says {answered}"
        )

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# What is the smallest and the largest sum of the two numbers? Does every integer between them occur?
#
# </details>


# %% tags=["answer"]
use_answer("2a.6")

# %% tags=["slide"]
seeds = 42 + np.arange(8)[:, None] + np.arange(5)[None, :]
first_draws = {np.random.RandomState(seed).uniform() for seed in seeds.flat}
figure, axis = plt.subplots(figsize=(6, 4.4))
axis.imshow(seeds, cmap="tab20", aspect="auto", alpha=0.7)
for (rank, worker), seed in np.ndenumerate(seeds):
    axis.text(worker, rank, seed, ha="center", va="center")
axis.set(xlabel="worker_id", ylabel="local_rank", xticks=range(5), yticks=range(8))
axis.set_title(f"seed + local_rank + worker_id: {len(np.unique(seeds))} seeds for {seeds.size} workers")
axis.grid(visible=False)
plt.show()
assert len(np.unique(seeds)) == different_seeds(8, 5) == len(first_draws) == 12

# %%
nodes = [(node, local_rank, worker) for node in range(4) for local_rank in range(8) for worker in range(5)]
given = {42 + local_rank + worker for _, local_rank, worker in nodes}
print(f"4 nodes: {len(nodes)} workers, {len(given)} different seeds.")
print("local_rank starts at 0 on every node, so all nodes draw the same numbers.")
same = [np.random.RandomState(42 + local + worker).randint(0, 5, 4).tolist() for local, worker in ((3, 0), (0, 3))]
print(f"positions of the first random crops: {same[0]} (local rank 3, worker 0), {same[1]} (local rank 0, worker 3)")
assert same[0] == same[1]

# %% [markdown]
# *Learnt: a sum of indices is not unique.* `seed + rank · workers + worker_id`, with the *global* rank, gives every
# worker its own seed within an epoch. But then the augmentation of an image depends on the worker that reads it. With
# a different number of workers or ranks, the training differs, and a run that resumes in the middle of an epoch does
# not know which numbers have been drawn.
#
# It is better to make random numbers a **function of (seed, epoch, sample id)**. A *counter-based generator* computes
# the numbers for a key directly, without any state (Salmon et al., 2011). Paceline does this for augmentation. Any
# process that reads sample 1234 in epoch 3, alone or with others, gets the same numbers:

# %%
from paceline.data.random_draws import uniforms

alone = uniforms(seed=42, epoch=3, ids=np.array([1234]), count=2)[0]
among_others = uniforms(seed=42, epoch=3, ids=np.array([7, 1234, 99]), count=2)[1]
next_epoch = uniforms(seed=42, epoch=4, ids=np.array([1234]), count=2)[0]
print(f"sample 1234, epoch 3, alone:        {alone}")
print(f"sample 1234, epoch 3, among others: {among_others}")
print(f"sample 1234, epoch 4:               {next_epoch}")
assert np.array_equal(alone, among_others)
assert not np.array_equal(alone, next_epoch)

# %% [markdown] tags=["slide"]
# ## 7. When a rank skips a collective
#
# Every rank must call **the same collectives in the same order**. Otherwise:
#
# - a rank waits until a timeout (default for gloo: 30 minutes);
# - or its call is matched with a **different** one: no error, wrong numbers.
#
# Two common causes: `if rank == 0: validate()`, and one more batch on one rank.

# %% [markdown]
# (The first is a cause if `validate` contains an all-reduce.) The next script shows both effects, with a timeout of
# five seconds. Rank 0 has three batches, rank 1 has two. Each all-reduces the loss after every batch, and the number
# of correct answers at the end. Then rank 0 looks for the missing rank with `monitored_barrier`, a barrier of gloo
# that names the ranks that have not reached it.

# %%
# %%writefile uneven.py
from datetime import timedelta

import torch
import torch.distributed as dist
from group import join, leave

rank, world_size, device = join(cpu=True)
dist.barrier()  # both have started
hurried = dist.new_group(timeout=timedelta(seconds=5))
watch = dist.new_group()
losses = {0: [0.7, 0.6, 0.5], 1: [0.7, 0.6]}[rank]
for loss in losses:
    total = torch.tensor(loss)
    dist.all_reduce(total, group=hurried)
correct = torch.tensor(100.0)
try:
    dist.all_reduce(correct, group=hurried)
    print(f"rank {rank}: correct answers of both ranks: {correct.item():g}. 200 would be right.")
except RuntimeError as error:
    print(f"rank {rank}: waited 5 s, then: {str(error).split('] ')[-1]}")

if rank == 0:
    try:
        dist.monitored_barrier(watch, timeout=timedelta(seconds=1))
    except RuntimeError as error:
        print(f"rank {rank}: {str(error).splitlines()[0]}")
leave()  # begins with a barrier, where rank 1 is waiting

# %%
uneven = run("torchrun --standalone --nproc-per-node=2 uneven.py", seconds=300)
assert "200 would be right" in uneven
assert "rank 0: waited" in uneven
assert "Rank 1 failed to pass monitoredBarrier" in uneven

# %% [markdown]
# Read rank 1's line again. Its count was added to rank 0's third **loss**, because both are tensors of one number. It
# got a wrong result without an error.
#
# How to find such an error:
#
# - set a short timeout (`init_process_group(timeout=…)`), and compare the last log line of each rank;
# - call `monitored_barrier` at suspicious places (gloo), or set `TORCH_DISTRIBUTED_DEBUG=DETAIL`: ranks then compare
#   each collective before they start it, which is slow;
# - run `py-spy dump --pid …` (install it with `pip install py-spy`), which shows the stack of a running Python
#   process. The rank that is *not* in a collective is the cause;
# - Paceline monitors its ranks and names the one that the others wait for, with host, step and line of code
#   (`parallel.timeout`; guide *Several hosts*, section *Hanging runs*).
#
# How to avoid it: give every rank the same number of batches, make decisions from values that all ranks share, and
# never call a collective under `if rank == 0`.

# %% [markdown] tags=["slide"]
# ## 8. The same with Paceline
#
# - `paceline train digits --processes 2` does everything from this lab
# - `paceline audit` proves that each sample was used once per epoch
# - `paceline evaluate`, with one process, must give the same accuracy as two

# %% [markdown]
# Each rank keeps a **ledger**: a list of the samples it has used. The audit reads the ledgers of all ranks, and
# compares them with the order that the recipe asks for.

# %%
short = 'model.options.width=4 train.duration="3 epochs" telemetry.log_every="1 epoch"'
log = run(f"paceline train digits {short} --processes 2 --run-dir runs/two", seconds=300)

# %% tags=["slide"]
audit = run("paceline audit runs/two", seconds=300)
assert "Passed" in audit

# %%
alone = json.loads(run("paceline evaluate runs/two --json", quiet=True, seconds=300))
together = json.loads(Path("runs/two/summary.json").read_text())["metrics"]
print(f"top-1 accuracy, evaluated by two processes: {together['top1_accuracy']:.4f} %")
print(f"                evaluated by one process:   {alone['top1_accuracy']:.4f} %")
assert abs(alone["top1_accuracy"] - together["top1_accuracy"]) < 0.3  # one image, if rounding changes a tie

# %%
from paceline.reports.audit import used_samples

plan = json.loads(Path("runs/two/plan.json").read_text())
ledgers = [used_samples(Path("runs/two"), rank) for rank in (0, 1)]
parts = [[entry.ids for entry in ledger if entry.epoch == 0] for ledger in ledgers]
used = [np.concatenate(batches) for batches in parts]
different = np.unique(np.concatenate(used))
print(f"first epoch: rank 0 used {len(used[0])} samples, rank 1 {len(used[1])}, {len(different)} different ones,")
print(
    f"of {plan['train_samples']}. Its last batch: {len(parts[0][-1])} and {len(parts[1][-1])} samples, nothing padded."
)
assert len(different) == sum(map(len, used)) == plan["train_samples"]

# %% [markdown]
# | in this lab | in Paceline's run |
# |---|---|
# | weights broadcast, gradients averaged in buckets | PyTorch's DDP |
# | micro-batches, one all-reduce per step | `no_sync` on all but the last; `batch.micro_size` sets their size |
# | the batch does not grow with the world size | `batch.global_size` counts the samples of *all* ranks |
# | a different order in every epoch, each sample once | functions of (seed, epoch, step); the ledger proves it |
# | a smaller last batch | distributed too, each sample with the same weight |
# | random numbers | keyed by (seed, epoch, sample id) |
# | exact evaluation | sums and counts, each sample once |
# | log from one rank, no waiting in every step | sums on the device, reduced only when a line is logged |
# | a rank that hangs | named, and the run ends; the same command resumes from the last checkpoint |
#
# `paceline prove RECIPE` checks these properties for your own recipe.

# %% [markdown] tags=["slide"]
# ## To remember
#
# - With the same initial weights, averaged gradients and the same step, *p* ranks train one network.
# - A ring sends about *2n* bytes per rank for any *p*; only the latency grows.
# - DDP: broadcast, buckets, overlap. `no_sync` for all micro-batches but the last.
# - Call `set_epoch`. Avoid padding in evaluation. Sum totals and counts, then divide once.
# - All ranks call the same collectives in the same order.

# %% [markdown]
# ## Further reading
#
# - S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020, arXiv:2006.15704:
#   the design of DDP.
# - P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of Parallel
#   and Distributed Computing 69(2), 2009: the ring.
# - A. Sergeev, M. Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018,
#   arXiv:1802.05799: how the ring came to deep learning.
# - P. Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017, arXiv:1706.02677: section 3
#   lists subtleties and pitfalls of distributed SGD.
# - J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011: counter-based generators.
# - PyTorch's documentation: notes "Distributed Data Parallel" and "CUDA semantics"; `torchrun`.
#
# Next: lab 2b, a real network with checkpoints, throughput, sharded weights, and two nodes.
