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
# # Lab 3: Optimisation strategies for large batches
#
# Many devices want a large batch. What does a large batch want?
#
# * measure a generalisation gap, and say whether it is more than chance
# * scale a learning rate, and know where the rule ends
# * warm up, LARS, ghost batch norm, training longer
# * look at a minimum: sharp or flat, and what that does not mean

# %% [markdown]
# **You should know** how a training loop in PyTorch works, and what a batch, an epoch and a learning rate are (Lab
# 1). Several processes (Labs 2a and 2b) are not needed here: a global batch is the same batch, however many devices
# share it.
#
# **Time:** about 90 minutes with six exercises. Everything here is small enough for two processor cores; the cell
# that takes longest says so.
#
# Words that are used throughout: an *update* (or *step*) is one change of the weights. The *global batch* is the
# number of samples in one update, over all devices. With *momentum* `m` an update goes along a running sum of
# gradients, in which each older one counts `m` times less: where they agree, it goes `1 / (1 - m)` times as far. A
# *seed* decides the first weights and the order of samples: two runs that differ in nothing else show what chance
# does.

# %% tags=["setup"]
import copy
import json
import math
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import paceline
from paceline_course import exercise, run, use_style

use_style()
torch.set_num_threads(1)  # these networks are so small that more threads would only wait for one another
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
warnings.filterwarnings("ignore", message="IProgress not found")  # of tqdm, which a library imports
SEEDS = range(5)

# %% [markdown]
# ## The problem: 512 digits to learn from
#
# Scikit-learn's handwritten digits: 1797 images of 8x8 pixels. We train on 512 of them and test on the other 1285. At
# an accuracy of 95 % that many images have a standard error of 0.6 points: with others, all our accuracies would move
# by about as much. But all ways are tested on the same ones, and it is differences between ways that we look at; the
# spread over seeds, below, says how far chance in the *training* moves those. The network is a small
# *MLP* (multi-layer perceptron): two hidden layers of 128 numbers, each followed by a ReLU, `max(0, x)`.

# %% tags=["setup"]
digits = load_digits()
shuffled = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
images = torch.tensor(digits.images, dtype=torch.float32)[shuffled].to(device)
images = (images - images.mean()) / images.std()
labels = torch.tensor(digits.target)[shuffled].to(device)
SAMPLES = 512
train_images, test_images = images[:SAMPLES], images[SAMPLES:]
train_labels, test_labels = labels[:SAMPLES], labels[SAMPLES:]


def mlp(width: int = 128) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


@dataclass
class Run:
    network: nn.Module
    losses: list[float]  # of each update's batch
    train_loss: float
    test_accuracy: float  # in percent


