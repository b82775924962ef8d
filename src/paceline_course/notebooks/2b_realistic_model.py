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
# From a training loop to a reliable run: validation, checkpoints, throughput, memory, several machines.

# %% [markdown]
# After this lab you can
#
# - turn a one-process training script into a DDP script, and explain each changed line;
# - explain what batch normalisation does on several ranks, and when it matters;
# - write a checkpoint from which a killed run resumes with the same result;
# - measure throughput, and the gain from a second process;
# - predict the memory that DDP and FSDP need on each rank, and run the same script on several machines.
#
# **You need** labs 1 and 2a: process, rank, world size, `torchrun`, all-reduce, `DistributedDataParallel` (DDP), and
# that DDP averages gradients. From PyTorch: modules, optimizers, `state_dict()`.
#
# **Time:** about 90 minutes with the exercises. Everything runs on two processor cores, in a few minutes if they are
# otherwise idle. GPUs are used if there is one for each process.
#
# **Data**: scikit-learn's handwritten digits, which come with the course. If you have CIFAR-10 or Fashion-MNIST, set
# the environment variable `PACELINE_LABS_DATA` to its folder before you start Jupyter. On a CPU the lab uses as many
# images as there are digits. CIFAR-10 images have sixteen times the pixels, so it takes much longer.

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

from paceline_course import exercise, run, use_answer, use_style

use_style()
torch.set_num_threads(1)  # as in every process below, so that times can be compared

# %% [markdown] tags=["slide"]
# ## 1 The network: WideResNet
#
# - A *residual block* adds its input to its output, so that gradients reach early layers.
# - A *wide* network has more channels instead of more layers: fewer, larger matrix products suit parallel hardware.
#
# Zagoruyko and Komodakis, *Wide Residual Networks*, 2016, arXiv:1605.07146

# %% [markdown]
# The next cell writes a module that the notebook and all scripts share: the data, the network and a few small
# functions. Read `Block` and `WideResNet` now, and the other functions when they are used.
#
# Two of them depend only on the position in training: `order(epoch, …)` always returns the same order for an epoch,
# and `shifted(images, draws)` shifts images with random numbers from a generator that the caller has seeded. Section
# 5 shows why this is useful.

# %%
# %%writefile realistic.py
"""Lab 2b: data, network and functions that the notebook and its scripts share."""

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
    """Return the data set in the folder PACELINE_LABS_DATA, or the digits, as a recipe's section `data`."""
    folder = os.environ.get("PACELINE_LABS_DATA")
    if not folder:
        return Data(dataset="digits")
    for name in ("cifar10", "fashion_mnist"):
        with suppress(PacelineError):
            open_dataset(Data(dataset=name, path=folder))
            return Data(dataset=name, path=folder)
    raise FileNotFoundError(
        f"PACELINE_LABS_DATA={folder} contains neither CIFAR-10 nor Fashion-MNIST; correct it or unset it."
    )


def load_data(device):
    """Return training images and labels, held-out images and labels: tensors on the device, images normalised."""
    dataset = open_dataset(named_data())
    most_train, most_held_out = (50_000, 10_000) if device.type == "cuda" else (1438, 359)  # takes seconds on a CPU

    def tensors(source, most):
        chosen = torch.randperm(len(source.labels), generator=torch.Generator().manual_seed(SEED))[:most].tolist()
        pixels = torch.from_numpy(np.stack([source.read(i) for i in chosen])).permute(0, 3, 1, 2) / 255
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (dataset.mean, dataset.std))
        return ((pixels - mean) / std).to(device), torch.as_tensor(source.labels)[chosen].long().to(device)

    return *tensors(dataset.train, most_train), *tensors(dataset.validation, most_held_out)


def device_and_backend():
    """Return a GPU for this process and NCCL if there are enough GPUs, else the CPU and gloo; needs torchrun."""
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() < local_world:
        return torch.device("cpu"), "gloo"
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank), "nccl"


def leave_group():
    """Leave the process group and exit immediately: gloo's threads can crash a normal exit."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


class Block(nn.Module):
    """Twice normalise, activate and convolve, with a shortcut around both."""

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
        self.to(memory_format=torch.channels_last)  # the fastest layout for convolutions

    def forward(self, x):
        return self.classify(self.features(x).mean(dim=(2, 3)))


def order(epoch, samples):
    """Return the order of an epoch's samples; it depends only on the seed and the epoch."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(1000 * SEED + epoch))


def shifted(images, draws):
    """Augment: shift each image by up to one pixel, with random numbers from the generator `draws`."""
    count, _, height, width = images.shape
    down, right = torch.randint(3, (2, count, 1, 1), generator=draws)
    rows, columns = down + torch.arange(height).view(-1, 1), right + torch.arange(width)
    sample = torch.arange(count).view(-1, 1, 1)
    return F.pad(images, (1, 1, 1, 1)).permute(0, 2, 3, 1)[sample, rows, columns].permute(0, 3, 1, 2).contiguous()


