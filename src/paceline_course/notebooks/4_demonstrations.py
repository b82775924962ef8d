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
# - What a training step keeps in memory, and why
# - CPU against GPU, by batch size
# - What makes a step wait
# - DDP or FSDP, and ImageNet in one hour

# %% [markdown]
# **What you will be able to do**
#
# - move tensors and modules between devices, and read the message when two of them are not on the same one;
# - predict the memory of a training step by its four causes, and count it without a GPU;
# - say from a few measurements where a GPU begins to pay, and how far such a line may be trusted;
# - find what makes a step wait, and replace calls that PyTorch has retired;
# - decide between DDP and FSDP, and do the arithmetic of "ImageNet in one hour".
#
# **What you need to know before.** Python, and a training loop in PyTorch: forward pass, loss, backward pass,
# optimizer step. Labs 1 and 2a for the words *batch*, *process*, *rank* and *DDP*; all others are explained here.
#
# **Time.** About 90 minutes with the exercises. The notebook itself needs one to two minutes of processor time. No
# GPU is needed; where there is one, it is used.
#
# Most of this lab follows lecture 19 of Data C182 at Berkeley (Eric Kim, *Accelerating and scaling DNN training*,
# autumn 2024), called *the lecture* below, and a slide deck of the French computing centre IDRIS (*Deep Learning
# Optimisé*), called *the deck*. We run what they show, and we check what they say: not all of it stands up.

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
from paceline_course import exercise, run, use_style
from paceline_course.shell import CommandError

use_style()
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
cores = torch.get_num_threads()
torch.set_num_threads(1)  # steady times, also on a machine with other work

# %%
print(f"PyTorch {torch.__version__}, {cores} threads for the CPU, device of this notebook: {device}")

# %% [markdown] tags=["slide"]
# ## A tensor lies on one device
#
# - `torch.zeros(2, 3, device=device)` is made there
# - `x.to(device)` returns a copy there, and leaves `x` where it was
# - an operation on two tensors needs both on the same device

# %% [markdown]
# ## 1 Tensors and devices
#
# Every tensor lies on a *device*: in the machine's main memory (`cpu`), or in the memory of a GPU (`cuda:0`,
# `cuda:1`, …). So that this lab works on every machine, we use a third one, which every PyTorch has: `meta`. A
# tensor there has a shape, a type and a device, but no numbers: operations on it work out shapes and compute
# nothing.

# %%
second = device if device.type == "cuda" else torch.device("meta")

made_there = torch.zeros(2, 4, device=second)  # no copy: it is made where it shall be
on_cpu = torch.ones(2, 4)
copied = on_cpu.to(second)

print(f"made there: {made_there.device},   copied: {copied.device},   the original: {on_cpu.device}")

# %% [markdown]
# When is `.to` a copy? Only if something has to change. If the tensor is there already, you get *the same tensor*
# back, and a change of one is a change of the other. The same holds for tensors made from a NumPy array: they share
# its memory.

# %%
same = on_cpu.to("cpu")
always_a_copy = on_cpu.to("cpu", copy=True)
same[0, 0] = 7
print(f"`.to` a device where it is already: the same object? {same is on_cpu}; it shows {on_cpu[0, 0]:g}")
print(f"with copy=True: the same object? {always_a_copy is on_cpu}; it shows {always_a_copy[0, 0]:g}")

array = np.zeros(3)
shared = torch.from_numpy(array)
array[0] = 5
print(f"a tensor from an array follows it: {shared.tolist()}")
assert same is on_cpu
assert always_a_copy[0, 0] == 1
assert shared[0] == 5

# %% [markdown]
# And now the mistake that everybody makes once: one operation, two devices.

# %% tags=["slide"]
try:
    on_cpu + copied
except RuntimeError as error:
    message = str(error)
print(f"RuntimeError: {message}")
assert "device" in message

# %% [markdown]
# How to read it: it names the two devices. One of them is where your model is, as a rule; the other is that of the
# tensor that you forgot to move. PyTorch never moves it for you, because a hidden copy in every step would be slow,
# and nobody would see why.
#
# The lecture's own message, of a GPU, was "Expected all tensors to be on the same device, but found at least two
# devices, cuda:0 and cpu!". (On `meta` not every operation looks as carefully as this one: some go on, with numbers
# that mean nothing. It is for shapes, never for results.)
#
# **Exercise 4.1.** A batch is seldom one tensor. Write `to_device`, which takes a tensor, or a `dict`, `list` or
# `tuple` of such things, however deep, and returns the same with every tensor on `device`. What is no tensor stays
# as it is.


# %% tags=["exercise"]
def to_device(batch, device):
    """The same structure, every tensor of it on ``device``."""
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
    assert moved["size"][0] == 28, "a number should stay as it is"
    assert moved["id"] == "a", "a string should stay as it is"
    assert given["pictures"].device.type == "cpu", "the batch that was given should not be changed"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# Three cases with <code>isinstance</code>, each a line: a tensor is moved; a dict becomes a dict of moved values; a
# list or tuple becomes <code>type(batch)(… for each in batch)</code>. Call the function itself for what is inside.
#
# </details>


# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
def to_device(batch, device):
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(each, device) for each in batch)
    return batch


# %% [markdown]
# *What was learnt:* one function, called once where the batch enters the step, is all the device code that a
# training loop needs. (For named tuples and data classes a real one has two more cases.)

# %% [markdown] tags=["slide"]
# ## `module.to(device)` moves what the module knows of
#
# - parameters: yes
# - buffers (`register_buffer`): yes
# - a tensor that is a plain attribute: **no**

# %% [markdown]
# ## 2 Modules
#
# `module.to(device)` moves a whole network. Unlike a tensor's, it changes the module *itself*, and returns it. Here
# is the lecture's network, an *autoencoder*: the encoder squeezes a picture of 28×28 pixels into 64 numbers (the
# *code*), and the decoder draws it again from them. It goes into a file, since a training will import it later (the
# rest of the file is explained in section 5).

