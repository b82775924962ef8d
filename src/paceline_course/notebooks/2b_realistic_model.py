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
# # Lab 2b: A more realistic model
#
# From a loop that trains to a run one can rely on: validation, checkpoints, throughput, memory, several machines.

# %% [markdown]
# After this lab you can
#
# - turn a one-process training script into a DDP script, and say why each changed line changed;
# - tell what batch normalisation does on several ranks, and when that matters;
# - write a checkpoint from which a killed run goes on as if nothing had happened;
# - measure throughput, and say what a second process brought;
# - predict the memory that DDP and FSDP need on each rank, and start the same script on several machines.
#
# **You need** labs 1 and 2a: process, rank, world size, `torchrun`, all-reduce, `DistributedDataParallel` (DDP), and
# that DDP averages gradients. Of PyTorch: modules, optimizers, `state_dict()`.
#
# **Time**: about 90 minutes with the exercises. Everything runs on two processor cores, in a few minutes if they have
# nothing else to do. GPUs are used where there is one for each process.
#
# **Data**: scikit-learn's handwritten digits, which come with the course. If you have CIFAR-10 or Fashion-MNIST, name
# their folder in the environment variable `PACELINE_LABS_DATA` before you start Jupyter. On a processor the lab takes
# as many images of them as there are digits; CIFAR's have sixteen times the pixels, so it takes much longer.

# %% tags=["setup"]
import json
import os
import time
from contextlib import suppress
from copy import deepcopy
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display
from torch import nn
from torch.nn import functional as F

from paceline_course import exercise, run, use_style

use_style()
torch.set_num_threads(1)  # as in every process below, so that times can be compared

# %% [markdown] tags=["slide"]
# ## 1 The network: WideResNet
#
# - A *residual block* adds its input to its result, so that gradients reach early layers.
# - A *wide* one has more channels in place of more layers: fewer, larger products suit parallel hardware.
#
# Zagoruyko and Komodakis, *Wide Residual Networks*, 2016, arXiv:1605.07146

# %% [markdown]
# The next cell writes a module that the notebook and all scripts share: the data, the network and a few small tools.
# Read `Block` and `WideResNet`; come back to the tools when they are used.
#
# Two of the tools are *functions of the position*: `order(epoch, …)` gives the same order whenever it is asked, and
# `shifted(images, draws)` moves images by what a generator says that the caller has seeded. Section 5 shows what that
# is good for.

# %%
# %%writefile realistic.py
"""Lab 2b: data, network and the small tools that the notebook and its scripts share."""

import hashlib
import os
import sys
from contextlib import suppress

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from paceline.data.image.datasets import open_dataset
from paceline.errors import PacelineError
from paceline.recipe.data import Data

SEED, EPOCHS, GLOBAL_BATCH, RATE, SAVE_EVERY = 0, 4, 64, 0.1, 10
torch.backends.cudnn.deterministic = True  # on GPUs too: the same run gives the same bits


def named_data():
    """The data set that lies in the folder PACELINE_LABS_DATA, or the digits, as a recipe's section `data`."""
    folder = os.environ.get("PACELINE_LABS_DATA")
    if not folder:
        return Data(dataset="digits")
    for name in ("cifar10", "fashion_mnist"):
        with suppress(PacelineError):
            open_dataset(Data(dataset=name, path=folder))
            return Data(dataset=name, path=folder)
    raise FileNotFoundError(
        f"PACELINE_LABS_DATA={folder} holds neither CIFAR-10 nor Fashion-MNIST; name their folder, or unset it."
    )


def load_data(device):
    """Training images and labels, held-out images and labels: tensors on the device, images normalised."""
    dataset = open_dataset(named_data())
    most_train, most_held_out = (50_000, 10_000) if device.type == "cuda" else (1438, 359)  # what a CPU does in seconds

    def tensors(source, most):
        chosen = torch.randperm(len(source.labels), generator=torch.Generator().manual_seed(SEED))[:most].tolist()
        pixels = torch.from_numpy(np.stack([source.read(i) for i in chosen])).permute(0, 3, 1, 2) / 255
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (dataset.mean, dataset.std))
        return ((pixels - mean) / std).to(device), torch.as_tensor(source.labels)[chosen].long().to(device)

    return *tensors(dataset.train, most_train), *tensors(dataset.validation, most_held_out)


def device_and_backend():
    """Under torchrun: a GPU for each process, if there are enough, and NCCL; else the CPU and gloo."""
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() < local_world:
        return torch.device("cpu"), "gloo"
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank), "nccl"


def leave_group():
    """Leave the group of processes and end this one at once: gloo's threads can abort an interpreter that ends."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


class Block(nn.Module):
    """Normalise, activate, convolve, twice; and a shortcut around both."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        active = F.relu(self.norm1(x))
        shortcut = x if isinstance(self.shortcut, nn.Identity) else self.shortcut(active)
        return self.conv2(F.relu(self.norm2(self.conv1(active)))) + shortcut


class WideResNet(nn.Module):
    """Three stages of `blocks` blocks each, `width` times as wide as a plain ResNet for small images."""

    def __init__(self, num_classes=10, in_channels=1, blocks=1, width=2):
        super().__init__()
        wide = [16, 16 * width, 32 * width, 64 * width]
        layers = [nn.Conv2d(in_channels, wide[0], 3, padding=1, bias=False)]
        for stage in range(3):
            for block in range(blocks):
                inputs = wide[stage] if block == 0 else wide[stage + 1]
                layers.append(Block(inputs, wide[stage + 1], stride=2 if stage and block == 0 else 1))
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(wide[3]), nn.ReLU())
        self.classify = nn.Linear(wide[3], num_classes)
        self.to(memory_format=torch.channels_last)  # the layout that convolutions compute fastest in

    def forward(self, x):
        return self.classify(self.features(x).mean(dim=(2, 3)))