@torch.no_grad()
def sums(network, images, labels):
    """Return summed loss, correct answers and number of images: three numbers that can be summed over processes."""
    network.eval()
    total = torch.zeros(3, dtype=torch.float64, device=images.device)
    for x, y in zip(images.split(256), labels.split(256), strict=True):
        scores = network(x)
        right = (scores.argmax(dim=1) == y).sum()
        total += torch.stack([F.cross_entropy(scores, y, reduction="sum"), right, torch.full_like(right, len(y))])
    network.train()
    return total


def digest(state):
    """Return a fingerprint of named tensors, such as network.state_dict(): equal only if every bit is equal."""
    content = (state[name].detach().cpu().contiguous().numpy().tobytes() for name in sorted(state))
    return hashlib.sha256(b"".join(content)).hexdigest()[:16]


def save(state, path):
    """Write a checkpoint so that the file is always complete: write another file, then rename it."""
    torch.save(state, f"{path}.partial")
    os.replace(f"{path}.partial", path)


# %%
from realistic import EPOCHS, GLOBAL_BATCH, RATE, Block, WideResNet, load_data, named_data, order, shifted

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
images, labels, held_out, answers = load_data(device)
network = WideResNet(in_channels=images.shape[1])
PARAMETERS = sum(weight.numel() for weight in network.parameters())
STEPS = len(images) // GLOBAL_BATCH  # per epoch; the incomplete last batch is dropped
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
axes.set(xlim=(-1, 2 * len(stages) + 1), ylim=(0, 2.1), title="The network, and the output shape of each part")
axes.axis("off")
plt.show()

# %% [markdown]
# ## 2 One process
#
# We start with training on one device. The loop counts *steps* over the whole training; epoch and position in the
# epoch follow from the step. The optimizer has momentum, and weight decay, which pulls weights towards zero; the
# learning rate follows half a cosine. Every ten steps and after each epoch, the script saves a checkpoint. If there
# is a checkpoint at the start, it resumes from it. Section 5 explains `save()` and the contents of the checkpoint.
# (`die_at` kills the process during training, also for section 5.)

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
    steps = len(images) // GLOBAL_BATCH  # per epoch
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
            os.kill(os.getpid(), 9)  # SIGKILL: the process cannot react
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
# ## 3 Several processes: eight changes
#
# 1. join the group, take a device
# 2. wrap the network in DDP
# 3. take a share of the batch
# 4. use its own random numbers
# 5. use the same running statistics on all ranks
# 6. validate a share on each rank, then add the sums
# 7. one rank reports
# 8. one rank writes; all ranks read

# %% [markdown]
# The *global batch* is the set of samples of one optimizer step on all ranks together; the *batch per rank* is a
# rank's share of it. Here the global batch stays at 64 for any number of ranks, and the learning rate stays the same
# too. So two ranks do the same training as one, only faster. (With a constant batch per rank, the global batch grows
# with the number of ranks. Then the training is different and needs a different learning rate; see lab 3.)
#
# **Exercise 2b.1.** Change 3. Every rank knows the `batch`, the indices of the step's samples. Return those of this
# rank. Every sample must be used exactly once, also if the number of ranks does not divide the batch. One line.