def accuracy(network: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return 100 * (network(x).argmax(1) == y).float().mean().item()


def train(
    batch: int,
    rates: Sequence[float],  # one learning rate per update
    seed: int,
    *,
    labels: Tensor = train_labels,
    make: Callable[[], nn.Module] = mlp,
    momentum: float = 0.9,
) -> Run:
    """Train on the 512 images with plain SGD: as many updates as there are rates."""
    torch.manual_seed(seed)
    network = make().to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=rates[0], momentum=momentum)
    losses, order = [], torch.empty(0, dtype=torch.long)
    for rate in rates:
        if len(order) < batch:  # the next epoch: every sample once, in a new order
            order = torch.randperm(SAMPLES)
        chosen, order = order[:batch].to(device), order[batch:]
        optimizer.param_groups[0]["lr"] = rate
        loss = F.cross_entropy(network(train_images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        train_loss = F.cross_entropy(network(train_images), labels).item()
    return Run(network, losses, train_loss, accuracy(network, test_images, test_labels))


# %% [markdown] tags=["slide"]
# ## Fewer updates
#
# An epoch is every sample once. With a batch of `B` an epoch of `N` samples has `N / B` updates, rounded up.
#
# **A batch sixteen times as large takes sixteen times fewer updates in as many epochs.** That is why it is fast, and
# the first reason why it may end worse.

# %% [markdown]
# **Exercise 3.1.** Write how many updates a training has, and for how many epochs another batch must train to get as
# many. An incomplete batch at the end of an epoch is an update too.


# %% tags=["exercise"]
def updates(samples: int, batch: int, epochs: int) -> int:
    """Updates in so many epochs."""
    raise NotImplementedError  # yours to write


def epochs_for(wanted: int, samples: int, batch: int) -> int:
    """The fewest whole epochs that have at least so many updates."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("3.1"):
    assert updates(100, 64, 30) != 47, "round up in each epoch, not once at the end: 100 samples are 2 updates of 64"
    assert updates(512, 16, 30) == 960, "512 / 16 = 32 updates an epoch, 30 epochs"
    assert updates(1_281_167, 256, 90) == 450_450, "ImageNet has 5005 updates an epoch: round those up"
    assert isinstance(updates(512, 16, 30), int), "a count is a whole number: // or math.ceil"
    assert epochs_for(960, 512, 256) == 480, "two updates an epoch with a batch of 256"
    assert epochs_for(961, 512, 256) == 481, "961 updates do not fit into 480 epochs of two"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# <code>math.ceil(samples / batch)</code> are the updates of one epoch. Both answers follow from it; the second needs
# <code>math.ceil</code> once more.
#
# </details>


# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
def updates(samples: int, batch: int, epochs: int) -> int:
    return math.ceil(samples / batch) * epochs


def epochs_for(wanted: int, samples: int, batch: int) -> int:
    return math.ceil(wanted / math.ceil(samples / batch))


# %% [markdown]
# **What was learnt:** batch and epochs fix the number of updates; whoever compares batches must say which of them was
# held.

# %% [markdown] tags=["slide"]
# ## Is there a gap, and how large?
#
# Batch 16 against batch 256, five seeds each, at the same learning rate; 512 digits, first with right labels, then
# with a fifth of them random. Each dot is a seed, each bar the mean of five.

# %% [markdown]
# *Generalisation gap* has two meanings. Keskar et al. (2017) mean **test accuracy with a small batch less that with a
# large batch**; so do we in this section. Others, and the column `gap` that `paceline landscape` prints, mean
# training accuracy less test accuracy.
#
# We train in three ways, all at the same learning rate, with five seeds each: a batch of 16 for 30 epochs; a batch of
# 256 for **as many epochs**; a batch of 256 for **as many updates**. Then the same again with *noisy labels*: a fifth
# of the training labels are replaced by random ones, as when labels come from a hurried crowd. Test labels stay
# right.
#
# **Before you run it, write down your guess:** which of the two batches is better on the noisy labels at as many
# epochs?

# %%
chance = torch.Generator().manual_seed(1)
noisy_labels = train_labels.clone()
wrong = (torch.rand(SAMPLES, generator=chance) < 0.2).to(device)
noisy_labels[wrong] = torch.randint(0, 10, (int(wrong.sum()),), generator=chance).to(device)

EPOCHS, RATE = 30, 0.05
few, many = updates(SAMPLES, 256, EPOCHS), updates(SAMPLES, 16, EPOCHS)
ways = {"batch 16": (16, many), "batch 256,\nas many epochs": (256, few), "batch 256,\nas many updates": (256, many)}
found: dict[str, dict[str, list[Run]]] = {
    kind: {
        way: [train(batch, [RATE] * count, seed, labels=y) for seed in SEEDS] for way, (batch, count) in ways.items()
    }
    for kind, y in (("right labels", train_labels), ("a fifth of the labels random", noisy_labels))
}

# %% tags=["slide"]
figure, axes = plt.subplots(1, 2, figsize=(10, 3.8))
for axis, (kind, by_way) in zip(axes, found.items(), strict=True):
    for place, runs in enumerate(by_way.values()):
        scores = [each.test_accuracy for each in runs]
        axis.plot([place] * len(scores), scores, "o", alpha=0.6)
        axis.plot([place - 0.2, place + 0.2], [np.mean(scores)] * 2, color="black")
    axis.set(title=kind, xticks=range(3), ylabel="test accuracy (%)", xlim=(-0.5, 2.5))
    axis.set_xticklabels(list(by_way), fontsize=9)
plt.show()


# %% [markdown]
# Is a difference more than chance? The *standard error* of a difference of two means says by how much it would move
# if we took other seeds: the root of `s1²/n + s2²/n`, where `s` is the standard deviation over `n` seeds. A
# difference below three of them may well be chance with so few seeds.


# %%
def difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """First less second, and the standard error of that."""
    error = math.sqrt(np.var(first, ddof=1) / len(first) + np.var(second, ddof=1) / len(second))
    return float(np.mean(first) - np.mean(second)), error


gaps: dict[tuple[str, str], tuple[float, float]] = {}
for kind, by_way in found.items():
    small = by_way["batch 16"]
    print(f"{kind}\n  {'':32} {'train loss':>12} {'test %':>7}   gap to batch 16")
    for way, runs in by_way.items():
        name = way.replace("\n", " ")
        gap, error = difference([each.test_accuracy for each in small], [each.test_accuracy for each in runs])
        gaps[kind, name] = gap, error
        verdict = "more than chance" if abs(gap) > 3 * error else "may be chance"
        loss, on_test = (np.mean([getattr(each, what) for each in runs]) for what in ("train_loss", "test_accuracy"))
        beside = "" if runs is small else f"{gap:+.1f} ± {error:.1f} points: {verdict}"
        print(f"  {name:32} {loss:12.5f} {on_test:7.2f}   {beside}")

noisy_runs = found["a fifth of the labels random"]
print("Of the random labels it has learnt, on average:")
for way, runs in noisy_runs.items():
    learnt = np.mean([accuracy(each.network, train_images[wrong], noisy_labels[wrong]) for each in runs])
    print(f"  {way.replace(chr(10), ' '):32} {learnt:5.1f} %")

assert gaps["right labels", "batch 256, as many epochs"][0] > 1, "as many epochs: the large batch is worse"
assert abs(gaps["right labels", "batch 256, as many updates"][0]) < 2, "as many updates: most of it is gone"
assert gaps["a fifth of the labels random", "batch 256, as many epochs"][0] < -4, "with noisy labels it is better"

# %% [markdown] tags=["slide"]
# ## What the dots say
#
# * right labels, as many **epochs**: the large batch is worse. Its training loss says why: it has not come down as
#   far.
# * right labels, as many **updates**: most of that is gone. "May be chance" is not "nothing": whether a rest is left,
#   more seeds would tell.
# * noisy labels, as many epochs: the large batch is **better**. It stopped before it had learnt the wrong labels.
#
# One number for "the gap" of a batch size does not exist.

# %% [markdown]
# That the gap comes from too few updates is the claim of Hoffer, Hubara and Soudry, *Train longer, generalize better*
# (2017, arXiv:1705.08741). Keskar et al. (*On large-batch training for deep learning*, 2017, arXiv:1609.04836, Table
# 2) trained six networks until the loss would not fall any more, with batches of 256 and of a tenth of the data, and
# found that a gap was left:
#
# | network | train %, small | train %, large | test %, small | test %, large | gap in points |
# |---|---|---|---|---|---|
# | F1 (fully connected, MNIST) | 99.66 | 99.92 | 98.03 | 97.81 | 0.22 |
# | F2 (fully connected, TIMIT) | 99.99 | 98.35 | 64.02 | 59.45 | 4.57 |
# | C1 (shallow convolutions, CIFAR-10) | 99.89 | 99.66 | 80.04 | 77.26 | 2.78 |
# | C2 (deep convolutions, CIFAR-10) | 99.99 | 99.99 | 89.24 | 87.26 | 1.98 |
# | C3 (shallow convolutions, CIFAR-100) | 99.56 | 99.88 | 49.58 | 46.45 | 3.13 |
# | C4 (deep convolutions, CIFAR-100) | 99.10 | 99.57 | 63.08 | 57.81 | 5.27 |
#
# Both can be right: sets, networks, optimizers (Keskar's was Adam) and rates differ. In our own set-up
# most of the gap came from too few updates; whether a part of another origin is left, five seeds are too few to say.
# (With `SEEDS = range(20)` you can find out.)

# %% [markdown] tags=["slide"]
# ## The learning rate grows with the batch: two rules
#
# `k` times the batch:
#
# * **linear**: rate times `k`. One update with the mean of `k` gradients, `k` times as long, goes about as far as `k`
#   small ones, *if the gradient changes little on the way* (Goyal et al. 2017).
# * **square root**: rate times `√k`. It keeps the random part of an update as large as before: the mean of `k`
#   gradients has `√k` times less noise (Krizhevsky 2014).

# %% [markdown]
# **Exercise 3.2.** Write the rules.


# %% tags=["exercise"]
def scaled_rate(rate: float, reference_batch: int, batch: int, rule: str) -> float:
    """The learning rate for ``batch``, where ``rate`` is meant for ``reference_batch``; rule: none, sqrt or linear."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("3.2"):
    assert scaled_rate(0.1, 256, 8192, "none") == 0.1, "without a rule the rate stays"
    assert math.isclose(scaled_rate(0.1, 256, 8192, "linear"), 3.2), "8192 is 32 times 256: Goyal's 3.2"
    assert math.isclose(scaled_rate(0.1, 256, 8192, "sqrt"), 0.1 * math.sqrt(32)), "the root of the ratio of batches"
    assert math.isclose(scaled_rate(0.1, 256, 64, "linear"), 0.025), "a smaller batch takes a smaller rate"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# The ratio is <code>batch / reference_batch</code>. The rules are its powers 0, 1/2 and 1.
#
# </details>


# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
def scaled_rate(rate: float, reference_batch: int, batch: int, rule: str) -> float:
    return rate * (batch / reference_batch) ** {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[rule]


# %% [markdown]
# **What was learnt:** a rule is a power of the ratio of two batches; without the batch that a rate was meant for, a
# rate says nothing.
#
# In Paceline a rate is absolute until a rule is asked for, and the plan prints both numbers. Here is a plan for
# `digits`; nothing is trained:

# %%
RULE = "optimizer.lr=0.05 optimizer.lr_scaling=linear optimizer.lr_reference_batch=16 schedule.warmup_from=unscaled"
plan = run(f"paceline train digits batch.global_size=512 {RULE} --plan-only", quiet=True, seconds=300)
told = ("lr_scaling", "warmup", "from the peak")
print(*(line for line in plan.splitlines() if any(word in line for word in told)), sep="\n")

# %% [markdown] tags=["slide"]
# ## Where does the rule end?
#
# From a batch of 16 up to all 512 samples, 30 epochs each, from a modest rate of 0.025 at 16, with momentum 0.9. Four
# seeds.

# %%
BATCHES, RULES, BASE = (16, 32, 64, 128, 256, 512), ("none", "sqrt", "linear"), 0.025


def accuracies(batch: int, rule: str) -> list[float]:
    rates = [scaled_rate(BASE, 16, batch, rule)] * updates(SAMPLES, batch, EPOCHS)
    return [train(batch, rates, seed).test_accuracy for seed in range(4)]


by_rule = {rule: [accuracies(batch, rule) for batch in BATCHES] for rule in RULES}

# Goyal et al. 2017, arXiv:1706.02677, Figure 3 and Table 3a: ResNet-50, ImageNet, 90 epochs, linear rule, warm-up.
GOYAL = {
    128: 23.49, 256: 23.60, 512: 23.48, 1024: 23.53, 2048: 23.49,
    4096: 23.56, 8192: 23.74, 16384: 24.79, 32768: 27.55, 65536: 33.96,
}  # fmt: skip

# %% tags=["slide"]
figure, (ours, theirs) = plt.subplots(1, 2, figsize=(10, 3.8))
for rule, marker in zip(RULES, "ov^", strict=True):
    scores = np.array(by_rule[rule])
    ours.plot(BATCHES, np.median(100 - scores, axis=1), marker=marker, label=rule)
    ours.fill_between(BATCHES, (100 - scores).min(axis=1), (100 - scores).max(axis=1), alpha=0.15)
ours.set(xscale="log", yscale="log", xlabel="batch", ylabel="test error (%)", title="512 digits, 30 epochs")
ours.set_xticks(BATCHES, [str(each) for each in BATCHES])
ours.set_yticks([4, 6, 10, 20, 50, 90], ["4", "6", "10", "20", "50", "90"])
ours.minorticks_off()
ours.legend(title="rule")
theirs.plot(list(GOYAL), list(GOYAL.values()), "o-")
theirs.axvline(8192, color="grey", linestyle=":")
theirs.set(xscale="log", xlabel="batch", ylabel="validation error (%)", title="ImageNet, 90 epochs (Goyal et al. 2017)")
theirs.set_xticks([256, 2048, 8192, 65536], ["256", "2k", "8k", "64k"])
theirs.minorticks_off()
plt.show()

# %%
means = {rule: [float(np.mean(scores)) for scores in by_rule[rule]] for rule in RULES}
for place, batch in enumerate(BATCHES):
    best = max(RULES, key=lambda rule: means[rule][place])
    row = ", ".join(f"{rule} {means[rule][place]:.1f} %" for rule in RULES)
    print(f"batch {batch:3}: {row}" + ("" if batch == 16 else f"   best here: {best}"))

linear_errors = [100 - mean for mean in means["linear"]]
lowest_at = int(np.argmin(linear_errors))
print(f"With the linear rule the error is lowest at a batch of {BATCHES[lowest_at]}: {linear_errors[lowest_at]:.1f} %.")
for batch, error in list(zip(BATCHES, linear_errors, strict=True))[lowest_at + 1 :]:
    print(f"  batch {batch:3}: {error - linear_errors[lowest_at]:+.1f} points")

at_128, at_512 = BATCHES.index(128), BATCHES.index(512)
assert means["linear"][at_128] > means["none"][at_128] + 0.5, "eight times: the linear rule helps"
assert means["sqrt"][at_512] > means["linear"][at_512] + 20, "32 times: linear has broken down"

# %% [markdown]
# So the rule "double the batch, double the rate" has a limit on our problem too, and quite another one than on
# ImageNet. A lecture that says *"beyond batch size 8k, classification error starts increasing"* tells what happened
# to **one set with one recipe**: ResNet-50 on ImageNet for 90 epochs with momentum SGD. With LARS, which comes below,
# You et al. (2017) report ResNet-50 on the same set at 32k without loss of accuracy. On our digits the linear rule's
# error rises at far smaller batches, as the last lines say: a little at first, like Goyal's beyond 8k, and at 512 the
# training fails. Why?

# %% [markdown] tags=["slide"]
# ## The reason: the noise of the gradient
#
# A batch's gradient is the true gradient `G` plus noise; the noise shrinks with the batch.
#
# `noise scale = (variance of one sample's gradient) / |G|²`, in samples.
#
# The rate that gains most in one update is about `ε_max / (1 + noise scale / batch)`, with `ε_max` for an endless
# batch: **linear** while the batch is far smaller, **flat** when it is far larger (McCandlish et al. 2018).

# %% [markdown]
# Let us measure that flat part directly. For each batch we take 40 updates without momentum at each of nine rates,
# and note which rate has brought the training loss lowest.

# %%
SIZES = (4, 8, 16, 32, 64, 128, 256, 512)
GRID = [2.0**power for power in range(-7, 2)]
lowest = []
for batch in SIZES:
    reached = [
        np.mean([train(batch, [rate] * 40, seed, momentum=0.0).train_loss for seed in range(3)]) for rate in GRID
    ]
    lowest.append(GRID[int(np.argmin(np.nan_to_num(reached, nan=np.inf)))])


# %% [markdown]
# And the noise scale itself, for the same network, from the gradient of every single sample: `vmap` computes all 512
# of them at once. The mean of noisy gradients is longer than the true gradient, by the variance over their number;
# that is taken off.


# %%
def noise_scale(network: nn.Module) -> float:
    weights = {name: each.detach() for name, each in network.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(network, weights, (x[None],)), y[None])

    of_each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, train_images, train_labels)
    gradients = torch.cat([each.flatten(1) for each in of_each.values()], dim=1)  # [samples, weights]
    variance = gradients.var(dim=0).sum().item()
    square = gradients.mean(dim=0).square().sum().item() - variance / len(gradients)
    return variance / square if square > 0 else math.inf


torch.manual_seed(0)
fresh_noise = noise_scale(mlp().to(device))
after = {count: noise_scale(train(64, [0.1] * count, 0).network) for count in (10, 40, 160)}
print(f"noise scale with fresh weights: {fresh_noise:.3g} samples")
for count, scale in after.items():
    told = f"{scale:.3g} samples" if math.isfinite(scale) else "too large to measure: noise hides the mean gradient"
    print(f"after {count:3} updates: {told}")
assert min(after[160], 1e6) > fresh_noise, "in the long run the noise scale grows"

# %% tags=["slide"]
figure, axis = plt.subplots(figsize=(7.5, 3.8))
axis.plot(SIZES, lowest, "o", markersize=9, label="best of nine rates, measured")
axis.plot(SIZES, [lowest[0] * batch / SIZES[0] for batch in SIZES], ":", label="linear rule from a batch of 4")
law = {noise: np.array([1 / (1 + noise / batch) for batch in SIZES]) for noise in np.geomspace(1, 1000, 60)}
fits = {noise: float(np.std(np.log(lowest) - np.log(shape))) for noise, shape in law.items()}
fitted = min(fits, key=lambda noise: fits[noise])
height = math.exp(float(np.mean(np.log(lowest) - np.log(law[fitted]))))
axis.plot(SIZES, height * law[fitted], label=f"ε / (1 + {fitted:.0f} / batch), fitted")
axis.set(xscale="log", yscale="log", xlabel="batch", ylabel="best learning rate", ylim=(0.05, 20))
axis.set_title(f"The batch grew {SIZES[-1] // SIZES[0]} times, the best rate {lowest[-1] / lowest[0]:.0f} times")
axis.set_xticks(SIZES, [str(each) for each in SIZES])
axis.minorticks_off()
axis.legend()
print(f"Noise scale: {fitted:.0f} samples by the best rates of 40 updates,")
print(f"{fresh_noise:.0f} samples by the gradients of fresh weights.")
assert lowest[-1] / lowest[0] < SIZES[-1] / SIZES[0] / 4, "the best rate grows far less than the batch"

# %% [markdown]
# The two numbers agree in their order of magnitude at best, and more is not promised: the law assumes a loss that is
# curved alike in all directions. It is still enough to know *before trying* that 8k is no universal number.
#
# Nor is it where the linear rule ended in the 30 epochs above: there, the rule served at batches beyond this noise
# scale. The two experiments differ. Those trainings had momentum of 0.9, with which a rate goes ten times as far; they
# were long, and the noise scale grows on the way; and they were judged by test accuracy, not by the lowest training
# loss after 40 updates. At 512, all samples, there is no noise left at all: what throws that run out is a rate too high
# for the *curvature* of the loss, the subject of the next section. So take the noise scale for a warning of where the
# rule begins to give less than it promises, within a factor of ten or so, and try.
#
# McCandlish et al. (*An empirical model of large-batch training*, 2018, arXiv:1812.06162, Table 1) measured the
# *critical batch*, with which a training takes twice the fewest updates and twice the fewest samples:
#
# | task | critical batch at the start | on average |
# |---|---|---|
# | MNIST | 20 | 200 |
# | SVHN | 50 | 500 |
# | CIFAR-10 | 300 | 900 |
# | ImageNet | 1000 | 15000 |
# | Billion Word (tokens) | 700 | 100000 |
# | Dota 5v5 | not measured | above 8 million (estimated) |
#
# From 20 to millions, and larger on average than at the start. Paceline measures it for any recipe, without training:

# %%
print(run("paceline noise-scale digits --steps 10", quiet=True, seconds=300))

# %% [markdown]
# In a real run, `telemetry.noise_scale="10 steps"` writes it into the step records at no extra pass, and where a
# linear rule has raised the rate beyond what the noise bears, the run says so. `paceline sweep-batch` measures
# updates and samples to a target by training, several seeds each.
#
# In the long run the noise scale **grows during training**, since the true gradient shrinks; ours may fall at first.
# So one may begin with a small batch and enlarge it, instead of lowering the rate: a *batch-size schedule* (Smith et
# al. 2018, *Don't decay the learning rate, increase the batch size*, arXiv:1711.00489). In Paceline that is the key
# `batch.growth`.

# %% [markdown] tags=["slide"]
# ## Warm-up
#
# At the first steps weights are random and the loss is most steeply curved. A rate that is right later may be too
# high now.
#
# **Gradual warm-up** (Goyal et al. 2017): begin at the rate of the small batch, and rise by equal parts to the large
# one over the first epochs.
#
# ImageNet, ResNet-50, batch 8192 (their Table 1), validation error: no warm-up 24.84 %, constant warm-up 25.88 %,
# gradual 23.74 %; batch 256: 23.60 %.

# %% [markdown]
# **Exercise 3.3.** Write the warm-up as a function of the step alone. Nothing is counted or remembered, so that a run
# which is resumed at step 1000 has the rate of step 1000. Step 0 has `first`; step `warmup_steps` is the first with
# `peak`, which then stays.


# %% tags=["exercise"]
def warmup_rate(step: int, first: float, peak: float, warmup_steps: int) -> float:
    raise NotImplementedError  # yours to write


# %% tags=["check"]
from paceline.plan.rates import LearningRate

with exercise("3.3"):
    assert math.isclose(warmup_rate(0, 0.1, 3.2, 10), 0.1), "step 0 has the first rate"
    assert math.isclose(warmup_rate(5, 0.1, 3.2, 10), 1.65), "half-way through the steps, half-way between the rates"
    assert math.isclose(warmup_rate(10, 0.1, 3.2, 10), 3.2), "after the warm-up the rate is the peak"
    assert math.isclose(warmup_rate(50, 0.1, 3.2, 10), 3.2), "and it stays there"
    assert math.isclose(warmup_rate(0, 0.1, 3.2, 0), 3.2), "a warm-up of no steps must not divide by zero"
    theirs_rate = LearningRate(name="constant", peak=3.2, total_steps=40, warmup_steps=10, first=0.1)
    same = all(math.isclose(warmup_rate(step, 0.1, 3.2, 10), theirs_rate(step)) for step in range(40))
    assert same, "not Paceline's schedule"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# Before <code>warmup_steps</code> a share <code>step / warmup_steps</code> of the way from <code>first</code> to
# <code>peak</code> is done. Deal with later steps first, and a warm-up of 0 steps is dealt with too.
#
# </details>


# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
def warmup_rate(step: int, first: float, peak: float, warmup_steps: int) -> float:
    if step >= warmup_steps:
        return peak
    return first + (peak - first) * step / warmup_steps


# %% [markdown]
# **What was learnt:** a schedule that is a pure function of the step needs no state, and cannot be resumed wrongly.
#
# Does it save a run? Take a network whose loss is steep in the beginning: three hidden layers, with first weights
# twice as large as they should be. The batch is 256, the rate 0.15, with and without a warm-up over the first 30 % of
# updates. How steep? We need the *top eigenvalue of the Hessian*: the Hessian is the matrix of second derivatives,
# and its largest eigenvalue is the curvature along the most curved direction. *Power iteration* finds it: multiply
# any vector by the matrix again and again, and its direction turns towards that one. A product with the Hessian is
# the derivative of (gradient times vector), so that the matrix is never written down.


# %% tags=["setup"]
def top_eigenvalue(network: nn.Module, iterations: int = 40) -> float:
    weights = list(network.parameters())
    gradient = torch.autograd.grad(F.cross_entropy(network(train_images), train_labels), weights, create_graph=True)
    torch.manual_seed(0)
    vector, value = [torch.randn_like(each) for each in weights], 0.0
    for _ in range(iterations):
        length = torch.sqrt(sum(each.square().sum() for each in vector))
        vector = [each / length for each in vector]
        product = torch.autograd.grad(gradient, weights, vector, retain_graph=True)
        value = float(sum((mine * theirs).sum() for mine, theirs in zip(vector, product, strict=True)))
        vector = list(product)
    return value


# %%
def steep() -> nn.Sequential:
    hidden = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.ReLU())]
    network = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10))
    for layer in network:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight)  # keeps the size of activations from layer to layer under ReLU ...
            layer.weight.data.mul_(2)  # ... which this does not
            nn.init.zeros_(layer.bias)
    return network


