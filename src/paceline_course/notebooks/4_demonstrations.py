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
# # Lab 4: The lecture's demonstrations
#
# - Tensors and modules on devices, and the error when they are not on the same one
# - What a training step stores in memory, and why
# - CPU against GPU, by batch size
# - Why a step waits
# - DDP or FSDP, and ImageNet in one hour

# %% [markdown]
# **After this lab you can**
#
# - move tensors and modules between devices, and read the message when two of them are not on the same one;
# - predict the four parts of a training step's memory, and count them without a GPU;
# - estimate from a few measurements from which batch size a GPU is faster, and how reliable such a fitted line is;
# - find the causes of waiting in a step, and replace calls that PyTorch has deprecated or removed;
# - choose between DDP and FSDP, and do the calculation for "ImageNet in one hour".
#
# **You need** Python, and a training loop in PyTorch: forward pass, loss, backward pass, optimizer step. Labs 1 and
# 2a explain the terms *batch*, *process*, *rank* and *DDP*; this lab explains all others.
#
# **Time:** about 90 minutes with the exercises. The notebook itself needs one to two minutes of processor time. You
# do not need a GPU; if there is one, the notebook uses it.
#
# Most of this lab follows lecture 19 of Data C182 at Berkeley (Eric Kim, *Accelerating and scaling DNN training*,
# autumn 2024), called *the lecture* below, and a slide deck of the French computing centre IDRIS (*Deep Learning
# Optimisé*), called *the deck*. We run their examples and check their statements; not all of them are correct.

# %% tags=["setup"]
import json
import math
import time
import warnings
import weakref
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from paceline.models.lecture_net import lecture_net
from paceline_course import exercise, run, use_answer, use_style
from paceline_course.shell import CommandError

use_style()
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
cores = torch.get_num_threads()
torch.set_num_threads(1)  # for stable times, also on a busy machine

# %%
print(f"PyTorch {torch.__version__}, {cores} threads for the CPU, device of this notebook: {device}")

# %% [markdown] tags=["slide"]
# ## A tensor is on one device
#
# - `torch.zeros(2, 3, device=device)` creates a tensor on the device
# - `x.to(device)` returns a copy on the device; `x` does not move
# - an operation on two tensors needs both on the same device

# %% [markdown]
# ## 1 Tensors and devices
#
# Every tensor is on a *device*: in the machine's main memory (`cpu`), or in the memory of a GPU (`cuda:0`, `cuda:1`,
# …). This lab must work on every machine, so we use a third device that every PyTorch has: `meta`. A tensor on it has
# a shape, a type and a device, but no data: operations only determine shapes.

# %%
second = device if device.type == "cuda" else torch.device("meta")

made_there = torch.zeros(2, 4, device=second)  # created on the device, without a copy
on_cpu = torch.ones(2, 4)
copied = on_cpu.to(second)

print(f"made there: {made_there.device},   copied: {copied.device},   the original: {on_cpu.device}")

# %% [markdown]
# When does `.to` copy? Only if the device or type changes. If the tensor is already on the device, you get *the same
# tensor* back: a change to one changes the other. Tensors made from a NumPy array also share its memory.

# %%
same = on_cpu.to("cpu")
always_a_copy = on_cpu.to("cpu", copy=True)
same[0, 0] = 7
print(f"`.to` the tensor's own device: the same object? {same is on_cpu}; its value is {on_cpu[0, 0]:g}")
print(f"with copy=True: the same object? {always_a_copy is on_cpu}; its value is {always_a_copy[0, 0]:g}")

array = np.zeros(3)
shared = torch.from_numpy(array)
array[0] = 5
print(f"a tensor from an array changes with it: {shared.tolist()}")
assert same is on_cpu
assert always_a_copy[0, 0] == 1
assert shared[0] == 5

# %% [markdown]
# Now a common mistake: one operation on tensors from two devices.

# %% tags=["slide"]
try:
    on_cpu + copied
except RuntimeError as error:
    message = str(error)
print(f"RuntimeError: {message}")
assert "device" in message

# %% [markdown]
# The message names the two devices. Usually one is your model's device, and the other is the device of a tensor that
# you forgot to move. PyTorch does not move it for you, because a hidden copy in every step would be slow and hard to
# find.
#
# The lecture's own message, with a GPU, was "Expected all tensors to be on the same device, but found at least two
# devices, cuda:0 and cpu!". (On `meta`, not every operation checks devices as this one does; some continue with
# meaningless values. Use `meta` only for shapes, never for results.)
#
# **Exercise 4.1.** A batch is rarely a single tensor. Write `to_device`. It takes a tensor, or a `dict`, `list` or
# `tuple` of such values with any nesting, and returns the same structure with every tensor on `device`. Other values
# stay unchanged.


# %% tags=["exercise"]
def to_device(batch, device):
    """Return the same structure with every tensor on ``device``."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("4.1"):
    meta = torch.device("meta")
    given = {
        "pictures": torch.ones(2, 3),
        "boxes": [torch.ones(1), torch.ones(2)],
        "size": (28, torch.ones(1)),
        "id": "a",
    }
    moved = to_device(given, meta)
    assert isinstance(moved, dict), "a dict comes back as a dict: {key: to_device(value, device) for …}"
    assert moved["pictures"].device == meta, "a tensor in a dict is not on the new device"
    assert all(each.device == meta for each in moved["boxes"]), "tensors in a list are not on the new device"
    assert isinstance(moved["size"], tuple), "a tuple should come back as a tuple"
    assert moved["size"][1].device == meta, "a tensor in a tuple is not on the new device"
    assert moved["size"][0] == 28, "a number should stay unchanged"
    assert moved["id"] == "a", "a string should stay unchanged"
    assert given["pictures"].device.type == "cpu", "the given batch should not be changed"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# Three cases with <code>isinstance</code>, one line each: move a tensor; make a dict of moved values from a dict;
# make <code>type(batch)(… for each in batch)</code> from a list or tuple. Call the function itself for the values
# inside.
#
# </details>


# %% tags=["answer"]
use_answer("4.1")

# %% [markdown]
# *Learnt:* a training loop needs only one function for devices, called once at the start of each step. (A real one
# also handles named tuples and data classes.)

# %% [markdown] tags=["slide"]
# ## `module.to(device)` moves parameters and buffers
#
# - parameters: yes
# - buffers (`register_buffer`): yes
# - a tensor in a plain attribute: **no**

# %% [markdown]
# ## 2 Modules
#
# `module.to(device)` moves a whole network. Unlike `.to` of a tensor, it changes the module *itself* and returns it.
# Here is the lecture's network, an *autoencoder*: the encoder compresses an image of 28×28 pixels into 64 numbers
# (the *code*), and the decoder reconstructs the image from them. We write it to a file, because a training run
# imports it later (section 5 explains the rest of the file).

# %%
# %%writefile autoencoding.py
"""The lecture's autoencoder, and a task for Paceline: reconstruct images."""

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.data.image.sets.digits import read_digits
from paceline.data.pipeline import SimplePipeline
from paceline.metrics.accumulator import Metric
from paceline.plan import DataFacts

HELD_OUT = 297


class Autoencoder(nn.Module):
    def __init__(self, out_channels_first=16):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, out_channels_first, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(out_channels_first, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 7),
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(64, 32, 7),
            nn.ReLU(),
            nn.ConvTranspose2d(32, out_channels_first, 3, stride=2, padding=1, output_padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(out_channels_first, 1, 3, stride=2, padding=1, output_padding=1),
            nn.Sigmoid(),
        )

    def forward(self, x):
        return self.decoder(self.encoder(x))


def read_pictures():
    """Return all digits as floats in [0, 1], with shape [1797, 1, 28, 28]."""
    pixels = torch.from_numpy(read_digits().images).permute(0, 3, 1, 2) / 255
    return F.interpolate(pixels, size=28, mode="bilinear")