# %% tags=["exercise"]
def share(batch: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Return the samples of `batch` for `rank`, one of `world` ranks."""
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
            f"with {world} ranks the shares have {sizes} samples: all ranks wait for the largest share"
        )

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# A slice has a step: <code>numbers[first::every]</code>.
#
# </details>


# %% tags=["answer"]
use_answer("2b.1")

# %% [markdown]
# **Learnt:** if all ranks know the order of the samples, a slice gives each rank's share. (DDP gives all ranks the
# same weight when it averages gradients, so shares of unequal size would give a different mean. Paceline rejects a
# global batch that the ranks do not divide; here 2 divides 64.)
#
# **Exercise 2b.2.** Change 6. Each rank has counted its correct answers and its held-out images; 359 is odd, so the
# counts differ. What is the accuracy, in percent? `per_rank` has one row for each rank: correct answers, images.


# %% tags=["exercise"]
def accuracy(per_rank: torch.Tensor) -> float:
    """Return the percentage of correctly classified images; `per_rank` is ranks x (correct, images)."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("2b.2"):
    assert abs(accuracy(torch.tensor([[90.0, 100.0], [80.0, 100.0]])) - 85) < 1e-4, (
        "170 of 200 are correct: that is 85 %"
    )
    uneven = accuracy(torch.tensor([[100.0, 100.0], [0.0, 1.0]]))
    assert abs(uneven - 50) > 1e-4, (
        "100 of 101 are correct, which is 99.01 %; the mean of the ranks' accuracies would be 50 %"
    )
    assert abs(uneven - 100 * 100 / 101) < 1e-4, f"100 of 101 are correct, which is 99.01 %, not {uneven:.2f} %"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# Add first, divide once.
#
# </details>


# %% tags=["answer"]
use_answer("2b.2")

# %% [markdown]
# **Learnt:** sums and counts can be added over ranks; means cannot. Nothing is padded, so no image counts twice.
#
# Here is the whole script. Its comments number the eight changes.

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
    device, backend = device_and_backend()  # 1. join the group, with a device for this process
    dist.init_process_group(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels, held_out, answers = load_data(device)
    torch.manual_seed(SEED)
    network = WideResNet(in_channels=images.shape[1]).to(device)
    model = DistributedDataParallel(network)  # 2. initial weights from rank 0; backward() averages gradients
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)
    steps = len(images) // GLOBAL_BATCH  # per epoch
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
            os.kill(os.getpid(), 9)  # SIGKILL: the process cannot react
        epoch, position = divmod(step, steps)
        if position == 0 or step == begin:
            start, first = time.perf_counter(), step
        batch = order(epoch, len(images))[GLOBAL_BATCH * position : GLOBAL_BATCH * (position + 1)]
        batch = batch[rank::world]  # 3. this rank's share of the global batch
        draws = torch.Generator().manual_seed(1000 * step + rank)  # 4. its own random numbers
        loss = F.cross_entropy(model(shifted(images[batch], draws)), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if position == steps - 1:
            rate = (step + 1 - first) * GLOBAL_BATCH / (time.perf_counter() - start)
            for buffer in network.buffers():
                dist.broadcast(buffer, src=0)  # 5. all ranks validate the same network, with rank 0's statistics
            total = sums(network, held_out[rank::world], answers[rank::world])  # 6. a share of the held-out images;
            dist.all_reduce(total)  # then add the sums
            history.append({"loss": (total[0] / total[2]).item(), "accuracy": (100 * total[1] / total[2]).item()})
            if rank == 0:  # 7. one rank reports
                print(f"epoch {epoch + 1}: accuracy {history[-1]['accuracy']:.2f} %, {rate:,.0f} images/s", flush=True)
        if rank == 0 and ((step + 1) % SAVE_EVERY == 0 or position == steps - 1):  # 8. one rank writes, all ranks read
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
            save({**state, "schedule": schedule.state_dict(), "step": step + 1, "history": history}, checkpoint)
    for buffer in network.buffers():
        dist.broadcast(buffer, src=0)
    print(f"rank {rank} of {world}: weights {digest(network.state_dict())}\n", end="", flush=True)
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

# %% [markdown]
# The changes from `train_one.py` to `train_ddp.py`:

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
removed, added = (sum(c[0] == sign for c in changes) for sign in "-+")
print(f"{removed} of {len(old)} lines removed, {added} added.")

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
    f"Final accuracy: {last_one:.1f} % with one process, {last_two:.1f} % with two (same samples, same learning rate)."
)
assert min(last_one, last_two) > (85 if named_data().dataset == "digits" else 15), "both must have learnt something"

# %% [markdown]
# The curves are similar but not equal. Two things differ: each rank draws its own shifts (change 4), and each rank
# normalises its own share of the batch. The next section is about the second difference.

# %% [markdown] tags=["slide"]
# ## 4 Batch normalisation across ranks
#
# *Batch normalisation* (BatchNorm) subtracts from every channel its mean over the batch, and divides by its standard
# deviation. Under DDP, "the batch" is the rank's share: **local statistics**.

# %% [markdown]
# So the trained network depends on the batch per rank. How much? We compute the gradient of one batch of 64, first as
# a whole, then as DDP would with 2, 4, … ranks: each share separately, with averaged gradients.

# %%
torch.manual_seed(0)
probe = WideResNet(in_channels=images.shape[1]).to(device)
batch = order(0, len(images))[:GLOBAL_BATCH]


def gradient(network: nn.Module, ranks: int) -> torch.Tensor:
    """Compute what DDP would with so many ranks, one after the other: the mean of the shares' gradients."""
    network.zero_grad()
    for rank in range(ranks):
        mine = batch[rank::ranks]
        (F.cross_entropy(network(images[mine]), labels[mine]) / ranks).backward()
    return torch.cat([weight.grad.flatten() for weight in network.parameters()])


def difference(network: nn.Module, ranks: int) -> float:
    """Return the distance from the gradient of the whole batch, in percent of its norm."""
    whole = gradient(network, 1)
    return (100 * (gradient(network, ranks) - whole).norm() / whole.norm()).item()


def without_norm(network: nn.Module) -> nn.Module:
    """Return a copy without BatchNorm layers."""
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
    title="A batch of 64, split over ranks",
    ylim=(0, 1.15 * max(with_norm)),
)
axes.legend(loc="upper left")
plt.show()
assert max(plain) < 0.1 < min(with_norm), "only BatchNorm makes the shares differ from the whole batch"
assert with_norm[0] < with_norm[-1], "smaller shares differ more"

