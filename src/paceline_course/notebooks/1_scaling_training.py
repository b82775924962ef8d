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
# # Lab 1: Scaling training
#
# Why is one device not enough, and what do you gain from a larger batch?

# %% [markdown]
# **After this lab you can**
#
# - calculate how long a training run takes, from three numbers;
# - explain what stochastic gradient descent does with a batch, and how noisy its gradients are;
# - distinguish *samples per second* from *time to a result*, and measure both;
# - find where the time of a training step is spent;
# - predict the error with a large training set from small ones;
# - define the speed-up and the efficiency of several devices, and explain what limits them.
#
# **You need** Python, the basics of PyTorch (tensors, `nn.Module`, `loss.backward()`), derivatives, logarithms, mean
# and standard deviation. No other lab comes before this one.
#
# **Time:** about 75 minutes. There are six exercises of at most five minutes each. The check below each exercise says
# whether it is done. Below the check is a hint: click the word *Hint* to open it. The cell `use_answer(…)` after it
# lets you continue in any case: if your code is not done, later cells use the course's answer. To try again, run your
# own cell, then the check.
#
# Run the cells from top to bottom. Together they take one to two minutes on two idle processor cores. A cell with
# `run(…)` runs a command and shows its output when it has finished.

# %% tags=["setup"]
import json
import time

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, NullLocator
from sklearn.datasets import load_digits
from torch import nn

from paceline_course import exercise, run, use_answer, use_style

use_style()
torch.set_num_threads(1)  # the network below is too small for several threads
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
print(f"PyTorch {torch.__version__} on {device}")