def order(epoch, samples):
    """The order of an epoch's samples: a function of the seed and the epoch, and of nothing else."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(1000 * SEED + epoch))


def shifted(images, draws):
    """Augmentation: each image moved by up to one pixel, as the random generator `draws` says."""
    count, _, height, width = images.shape
    down, right = torch.randint(3, (2, count, 1, 1), generator=draws)
    rows, columns = down + torch.arange(height).view(-1, 1), right + torch.arange(width)
    sample = torch.arange(count).view(-1, 1, 1)
    return F.pad(images, (1, 1, 1, 1)).permute(0, 2, 3, 1)[sample, rows, columns].permute(0, 3, 1, 2).contiguous()


@torch.no_grad()
def sums(network, images, labels):
    """Summed loss, right answers and number of images: three numbers that may be added up over processes."""
    network.eval()
    total = torch.zeros(3, dtype=torch.float64, device=images.device)
    for x, y in zip(images.split(256), labels.split(256), strict=True):
        scores = network(x)
        right = (scores.argmax(dim=1) == y).sum()
        total += torch.stack([F.cross_entropy(scores, y, reduction="sum"), right, torch.full_like(right, len(y))])
    network.train()
    return total


def digest(state):
    """A fingerprint of named tensors, such as network.state_dict(): equal only if every bit is equal."""
    content = (state[name].detach().cpu().contiguous().numpy().tobytes() for name in sorted(state))
    return hashlib.sha256(b"".join(content)).hexdigest()[:16]


def save(state, path):
    """Write a checkpoint so that under its name there is always a whole one: write beside it, then rename."""
    torch.save(state, f"{path}.partial")
    os.replace(f"{path}.partial", path)


# %%
from realistic import EPOCHS, GLOBAL_BATCH, RATE, Block, WideResNet, load_data, named_data, order, shifted

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
images, labels, held_out, answers = load_data(device)
network = WideResNet(in_channels=images.shape[1])
PARAMETERS = sum(weight.numel() for weight in network.parameters())
STEPS = len(images) // GLOBAL_BATCH  # of an epoch; the incomplete last batch is left out
print(
    f"{named_data().dataset}: {len(images):,} training images of {tuple(images.shape[1:])}, {len(held_out):,} held out."
)
print(f"The network has {PARAMETERS:,} parameters; an epoch has {STEPS} steps of {GLOBAL_BATCH} images.")

# %% tags=["slide"] jupyter={"source_hidden": true}
x, stages = images[:1].cpu(), []
with torch.no_grad():
    for layer in network.features:
        x = layer(x)
        if isinstance(layer, nn.Conv2d | Block):
            stages.append((type(layer).__name__.replace("Conv2d", "Convolution"), tuple(x.shape[1:])))
figure, axes = plt.subplots(figsize=(9, 2.8))
for i, (kind, (channels, height, width)) in enumerate([*stages, ("Mean, linear", (10, 1, 1))]):
    box = {
        "boxstyle": "round,pad=0.5",
        "facecolor": "#d9ecf7" if kind == "Block" else "#f2f2f2",
        "edgecolor": "#0072b2",
    }
    axes.text(2 * i, 1, kind, ha="center", va="center", bbox=box)
    axes.text(2 * i, 0.35, f"{channels} x {height} x {width}", ha="center", va="center", fontsize=10)
    if i:
        axes.annotate("", (2 * i - 0.72, 1), (2 * i - 1.28, 1), arrowprops={"arrowstyle": "->"})
    if kind == "Block":
        curve = {"arrowstyle": "->", "connectionstyle": "arc3,rad=-0.6", "color": "#d55e00"}
        axes.annotate("", (2 * i + 0.55, 1.25), (2 * i - 0.55, 1.25), arrowprops=curve)
        axes.text(2 * i, 1.78, "shortcut", ha="center", color="#d55e00", fontsize=10)
axes.set(xlim=(-1, 2 * len(stages) + 1), ylim=(0, 2.1), title="The network, and the shape of what leaves each part")
axes.axis("off")
plt.show()

# %% [markdown]
# ## 2 One process
#
# First the training as one would write it for one device. Its loop counts *steps* from the first to the last; epoch
# and position in the epoch follow from the step. The optimizer has momentum, and weight decay, which pulls weights
# towards zero; the learning rate falls along half a cosine. Every ten steps, and after each epoch, it saves a
# checkpoint; if one is there at the start, it goes on from it. `save()` and what it saves are the subject of section
# 5. (`die_at` ends the process in the middle, for section 5 as well.)

# %%
# %%writefile train_one.py
"""Train the WideResNet in one process."""

import os
import sys
import time

import torch
from realistic import (
    EPOCHS,
    GLOBAL_BATCH,
    RATE,
    SAVE_EVERY,
    SEED,
    WideResNet,
    digest,
    load_data,
    order,
    save,
    shifted,
    sums,
)
from torch.nn import functional as F


def main(checkpoint, die_at=None):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, labels, held_out, answers = load_data(device)
    torch.manual_seed(SEED)
    network = WideResNet(in_channels=images.shape[1]).to(device)
    model = network
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)
    steps = len(images) // GLOBAL_BATCH  # of an epoch
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * steps)
    begin, history = 0, []
    if os.path.exists(checkpoint):
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        begin, history = state["step"], state["history"]

    for step in range(begin, EPOCHS * steps):
        if step == die_at:
            os.kill(os.getpid(), 9)  # SIGKILL: no warning, no last word
        epoch, position = divmod(step, steps)
        if position == 0 or step == begin:
            start, first = time.perf_counter(), step
        batch = order(epoch, len(images))[GLOBAL_BATCH * position : GLOBAL_BATCH * (position + 1)]
        draws = torch.Generator().manual_seed(1000 * step)
        loss = F.cross_entropy(model(shifted(images[batch], draws)), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if position == steps - 1:
            rate = (step + 1 - first) * GLOBAL_BATCH / (time.perf_counter() - start)
            total = sums(network, held_out, answers)
            history.append({"loss": (total[0] / total[2]).item(), "accuracy": (100 * total[1] / total[2]).item()})
            print(f"epoch {epoch + 1}: accuracy {history[-1]['accuracy']:.2f} %, {rate:,.0f} images/s", flush=True)
        if (step + 1) % SAVE_EVERY == 0 or position == steps - 1:
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
            save({**state, "schedule": schedule.state_dict(), "step": step + 1, "history": history}, checkpoint)
    print(f"weights {digest(network.state_dict())}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

# %%
from train_one import main

main("one.pt")

# %% [markdown] tags=["slide"]
# ## 3 Several processes: eight places
#
# 1. join the group, take a device
# 2. wrap the network in DDP
# 3. take a share of the batch
# 4. random numbers of one's own
# 5. the same running statistics for all
# 6. validation: a share each, sums added up
# 7. one rank reports
# 8. one rank writes; all have read

# %% [markdown]
# The *global batch* is what one optimizer step sees on all ranks together; the *batch per rank* is a rank's share of
# it. Here the global batch stays at 64, whatever the number of ranks, and so does the learning rate: then one rank
# and two do the same training, only faster. (Whoever keeps the batch per rank instead makes the global batch grow
# with the ranks. That is another training, with another best learning rate; see lab 3.)
#
# **Exercise 2b.1.** Place 3. Every rank knows the `batch`, the list of the step's samples. Which of them are this
# rank's? All must be taken, none twice, also where the number of ranks does not divide the batch. One line.


# %% tags=["exercise"]
def share(batch: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """The samples of `batch` that `rank` of `world` ranks computes."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("2b.1"):
    for world in (1, 2, 3, 8):
        batch = torch.arange(100, 164)
        shares = [share(batch, rank, world) for rank in range(world)]
        sizes = [len(part) for part in shares]
        taken = torch.cat(shares)
        assert len(taken) >= 64, f"with {world} ranks only {len(taken)} of 64 samples are taken"
        assert len(taken.unique()) == len(taken), f"with {world} ranks some samples are taken twice"
        assert sorted(taken.tolist()) == batch.tolist(), "the shares hold other samples than the batch"
        assert max(sizes) - min(sizes) <= 1, (
            f"with {world} ranks the shares have {sizes} samples: the largest holds all up"
        )

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# A slice has a step: <code>numbers[first::every]</code>.
#
# </details>


# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
def share(batch: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    return batch[rank::world]


# %% [markdown]
# **Learnt:** if all ranks know the order of the samples, the ranks' shares are a matter of slicing. (DDP weights all
# ranks alike when it averages gradients, so shares of unequal size would be another mean. Paceline refuses a batch
# that does not divide; here 2 divides 64.)
#
# **Exercise 2b.2.** Place 6. Each rank has counted its right answers and its held-out images; 359 images do not
# divide by two, so the counts differ. What is the accuracy, in percent? `per_rank` has one row for each rank: right
# answers, images.


# %% tags=["exercise"]
def accuracy(per_rank: torch.Tensor) -> float:
    """Percent of all images that were answered rightly; `per_rank` is ranks x (right, images)."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("2b.2"):
    assert abs(accuracy(torch.tensor([[90.0, 100.0], [80.0, 100.0]])) - 85) < 1e-4, "170 of 200 are right: that is 85 %"
    uneven = accuracy(torch.tensor([[100.0, 100.0], [0.0, 1.0]]))
    assert abs(uneven - 50) > 1e-4, (
        "100 of 101 are right, which is 99.01 %, and the mean of the ranks' accuracies says 50 %"
    )
    assert abs(uneven - 100 * 100 / 101) < 1e-4, f"100 of 101 are right, which is 99.01 %, and this says {uneven:.2f}"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# Add first, divide once.
#
# </details>


# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
def accuracy(per_rank: torch.Tensor) -> float:
    right, counted = per_rank.sum(dim=0).tolist()
    return 100 * right / counted


# %% [markdown]
# **Learnt:** sums and counts may be added up over ranks; means may not. Nothing is padded, so no image counts twice.
#
# Here is the whole script. Find the eight numbers in its comments.

# %%
# %%writefile train_ddp.py
"""Train the WideResNet in as many processes as torchrun starts."""

import os
import sys
import time

import torch
import torch.distributed as dist
from realistic import (
    EPOCHS,
    GLOBAL_BATCH,
    RATE,
    SAVE_EVERY,
    SEED,
    WideResNet,
    device_and_backend,
    digest,
    leave_group,
    load_data,
    order,
    save,
    shifted,
    sums,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def main(checkpoint, die_at=None):
    device, backend = device_and_backend()  # 1. a device for this process, and the group of all
    dist.init_process_group(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels, held_out, answers = load_data(device)
    torch.manual_seed(SEED)
    network = WideResNet(in_channels=images.shape[1]).to(device)
    model = DistributedDataParallel(network)  # 2. rank 0's first weights for all; gradients averaged in backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)
    steps = len(images) // GLOBAL_BATCH  # of an epoch
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * steps)
    begin, history = 0, []
    if os.path.exists(checkpoint):
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        begin, history = state["step"], state["history"]

    for step in range(begin, EPOCHS * steps):
        if step == die_at and rank == world - 1:
            os.kill(os.getpid(), 9)  # SIGKILL: no warning, no last word
        epoch, position = divmod(step, steps)
        if position == 0 or step == begin:
            start, first = time.perf_counter(), step
        batch = order(epoch, len(images))[GLOBAL_BATCH * position : GLOBAL_BATCH * (position + 1)]
        batch = batch[rank::world]  # 3. this rank's share of the global batch
        draws = torch.Generator().manual_seed(1000 * step + rank)  # 4. random numbers of its own
        loss = F.cross_entropy(model(shifted(images[batch], draws)), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if position == steps - 1:
            rate = (step + 1 - first) * GLOBAL_BATCH / (time.perf_counter() - start)
            for buffer in network.buffers():
                dist.broadcast(buffer, src=0)  # 5. all score the same network: running statistics of rank 0
            total = sums(network, held_out[rank::world], answers[rank::world])  # 6. a share of the held-out images,
            dist.all_reduce(total)  # and their sums added up
            history.append({"loss": (total[0] / total[2]).item(), "accuracy": (100 * total[1] / total[2]).item()})
            if rank == 0:  # 7. one rank reports
                print(f"epoch {epoch + 1}: accuracy {history[-1]['accuracy']:.2f} %, {rate:,.0f} images/s", flush=True)
        if rank == 0 and ((step + 1) % SAVE_EVERY == 0 or position == steps - 1):  # 8. one rank writes, all have read
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
            save({**state, "schedule": schedule.state_dict(), "step": step + 1, "history": history}, checkpoint)
    for buffer in network.buffers():
        dist.broadcast(buffer, src=0)
    print(f"rank {rank} of {world}: weights {digest(network.state_dict())}\n", end="", flush=True)
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

# %% [markdown]
# What is new, and what went:

# %% jupyter={"source_hidden": true}
import difflib
from html import escape

from IPython.display import HTML

old, new = (Path(name).read_text().splitlines() for name in ("train_one.py", "train_ddp.py"))
colours = {"+": "#d5f0d5", "-": "#f9dcd3", "@": "white"}
changes = list(difflib.unified_diff(old, new, n=0, lineterm=""))[2:]
shown = ["" if line[0] == "@" else escape(line) for line in changes]
styled = [
    f'<div style="background: {colours[c[0]]}">{text or "&nbsp;"}</div>' for c, text in zip(changes, shown, strict=True)
]
display(HTML(f'<pre style="font: 85%/1.3 monospace">{"".join(styled)}</pre>'))
print(f"{sum(c[0] == '-' for c in changes)} lines went and {sum(c[0] == '+' for c in changes)} came, of {len(old)}.")

# %%
seen = run("torchrun --standalone --nproc-per-node=2 train_ddp.py two.pt", seconds=300)

# %% jupyter={"source_hidden": true}
one, two = (torch.load(name, weights_only=True) for name in ("one.pt", "two.pt"))
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
for name, state, marker in (("one process", one, "o"), ("two processes", two, "s")):
    epochs = range(1, EPOCHS + 1)
    left.plot(epochs, [entry["loss"] for entry in state["history"]], marker=marker, label=name)
    right.plot(epochs, [entry["accuracy"] for entry in state["history"]], marker=marker, label=name)
left.set(xlabel="epoch", ylabel="loss on held-out images", xticks=epochs)
right.set(xlabel="epoch", ylabel="accuracy on held-out images, %", xticks=epochs)
left.legend()
plt.show()
last_one, last_two = (state["history"][-1]["accuracy"] for state in (one, two))
print(
    f"At the end {last_one:.1f} % with one process and {last_two:.1f} % with two, by the same samples at the same rate."
)
assert min(last_one, last_two) > (85 if named_data().dataset == "digits" else 15), "both must have learnt something"

# %% [markdown]
# The curves are alike, but they are not the same curve. Two things differ: each rank draws its own shifts (place 4),
# and each rank normalises its own share of the batch. The second is worth a section.

# %% [markdown] tags=["slide"]
# ## 4 Batch normalisation across ranks
#
# *Batch normalisation* (BatchNorm) subtracts from every channel its mean over the batch, and divides by its standard
# deviation. Under DDP "the batch" is what the rank has: **local statistics**.

# %% [markdown]
# So the network that is trained depends on the batch per rank. How much? We compute the gradient of one batch of 64,
# once as a whole and once as DDP would with 2, 4, … ranks: each share by itself, gradients averaged.

# %%
torch.manual_seed(0)
probe = WideResNet(in_channels=images.shape[1]).to(device)
batch = order(0, len(images))[:GLOBAL_BATCH]


def gradient(network: nn.Module, ranks: int) -> torch.Tensor:
    """What DDP computes with so many ranks, here one after the other: the mean of the gradients of the shares."""
    network.zero_grad()
    for rank in range(ranks):
        mine = batch[rank::ranks]
        (F.cross_entropy(network(images[mine]), labels[mine]) / ranks).backward()
    return torch.cat([weight.grad.flatten() for weight in network.parameters()])


def difference(network: nn.Module, ranks: int) -> float:
    """How far that is from the gradient of the whole batch, in per cent of its length."""
    whole = gradient(network, 1)
    return (100 * (gradient(network, ranks) - whole).norm() / whole.norm()).item()


def without_norm(network: nn.Module) -> nn.Module:
    """A copy whose BatchNorm layers pass everything on as it is."""
    network = deepcopy(network)
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.Identity())
    return network


ranks = [2, 4, 8, 16]
with_norm = [difference(probe, count) for count in ranks]
plain = [difference(without_norm(probe), count) for count in ranks]

# %% tags=["slide"] jupyter={"source_hidden": true}
figure, axes = plt.subplots()
places = torch.arange(len(ranks))
for shift, values, name in ((-0.2, with_norm, "with BatchNorm"), (0.2, plain, "without")):
    bars = axes.bar(places + shift, values, width=0.4, label=name)
    axes.bar_label(bars, [f"{value:.0f} %" if value > 0.5 else "rounding" for value in values], fontsize=9)
axes.set_xticks(places, [f"{count} ranks,\n{GLOBAL_BATCH // count} images each" for count in ranks])
axes.set(
    ylabel="difference from the gradient\nof the whole batch, %",
    title="A batch of 64, shared out",
    ylim=(0, 1.15 * max(with_norm)),
)
axes.legend(loc="upper left")
plt.show()
assert max(plain) < 0.1 < min(with_norm), "only BatchNorm tells shares from a whole"
assert with_norm[0] < with_norm[-1], "the smaller the shares, the more"

# %% [markdown]
# Without BatchNorm the mean over the shares is the gradient of the whole batch, but for rounding. With it, the fewer
# images a rank has, the noisier its statistics. Goyal et al. (*Accurate, Large Minibatch SGD*, 2017,
# arXiv:1706.02677) keep 32 images per GPU, and local statistics, on purpose: so the loss stays the same function
# whatever the number of GPUs. Wu and He (*Group Normalization*, 2018, arXiv:1803.08494) show how the error grows as
# the batch per GPU falls below that. With a few images per rank, as in object detection, one wants statistics of the
# global batch.
#
# That is what `nn.SyncBatchNorm` does: ranks add up what the mean and the variance need, and all use the same two.
#
# **Exercise 2b.3.** Each rank has of its values: their number, their sum, and the sum of their squares. What are the
# mean and the variance of all values together? `per_rank` has these three in columns.


# %% tags=["exercise"]
def pooled(per_rank: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance (divided by the number) of all ranks' values; `per_rank` is ranks x (number, sum, squares)."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("2b.3"):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(size, generator=generator, dtype=torch.float64) + 3 * i for i, size in enumerate((5, 20, 8))]
    table = torch.stack(
        [torch.stack([torch.tensor(float(len(v))).double(), v.sum(), v.square().sum()]) for v in values]
    )
    mean, variance = pooled(table)
    whole = torch.cat(values)
    assert not torch.allclose(variance, torch.stack([v.var(correction=0) for v in values]).mean()), (
        "the mean of the ranks' variances leaves out that their means differ"
    )
    assert torch.allclose(mean, whole.mean()), f"the mean of all values is {whole.mean():.3f}, and this says {mean:.3f}"
    assert torch.allclose(variance, whole.var(correction=0)), (
        f"the variance is {whole.var(correction=0):.3f}, not {variance:.3f}"
    )

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# The variance is the mean of the squares less the square of the mean.
#
# </details>


# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
def pooled(per_rank: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    number, total, squares = per_rank.sum(dim=0)
    mean = total / number
    return mean, squares / number - mean**2


# %% [markdown]
# **Learnt:** a synchronised BatchNorm costs one small all-reduce for each layer and pass, of sums and not of means.

# %% [markdown]
# **Buffers.** BatchNorm keeps a running mean and variance for scoring. They are *buffers*: part of `state_dict()`,
# but without gradient, so DDP does not average them. What it does do: at the beginning of each forward pass it sends
# rank 0's buffers to all (`broadcast_buffers=True`). After the pass they differ again. Whoever scores then scores
# another network on every rank, and that is why place 5 is there. Here are five steps without it, and a last line that
# tries PyTorch's `SyncBatchNorm`.

# %%
# %%writefile buffers.py
"""Five steps with DDP; then each rank tells what it holds."""

import torch
import torch.distributed as dist
from realistic import GLOBAL_BATCH, RATE, WideResNet, device_and_backend, digest, leave_group, load_data, order
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

device, backend = device_and_backend()
dist.init_process_group(backend)
rank, world = dist.get_rank(), dist.get_world_size()
images, labels, _, _ = load_data(device)
torch.manual_seed(0)
network = WideResNet(in_channels=images.shape[1]).to(device)
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
for batch in order(0, len(images)).split(GLOBAL_BATCH)[:5]:
    mine = batch[rank::world]
    optimizer.zero_grad()
    F.cross_entropy(model(images[mine]), labels[mine]).backward()
    optimizer.step()
weights, statistics = digest(dict(network.named_parameters())), digest(dict(network.named_buffers()))
try:
    nn.SyncBatchNorm.convert_sync_batchnorm(network)(images[:8])
    answer = "it runs"
except ValueError as error:
    answer = str(error)
print(f"rank {rank}: parameters {weights}, buffers {statistics}\n  SyncBatchNorm: {answer}\n", end="", flush=True)
leave_group()

# %%
seen = run("torchrun --standalone --nproc-per-node=2 buffers.py", seconds=300)
told = [line.split() for line in seen.splitlines() if ": parameters " in line]
parameters, buffers = {words[3] for words in told}, {words[5] for words in told}
print(f"On 2 ranks: {len(parameters)} set of parameters, {len(buffers)} sets of buffers.")
assert (len(parameters), len(buffers)) == (1, 2), "DDP keeps parameters equal, and not the running statistics"

# %% [markdown] tags=["slide"]
# ## 5 Checkpoints: what must be in one?
#
# A resumed run should do what the undisturbed one would have done. Whatever the next step depends on must be
#
# - **saved**, or
# - a **function of the position**, which is saved.
#
# A widely copied reference trainer saves: epoch, best metric, model, optimizer, moving average. Is that enough?

# %% [markdown]
# The trainer meant is NVIDIA's for convolutional networks (*DeepLearningExamples*, PyTorch/Classification/ConvNets).
# We build a small run with everything that a run of today has, in one process: momentum in the optimizer, a moving
# average of the weights (*EMA*, exponential moving average, which is often what gets scored), a learning rate that
# changes in every step, shuffled data, and augmentation by torch's global random numbers. Then we stop it in the
# middle of its second epoch, and go on with one thing or another left out.

# %%
LAST, STOP = 2 * STEPS + STEPS // 2, STEPS + STEPS // 3


class Run:
    """A training that can be stopped, saved and gone on with."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.network = WideResNet(in_channels=images.shape[1], width=1).to(device)
        self.average = deepcopy(self.network)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=RATE, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 - step / (3 * STEPS))
        self.epoch = self.position = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            batch = order(self.epoch, len(images))[GLOBAL_BATCH * self.position : GLOBAL_BATCH * (self.position + 1)]
            self.optimizer.zero_grad()
            F.cross_entropy(self.network(shifted(images[batch], None)), labels[batch]).backward()
            self.optimizer.step()
            self.schedule.step()
            with torch.no_grad():
                for kept, weight in zip(self.average.parameters(), self.network.parameters(), strict=True):
                    kept.lerp_(weight, 0.02)
            self.epoch, self.position = divmod(self.epoch * STEPS + self.position + 1, STEPS)

    def state(self) -> dict:
        return deepcopy(
            {
                "model": self.network.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "average": self.average.state_dict(),
                "epoch": self.epoch,
                "position": self.position,
                "schedule": self.schedule.state_dict(),
                "random state": torch.get_rng_state(),
            }
        )

    def restore(self, state: dict) -> None:
        """Take over what `state` has; what it lacks stays as at a start."""
        self.network.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.position = state["epoch"], state.get("position", 0)
        if "schedule" in state:
            self.schedule.load_state_dict(state["schedule"])
        if "random state" in state:
            torch.set_rng_state(state["random state"])