# %% [markdown]
# Without BatchNorm, the mean over the shares equals the gradient of the whole batch, up to rounding. With BatchNorm,
# statistics are noisier if a rank has fewer images. Goyal et al. (*Accurate, Large Minibatch SGD*, 2017,
# arXiv:1706.02677) deliberately keep 32 images per GPU and local statistics, so that the loss function does not
# depend on the number of GPUs. Wu and He (*Group Normalization*, 2018, arXiv:1803.08494) show how the error grows
# with smaller batches per GPU. With only a few images per rank, as in object detection, use statistics of the global
# batch.
#
# `nn.SyncBatchNorm` does this: the ranks add the sums that the mean and the variance need, and all use the same mean
# and variance.
#
# **Exercise 2b.3.** Each rank has the number of its values, their sum, and the sum of their squares. What are the
# mean and the variance of all values together? `per_rank` has these three in columns.


# %% tags=["exercise"]
def pooled(per_rank: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and (biased) variance of all ranks' values; `per_rank` is ranks x (number, sum, sum of squares)."""
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
        "the mean of the ranks' variances ignores that their means differ"
    )
    assert torch.allclose(mean, whole.mean()), f"the mean of all values is {whole.mean():.3f}, not {mean:.3f}"
    assert torch.allclose(variance, whole.var(correction=0)), (
        f"the variance is {whole.var(correction=0):.3f}, not {variance:.3f}"
    )

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# The variance is the mean of the squares minus the square of the mean.
#
# </details>


# %% tags=["answer"]
use_answer("2b.3")

# %% [markdown]
# **Learnt:** a synchronised BatchNorm costs one small all-reduce of sums per layer and pass.

# %% [markdown]
# **Buffers.** BatchNorm keeps a running mean and variance for evaluation. They are *buffers*: part of `state_dict()`,
# but without gradients, so DDP does not average them. Instead, at the beginning of each forward pass, DDP sends rank
# 0's buffers to all ranks (`broadcast_buffers=True`). After the pass they differ again, so each rank would evaluate a
# different network; change 5 prevents this. The next script makes five steps without it, and at the end tries
# PyTorch's `SyncBatchNorm`.

# %%
# %%writefile buffers.py
"""Make five steps with DDP; then print fingerprints of each rank's parameters and buffers."""

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
rows = [line.split() for line in seen.splitlines() if ": parameters " in line]
parameters, buffers = {words[3] for words in rows}, {words[5] for words in rows}
print(f"On 2 ranks: {len(parameters)} set of parameters, {len(buffers)} sets of buffers.")
assert (len(parameters), len(buffers)) == (1, 2), "DDP keeps parameters equal, but not the running statistics"

# %% [markdown] tags=["slide"]
# ## 5 What must a checkpoint contain?
#
# A resumed run should give the same result as an uninterrupted one. Everything that the next step depends on must be
#
# - **saved**, or
# - a **function of the position**, which is saved.
#
# A widely copied reference trainer saves: epoch, best metric, model, optimizer, moving average. Is that enough?

# %% [markdown]
# The trainer is NVIDIA's for convolutional networks (*DeepLearningExamples*, PyTorch/Classification/ConvNets). We
# build a small run in one process with typical features: momentum in the optimizer, a moving average of the weights
# (*EMA*, exponential moving average, which is often the network that is evaluated), a learning rate that changes in
# every step, shuffled data, and augmentation with torch's global random numbers. Then we stop it during its second
# epoch, and resume it with parts of the checkpoint left out.

# %%
LAST, STOP = 2 * STEPS + STEPS // 2, STEPS + STEPS // 3


class Run:
    """A training run that can be stopped, saved and resumed."""

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
        """Restore what `state` contains; everything else keeps its initial value."""
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


uninterrupted = Run()
uninterrupted.train(STOP)
saved = uninterrupted.state()
uninterrupted.train(LAST - STOP)
target = flat(uninterrupted.network)

