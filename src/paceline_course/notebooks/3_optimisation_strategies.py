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
# Many devices need a large batch. What does a large batch need?
#
# * measure a generalisation gap, and decide whether it is more than chance
# * scale a learning rate, and know the limits of the rule
# * use warm-up, LARS, ghost batch norm and longer training
# * measure whether a minimum is sharp or flat, and know what this does not prove

# %% [markdown]
# **You should know** how a training loop in PyTorch works, and what a batch, an epoch and a learning rate are (lab
# 1). You do not need several processes (labs 2a and 2b): a global batch is the same for any number of devices.
#
# **Time:** about 90 minutes with six exercises. Everything is small enough for two processor cores; the text
# announces the longest cell.
#
# Terms used in this lab: an *update* (or *step*) is one change of the weights. The *global batch* is the number of
# samples in one update, over all devices. With *momentum* `m`, an update follows a running sum of gradients, in which
# each older gradient is multiplied by `m` once more. If the gradients agree, the update is `1 / (1 - m)` times as
# long. A *seed* determines the initial weights and the order of samples: two runs that differ only in the seed show
# the effect of chance.

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
from paceline_course import exercise, run, use_answer, use_style

use_style()
torch.set_num_threads(1)  # the networks are tiny: more threads would only wait for each other
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
warnings.filterwarnings("ignore", message="IProgress not found")  # from tqdm, which a library imports
SEEDS = range(5)

# %% [markdown]
# ## The problem: 512 digits to learn from
#
# Scikit-learn's handwritten digits: 1797 images of 8x8 pixels. We train on 512 of them and test on the other 1285. At
# an accuracy of 95 %, this number of test images gives a standard error of 0.6 points: other test images would change
# all our accuracies by about that much. But we compare accuracies on the same test images; the spread over seeds,
# below, shows how much chance in the *training* changes them. The network is a small *MLP* (multi-layer perceptron):
# two hidden layers of 128 units, each followed by a ReLU, `max(0, x)`.

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
# An epoch uses every sample once. With a batch of `B`, an epoch of `N` samples has `N / B` updates, rounded up.
#
# **A batch sixteen times as large makes sixteen times fewer updates in the same number of epochs.** So it is faster,
# but it may also end with a worse result.

# %% [markdown]
# **Exercise 3.1.** Write two functions: the number of updates in a training run, and the number of epochs that
# another batch size needs for that many updates. An incomplete batch at the end of an epoch is an update too.


# %% tags=["exercise"]
def updates(samples: int, batch: int, epochs: int) -> int:
    """Return the number of updates in `epochs` epochs."""
    raise NotImplementedError  # yours to write


def epochs_for(wanted: int, samples: int, batch: int) -> int:
    """Return the smallest number of whole epochs with at least `wanted` updates."""
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
# One epoch has <code>math.ceil(samples / batch)</code> updates. Both answers follow from this; the second needs
# <code>math.ceil</code> once more.
#
# </details>


# %% tags=["answer"]
use_answer("3.1")

# %% [markdown]
# **Learnt:** batch and epochs determine the number of updates. When you compare batch sizes, say whether you kept the
# epochs or the updates the same.

# %% [markdown] tags=["slide"]
# ## Is there a gap, and how large?
#
# Batch 16 against batch 256, five seeds each, at the same learning rate; 512 digits, first with correct labels, then
# with a fifth of the labels random. Each dot is a seed, each bar the mean of five.

# %% [markdown]
# *Generalisation gap* has two meanings. Keskar et al. (2017) mean **test accuracy with a small batch minus that with
# a large batch**; so do we in this section. Others, and the column `gap` of `paceline landscape`, mean training
# accuracy minus test accuracy.
#
# We train in three ways, all at the same learning rate, with five seeds each: a batch of 16 for 30 epochs; a batch of
# 256 for **the same number of epochs**; a batch of 256 for **the same number of updates**. Then we repeat this with
# *noisy labels*: a fifth of the training labels are replaced by random ones, as if people had labelled the images
# carelessly. The test labels stay correct.
#
# **Before you run it, write down your guess:** which of the two batch sizes is better on the noisy labels after the
# same number of epochs?

# %%
chance = torch.Generator().manual_seed(1)
noisy_labels = train_labels.clone()
wrong = (torch.rand(SAMPLES, generator=chance) < 0.2).to(device)
noisy_labels[wrong] = torch.randint(0, 10, (int(wrong.sum()),), generator=chance).to(device)