def flat(network: nn.Module) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in network.parameters()])


undisturbed = Run()
undisturbed.train(STOP)
saved = undisturbed.state()
undisturbed.train(LAST - STOP)
target = flat(undisturbed.network)

left_out = {
    "all saved": (),
    "without the LR's position": ("schedule",),
    "without the random state": ("random state",),
    "without the position in the data": ("position",),
    "the reference's list": ("schedule", "random state", "position"),
}
off = {}
for name, missing in left_out.items():
    resumed = Run()  # what a new process does first
    resumed.restore(deepcopy({key: value for key, value in saved.items() if key not in missing}))
    resumed.train(LAST - STOP)
    off[name] = (100 * (flat(resumed.network) - target).norm() / target.norm()).item()

# %% tags=["slide"] jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(8, 3))
bars = axes.barh(list(off), list(off.values()), color=["#009e73"] + 3 * ["#d55e00"] + ["#0072b2"])
axes.bar_label(bars, ["equal to the bit" if value == 0 else f"{value:.1f} %" for value in off.values()], padding=4)
axes.invert_yaxis()
axes.set(xlim=(0, 1.25 * max(off.values())), xlabel="difference from the undisturbed run's weights, % of their length")
axes.set_title(f"Stopped after {STOP} steps, resumed, {LAST - STOP} steps later")
plt.show()
assert off.pop("all saved") == 0, "with everything saved the resumed run is the undisturbed one"
assert min(off.values()) > 0.1, "each thing left out leads elsewhere"