left_out = {
    "everything saved": (),
    "without the schedule's position": ("schedule",),
    "without the random state": ("random state",),
    "without the position in the data": ("position",),
    "the reference trainer's list": ("schedule", "random state", "position"),
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
axes.bar_label(bars, ["bit-identical" if value == 0 else f"{value:.1f} %" for value in off.values()], padding=4)
axes.invert_yaxis()
axes.set(xlim=(0, 1.25 * max(off.values())), xlabel="difference from the uninterrupted run's weights, % of their norm")
axes.set_title(f"Stopped after {STOP} steps, resumed, {LAST - STOP} steps later")
plt.show()
assert off.pop("everything saved") == 0, "with everything saved, the resumed run equals the uninterrupted one"
assert min(off.values()) > 0.1, "everything left out changes the result"

# %% [markdown]
# With everything saved, the weights are bit-identical; anything left out changes the result. There is no error and no
# message, so such bugs stay unnoticed for a long time. The list also lacks the loss scale of fp16 training, the
# counter of early stopping, and, with several ranks, the random state *of each rank*.
#
# There are two solutions. You can save everything, as above. Or you can compute it from the position, as
# `train_ddp.py` does: generators seeded with epoch, step and rank give the order and the shifts, so there is no
# random state to save, and the position in the data is the step. The second solution is shorter, and there is less to
# forget.
#
# ### Writing a checkpoint
#
# A process can be killed while it writes. If it overwrites the only checkpoint, both the old and the new one are
# lost. So write another file and *rename* it: a rename within a file system is atomic, so other processes see either
# the old file or the new one, never a part. (In a power failure, the rename may reach the disk before the content.
# Paceline therefore flushes the file first, with `os.fsync`.)
#
# **Exercise 2b.4.** Write `save_checkpoint`: only rank 0 writes, and the file at `path` is complete at any moment.
# Three or four lines.


# %% tags=["exercise"]
def save_checkpoint(state: dict, path: str, rank: int) -> None:
    """Write `state` to `path` from rank 0; an older file there stays intact until the new one is complete."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
class Failing:
    """Simulates a kill during writing: it cannot be pickled."""

    def __reduce__(self):
        raise RuntimeError("killed")


with exercise("2b.4"):
    Path("tried.pt").unlink(missing_ok=True)
    save_checkpoint({"step": 1}, "tried.pt", rank=1)
    assert not Path("tried.pt").exists(), "rank 1 has written a file; two ranks that write the same file corrupt it"
    save_checkpoint({"step": 1}, "tried.pt", rank=0)
    assert Path("tried.pt").exists(), "rank 0 has written no file at the path"
    with suppress(RuntimeError):
        save_checkpoint({"step": 2, "weights": torch.zeros(100_000), "rest": Failing()}, "tried.pt", rank=0)
    try:
        assert torch.load("tried.pt", weights_only=True) == {"step": 1}, (
            "after a failed save the old checkpoint must still be there"
        )
    except Exception as error:
        raise AssertionError(
            "an interrupted save has damaged the old checkpoint: write another file, then rename it"
        ) from error
    save_checkpoint({"step": 3}, "tried.pt", rank=0)
    assert torch.load("tried.pt", weights_only=True) == {"step": 3}, "the second checkpoint must replace the first one"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# Use <code>torch.save</code> with another name in the same folder, then <code>os.replace(other, path)</code>.
#
# </details>


# %% tags=["answer"]
use_answer("2b.4")

# %% [markdown]
# **Learnt:** one rank writes, because all have the same weights; all ranks read, so that all start from the same
# state.
#
# Now the real test.

# %% [markdown] tags=["slide"]
# ## Killing the run
#
# Rank 1 sends itself SIGKILL at a chosen step. No program can catch this signal, so there is no clean-up. torchrun
# notices, ends rank 0 and fails. Then the same command resumes the run, which must end with the same weights as the
# uninterrupted run.

# %% tags=["slide"]
from paceline_course.shell import CommandError

die_at = 2 * STEPS - 7
try:
    run(f"torchrun --standalone --nproc-per-node=2 train_ddp.py killed.pt {die_at}", seconds=300, quiet=True)
except CommandError:
    reached = torch.load("killed.pt", weights_only=True)["step"]
    print(f"Killed at step {die_at}; the latest checkpoint is of step {reached}: {die_at - reached} steps to repeat.")
seen = run("torchrun --standalone --nproc-per-node=2 train_ddp.py killed.pt", seconds=300, quiet=True)
resumed, whole = (torch.load(name, weights_only=True) for name in ("killed.pt", "two.pt"))
equal = all(torch.equal(resumed["network"][key], whole["network"][key]) for key in whole["network"])
print(f"Killed and resumed, compared with uninterrupted: {'bit-identical' if equal else 'different'}.")
assert equal

# %% [markdown] tags=["slide"]
# ## Stopping on request
#
# Batch systems and preemptible (spot) machines first send SIGTERM, a request to stop, and SIGKILL some time later.
# The reference trainer sets a flag when *rank 0* receives SIGTERM. When it next checks the flag, it leaves the epoch
# and saves a checkpoint that resumes at the *next epoch*.

# %% [markdown]
# All ranks get the flag from rank 0 every 20 steps; the other ranks ignore the signal. The next script has this logic
# without a network: it only counts how often each sample is used. It checks the flag every 5 steps, because our
# epochs are short.

# %%
# %%writefile sigterm.py
"""Stop two ranks on SIGTERM as the reference trainer does, then resume. Count samples; train nothing."""

import json
import os
import signal

import torch
import torch.distributed as dist
from realistic import GLOBAL_BATCH, leave_group, order

EPOCHS, SAMPLES, CHECK_EVERY = 3, 1438, 5

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
requests = []


def note(number, frame):
    requests.append(number)


signal.signal(signal.SIGTERM, note if rank == 0 else signal.SIG_IGN)  # the reference handles it on rank 0 only


def is_interrupted():
    flag = torch.tensor(bool(requests))
    dist.broadcast(flag, src=0)
    return flag.item()


def train(begin, uses, signalled=None):
    """Train from epoch `begin`; rank `signalled` gets SIGTERM in step 7 of epoch 1. Return the epoch to resume at."""
    for epoch in range(begin, EPOCHS):
        for step, batch in enumerate(order(epoch, SAMPLES).split(GLOBAL_BATCH)):
            if (epoch, step, rank) == (1, 7, signalled):
                os.kill(os.getpid(), signal.SIGTERM)
            uses[epoch, batch[rank::world]] += 1
            if (step + 1) % CHECK_EVERY == 0 and is_interrupted():
                return epoch + 1  # the checkpoint records the next epoch
    return EPOCHS


results = []
for signalled in (0, 1):
    uses = torch.zeros(EPOCHS, SAMPLES, dtype=torch.int64)
    stopped = train(0, uses, signalled)
    requests.clear()
    train(stopped, uses)  # the same command again
    dist.all_reduce(uses)
    results.append({"signalled": signalled, "stopped": stopped < EPOCHS, "used": uses.sum(dim=1).tolist()})
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
    (0.2, to_rank_1, "SIGTERM to rank 1: ignored"),
):
    bars = axes.bar(epochs + shift, [100 * used / 1438 for used in result["used"]], width=0.4, label=name)
    axes.bar_label(bars, fmt="%.0f %%", fontsize=9)
axes.set_xticks(epochs, [f"epoch {epoch + 1}" for epoch in range(3)])
axes.set(ylabel="samples used, %", ylim=(0, 165), yticks=(0, 50, 100))
axes.set_title("A SIGTERM flag, as in the reference trainer")
axes.legend(loc="upper left")
plt.show()

# %% [markdown]
# **Exercise 2b.5.** ImageNet has 1,281,167 training images; with a global batch of 256 an epoch has about 5,004
# steps. SIGTERM reaches rank 0 during step 1,003, and the flag is checked after every 20 steps. How many images does
# the reference trainer drop, and what share of the epoch is that?


# %% tags=["exercise"]
dropped_images = ...
dropped_share = ...  # in percent

# %% tags=["check"]
with exercise("2b.5"):
    assert dropped_images is not ..., "nothing is written here yet"
    assert dropped_share is not ..., "the images are there, the share is missing"
    assert dropped_images != 1281167 - 1003 * 256, "it continues until the next check of the flag, after step 1,020"
    assert abs(dropped_images - 1020047) <= 256, (
        f"after step 1,020 it has used 1,020 x 256 images, so it does not drop {dropped_images:,}"
    )
    assert abs(dropped_share - 79.6) < 0.1, "the share is in percent of 1,281,167"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# The first multiple of 20 after 1,003 is 1,020.
#
# </details>

# %% tags=["answer"]
use_answer("2b.5")

# %% [markdown]
# **Learnt:** a stop is safe only if any rank can receive the request, all ranks agree on the step, and the checkpoint
# contains the position in the epoch.
#
# Paceline sends the request along with the gradients' all-reduce. If any rank receives it, all ranks finish the same
# step, save, and end with exit code 75, which means *run the same command again*. Section 9 kills a run of Paceline.

# %% [markdown] tags=["slide"]
# ## 6 Throughput: how much faster are two processes?
#
# - Leave out the first steps, which allocate memory and choose kernels.
# - Take the median of several steps, not their sum.
# - Compare equal conditions: the same number of threads in every process, the same batch.
# - **Speed-up** = throughput of N processes / throughput of 1. **Efficiency** = speed-up / N.

# %% [markdown]
# Two processes on one machine share more than a network: caches, memory bandwidth, sometimes the clock frequency. So
# we measure four cases in one run, under the same conditions: one rank alone while the other waits; both at the same
# time without communication; both with DDP, a batch of 64 each (*weak scaling*: the global batch grows with the
# ranks); and both with DDP, 32 each (*strong scaling*: the global batch stays the same).

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
            torch.cuda.synchronize()  # GPU calls return before the work is done
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
# How to read the results: *alone* and *side by side* have no communication, so the difference shows what the two
# processes take from each other (and what other programs take from both). The difference to *DDP, 64 each* is the
# cost of the all-reduce and of waiting for the slower rank. *DDP, 32 each* has the same all-reduce for half the work.
# Run the cell again to see how much the numbers vary; on a shared machine they vary a lot.
#
# If one of two processes had two threads and the other had one, the faster process would wait in every all-reduce. If
# the *single* process had used both cores, you would compare two cores with two cores. Always state the number of
# threads.
#
# What does theory predict? `paceline scale` starts from the time of one process and adds the cost of communication,
# which it measures here.

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
# Always compare a prediction with a measurement. If they differ greatly, ask what the model ignores. This one assumes
# that a core is as fast when its neighbour is busy, and that half a batch takes half the time.

# %% [markdown] tags=["slide"]
# ## 7 A network that does not fit: FSDP
#
# DDP keeps everything on every rank. **FSDP** (fully sharded data parallel) splits parameters, gradients and
# optimizer state into one *shard* for each rank, and gathers a layer's parameters just before they are needed.
#
# Activations are not sharded: they depend on the batch per rank, as with DDP.

# %% [markdown]
# The idea comes from ZeRO (Rajbhandari et al., *ZeRO*, 2020, arXiv:1910.02054); PyTorch's current implementation is
# `fully_shard`. Here the optimizer is AdamW, a variant of Adam. It keeps two numbers for each parameter: an average
# of the gradients, and one of their squares. A number in fp32 has 4 bytes.
#
# **Exercise 2b.6.** Predict before you measure: how many bytes of parameters, gradients and AdamW state in total does
# each rank store between two steps, with DDP and with FSDP?


# %% tags=["exercise"]
def bytes_per_rank(parameters: int, world: int, *, sharded: bool) -> float:
    """Return the bytes of parameters, gradients and AdamW state on one of `world` ranks, all in fp32."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("2b.6"):
    whole = bytes_per_rank(1000, 4, sharded=False)
    assert whole != 8000, "this counts only parameters and gradients; AdamW keeps two more numbers for each parameter"
    assert whole == 16000, f"four numbers of 4 bytes for each of 1,000 parameters are 16,000 bytes, not {whole}"
    assert bytes_per_rank(1000, 4, sharded=True) == 4000, "each of 4 ranks stores a quarter of everything"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# Parameter, gradient, and AdamW's two: four numbers. With sharding, a rank stores a part of each.
#
# </details>


# %% tags=["answer"]
use_answer("2b.6")

# %% [markdown]
# Now count. The script trains the same network with both, on the same images, and adds up the bytes on each rank. It
# also counts the collectives of a step: *all-gather* assembles the shards on every rank; *reduce-scatter* adds up and
# leaves each rank its shard of the sum.

# %%
# %%writefile memory.py
"""Count the bytes on each rank with DDP and with FSDP, and a step's collectives. Rank 0 writes memory.json."""

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

warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # warns of in-place changes, which we do not make
warnings.filterwarnings("ignore", message="Grad strides do not match")  # concerns only speed


def wrapped(network, kind):
    if kind == "DDP":
        return DistributedDataParallel(network)
    mesh = init_device_mesh(device.type, (world,))
    for layer in network.features:
        if isinstance(layer, Block):
            fully_shard(layer, mesh=mesh)  # each block separately: only one is gathered at a time
    return fully_shard(network, mesh=mesh)  # the remaining layers


def held(tensors):
    """Return the bytes of the tensors that are stored on this rank."""
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
    model = wrapped(network, kind)  # FSDP needs contiguous weights
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
    print(f"{kind:4s} predicted {expected:10,.0f} bytes on each rank; measured {measured}")
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
    ylabel="MiB stored between two steps",
    ylim=(0, 1.2 * max(bottom)),
    title="Replicated and sharded, counted on two ranks",
)
axes.legend(loc="upper right")
plt.show()