class Autoencoding(paceline.Task):
    unit, headline = "images", "unexplained"
    metrics = (Metric(name="loss"), Metric(name="unexplained", of="squared_error", per="squares", scale=100.0))

    def data_facts(self, world):
        """Return the numbers of training and evaluation images; the last images are held out."""
        self.pictures = read_pictures()
        return DataFacts(train_samples=len(self.pictures) - HELD_OUT, evaluation_samples=HELD_OUT)

    def open_pipeline(self, placement):
        return SimplePipeline(self.read, evaluation_samples=HELD_OUT, placement=placement, name="digit")

    def read(self, part, training):
        """Return inputs and targets, which are the same images."""
        first = 0 if training else len(self.pictures) - HELD_OUT
        pictures = self.pictures[torch.tensor(part.ids) + first]
        return pictures, pictures

    def build_model(self):
        return Autoencoder()

    def loss(self, model, batch):
        return F.mse_loss(model(batch.inputs).float(), batch.targets)

    def score(self, model, batch):
        """Return values for each image: its loss, and the two values whose ratio is `unexplained`."""
        error = (model(batch.inputs).float() - batch.targets).square().flatten(1)
        squares = batch.targets.square().flatten(1).sum(dim=1)
        return {"loss": error.mean(dim=1), "squared_error": error.sum(dim=1), "squares": squares}


# %%
from autoencoding import Autoencoder, read_pictures


def print_state_dict(module: nn.Module) -> None:
    for name, value in module.state_dict().items():
        print(f"{name:18} {tuple(value.shape)!s:18} {value.device}")


autoencoder = Autoencoder()
print("before")
print_state_dict(autoencoder)
returned = autoencoder.to(second)
print("\nafter")
print_state_dict(autoencoder)
assert returned is autoencoder
assert {each.device.type for each in autoencoder.state_dict().values()} == {second.type}

# %% [markdown]
# The lecture concludes that `model.to(device)` copies all *parameters*. It also moves *buffers*: tensors that belong to
# the module's state but are not trained, such as BatchNorm's running mean. But it does not move a tensor in a plain
# attribute.

# %%
norm = nn.BatchNorm2d(4)
norm.note = torch.zeros(4)
norm.to("meta")
print(f"parameter weight:       {norm.weight.device}")
print(f"buffer running_mean:    {norm.running_mean.device}")
print(f"plain attribute note:   {norm.note.device}")
assert norm.running_mean.is_meta
assert not norm.note.is_meta

# %% [markdown]
# **Exercise 4.2.** This module works on the CPU but fails on every other device, and its mean is missing from
# checkpoints. Fix it with one line in `__init__`.


# %% tags=["exercise"]
class Centre(nn.Module):
    """Subtracts the mean image."""

    def __init__(self, mean: torch.Tensor):
        super().__init__()
        self.mean = mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.mean


# %% tags=["check"]
with exercise("4.2"):
    centre = Centre(torch.full((2, 2), 3.0))
    assert torch.equal(centre(torch.full((1, 2, 2), 5.0)), torch.full((1, 2, 2), 2.0)), "forward should still subtract"
    assert not list(centre.parameters()), "the mean is not trained: it should be a buffer, not a parameter"
    assert "mean" in centre.state_dict(), (
        "the mean is not in the state_dict, so checkpoints do not contain it: register it"
    )
    assert centre.to("meta").mean.is_meta, "the mean stayed on the CPU when the module moved"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# <code>self.register_buffer(name, tensor)</code> replaces the assignment; afterwards <code>self.name</code> is the
# tensor, as before.
#
# </details>


# %% tags=["answer"]
use_answer("4.2")

# %% [markdown]
# *Learnt:* a module moves, saves and loads its parameters and buffers, nothing else.
#
# So training on a GPU needs only the lecture's two changes, one line each. They also work on a CPU. This is called
# *device-agnostic* code:

# %%
model = Centre(torch.full((1, 28, 28), 0.3)).to(device)  # change 1: the model, once

batch = {"pictures": torch.rand(8, 1, 28, 28), "labels": torch.arange(8)}
batch = to_device(batch, device)  # change 2: the batch, in every step

print(f"model and batch on {device}: the mean over all pixels is now {model(batch['pictures']).mean():.2f}")

# %% [markdown] tags=["slide"]
# ## Four uses of memory
#
# - **weights**: the parameters
# - **gradients**: one number per weight
# - **optimizer state**: SGD none, momentum one, Adam two numbers per weight
# - **activations**: tensors that the forward pass keeps for the backward pass
#
# The first three do not depend on the batch. The fourth grows with it.

# %% [markdown]
# ## 3 Memory by cause
#
# A GPU has little memory and does not swap: a run that does not fit fails. The lecture names four uses of memory. We
# predict each by calculation before we count it.
#
# **Weights, gradients, optimizer state.** A number in `float32` takes 4 bytes. The lecture's second network is a
# small convolutional network for CIFAR-10 (images of 32×32 pixels in colour); it has 120,078 parameters. On its
# GPU the lecture printed, after `net.to(device)`,
#
#     (post net.to) GPU max_memory_allocated: 0.481792 MB
#
# This is slightly more than 4 bytes per parameter. The reason: on a GPU, PyTorch's allocator provides memory in
# blocks and rounds each *tensor* up to a multiple of 512 bytes.

# %%
network = lecture_net(10)
numbers = [each.numel() for each in network.parameters()]
print(f"numbers in each of its {len(numbers)} tensors: {numbers}")
print(f"parameters: {sum(numbers):,}   bytes without rounding: {4 * sum(numbers):,}   the lecture printed 481,792")
assert sum(numbers) == 120_078

# %% [markdown]
# **Exercise 4.3.** Write `allocated_bytes`: the bytes that such an allocator counts for `float32` tensors of these
# sizes. Compare your result with the lecture's figure, which it should match exactly.