# %%
# %%writefile autoencoding.py
"""The lecture's autoencoder, and a task for Paceline: pictures in, the same pictures out."""

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
    """All digits as floats in [0, 1], [1797, 1, 28, 28]."""
    pixels = torch.from_numpy(read_digits().images).permute(0, 3, 1, 2) / 255
    return F.interpolate(pixels, size=28, mode="bilinear")


class Autoencoding(paceline.Task):
    unit, headline = "images", "unexplained"
    metrics = (Metric(name="loss"), Metric(name="unexplained", of="squared_error", per="squares", scale=100.0))

    def data_facts(self, world):
        """How many pictures there are to train with; the last ones are held out."""
        self.pictures = read_pictures()
        return DataFacts(train_samples=len(self.pictures) - HELD_OUT, evaluation_samples=HELD_OUT)

    def open_pipeline(self, placement):
        return SimplePipeline(self.read, evaluation_samples=HELD_OUT, placement=placement, name="digit")

    def read(self, part, training):
        """What is shown and what is wanted: the same."""
        first = 0 if training else len(self.pictures) - HELD_OUT
        pictures = self.pictures[torch.tensor(part.ids) + first]
        return pictures, pictures

    def build_model(self):
        return Autoencoder()

    def loss(self, model, batch):
        return F.mse_loss(model(batch.inputs).float(), batch.targets)

    def score(self, model, batch):
        """One value for each picture: its loss, and what the metric `unexplained` divides."""
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
# The lecture's conclusion is that `model.to` copies all *parameters*. It also moves *buffers*: tensors that belong
# to the module's state but are not trained, such as BatchNorm's running mean. But a tensor that is only an
# attribute stays behind.

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
# **Exercise 4.2.** This module works on the CPU and fails on every other device, and its mean is missing in every
# checkpoint. Mend it with one line in `__init__`.


# %% tags=["exercise"]
class Centre(nn.Module):
    """Takes the mean picture away."""

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
    assert "mean" in centre.state_dict(), "the mean is not in the state_dict, so no checkpoint has it: register it"
    assert centre.to("meta").mean.is_meta, "the mean stayed on the CPU when the module moved"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# <code>self.register_buffer(name, tensor)</code> takes the place of the assignment; afterwards
# <code>self.name</code> is the tensor, as before.
#
# </details>


# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
class Centre(nn.Module):
    """Takes the mean picture away."""

    def __init__(self, mean: torch.Tensor):
        super().__init__()
        self.register_buffer("mean", mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.mean


# %% [markdown]
# *What was learnt:* a module moves, saves and loads what it knows of: parameters and buffers.
#
# The lecture's two changes that take a training to a GPU are then two lines, and they are harmless on a CPU. This
# is called *device-agnostic* code:

# %%
model = Centre(torch.full((1, 28, 28), 0.3)).to(device)  # change 1: the model, once

batch = {"pictures": torch.rand(8, 1, 28, 28), "labels": torch.arange(8)}
batch = to_device(batch, device)  # change 2: what goes in, in every step

print(f"model and batch on {device}: the mean over all pixels is now {model(batch['pictures']).mean():.2f}")

# %% [markdown] tags=["slide"]
# ## Four uses of memory
#
# - **weights**: the parameters
# - **gradients**: one number for each
# - **optimizer state**: SGD none, momentum one, Adam two for each
# - **activations**: what the forward pass keeps for the backward pass
#
# The first three do not depend on the batch. The fourth grows with it.

# %% [markdown]
# ## 3 Memory by cause
#
# A GPU's memory is small and does not swap: what does not fit ends the run. The lecture names four uses, and we
# shall predict each by arithmetic before we count it.
#
# **Weights, gradients, optimizer state.** A number in `float32` takes 4 bytes. The lecture's second network is a
# small convolutional network for CIFAR-10 (pictures of 32×32 pixels in colour); it has 120,078 parameters. On its
# GPU the lecture printed, after `net.to(device)`,
#
#     (post net.to) GPU max_memory_allocated: 0.481792 MB
#
# which is a little more than 4 bytes for each parameter. The reason: PyTorch's allocator on a GPU hands out memory
# in blocks, and rounds each *tensor* up to a multiple of 512 bytes.

# %%
network = lecture_net(10)
numbers = [each.numel() for each in network.parameters()]
print(f"numbers in each of its {len(numbers)} tensors: {numbers}")
print(f"parameters: {sum(numbers):,}   bytes without rounding: {4 * sum(numbers):,}   the lecture printed 481,792")
assert sum(numbers) == 120_078

# %% [markdown]
# **Exercise 4.3.** Write `allocated_bytes`: what such an allocator counts for `float32` tensors of these sizes.
# Then see whether you get the lecture's figure, to the byte.


# %% tags=["exercise"]
def allocated_bytes(numbers: list[int]) -> int:
    """Bytes handed out for tensors with so many numbers each: every tensor rounded up to a multiple of 512 bytes."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("4.3"):
    assert allocated_bytes([1]) == 512, "one number takes 4 bytes, and is handed a block of 512"
    assert allocated_bytes([128]) == 512, "128 numbers fill a block of 512 bytes exactly: nothing is added"
    assert allocated_bytes([129, 1]) == 1536, (
        "each tensor is rounded by itself: 129 numbers take two blocks, 1 takes one"
    )
    found = allocated_bytes([each.numel() for each in lecture_net(10).parameters()])
    assert found == 481_792, f"of the lecture's network it should be 481,792, and is {found:,}"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# The number of blocks of a tensor is <code>math.ceil(4 * n / 512)</code>.
#
# </details>


# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
def allocated_bytes(numbers: list[int]) -> int:
    return sum(math.ceil(4 * each / 512) * 512 for each in numbers)


# %%
print(f"predicted: {allocated_bytes(numbers) / 1e6} MB; printed in the lecture: 0.481792 MB")
assert allocated_bytes(numbers) == 481_792


# %% [markdown]
# *What was learnt:* memory is arithmetic. Gradients take the same again, an optimizer's state nothing (plain SGD),
# the same (momentum) or twice the same (Adam): 8 to 16 bytes for each parameter in all.
#
# **Activations.** To compute a gradient, most operations need their own input or output again. So the forward pass
# keeps these tensors until the backward pass has used them. PyTorch lets us look: it calls two functions of ours
# (*saved-tensor hooks*) whenever such a tensor is kept and used again. We count the bytes of each piece of memory
# once, and leave out the weights.
#
# On the `meta` device this needs no GPU, no time and no memory, since shapes are all we want to know.


# %% tags=["setup"]
def kept_bytes(model: nn.Module, inputs: torch.Tensor, loss) -> dict[str, int]:
    """Bytes that a forward pass keeps for the backward pass, by shape and type of the tensor."""
    weights = {id(each.untyped_storage()) for each in model.parameters()}
    storages, kept = {}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in weights and id(storage) not in storages:
            storages[id(storage)] = storage  # held, so that its id stays its own
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
print(f"The output of the first ReLU alone is {share:.0%}; max-pooling keeps positions as int64, 8 bytes each.")
assert sum(kept.values()) > 50 * 4 * sum(numbers)

# %% [markdown]
# **Exercise 4.4.** Now predict the same for the autoencoder: how many *numbers* are kept for one picture? It is a
# convolution, a ReLU, a convolution, and so on. A convolution keeps its input, a ReLU its output (which *is* the
# next convolution's input, so it counts once), the sigmoid its output, and the mean squared error its two inputs
# (the output and the picture, both counted already). Fill in channels × height × width; each convolution with
# stride 2 halves height and width, each transposed one doubles them.

# %% tags=["exercise"]
numbers_kept = {
    "the picture": 1 * 28 * 28,
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
    assert not missing, f"still to fill in: {', '.join(missing)}"
    right = {"encoder's first": 16 * 14**2, "encoder's second": 32 * 7**2, "the code": 64}
    right |= {"decoder's first": 32 * 7**2, "decoder's second": 16 * 14**2, "sigmoid": 28**2}
    for part, value in right.items():
        name = next(each for each in numbers_kept if part in each)
        assert numbers_kept[name] == value, f"{name}: {numbers_kept[name]:,} is not channels × height × width there"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# Heights and widths are 28, 14, 7, 1 on the way in, and 7, 14, 28 on the way out. The last convolution of the
# encoder covers the whole 7×7 and leaves 64 channels of one number.
#
# </details>

# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
numbers_kept = {
    "the picture": 1 * 28 * 28,
    "after the encoder's first ReLU": 16 * 14 * 14,
    "after the encoder's second ReLU": 32 * 7 * 7,
    "the code": 64,
    "after the decoder's first ReLU": 32 * 7 * 7,
    "after the decoder's second ReLU": 16 * 14 * 14,
    "after the sigmoid": 1 * 28 * 28,
}

# %%
predicted = 4 * sum(numbers_kept.values())
one_picture = torch.zeros(1, 1, 28, 28, device="meta")
counted = kept_bytes(Autoencoder().to("meta"), one_picture, lambda output: F.mse_loss(output, one_picture))
print(f"predicted {predicted:,} bytes for a picture, counted {sum(counted.values()):,}")
assert sum(counted.values()) == predicted

# %% [markdown]
# *What was learnt:* activations are a sum over feature maps: channels × height × width × 4 bytes, times the batch.


# %% tags=["slide"]
def causes(model: nn.Module, kept_by_picture: int, batch: int) -> dict[str, int]:
    """Bytes by cause with Adam."""
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
print(f"Autoencoder: {fixed / 1e6:.2f} MB for any batch, and {predicted / 1e3:.1f} kB for each picture:")
print(f"activations overtake the rest at a batch of {fixed / predicted:.0f}.")

# %% [markdown]
# The picture says which remedy helps. If activations are the problem, a smaller batch, or *activation
# checkpointing*, gives memory back. If the other three are, as in large language models, a smaller batch changes
# nothing, and the state must be spread over several GPUs (FSDP, section 8).
#
# ### A step, operation by operation
#
# We can also watch memory through a whole step. The class below sees every operation that PyTorch does, notes each
# new piece of memory, and is told when it is freed.


# %%
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors that were made inside and still live, after each operation."""

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
    """Bytes after each operation of a forward and a backward pass."""
    with LiveBytes() as memory:
        loss(model(inputs)).backward()
    model.zero_grad()
    return memory.history


history = watch_step(lecture_net(10).to("meta"), pictures, lambda output: F.cross_entropy(output, labels))

# %% [markdown] tags=["slide"]
# ## Activation checkpointing
#
# - keeps only the borders between groups of layers
# - computes a group again when the backward pass gets there
# - less memory for one more forward pass
# - of *n* equal layers, √*n* groups are best (Chen et al. 2016)

# %% [markdown]
# Here are sixteen equal layers in four groups, beside the lecture's network with its first three layers done so.

# %% tags=["slide"]
from torch.utils.checkpoint import checkpoint

layers = [layer for _ in range(16) for layer in (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())]
stack = nn.Sequential(*layers).to("meta")
maps = torch.zeros(64, 32, 14, 14, device="meta")
plain = watch_step(stack, maps, torch.sum)


class Again(nn.Module):
    """Layers whose activations are not kept, but computed again in the backward pass."""

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
uneven = (("all kept", history), ("first three layers computed again", again))
equal = (("all kept", plain), ("four groups computed again", saved))
for axis, title, curves in zip(axes, ("Convolutional network", "Sixteen equal layers"), (uneven, equal), strict=True):
    for label, curve in curves:
        axis.plot(np.array(curve) / 1e6, label=label)
    axis.set(title=title, xlabel="operation of the step", ylim=(0, 1.3 * max(curves[0][1]) / 1e6))
    axis.legend(fontsize=9, loc="upper right")
axes[0].set_ylabel("MB of tensors made in the step")
plt.show()

# %%
print(f"sixteen layers: a peak of {max(plain) / 1e6:.1f} MB, in four groups {max(saved) / 1e6:.1f} MB")
print(f"convolutional network: a peak of {max(history) / 1e6:.1f} MB, in part again {max(again) / 1e6:.1f} MB")
assert max(saved) < 0.65 * max(plain)
assert max(again) > 0.9 * max(history)

# %% [markdown]
# It helps sixteen equal layers, and does nothing for the network on the left: a single layer makes its peak, and
# when that layer is computed again, the peak is there again. Where the peak lies decides what helps. So look before
# you choose.
#
# ### The instrument: `paceline estimate`
#
# `paceline estimate` does a recipe's own step on tensors without numbers, as we did, and counts in addition what a
# GPU's libraries take for themselves. We can hold it against the lecture, which printed the peak of its training
# with a batch of 64: 96.306688 MB. The shipped recipe `cifar10_lecture` is that training. The slides show a GeForce
# RTX 3080 Ti as the lecturer's GPU; the nearest one that Paceline knows is the RTX 3090, of the same generation:

# %%
document = run("paceline estimate cifar10_lecture --device rtx3090 --json", quiet=True, seconds=300)
peak = json.loads(document)["peak"]
figures = {
    "counted above, tensors of the step only": max(history),
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
    figures["measured here, on yours"] = torch.cuda.max_memory_allocated()
for name, size in figures.items():
    print(f"{name:40} {size / 1e6:6.1f} MB")
print(f"the prediction is {peak['allocated_bytes'] / 96_306_688 - 1:+.1%} off; by cause, in MB:")
print({cause: round(size / 1e6, 2) for cause, size in peak["causes"].items() if size > 1e5})

# %% [markdown]
# *Temporary* are gradients of activations on their way through the network, *workspace* is what the libraries that
# compute products hold. Neither is among the lecture's four uses, and here they make the larger part of the peak.
#
# And this is how it looks as a report, for the autoencoder on a GPU that you need not have. The recipe is the file
# that section 5 trains:

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
# **Question.** Gradients are as large as weights. Why do they take almost nothing at the autoencoder's peak?
#
# <details><summary>Answer</summary>
#
# The peak lies early in the backward pass, which makes the gradients of the weights layer by layer, from the last
# to the first. At that moment hardly any are there yet; when all are there, the activations are gone.
#
# </details>

# %% [markdown] tags=["slide"]
# ## CPU against GPU: the lecture's table
#
# | batch | CPU, images/s | GPU, images/s |
# |---|---|---|
# | 64 | 1474 | 5369 |
# | 4 | 1350 | 1633 |
# | 2 | 860 | 937 |
#
# "The CPU doesn't always outperform the GPU!", the slide says. Look again: in which rows does it?

# %% [markdown]
# ## 4 CPU against GPU, by batch size
#
# The lecture trained its small convolutional network on CIFAR-10 for an epoch, with two processes that read data,
# and printed the table above (Data C182, lecture 19; reading is part of the figures). First, what does the table
# say?

# %%
lecture = {64: (1474, 5369), 4: (1350, 1633), 2: (860, 937)}  # images a second of CPU and GPU
for size, (cpu, gpu) in lecture.items():
    step = f"{size / cpu * 1e3:5.2f} ms and {size / gpu * 1e3:5.2f} ms"
    print(f"batch {size:2}: GPU / CPU = {gpu / cpu:.2f},  a step takes {step}")
assert all(gpu > cpu for cpu, gpu in lecture.values())

# %% [markdown]
# The GPU is ahead in **every** row. The sentence on the slide was probably meant the other way round ("the GPU
# doesn't always outperform the CPU"), and the table does not show that either. What it does show is worth more: the
# advantage falls with the batch, from 3.6 to 1.1.
#
# Now on your machine: the same network and optimizer, on random pictures that lie on the device already, so that
# nothing but computing is timed. Note the two lines that make such a timing honest. The first steps are not timed,
# since they make memory and choose kernels; and a GPU is asked to finish before each look at the clock.


# %%
def seconds_per_step(batch: int, device: torch.device, rounds: int = 3) -> float:
    """The fastest of some rounds, each of several training steps."""
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
            torch.cuda.synchronize()  # the queue is empty: now the clock may be read
        times.append((time.perf_counter() - start) / steps)
    return min(times[1:])  # the first round was the warm-up


sizes = [2, 4, 16, 64]
torch.set_num_threads(cores)  # all that the CPU has, against the GPU
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
print("The lecture's figures are of other machines, and include reading: compare slopes, not heights.")
print("(Where your own line has a dip, something else was running; run the timing again.)")

# %% [markdown]
# **Why does the advantage fall?** The lecture says: with a small batch most of the time goes into communication
# between CPU and GPU. We can check that with its own numbers. How many bytes go to the GPU for a batch of 2, and
# how long can that take, even over a slow connection of 1 GB/s?

# %%
batch_bytes = 2 * 3 * 32 * 32 * 4 + 2 * 8  # two pictures in float32, two labels in int64
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
# So it is not the amount of data. There must be a **fixed cost for each step**, whatever the batch. Candidates are
# Python itself, the processes that read, handing the batch over, and starting each operation, of which there are as
# many for 2 pictures as for 64; the table does not tell them apart. The time of a step is then a line,
#
# `t(B) = a + b · B`
#
# with the fixed cost *a* and the cost *b* of a picture.

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
    print(f"     each further picture costs {few:.2f} ms from 2 to 4, {many:.2f} ms from 4 to 64")
assert np.diff(milliseconds["CPU"] / batch_sizes).max() < 0, "a picture costs the less, the larger the batch"

# %% [markdown]
# The GPU's three figures lie on a line almost exactly. The CPU's do not: each *further* picture costs it about twice
# as much from 4 to 64 as from 2 to 4. (On average a picture still costs the less, the larger the batch is.) Each of
# them is a single figure with a scatter of its own, which the table does not tell, so one of them may just be off.
#
# Compare the fixed costs *a* through batches 2 and 4, too: the CPU's is nearly as large as the GPU's, though it hands
# nothing over. So most of it must be what both share. What sets the GPU apart in this table is its small *b*.
#
# **Exercise 4.5.** At which batch do two such lines meet? Below it the CPU would win.


# %% tags=["exercise"]
def crossover(cpu: tuple[float, float], gpu: tuple[float, float]) -> float:
    """The batch at which a_cpu + b_cpu B = a_gpu + b_gpu B, for lines given as (a, b)."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("4.5"):
    found = crossover((1.0, 2.0), (5.0, 1.0))
    assert abs(found - 4.0) < 1e-9, f"1 + 2 B and 5 + B meet at B = 4 (both are 9), and not at {found:g}"
    found = crossover((0.5, 0.5), (2.0, 0.25))
    assert abs(found - 6.0) < 1e-9, f"0.5 + 0.5 B and 2 + 0.25 B meet at B = 6 (both are 3.5), and not at {found:g}"
    assert abs(crossover((1.0, 2.0), (2.0, 1.6)) - 2.5) < 1e-9, (
        "1 + 2 B and 2 + 1.6 B meet at B = 2.5: not a whole number"
    )

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# Bring both terms with B to one side: (b_cpu − b_gpu) B = a_gpu − a_cpu.
#
# </details>


# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
def crossover(cpu: tuple[float, float], gpu: tuple[float, float]) -> float:
    return (gpu[0] - cpu[0]) / (cpu[1] - gpu[1])


# %% [markdown] tags=["slide"]
# ## Where would the CPU win?
#
# - a step takes `a + b · B`: a fixed cost, and a cost for each picture
# - the lecture's figures, with two lines through them: two answers

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
    axis.set(title=f"{title}: they meet at {meet:.1f}", xlabel="batch size", ylim=(0, 6))
axes[0].set_ylabel("ms for a step")
axes[0].legend(fontsize=9)
plt.show()

# %%
for title, lines in (("all three", through_all), ("the two smallest", through_small)):
    print(f"through {title}: crossover at {crossover(lines['CPU'], lines['GPU']):.1f} images")
print(f"measured at 2 images: CPU {lecture[2][0]}, GPU {lecture[2][1]} images/s: the GPU is ahead there")
print(f"Wanted for the CPU to win with a batch of 1: a step in less than {sum(through_small['GPU']):.2f} ms;")
print(f"its line says {sum(through_small['CPU']):.2f} ms.")
assert crossover(through_small["CPU"], through_small["GPU"]) < 1 < crossover(through_all["CPU"], through_all["GPU"])

# %% [markdown]
# *What was learnt:* two answers, and they differ. The line through all three puts the crossover just above 2
# images, but it does not fit, and the table itself contradicts it: at 2 images the GPU is ahead. The line through
# the two smallest batches puts it below one image, so that on that machine and with that network the CPU would
# never win; that is an **extrapolation**, below everything that was measured. What may be said: near one or two
# images the two are about equal there.
#
# For the CPU to win, its whole step must take less than the GPU's whole step. The smaller the network and the batch,
# the more of the GPU's step is its fixed cost. That is what the slide's rules of thumb (a model and a batch that are
# large enough) are about.
#
# For real runs, `paceline bench cifar10_lecture data.path=… --devices cpu,cuda --batch-sizes 64,4,2 --parts
# together` makes the table, with intervals.

# %% [markdown] tags=["slide"]
# ## Train the autoencoder
#
# A *task* says what is learned: data, network, loss, metrics. The loop is Paceline's.
#
# `paceline train autoencoding.yaml`

# %% [markdown]
# ## 5 The autoencoder learns to draw
#
# In `autoencoding.py` above, the class `Autoencoding` is all that Paceline needs to train the lecture's autoencoder
# on scikit-learn's digits: how many pictures there are, how a batch of them is read, the network, the loss, and a
# score for each held-out picture. The metric *unexplained* is the squared error over the squares of the pixels, in
# percent: 100 for an empty page.
#
# The devices of sections 1 and 2 do not occur in it: the loop moves the model and the batches, wherever it runs.

# %%
run("paceline train autoencoding.yaml --run-dir runs/autoencoder --processes 1 parallel.threads=1", seconds=300)
events = [json.loads(line) for line in Path("runs/autoencoder/events.jsonl").read_text().splitlines()]

# %% [markdown]
# A *checkpoint* was saved every 30 steps. Its weights are a safetensors file, which any program may read, so we can
# look at what the network drew at each of them. These pictures were held out: it never trained on them.

# %% tags=["slide"]
from safetensors.torch import load_file

held_out = read_pictures()[-297:]
shown = held_out[[0, 1, 2, 3, 4, 5, 7, 9]]
steps = [30, 60, 90, 150, 360]
rows = {"held-out pictures": shown}
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
axis.plot(
    [each["step"] for each in scores], [each["unexplained"] for each in scores], "o-", label="as the run logged it"
)
axis.plot(steps, [100 * errors[step].item() for step in steps], "s", color="C1", label="computed here from checkpoints")
axis.set(title="How much of a held-out picture is not drawn", xlabel="step", ylabel="% unexplained", ylim=0)
axis.legend()
plt.show()

logged = {each["step"]: each["unexplained"] for each in scores}
print(f"unexplained after 30 steps {logged[30]:.1f} %, after 360 steps {logged[360]:.1f} %")
assert logged[360] < 5 < logged[30]
assert all(abs(100 * errors[step].item() - logged[step]) < 0.5 for step in steps)

# %% [markdown]
# The two agree: what the run logged is what its checkpoint does. 784 pixels went through 64 numbers and came out
# again. Do not be too impressed: scikit-learn's digits have 8×8 pixels, and were stretched to the 28×28 that the
# lecture's network wants. So each of these pictures holds 64 numbers to begin with, and our figures show a network that
# learns, not how well it compresses.

# %% [markdown] tags=["slide"]
# ## "Avoid synchronisation"
#
# - A GPU works off a queue that Python fills.
# - `.item()`, `print(tensor)` and `if tensor:` need a *value*: Python waits until the queue is empty.
# - Then the GPU waits for Python to fill it again.

# %% [markdown]
# ## 6 What makes a step wait
#
# The deck's list of good practice says: avoid unnecessary synchronisation between CPU and GPU. Some training loops
# (NVIDIA's published one for ConvNets, among others) do the contrary in each step: a `torch.cuda.synchronize()`,
# and a loss that is read for the log. First, the idea. Operations on a GPU go into a *queue*: Python only hands
# them over, and goes on. The drawing is a **model**, with numbers chosen for the drawing, and not a measurement:
# handing a step over takes Python 2 units, and doing it takes the GPU 3.


# %%
def timeline(steps: int, host: float, work: float, wait: bool) -> tuple[list, list]:
    """When Python hands steps over and when the GPU does them, as (start, duration)."""
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
    axis.set_title(f"{'A value is read in every step' if wait else 'Nobody asks'}: six steps take {end:g}", loc="left")
axes[1].set_xlabel("time, in units of the model")
plt.show()

# %% [markdown]
# Now a measurement on your machine. The same 20 steps, once with `.item()` in each of them and once with sums that
# stay on the device and are read at the end; in turns, so that whatever slows the machine slows both.


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
spread = f"middle of 7; from {ratio[0]:.3f} to {ratio[-1]:.3f}"
print(f"on {device}, with .item() in each step / without: {ratio[3]:.3f} ({spread})")
if device.type == "cpu":
    print("A CPU has no queue: an operation is finished before the next line of Python runs. So reading")
    print("a number costs little here, beside the spread from pair to pair. The same code on a GPU waits.")

# %% [markdown]
# What can be told on every machine is **how often** a loop asks for a value. PyTorch has one operation for it,
# which we can count:


# %%
class HostReads(TorchDispatchMode):
    """Counts how often a value of a tensor is asked for by Python."""

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
# Paceline's loop keeps sums on the device and reads them when a line of the log is due (`telemetry.log_every`). On
# a GPU its phases are timed by events in the queue, not by stopping it. In the run of section 5:

# %%
records = [each for each in events if each["event"] == "step"]
each = records[-1]["step"] // len(records)
print(f"{records[-1]['step']} steps, {len(records)} records: one in {each} steps\n")
run("paceline report runs/autoencoder --timing", seconds=300)
assert len(records) == 39  # and those of steps 1, 2 and 5

# %% [markdown] tags=["slide"]
# ## Calls that have been retired
#
# | the deck, NVIDIA's trainer | today |
# |---|---|
# | `torch.cuda.amp.autocast`, `GradScaler` | `torch.amp.autocast("cuda")`, `torch.amp.GradScaler("cuda")` |
# | `torch.jit.script` | `torch.compile`, `torch.export` |
# | `python -m torch.distributed.launch` | `torchrun` |

# %% [markdown]
# ## 7 What is dated: retired calls, divisibility, MLPerf
#
# Slides live longer than libraries. What does *your* PyTorch say to the calls of the deck and of NVIDIA's published
# trainer?


# %%
def fused_gelu(x: torch.Tensor) -> torch.Tensor:  # as in the deck
    return x * 0.5 * (1.0 + torch.erf(x / 1.41421))


def what_it_says(action) -> str:
    """The first warning or error of a call, in one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            action()
        except (AttributeError, OSError, RuntimeError, TypeError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    told = [each for each in caught if issubclass(each.category, (FutureWarning, DeprecationWarning))]
    return f"{told[0].category.__name__}: {str(told[0].message).strip().splitlines()[0]}" if told else "nothing"


old_and_new = {
    "torch.cuda.amp.autocast()": lambda: torch.cuda.amp.autocast(enabled=False),
    "torch.cuda.amp.GradScaler()": lambda: torch.cuda.amp.GradScaler(enabled=False),
    "torch.amp.autocast('cuda')": lambda: torch.amp.autocast("cuda", enabled=False),
    "torch.jit.script(fused_gelu)": lambda: torch.jit.script(fused_gelu),
}
for name, action in old_and_new.items():
    print(f"{name:30} {what_it_says(action)}")

x = torch.linspace(-3, 3, 100)
print(f"\nthe deck's GELU beside F.gelu: at most {(fused_gelu(x) - F.gelu(x)).abs().max():.1e} apart")
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
    except CommandError as error:  # a later PyTorch may have removed it
        said = str(error).splitlines()[-1]
    for line in said.splitlines():
        if line.startswith("rank") or any(each in line for each in ("deprecated", "Use torchrun", "No module")):
            print(line.split("Warning: ")[-1])

# %% [markdown]
# The fused GELU shows a second thing: what had to be written by hand is one library call today (`F.gelu`), and for
# all else there is `torch.compile`. In Paceline the same choices are keys of the recipe: `train.precision`,
# `model.compile`, and `--processes` or torchrun.

# %% [markdown] tags=["slide"]
# ## Sizes that 8 does not divide
#
# - *Tensor Cores*, a GPU's units for products, work on *tiles*, of 128×128 numbers for example
# - what hangs over the last tile is computed and thrown away
# - the deck's lists were written for older libraries: a prediction, until it is measured

# %% [markdown]
# The deck lists numbers that should divide the sizes of a layer. They are 16 bytes (at least) and 128 bytes (best,
# on an A100) in numbers of each type:

# %%
from paceline_advisor.formulas.network import alignment_bytes_multiple, best_tiling, tile_overhead

print("a dimension should be a multiple of     at least   best (A100)")
for name, size in (("TF32 (4 bytes)", 4), ("FP16, BF16 (2 bytes)", 2), ("INT8 (1 byte)", 1)):
    print(f"{name:38}  {alignment_bytes_multiple(size):8} {alignment_bytes_multiple(size, 128):10}")

# %% tags=["slide"]
widths = np.arange(16, 641, 4)
figure, axes = plt.subplots(1, 2, figsize=(10, 4))
axes[0].plot(widths, [128 * math.ceil(width / 128) for width in widths], drawstyle="steps-mid", label="computed")
axes[0].plot(widths, widths, "--", color="grey", linewidth=1.5, label="asked for")
axes[0].set(title="Tiles of 128 columns", xlabel="columns asked for", ylabel="columns computed")
axes[0].legend()
axes[1].plot(widths, [100 * best_tiling(4096, int(width), 1024, 108).waste for width in widths], color="C1")
axes[1].set(title="Predicted waste, best tiling, 108 units", xlabel="columns asked for", ylabel="% of the work", ylim=0)
plt.show()

# %%
print(
    f"257 columns instead of 256: {257 / 256 - 1:.2%} more asked for, {tile_overhead(256, 257) - 1:.0%} more computed"
)
print("(256 rows, tiles of 128×128; the right-hand figure has 4096 rows, and takes the best of eight kinds of tile.)")
assert math.isclose(tile_overhead(256, 257), 1.494, abs_tol=0.01)

# %% [markdown]
# Read it as a **prediction**. The lists were written for older libraries; newer ones pad odd sizes themselves, have
# more kinds of tiles, and let several units share one. What a shape really costs can only be measured, on the GPU
# in question (`paceline doctor RECIPE --measure`). What Paceline predicts of a network, layer by layer, it says
# without one:

# %%
report = run(
    "paceline roofline cifar10_lecture train.precision=bf16 --device a100 --top 3",
    seconds=300,
    quiet=True,
    env={"COLUMNS": "105"},
)
print(report[report.index("products whose tiles") :])

# %% [markdown]
# Two different things stand here. The **table** is about tiles: a product of an *m* × *k* and a *k* × *n* matrix is cut
# into tiles, and the units take them in *waves*, all units at once. Where layer 3 has only 16 columns, which 8 divides,
# and a tile 64, three quarters of each tile are thrown away; the rest of its waste is units that find no tile to work
# on. (*wgrad* is the gradient of the weights; *better n*, a number of columns that would waste less.) The **last
# lines** are about the multiple of 8: layers of 84 and 10 outputs, and 3 channels of colour, are none. The whole
# network is so small that all this hardly matters; *lost ms* says what there is to gain at most.
#
# ### MLPerf
#
# The deck presents MLPerf's ResNet-50 as the industry's benchmark of training: its rule set ended with Training
# 4.0.0, so there are no new results to compare with. `paceline mlperf RUN` writes a log in its format, which the
# published checker reads; such a log is not an MLPerf result, since only MLCommons publishes those, after review.

# %% [markdown] tags=["slide"]
# ## DDP or FSDP?
#
# - **DDP**: every GPU holds all weights, gradients and optimizer state. Only gradients travel.
# - **FSDP**: each GPU holds a part. Weights travel, too.
#
# Take DDP while a replica leaves room for activations; FSDP when it does not. `parallel.strategy: auto` decides by
# that.

# %% [markdown]
# ## 8 A tour: many GPUs
#
# The lecture ends with two strategies and a famous example. *DDP* (lab 2a) gives every GPU a *replica*, a whole
# copy of weights, gradients and optimizer state. *FSDP* (lab 2b) spreads them. Its table says: DDP if the model
# fits comfortably, FSDP if it must or if a larger batch is wanted. Paceline's `parallel.strategy: auto` makes
# "comfortably" a number: DDP as long as a replica takes at most 70 % of a GPU's memory, since the rest is wanted
# for activations. With AdamW in `float32` a replica takes 16 bytes for each parameter (section 3).

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
    ylabel="GB of a replica (AdamW)",
    title="Below a line: DDP. Above it: FSDP",
)
plt.show()

# %%
for name, gigabytes in gpus.items():
    print(f"{name}: DDP up to {0.7 * gigabytes * 1e9 / training_state_bytes(1, states=2) / 1e9:.1f} billion parameters")

# %% [markdown]
# The plan of a run says which strategy it takes, and why. `--plan-only` trains nothing; here two processes would
# share this machine:

# %%
plan = run("paceline train autoencoding.yaml --processes 2 --plan-only parallel.device=cpu", quiet=True, seconds=300)
print("\n".join(line for line in plan.splitlines() if line.strip().startswith(("processes", "parallel.strategy"))))

# %% [markdown] tags=["slide"]
# ## ImageNet in one hour
#
# - Goyal et al. 2017: ResNet-50, 90 epochs, 256 GPUs with 32 pictures each
# - the learning rate grows with the batch, after a warm-up
# - 29 hours became one

# %% [markdown]
# Goyal et al. (2017) trained ResNet-50 on ImageNet (1,281,167 pictures, 90 epochs) with 256 GPUs, 32 pictures on
# each. Before, it had taken 29 hours, as NVIDIA's developer site reported at the time. We take these for the time
# of 8 GPUs, since the paper's abstract compares with 8: its *scaling efficiency*, the speed-up over the number of
# times as many GPUs, is about 90 % from 8 to 256. The rule for the learning rate, the *linear scaling rule*, starts
# from 0.1 for a batch of 256 (labs 1 and 3 look at when it holds).
#
# **Exercise 4.6.** Do the arithmetic: the global batch, the learning rate, the number of optimizer steps (each
# epoch's last step takes what is left), and the hours.

# %% tags=["exercise"]
global_batch = ...
learning_rate = ...
optimizer_steps = ...
hours = ...

# %% tags=["check"]
with exercise("4.6"):
    assert global_batch == 8192, "the global batch is what all GPUs take together in a step: 256 times 32"
    assert math.isclose(learning_rate, 3.2, rel_tol=1e-6), "linear: 0.1 times the new batch over the old one"
    assert optimizer_steps == 90 * 157, "90 epochs of math.ceil(1281167 / 8192) steps"
    assert math.isclose(hours, 29 / (32 * 0.9), rel_tol=0.01), "32 times as many GPUs at 90 % are 28.8 times as fast"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# <code>global_batch = 256 * 32</code>; the rate grows as the batch does, from 256; the steps of an epoch are
# rounded up; the speed-up is 256 / 8 times the efficiency.
#
# </details>

# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
global_batch = 256 * 32
learning_rate = 0.1 * global_batch / 256
optimizer_steps = 90 * math.ceil(1_281_167 / global_batch)
hours = 29 / (256 / 8 * 0.9)

# %%
print(f"batch {global_batch:,}, rate {learning_rate:.1f}, {optimizer_steps:,} steps, {hours:.2f} hours")
rate = 90 * 1_281_167 / hours / 3600
print(f"That is {hours * 3600 / optimizer_steps:.3f} s for a step, and {rate:,.0f} pictures a second.")

# %% [markdown]
# *What was learnt:* the headline is three multiplications. The work was to keep the accuracy: 23.74 % error with
# 8,192 against 23.60 % with 256 (Goyal et al., table 3a), by the linear rule and a *warm-up* (the rate rises
# gradually in the first epochs).
#
# `paceline scale` predicts such a table from one GPU's figure and what is known of the network between the GPUs. We
# give it the throughput of one of the eight GPUs that those 29 hours stand for, and hold its prediction against the
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
axis.set(title="ResNet-50 on ImageNet, 32 pictures on each GPU", xlabel="GPUs", xscale="log", ylim=(0, 115))
axis.set_ylabel("efficiency in %, from 8 GPUs")
axis.set_xticks(counts, counts)
axis.minorticks_off()
axis.legend(loc="lower left")
plt.show()

# %%
print(f"From 8 to 256 GPUs: predicted {gain:.1f} times as fast, an efficiency of {gain / 32:.0%}.")
print("Published: about 90 %. The range above is mostly that of one GPU's figure, which all rows share;")
print(f"of the loss between 8 and 256 GPUs, about 10 %, the prediction foretells {1 - gain / 32:.0%}.")
low, high = (1_281_167 * 90 / 3600 / ddp[256][f"samples_per_second_{end}"] for end in ("high", "low"))
print(f"Predicted for 256 GPUs: {ddp[256]['hours']:.2f} hours, with its range from {low:.2f} to {high:.2f}.")
assert low < hours < high

# %% [markdown] tags=["slide"]
# ## What to remember
#
# - Move the model once and every batch; buffers travel with the model, plain attributes do not.
# - Weights, gradients and optimizer state are fixed; activations grow with the batch.
# - A step costs a + b·B. Small batches pay for *a*.
# - Ask the device for values seldom.
# - A prediction stands beside a measurement, or is called a prediction.

# %% [markdown]
# ## Which command does this for real runs
#
# | question | command |
# |---|---|
# | does it fit, and what takes the memory? | `paceline estimate RECIPE --device h100` |
# | CPU or GPU, which batch? | `paceline bench RECIPE --devices cpu,cuda --batch-sizes 64,4,2` |
# | does my code make the step wait? | `paceline doctor RECIPE` |
# | where did the time go? | `paceline report RUN --timing` |
# | which shapes waste a GPU? | `paceline roofline RECIPE --device a100` |
# | DDP or FSDP? | `paceline train RECIPE --processes 8 --plan-only` |
# | how many GPUs for one hour? | `paceline plan RECIPE --cluster NAME --deadline 1h`, `paceline scale RECIPE` |
#
# ## Further reading
#
# - Eric Kim, *Accelerating and scaling DNN training (GPU)*, lecture 19 of Data C182, Berkeley, autumn 2024: the
#   demonstrations of this lab.
# - Tianqi Chen, Bing Xu, Chiyuan Zhang, Carlos Guestrin, *Training deep nets with sublinear memory cost*, 2016,
#   arXiv:1604.06174: activation checkpointing.
# - Samyam Rajbhandari, Jeff Rasley, Olatunji Ruwase, Yuxiong He, *ZeRO: memory optimizations toward training
#   trillion parameter models*, 2019, arXiv:1910.02054: what takes memory, and how to spread it, which FSDP does.
# - Priya Goyal and others, *Accurate, large minibatch SGD: training ImageNet in 1 hour*, 2017, arXiv:1706.02677.
# - Szymon Migacz, *PyTorch performance tuning guide* (NVIDIA; among PyTorch's tutorials): the deck's list, kept up
#   to date.
# - NVIDIA, *Matrix multiplication background user's guide*: tiles and waves.