# %% [markdown]
# Predicted and measured bytes differ slightly for two reasons. AdamW has a step counter for each parameter tensor, on
# every rank. And shards may be uneven: rank 0 gets the larger piece if a tensor's first dimension is not divisible by
# the number of ranks.
#
# For N bytes on p ranks, a ring all-reduce sends 2 (p - 1)/p x N bytes per rank (lab 2a): a reduce-scatter and an
# all-gather of (p - 1)/p x N each. FSDP gathers parameters for the forward pass, frees them, gathers them again for
# the backward pass, and reduce-scatters the gradients: three times (p - 1)/p x N. This is **1.5 times** DDP's traffic
# (Rajbhandari et al. 2020, section 7.2.2).

# %% [markdown] tags=["slide"]
# ## DDP and FSDP: the lecture's table
#
# With the values of this network, counted on two ranks:

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
# The table says *up to* because FSDP does not free the last part gathered in the forward pass: the backward pass
# needs it immediately. DDP's broadcasts are for BatchNorm's buffers, its all-reduces for the gradients, in buckets.
#
# When does a network not fit? This one fits anywhere. Consider the GPT-3 variant with 6.7 billion parameters (Brown
# et al., *Language Models are Few-Shot Learners*, 2020, arXiv:2005.14165), trained with Adam in mixed precision
# (16-bit numbers in the passes, fp32 in the optimizer). Each parameter takes 2 bytes for the weight, 2 for its
# gradient, and 12 for the optimizer's fp32 copy and its two averages (ZeRO, section 3.1). Stage 0 of ZeRO corresponds
# to DDP; stage 3 shards everything, like FSDP.

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
    f"DDP needs {needed[0][0]:.0f} GiB on each device, for any number of devices. "
    f"With sharding, it fits on {fits} devices of 80 GiB, but on none of the smaller numbers shown."
)