# %% tags=["exercise"]
def allocated_bytes(numbers: list[int]) -> int:
    """Return the bytes for tensors with these counts of numbers, each tensor rounded up to a multiple of 512 bytes."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("4.3"):
    assert allocated_bytes([1]) == 512, "one number takes 4 bytes, but gets a block of 512"
    assert allocated_bytes([128]) == 512, "128 numbers fill a block of 512 bytes exactly: nothing is added"
    assert allocated_bytes([129, 1]) == 1536, (
        "each tensor is rounded separately: 129 numbers take two blocks, 1 number takes one"
    )
    found = allocated_bytes([each.numel() for each in lecture_net(10).parameters()])
    assert found == 481_792, f"for the lecture's network it should be 481,792, not {found:,}"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# The number of blocks of a tensor is <code>math.ceil(4 * n / 512)</code>.
#
# </details>


# %% tags=["answer"]
use_answer("4.3")

# %%
print(f"predicted: {allocated_bytes(numbers) / 1e6} MB; printed in the lecture: 0.481792 MB")
assert allocated_bytes(numbers) == 481_792


# %% [markdown]
# *Learnt:* you can calculate memory. Gradients take as much as the weights. Optimizer state takes nothing (plain
# SGD), as much as the weights (momentum) or twice as much (Adam). The total is 8 to 16 bytes per parameter.
#
# **Activations.** To compute a gradient, most operations need their own input or output again. So the forward pass
# keeps these tensors until the backward pass has used them. With *saved-tensor hooks*, PyTorch calls one function of
# ours when it stores such a tensor and another when it uses it. We count the bytes of each piece of memory once,
# without the weights.
#
# On the `meta` device this needs no GPU and almost no time or memory, because we need only shapes.


# %% tags=["setup"]
def kept_bytes(model: nn.Module, inputs: torch.Tensor, loss) -> dict[str, int]:
    """Return the bytes that a forward pass keeps for the backward pass, by shape and type of the tensor."""
    weights = {id(each.untyped_storage()) for each in model.parameters()}
    storages, kept = {}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in weights and id(storage) not in storages:
            storages[id(storage)] = storage  # keep it alive so that its id stays unique
            name = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            kept[name] = kept.get(name, 0) + storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(model(inputs))
    return kept


# %%
pictures = torch.zeros(64, 3, 32, 32, device="meta")
labels = torch.zeros(64, dtype=torch.int64, device="meta")
kept = kept_bytes(lecture_net(10).to("meta"), pictures, lambda output: F.cross_entropy(output, labels))
print("kept by the lecture's convolutional network for a batch of 64:")
for name, size in sorted(kept.items(), key=lambda item: -item[1])[:5]:
    print(f"  {size / 1e6:6.2f} MB  {name}")
share = max(kept.values()) / sum(kept.values())
print(f"  {sum(kept.values()) / 1e6:6.2f} MB  in all, {sum(kept.values()) / (4 * sum(numbers)):.0f} times the weights")
print(f"The output of the first ReLU alone takes {share:.0%}; max-pooling stores positions as int64, 8 bytes each.")
assert sum(kept.values()) > 50 * 4 * sum(numbers)

# %% [markdown]
# **Exercise 4.4.** Now predict this for the autoencoder: how many *numbers* are kept for one image? The layers are a
# convolution, a ReLU, a convolution, and so on. A convolution keeps its input. A ReLU keeps its output, which *is*
# the next convolution's input, so it counts once. The sigmoid keeps its output, and the mean squared error its two
# inputs (the output and the image, both counted already). Fill in channels × height × width. Each convolution with
# stride 2 halves height and width; each transposed convolution with stride 2 doubles them.

# %% tags=["exercise"]
numbers_kept = {
    "the image": 1 * 28 * 28,
    "after the encoder's first ReLU": ...,  # 16 channels
    "after the encoder's second ReLU": ...,  # 32 channels
    "the code": ...,
    "after the decoder's first ReLU": ...,
    "after the decoder's second ReLU": ...,
    "after the sigmoid": ...,
}

# %% tags=["check"]
with exercise("4.4"):
    missing = [name for name, value in numbers_kept.items() if value is ...]
    assert not missing, f"not filled in yet: {', '.join(missing)}"
    right = {"encoder's first": 16 * 14**2, "encoder's second": 32 * 7**2, "the code": 64}
    right |= {"decoder's first": 32 * 7**2, "decoder's second": 16 * 14**2, "sigmoid": 28**2}
    for part, value in right.items():
        name = next(each for each in numbers_kept if part in each)
        assert numbers_kept[name] == value, f"{name}: {numbers_kept[name]:,} is not its channels × height × width"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# Heights and widths are 28, 14, 7, 1 in the encoder, and 7, 14, 28 in the decoder. The last convolution of the
# encoder covers the whole 7×7 and outputs 64 channels of one number.
#
# </details>

# %% tags=["answer"]
use_answer("4.4")

# %%
predicted = 4 * sum(numbers_kept.values())
one_picture = torch.zeros(1, 1, 28, 28, device="meta")
counted = kept_bytes(Autoencoder().to("meta"), one_picture, lambda output: F.mse_loss(output, one_picture))
print(f"predicted {predicted:,} bytes for an image, counted {sum(counted.values()):,}")
assert sum(counted.values()) == predicted

# %% [markdown]
# *Learnt:* activations are a sum over feature maps: channels × height × width × 4 bytes, times the batch size.


# %% tags=["slide"]
def causes(model: nn.Module, kept_by_picture: int, batch: int) -> dict[str, int]:
    """Return bytes by cause, with Adam."""
    weights = 4 * sum(each.numel() for each in model.parameters())
    fixed = {"weights": weights, "gradients": weights, "optimizer state (Adam)": 2 * weights}
    return {**fixed, "activations": kept_by_picture * batch}


batches = np.array([1, 4, 16, 64, 256, 1024])
figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
networks = {"Autoencoder": (Autoencoder(), predicted), "Convolutional network": (network, sum(kept.values()) // 64)}
for axis, (title, (model, for_each)) in zip(axes, networks.items(), strict=True):
    for cause, style in zip(causes(model, for_each, 1), ("-", ":", "--", "-"), strict=True):
        megabytes = [causes(model, for_each, batch)[cause] / 1e6 for batch in batches]
        axis.plot(batches, megabytes, style, label=cause, marker="o" if cause == "activations" else None)
    axis.set(title=title, xlabel="batch size", xscale="log", yscale="log")
    axis.set_xticks(batches, batches)
    axis.minorticks_off()
axes[0].set_ylabel("MB")
axes[0].legend(fontsize=9, loc="upper left")
plt.show()

# %%
fixed = sum(causes(Autoencoder(), predicted, 0).values())
print(f"Autoencoder: {fixed / 1e6:.2f} MB for any batch, and {predicted / 1e3:.1f} kB for each image:")
print(f"activations exceed the rest from a batch of {fixed / predicted:.0f} on.")

# %% [markdown]
# The figure shows which remedy helps. If activations need most of the memory, use a smaller batch or *activation
# checkpointing*. If the other three do, as in large language models, a smaller batch does not help: distribute them
# over several GPUs (FSDP, section 8).
#
# ### A step, operation by operation
#
# We can also observe memory during a whole step. The class below intercepts every PyTorch operation, records each new
# piece of memory, and is notified when it is freed.


# %%
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Records the bytes of all tensors created inside and still alive, after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.known, self.history = 0, set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(id(storage))
                self.live += storage.nbytes()
                weakref.finalize(storage, self.forget, id(storage), storage.nbytes())
        self.history.append(self.live)
        return out

    def forget(self, name: int, size: int) -> None:
        self.known.discard(name)
        self.live -= size


def watch_step(model: nn.Module, inputs: torch.Tensor, loss) -> list[int]:
    """Return the bytes after each operation of a forward and a backward pass."""
    with LiveBytes() as memory:
        loss(model(inputs)).backward()
    model.zero_grad()
    return memory.history


history = watch_step(lecture_net(10).to("meta"), pictures, lambda output: F.cross_entropy(output, labels))

# %% [markdown] tags=["slide"]
# ## Activation checkpointing
#
# - keeps only the activations between groups of layers
# - recomputes a group when the backward pass reaches it
# - saves memory, costs one more forward pass
# - for *n* equal layers, √*n* groups are best (Chen et al. 2016)

# %% [markdown]
# We try it with sixteen equal layers in four groups, and with the first three layers of the lecture's network.

# %% tags=["slide"]
from torch.utils.checkpoint import checkpoint

layers = [layer for _ in range(16) for layer in (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())]
stack = nn.Sequential(*layers).to("meta")
maps = torch.zeros(64, 32, 14, 14, device="meta")
plain = watch_step(stack, maps, torch.sum)


class Again(nn.Module):
    """Layers whose activations are not kept but recomputed in the backward pass."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, x, use_reentrant=False)


groups = nn.Sequential(*(Again(stack[first : first + 8]) for first in range(0, 32, 8)))
saved = watch_step(groups, maps, torch.sum)

whole = lecture_net(10)
grouped = nn.Sequential(Again(whole[:3]), *whole[3:]).to("meta")
again = watch_step(grouped, pictures, lambda output: F.cross_entropy(output, labels))

figure, axes = plt.subplots(1, 2, figsize=(10, 4))
uneven = (("all kept", history), ("first three layers recomputed", again))
equal = (("all kept", plain), ("four groups recomputed", saved))
for axis, title, curves in zip(axes, ("Convolutional network", "Sixteen equal layers"), (uneven, equal), strict=True):
    for label, curve in curves:
        axis.plot(np.array(curve) / 1e6, label=label)
    axis.set(title=title, xlabel="operation of the step", ylim=(0, 1.3 * max(curves[0][1]) / 1e6))
    axis.legend(fontsize=9, loc="upper right")
axes[0].set_ylabel("MB of tensors created in the step")
plt.show()