def plain_ticks(*axes: Axis) -> None:
    """Label a logarithmic axis 1, 3, 10, 30, …"""
    for axis in axes:
        axis.set_major_locator(LogLocator(subs=(1, 3)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:,g}")


# %% [markdown]
# ## 1. Why more than one device?
#
# First, some terms. A neural network has **weights**, numbers that training adjusts. The **loss** measures how wrong
# its answers are; training reduces it. A **sample** is one example to learn from, such as an image with its label.
# One pass through all samples of the training set is an **epoch**. **Throughput** is the number of samples a machine
# trains on per second. A **device** does the computing: a processor (CPU), or a graphics processor (GPU), which does
# very many small calculations at once.
#
# ImageNet, for many years the most used image benchmark, has 1,281,167 training images. A typical training run has 90
# epochs. How long does that take?
#
# **Exercise 1.1.** Write a function that returns the training time in hours.


# %% tags=["exercise"]
def training_hours(epochs: float, samples: int, throughput: float) -> float:
    """Return the hours for `epochs` passes over `samples` samples; the throughput is in samples per second."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("1.1"):
    hour = training_hours(epochs=1, samples=3600, throughput=1.0)
    assert hour is not None, "the function returns nothing: end it with `return …`"
    assert hour != 3600, "3,600 is the time in seconds: divide by the seconds of an hour"
    assert abs(hour - 1) < 1e-9, f"3,600 samples at one per second take 1 hour, not {hour}"
    assert abs(training_hours(2, 3600, 4.0) - 0.5) < 1e-9, (
        "2 epochs of 3,600 samples at four per second take half an hour"
    )

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# The number of all samples, <code>epochs * samples</code>, divided by the throughput, is the time in seconds. An hour
# has 3,600 seconds.
#
# </details>


# %% tags=["answer"]
use_answer("1.1")

# %% [markdown]
# *Learnt: time = epochs × samples / throughput. Remember this formula; the whole course is based on it.*
#
# Now use it with published numbers. NVIDIA measured ResNet-50, a network for images, on its own machines, with V100
# GPUs (2017) and A100 GPUs (2020). TF32 rounds 32-bit numbers before multiplying them; "mixed precision" does most of
# the arithmetic with 16-bit numbers. Both are faster than full 32-bit arithmetic.

# %%
IMAGENET = 1_281_167
# Images per second. NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md,
# tables "Training performance" of DGX-1 16GB and DGX A100.
RESNET50 = {
    "1 V100, 32 bits": 367,
    "1 A100, TF32": 938,
    "1 A100, mixed precision": 2_470,
    "8 A100, mixed precision": 16_621,
}
for machine, images_per_second in RESNET50.items():
    hours = training_hours(90, IMAGENET, images_per_second)
    print(f"{machine:<25}{hours:6.1f} hours for 90 epochs of ImageNet")

# %% [markdown]
# The same README gives about 92, 36 and 14 hours for the first three. These times include validation (scoring
# held-out images). Our formula counts only training, so it correctly gives a little less each time.
#
# How long did other training runs take? The next figure shows **GPU-hours**: one GPU-hour is one GPU for one hour.

# %% [markdown] tags=["slide"]
# ## One device is not enough
#
# - Devices became faster: the same ResNet-50 takes a fraction of the time.
# - Models grew even faster: since 2010, the computation to train milestone systems has doubled about every six months
#   (Sevilla et al. 2022).
# - When one device is too slow, many must work together.

# %% tags=["slide"]
trainings = {
    # Krizhevsky, Sutskever, Hinton, NeurIPS 2012: two GTX 580 for five to six days; drawn at 5.5.
    "AlexNet, 2012\n(GTX 580)": 2 * 5.5 * 24,
    "ResNet-50\n(V100, 32 bits)": training_hours(90, IMAGENET, RESNET50["1 V100, 32 bits"]),
    "ResNet-50\n(A100, mixed precision)": training_hours(90, IMAGENET, RESNET50["1 A100, mixed precision"]),
    # Meta, Llama 3 model card, 2024: 1.3 million hours of H100-80GB, for 15 trillion tokens (pieces of words).
    "Llama 3 8B, 2024\n(H100)": 1.3e6,
}
figure, axes = plt.subplots(figsize=(7.5, 3.2))
axes.barh(list(trainings), list(trainings.values()), color=["C0", "C0", "C0", "C1"])
axes.set(xscale="log", xlim=(1, 1e7), xlabel="GPU-hours", title="One training run, on one device")
axes.invert_yaxis()
axes.grid(visible=False, axis="y")
for name, hours in {"a day": 24, "a year": 24 * 365, "a century": 24 * 36_500}.items():
    axes.axvline(hours, color="black", linewidth=1, linestyle=":")
    axes.text(hours * 1.15, 1.98, name, fontsize=9, va="center", backgroundcolor="white")
plt.show()
years = trainings["Llama 3 8B, 2024\n(H100)"] / 24 / 365
print(f"Llama 3 8B on a single H100: {years:.0f} years.")

# %% [markdown]
# There is a second, practical reason: **people**. If a training run takes four days, you can try about ninety ideas a
# year. If it takes an hour, you can try one before lunch and another one after it. Short training times make a group
# productive.
#
# How can several devices share one training run? This course uses **data parallelism**: each device takes a part of
# the samples of each batch. To see when this pays off, we must know what the batch size changes. So we start small.

# %% [markdown]
# ## 2. Gradient descent, and stochastic gradient descent
#
# The simplest model is a straight line. It has two weights, slope and intercept; its loss is the mean squared error
# over 256 points. The **gradient** points in the direction in which the loss rises most steeply, so training moves
# the weights in the opposite direction: `weights -= learning_rate * gradient`. One such update is a **step** (or
# iteration); the **learning rate** sets its size.

# %% tags=["setup"]
generator = torch.Generator().manual_seed(0)
x = torch.rand(256, generator=generator) * 2.5 - 0.5
y = 1.5 * x + 0.5 + 0.5 * torch.randn(256, generator=generator)


def mean_squared_error(weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss of the line with weights [slope, intercept]."""
    return ((weights[0] * x + weights[1] - y) ** 2).mean()


# %% [markdown]
# **Exercise 1.2.** Write the gradient of this loss by hand (no autograd): the two derivatives, with respect to slope
# and intercept.


# %% tags=["exercise"]
def gradient(weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return [d loss / d slope, d loss / d intercept] for the given samples."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("1.2"):
    here = torch.tensor([0.3, -0.2], requires_grad=True)
    (expected,) = torch.autograd.grad(mean_squared_error(here, x[:10], y[:10]), here)
    found = gradient(here.detach(), x[:10], y[:10])
    assert torch.is_tensor(found), f"return a tensor, not a {type(found).__name__}: use torch.stack([…, …])"
    assert found.shape == (2,), f"the gradient has two numbers; yours has the shape {tuple(found.shape)}"
    assert not torch.allclose(2 * found, expected, rtol=1e-3), "the derivative of a square has a factor of 2"
    assert not torch.allclose(found, 10 * expected, rtol=1e-3), "take the mean over the samples, not the sum"
    assert not torch.allclose(found, expected.flip(0), rtol=1e-3), "the two are swapped: the slope's comes first"
    assert not torch.allclose(found, -expected, rtol=1e-3), (
        "the sign is the wrong way round: the residual is prediction - y"
    )
    assert torch.allclose(found, expected, rtol=1e-3), f"found {found.tolist()}, and autograd says {expected.tolist()}"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# With <code>residual = weights[0] * x + weights[1] - y</code> the loss is the mean of <code>residual ** 2</code>. Its
# derivative with respect to the intercept is the mean of <code>2 * residual</code>. For the slope, the chain rule
# adds one more factor.
#
# </details>


# %% tags=["answer"]
use_answer("1.2")

# %% [markdown]
# *Learnt: the gradient of a mean is the mean of the samples' gradients. You can compute it over any set of samples.*
#
# This is the whole idea of **stochastic gradient descent** (SGD). *Gradient descent* computes the gradient over all
# samples and makes one step per epoch. SGD computes it over a few random samples, a **batch** (or mini-batch), and
# makes a step immediately. Each of its steps is less exact, but it makes many steps for the cost of one.


# %%
def descend(batch: int, epochs: int, learning_rate: float = 0.1, seed: int = 0) -> torch.Tensor:
    """The weights before the first step and after each step, [steps + 1, 2]."""
    order = torch.Generator().manual_seed(seed)
    weights = torch.tensor([-0.5, 2.0])
    path = [weights]
    for _ in range(epochs):
        for chosen in torch.randperm(len(x), generator=order).split(batch):
            weights = weights - learning_rate * gradient(weights, x[chosen], y[chosen])
            path.append(weights)
    return torch.stack(path)


paths = {"all 256": descend(256, epochs=32), "8": descend(8, epochs=4), "1": descend(1, epochs=1)}
samples_per_step = {"all 256": 256, "8": 8, "1": 1}

# %% [markdown] tags=["slide"]
# ## Many rough steps beat one exact step
#
# - Gradient descent makes one smooth step per epoch.
# - SGD makes one rough step per batch: many per epoch.
# - With a constant learning rate, the noise keeps SGD from settling exactly at the minimum.

# %% tags=["slide"]
best = torch.linalg.lstsq(torch.stack([x, torch.ones_like(x)], 1), y).solution
least = mean_squared_error(best, x, y)
slopes, intercepts = torch.meshgrid(torch.linspace(-0.8, 2.2, 80), torch.linspace(-0.4, 2.7, 80), indexing="xy")
surface = ((slopes[..., None] * x + intercepts[..., None] - y) ** 2).mean(-1)
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2))
left.contour(
    slopes, intercepts, surface, levels=np.geomspace(float(least) * 1.03, 8, 12), colors="grey", linewidths=0.7
)
for (name, path), style in zip(paths.items(), ("o-", ".-", "-"), strict=True):
    count = 33 if name != "1" else 257
    left.plot(*path[:count].T, style, linewidth=1, markersize=4, label=f"{name}: {count - 1} steps")
    excess = torch.stack([mean_squared_error(weights, x, y) for weights in path]) - least
    right.loglog(np.arange(1, len(path)) * samples_per_step[name], excess[1:], style, linewidth=1, markersize=4)
left.plot(*best, "k*", markersize=14, label="lowest loss")
left.set(xlabel="slope", ylabel="intercept", title="Paths over the loss")
left.legend(title="batch", fontsize=9, loc="lower left")
right.axvline(256, color="black", linewidth=1, linestyle=":")
right.text(270, float(excess.max()), "one epoch", fontsize=9)
right.set(xlabel="samples seen", ylabel="loss above its minimum", title="Progress in one epoch")
plt.show()