# %% [markdown]
# With everything saved the weights are equal to the bit; each thing left out leads elsewhere. Nothing fails and no
# message is printed, which is why such a bug lives long. More that the list lacks: the loss scale of fp16 training,
# the counter of early stopping, and with several ranks the random state *of each rank*.
#
# There are two remedies. Save it, as above. Or make it a function of the position, as `train_ddp.py` does: order and
# shifts come from generators that are seeded by epoch, step and rank, so there is no random state to save, and the
# position in the data is the step. The second is shorter, and there is less to forget.
#
# ### Writing it
#
# A process can be killed while it writes. If it writes over the only checkpoint, both are gone. So write another file
# and *rename* it: a rename within a file system is atomic, that is, others see the old file or the new one, never a
# half. (After a power cut the rename may have reached the disk before the content; Paceline flushes the file first,
# with `os.fsync`.)
#
# **Exercise 2b.4.** Write `save_checkpoint`: only rank 0 writes, and under `path` there is a whole file at any
# moment. Three or four lines.


# %% tags=["exercise"]
def save_checkpoint(state: dict, path: str, rank: int) -> None:
    """Write `state` to `path` from rank 0; an older file there stays whole until the new one is."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
class Failing:
    """Stands for a kill in the middle of writing: it cannot be written."""

    def __reduce__(self):
        raise RuntimeError("killed")


with exercise("2b.4"):
    Path("tried.pt").unlink(missing_ok=True)
    save_checkpoint({"step": 1}, "tried.pt", rank=1)
    assert not Path("tried.pt").exists(), "rank 1 has written; two ranks that write one file spoil it"
    save_checkpoint({"step": 1}, "tried.pt", rank=0)
    assert Path("tried.pt").exists(), "rank 0 has written nothing under the path"
    with suppress(RuntimeError):
        save_checkpoint({"step": 2, "weights": torch.zeros(100_000), "rest": Failing()}, "tried.pt", rank=0)
    try:
        assert torch.load("tried.pt", weights_only=True) == {"step": 1}, (
            "after a failed save the old checkpoint must be there"
        )
    except Exception as error:
        raise AssertionError(
            "a save that was cut off has spoilt the older checkpoint: write beside it, then rename"
        ) from error
    save_checkpoint({"step": 3}, "tried.pt", rank=0)
    assert torch.load("tried.pt", weights_only=True) == {"step": 3}, (
        "the second checkpoint must take the first one's place"
    )

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# <code>torch.save</code> to another name in the same folder, then <code>os.replace(that, path)</code>.
#
# </details>


# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
def save_checkpoint(state: dict, path: str, rank: int) -> None:
    if rank != 0:
        return
    torch.save(state, f"{path}.partial")
    os.replace(f"{path}.partial", path)


# %% [markdown]
# **Learnt:** one rank writes, since all have the same weights; all ranks read, so that all begin alike.
#
# Now the test that counts.

# %% [markdown] tags=["slide"]
# ## Killing it
#
# Rank 1 sends itself SIGKILL at a step of our choice. No program can catch it: no last word, no clean-up. torchrun
# notices, ends rank 0 and fails. The same command then goes on, and must end where the undisturbed run did.

# %% tags=["slide"]
from paceline_course.shell import CommandError

die_at = 2 * STEPS - 7
try:
    run(f"torchrun --standalone --nproc-per-node=2 train_ddp.py killed.pt {die_at}", seconds=300, quiet=True)
except CommandError:
    reached = torch.load("killed.pt", weights_only=True)["step"]
    print(f"Killed at step {die_at}; the newest checkpoint is of step {reached}: {die_at - reached} steps to do again.")
seen = run("torchrun --standalone --nproc-per-node=2 train_ddp.py killed.pt", seconds=300, quiet=True)
resumed, whole = (torch.load(name, weights_only=True) for name in ("killed.pt", "two.pt"))
equal = all(torch.equal(resumed["network"][key], whole["network"][key]) for key in whole["network"])
print(f"Killed and resumed against undisturbed: {'equal to the bit' if equal else 'different'}.")
assert equal

# %% [markdown] tags=["slide"]
# ## Being asked to stop
#
# Batch systems, and machines that are cheap because they may be taken away, send SIGTERM first, a request to end, and
# SIGKILL some time later. The reference trainer sets a flag when *rank 0* receives SIGTERM; when it next looks at the
# flag, it leaves the epoch and saves *go on with the next epoch*.

# %% [markdown]
# All ranks ask rank 0 for the flag every 20 steps; the other ranks ignore the signal. Here is that logic without a
# network: it only counts how often each sample is used. We look at the flag every 5 steps, since our epochs are short.

# %%
# %%writefile sigterm.py
"""Two ranks that stop on SIGTERM as the reference does, and go on. They count samples; nothing is trained."""

import json
import os
import signal

import torch
import torch.distributed as dist
from realistic import GLOBAL_BATCH, leave_group, order

EPOCHS, SAMPLES, ASK_EVERY = 3, 1438, 5

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
requests = []


def note(number, frame):
    requests.append(number)


signal.signal(signal.SIGTERM, note if rank == 0 else signal.SIG_IGN)  # the reference listens on rank 0 only


def is_interrupted():
    flag = torch.tensor(bool(requests))
    dist.broadcast(flag, src=0)
    return flag.item()


def train(begin, uses, told=None):
    """From epoch `begin` on; rank `told` gets SIGTERM in step 7 of epoch 1. Returns the epoch to go on with."""
    for epoch in range(begin, EPOCHS):
        for step, batch in enumerate(order(epoch, SAMPLES).split(GLOBAL_BATCH)):
            if (epoch, step, rank) == (1, 7, told):
                os.kill(os.getpid(), signal.SIGTERM)
            uses[epoch, batch[rank::world]] += 1
            if (step + 1) % ASK_EVERY == 0 and is_interrupted():
                return epoch + 1  # this is what its checkpoint says
    return EPOCHS


results = []
for told in (0, 1):
    uses = torch.zeros(EPOCHS, SAMPLES, dtype=torch.int64)
    stopped = train(0, uses, told)
    requests.clear()
    train(stopped, uses)  # the same command again
    dist.all_reduce(uses)
    results.append({"told": told, "stopped": stopped < EPOCHS, "used": uses.sum(dim=1).tolist()})
if rank == 0:
    with open("sigterm.json", "w") as file:
        json.dump(results, file)
leave_group()

# %%
seen = run("torchrun --standalone --nproc-per-node=2 sigterm.py", seconds=300)
to_rank_0, to_rank_1 = json.loads(Path("sigterm.json").read_text())
dropped = 1438 - to_rank_0["used"][1]
print(f"SIGTERM to rank 0: stopped {to_rank_0['stopped']}; {dropped} of the epoch's 1438 samples were never used.")
print(f"SIGTERM to rank 1: stopped {to_rank_1['stopped']}; the request was lost, and SIGKILL comes next.")
assert to_rank_0["stopped"]
assert dropped > 0
assert not to_rank_1["stopped"]

# %% tags=["slide"] jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(7.5, 2.8))
epochs = torch.arange(3)
for shift, result, name in (
    (-0.2, to_rank_0, "SIGTERM to rank 0: stops, drops the rest"),
    (0.2, to_rank_1, "SIGTERM to rank 1: not heard"),
):
    bars = axes.bar(epochs + shift, [100 * used / 1438 for used in result["used"]], width=0.4, label=name)
    axes.bar_label(bars, fmt="%.0f %%", fontsize=9)
axes.set_xticks(epochs, [f"epoch {epoch + 1}" for epoch in range(3)])
axes.set(ylabel="samples used, %", ylim=(0, 165), yticks=(0, 50, 100))
axes.set_title("A SIGTERM flag, as the reference has it")
axes.legend(loc="upper left")
plt.show()

# %% [markdown]
# **Exercise 2b.5.** ImageNet has 1,281,167 training images; with a global batch of 256 an epoch is some 5,004 steps.
# SIGTERM reaches rank 0 during step 1,003, and the flag is looked at after every 20 steps. How many images does the
# reference drop, and what share of the epoch is that?


# %% tags=["exercise"]
dropped_images = ...
dropped_share = ...  # in percent

# %% tags=["check"]
with exercise("2b.5"):
    assert dropped_images is not ..., "nothing is written here yet"
    assert dropped_share is not ..., "the images are there, the share is missing"
    assert dropped_images != 1281167 - 1003 * 256, "it goes on until the next time that it looks, after step 1,020"
    assert abs(dropped_images - 1020047) <= 256, (
        f"after step 1,020 it has used 1,020 x 256 images, so {dropped_images:,} is not it"
    )
    assert abs(dropped_share - 79.6) < 0.1, "the share is in percent of 1,281,167"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# The first multiple of 20 after 1,003 is 1,020.
#
# </details>

# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
dropped_images = 1281167 - 1020 * 256
dropped_share = 100 * dropped_images / 1281167

# %% [markdown]
# **Learnt:** a stop is safe only if any rank may hear it, all agree on the step, and the checkpoint says where in the
# epoch it is.
#
# In Paceline the request rides on the gradient's all-reduce: whichever rank hears it, all finish the same step, save,
# and end with exit code 75, which means *run the same command again*. Section 9 kills such a run.

# %% [markdown] tags=["slide"]
# ## 6 Throughput: what did the second process bring?
#
# - Leave out the first steps: memory is allocated, kernels are chosen.
# - Take the median of several steps, not their sum.
# - Compare like with like: as many threads in every process, the same batch.
# - **Speed-up** = rate of N / rate of 1. **Efficiency** = speed-up / N.

# %% [markdown]
# Two processes on one machine share more than a network: caches, memory bandwidth, sometimes the clock. So we measure
# four things in one start, so that all see the same machine: one rank alone while the other waits; both at once
# without a word between them; both with DDP, a batch of 64 each (*weak scaling*: the global batch grows with the
# ranks); and both with DDP, 32 each (*strong scaling*: the global batch stays).

# %%
# %%writefile throughput.py
"""Time of a step: alone, side by side, with DDP. Rank 0 writes throughput.json."""

import json
import statistics
import time

import torch
import torch.distributed as dist
from realistic import GLOBAL_BATCH, RATE, WideResNet, device_and_backend, leave_group, load_data
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

WARM_UP, TIMED = 5, 15


def step_seconds(model, images, labels):
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    seconds = []
    for _ in range(WARM_UP + TIMED):
        start = time.perf_counter()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        if images.is_cuda:
            torch.cuda.synchronize()  # a GPU works on after its calls have returned
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UP:])


device, backend = device_and_backend()
dist.init_process_group(backend)
rank = dist.get_rank()
images, labels, _, _ = load_data(device)
images, labels = images[:GLOBAL_BATCH], labels[:GLOBAL_BATCH]
half = GLOBAL_BATCH // 2
network = WideResNet(in_channels=images.shape[1]).to(device)
times = {}
dist.barrier()
if rank == 0:
    times["alone"] = step_seconds(network, images, labels)
dist.barrier()
times["side by side"] = step_seconds(network, images, labels)
dist.barrier()
model = DistributedDataParallel(network)
times["DDP, 64 each"] = step_seconds(model, images, labels)
times["DDP, 32 each"] = step_seconds(model, images[:half], labels[:half])
if rank == 0:
    with open("throughput.json", "w") as file:
        json.dump({**times, "threads": torch.get_num_threads()}, file)
leave_group()

# %%
seen = run("torchrun --standalone --nproc-per-node=2 throughput.py", seconds=300)
times = json.loads(Path("throughput.json").read_text())
images_in = {"alone": 64, "side by side": 128, "DDP, 64 each": 128, "DDP, 32 each": 64}
rates = {name: count / times[name] for name, count in images_in.items()}
print(f"Threads in each process: {times['threads']}; cores here: {os.cpu_count()}.")
for name, rate in rates.items():
    speed_up = rate / rates["alone"]
    efficiency = speed_up / (1 if name == "alone" else 2)
    print(
        f"{name:13s} {1000 * times[name]:6.1f} ms a step, {rate:7,.0f} images/s, "
        f"speed-up {speed_up:.2f}, efficiency {efficiency:.0%}"
    )

# %% [markdown]
# How to read it: from *alone* to *side by side* nothing is communicated. What is lost there is what the two take from
# each other (and what other programs take from both). From there to *DDP, 64 each* is the price of the all-reduce and
# of waiting for the slower rank. *DDP, 32 each* pays the same all-reduce for half the work. Run the cell again and
# see how far the numbers move; on a machine that others use they move a lot.
#
# If one process of two had two threads and the other one, the faster would wait in every all-reduce. And if *one*
# process had used both cores, comparing it with two processes of one thread each would compare 2 cores with 2: say
# which you did.
#
# What did theory say? `paceline scale` starts from the time of one process and adds what the links cost, which it
# measures here.

# %%
source = named_data()
more = f", path: '{source.path}', subset: {len(images)}" if source.path else ""
Path("wide.yaml").write_text(f"""\
base: digits
model: {{name: "realistic:WideResNet", options: {{width: 2}}, channels_last: true}}
data: {{dataset: {source.dataset}{more}}}
parallel: {{device: cpu, threads: 1}}
""")
seconds = json.loads(Path("throughput.json").read_text())["alone"]
command = f"paceline scale wide.yaml --world-sizes 1,2 --strategy ddp --step-seconds {seconds:.5f} --one-gpu-batch 64"
prediction = run(command, seconds=300)

# %% tags=["slide"] jupyter={"source_hidden": true}
line = next(text for text in prediction.splitlines() if text.split()[:2] == ["2", "ddp"])
predicted = float(line.split()[4].replace(",", ""))
figure, axes = plt.subplots(figsize=(7.5, 3.2))
names = ["alone", "DDP, 32 each", "predicted, 32 each", "side by side", "DDP, 64 each"]
shown = {**rates, "predicted, 32 each": predicted}
colours = ["#0072b2", "#0072b2", "#e69f00", "#56b4e9", "#0072b2"]
bars = axes.bar(names, [shown[name] for name in names], color=colours)
axes.bar_label(bars, [f"{shown[name]:,.0f}" for name in names])
axes.axhline(2 * rates["alone"], color="black", linestyle="--", linewidth=1)
axes.text(0, 2.02 * rates["alone"], "twice one process", ha="center", va="bottom", fontsize=10)
axes.set(
    ylabel="images per second",
    ylim=(0, 1.2 * max(2 * rates["alone"], *shown.values())),
    title="One process and two, on this machine",
)
axes.tick_params(axis="x", labelsize=9)
plt.show()
error = 100 * (predicted / rates["DDP, 32 each"] - 1)
print(
    f"A global batch of 64 on two processes: predicted {predicted:,.0f} images/s, "
    f"measured {rates['DDP, 32 each']:,.0f}; the prediction is {error:+.0f} % off."
)

# %% [markdown]
# A prediction is worth its measurement. Where they differ much, ask what the model leaves out: here it takes for
# granted that a core computes as fast when its neighbour is busy, and that half a batch takes half the time.

# %% [markdown] tags=["slide"]
# ## 7 A network that does not fit: FSDP
#
# DDP holds everything on every rank. **FSDP** (fully sharded data parallel) cuts parameters, gradients and optimizer
# state into one *shard* for each rank, and puts a layer's parameters together just before they are needed.
#
# Activations are not sharded: they depend on the batch per rank, as before.

# %% [markdown]
# The idea is ZeRO's (Rajbhandari et al., *ZeRO*, 2020, arXiv:1910.02054); PyTorch's present form is `fully_shard`.
# The optimizer is Adam's variant AdamW here, which keeps two numbers for each parameter: an average of the gradients,
# and one of their squares. In fp32 a number has 4 bytes.
#
# **Exercise 2b.6.** Predict before you measure: how many bytes of parameters, gradients and AdamW state, together,
# does each rank hold between two steps, under DDP and under FSDP?


# %% tags=["exercise"]
def bytes_per_rank(parameters: int, world: int, *, sharded: bool) -> float:
    """Bytes of parameters, gradients and AdamW's state on one of `world` ranks, all in fp32."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("2b.6"):
    whole = bytes_per_rank(1000, 4, sharded=False)
    assert whole != 8000, "that is parameters and gradients; AdamW keeps two more numbers for each parameter"
    assert whole == 16000, f"four numbers of 4 bytes for each of 1,000 parameters are 16,000 bytes, not {whole}"
    assert bytes_per_rank(1000, 4, sharded=True) == 4000, "of 4 ranks each holds a quarter, of everything"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# Parameter, gradient, and AdamW's two: four numbers. Sharded, a rank has a part of each.