# %%
print(f"sixteen layers: a peak of {max(plain) / 1e6:.1f} MB, in four groups {max(saved) / 1e6:.1f} MB")
print(f"convolutional network: a peak of {max(history) / 1e6:.1f} MB, with recomputation {max(again) / 1e6:.1f} MB")
assert max(saved) < 0.65 * max(plain)
assert max(again) > 0.9 * max(history)

# %% [markdown]
# It helps with sixteen equal layers, but not with the network on the left. There, a single layer causes the peak, and
# recomputing that layer causes the peak again. The position of the peak determines what helps, so find it first.
#
# ### The tool: `paceline estimate`
#
# `paceline estimate` runs a step of a recipe on tensors without data, as we did, and also counts the memory of a
# GPU's libraries. We can compare it with the lecture, which printed a peak of 96.306688 MB for training with a batch
# of 64. The shipped recipe `cifar10_lecture` is this training. According to the slides, the lecturer's GPU was a
# GeForce RTX 3080 Ti. The closest GPU in Paceline's table is the RTX 3090, of the same generation:

# %%
document = run("paceline estimate cifar10_lecture --device rtx3090 --json", quiet=True, seconds=300)
peak = json.loads(document)["peak"]
figures = {
    "counted above, only tensors of the step": max(history),
    "predicted by `paceline estimate`": peak["allocated_bytes"],
    "printed in the lecture, on its own GPU": 96_306_688,
}
if device.type == "cuda":
    on_gpu = lecture_net(10).to(device)
    momentum = torch.optim.SGD(on_gpu.parameters(), lr=0.001, momentum=0.9)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        momentum.zero_grad()
        inputs, targets = torch.rand(64, 3, 32, 32, device=device), torch.randint(10, (64,), device=device)
        F.cross_entropy(on_gpu(inputs), targets).backward()
        momentum.step()
    figures["measured here, on your GPU"] = torch.cuda.max_memory_allocated()
for name, size in figures.items():
    print(f"{name:40} {size / 1e6:6.1f} MB")
print(f"the prediction is {peak['allocated_bytes'] / 96_306_688 - 1:+.1%} off; by cause, in MB:")
print({cause: round(size / 1e6, 2) for cause, size in peak["causes"].items() if size > 1e5})

# %% [markdown]
# *Temporary* memory contains gradients of activations during the backward pass; *workspace* is the memory of the
# libraries for matrix products. Neither is among the lecture's four uses, and here they are the larger part of the
# peak.
#
# Here is the same as a report, for the autoencoder on an H100, which you do not need to have. Section 5 trains this
# recipe:

# %%
recipe = """\
task: autoencoding:Autoencoding
batch: {global_size: 50}
optimizer: {name: adamw, lr: 0.003}
train: {duration: 12 epochs, precision: fp32}
evaluate: {every: 1 epochs}
checkpoint: {every: 30 steps, keep: 20}
telemetry: {log_every: 10 steps}
"""
_ = Path("autoencoding.yaml").write_text(recipe)

# %%
report = run("paceline estimate autoencoding.yaml --device h100", quiet=True, seconds=300)
print(report.split("Largest micro-batch on known GPUs")[0].rstrip())

# %% [markdown]
# Gradients are as large as weights, but they take almost no memory at the autoencoder's peak. The peak is early in the
# backward pass, which computes the gradients of the weights layer by layer, from the last to the first. At the peak,
# hardly any gradients exist yet. When all of them exist, the activations have been freed.

# %% [markdown] tags=["slide"]
# ## CPU against GPU: the lecture's table
#
# | batch | CPU, images/s | GPU, images/s |
# |---|---|---|
# | 64 | 1474 | 5369 |
# | 4 | 1350 | 1633 |
# | 2 | 860 | 937 |
#
# The slide says: "The CPU doesn't always outperform the GPU!" Look again: in which rows is the CPU faster?

# %% [markdown]
# ## 4 CPU against GPU, by batch size
#
# The lecture trained its small convolutional network on CIFAR-10 for an epoch, with two loader processes, and printed
# the table above (Data C182, lecture 19; the figures include data loading). First, what does the table show?

# %%
lecture = {64: (1474, 5369), 4: (1350, 1633), 2: (860, 937)}  # images a second of CPU and GPU
for size, (cpu, gpu) in lecture.items():
    step = f"{size / cpu * 1e3:5.2f} ms and {size / gpu * 1e3:5.2f} ms"
    print(f"batch {size:2}: GPU / CPU = {gpu / cpu:.2f},  a step takes {step}")
assert all(gpu > cpu for cpu, gpu in lecture.values())

# %% [markdown]
# The GPU is faster in **every** row. The sentence on the slide was probably meant the other way round ("the GPU
# doesn't always outperform the CPU"), but the table does not show that either. It shows something more useful: the
# advantage falls with the batch size, from 3.6 to 1.1.
#
# Now we measure on your machine: the same network and optimizer, with random images that are already on the device,
# so that we time only computation. Two details make the timing reliable. We do not time the first steps, because they
# allocate memory and choose kernels. And we wait for a GPU to finish before reading the clock.


# %%
def seconds_per_step(batch: int, device: torch.device, rounds: int = 3) -> float:
    """Return the seconds per step of the fastest round; each round has several training steps."""
    network = lecture_net(10).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.001, momentum=0.9)
    pictures = torch.rand(batch, 3, 32, 32, device=device)
    labels = torch.randint(10, (batch,), device=device)
    steps = max(2, 16 // batch)
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(network(pictures), labels).backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()  # wait until the GPU has finished
        times.append((time.perf_counter() - start) / steps)
    return min(times[1:])  # the first round was the warm-up


sizes = [2, 4, 16, 64]
torch.set_num_threads(cores)  # use all CPU threads for the comparison with the GPU
mine = {"CPU": {size: seconds_per_step(size, torch.device("cpu")) for size in sizes}}
if device.type == "cuda":
    mine["GPU"] = {size: seconds_per_step(size, device) for size in sizes}
torch.set_num_threads(1)
print("batch   " + "   ".join(f"{name:>16}" for name in mine))
for size in sizes:
    print(f"{size:5}   " + "   ".join(f"{size / times[size]:9,.0f} images/s" for times in mine.values()))

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 4))
for index, name in enumerate(("CPU", "GPU")):
    rates = [lecture[size][index] for size in sorted(lecture)]
    axes[0].plot(sorted(lecture), rates, "o-", color=f"C{index}", label=f"{name}, lecture")
for index, (name, times) in enumerate(mine.items()):
    rates = [size / seconds for size, seconds in times.items()]
    axes[0].plot(sizes, rates, "s--", color=f"C{index}", alpha=0.6, label=f"{name}, here")
axes[0].set(title="Throughput", xlabel="batch size", ylabel="images a second", xscale="log", yscale="log")
axes[0].set_xticks(sizes, sizes)
axes[0].minorticks_off()
axes[0].legend(fontsize=9)
ratios = {size: gpu / cpu for size, (cpu, gpu) in lecture.items()}
axes[1].bar([str(size) for size in sorted(ratios)], [ratios[size] for size in sorted(ratios)], color="C2")
axes[1].axhline(1, color="black", linewidth=1)
axes[1].set(title="The lecture: GPU over CPU", xlabel="batch size", ylabel="times as fast")
plt.show()
print("The lecture's figures are from other machines and include data loading: compare slopes, not heights.")
print("(If your line has a dip, another program was running; run the timing again.)")

# %% [markdown]
# **Why does the advantage fall?** The lecture says: with a small batch, most of the time is spent on communication
# between CPU and GPU. We can check this with its own numbers. How many bytes are sent to the GPU for a batch of 2,
# and how long does that take, even over a slow connection of 1 GB/s?