HIGH, COUNT = 0.15, 120
warmed = [warmup_rate(step, HIGH / 36, HIGH, 36) for step in range(COUNT)]
without = [train(256, [HIGH] * COUNT, seed, make=steep) for seed in SEEDS]
with_it = [train(256, warmed, seed, make=steep) for seed in SEEDS]
lost = [sum(not each.train_loss < 1 for each in runs) for runs in (without, with_it)]  # NaN is not below 1 either

torch.manual_seed(0)
steepness = {0: top_eigenvalue(steep().to(device))}
steepness |= {count: top_eigenvalue(train(256, warmed[:count], 0, make=steep).network) for count in (4, 12, 36)}

# %% tags=["slide"]
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
for runs, colour, name in ((without, "#d55e00", "no warm-up"), (with_it, "#0072b2", "warm-up")):
    for number, each in enumerate(runs):
        shown = np.clip(np.nan_to_num(each.losses, nan=1e6, posinf=1e6), 1e-4, 1e6)
        left.plot(shown, color=colour, alpha=0.7, linewidth=1.2, label=None if number else name)
left.set(yscale="log", xlabel="update", ylabel="loss of the batch", title="Five seeds each, the same peak rate")
left.legend()
right.plot(list(steepness), list(steepness.values()), "o-", label="top eigenvalue")
right.plot(range(36), [2 * (1 + 0.9) / each for each in warmed[:36]], "--", label="2 (1 + m) / rate, the bound")
right.set(yscale="log", xlabel="update of the warm-up", ylabel="curvature", title="It flattens while the rate rises")
right.legend()
plt.show()