def excess_after_epoch(name: str) -> float:
    return float(mean_squared_error(paths[name][256 // samples_per_step[name]], x, y) - least)


print("Loss above its minimum after one epoch:")
for name in paths:
    print(f"batch {name}: {excess_after_epoch(name):.3f}")
assert excess_after_epoch("8") < excess_after_epoch("all 256") / 4

# %% [markdown]
# (On the left, the path for batch 8 stops after one epoch, which is 32 steps. You can compare it with 32 steps of
# gradient descent, which took 32 epochs.) How rough is a step? Compute the derivative with respect to the slope at
# one point, for many random batches, and look at its standard deviation.
#
# **Exercise 1.3.** Predict before you measure. With a batch of 100 instead of a single sample, how many times smaller
# is the standard deviation of the gradient? Write the number; the check then measures it.

# %% tags=["setup"]
# The derivative of each sample's own loss with respect to the slope, at slope 0 and intercept 0.
slope_gradients = -2 * y * x


def gradient_noise(batch: int, draws: int = 4_000) -> float:
    """Return the standard deviation of a batch's mean gradient, over `draws` batches drawn with replacement."""
    order = torch.Generator().manual_seed(batch)
    batches = torch.randint(len(x), (draws, batch), generator=order)
    return float(slope_gradients[batches].mean(dim=1).std())


# %% tags=["exercise"]
times_less_noise = ...

# %% tags=["check"]
with exercise("1.3"):
    assert times_less_noise is not ..., "write your prediction in place of the dots"
    assert isinstance(times_less_noise, int | float), "write one number"
    assert times_less_noise > 1, "how many times *smaller* is it? A number above 1"
    measured = gradient_noise(1) / gradient_noise(100)
    close = 0.8 < times_less_noise / measured < 1.25
    assert close, f"you predicted {times_less_noise:g} times less, but the measured factor is {measured:.1f}: why?"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# The gradient of a batch is a mean of B independent draws. The variance of a mean is the variance of one draw divided
# by B. The standard deviation is the square root of the variance.
#
# </details>

# %% tags=["answer"]
use_answer("1.3")

# %% [markdown] tags=["slide"]
# ## A larger batch is less noisy, at a cost
#
# The noise of a batch's gradient is proportional to 1 / √B: half the noise needs four times the samples.

# %% tags=["slide"]
batches = 2 ** np.arange(0, 11, 2)
noise = np.array([gradient_noise(int(batch)) for batch in batches])
exponent, constant = np.polyfit(np.log(batches), np.log(noise), 1)
figure, axes = plt.subplots(figsize=(6, 3.5))
axes.loglog(batches, noise, "o", markersize=8, label="measured")
axes.loglog(batches, np.exp(constant) * batches**exponent, label=f"fitted: B to the power {exponent:.2f}")
axes.set(xlabel="batch size B", ylabel="standard deviation", title="Noise of a batch's gradient")
plain_ticks(axes.yaxis)
axes.legend()
plt.show()
print(f"Fitted exponent {exponent:.3f}; theory says -0.5, that is 1 / sqrt(B).")
assert abs(exponent + 0.5) < 0.05

# %% [markdown]
# Both axes are logarithmic (each tick is a multiple of the previous one). So a power of B is a straight line, and its
# slope is the exponent.
#
# *Learnt: a batch of 100 costs a hundred samples, but is only ten times less noisy. Larger batches have a cost.*
#
# If larger batches gain so little, why does anyone use them? Because of the hardware.

# %% [markdown]
# ## 3. What a larger batch does to speed
#
# From here on, our training set is scikit-learn's handwritten digits, images of 8 × 8 pixels. The network has two
# layers. The loss is cross-entropy, the usual loss for classification (0 is perfect; guessing among ten digits gives
# ln 10, about 2.3). We train on 1,024 of the 1,797 images.

# %% tags=["setup"]
pixels, labels = load_digits(return_X_y=True)
pixels = torch.tensor(pixels / 16, dtype=torch.float32, device=device)
labels = torch.tensor(labels, device=device)
shuffled = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0)).to(device)
SAMPLES = 1_024
train_pixels, train_labels = pixels[shuffled[:SAMPLES]], labels[shuffled[:SAMPLES]]


def new_network(seed: int) -> nn.Module:
    """Return a network whose initial weights depend only on the seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)


def step(network: nn.Module, optimizer: torch.optim.Optimizer, pixels: torch.Tensor, labels: torch.Tensor) -> None:
    """One training step: forward, backward, update."""
    loss = nn.functional.cross_entropy(network(pixels), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def now() -> float:
    """Return the time in seconds. A GPU runs asynchronously, so wait for it before reading the clock."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# %% [markdown]
# How long does a step take? We time forty steps of each batch size and keep the median (the middle value). A short
# disturbance on your machine does not change it.


# %%
def seconds_per_step(batch: int, steps: int = 40) -> float:
    network = new_network(seed=0)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    taken = []
    for _ in range(steps + 5):  # the first ones set things up
        begin = now()
        step(network, optimizer, train_pixels[:batch], train_labels[:batch])
        taken.append(now() - begin)
    return float(np.median(taken[5:]))


sizes = np.array([1, 4, 16, 64, 256, 1024])
step_seconds = np.array([seconds_per_step(int(batch)) for batch in sizes])
for batch, seconds in zip(sizes, step_seconds, strict=True):
    print(f"batch {batch:>5}: {seconds * 1e6:>6,.0f} µs per step, {batch / seconds:>11,.0f} samples/s")
assert step_seconds[3] < 40 * step_seconds[0]  # 64 samples at once; far less than 40 on a quiet machine

# %% [markdown]
# A step with 64 samples takes far less than 64 times as long as a step with one. Why? Each step has a **fixed cost**
# that does not depend on the batch: Python calls PyTorch, PyTorch selects the operations to run, and every weight is
# updated once. In addition, each sample costs some arithmetic. The simplest model of this is a straight line:
#
# > t(B) = a + b · B
#
# **Exercise 1.4.** Fit this line: return `a` (seconds per step) and `b` (seconds per sample). The times differ
# greatly, so weight each time by its reciprocal; then small times count as much as large ones.


# %% tags=["exercise"]
def fixed_and_per_sample(batches: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Return (a, b) of the line seconds = a + b * batches, with each point weighted by 1 / seconds."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("1.4"):
    of_batches = np.array([1.0, 10.0, 100.0, 1000.0])
    a, b = fixed_and_per_sample(of_batches, 3e-4 + 2e-6 * of_batches)
    swapped = np.isclose(a, 2e-6) and np.isclose(b, 3e-4)
    assert not swapped, "the two are swapped: np.polyfit gives the highest power first"
    assert np.isclose(a, 3e-4), f"on a line with a = 3e-4 you find a = {a:.2g}"
    assert np.isclose(b, 2e-6), f"on a line with b = 2e-6 you find b = {b:.2g}"
    of_batches = np.array([1.0, 2.0, 4.0, 1000.0, 2000.0])
    a, b = fixed_and_per_sample(of_batches, (3e-4 + 2e-6 * of_batches) * np.array([1, 1, 1, 1, 1.3]))
    assert 2.7e-4 < a < 3.3e-4, "one wrong large time spoils the fit of the small ones: use the weights w=1 / seconds"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# <code>np.polyfit(x, y, 1, w=weights)</code> fits a line, and returns its slope first, then its value at 0.
#
# </details>


# %% tags=["answer"]
use_answer("1.4")

# %% [markdown] tags=["slide"]
# ## Throughput rises with the batch, then flattens
#
# time of a step = a + b · B
#
# Each step has a fixed cost a; each sample costs b.

# %% tags=["slide"]
a, b = fixed_and_per_sample(sizes, step_seconds)
line = np.geomspace(1, 1024, 100)
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
left.loglog(sizes, step_seconds * 1e6, "o", markersize=8, label="measured")
left.loglog(line, (a + b * line) * 1e6, label="a + b · B")
left.set(xlabel="batch size B", ylabel="µs per step", title="Time of a step")
plain_ticks(left.yaxis)
left.legend()
right.loglog(sizes, sizes / step_seconds, "o", markersize=8)
right.loglog(line, line / (a + b * line))
if b > 0:
    right.axvline(a / b, color="black", linewidth=1, linestyle=":", label="B = a / b")
    right.legend()
right.set(xlabel="batch size B", ylabel="samples per second", title="Throughput")
plt.show()
print(f"Fixed cost a = {a * 1e6:.0f} µs per step, b = {b * 1e6:.2f} µs per sample.")
if b > 0:
    print(f"At B = a / b = {a / b:.0f} the fixed cost is half of the step.")
    print(f"Throughput cannot exceed 1 / b = {1 / b:,.0f} samples per second.")
else:
    print("The cost of a sample is too small to measure: this device can handle far larger batches.")

# %% [markdown]
# *Learnt: throughput is B / (a + b B). Far below B = a / b it grows in proportion to the batch, because a step takes
# about the same time anyway. Far above it, throughput no longer grows.* The position of this bend depends on the
# machine and the network. A device with many parallel units needs a large batch to be fully used, and many devices
# together need an even larger one.

# %% [markdown] tags=["slide"]
# ## More samples per second: is that faster training?
#
# "The larger the batch, the faster the training" is often said.
#
# We let batch sizes race: the same network, the same samples, batches from 4 to 1,024, until the training loss is
# 0.1.
#
# **Guess: which batch size reaches it first?**

# %% [markdown]
# Large batches tolerate larger learning rates (lab 3 explains the rules). So each batch size uses the best rate of
# the same list: the one that needs the fewest epochs, by the median of three trials with different initial weights.


# %%
TARGET = 0.1


def race(batch: int, learning_rate: float, seed: int) -> list[tuple[float, float]]:
    """Train until the loss reaches TARGET; return (seconds so far, training loss) after each epoch."""
    network = new_network(seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=learning_rate)
    order = torch.Generator().manual_seed(seed)
    curve: list[tuple[float, float]] = []
    seconds, steps, loss = 0.0, 0, float("inf")
    while loss > TARGET and len(curve) < 200 and steps < 1_500:
        begin = now()
        for chosen in torch.randperm(SAMPLES, generator=order).split(batch):
            step(network, optimizer, train_pixels[chosen], train_labels[chosen])
            steps += 1
        seconds += now() - begin
        with torch.no_grad():
            loss = nn.functional.cross_entropy(network(train_pixels), train_labels).item()
        curve.append((seconds, loss))
    return curve


def epochs_needed(curve: list[tuple[float, float]]) -> float:
    return len(curve) if curve[-1][1] <= TARGET else float("inf")


winners = {}
for batch in (4, 16, 64, 256, 1024):
    trials = {}
    for rate in (0.2, 0.4, 0.8, 1.6):
        curves = sorted((race(batch, rate, seed) for seed in range(3)), key=epochs_needed)
        trials[rate] = curves[1]  # the median of three
    rate = min(trials, key=lambda rate: epochs_needed(trials[rate]))
    winners[batch] = trials[rate]
    seconds, _ = winners[batch][-1]
    epochs = len(winners[batch])
    steps = epochs * SAMPLES // batch
    print(f"batch {batch:>5}: rate {rate:g}, {steps:>4} steps, {epochs:>3} epochs, {seconds:.3f} s")
    assert epochs_needed(winners[batch]) < float("inf"), "each batch size reaches the target with at least one rate"

# %% [markdown] tags=["slide"]
# ## Throughput is not time to a result
#
# time = **epochs** × samples / **throughput**
#
# - A larger batch raises the throughput until the device is fully used.
# - It also needs more epochs, because each epoch has fewer steps.
# - "A larger batch is faster" is true only for samples per second.

# %% tags=["slide"]
figure, (first, second, third) = plt.subplots(1, 3, figsize=(11, 3.8))
throughput = {batch: len(curve) * SAMPLES / curve[-1][0] for batch, curve in winners.items()}
first.loglog(list(throughput), list(throughput.values()), "ko-")
first.set(xlabel="batch size", ylabel="samples per second", title="(a) Throughput")
for curve in winners.values():
    seconds, losses = zip(*curve, strict=True)
    second.loglog(range(1, len(curve) + 1), losses, ".-")
    third.loglog(seconds, losses, ".-")
for panel in (second, third):
    panel.axhline(TARGET, color="black", linewidth=1, linestyle=":")
    panel.set_ylabel("training loss")
second.set(xlabel="epochs", title="(b) Loss by epoch")
third.set(xlabel="seconds", title="(c) Loss by time")
third.legend(list(map(str, winners)), title="batch", fontsize=9, loc="lower left")
plain_ticks(second.yaxis, third.yaxis)
plt.show()

# %%
fullest = max(throughput, key=lambda batch: throughput[batch])
quickest = min(winners, key=lambda batch: winners[batch][-1][0])
print(f"Most samples per second: batch {fullest}. First to reach the target: batch {quickest}.")
more_samples = throughput[1024] / throughput[16]
more_epochs = len(winners[1024]) / len(winners[16])
sooner = winners[16][-1][0] / winners[1024][-1][0]
print("From batch 16 to 1,024:")
print(f"{more_samples:.1f} times the samples per second, and {more_epochs:.1f} times the epochs,")
print(f"so {sooner:.2f} times as fast to the target (below 1 is slower).")
assert more_epochs > 4, "a batch 64 times as large needs far more epochs"
assert sooner < more_samples / 4, "the time to the target gains far less than the throughput does"

# %% [markdown]
# (Each step of the race also selects its samples, so its throughput is lower than in the timing above.) Was your
# guess right? Run the race again and the winner may change, because neighbouring batch sizes are close and other
# programs also use your machine. One result does not change: the batch with the most samples per second needs more
# epochs.

# %% [markdown]
# ### The critical batch size
#
# Look again at the steps and epochs that the race printed. From small to medium batches, the steps fall almost in
# proportion and the epochs hardly rise: larger batches are almost free. For the largest batches, the steps hardly
# fall any more, and the additional samples are wasted. The transition is the **critical batch size**. McCandlish et
# al. (2018) found one law for both parts,
#
# > steps = S · (1 + C / B),   samples = S · (B + C),
#
# where S is the minimum number of steps and C the critical batch size. At B = C, training needs twice the minimum
# number of steps and twice the minimum number of samples. (We measure the loss only once per epoch, so the points for
# small batches, which need few epochs, are coarse.)

# %%
raced = np.array(list(winners))
needed_steps = np.array([len(winners[batch]) * SAMPLES / batch for batch in winners])
# The law is a line in 1 / B. Relative errors count equally at each batch size, as in exercise 1.4.
slope, fewest = np.polyfit(1 / raced, needed_steps, 1, w=1 / needed_steps)
critical = slope / fewest
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
line = np.geomspace(4, 1024, 100)
left.loglog(raced, needed_steps, "o", markersize=8, label="measured")
left.loglog(line, fewest * (1 + critical / line), label="law, fitted")
left.set(xlabel="batch size B", ylabel="steps to the target", title="Steps fall, then level off")
left.legend()
right.loglog(raced, needed_steps * raced, "o", markersize=8)
right.loglog(line, fewest * (line + critical))
right.axvline(critical, color="black", linewidth=1, linestyle=":", label="critical batch")
right.set(xlabel="batch size B", ylabel="samples to the target", title="Samples stay constant, then rise")
plain_ticks(left.yaxis, right.yaxis)
right.legend()
plt.show()
print(f"Fitted here: at least {fewest:.0f} steps, and a critical batch size of about {critical:.0f}.")
print("Read that as an order of magnitude.")
assert 5 < critical < 1000
assert needed_steps[0] > 1.5 * needed_steps[1], "below the critical batch size, steps fall with the batch"
assert needed_steps[-2] < 3 * needed_steps[-1], "above it, four times the batch saves far less than three quarters"

# %% [markdown]
# Can you find it without a race? Roughly. Exercise 1.3 showed what limits a small batch: noise. If the noise of a
# gradient is much larger than the gradient itself, averaging over more samples helps. If it is much smaller, more
# averaging gains nothing. The **gradient noise scale** is the batch size at which the two are equal. It needs only
# gradients, no training, and is a rough guide to the critical batch size. Paceline measures it for its recipe
# `digits` (a small network on the same images, with its initial weights):

# %%
_ = run("paceline noise-scale digits --steps 20", seconds=300)

# %% [markdown]
# It prints a wide **range** for the critical batch size. This is intentional: noise scale and critical batch size
# agree only in their order of magnitude, and the noise scale changes during training (these are initial weights). Do
# not trust anyone who gives *the* best batch size as one number. The line "at 64 samples" uses the noise scale as C
# in the law; lab 3 explains the line on the linear rate.
#
# Other tasks have other critical batch sizes:

# %% [markdown] tags=["slide"]
# ## How large a batch still pays off?
#
# - Below the **critical batch size**, a larger batch saves steps, almost for free.
# - Above it, a larger batch wastes samples.
# - In the paper it grows with the difficulty of the task and during training.

# %% tags=["slide"]
# McCandlish et al. 2018 (arXiv:1812.06162), table 1: at the start, and averaged over the training run.
published = {
    "MNIST (digits)": (20, 200),
    "SVHN (house numbers)": (50, 500),
    "CIFAR-10 (images)": (300, 900),
    "ImageNet (images)": (1_000, 15_000),
    "Billion Word (text; tokens)": (700, 100_000),
    "Dota 1v1 (a game; frames)": (50_000, 3_000_000),
}
figure, axes = plt.subplots(figsize=(7.5, 3))
for row, (start, average) in enumerate(published.values()):
    axes.plot([start, average], [row, row], color="C0", linewidth=6, solid_capstyle="butt", alpha=0.4)
    axes.plot(start, row, "o", color="C1", label="at the start" if row == 0 else None)
    axes.plot(average, row, "s", color="C0", label="average over the run" if row == 0 else None)
axes.set_yticks(range(len(published)), list(published))
axes.set(xscale="log", xlabel="critical batch size", title="Critical batch sizes (McCandlish et al. 2018)")
axes.invert_yaxis()
axes.legend(fontsize=9)
plt.show()

# %% [markdown]
# The paper found that harder tasks can use larger batches. This is good news if you need many devices: long training
# runs are the ones that can be distributed. Goyal et al. (2017) showed the limit on ImageNet. With the learning rate
# scaled to the batch and warmed up (raised gradually at the beginning), ResNet-50 kept its accuracy up to batches of
# about 8,000 images.

# %%
# Goyal et al. 2017 (arXiv:1706.02677): error in percent after 90 epochs, and its deviation.
goyal_batches = 2 ** np.arange(7, 17)
goyal_errors = [23.49, 23.60, 23.48, 23.53, 23.49, 23.56, 23.74, 24.79, 27.55, 33.96]
goyal_deviations = [0.12, 0.12, 0.09, 0.08, 0.11, 0.12, 0.09, 0.27, 0.28, 0.80]
figure, axes = plt.subplots(figsize=(6.5, 3.2))
axes.errorbar(goyal_batches, goyal_errors, goyal_deviations, marker="o", capsize=3)
axes.set_xscale("log", base=2)
axes.set(xlabel="batch size", ylabel="error, %", title="ResNet-50, 90 epochs each (Goyal et al. 2017)")
plt.show()

# %% [markdown]
# Here the number of epochs was fixed, so too large a batch increases the error. Lab 3 covers this.

# %% [markdown]
# ## 4. Where is the time of a step spent?
#
# A step (an **iteration**) of a real training run has more parts than our little function:
#
# | part | what happens |
# |---|---|
# | data | the next batch is read, decoded and put together; `data_wait` is the time that the step waits for it |
# | copy | the batch is copied to the device (`h2d`, "host to device") |
# | forward | the network computes its answers and the loss |
# | backward | the gradient of every weight is computed |
# | communication | several devices average their gradients (nothing with one device) |
# | update | the optimizer changes the weights |
# | other | a running average of the weights (`ema`), records (`logging`), Python itself (`host`) |
#
# Paceline records the time of each part in every run. Let us train its recipe `digits` for three epochs and look at
# the report. ("Top-1 accuracy" is the share of held-out images that are classified correctly.)

# %%
_ = run("paceline train digits train.duration='3 epochs' --run-dir runs/lab1", seconds=300)

# %%
_ = run("paceline report runs/lab1 --timing", seconds=300)

# %% [markdown] tags=["slide"]
# ## The parts of a step
#
# data → copy → forward → backward → communication → update
#
# Measure it before you change anything.

# %% tags=["slide"]
attribution = json.loads(run("paceline report runs/lab1 --timing --json", quiet=True, seconds=300))
shares = {name: 100 * phase["share"] for name, phase in attribution["phases"].items()}
figure, axes = plt.subplots(figsize=(7, 3.2))
bars = axes.barh(list(shares), list(shares.values()), color="C0")
axes.bar_label(bars, fmt="%.1f %%", padding=4, fontsize=9)
axes.set(xlabel="% of a step", xlim=(0, 1.15 * max(shares.values())))
axes.set_title(f"A step of `paceline train digits`: {attribution['step_seconds'] * 1e3:.1f} ms")
axes.invert_yaxis()
axes.grid(visible=False, axis="y")
plt.show()
assert abs(sum(shares.values()) - 100) < 5, "the parts make up the step"

# %% [markdown]
# Suppose `data_wait` were half of the step. A second GPU would not help, because it would wait for the same data.
# First make the data faster (more reading processes, smaller images, a packed data set), then measure again. Always
# find out where the time is spent before you buy anything.

# %% [markdown]
# ## 5. Learning curves: how much does more data help?
#
# Training takes long because there is so much data. Does more data help? A **learning curve** shows the error on
# **held-out** samples (not used for training) against the number of training samples. Hestness et al. (2017) measured
# such curves for translation, language models, images and speech. They describe three parts: too little data, a power
# law, and a level below which more data does not reduce the error.

# %% [markdown] tags=["slide"]
# ## The power law
#
# In the middle, error = a · nᵇ: a straight line on logarithmic axes, with a negative slope b.
#
# - Hestness et al. (2017) found b between −0.07 and −0.35 in their four fields.
# - To halve the error takes 2^(−1/b) times the data.
# - A few small training runs predict the error with a large data set.

# %% tags=["slide"]
sketch = np.geomspace(1, 1e6, 300)
curve = 1 / (1 / 0.9 + (sketch / 60) ** 0.5) + 0.02
figure, axes = plt.subplots(figsize=(7, 3.2))
axes.loglog(sketch, curve, color="C0")
axes.axhline(0.9, color="black", linewidth=1, linestyle=":")
axes.axhline(0.02, color="black", linewidth=1, linestyle=":")
axes.text(3e3, 0.95, "guessing", va="bottom", fontsize=9)
axes.text(2, 0.0205, "error that no amount of data removes", va="bottom", fontsize=9)
for place, height, name in ((4, 0.45, "too little data"), (5e3, 0.27, "power law"), (2e5, 0.06, "levels off")):
    axes.text(place, height, name, ha="center", weight="bold")
axes.set(xlabel="training samples", ylabel="held-out error", ylim=(0.015, 1.5))
axes.set_title("A learning curve (sketch)")
axes.set(xticks=[], yticks=[])
axes.minorticks_off()
plt.show()

# %%
for slope in (-0.35, -0.07):
    print(f"b = {slope}: half the error takes {2 ** (-1 / slope):,.0f} times the data")

# %% [markdown]
# Try it. Hold out 797 of the digits for measuring; train on 31 to 250 of the others; extend the line to 1,000; then
# train on 1,000 and compare. Results with small sets vary greatly, so each point is the mean of several trials. Each
# trial has different held-out images, training images and initial weights.
#
# **Exercise 1.5.** Fit the line on logarithmic axes, and extend it.


# %% tags=["exercise"]
def extrapolate(samples: np.ndarray, errors: np.ndarray, more: float) -> tuple[float, float]:
    """Fit errors = a * samples ** b; return (b, the error that this predicts for `more` samples)."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("1.5"):
    known = np.array([10.0, 100.0, 1000.0])
    slope, predicted = extrapolate(known, 8 * known**-0.5, more=10_000)
    assert not np.isclose(predicted, -0.5), "the two are swapped: return b first"
    assert np.isclose(slope, -0.5), f"errors 8 / sqrt(n) have b = -0.5, not {slope:.3g}: take logs of both"
    assert not np.isclose(predicted, np.log(0.08)), "this is the logarithm of the error: take np.exp"
    assert np.isclose(predicted, 0.08), f"8 / sqrt(10,000) is 0.08, not {predicted:.3g}"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# The logarithm of <code>a * n ** b</code> is <code>log(a) + b * log(n)</code>, a line in <code>log(n)</code>. Fit it
# with <code>np.polyfit(np.log(samples), np.log(errors), 1)</code>, evaluate it at <code>np.log(more)</code>, and take
# <code>np.exp</code>.
#
# </details>


# %% tags=["answer"]
use_answer("1.5")


# %%
def held_out_error(samples: int, seed: int, steps: int = 600) -> float:
    """Return the percentage of 797 held-out digits misclassified after training on `samples` others."""
    order = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(pixels), generator=order)
    held_out, training = shuffled[:797], shuffled[797 : 797 + samples]
    network = new_network(seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        chosen = training[torch.randint(samples, (32,), generator=order)]
        step(network, optimizer, pixels[chosen], labels[chosen])
    with torch.no_grad():
        wrong = network(pixels[held_out]).argmax(dim=1) != labels[held_out]
    return 100 * wrong.float().mean().item()


TRIALS = 6
small = np.array([31, 62, 125, 250])
errors = np.array([[held_out_error(int(count), seed) for seed in range(TRIALS)] for count in small])
slope, predicted = extrapolate(small, errors.mean(axis=1), more=1_000)
print(f"b = {slope:.2f}. Predicted error for 1,000 samples: {predicted:.1f} %.")

# %% [markdown]
# Do you believe the prediction? Write down whether the measured error will be lower or higher. Then run the next
# cell.

# %% [markdown] tags=["slide"]
# ## Predict, then measure
#
# Four small training runs, a fitted line, and the larger run that it predicts.

# %% tags=["slide"]
found = np.array([held_out_error(1_000, seed) for seed in range(TRIALS)])
means, deviations = errors.mean(axis=1), errors.std(axis=1)
line = np.array([25, 1250])
figure, axes = plt.subplots(figsize=(7, 3.8))
axes.loglog(line, predicted * (line / 1_000) ** slope, "--", color="C0", label=f"fitted: b = {slope:.2f}")
axes.errorbar(small, means, deviations, fmt="o", capsize=3, color="C0", label="mean and deviation")
axes.errorbar(1_000, found.mean(), found.std(), fmt="s", capsize=3, color="C1", label="measured afterwards")
axes.set(xlabel="training samples", ylabel="held-out error, %", title="Learning curve of the digits")
axes.set_xticks([31, 62, 125, 250, 500, 1000], ["31", "62", "125", "250", "500", "1,000"])
axes.set_yticks([2, 5, 10, 20], ["2", "5", "10", "20"])
axes.minorticks_off()
axes.legend()
plt.show()
print(f"Predicted {predicted:.2f} %, measured {found.mean():.2f} %:", end=" ")
print(f"the prediction is off by {predicted / found.mean() - 1:+.0%}.")
print(f"{TRIALS} trials with 1,000 samples: from {found.min():.2f} to {found.max():.2f} %.")
assert slope < -0.35, "steeper than the paper's lines"
assert 0.5 < predicted / found.mean() < 2

# %% [markdown]
# *Learnt: four small training runs predict a larger one if it follows the same line. Always show a prediction next to
# its measurement.*
#
# Such a small data set **can** show that there is a line, and how to use it. It **cannot** show where the line ends:
# we do not have ten times the data to see it level off. It cannot show whether the slope holds for other tasks: this
# one is easy, and its line is steeper than those of the paper's four fields. And it cannot distinguish slopes that
# differ little: see how much the trials vary. There are other limits. We trained one network of one size for the same
# number of steps each time; the paper chose the best model for each amount of data. Our held-out images were drawn at
# random, so their writers also wrote training images; images from new writers may be harder.

# %% [markdown]
# ## 6. What several devices can do, and what limits them
#
# Now we combine these results. The time to a result is epochs × samples / throughput. Data parallelism raises the
# **throughput**: it splits each batch into parts, one for each device.

# %% [markdown] tags=["slide"]
# ## Data parallelism
#
# Split the samples of a batch; average the gradients; make the same update everywhere.

# %% tags=["slide"]
figure, axes = plt.subplots(figsize=(9, 3.6))
axes.set(xlim=(0, 10), ylim=(-0.2, 4.2), title="Data parallelism: one step on four devices")
axes.axis("off")
box = {"ha": "center", "va": "center", "fontsize": 9}


def draw_box(left: float, bottom: float, width: float, height: float, text: str, colour: str) -> None:
    axes.add_patch(plt.Rectangle((left, bottom), width, height, color=colour, alpha=0.25))
    axes.text(left + width / 2, bottom + height / 2, text, **box)


def draw_arrow(start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "grey"})


draw_box(0.1, 0.1, 1.3, 3.8, "batch of\n256 samples", "C4")
for rank in range(4):
    bottom = 3.1 - rank
    draw_box(2.0, bottom, 1.3, 0.8, "64 samples", "C4")
    draw_box(3.9, bottom, 2.0, 0.8, f"device {rank}\nthe same weights", "C0")
    draw_arrow((1.4, bottom + 0.4), (2.0, bottom + 0.4))
    draw_arrow((3.3, bottom + 0.4), (3.9, bottom + 0.4))
    draw_arrow((5.9, bottom + 0.4), (6.6, bottom + 0.4))
draw_box(6.6, 0.1, 1.3, 3.8, "mean of the\nfour gradients\n(all-reduce)", "C1")
draw_box(8.5, 0.1, 1.4, 3.8, "the same\nupdate on\neach device", "C2")
draw_arrow((7.9, 2.0), (8.5, 2.0))
plt.show()

# %% [markdown]
# As you saw, the gradient of a mean is the mean of the gradients. So four devices with a quarter of the batch each
# make **the same step** as one device with the whole batch, up to rounding, and each does only a quarter of the
# arithmetic. Then they must compute the mean of their gradients, so they send gradients to each other in every step
# (this is called an all-reduce; you build one in lab 2a). This communication takes time, so we define:
#
# - the **speed-up** on N devices is the time on one device divided by the time on N;
# - the **efficiency** is the speed-up divided by N: 100 % would be perfect.
#
# What keeps it below 100 %? All work that does not become faster with more devices. If a share s of the time stays
# the same and the rest is divided among N devices, then a time of 1 becomes s + (1 − s) / N. This is **Amdahl's law**
# (1967).
#
# **Exercise 1.6.** Write Amdahl's law. Before you run the check: what is the largest possible speed-up with s = 5 %?


# %% tags=["exercise"]
def speed_up(devices: float, serial: float) -> float:
    """Return the speed-up if the share `serial` (0 to 1) of the time does not become shorter."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("1.6"):
    assert speed_up(8, 0.0) != 1 / 8, "this is the remaining time: the speed-up is one divided by it"
    assert np.isclose(speed_up(8, 0.0), 8), "with nothing serial, 8 devices are 8 times as fast"
    assert np.isclose(speed_up(8, 1.0), 1), "with everything serial, 8 devices are as fast as one"
    assert np.isclose(speed_up(2, 0.5), 4 / 3), "half of it serial, 2 devices: 1 / (0.5 + 0.25) is 1.33"
    print(f"s = 5 %: {speed_up(8, 0.05):.1f} on 8 devices, {speed_up(1000, 0.05):.1f} on 1,000, never 20")

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# One divided by the remaining time, <code>serial + (1 - serial) / devices</code>.
#
# </details>


# %% tags=["answer"]
use_answer("1.6")

# %% [markdown]
# *Learnt: with enough devices, the serial part limits the speed-up, however small it is.*
#
# NVIDIA's numbers from the beginning give the speed-up on eight A100 GPUs. Which share s would explain it?

# %% [markdown] tags=["slide"]
# ## Speed-up and efficiency
#
# - speed-up = time on one device / time on N
# - efficiency = speed-up / N
# - Amdahl: speed-up = 1 / (s + (1 − s) / N), where s is the serial share

# %% tags=["slide"]
eight = RESNET50["8 A100, mixed precision"] / RESNET50["1 A100, mixed precision"]
serial = (8 / eight - 1) / 7  # Amdahl's law, solved for s
devices = np.geomspace(1, 256, 100)
figure, axes = plt.subplots(figsize=(7, 3.8))
for share in (0.0, 0.01, 0.1):
    axes.plot(devices, speed_up(devices, share), "--", label=f"s = {share:.0%}")
axes.plot(devices, speed_up(devices, serial), label=f"s = {serial:.1%}, through the point")
axes.plot(8, eight, "k*", markersize=14, label="ResNet-50 on 8 A100 (NVIDIA)")
axes.set_xscale("log", base=2)
axes.set_yscale("log", base=2)
axes.set(xlabel="devices", ylabel="speed-up", title="Amdahl's law")
axes.set_xticks([1, 8, 64, 256], ["1", "8", "64", "256"])
axes.set_yticks([1, 8, 64, 256], ["1", "8", "64", "256"])
axes.legend(fontsize=9)
plt.show()
print(f"Speed-up {eight:.2f} on 8 devices, efficiency {eight / 8:.0%}; by Amdahl's law s = {serial:.1%}.")
many = speed_up(256, serial)
print(f"So 256 such devices would give {many:.0f}, with an efficiency of {many / 256:.0%}.")
assert np.isclose(speed_up(8, serial), eight)

# %% [markdown]
# Do not take the right half of this figure too seriously. Amdahl's law assumes a fixed amount of work. In practice,
# each device usually gets as many samples as before. The batch then grows with the number of devices, and the fixed
# part matters less: Goyal et al. (2017) report an efficiency of about 90 % from 8 to 256 GPUs, with a batch of 8,192.
# But section 3 applies: **a larger batch may need more epochs.** Only the time to a result counts, and it includes
# both effects.

# %% [markdown] tags=["slide"]
# ## What to remember
#
# 1. Time = epochs × samples / throughput.
# 2. SGD makes many rough steps. The noise of a batch falls only as 1 / √B.
# 3. Throughput rises with the batch, then levels off; beyond the critical batch size, training needs more epochs.
# 4. Measure where the time of a step is spent before you change anything.
# 5. Small training runs predict larger ones; the serial part limits the speed-up.

# %% [markdown]
# **For real runs**, these commands do what you did by hand:
#
# | question | command |
# |---|---|
# | where is the time of my steps spent? | `paceline report RUN --timing` |
# | how large a batch still pays off? | `paceline noise-scale RECIPE` |
# | the same, measured by training | `paceline sweep-batch RECIPE --batch-sizes … --to METRIC=VALUE` |
# | how fast is it at each batch size? | `paceline bench RECIPE --batch-sizes …` |
# | how much faster are more devices? | `paceline scale RECIPE --world-sizes 1,2,4` |
# | how many devices do I need to finish in three days? | `paceline plan RECIPE --deadline 72h` |
#
# **Further reading**
#
# - Krizhevsky, Sutskever, Hinton: *ImageNet Classification with Deep Convolutional Neural Networks*, NeurIPS 2012.
# - Sevilla, Heim, Ho, Besiroglu, Hobbhahn, Villalobos: *Compute Trends Across Three Eras of Machine Learning*, 2022,
#   arXiv:2202.05924.
# - McCandlish, Kaplan, Amodei, OpenAI Dota Team: *An Empirical Model of Large-Batch Training*, 2018,
#   arXiv:1812.06162.
# - Goyal et al.: *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour*, 2017, arXiv:1706.02677.
# - Hestness et al.: *Deep Learning Scaling is Predictable, Empirically*, 2017, arXiv:1712.00409.
# - NVIDIA: *DeepLearningExamples*, PyTorch/Classification/ConvNets, tables of training performance.
# - Meta: *Llama 3 model card*, 2024.
# - Amdahl: *Validity of the single processor approach to achieving large scale computing capabilities*, AFIPS 1967.
#
# **Next:** in lab 2a you build data parallelism from its parts: processes that send gradients to each other.