# %%
batch_bytes = 2 * 3 * 32 * 32 * 4 + 2 * 8  # two images in float32, two labels in int64
copy_seconds = batch_bytes / 1e9
step_seconds = 2 / lecture[2][1]
print(f"{batch_bytes:,} bytes take {copy_seconds * 1e6:.0f} µs at 1 GB/s: {copy_seconds / step_seconds:.1%} of a step")
assert copy_seconds < 0.05 * step_seconds

operations = {}
for size in (2, 64):
    labels = torch.zeros(size, dtype=torch.int64, device="meta")
    inputs = torch.zeros(size, 3, 32, 32, device="meta")
    steps = watch_step(
        lecture_net(10).to("meta"), inputs, lambda output, labels=labels: F.cross_entropy(output, labels)
    )
    operations[size] = len(steps)
print(f"operations in forward and backward pass: {operations[2]} with a batch of 2, {operations[64]} with 64")
assert operations[2] == operations[64]

# %% [markdown]
# So the amount of data is not the reason. There must be a **fixed cost per step** that does not depend on the batch
# size. Possible causes are Python itself, the loader processes, passing the batch to the GPU, and starting each
# operation (their number is the same for 2 images and for 64). The table does not distinguish them. The time of a
# step is then a line,
#
# `t(B) = a + b · B`
#
# with the fixed cost *a* and the cost *b* per image.

# %%
batch_sizes = np.array(sorted(lecture))
milliseconds = {
    name: np.array([1e3 * size / lecture[size][index] for size in sorted(lecture)])
    for index, name in enumerate(("CPU", "GPU"))
}
through_all, through_small = {}, {}
for name, times in milliseconds.items():
    slope, offset = np.polyfit(batch_sizes, times, 1)
    error = np.abs((offset + slope * batch_sizes) / times - 1).max()
    through_all[name] = (offset, slope)
    slope, offset = np.polyfit(batch_sizes[:2], times[:2], 1)  # exactly through batches 2 and 4
    through_small[name] = (offset, slope)
    all_three = f"{through_all[name][0]:.2f} + {through_all[name][1]:.3f} B ms, at most {error:.2%} off"
    print(f"{name}, all three: t = {all_three};  2 and 4: t = {offset:.2f} + {slope:.3f} B ms")
    few, many = np.diff(times) / np.diff(batch_sizes)
    print(f"     each additional image costs {few:.2f} ms from 2 to 4, {many:.2f} ms from 4 to 64")
assert np.diff(milliseconds["CPU"] / batch_sizes).max() < 0, "the average cost of an image falls with the batch size"

# %% [markdown]
# The GPU's three times are almost exactly on a line. The CPU's are not: each *additional* image costs about twice as
# much from 4 to 64 as from 2 to 4. (The average cost per image still falls with the batch size.) Each time is a
# single measurement with an unknown error, so one of them may simply be inaccurate.
#
# Also compare the fixed costs *a* of the lines through batches 2 and 4: the CPU's is nearly as large as the GPU's,
# although it transfers nothing. So most of the fixed cost must be common to both. The GPU's advantage in this table
# is its small *b*.
#
# **Exercise 4.5.** At which batch size do two such lines intersect? Below it the CPU would be faster.