#
# </details>


# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
def bytes_per_rank(parameters: int, world: int, *, sharded: bool) -> float:
    return 16 * parameters / (world if sharded else 1)


# %% [markdown]
# Now count. The script trains the same network with both, on the same images, and adds up what each rank holds. It
# counts the messages of a step too: *all-gather* puts shards together on every rank; *reduce-scatter* adds up, and
# leaves each rank its shard of the sum.

# %%
# %%writefile memory.py
"""What each rank holds under DDP and under FSDP, and what a step sends. Rank 0 writes memory.json."""

import json
import warnings

import torch
import torch.distributed as dist
from realistic import GLOBAL_BATCH, Block, WideResNet, device_and_backend, leave_group, load_data
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # about changing the output in place: we do not
warnings.filterwarnings("ignore", message="Grad strides do not match")  # a matter of speed


def wrapped(network, kind):
    if kind == "DDP":
        return DistributedDataParallel(network)
    mesh = init_device_mesh(device.type, (world,))
    for layer in network.features:
        if isinstance(layer, Block):
            fully_shard(layer, mesh=mesh)  # each block by itself: only one at a time is put together
    return fully_shard(network, mesh=mesh)  # and what is left


def held(tensors):
    """Bytes of them that lie on this rank."""
    mine = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in mine)