EPOCHS, RATE = 30, 0.05
few, many = updates(SAMPLES, 256, EPOCHS), updates(SAMPLES, 16, EPOCHS)
ways = {"batch 16": (16, many), "batch 256,\nsame epochs": (256, few), "batch 256,\nsame updates": (256, many)}
found: dict[str, dict[str, list[Run]]] = {
    kind: {
        way: [train(batch, [RATE] * count, seed, labels=y) for seed in SEEDS] for way, (batch, count) in ways.items()
    }
    for kind, y in (("correct labels", train_labels), ("a fifth of the labels random", noisy_labels))
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
# Is a difference more than chance? The *standard error* of a difference of two means tells how much it would vary
# with other seeds: the square root of `s1²/n + s2²/n`, where `s` is the standard deviation over `n` seeds. With so
# few seeds, a difference below three standard errors may well be chance.


# %%
def difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the difference of the means, first minus second, and its standard error."""
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
        comparison = "" if runs is small else f"{gap:+.1f} ± {error:.1f} points: {verdict}"
        print(f"  {name:32} {loss:12.5f} {on_test:7.2f}   {comparison}")

noisy_runs = found["a fifth of the labels random"]
print("Share of the random labels that it has learnt, on average:")
for way, runs in noisy_runs.items():
    learnt = np.mean([accuracy(each.network, train_images[wrong], noisy_labels[wrong]) for each in runs])
    print(f"  {way.replace(chr(10), ' '):32} {learnt:5.1f} %")

assert gaps["correct labels", "batch 256, same epochs"][0] > 1, "same epochs: the large batch is worse"
assert abs(gaps["correct labels", "batch 256, same updates"][0]) < 2, "same updates: most of the gap is gone"
assert gaps["a fifth of the labels random", "batch 256, same epochs"][0] < -4, "with noisy labels it is better"

# %% [markdown] tags=["slide"]
# ## What the results show
#
# * correct labels, same **epochs**: the large batch is worse. The reason is its higher training loss.
# * correct labels, same **updates**: most of the gap is gone. "May be chance" does not mean zero: only more seeds can
#   show a remaining gap.
# * noisy labels, same epochs: the large batch is **better**. It stopped before it had learnt the wrong labels.
#
# A batch size does not have one single "gap".

# %% [markdown]
# Hoffer, Hubara and Soudry (*Train longer, generalize better*, 2017, arXiv:1705.08741) claim that too few updates
# cause the gap. Keskar et al. (*On large-batch training for deep learning*, 2017, arXiv:1609.04836, Table 2) trained
# six networks until the loss no longer fell, with batches of 256 and of a tenth of the data. They found that a gap
# remained:
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
# Both can be right: data sets, networks, optimizers (Keskar et al. used Adam) and learning rates differ. In our
# experiment, too few updates caused most of the gap. Five seeds are too few to show whether another cause
# contributes. (With `SEEDS = range(20)` you can find out.)

# %% [markdown] tags=["slide"]
# ## The learning rate grows with the batch: two rules
#
# `k` times the batch:
#
# * **linear**: multiply the rate by `k`. One update with the mean of `k` gradients, `k` times as long, is about equal
#   to `k` small ones, *if the gradient changes little in between* (Goyal et al. 2017).
# * **square root**: multiply the rate by `√k`. This keeps the noise of an update constant: the mean of `k` gradients
#   has `√k` times less noise (Krizhevsky 2014).

# %% [markdown]
# **Exercise 3.2.** Implement the rules.


# %% tags=["exercise"]
def scaled_rate(rate: float, reference_batch: int, batch: int, rule: str) -> float:
    """Return the learning rate for ``batch``; ``rate`` is for ``reference_batch``. Rules: none, sqrt, linear."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("3.2"):
    assert scaled_rate(0.1, 256, 8192, "none") == 0.1, "without a rule the rate stays the same"
    assert math.isclose(scaled_rate(0.1, 256, 8192, "linear"), 3.2), "8192 is 32 times 256: Goyal's 3.2"
    assert math.isclose(scaled_rate(0.1, 256, 8192, "sqrt"), 0.1 * math.sqrt(32)), "the root of the ratio of batches"
    assert math.isclose(scaled_rate(0.1, 256, 64, "linear"), 0.025), "a smaller batch takes a smaller rate"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# The ratio is <code>batch / reference_batch</code>. The rules multiply the rate by its power 0, 1/2 or 1.
#
# </details>


# %% tags=["answer"]
use_answer("3.2")

# %% [markdown]
# **Learnt:** a rule is a power of the ratio of two batch sizes. A learning rate has no meaning without the batch size
# it is for.
#
# In Paceline a learning rate is absolute unless you set a rule; then the plan prints both rates. Here is a plan for
# `digits`, without training:

# %%
RULE = "optimizer.lr=0.05 optimizer.lr_scaling=linear optimizer.lr_reference_batch=16 schedule.warmup_from=unscaled"
plan = run(f"paceline train digits batch.global_size=512 {RULE} --plan-only", quiet=True, seconds=300)
shown = ("lr_scaling", "warmup", "from the peak")
print(*(line for line in plan.splitlines() if any(word in line for word in shown)), sep="\n")

# %% [markdown] tags=["slide"]
# ## Where does the rule fail?
#
# Batches from 16 to all 512 samples, 30 epochs each, with momentum 0.9. The rate is 0.025 at batch 16. Four seeds.

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
    print(f"batch {batch:3}: {row}" + ("" if batch == 16 else f"   best: {best}"))

linear_errors = [100 - mean for mean in means["linear"]]
lowest_at = int(np.argmin(linear_errors))
print(f"With the linear rule the error is lowest at a batch of {BATCHES[lowest_at]}: {linear_errors[lowest_at]:.1f} %.")
for batch, error in list(zip(BATCHES, linear_errors, strict=True))[lowest_at + 1 :]:
    print(f"  batch {batch:3}: {error - linear_errors[lowest_at]:+.1f} points")

at_128, at_512 = BATCHES.index(128), BATCHES.index(512)
assert means["linear"][at_128] > means["none"][at_128] + 0.5, "at 8 times the batch, the linear rule helps"
assert means["sqrt"][at_512] > means["linear"][at_512] + 20, "at 32 times the batch, the linear rule fails"

# %% [markdown]
# So the rule "double the batch, double the rate" has a limit on our problem too, but a very different one than on
# ImageNet. A lecture that says *"beyond batch size 8k, classification error starts increasing"* describes **one data
# set with one recipe**: ResNet-50 on ImageNet for 90 epochs with momentum SGD. With LARS (explained below), You et
# al. (2017) report ResNet-50 on the same data set with a batch of 32k without loss of accuracy. On our digits, the
# error with the linear rule rises at far smaller batches, as the last lines show. It rises a little at first, as in
# Goyal et al. beyond 8k, and at 512 the training fails. Why?

# %% [markdown] tags=["slide"]
# ## The reason: the noise of the gradient
#
# A batch's gradient is the true gradient `G` plus noise; a larger batch has less noise.
#
# `noise scale = (variance of one sample's gradient) / |G|²`, in samples.
#
# The best rate for one update is about `ε_max / (1 + noise scale / batch)`, where `ε_max` is the best rate for an
# infinite batch. It is **linear** if the batch is much smaller than the noise scale, and **constant** if it is much
# larger (McCandlish et al. 2018).

# %% [markdown]
# Let us measure this directly. For each batch size we make 40 updates without momentum at each of nine rates, and
# select the rate with the lowest final training loss.

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
# Next, the noise scale of the same network, from the gradients of all single samples: `vmap` computes all 512 at
# once. The squared norm of the mean gradient exceeds that of the true gradient by the variance divided by the number
# of samples, so we subtract this.


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
print(f"noise scale with initial weights: {fresh_noise:.3g} samples")
for count, scale in after.items():
    text = f"{scale:.3g} samples" if math.isfinite(scale) else "too large to measure: noise hides the mean gradient"
    print(f"after {count:3} updates: {text}")
assert min(after[160], 1e6) > fresh_noise, "in the long term the noise scale grows"

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
print(f"Noise scale: {fitted:.0f} samples from the best rates of 40 updates,")
print(f"{fresh_noise:.0f} samples from the gradients with initial weights.")
assert lowest[-1] / lowest[0] < SIZES[-1] / SIZES[0] / 4, "the best rate grows far less than the batch"

# %% [markdown]
# At best, the two numbers agree in their order of magnitude. You cannot expect more, because the law assumes a loss
# with the same curvature in all directions. But it is enough to know *before training* that 8k is not a universal
# limit.
#
# The noise scale is also not the limit of the linear rule in the 30 epochs above: there, the rule still worked at
# batches larger than this noise scale. The two experiments differ. Those runs had momentum 0.9, which makes updates
# up to ten times as long. They were long, and the noise scale grows during training. And we judged them by test
# accuracy, not by training loss after 40 updates. At 512, a batch has all samples, so there is no noise: that run
# fails because the rate is too high for the *curvature* of the loss, the topic of the next section. So use the noise
# scale as a warning: it shows, within a factor of about ten, where the linear rule starts to gain less. Then measure.
#
# McCandlish et al. (*An empirical model of large-batch training*, 2018, arXiv:1812.06162, Table 1) measured the
# *critical batch*: with it, training needs twice the minimum number of updates and twice the minimum number of
# samples:
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
# The values range from 20 to millions, and are larger on average than at the start. Paceline estimates it for any
# recipe, without training:

# %%
print(run("paceline noise-scale digits --steps 10", quiet=True, seconds=300))

# %% [markdown]
# In a real run, `telemetry.noise_scale="10 steps"` writes it to the step records without extra passes. The run warns
# you if a linear rule has raised the rate too far for this noise. `paceline sweep-batch` measures updates and samples
# to a target by training with several seeds.
#
# In the long term the noise scale **grows during training**, because the true gradient shrinks; ours may fall at
# first. So instead of lowering the rate, you can start with a small batch and increase it: a *batch-size schedule*
# (Smith et al. 2018, *Don't decay the learning rate, increase the batch size*, arXiv:1711.00489). In Paceline, use
# the key `batch.growth`.

# %% [markdown] tags=["slide"]
# ## Warm-up
#
# In the first steps the weights are random and the loss has its highest curvature. A rate that is right later may be
# too high at the start.
#
# **Gradual warm-up** (Goyal et al. 2017): start with the rate for the small batch, and raise it linearly to the full
# rate over the first epochs.
#
# ImageNet, ResNet-50, batch 8192 (their Table 1), validation error: no warm-up 24.84 %, constant warm-up 25.88 %,
# gradual 23.74 %; batch 256: 23.60 %.

# %% [markdown]
# **Exercise 3.3.** Write the warm-up as a function that depends only on the step. It must not count or store
# anything, so that a run resumed at step 1000 has the rate of step 1000. Step 0 has the rate `first`; step
# `warmup_steps` and all later ones have `peak`.


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
    assert same, "the rates differ from those of Paceline's schedule"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# Before <code>warmup_steps</code>, the rate has moved a share <code>step / warmup_steps</code> of the way from
# <code>first</code> to <code>peak</code>. Handle later steps first; this also handles a warm-up of 0 steps.
#
# </details>


# %% tags=["answer"]
use_answer("3.3")

# %% [markdown]
# **Learnt:** a schedule that is a pure function of the step has no state, so it always resumes correctly.
#
# Can warm-up prevent a run from failing? We take a network with a steep loss at the start: three hidden layers, with
# initial weights twice as large as they should be. The batch is 256 and the rate 0.15, with and without a warm-up
# over the first 30 % of updates. To measure the steepness, we need the *top eigenvalue of the Hessian*. The Hessian
# is the matrix of second derivatives, and its largest eigenvalue is the curvature in the most curved direction.
# *Power iteration* finds it: if you multiply any vector by the matrix repeatedly, it turns towards that direction. A
# product with the Hessian is the derivative of (gradient times vector), so we never need the matrix itself.


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
            nn.init.kaiming_normal_(layer.weight)  # with ReLU, keeps activations the same size in all layers
            layer.weight.data.mul_(2)  # makes them too large on purpose
            nn.init.zeros_(layer.bias)
    return network


HIGH, COUNT = 0.15, 120
warmed = [warmup_rate(step, HIGH / 36, HIGH, 36) for step in range(COUNT)]
without = [train(256, [HIGH] * COUNT, seed, make=steep) for seed in SEEDS]
with_it = [train(256, warmed, seed, make=steep) for seed in SEEDS]
lost = [sum(not each.train_loss < 1 for each in runs) for runs in (without, with_it)]  # counts NaN as lost too

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
right.set(
    yscale="log", xlabel="update of the warm-up", ylabel="curvature", title="Curvature falls while the rate rises"
)
right.legend()
plt.show()

# %%
print(f"Without warm-up {lost[0]} of {len(SEEDS)} runs failed, with warm-up {lost[1]}.")
print(f"The top eigenvalue fell from {steepness[0]:.3g} to {steepness[36]:.3g};")
print(f"the bound for a rate of {HIGH} is {2 * 1.9 / HIGH:.3g} (the text below explains this rule of thumb).")
assert lost[0] >= lost[1] + 2, "the warm-up prevents failures"
assert steepness[36] < steepness[0] / 3, "the loss is less curved after the warm-up"

# %% [markdown]
# A failed run may stay at a loss of about 2.3, which is `log(10)`: it guesses. Usually, large updates have moved the
# weights so far that the ReLUs output 0 for every image. Then there is no gradient to move them back.
#
# Why is there a bound? In a direction of curvature λ, a step of plain gradient descent multiplies the distance to the
# minimum by `1 - rate · λ`. If the rate exceeds `2 / λ`, each step moves farther away from the minimum. With momentum
# `m` the bound is `2 (1 + m) / λ`, for an exactly quadratic loss. Here it shows only roughly where problems begin.
#
# **Warm-up does not help if the rate is too high for the whole run.** Here is the linear rule at a batch of 512
# on the ordinary network again, with a warm-up over 20 % of its updates:

# %%
total = updates(SAMPLES, 512, EPOCHS)
peak = scaled_rate(BASE, 16, 512, "linear")
still = [
    train(512, [warmup_rate(step, BASE, peak, total // 5) for step in range(total)], seed).test_accuracy
    for seed in range(4)
]
cold = np.mean(by_rule["linear"][-1])
print(f"Rate {peak:g}, batch 512: test accuracy {cold:.1f} % without warm-up, {np.mean(still):.1f} % with it.")
assert np.mean(still) < 80, "warm-up does not help here"

# %% [markdown] tags=["slide"]
# ## LARS and LAMB: a rate for each layer
#
# The ratio of gradient norm to weight norm differs from layer to layer. A single rate that is safe for all layers is
# slow for most.
#
# **LARS** (You et al. 2017): each layer's step is a fixed share `η` of its weight norm,
#
# `layer rate = η · ‖w‖ / (‖g‖ + β ‖w‖)`,
#
# with the gradient `g` and the weight decay `β`. **LAMB** (You et al. 2019) does the same with Adam's update.

# %% [markdown]
# Weight decay pulls weights towards zero. The layer rate is multiplied by the schedule's rate.
#
# **Exercise 3.4.** Write the layer rate. `‖·‖` is the square root of the sum of squares. If the weights or the
# gradient of a layer are all zero, its layer rate is 1.


# %% tags=["exercise"]
def lars_rate(weights: Tensor, gradient: Tensor, weight_decay: float, trust: float = 0.001) -> float:
    """Return the factor by which LARS multiplies this layer's learning rate; ``trust`` is η."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
from timm.optim import Lars  # used by Paceline for optimizer.name=lars

with exercise("3.4"):
    w, g = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.5])
    assert math.isclose(lars_rate(w, g, 0.0), 0.01, rel_tol=1e-5), "0.001 · 5 / 0.5 without decay: norms, not sums"
    assert math.isclose(lars_rate(w, g, 0.1), 0.005, rel_tol=1e-5), "the decay adds β ‖w‖ = 0.5 to the denominator"
    assert lars_rate(torch.zeros(2), g, 0.1) == 1, "with a rate of 0, zero weights would stay zero: the layer rate is 1"
    assert lars_rate(w, torch.zeros(2), 0.0) == 1, "no gradient, no decay: 1, and no division by zero"
    layer = nn.Parameter(w.clone())
    layer.grad = g.clone()
    Lars([layer], lr=2.0, weight_decay=0.1, trust_coeff=0.001).step()
    mine = w - 2.0 * lars_rate(w, g, 0.1) * (g + 0.1 * w)
    assert torch.allclose(layer.detach(), mine, atol=1e-5), "one step of timm's Lars gives other weights"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# <code>weights.norm().item()</code> is the norm. Return 1.0 if one of the two norms is 0.
#
# </details>


# %% tags=["answer"]
use_answer("3.4")

# %%
torch.manual_seed(0)
looked_at = {"initial": mlp().to(device), "after 20 updates": train(256, [0.1] * 20, 0).network}
for when, network in looked_at.items():
    network.zero_grad()
    F.cross_entropy(network(train_images), train_labels).backward()
    layer_rates = [lars_rate(each.weight, each.weight.grad, 5e-4) for each in network if isinstance(each, nn.Linear)]
    print(f"{when:17} first, second, last layer: " + ", ".join(f"{rate:.4f}" for rate in layer_rates))
    print(f"{'':17} the highest is {max(layer_rates) / min(layer_rates):.1f} times the lowest")

# %% [markdown]
# **Learnt:** LARS makes the norm of a step a share of the layer's weight norm, so it no longer depends on the
# gradient norm. Biases, normalisation layers and layers without weight decay have no layer rate. LARS's learning
# rates cannot be compared with SGD's: the 8 below is not "high".

# %% [markdown] tags=["slide"]
# ## Everything combined, with Paceline
#
# A small convolutional network with BatchNorm, batch 32 against 256. Each method is a few overrides. Two are new:
#
# * **training longer** (Hoffer et al. 2017): the same number of updates, not epochs
# * **ghost BatchNorm** (same paper): statistics over groups of 32 samples, for any batch size

# %% [markdown]
# *BatchNorm* shifts and scales each layer's activations to mean 0 and variance 1 over the batch. With few samples its
# statistics are noisier, and this noise may help generalisation. Ghost BatchNorm keeps the noise in a large batch.
#
# We train with three seeds each, first for the same number of epochs. `paceline.train` does the same as the command.

# %%
SMALLER = {"model.options": {"width": 8, "stages": 2}, "data.augment.crop": "none", "train.duration": "8 epochs"}
PLAIN = {"train.label_smoothing": 0.0, "train.ema": "off", "optimizer.lr": 0.1, "optimizer.weight_decay": 0.0}
SPARE = {"schedule.warmup": "0%", "evaluate.every": "100%", "checkpoint.every": "off", "telemetry.trackers": []}
KIT = SMALLER | PLAIN | SPARE
LARGE = {"batch.global_size": 256}
WARMUP = {"schedule.warmup": "20%"}
LINEAR = {"optimizer.lr_scaling": "linear", "optimizer.lr_reference_batch": 32} | WARMUP
ROOT = {"optimizer.lr_scaling": "sqrt", "optimizer.lr_reference_batch": 32}
DECAY = {"optimizer.weight_decay": 5e-4}  # LARS scales only layers with weight decay
LARS = {"optimizer.name": "lars", "optimizer.lr": 8.0, "optimizer.nesterov": False} | DECAY | WARMUP
GHOSTS = {"model.ghost_batch_norm": 32}

RUNS = Path("lab3-runs")
shutil.rmtree(RUNS, ignore_errors=True)  # from an earlier run of this notebook
kit: dict[str, list[float]] = {}


def thrice(name: str, changes: dict) -> None:
    """Train with three seeds and store the accuracies."""
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
# Now we train for the same number of updates. This takes eight times as many samples, so this is the longest cell of
# the lab: training longer has a cost.

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
print(f"One test image is {image:.2f} points. Difference of the medians from the small batch:")
for name, scores in kit.items():
    apart = np.median(kit["small"]) - np.median(scores)
    overlap = max(scores) >= min(kit["small"]) and min(scores) <= max(kit["small"])
    seeds = "the seeds overlap" if overlap else "the seeds do not overlap"
    if name != "small":
        print(f"  {name:26} {0 - apart:+.2f} points, {round(abs(apart) / image)} images; {seeds}")
assert np.median(kit["small"]) >= np.median(kit["large"]), "same epochs, same rate: the large batch is no better"

# %% [markdown]
# Be careful with such a table: where the seeds overlap, three of them show nothing. Where they do not overlap, ask
# what else differs. `large-lars` also has a weight decay, a warm-up and no Nesterov momentum, and its rate of 8 was
# the best of five in an earlier study of these digits; the other methods were not tuned. `docs/guide/batch-size.md`
# has the same comparison with 20 epochs. There, too, training longer came closest to the small batch, and ghost
# BatchNorm alone made no difference that three seeds could show.

# %% [markdown] tags=["slide"]
# ## Sharp and flat minima
#
# Keskar et al. (2017) explain *why* large batches generalise worse: they end in **sharp minima**, where a small
# change of the weights raises the loss a lot.
#
# The argument: the test loss is a slightly shifted training loss, and near a sharp minimum a small shift raises the
# loss a lot.

# %% [markdown]
# We examine three of the runs above: the small batch, the large batch with the same number of epochs, and the large
# batch with the same number of updates. *Keskar's sharpness* is the largest rise of the loss in a small box around
# the weights, in percent of (loss + 1). In the box, each weight changes by at most 0.001 of its size plus 0.001. The
# *slice* moves all weights along one random direction, explained below.


# %%
def landscape(runs: str, options: str, name: str) -> list[dict]:
    """Return the results of `paceline landscape` for each run; it also writes a page, landscape.html."""
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
slices.set(xlabel="along a random direction", ylabel="training loss", title="A slice through three minima")
slices.legend()
numbers.set(yscale="log", title="Two measures")
numbers.set_xticks(np.arange(2) + 0.27, ["sharpness\n(Keskar, %)", "top\neigenvalue"])
plt.show()

# %%
for name, sharp, top, each in zip(NAMES, sharpness, eigenvalues, looked, strict=True):
    loss = each["results"]["train"]["loss"]
    print(f"{name:18} sharpness {sharp:8.3g} %   top eigenvalue {top:8.3g}   training loss {loss:8.3g}")
times = eigenvalues[2] / eigenvalues[0]
print(f"After longer training, batch 256 has {times:.2g} times the top eigenvalue of batch 32. (One seed each.)")
assert eigenvalues[1] > 2 * eigenvalues[0], "with the same number of epochs the large batch is sharper"
assert eigenvalues[2] < eigenvalues[1] / 2, "after longer training the large batch is flatter"

# %% [markdown]
# With the same number of epochs the large batch is sharper, as the paper says. But look at the training losses: the
# loss of the large batch is higher, and cross-entropy becomes flat in every direction once all samples are fitted.
# After longer training, the large batch is flatter. Is it then as flat as the small batch? The last line compares
# them at more similar losses. In the longer comparison in `docs/guide/batch-size.md`, with three seeds, the large
# batch stayed sharper with every seed. With the square root rule and ghost BatchNorm in addition, it ended flatter
# than the small batch, but was no better on test images. So the number of updates explains a part of the sharpness,
# not all of it.
#
# Look at the figure too. Does the slice agree with the numbers? It may not: it shows one of tens of thousands of
# directions, far from the minimum, while the numbers describe the *worst* direction near the minimum. A loss that is
# steep near the minimum can still be low far away.

# %% [markdown] tags=["slide"]
# ## Sharpness is not a property of the function
#
# ReLU lets positive numbers through: `relu(a·x) = a · relu(x)` for `a > 0`.
#
# So multiply a layer's weights and biases by `a`, and divide the next layer's weights by `a`. **The outputs do not
# change, but the sharpness does** (Dinh et al. 2017, *Sharp minima can generalize for deep nets*).

# %% tags=["setup"]
trained = train(16, [0.05] * 480, 0).network

# %% [markdown]
# **Exercise 3.5.** Do this with the two hidden layers of our MLP: `network[1]`, `network[3]` and `network[5]` are its
# `nn.Linear` layers. Multiply the first by `a`, and undo this in the second. Change the copy, not the given network.


# %% tags=["exercise"]
@torch.no_grad()
def rescaled(network: nn.Sequential, a: float) -> nn.Sequential:
    """Return a network that computes the same function with other weights."""
    network = copy.deepcopy(network)
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("3.5"):
    given, before = copy.deepcopy(trained), trained[1].weight.detach()
    changed = rescaled(given, 10.0)
    assert torch.equal(given[1].weight, before), "the given network has changed; change only the copy"
    assert torch.allclose(changed[1].weight, 10 * before), "the first layer's weights must be ten times as large"
    same = torch.allclose(changed(test_images), trained(test_images), atol=1e-3)
    assert same, "outputs have changed: multiply the first layer's bias too, divide only the weight of the second"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# The output of a layer is <code>weight · x + bias</code>: to make it <code>a</code> times as large, multiply both by
# <code>a</code>. The second layer's bias is added after the division, so it stays the same.
# <code>tensor.mul_(a)</code> changes a tensor in place.
#
# </details>


# %% tags=["answer"]
use_answer("3.5")

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
# **Learnt:** the same function can be arbitrarily sharp. You can compare the sharpness of two networks only if they
# were trained in the same way to similar losses. Sharpness alone proves nothing about generalisation.
#
# ## Loss landscapes by hand
#
# Plots of loss landscapes move from the trained weights `w` along random directions: `loss(w + t·d)`. If `d` is an
# arbitrary random vector, a network with larger weights looks flatter, because the same step is a smaller relative
# change. Li et al. (2018, arXiv:1712.09913) therefore scale `d` for each filter. A *filter* is all the weights that
# lead to one output of a layer (a row of a linear layer's matrix, an output channel of a convolution).

# %% [markdown] tags=["slide"]
# ## Filter-normalised directions
#
# Draw a random `d`. For each filter: `d_f ← d_f · ‖w_f‖ / ‖d_f‖`. Biases and the parameters of normalisation layers
# do not move.
#
# At `t = 1` each filter has moved by its own norm. If you rescale the weights, the direction is rescaled in the same
# way.

# %% [markdown]
# **Exercise 3.6.** Write it for one parameter of any shape. A linear layer's weight is `[outputs, inputs]`, a
# convolution's is `[outputs, inputs, height, width]`. A bias has only one axis and gets zeros.


# %% tags=["exercise"]
def filter_normalised(direction: Tensor, weights: Tensor) -> Tensor:
    """Return the direction with each filter scaled to the norm of the weights' filter; zeros for one axis."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
from paceline_advisor.landscape import measures

with exercise("3.6"):
    torch.manual_seed(0)
    w, d = torch.randn(4, 3, 2, 2), torch.randn(4, 3, 2, 2)
    scaled = filter_normalised(d, w)
    assert scaled.shape == w.shape, "the direction keeps its shape"
    lengths, wanted = scaled.flatten(1).norm(dim=1), w.flatten(1).norm(dim=1)
    assert torch.allclose(lengths, wanted), "each output's filter must have the norm of the weights' filter"
    assert not filter_normalised(torch.randn(5), torch.randn(5)).any(), "biases do not move: zeros"
    linear = filter_normalised(torch.ones(4, 3), torch.full((4, 3), 2.0))
    assert linear.shape == (4, 3), "it must work for a linear layer's [outputs, inputs] too"
    assert torch.allclose(linear, torch.full((4, 3), 2.0)), (
        "for a weight row of twos, a direction row of ones must become twos"
    )
    paceline_says = measures.filter_normalised(d.flatten(), w.flatten(), {"layer": w.shape})
    assert torch.allclose(scaled.flatten(), paceline_says, atol=1e-5), (
        "only the norm of a filter may change, not its direction"
    )

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# <code>weights.flatten(1).norm(dim=1)</code> gives the norms of all filters, one per output. To multiply a tensor
# of four axes by them, they need the shape <code>[outputs, 1, 1, 1]</code>: <code>.view(-1, *[1] * (weights.dim() -
# 1))</code>.
#
# </details>


# %% tags=["answer"]
use_answer("3.6")

# %% [markdown]
# **Learnt:** the norm of a direction has a meaning only relative to that of the weights.
#
# First, we plot Dinh's networks again. Along a plain random direction, the same function shows three different
# curves; along a filter-normalised direction, the three curves are identical:


# %%
@torch.no_grad()
def loss_at(network: nn.Module, moves: Sequence[Sequence[Tensor]], at: Sequence[float], x: Tensor, y: Tensor) -> float:
    """Return the loss after moving the weights by `at` along each direction."""
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
assert np.allclose(curves[0], curves[2], rtol=1e-2, atol=1e-4), "the same function gives the same curve"

# %% [markdown]
# Now we train our own network with Paceline. It is in a file, so that commands can import it too:

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
# The run refers to our file; Paceline runs code named by a run only with --trust-code.
(theirs,) = landscape(f"{RUNS}/own", "--trust-code --samples all --measure curve,surface --grid 15", "own-landscape")

# %% [markdown]
# And now by hand. We need the run's weights, its training images, and the same two random vectors: Paceline computes
# them from a seed and a number.

# %%
from lab3_network import make
from safetensors.torch import load_file

from paceline.data.image.dataset import stratified_split
from paceline.data.image.sets.digits import MEAN, STD

own = make(10, 1)
own.load_state_dict(load_file(next((RUNS / "own" / "checkpoints").glob("step-*/model.safetensors"))))
ids, _ = stratified_split(digits.target, 0.2)  # the recipe always holds out the same fifth
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
assert apart < 1e-2, "the curve by hand must equal Paceline's"

# %% [markdown]
# Two directions out of thousands show what is *typical* around the weights, not the steepest direction; sharpness and
# the top eigenvalue measure that. A smooth bowl in such a plot does not prove that a minimum is flat.

# %% [markdown] tags=["slide"]
# ## What to remember
#
# 1. A larger batch makes fewer updates per epoch. Compare with the same epochs and the same updates, with several
#    seeds.
# 2. The linear rule is valid far below the noise scale. "8k" is the limit of one recipe.
# 3. Warm-up helps with high curvature at the start, not with a rate that is always too high.
# 4. LARS and LAMB give each layer a step in proportion to its weights.
# 5. Sharpness depends on the weights' scale and the training loss: compare only similar networks.

# %% [markdown]
# ## For your own runs
#
# | question | command or key |
# |---|---|
# | how large a batch? | `paceline noise-scale RECIPE`, `paceline sweep-batch RECIPE`, `telemetry.noise_scale` |
# | which rate? | `paceline find-lr RECIPE`; `optimizer.lr_scaling`, `optimizer.lr_reference_batch` |
# | warm-up | `schedule.warmup`, `schedule.warmup_from=unscaled` |
# | a rate for each layer | `optimizer.name=lars` or `lamb`, with a weight decay |
# | training longer | `train.duration="7000 steps"` |
# | ghost BatchNorm, growing batch | `model.ghost_batch_norm`, `batch.growth` |
# | sharpness and generalisation gap | `paceline landscape RUN RUN` |
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