# %% tags=["exercise"]
def crossover(cpu: tuple[float, float], gpu: tuple[float, float]) -> float:
    """Return the batch size B where a_cpu + b_cpu B = a_gpu + b_gpu B; each line is given as (a, b)."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("4.5"):
    found = crossover((1.0, 2.0), (5.0, 1.0))
    assert abs(found - 4.0) < 1e-9, f"1 + 2 B and 5 + B intersect at B = 4 (both are 9), not at {found:g}"
    found = crossover((0.5, 0.5), (2.0, 0.25))
    assert abs(found - 6.0) < 1e-9, f"0.5 + 0.5 B and 2 + 0.25 B intersect at B = 6 (both are 3.5), not at {found:g}"
    assert abs(crossover((1.0, 2.0), (2.0, 1.6)) - 2.5) < 1e-9, (
        "1 + 2 B and 2 + 1.6 B intersect at B = 2.5: do not round"
    )

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# Move both terms with B to one side: (b_cpu − b_gpu) B = a_gpu − a_cpu.
#
# </details>


# %% tags=["answer"]
use_answer("4.5")

# %% [markdown] tags=["slide"]
# ## Where would the CPU be faster?
#
# - a step takes `a + b · B`: a fixed cost, and a cost per image
# - two ways to fit a line to the lecture's figures give two answers

# %% tags=["slide"]
figure, axes = plt.subplots(1, 2, figsize=(10, 4))
for axis, (title, lines) in zip(
    axes, (("Lines through all three", through_all), ("Lines through 2 and 4", through_small)), strict=True
):
    grid = np.linspace(0, 8, 50)
    for color, (name, (offset, slope)) in zip(("C0", "C1"), lines.items(), strict=True):
        axis.plot(grid, offset + slope * grid, color=color, label=f"{name}, line")
        axis.plot(batch_sizes[:2], milliseconds[name][:2], "o", color=color, label=f"{name}, lecture")
    meet = crossover(lines["CPU"], lines["GPU"])
    axis.axvline(meet, color="black", linestyle=":", linewidth=1.5)
    axis.set(title=f"{title}: intersection at {meet:.1f}", xlabel="batch size", ylim=(0, 6))
axes[0].set_ylabel("ms for a step")
axes[0].legend(fontsize=9)
plt.show()

# %%
for title, lines in (("all three", through_all), ("the two smallest", through_small)):
    print(f"through {title}: crossover at {crossover(lines['CPU'], lines['GPU']):.1f} images")
print(f"measured at 2 images: CPU {lecture[2][0]}, GPU {lecture[2][1]} images/s: the GPU is faster")
print(f"To be faster with a batch of 1, the CPU must take less than {sum(through_small['GPU']):.2f} ms per step;")
print(f"its line predicts {sum(through_small['CPU']):.2f} ms.")
assert crossover(through_small["CPU"], through_small["GPU"]) < 1 < crossover(through_all["CPU"], through_all["GPU"])

# %% [markdown]
# *Learnt:* the two answers differ. The lines through all three batch sizes intersect just above 2 images. But the
# CPU's line does not fit, and the table contradicts the result: at 2 images the GPU is faster. The lines through the
# two smallest batch sizes intersect below one image, so on that machine and with that network the CPU would never be
# faster. This is an **extrapolation** below all measurements. You can only conclude that the two are about equal near
# one or two images.
#
# The CPU is faster only if its whole step takes less time than the GPU's. With a smaller network and a smaller batch,
# the fixed cost is a larger part of the GPU's step. This explains the slide's rules of thumb (use a large enough
# model and batch).
#
# For real runs, `paceline bench cifar10_lecture data.path=… --devices cpu,cuda --batch-sizes 64,4,2 --parts together`
# prints such a table with confidence intervals.

# %% [markdown] tags=["slide"]
# ## Train the autoencoder
#
# A *task* defines data, network, loss and metrics. Paceline provides the loop.
#
# `paceline train autoencoding.yaml`

# %% [markdown]
# ## 5 Train the autoencoder
#
# The class `Autoencoding` in `autoencoding.py` above is all that Paceline needs to train the lecture's autoencoder on
# scikit-learn's digits. It defines the number of images, how to read a batch, the network, the loss, and a score for
# each held-out image. The metric *unexplained* is the squared error divided by the sum of squared pixels, in percent:
# 100 for a blank image.
#
# It does not mention devices: the loop moves the model and the batches.

# %%
run("paceline train autoencoding.yaml --run-dir runs/autoencoder --processes 1 parallel.threads=1", seconds=300)
events = [json.loads(line) for line in Path("runs/autoencoder/events.jsonl").read_text().splitlines()]

# %% [markdown]
# The run saved a *checkpoint* every 30 steps. Its weights are in a safetensors file, which any program can read. So
# we can see how the network reconstructed images at each checkpoint. These images were held out from training.

# %% tags=["slide"]
from safetensors.torch import load_file

held_out = read_pictures()[-297:]
shown = held_out[[0, 1, 2, 3, 4, 5, 7, 9]]
steps = [30, 60, 90, 150, 360]
rows = {"held-out images": shown}
errors = {}
for step in steps:
    model = Autoencoder()
    model.load_state_dict(load_file(f"runs/autoencoder/checkpoints/step-{step:08}/model.safetensors"))
    with torch.no_grad():
        rows[f"after {step} steps"] = model(shown)
        errors[step] = (model(held_out) - held_out).square().sum() / held_out.square().sum()

figure, axes = plt.subplots(len(rows), 1, figsize=(7.5, 6))
for axis, (title, drawn) in zip(axes, rows.items(), strict=True):
    axis.imshow(torch.cat(list(drawn[:, 0]), dim=1), cmap="gray_r", vmin=0, vmax=1)
    axis.set_ylabel(title, rotation=0, ha="right", va="center", fontsize=10)
    axis.set(xticks=[], yticks=[])
    axis.grid(visible=False)
plt.show()

# %%
scores = [each for each in events if each["event"] == "evaluation"]
figure, axis = plt.subplots()
axis.plot([each["step"] for each in scores], [each["unexplained"] for each in scores], "o-", label="logged by the run")
axis.plot(steps, [100 * errors[step].item() for step in steps], "s", color="C1", label="computed here from checkpoints")
axis.set(title="Unexplained part of the held-out images", xlabel="step", ylabel="% unexplained", ylim=0)
axis.legend()
plt.show()

logged = {each["step"]: each["unexplained"] for each in scores}
print(f"unexplained after 30 steps {logged[30]:.1f} %, after 360 steps {logged[360]:.1f} %")
assert logged[360] < 5 < logged[30]
assert all(abs(100 * errors[step].item() - logged[step]) < 0.5 for step in steps)

# %% [markdown]
# The two agree: the logged values match the checkpoints. The network reconstructs 784 pixels from 64 numbers. But
# note that scikit-learn's digits have 8×8 pixels, which we enlarged to the 28×28 of the lecture's network. So each
# image contains only 64 independent numbers. The figures show that the network learns, not how well it compresses.

# %% [markdown] tags=["slide"]
# ## "Avoid synchronisation"
#
# - A GPU processes a queue that Python fills.
# - `.item()`, `print(tensor)` and `if tensor:` need a *value*, so Python waits until the queue is empty.
# - Then the GPU waits until Python fills it again.

# %% [markdown]
# ## 6 Why a step waits
#
# The deck's list of good practice says: avoid unnecessary synchronisation between CPU and GPU. Some training loops
# (for example NVIDIA's published one for ConvNets) do the opposite in each step: they call `torch.cuda.synchronize()`
# and read the loss for the log. First, the idea. Operations on a GPU are put into a *queue*; Python does not wait for
# them. The figure shows a **model** with chosen numbers, not a measurement: in each step, Python takes 2 units to
# queue the work, and the GPU takes 3 units to do it.


# %%
def timeline(steps: int, host: float, work: float, wait: bool) -> tuple[list, list]:
    """Return when Python queues each step and when the GPU runs it, as lists of (start, duration)."""
    handed, done = [], []
    python = gpu = 0.0
    for _ in range(steps):
        handed.append((python, host))
        python += host
        gpu = max(gpu, python)
        done.append((gpu, work))
        gpu += work
        if wait:
            python = gpu
    return handed, done


# %% tags=["slide"]
figure, axes = plt.subplots(2, 1, figsize=(9, 4), sharex=True)
for axis, wait in zip(axes, (False, True), strict=True):
    handed, done = timeline(6, host=2, work=3, wait=wait)
    axis.broken_barh(handed, (1.1, 0.8), color="C4", edgecolor="white")
    axis.broken_barh(done, (0.1, 0.8), color="C0", edgecolor="white")
    for index, ((a, width), (b, length)) in enumerate(zip(handed, done, strict=True), start=1):
        axis.text(a + width / 2, 1.5, index, ha="center", va="center")
        axis.text(b + length / 2, 0.5, index, ha="center", va="center", color="white")
    axis.set_yticks([0.5, 1.5], ["GPU", "Python"])
    end = done[-1][0] + done[-1][1]
    axis.set_title(
        f"{'A value is read in every step' if wait else 'No value is read'}: six steps take {end:g}", loc="left"
    )
axes[1].set_xlabel("time, in units of the model")
plt.show()

# %% [markdown]
# Now we measure on your machine. We run the same 20 steps in two ways: with `.item()` in each step, and with a sum
# that stays on the device and is read at the end. We alternate between the two, so that other programs slow both
# equally.


# %%
def seconds_of_steps(read_each: bool, steps: int = 20) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    total = torch.zeros((), device=device)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(network(inputs), labels)
        loss.backward()
        optimizer.step()
        if read_each:
            loss.item()
        else:
            total += loss.detach()
    total.item()
    return time.perf_counter() - start


network = lecture_net(10, channels=6).to(device)
optimizer = torch.optim.SGD(network.parameters(), lr=0.001)
inputs = torch.rand(16, 3, 32, 32, device=device)
labels = torch.randint(10, (16,), device=device)
seconds_of_steps(read_each=True, steps=5)
pairs = [(seconds_of_steps(read_each=True), seconds_of_steps(read_each=False)) for _ in range(7)]
ratio = sorted(first / second for first, second in pairs)
spread = f"median of 7; from {ratio[0]:.3f} to {ratio[-1]:.3f}"
print(f"on {device}, with .item() in each step / without: {ratio[3]:.3f} ({spread})")
if device.type == "cpu":
    print("A CPU has no queue: an operation finishes before the next line of Python runs. So reading a")
    print("number costs little here, compared with the variation between pairs. On a GPU this code waits.")

# %% [markdown]
# On every machine we can measure **how often** a loop reads a value. PyTorch has one operation for this, which we can
# count:


# %%
class HostReads(TorchDispatchMode):
    """Counts how often Python reads the value of a tensor."""

    reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func.name() == "aten::_local_scalar_dense"
        return func(*args, **(kwargs or {}))


def reads_of(action) -> int:
    with HostReads() as counter:
        action()
    return counter.reads


value = torch.ones(())
reads = {
    "20 steps with .item()": reads_of(lambda: seconds_of_steps(read_each=True)),
    "20 steps with a sum on the device": reads_of(lambda: seconds_of_steps(read_each=False)),
    "`if (x != 0).all():`": reads_of(lambda: bool((value != 0).all())),
    "`float(x)`": reads_of(lambda: float(value)),
}
for name, count in reads.items():
    print(f"{name:35} {count:3}")
assert list(reads.values()) == [21, 1, 1, 1]

# %% [markdown]
# Paceline's loop keeps sums on the device and reads them only when it logs a line (`telemetry.log_every`). On a GPU
# it times its phases with events in the queue, without stopping it. In the run of section 5:

# %%
records = [each for each in events if each["event"] == "step"]
each = records[-1]["step"] // len(records)
print(f"{records[-1]['step']} steps, {len(records)} records: one in {each} steps\n")
run("paceline report runs/autoencoder --timing", seconds=300)
assert len(records) == 39  # every tenth step, and steps 1, 2 and 5

# %% [markdown] tags=["slide"]
# ## Deprecated calls
#
# | the deck, NVIDIA's trainer | today |
# |---|---|
# | `torch.cuda.amp.autocast`, `GradScaler` | `torch.amp.autocast("cuda")`, `torch.amp.GradScaler("cuda")` |
# | `torch.jit.script` | `torch.compile`, `torch.export` |
# | `python -m torch.distributed.launch` | `torchrun` |

# %% [markdown]
# ## 7 What is outdated: deprecated calls, divisibility, MLPerf
#
# Slides are used longer than library versions. How does *your* PyTorch respond to the calls from the deck and from
# NVIDIA's published trainer?


# %%
def fused_gelu(x: torch.Tensor) -> torch.Tensor:  # as in the deck
    return x * 0.5 * (1.0 + torch.erf(x / 1.41421))


def what_it_says(action) -> str:
    """Return the first warning or error of a call, in one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            action()
        except (AttributeError, OSError, RuntimeError, TypeError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    raised = [each for each in caught if issubclass(each.category, (FutureWarning, DeprecationWarning))]
    return f"{raised[0].category.__name__}: {str(raised[0].message).strip().splitlines()[0]}" if raised else "nothing"


old_and_new = {
    "torch.cuda.amp.autocast()": lambda: torch.cuda.amp.autocast(enabled=False),
    "torch.cuda.amp.GradScaler()": lambda: torch.cuda.amp.GradScaler(enabled=False),
    "torch.amp.autocast('cuda')": lambda: torch.amp.autocast("cuda", enabled=False),
    "torch.jit.script(fused_gelu)": lambda: torch.jit.script(fused_gelu),
}
for name, action in old_and_new.items():
    print(f"{name:30} {what_it_says(action)}")

x = torch.linspace(-3, 3, 100)
print(f"\nthe deck's GELU and F.gelu differ by at most {(fused_gelu(x) - F.gelu(x)).abs().max():.1e}")
assert torch.allclose(fused_gelu(x), F.gelu(x), atol=1e-4)

# %%
# %%writefile hello.py
import os

print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}")