device, backend = device_and_backend()
dist.init_process_group(backend)
rank, world = dist.get_rank(), dist.get_world_size()
images, labels, _, _ = load_data(device)
images, labels = (part[:GLOBAL_BATCH][rank::world] for part in (images, labels))
found = {}
for kind in ("DDP", "FSDP"):
    torch.manual_seed(0)
    network = WideResNet(in_channels=images.shape[1]).to(device, memory_format=torch.contiguous_format)
    model = wrapped(network, kind)  # FSDP wants weights in torch's first layout
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with CommDebugMode() as messages:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    mine = {
        "parameters": held(model.parameters()),
        "gradients": held(weight.grad for weight in model.parameters()),
        "optimizer": held(value for state in optimizer.state.values() for value in state.values()),
        "buffers": held(model.buffers()),
        "losses": losses,
        "messages": {str(name).split(".")[-1]: count for name, count in messages.get_comm_counts().items()},
    }
    found[kind] = [None] * world
    dist.all_gather_object(found[kind], mine)
if rank == 0:
    with open("memory.json", "w") as file:
        json.dump(found, file)
leave_group()

# %%
seen = run("torchrun --standalone --nproc-per-node=2 memory.py", seconds=300)
found = json.loads(Path("memory.json").read_text())
parts = ("parameters", "gradients", "optimizer")
totals = {kind: [sum(rank[part] for part in parts) for rank in found[kind]] for kind in found}
for kind, sharded in (("DDP", False), ("FSDP", True)):
    expected = bytes_per_rank(PARAMETERS, 2, sharded=sharded)
    measured = " and ".join(f"{total:,}" for total in totals[kind])
    print(f"{kind:4s} predicted {expected:10,.0f} bytes on each rank; held {measured}")
    assert all(abs(total / expected - 1) < 0.02 for total in totals[kind]), "predicted and measured bytes must agree"
gap = max(
    abs(a - b)
    for ddp, fsdp in zip(found["DDP"], found["FSDP"], strict=True)
    for a, b in zip(ddp["losses"], fsdp["losses"], strict=True)
)
print(f"The losses of three steps differ by at most {gap:.1g} between DDP and FSDP: it is the same training.")
assert gap < 1e-3

# %% tags=["slide"] jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(7.5, 3.4))
places = [f"{kind}\nrank {rank}" for kind in found for rank in range(2)]
bottom = [0.0] * len(places)
for part in (*parts, "buffers"):
    heights = [rank[part] / 2**20 for kind in found for rank in found[kind]]
    axes.bar(places, heights, bottom=bottom, label=part, width=0.6)
    bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
axes.bar_label(axes.containers[-1], [f"{height:.2f} MiB" for height in bottom])
axes.set(
    ylabel="MiB held between two steps",
    ylim=(0, 1.2 * max(bottom)),
    title="Replicated and sharded, counted on two ranks",
)
axes.legend(loc="upper right")
plt.show()

# %% [markdown]
# The few bytes that predicted and held differ by are AdamW's step counters, one for each parameter tensor, which
# every rank has, and shards that do not divide evenly. (Rank 0 gets the larger piece where a tensor's first dimension
# does not divide by the ranks.)
#
# To add up N bytes on p ranks and give all the sum, a ring all-reduce sends 2 (p - 1)/p x N bytes per rank (lab 2a): a
# reduce-scatter and an all-gather of (p - 1)/p x N each. FSDP gathers parameters for the forward pass, again for the
# backward pass, since it lets go of them in between, and scatters gradients: three times (p - 1)/p x N. That is **1.5
# times** DDP's traffic (Rajbhandari et al. 2020, section 7.2.2).

# %% [markdown] tags=["slide"]
# ## DDP and FSDP: the lecture's table
#
# With the numbers of this network, counted on two ranks:

# %% tags=["slide"] jupyter={"source_hidden": true}
weights = {kind: found[kind][0]["parameters"] / 2**20 for kind in found}
ring = 4 * PARAMETERS / 2  # (p - 1) / p of the bytes, for p = 2
messages = {
    kind: ", ".join(f"{count} {name.strip('_')}" for name, count in found[kind][0]["messages"].items())
    for kind in found
}
display(
    Markdown(f"""
| | DDP | FSDP |
|---|---|---|
| parameters on each of 2 ranks | {weights["DDP"]:.2f} MiB, all | {weights["FSDP"]:.2f} MiB, a shard |
| with gradients and AdamW | {totals["DDP"][0] / 2**20:.2f} MiB | {totals["FSDP"][0] / 2**20:.2f} MiB |
| calls in a step | {messages["DDP"]} | {messages["FSDP"]} |
| sent by a rank in a step | {2 * ring / 2**20:.2f} MiB | up to {3 * ring / 2**20:.2f} MiB, 1.5 times |
| for | networks that fit | networks that do not |
""")
)

# %% [markdown]
# *Up to*, since the last part put together in the forward pass is not let go of: the backward pass needs it at once.
# DDP's broadcasts are BatchNorm's buffers, its all-reduces the gradients, in buckets.
#
# When does a network not fit? This one does, anywhere. Take GPT-3's size of 6.7 billion parameters (Brown et al.,
# *Language Models are Few-Shot Learners*, 2020, arXiv:2005.14165), trained with Adam in mixed precision (16-bit
# numbers in the passes, fp32 in the optimizer): 2 bytes for a weight, 2 for its gradient, 12 for the optimizer's fp32
# copy and its two averages (ZeRO, section 3.1). Stage 0 of ZeRO is DDP; stage 3 shards everything, as FSDP does.

# %% [markdown] tags=["slide"]
# ## When does a network not fit?
#
# Weights, gradients and Adam's state take 16 bytes for each parameter in mixed precision.

# %%
from paceline_advisor.formulas.network import zero_bytes