# %%
print(f"Without warm-up {lost[0]} of {len(SEEDS)} runs were lost, with it {lost[1]}.")
print(f"The top eigenvalue fell from {steepness[0]:.3g} to {steepness[36]:.3g};")
print(f"the bound for a rate of {HIGH} is {2 * 1.9 / HIGH:.3g}, by a rule of thumb that the text below explains.")
assert lost[0] >= lost[1] + 2, "the warm-up saves runs"
assert steepness[36] < steepness[0] / 3, "the loss is less curved after the warm-up"

# %% [markdown]
# A run that is lost may stay at a loss of about 2.3, which is `log(10)`: it guesses. The usual cause is that updates
# have thrown the weights so far that ReLUs give 0 for every image, and then no gradient brings them back.
#
# Why a bound? Along a direction of curvature λ, a step of plain gradient descent multiplies the distance to the
# bottom by `1 - rate · λ`. Beyond `rate = 2 / λ` each step lands farther out than the last. With momentum `m` the
# bound is `2 (1 + m) / λ`, for a loss that is exactly quadratic; here it says where trouble begins, no more.
#
# **Warm-up is no cure for a rate that is too high for good.** Here is the linear rule at a batch of 512 on the
# ordinary network again, with a warm-up over 20 % of its updates:

# %%
total = updates(SAMPLES, 512, EPOCHS)
peak = scaled_rate(BASE, 16, 512, "linear")
still = [
    train(512, [warmup_rate(step, BASE, peak, total // 5) for step in range(total)], seed).test_accuracy
    for seed in range(4)
]
cold = np.mean(by_rule["linear"][-1])
print(f"Rate {peak:g}, batch 512: test accuracy {cold:.1f} % without warm-up, {np.mean(still):.1f} % with it.")
assert np.mean(still) < 80, "warm-up does not save this one"

# %% [markdown] tags=["slide"]
# ## LARS and LAMB: a rate for each layer
#
# The length of a layer's gradient beside the length of its weights differs from layer to layer. One rate that is safe
# for all is slow for most.
#
# **LARS** (You et al. 2017): each layer's step is a fixed share `η` of its weights' length,
#
# `layer rate = η · ‖w‖ / (‖g‖ + β ‖w‖)`,
#
# with the gradient `g` and the weight decay `β`. **LAMB** (You et al. 2019) does the same to Adam's update.

# %% [markdown]
# The weight decay pulls weights towards zero. The layer rate multiplies the schedule's rate.
#
# **Exercise 3.4.** Write the layer rate. `‖·‖` is the square root of the sum of squares. A layer whose weights or
# gradient are all zero has no direction or no length to compare with: its layer rate is 1.


# %% tags=["exercise"]
def lars_rate(weights: Tensor, gradient: Tensor, weight_decay: float, trust: float = 0.001) -> float:
    """What LARS multiplies the learning rate of this layer with; ``trust`` is η."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
from timm.optim import Lars  # what Paceline takes for optimizer.name=lars

with exercise("3.4"):
    w, g = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.5])
    assert math.isclose(lars_rate(w, g, 0.0), 0.01, rel_tol=1e-5), "0.001 · 5 / 0.5 without decay: norms, not sums"
    assert math.isclose(lars_rate(w, g, 0.1), 0.005, rel_tol=1e-5), "the decay adds β ‖w‖ = 0.5 below the line"
    assert lars_rate(torch.zeros(2), g, 0.1) == 1, "weights that are all zero could never leave it: the layer rate is 1"
    assert lars_rate(w, torch.zeros(2), 0.0) == 1, "no gradient, no decay: 1, and no division by zero"
    layer = nn.Parameter(w.clone())
    layer.grad = g.clone()
    Lars([layer], lr=2.0, weight_decay=0.1, trust_coeff=0.001).step()
    mine = w - 2.0 * lars_rate(w, g, 0.1) * (g + 0.1 * w)
    assert torch.allclose(layer.detach(), mine, atol=1e-5), "one step of timm's Lars is another"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# <code>weights.norm().item()</code> is the length. Return 1.0 if one of the two lengths is 0.
#
# </details>


# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
def lars_rate(weights: Tensor, gradient: Tensor, weight_decay: float, trust: float = 0.001) -> float:
    length, slope = weights.norm().item(), gradient.norm().item()
    if length == 0 or slope == 0:
        return 1.0
    return trust * length / (slope + weight_decay * length)


# %%
torch.manual_seed(0)
looked_at = {"fresh": mlp().to(device), "after 20 updates": train(256, [0.1] * 20, 0).network}
for when, network in looked_at.items():
    network.zero_grad()
    F.cross_entropy(network(train_images), train_labels).backward()
    layer_rates = [lars_rate(each.weight, each.weight.grad, 5e-4) for each in network if isinstance(each, nn.Linear)]
    print(f"{when:17} first, second, last layer: " + ", ".join(f"{rate:.4f}" for rate in layer_rates))
    print(f"{'':17} the highest is {max(layer_rates) / min(layer_rates):.1f} times the lowest")

# %% [markdown]
# **What was learnt:** LARS makes a step's length a share of the layer's own length, so that the size of the gradient
# drops out. Biases and normalisation layers get no layer rate, nor do layers without weight decay. As the lengths of
# steps no longer depend on the gradient's, its learning rate is a number of another kind: 8 below is not "high".

# %% [markdown] tags=["slide"]
# ## All of it at once, in Paceline
#
# A small convolutional network with BatchNorm, batch 32 against 256. Each way is a few overrides. New among them:
#
# * **training longer** (Hoffer et al. 2017): as many updates, not as many epochs
# * **ghost BatchNorm** (same paper): statistics over groups of 32 samples, whatever the batch

# %% [markdown]
# *BatchNorm* shifts and scales each layer's activations to mean 0 and variance 1 over the batch. Its statistics are
# noisier over few samples, and that noise may itself help to generalise; with ghosts a large batch keeps it.
#
# Three seeds each, as many epochs first. `paceline.train` is the same path as the command.

# %%
SMALLER = {"model.options": {"width": 8, "stages": 2}, "data.augment.crop": "none", "train.duration": "8 epochs"}
PLAIN = {"train.label_smoothing": 0.0, "train.ema": "off", "optimizer.lr": 0.1, "optimizer.weight_decay": 0.0}
SPARE = {"schedule.warmup": "0%", "evaluate.every": "100%", "checkpoint.every": "off", "telemetry.trackers": []}
KIT = SMALLER | PLAIN | SPARE
LARGE = {"batch.global_size": 256}
WARMUP = {"schedule.warmup": "20%"}
LINEAR = {"optimizer.lr_scaling": "linear", "optimizer.lr_reference_batch": 32} | WARMUP
ROOT = {"optimizer.lr_scaling": "sqrt", "optimizer.lr_reference_batch": 32}
DECAY = {"optimizer.weight_decay": 5e-4}  # LARS scales only the layers that decay
LARS = {"optimizer.name": "lars", "optimizer.lr": 8.0, "optimizer.nesterov": False} | DECAY | WARMUP
GHOSTS = {"model.ghost_batch_norm": 32}

RUNS = Path("lab3-runs")
shutil.rmtree(RUNS, ignore_errors=True)  # of an earlier time through this notebook
kit: dict[str, list[float]] = {}


def thrice(name: str, changes: dict) -> None:
    """Train with three seeds, and keep the accuracies."""
    kit[name] = []
    for seed in range(3):
        asked = KIT | changes | {"seed": seed}
        result = paceline.train("digits", overrides=asked, run_dir=RUNS / f"{name}-{seed}", quiet=True)
        kit[name].append(result.metrics["top1_accuracy"])


thrice("small", {"batch.global_size": 32})
thrice("large", LARGE)
thrice("large-linear", LARGE | LINEAR)
thrice("large-lars", LARGE | LARS)
thrice("large-ghosts", LARGE | GHOSTS)

# %% [markdown]
# Now as many updates. That is eight times as many samples, and the longest cell of the lab: training longer has its
# price.

# %%
LONGER = {"train.duration": f"{updates(1438, 32, 8)} steps"}  # the recipe trains on 1438 images
thrice("large-longer", LARGE | LONGER)
thrice("large-root-ghosts-longer", LARGE | ROOT | GHOSTS | LONGER)

# %% tags=["slide"]
figure, axis = plt.subplots(figsize=(9, 3.8))
for place, (name, scores) in enumerate(kit.items()):
    axis.plot(scores, [place] * 3, "o", color="#0072b2" if name == "small" else "#d55e00", alpha=0.6, markersize=9)
    axis.plot(np.median(scores), place, "|", color="black", markersize=22)
axis.set_yticks(range(len(kit)), list(kit))
axis.invert_yaxis()
axis.set(xlabel="test accuracy (%), three seeds and their median", title="Batch 32 against 256: what closes the gap?")
plt.show()

# %%
image = 100 / 359  # one test image, in points
print(f"One test image is {image:.2f} points. In the median, beside the small batch:")
for name, scores in kit.items():
    apart = np.median(kit["small"]) - np.median(scores)
    overlap = max(scores) >= min(kit["small"]) and min(scores) <= max(kit["small"])
    seeds = "the seeds overlap" if overlap else "the seeds do not overlap"
    if name != "small":
        print(f"  {name:26} {0 - apart:+.2f} points, {round(abs(apart) / image)} images; {seeds}")
assert np.median(kit["small"]) >= np.median(kit["large"]), "as many epochs, same rate: the large batch is no better"

# %% [markdown]
# Read such a table with care: where seeds overlap, three of them show nothing. And where they do not, ask what else
# differs: `large-lars` has a weight decay, a warm-up and no Nesterov momentum besides its rule, and its rate of 8 was
# chosen from five in an earlier study of these digits, while for the other ways nothing was tuned. The same
# comparison with 20 epochs is among the results that Paceline keeps (`docs/guide/batch-size.md`): there, too,
# training longer came closest to the small batch, and ghost BatchNorm by itself changed nothing that three seeds
# would show.

# %% [markdown] tags=["slide"]
# ## Sharp and flat minima
#
# Keskar et al. (2017) say *why* large batches generalise worse: they end in **sharp minima**, where a small move of
# the weights raises the loss much.
#
# The test loss is a slightly moved training loss, so the story goes, and in a sharp valley a slight move costs much.

# %% [markdown]
# We look at three of the runs above: the small batch, the large batch with as many epochs, and the same large batch
# with as many updates. *Keskar's sharpness* is by how many percent the loss (plus one) can rise in a small box around
# the weights, each weight moved by no more than 0.001 of its size plus 0.001. The *slice* moves all weights along one
# random direction, of which more below.


# %%
def landscape(runs: str, options: str, name: str) -> list[dict]:
    """What `paceline landscape` says of each run; it also writes a page, landscape.html, to look at."""
    run(f"paceline landscape {runs} {options} --output {RUNS / name}", quiet=True, seconds=300)
    return json.loads((RUNS / name / "landscape.json").read_text())["runs"]


three = " ".join(f"{RUNS}/{name}-0" for name in ("small", "large", "large-longer"))
looked = landscape(three, "--samples 360 --measure curve,sharpness,curvature --epsilon 1e-3", "looked")
NAMES = ("batch 32", "batch 256", "batch 256, longer")
sharpness = [each["sharpness"][0]["percent"] for each in looked]
eigenvalues = [each["curvature"]["value"] for each in looked]

# %% tags=["slide"]
figure, (slices, numbers) = plt.subplots(1, 2, figsize=(10, 3.8), width_ratios=(3, 2))
for number, (name, each) in enumerate(zip(NAMES, looked, strict=True)):
    slices.plot(each["curve"]["positions"], each["curve"]["values"]["loss"], label=name)
    numbers.bar(np.arange(2) + 0.27 * number, [sharpness[number], eigenvalues[number]], width=0.25)
slices.set(xlabel="along a random direction", ylabel="training loss", title="A slice through three ends")
slices.legend()
numbers.set(yscale="log", title="Two measures")
numbers.set_xticks(np.arange(2) + 0.27, ["sharpness\n(Keskar, %)", "top\neigenvalue"])
plt.show()

# %%
for name, sharp, top, each in zip(NAMES, sharpness, eigenvalues, looked, strict=True):
    loss = each["results"]["train"]["loss"]
    print(f"{name:18} sharpness {sharp:8.3g} %   top eigenvalue {top:8.3g}   training loss {loss:8.3g}")
times = eigenvalues[2] / eigenvalues[0]
print(f"Trained on, batch 256 has {times:.2g} times the top eigenvalue of batch 32. (One seed each.)")
assert eigenvalues[1] > 2 * eigenvalues[0], "with as many epochs the large batch is sharper"
assert eigenvalues[2] < eigenvalues[1] / 2, "a large batch that trains on is flatter"

# %% [markdown]
# With as many epochs the large batch is sharper, as the paper says. But look at the training losses: it has not come
# down as far, and cross-entropy is flat in every direction where all samples are fitted. The same batch, trained on,
# is flatter than it was. Is it then as flat as the small batch? The last line compares them, at losses that are
# much nearer to one another. In the longer comparison of `docs/guide/batch-size.md`, with three seeds, it stayed
# sharper on each of them; with the root rule and ghosts in addition it ended flatter than the small batch, and was no
# better on test images for it. So the number of updates explains a part of the sharpness, not all of it.
#
# Look at the picture too. Does the slice say what the numbers say? It need not: it shows one direction of tens of
# thousands and goes far, while the numbers ask for the *worst* direction, close by. What is steep close by can be low
# far out.

# %% [markdown] tags=["slide"]
# ## Sharp is not a property of the function
#
# ReLU lets positive numbers through: `relu(a·x) = a · relu(x)` for `a > 0`.
#
# So multiply a layer's weights and biases by `a`, and divide the next layer's weights by `a`. **Every output stays
# what it was. The sharpness does not** (Dinh et al. 2017, *Sharp minima can generalize for deep nets*).

# %% tags=["setup"]
trained = train(16, [0.05] * 480, 0).network

# %% [markdown]
# **Exercise 3.5.** Do that to the two hidden layers of our MLP: `network[1]`, `network[3]` and `network[5]` are its
# `nn.Linear` layers. Multiply the first by `a`, and undo it in the second. Change the copy, not the network that was
# given.


# %% tags=["exercise"]
@torch.no_grad()
def rescaled(network: nn.Sequential, a: float) -> nn.Sequential:
    """A network that computes the same function with other weights."""
    network = copy.deepcopy(network)
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("3.5"):
    given, before = copy.deepcopy(trained), trained[1].weight.detach()
    changed = rescaled(given, 10.0)
    assert torch.equal(given[1].weight, before), "the network that was given has changed; work on the copy"
    assert torch.allclose(changed[1].weight, 10 * before), "the first layer's weights must be ten times as large"
    same = torch.allclose(changed(test_images), trained(test_images), atol=1e-3)
    assert same, "outputs have changed: multiply the first layer's bias too, divide only the weight of the second"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# The output of a layer is <code>weight · x + bias</code>: to make it <code>a</code> times as large, both grow. The
# second layer's bias is added after the division, so it stays. <code>tensor.mul_(a)</code> changes a tensor in place.
#
# </details>


# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
@torch.no_grad()
def rescaled(network: nn.Sequential, a: float) -> nn.Sequential:
    network = copy.deepcopy(network)
    network[1].weight.mul_(a)
    network[1].bias.mul_(a)
    network[3].weight.div_(a)
    return network


# %% tags=["slide"]
factors = [0.1, 0.2, 0.5, 1, 2, 5, 10]
copies = [rescaled(trained, a) for a in factors]
curvatures = [top_eigenvalue(each) for each in copies]
scores = [accuracy(each, test_images, test_labels) for each in copies]
figure, axis = plt.subplots(figsize=(7.5, 3.6))
axis.plot(factors, curvatures, "o-")
axis.set(xscale="log", yscale="log", xlabel="a", ylabel="top eigenvalue", title="Seven networks, one function")
axis.set_xticks(factors, [str(each) for each in factors])
axis.minorticks_off()
print(f"Test accuracy {min(scores):.2f} to {max(scores):.2f} %.")
print(f"Top eigenvalue {min(curvatures):.3g} to {max(curvatures):.3g}.")
assert max(curvatures) > 10 * min(curvatures)
assert max(scores) - min(scores) < 0.3

# %% [markdown]
# **What was learnt:** the same function can be as sharp as one likes. Sharpness compares networks only where their
# weights came about in the same way and their losses are alike; it proves nothing about generalisation by itself.
#
# ## Loss landscapes by hand
#
# Pictures of loss landscapes walk from the trained weights `w` along random directions: `loss(w + t·d)`. If `d` is
# any random vector, a network with larger weights looks flatter, since a step of one length means less to it. Li et
# al. (2018, arXiv:1712.09913) therefore scale `d`: a *filter* is all the weights that lead to one output of a layer
# (a row of a linear layer's matrix, an output channel of a convolution).

# %% [markdown] tags=["slide"]
# ## Filter-normalised directions
#
# Draw a random `d`. For each filter: `d_f ← d_f · ‖w_f‖ / ‖d_f‖`. Biases and the parameters of norms do not move.
#
# At `t = 1` each filter has moved by its own length. What rescaling does to the weights it now does to the direction
# as well.

# %% [markdown]
# **Exercise 3.6.** Write it for one parameter, whatever its shape: a linear layer's is `[outputs, inputs]`, a
# convolution's `[outputs, inputs, height, width]`, a bias has one axis only and gets zeros.


# %% tags=["exercise"]
def filter_normalised(direction: Tensor, weights: Tensor) -> Tensor:
    """The direction, with each filter as long as that of the weights; zeros for parameters of one axis."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
from paceline_advisor.landscape import measures

with exercise("3.6"):
    torch.manual_seed(0)
    w, d = torch.randn(4, 3, 2, 2), torch.randn(4, 3, 2, 2)
    scaled = filter_normalised(d, w)
    assert scaled.shape == w.shape, "the direction keeps its shape"
    lengths, wanted = scaled.flatten(1).norm(dim=1), w.flatten(1).norm(dim=1)
    assert torch.allclose(lengths, wanted), "each output's filter must have the length of the weights' filter"
    assert not filter_normalised(torch.randn(5), torch.randn(5)).any(), "biases do not move: zeros"
    linear = filter_normalised(torch.ones(4, 3), torch.full((4, 3), 2.0))
    assert linear.shape == (4, 3), "it must work for a linear layer's [outputs, inputs] too"
    assert torch.allclose(linear, torch.full((4, 3), 2.0)), "a row of ones beside a row of twos must become twos"
    paceline_says = measures.filter_normalised(d.flatten(), w.flatten(), {"layer": w.shape})
    assert torch.allclose(scaled.flatten(), paceline_says, atol=1e-5), "only lengths change, not a filter's direction"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# <code>weights.flatten(1).norm(dim=1)</code> are the lengths of all filters, one per output. To multiply a tensor of
# four axes with them, they need the shape <code>[outputs, 1, 1, 1]</code>: <code>.view(-1, *[1] * (weights.dim() -
# 1))</code>.
#
# </details>


# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
def filter_normalised(direction: Tensor, weights: Tensor) -> Tensor:
    if weights.dim() < 2:
        return torch.zeros_like(weights)
    ratio = weights.flatten(1).norm(dim=1) / direction.flatten(1).norm(dim=1)
    return direction * ratio.view(-1, *[1] * (weights.dim() - 1))


# %% [markdown]
# **What was learnt:** a direction's length has a meaning only beside that of the weights.
#
# First, Dinh's networks again. Along a plain random direction the same function shows three different valleys; along
# a filter-normalised one, one and the same:


# %%
@torch.no_grad()
def loss_at(network: nn.Module, moves: Sequence[Sequence[Tensor]], at: Sequence[float], x: Tensor, y: Tensor) -> float:
    """The loss where the weights are moved by so much of each direction."""
    moved = copy.deepcopy(network)
    for direction, share in zip(moves, at, strict=True):
        for each, step in zip(moved.parameters(), direction, strict=True):
            each.add_(step, alpha=share)
    return F.cross_entropy(moved(x), y).item()


ts = np.linspace(-1, 1, 25)
figure, (plain, normalised) = plt.subplots(1, 2, figsize=(10, 3.6))
curves = []
for a, style in ((0.2, "-"), (1, "--"), (5, ":")):
    network = rescaled(trained, a)
    torch.manual_seed(0)
    drawn = [torch.randn_like(each) for each in network.parameters()]
    direction = [filter_normalised(d, w) for d, w in zip(drawn, network.parameters(), strict=True)]
    plainly = [loss_at(network, [drawn], [0.3 * t], train_images, train_labels) for t in ts]
    plain.plot(0.3 * ts, plainly, style, label=f"a = {a}")
    curves.append([loss_at(network, [direction], [t], train_images, train_labels) for t in ts])
    normalised.plot(ts, curves[-1], style, linewidth=3, label=f"a = {a}")
plain.set(title="a plain random direction", xlabel="t", ylabel="training loss", yscale="log")
normalised.set(title="filter-normalised", xlabel="t", ylabel="training loss", yscale="log")
plain.legend()
normalised.legend()
assert np.allclose(curves[0], curves[2], rtol=1e-2, atol=1e-4), "the same function looks the same"

# %% [markdown]
# Now a run of Paceline, with a network of our own. It is in a file, so that commands find it too:

# %%
# %%writefile lab3_network.py
from torch import nn


def make(num_classes: int, in_channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64 * in_channels, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, num_classes),
    )


# %%
OWN = KIT | {"model.name": "lab3_network:make", "model.options": {}, "optimizer.lr": 0.05, "batch.global_size": 32}
paceline.train("digits", overrides=OWN, run_dir=RUNS / "own", quiet=True)
# The run names our file, and opening a run never runs code unless one says so: --trust-code.
(theirs,) = landscape(f"{RUNS}/own", "--trust-code --samples all --measure curve,surface --grid 15", "own-landscape")

# %% [markdown]
# And by hand. We need the run's weights, the images it was trained on, and the same two random vectors: Paceline's
# are functions of a seed and a number.

# %%
from lab3_network import make
from safetensors.torch import load_file

from paceline.data.image.dataset import stratified_split
from paceline.data.image.sets.digits import MEAN, STD

own = make(10, 1)
own.load_state_dict(load_file(next((RUNS / "own" / "checkpoints").glob("step-*/model.safetensors"))))
ids, _ = stratified_split(digits.target, 0.2)  # the fifth that the recipe holds out is always the same
x = (torch.tensor(digits.images[ids], dtype=torch.float32) / 16 - MEAN[0]) / STD[0]
y = torch.tensor(digits.target[ids])

flat = nn.utils.parameters_to_vector(own.parameters()).detach()
sizes = [each.numel() for each in own.parameters()]
axes_by_hand = []
for number in (0, 1):
    parts = measures.normal_vector(0, number, flat).split(sizes)
    axes_by_hand.append([filter_normalised(d.view_as(w), w) for d, w in zip(parts, own.parameters(), strict=True)])

curve = [loss_at(own, axes_by_hand[:1], [t], x, y) for t in theirs["curve"]["positions"]]
side = theirs["surface"]["x"]
surface = np.array([[loss_at(own, axes_by_hand, [s, t], x, y) for s in side] for t in side])

# %% tags=["slide"]
figure, (line, ours, product) = plt.subplots(1, 3, figsize=(12, 3.8))
line.plot(theirs["curve"]["positions"], theirs["curve"]["values"]["loss"], "o", label="paceline landscape")
line.plot(theirs["curve"]["positions"], curve, label="by hand")
line.set(xlabel="t", ylabel="training loss", title="one direction")
line.legend()
levels = np.geomspace(max(surface.min(), 1e-3) * 1.5, surface.max(), 12)
for axis, values, title in (
    (ours, surface, "two directions, by hand"),
    (product, np.array(theirs["surface"]["values"]["loss"]), "paceline landscape"),
):
    drawn_lines = axis.contour(side, side, values, levels=levels, cmap="viridis", norm="log")
    axis.clabel(drawn_lines, fontsize=7, fmt="%.2g")
    axis.plot(0, 0, "k*", markersize=10)
    axis.set(title=title, aspect="equal", xlabel="first direction", ylabel="second")
apart = max(abs(mine / other - 1) for mine, other in zip(curve, theirs["curve"]["values"]["loss"], strict=True))
print(f"Largest relative difference of the two curves: {apart:.1e}")
assert apart < 1e-2, "by hand and by Paceline must be one curve"

# %% [markdown]
# Two directions out of thousands show what is *typical* around the weights, not the steepest way out: that is what
# sharpness and the top eigenvalue are for. A smooth bowl in such a picture is no proof of a flat minimum.

# %% [markdown] tags=["slide"]
# ## What to remember
#
# 1. In as many epochs a larger batch takes fewer updates. Compare at both, with several seeds.
# 2. The linear rule holds far below the noise scale; beyond, it gives less and less. "8k" belongs to one recipe.
# 3. Warm-up helps over a steep beginning; it does not cure a rate that is too high for good.
# 4. LARS and LAMB give each layer a step in proportion to its weights.
# 5. Sharpness depends on scale and on how far training came: compare like with like.

# %% [markdown]
# ## For your own runs
#
# | question | command or key |
# |---|---|
# | how large a batch pays? | `paceline noise-scale RECIPE`, `paceline sweep-batch RECIPE`, `telemetry.noise_scale` |
# | which rate? | `paceline find-lr RECIPE`; `optimizer.lr_scaling`, `optimizer.lr_reference_batch` |
# | warm-up | `schedule.warmup`, `schedule.warmup_from=unscaled` |
# | layer by layer | `optimizer.name=lars` or `lamb`, with a weight decay |
# | training longer | `train.duration="7000 steps"` |
# | ghost BatchNorm, growing batch | `model.ghost_batch_norm`, `batch.growth` |
# | sharp or flat, and the gap | `paceline landscape RUN RUN` |
#
# ## Further reading
#
# * Goyal et al., *Accurate, large minibatch SGD: training ImageNet in 1 hour*, 2017, arXiv:1706.02677
# * Keskar et al., *On large-batch training for deep learning: generalization gap and sharp minima*, 2017,
#   arXiv:1609.04836
# * Hoffer, Hubara, Soudry, *Train longer, generalize better*, 2017, arXiv:1705.08741
# * Dinh et al., *Sharp minima can generalize for deep nets*, 2017, arXiv:1703.04933
# * McCandlish et al., *An empirical model of large-batch training*, 2018, arXiv:1812.06162
# * You, Gitman, Ginsburg, *Large batch training of convolutional networks*, 2017, arXiv:1708.03888 (LARS); You et
#   al., *Large batch optimization for deep learning*, 2019, arXiv:1904.00962 (LAMB)
# * Smith et al., *Don't decay the learning rate, increase the batch size*, 2018, arXiv:1711.00489
# * Krizhevsky, *One weird trick for parallelizing convolutional neural networks*, 2014, arXiv:1404.5997
# * Li et al., *Visualizing the loss landscape of neural nets*, 2018, arXiv:1712.09913