# %% [markdown]
# Activations and gathered parameters need additional memory. `paceline estimate gpt-7b --device h100 --processes 8`
# includes them, without a GPU (it takes a while; try it). It says whether DDP or FSDP fits, and with which batch.

# %% [markdown] tags=["slide"]
# ## 8 One script, several machines
#
# - One torchrun, the *agent*, runs on each machine (*node*) and starts its ranks.
# - All agents connect to one address, the *rendezvous*, and agree on ranks and world size.
# - `RANK` counts over all nodes, `LOCAL_RANK` from 0 on each.
# - The script does not change.

# %% [markdown]
# We have one machine, so two agents on it simulate two nodes: the commands are the same, but the address is
# `localhost`. The first script prints its ranks. It needs no torch, because torchrun sets them as environment
# variables.

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
    """Run the script with one agent for each of two nodes, as in two terminals; return the output of both."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # a free port
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
# Two ranks have the local rank 0. So the seed `seed + local_rank` repeats on every node, and a file written by "local
# rank 0" is written by every node: use the rank for both. Use the local rank only to choose a GPU.
#
# Now the training script, unchanged, with one process on each "node":

# %%
seen = on_two_nodes(1, "train_ddp.py nodes.pt")
print("\n".join(line for line in seen.splitlines() if ": " in line and line.startswith(("epoch", "rank"))))
nodes, whole = (torch.load(name, weights_only=True)["network"] for name in ("nodes.pt", "two.pt"))
equal = all(torch.equal(nodes[key], whole[key]) for key in whole)
print(f"Two nodes with one process each, compared with one node with two: {'bit-identical' if equal else 'different'}.")
assert equal

# %% [markdown]
# The same world size gives the same shares, the same sums and the same bits. Real machines differ in three ways. The
# checkpoint must be on a shared file system, or each node needs a copy of rank 0's file to resume. The endpoint is
# the first node's name and an open port. And the network between nodes is slower than communication within a node. On
# Linux with root, two network namespaces are a more realistic test (`docs/guide/several-hosts.md` says what was
# tested).

# %% [markdown] tags=["slide"]
# ## 9 The same, with one command
#
# `paceline train wide.yaml --processes 2`
#
# Paceline provides the loop, shares, exact validation, checkpoints and throughput; the recipe names this notebook's
# network. We kill all ranks with SIGKILL in the first epochs and resume with **one** process. With `parallel.exact`
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
uninterrupted = paceline.train("wide.yaml", overrides=wanted, run_dir="runs/uninterrupted", quiet=True)

words = [sys.executable, "-m", "paceline", "train", "wide.yaml", "--run-dir", "runs/killed", "--processes", "2"]
with open("killed.log", "w") as log:
    launcher = subprocess.Popen([*words, *wanted], stdout=log, stderr=log)
while launcher.poll() is None and not list(Path("runs/killed/checkpoints").glob("step-*")):
    time.sleep(0.02)
with suppress(psutil.NoSuchProcess):  # it may already have ended
    for process in psutil.Process(launcher.pid).children(recursive=True):
        process.send_signal(signal.SIGKILL)
launcher.wait()
print(*[line for line in Path("killed.log").read_text().splitlines() if "SIGKILL" in line], sep="\n")
left = sorted(path.name for path in Path("runs/killed/checkpoints").glob("step-*"))
print(f"Checkpoints of the killed run: {', '.join(left)}")
assert left

# %% tags=["slide"]
resumed = paceline.train(
    "wide.yaml", overrides=wanted, run_dir="runs/killed", quiet=True
)  # the same run, now in one process
for name, result in (("uninterrupted", uninterrupted), ("killed, resumed", resumed)):
    accurate = result.metrics["top1_accuracy"]
    print(f"{name:16s} weights_sha256 {result.summary.weights_sha256[:24]}…  accuracy {accurate:.2f} %")
assert uninterrupted.summary.weights_sha256 == resumed.summary.weights_sha256

# %% [markdown]
# The ledger, a list of the samples of every step, proves that each sample was used once per epoch, despite the kill:

# %%
seen = run("paceline audit runs/killed", seconds=300)

# %% [markdown] tags=["slide"]
# ## What to remember
#
# 1. DDP needs eight changes; typical bugs are in validation, random numbers and writing files.
# 2. BatchNorm's statistics are local; DDP broadcasts rank 0's buffers.
# 3. A checkpoint contains everything the next step depends on and cannot compute from the position. Test it with a
#    kill.
# 4. Measure throughput without warm-up steps and with the same number of threads.
# 5. FSDP divides the stored state among ranks, for 1.5 times the traffic.

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
# - Paceline's guide: *Stop and resume*, *Several GPUs and processes*, *Several hosts*, *Memory: will it fit?*,
#   *Predict speed*