# %%
for command in (
    "python -m torch.distributed.launch --nproc-per-node=1 hello.py",
    "torchrun --nproc-per-node=1 hello.py",
):
    print(f"$ {command}")
    try:
        said = run(command, quiet=True, seconds=300)
    except CommandError as error:  # a later version of PyTorch may have removed it
        said = str(error).splitlines()[-1]
    for line in said.splitlines():
        if line.startswith("rank") or any(each in line for each in ("deprecated", "Use torchrun", "No module")):
            print(line.split("Warning: ")[-1])

# %% [markdown]
# The fused GELU also shows that hand-written code is often one library call today (`F.gelu`); for everything else
# there is `torch.compile`. In Paceline, these choices are recipe keys and options: `train.precision`,
# `model.compile`, and `--processes` or torchrun.

# %% [markdown] tags=["slide"]
# ## Sizes that 8 does not divide
#
# - *Tensor Cores*, a GPU's units for matrix products, process *tiles*, for example of 128×128 numbers
# - the unused part of the last tile is computed and discarded
# - the deck's lists are for older libraries: treat them as a prediction until you measure

# %% [markdown]
# The deck lists numbers that should divide the sizes of a layer. They correspond to 16 bytes (minimum) and 128 bytes
# (best, on an A100) of each number type:

# %%
from paceline_advisor.formulas.network import alignment_bytes_multiple, best_tiling, tile_overhead

print("a dimension should be a multiple of      minimum  best (A100)")
for name, size in (("TF32 (4 bytes)", 4), ("FP16, BF16 (2 bytes)", 2), ("INT8 (1 byte)", 1)):
    print(f"{name:38}  {alignment_bytes_multiple(size):8} {alignment_bytes_multiple(size, 128):10}")

# %% tags=["slide"]
widths = np.arange(16, 641, 4)
figure, axes = plt.subplots(1, 2, figsize=(10, 4))
axes[0].plot(widths, [128 * math.ceil(width / 128) for width in widths], drawstyle="steps-mid", label="computed")
axes[0].plot(widths, widths, "--", color="grey", linewidth=1.5, label="needed")
axes[0].set(title="Tiles of 128 columns", xlabel="columns needed", ylabel="columns computed")
axes[0].legend()
axes[1].plot(widths, [100 * best_tiling(4096, int(width), 1024, 108).waste for width in widths], color="C1")
axes[1].set(title="Predicted waste, best tiling, 108 units", xlabel="columns needed", ylabel="% of the work", ylim=0)
plt.show()

# %%
print(f"257 columns instead of 256: {257 / 256 - 1:.2%} more needed, {tile_overhead(256, 257) - 1:.0%} more computed")
print("(256 rows, tiles of 128×128; the right-hand figure has 4096 rows and the best of eight tile sizes.)")
assert math.isclose(tile_overhead(256, 257), 1.494, abs_tol=0.01)

# %% [markdown]
# This is a **prediction**. The lists were written for older libraries; newer ones pad odd sizes themselves, have more
# tile sizes, and can split a product between several units. To know what a shape really costs, measure it on your GPU
# (`paceline doctor RECIPE --measure`). Without a GPU, Paceline predicts the waste of each layer:

# %%
report = run(
    "paceline roofline cifar10_lecture train.precision=bf16 --device a100 --top 3",
    seconds=300,
    quiet=True,
    env={"COLUMNS": "105"},
)
print(report[report.index("products whose tiles") :])

# %% [markdown]
# The output has two parts. The **table** is about tiles: a product of an *m* × *k* and a *k* × *n* matrix is split
# into tiles, and the units process them in *waves*, all units at once. Layer 3 has only 16 columns (a multiple of 8),
# but a tile has 64, so three quarters of each tile are discarded. The rest of its waste is idle units without a tile.
# (*wgrad* is the gradient of the weights; *better n* is a number of columns with less waste.) The **last lines** are
# about multiples of 8: layers with 84 and 10 outputs and the 3 colour channels are not multiples. The network is so
# small that this hardly matters; *lost ms* is the largest possible gain.
#
# ### MLPerf
#
# The deck presents MLPerf's ResNet-50 as the industry's training benchmark. This benchmark ended with Training 4.0.0,
# so there are no new results to compare with. `paceline mlperf RUN` writes a log in MLPerf's format, which the
# published checker accepts. Such a log is not an MLPerf result: only MLCommons publishes results, after review.

# %% [markdown] tags=["slide"]
# ## DDP or FSDP?
#
# - **DDP**: every GPU stores all weights, gradients and optimizer state. Only gradients are sent.
# - **FSDP**: each GPU stores a part. Weights are sent too.
#
# Use DDP if a replica leaves memory for activations, else FSDP. `parallel.strategy: auto` applies this rule.

# %% [markdown]
# ## 8 A tour: many GPUs
#
# The lecture ends with two strategies and a famous example. *DDP* (lab 2a) gives every GPU a *replica*, a complete
# copy of weights, gradients and optimizer state. *FSDP* (lab 2b) distributes them. The lecture's table recommends DDP
# if the model fits comfortably, and FSDP if it does not or if you want a larger batch. Paceline's `parallel.strategy:
# auto` defines "comfortably" as a number: it uses DDP if a replica takes at most 70 % of a GPU's memory, because
# activations need the rest. With AdamW in `float32`, a replica takes 16 bytes per parameter (section 3).

# %% tags=["slide"]
from paceline_advisor.formulas.network import training_state_bytes

gpus = {"V100, 16 GB": 16, "A100, 40 GB": 40, "H100, 80 GB": 80}
models = {"ResNet-50": 25.6e6, "GPT-2, 124M": 124e6, "GPT-2, 355M": 355e6, "GPT-3, 1.3B": 1.3e9, "GPT-3, 6.7B": 6.7e9}
parameters = np.logspace(7, 10, 50)
figure, axis = plt.subplots(figsize=(8.5, 4.5))
axis.plot(parameters, [training_state_bytes(each, states=2) / 1e9 for each in parameters], color="black")
for color, (name, gigabytes) in zip(("C1", "C2", "C3"), gpus.items(), strict=True):
    axis.axhline(0.7 * gigabytes, color=color, linestyle="--")
    axis.text(1.1e7, 0.7 * gigabytes * 1.07, f"70 % of {name}", color=color, fontsize=9)
for name, count in models.items():
    axis.plot(count, training_state_bytes(count, states=2) / 1e9, "o", color="C0")
    axis.annotate(
        name, (count, training_state_bytes(count, states=2) / 1e9), (6, -10), textcoords="offset points", fontsize=9
    )