large, devices = 6.7e9, [1, 2, 4, 8, 16, 32]
needed = {stage: [zero_bytes(large, stage, count) / 2**30 for count in devices] for stage in (0, 3)}
fits = next(count for count, gigabytes in zip(devices, needed[3], strict=True) if gigabytes < 80)

# %% tags=["slide"] jupyter={"source_hidden": true}
figure, axes = plt.subplots(figsize=(7.5, 3.4))
axes.plot(devices, needed[0], marker="o", label="DDP: all on every device")
axes.plot(devices, needed[3], marker="s", label="FSDP: everything sharded")
axes.axhline(80, color="black", linestyle="--", linewidth=1)
axes.text(32, 82, "a device of 80 GiB", ha="right", va="bottom", fontsize=10)
axes.set_xscale("log", base=2)
axes.set_xticks(devices, devices)
axes.set(xlabel="devices", ylabel="GiB per device", title="6.7 billion parameters, without activations", ylim=(0, None))
axes.legend(loc="center right")
plt.show()
print(
    f"DDP needs {needed[0][0]:.0f} GiB on each device, however many there are. "
    f"Sharded, {fits} devices of 80 GiB are the fewest of these that hold it."
)

# %% [markdown]
# Activations and the parts put together come on top. `paceline estimate gpt-7b --device h100 --processes 8` reckons
# with them, without a GPU (it takes a while; try it), and says whether DDP fits, or FSDP, and with which batch.

# %% [markdown] tags=["slide"]
# ## 8 One script, several machines
#
# - On each machine (*node*) runs one torchrun, its *agent*; it starts that node's ranks.
# - All agents meet at one address, the *rendezvous*, and agree on ranks and world size.
# - `RANK` counts over all nodes, `LOCAL_RANK` from 0 on each.
# - In the script nothing changes.

# %% [markdown]
# We have one machine, so two agents on it play two nodes: the same commands, only that the address is `localhost`.
# First a script that tells who it is. It needs no torch: torchrun says everything by environment variables.

# %%
# %%writefile who.py
import os

print(
    "node {GROUP_RANK}, local rank {LOCAL_RANK}: rank {RANK} of {WORLD_SIZE}\n".format(**os.environ), end="", flush=True
)

# %%
import socket
from concurrent.futures import ThreadPoolExecutor


def on_two_nodes(processes: int, script: str) -> str:
    """Run the script with one agent for each of two nodes, as two people would in two terminals; what both printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # one that is free
    place = f"--rdzv-backend=static --rdzv-endpoint=localhost:{port}"
    commands = [
        f"torchrun --nnodes=2 --node-rank={node} --nproc-per-node={processes} {place} {script}" for node in range(2)
    ]
    print("\n".join(commands))
    gpus = ["0", "1"] if torch.cuda.device_count() >= 2 else ["", ""]  # a GPU for each node, if there are two

    def agent(node: int) -> str:
        return run(commands[node], seconds=300, env={"CUDA_VISIBLE_DEVICES": gpus[node]}, quiet=True)

    with ThreadPoolExecutor() as nodes:
        return "".join(nodes.map(agent, range(2)))


lines = sorted(line for line in on_two_nodes(2, "who.py").splitlines() if line.startswith("node"))
print("\n".join(lines))
assert len(lines) == 4

# %% [markdown]
# Two ranks have the local rank 0. So a seed made of `seed + local_rank` repeats on every node, and a file that "local
# rank 0" writes is written by every node: use the rank for both. Only the choice of a GPU goes by local rank.
#
# Now the training script, unchanged, with one process on each "node":

# %%
seen = on_two_nodes(1, "train_ddp.py nodes.pt")
print("\n".join(line for line in seen.splitlines() if ": " in line and line.startswith(("epoch", "rank"))))
nodes, whole = (torch.load(name, weights_only=True)["network"] for name in ("nodes.pt", "two.pt"))
equal = all(torch.equal(nodes[key], whole[key]) for key in whole)
print(f"Two nodes of one process against one node of two: {'equal to the bit' if equal else 'different'}.")
assert equal

# %% [markdown]
# Same world size, same shares, same sums: the same bits. On real machines three things come on top: the checkpoint
# must lie on a file system that all nodes share, or each node needs the data and rank 0's file to go on from; the
# endpoint is the first node's name and an open port; and the network between nodes is slower than what lies within
# one. With root on Linux, two network namespaces come closer to it than this does (`docs/guide/several-hosts.md`
# tells what was tried so).

# %% [markdown] tags=["slide"]
# ## 9 The same, with one command
#
# `paceline train wide.yaml --processes 2`
#
# The loop, shares, exact validation, checkpoints, throughput: the recipe names the network of this notebook. We kill
# the run in its first epochs with SIGKILL, all ranks at once, and let **one** process go on. With `parallel.exact`
# the bits do not depend on the number of processes.

# %%
import signal
import subprocess
import sys

import psutil

import paceline

wanted = [
    f"train.duration={EPOCHS} epochs",
    "checkpoint.every=10 steps",
    f"evaluate.every={EPOCHS} epochs",
    "parallel.exact=true",
    "parallel.logical_ranks=2",
]
undisturbed = paceline.train("wide.yaml", overrides=wanted, run_dir="runs/undisturbed", quiet=True)

words = [sys.executable, "-m", "paceline", "train", "wide.yaml", "--run-dir", "runs/killed", "--processes", "2"]
with open("killed.log", "w") as log:
    launcher = subprocess.Popen([*words, *wanted], stdout=log, stderr=log)
while launcher.poll() is None and not list(Path("runs/killed/checkpoints").glob("step-*")):
    time.sleep(0.02)
with suppress(psutil.NoSuchProcess):  # it may have ended by itself
    for process in psutil.Process(launcher.pid).children(recursive=True):
        process.send_signal(signal.SIGKILL)
launcher.wait()
print(*[line for line in Path("killed.log").read_text().splitlines() if "SIGKILL" in line], sep="\n")
left = sorted(path.name for path in Path("runs/killed/checkpoints").glob("step-*"))
print(f"Checkpoints it left: {', '.join(left)}")
assert left

# %% tags=["slide"]
resumed = paceline.train(
    "wide.yaml", overrides=wanted, run_dir="runs/killed", quiet=True
)  # the same, here, in one process
for name, result in (("undisturbed", undisturbed), ("killed, resumed", resumed)):
    accurate = result.metrics["top1_accuracy"]
    print(f"{name:16s} weights_sha256 {result.summary.weights_sha256[:24]}…  accuracy {accurate:.2f} %")
assert undisturbed.summary.weights_sha256 == resumed.summary.weights_sha256

# %% [markdown]
# The ledger, a list of the samples of every step, proves that each was used once per epoch, the kill included:

# %%
seen = run("paceline audit runs/killed", seconds=300)

# %% [markdown] tags=["slide"]
# ## What to remember
#
# 1. DDP changes eight places; bugs sit in validation, random numbers, and who writes.
# 2. BatchNorm's statistics are local, its buffers rank 0's.
# 3. A checkpoint holds what the next step depends on, unless it is a function of the position. Test by killing.
# 4. Throughput: without warm-up, with the same threads.
# 5. FSDP divides what a rank holds, for half as much traffic again.

# %% [markdown]
# ### Further reading
#
# - S. Zagoruyko, N. Komodakis: *Wide Residual Networks*, 2016, arXiv:1605.07146
# - S. Li et al.: *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, 2020, arXiv:2006.15704:
#   how DDP works inside
# - P. Goyal et al.: *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour*, 2017, arXiv:1706.02677
# - Y. Wu, K. He: *Group Normalization*, 2018, arXiv:1803.08494
# - S. Rajbhandari et al.: *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, 2020,
#   arXiv:1910.02054
# - Y. Zhao et al.: *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, 2023, arXiv:2304.11277
# - Of Paceline's guide: *Stop and resume*, *Several processes*, *Several hosts*, *Memory*, *Scale and plan*