axis.set(
    xscale="log",
    yscale="log",
    xlabel="parameters",
    ylabel="GB per replica (AdamW)",
    title="Below a line: DDP. Above it: FSDP",
)
plt.show()

# %%
for name, gigabytes in gpus.items():
    print(f"{name}: DDP up to {0.7 * gigabytes * 1e9 / training_state_bytes(1, states=2) / 1e9:.1f} billion parameters")

# %% [markdown]
# The plan of a run shows its strategy and the reason. `--plan-only` does not train; here two processes would share
# this machine:

# %%
plan = run("paceline train autoencoding.yaml --processes 2 --plan-only parallel.device=cpu", quiet=True, seconds=300)
print("\n".join(line for line in plan.splitlines() if line.strip().startswith(("processes", "parallel.strategy"))))

# %% [markdown] tags=["slide"]
# ## ImageNet in one hour
#
# - Goyal et al. 2017: ResNet-50, 90 epochs, 256 GPUs with 32 images each
# - the learning rate grows with the batch, after a warm-up
# - from 29 hours to one hour

# %% [markdown]
# Goyal et al. (2017) trained ResNet-50 on ImageNet (1,281,167 images, 90 epochs) with 256 GPUs, 32 images on each.
# Before, it had taken 29 hours, as NVIDIA's developer site reported at the time. We assume that this is the time with
# 8 GPUs, because the paper's abstract compares with 8. From 8 to 256 GPUs, its *scaling efficiency* (speed-up divided
# by the factor of GPUs) is about 90 %. The *linear scaling rule* for the learning rate starts from 0.1 for a batch of
# 256 (labs 1 and 3 show when it is valid).
#
# **Exercise 4.6.** Calculate the global batch, the learning rate, the number of optimizer steps (each epoch's last
# step takes the remaining images), and the hours.

# %% tags=["exercise"]
global_batch = ...
learning_rate = ...
optimizer_steps = ...
hours = ...

# %% tags=["check"]
with exercise("4.6"):
    assert global_batch == 8192, "the global batch is the images of all GPUs in a step: 256 times 32"
    assert math.isclose(learning_rate, 3.2, rel_tol=1e-6), "linear: 0.1 times the new batch over the old one"
    assert optimizer_steps == 90 * 157, "90 epochs of math.ceil(1281167 / 8192) steps"
    assert math.isclose(hours, 29 / (32 * 0.9), rel_tol=0.01), "32 times as many GPUs at 90 % are 28.8 times as fast"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# <code>global_batch = 256 * 32</code>; the rate grows in proportion to the batch, from 256; the steps of an epoch
# are rounded up; the speed-up is 256 / 8 times the efficiency.
#
# </details>

# %% tags=["answer"]
use_answer("4.6")

# %%
print(f"batch {global_batch:,}, rate {learning_rate:.1f}, {optimizer_steps:,} steps, {hours:.2f} hours")
rate = 90 * 1_281_167 / hours / 3600
print(f"That is {hours * 3600 / optimizer_steps:.3f} s per step, and {rate:,.0f} images per second.")

# %% [markdown]
# *Learnt:* the headline is a simple calculation. The difficulty was to keep the accuracy: 23.74 % error with a batch
# of 8,192, compared with 23.60 % with 256 (Goyal et al., table 3a). They achieved this with the linear rule and a
# *warm-up* (the rate rises gradually in the first epochs).
#
# `paceline scale` predicts such a table from one GPU's throughput and the properties of the network between the GPUs.
# We give it the throughput of one GPU that corresponds to 29 hours on eight GPUs, and compare its prediction with the
# paper.

# %%
one_gpu = 90 * 1_281_167 / (29 * 3600) / 8
asked = f"--cluster big-basin --world-sizes 8,16,32,64,128,256 --batch-per-gpu 32 --throughput {one_gpu:.0f}"
document = run(f"paceline scale resnet50_goyal {asked} --json", quiet=True, seconds=300)
ddp = {row["devices"]: row for row in json.loads(document)["rows"] if row["strategy"] == "ddp"}
gain = ddp[256]["samples_per_second"] / ddp[8]["samples_per_second"]

# %% tags=["slide"]
figure, axis = plt.subplots(figsize=(7.5, 3.5))
counts = sorted(ddp)
for_each = {end: [ddp[n][f"samples_per_second{end}"] / n for n in counts] for end in ("", "_low", "_high")}
efficiency = {end: [100 * each / for_each[""][0] for each in values] for end, values in for_each.items()}
axis.plot(counts, efficiency[""], "o-", label="predicted, with its range")
axis.fill_between(counts, efficiency["_low"], efficiency["_high"], alpha=0.2)
axis.plot(256, 90, "s", markersize=9, label="published: about 90 %")
axis.set(title="ResNet-50 on ImageNet, 32 images on each GPU", xlabel="GPUs", xscale="log", ylim=(0, 115))
axis.set_ylabel("efficiency in %, relative to 8 GPUs")
axis.set_xticks(counts, counts)
axis.minorticks_off()
axis.legend(loc="lower left")
plt.show()

# %%
print(f"From 8 to 256 GPUs: predicted {gain:.1f} times as fast, an efficiency of {gain / 32:.0%}.")
print("Published: about 90 %. The range comes mostly from one GPU's throughput, which all rows share.")
print(f"Loss of efficiency from 8 to 256 GPUs: published about 10 %, predicted {1 - gain / 32:.0%}.")
low, high = (1_281_167 * 90 / 3600 / ddp[256][f"samples_per_second_{end}"] for end in ("high", "low"))
print(f"Predicted for 256 GPUs: {ddp[256]['hours']:.2f} hours, with a range from {low:.2f} to {high:.2f}.")
assert low < hours < high

# %% [markdown] tags=["slide"]
# ## What to remember
#
# - Move the model once, and each batch in every step. Buffers move with the model, plain attributes do not.
# - Weights, gradients and optimizer state have a fixed size; activations grow with the batch.
# - A step costs a + b·B. With small batches, the fixed cost *a* dominates.
# - Read values from the device rarely.
# - Compare a prediction with a measurement, or mark it as a prediction.

# %% [markdown]
# ## Commands for real runs
#
# | question | command |
# |---|---|
# | does it fit, and what uses the memory? | `paceline estimate RECIPE --device h100` |
# | CPU or GPU, which batch? | `paceline bench RECIPE --devices cpu,cuda --batch-sizes 64,4,2` |
# | does my code make steps wait? | `paceline doctor RECIPE` |
# | where was the time spent? | `paceline report RUN --timing` |
# | which shapes waste GPU time? | `paceline roofline RECIPE --device a100` |
# | DDP or FSDP? | `paceline train RECIPE --processes 8 --plan-only` |
# | how many GPUs for one hour? | `paceline plan RECIPE --cluster NAME --deadline 1h`, `paceline scale RECIPE` |
#
# ## Further reading
#
# - Eric Kim, *Accelerating and scaling DNN training (GPU)*, lecture 19 of Data C182, Berkeley, autumn 2024: the
#   demonstrations of this lab.
# - Tianqi Chen, Bing Xu, Chiyuan Zhang, Carlos Guestrin, *Training deep nets with sublinear memory cost*, 2016,
#   arXiv:1604.06174: activation checkpointing.
# - Samyam Rajbhandari, Jeff Rasley, Olatunji Ruwase, Yuxiong He, *ZeRO: memory optimizations toward training trillion
#   parameter models*, 2019, arXiv:1910.02054: the uses of memory, and how to distribute it, as FSDP does.
# - Priya Goyal and others, *Accurate, large minibatch SGD: training ImageNet in 1 hour*, 2017, arXiv:1706.02677.
# - Szymon Migacz, *PyTorch performance tuning guide* (NVIDIA; among PyTorch's tutorials): the deck's list, kept up
#   to date.
# - NVIDIA, *Matrix multiplication background user's guide*: tiles and waves.
