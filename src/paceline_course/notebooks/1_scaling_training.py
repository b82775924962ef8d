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
# Why does one device not suffice, and what does a larger batch really buy?

# %% [markdown]
# **After this lab you can**
#
# - work out how long a training takes, from three numbers;
# - say what stochastic gradient descent does with a batch, and how noisy its gradients are;
# - tell *samples per second* from *time to a result*, and measure both;
# - find where the time of a training step goes;
# - predict from small training sets what a larger one will bring;
# - say what the speed-up and the efficiency of several devices are, and what limits them.
#
# **You need** Python, the basics of PyTorch (tensors, `nn.Module`, `loss.backward()`), derivatives, logarithms, mean
# and standard deviation. No other lab comes before this one.
#
# **Time** about 75 minutes. There are six exercises of at most five minutes each. A check below each says whether it
# is done. A hint and an answer are folded away below the check (a click on the line with the dots opens an answer);
# whatever follows works with the answer, so you can always go on. Once the answer's cell has run, the check would
# look at the answer: so run your own cell again before you repeat a check.
#
# Run the cells from top to bottom. All of them together take one to two minutes on two processor cores that have
# nothing else to do. A cell with `run(…)` starts a command, and shows what it wrote when it has ended.

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

from paceline_course import exercise, run, use_style

use_style()
torch.set_num_threads(1)  # the network below is too small to be worth sharing between cores
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
# A few words first. A neural network has **weights**, numbers that training adjusts. The **loss** says how wrong its
# answers are; training makes it small. A **sample** is one example to learn from: an image with its label, say. Going
# once through all samples of the training set is an **epoch**. **Throughput** is how many samples a machine trains on
# per second. A **device** is what computes: a processor (CPU), or a graphics processor (GPU), which does very many
# small calculations at once.
#
# ImageNet, the picture collection that much of the field measured itself by, has 1,281,167 training images; 90 epochs
# are a usual training. How long is that?
#
# **Exercise 1.1.** Write the time of a training in hours.


# %% tags=["exercise"]
def training_hours(epochs: float, samples: int, throughput: float) -> float:
    """Hours for so many epochs over so many samples, at so many samples per second."""
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
# All samples together, <code>epochs * samples</code>, divided by the throughput, are seconds. An hour has 3,600.
#
# </details>


# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
def training_hours(epochs: float, samples: int, throughput: float) -> float:
    return epochs * samples / throughput / 3600


# %% [markdown]
# *Learnt: time = epochs × samples / throughput. Keep this formula; the whole course turns on it.*
#
# Now with numbers that were published. NVIDIA measured ResNet-50, a network for images, on its own machines: V100 (a
# GPU of 2017) and A100 (2020). TF32 rounds numbers of 32 bits before it multiplies them; "mixed precision" does most
# of the arithmetic with numbers of 16 bits. Both are faster.

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
# The same README gives about 92, 36 and 14 hours for the first three, with the time for validation (scoring images
# that were held out) included: our formula, which counts training only, gives a little less each time, as it should.
#
# And what did other trainings take? The next figure counts **GPU-hours**: one GPU for one hour.

# %% [markdown] tags=["slide"]
# ## One device is not enough
#
# - Devices became faster: the same ResNet-50 takes a fraction of the time.
# - What is trained grew faster still: the computing that goes into milestone systems has doubled about every six
#   months since 2010 (Sevilla et al. 2022).
# - What one device cannot do in time, many must do together.

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
axes.set(xscale="log", xlim=(1, 1e7), xlabel="GPU-hours", title="One training, on one device")
axes.invert_yaxis()
axes.grid(visible=False, axis="y")
for name, hours in {"a day": 24, "a year": 24 * 365, "a century": 24 * 36_500}.items():
    axes.axvline(hours, color="black", linewidth=1, linestyle=":")
    axes.text(hours * 1.15, 1.98, name, fontsize=9, va="center", backgroundcolor="white")
plt.show()
years = trainings["Llama 3 8B, 2024\n(H100)"] / 24 / 365
print(f"Llama 3 8B on a single H100: {years:.0f} years.")

# %% [markdown]
# There is a second, homelier reason: **people**. A training whose answer comes after four days can be tried ninety
# times a year; one whose answer comes in an hour can be tried before lunch, and again after it. Short times to an
# answer are what makes a group productive.
#
# How can several devices share one training? The answer of this course, **data parallelism**, is to share out the
# samples of each batch. To see when that pays, and when it does not, we must know what a batch does. So we start
# small.

# %% [markdown]
# ## 2. Gradient descent, and stochastic gradient descent
#
# The smallest network there is: a straight line. It has two weights, slope and intercept; its loss is the mean
# squared error over 256 points. The **gradient** of the loss says in which direction it rises most steeply, so
# training walks against it: `weights -= learning_rate * gradient`. One such update is a **step** (or iteration); the
# **learning rate** is how far it goes.

# %% tags=["setup"]
generator = torch.Generator().manual_seed(0)
x = torch.rand(256, generator=generator) * 2.5 - 0.5
y = 1.5 * x + 0.5 + 0.5 * torch.randn(256, generator=generator)


def mean_squared_error(weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss of the line with weights [slope, intercept]."""
    return ((weights[0] * x + weights[1] - y) ** 2).mean()


# %% [markdown]
# **Exercise 1.2.** Write the gradient of this loss by hand (no autograd): the two derivatives, by slope and by
# intercept.


# %% tags=["exercise"]
def gradient(weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return [d loss / d slope, d loss / d intercept] over the samples given."""
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
# derivative by the intercept is the mean of <code>2 * residual</code>; by the slope, the chain rule gives one more
# factor.
#
# </details>


# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
def gradient(weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    residual = weights[0] * x + weights[1] - y
    return torch.stack([(2 * residual * x).mean(), (2 * residual).mean()])


# %% [markdown]
# *Learnt: the gradient of a mean is the mean of the samples' gradients. It can be taken over any samples you like.*
#
# And that is the whole idea of **stochastic gradient descent** (SGD). *Gradient descent* takes the gradient over all
# samples, and makes one step per epoch. SGD takes it over a few samples drawn at random, a **batch** (or mini-batch),
# and makes a step at once. Each of its steps goes a little astray; but it makes many for the price of one.


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
# - Gradient descent walks smoothly down, once per epoch.
# - SGD makes a step per batch: rougher, but many per epoch.
# - With a constant learning rate, its noise never quite lets it settle.

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
right.set(xlabel="samples seen", ylabel="loss above its minimum", title="What an epoch buys")
plt.show()


def excess_after_epoch(name: str) -> float:
    return float(mean_squared_error(paths[name][256 // samples_per_step[name]], x, y) - least)


print("Above the lowest loss after one epoch:")
for name in paths:
    print(f"batch {name}: {excess_after_epoch(name):.3f}")
assert excess_after_epoch("8") < excess_after_epoch("all 256") / 4

# %% [markdown]
# (On the left, the path of 8 stops after one epoch, 32 steps, so that you see it beside 32 steps of gradient descent,
# which took 32 epochs.) How rough is a step? Take the gradient by the slope at one place, over many batches drawn at
# random, and look at how far it scatters: its standard deviation.
#
# **Exercise 1.3.** Predict before you measure. A batch of 100 in place of a single sample: how many times smaller is
# the standard deviation of its gradient? Write the number; the check then measures it.

# %% tags=["setup"]
# The derivative by the slope of each sample's own loss, at slope 0 and intercept 0.
slope_gradients = -2 * y * x


def gradient_noise(batch: int, draws: int = 4_000) -> float:
    """Standard deviation of the mean gradient of a batch, drawn with replacement so many times."""
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
    assert close, f"you predicted {times_less_noise:g} times less, and measured is {measured:.1f} times: why?"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# The gradient of a batch is a mean of B independent draws. The variance of a mean is the variance of one draw divided
# by B; the standard deviation is the root of the variance.
#
# </details>

# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
times_less_noise = 10

# %% [markdown] tags=["slide"]
# ## A larger batch is less noisy, at a price
#
# The noise of a batch's gradient falls as 1 / √B: half the noise costs four times the samples.

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
# Both axes are logarithmic (each mark is a multiple of the one before), so a power of B is a straight line, and its
# slope is the exponent.
#
# *Learnt: a batch of 100 costs a hundred samples and is only ten times less noisy. Larger batches have a price.*
#
# If larger batches pay so poorly, why does anyone use them? Because of the machine.

# %% [markdown]
# ## 3. What a larger batch does to speed
#
# Our training set from here on: 8 × 8 pictures of handwritten digits that come with scikit-learn. The network has two
# layers; the loss is cross-entropy, the usual one for telling classes apart (0 is perfect; guessing among ten digits
# gives ln 10, about 2.3). We train on 1,024 of the 1,797 pictures.

# %% tags=["setup"]
pixels, labels = load_digits(return_X_y=True)
pixels = torch.tensor(pixels / 16, dtype=torch.float32, device=device)
labels = torch.tensor(labels, device=device)
shuffled = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0)).to(device)
SAMPLES = 1_024
train_pixels, train_labels = pixels[shuffled[:SAMPLES]], labels[shuffled[:SAMPLES]]


def new_network(seed: int) -> nn.Module:
    """A network whose first weights depend on the seed only."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)


def step(network: nn.Module, optimizer: torch.optim.Optimizer, pixels: torch.Tensor, labels: torch.Tensor) -> None:
    """One training step: forward, backward, update."""
    loss = nn.functional.cross_entropy(network(pixels), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def now() -> float:
    """Seconds. A GPU works on while Python goes ahead, so wait for it before looking at the clock."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# %% [markdown]
# How long does a step take? We time forty steps of each batch size and keep the median (the one in the middle), which
# a moment's disturbance on your machine does not move.


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
# A step with 64 samples takes nowhere near 64 times as long as a step with one. Why? Each step has a **fixed cost**
# that does not depend on the batch: Python calls PyTorch, PyTorch looks up what to run, every weight is updated once.
# Besides, each sample costs some arithmetic. The simplest model of this is a straight line:
#
# > t(B) = a + b · B
#
# **Exercise 1.4.** Fit this line: return `a` (seconds per step) and `b` (seconds per sample). The times differ a
# great deal, so weigh each by one over itself, so that small ones count as much as large ones.


# %% tags=["exercise"]
def fixed_and_per_sample(batches: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Return (a, b) of the line seconds = a + b * batches, each point weighed by 1 / seconds."""
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
    assert 2.7e-4 < a < 3.3e-4, "one large time that is off spoils the small ones: weigh with w=1 / seconds"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# <code>np.polyfit(x, y, 1, w=weights)</code> fits a line, and returns its slope first, then its value at 0.
#
# </details>


# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
def fixed_and_per_sample(batches: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    b, a = np.polyfit(batches, seconds, 1, w=1 / seconds)
    return a, b


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
    print(f"Throughput cannot pass 1 / b = {1 / b:,.0f} samples per second.")
else:
    print("The cost of a sample is too small to measure: this device could take far larger batches.")

# %% [markdown]
# *Learnt: throughput is B / (a + b B). Far below B = a / b it grows in proportion to the batch, since a step costs
# the same anyway; far above it no longer grows.* Where that bend lies differs from machine to machine and from
# network to network: a wide device with many units needs a large batch to be kept busy, which is why large devices
# call for large batches, and many devices together for larger ones still.

# %% [markdown] tags=["slide"]
# ## More samples per second: is that faster training?
#
# "The larger the batch, the faster the training" is often said.
#
# Let us race: the same network, the same samples, batches from 4 to 1,024, until the training loss is 0.1.
#
# **Place your bet: which batch size arrives first?**

# %% [markdown]
# Every batch size may choose its learning rate from the same list, as large batches stand larger rates (lab 3 has the
# rules for it): whichever needs the fewest epochs, in the middle of three trials with different first weights.


# %%
TARGET = 0.1


def race(batch: int, learning_rate: float, seed: int) -> list[tuple[float, float]]:
    """Train to the target: (seconds so far, loss on all training samples) after each epoch."""
    network = new_network(seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=learning_rate)
    order = torch.Generator().manual_seed(seed)
    course: list[tuple[float, float]] = []
    seconds, steps, loss = 0.0, 0, float("inf")
    while loss > TARGET and len(course) < 200 and steps < 1_500:
        begin = now()
        for chosen in torch.randperm(SAMPLES, generator=order).split(batch):
            step(network, optimizer, train_pixels[chosen], train_labels[chosen])
            steps += 1
        seconds += now() - begin
        with torch.no_grad():
            loss = nn.functional.cross_entropy(network(train_pixels), train_labels).item()
        course.append((seconds, loss))
    return course


def epochs_needed(course: list[tuple[float, float]]) -> float:
    return len(course) if course[-1][1] <= TARGET else float("inf")


winners = {}
for batch in (4, 16, 64, 256, 1024):
    trials = {}
    for rate in (0.2, 0.4, 0.8, 1.6):
        courses = sorted((race(batch, rate, seed) for seed in range(3)), key=epochs_needed)
        trials[rate] = courses[1]  # the one in the middle of three
    rate = min(trials, key=lambda rate: epochs_needed(trials[rate]))
    winners[batch] = trials[rate]
    seconds, _ = winners[batch][-1]
    epochs = len(winners[batch])
    steps = epochs * SAMPLES // batch
    print(f"batch {batch:>5}: rate {rate:g}, {steps:>4} steps, {epochs:>3} epochs, {seconds:.3f} s")
    assert epochs_needed(winners[batch]) < float("inf"), "each batch size arrives with one rate at least"

# %% [markdown] tags=["slide"]
# ## Throughput is not time to a result
#
# time = **epochs** × samples / **throughput**
#
# - A larger batch raises the throughput, until the device is full.
# - It also raises the epochs that are needed, as there are fewer steps in each.
# - "A larger batch is faster" is true of samples per second only.

# %% tags=["slide"]
figure, (first, second, third) = plt.subplots(1, 3, figsize=(11, 3.8))
throughput = {batch: len(course) * SAMPLES / course[-1][0] for batch, course in winners.items()}
first.loglog(list(throughput), list(throughput.values()), "ko-")
first.set(xlabel="batch size", ylabel="samples per second", title="(a) Throughput")
for course in winners.values():
    seconds, losses = zip(*course, strict=True)
    second.loglog(range(1, len(course) + 1), losses, ".-")
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
print(f"Most samples per second: batch {fullest}. First at the target: batch {quickest}.")
more_samples = throughput[1024] / throughput[16]
more_epochs = len(winners[1024]) / len(winners[16])
sooner = winners[16][-1][0] / winners[1024][-1][0]
print("From batch 16 to 1,024:")
print(f"{more_samples:.1f} times the samples per second, and {more_epochs:.1f} times the epochs,")
print(f"so {sooner:.2f} times as fast to the target (below 1 is slower).")
assert more_epochs > 4, "a batch 64 times as large needs far more epochs"
assert sooner < more_samples / 4, "the time to the target gains far less than the throughput does"

# %% [markdown]
# (Each step of the race also picks its samples at random, so its throughput is lower than where we timed the step
# alone.) Did you win your bet? Run the race again and the winner may change, as neighbours are close and your machine
# has other things to do. What does not change: the batch with the most samples per second pays for them with epochs.

# %% [markdown]
# ### The critical batch size
#
# Look at the lines of the race once more, at steps and at samples (epochs). From small batches to middling ones the
# steps fall nearly in proportion, and the epochs hardly rise: larger batches are all but free. In the end the steps
# hardly fall any more, and every further sample is wasted. The bend between the two is the **critical batch size**.
# McCandlish et al. (2018) found one law for both halves,
#
# > steps = S · (1 + C / B),   samples = S · (B + C),
#
# with S the fewest steps there can be and C the critical batch size. At B = C one needs twice the fewest steps and
# twice the fewest samples. (We look at the loss once per epoch only, so the points of the small batches, which need
# few epochs, are coarse.)

# %%
raced = np.array(list(winners))
needed_steps = np.array([len(winners[batch]) * SAMPLES / batch for batch in winners])
# The law is a line in 1 / B. A relative error counts alike at each batch, as in exercise 1.4.
slope, fewest = np.polyfit(1 / raced, needed_steps, 1, w=1 / needed_steps)
critical = slope / fewest
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
line = np.geomspace(4, 1024, 100)
left.loglog(raced, needed_steps, "o", markersize=8, label="measured")
left.loglog(line, fewest * (1 + critical / line), label="law, fitted")
left.set(xlabel="batch size B", ylabel="steps to the target", title="Steps fall, then no more")
left.legend()
right.loglog(raced, needed_steps * raced, "o", markersize=8)
right.loglog(line, fewest * (line + critical))
right.axvline(critical, color="black", linewidth=1, linestyle=":", label="critical batch")
right.set(xlabel="batch size B", ylabel="samples to the target", title="Samples stay, then rise")
plain_ticks(left.yaxis, right.yaxis)
right.legend()
plt.show()
print(f"Fitted here: at least {fewest:.0f} steps, and a critical batch size of about {critical:.0f}.")
print("Read that as an order of magnitude.")
assert 5 < critical < 1000
assert needed_steps[0] > 1.5 * needed_steps[1], "below the critical batch size, steps fall with the batch"
assert needed_steps[-2] < 3 * needed_steps[-1], "above it, four times the batch saves far less than three quarters"

# %% [markdown]
# Must one run a race to know? Not quite. Exercise 1.3 showed what limits a small batch: noise. Where the noise of a
# gradient is much larger than the gradient itself, averaging over more samples helps; where it is much smaller, there
# is nothing left to average away. The **gradient noise scale** is the batch size at which the two are alike. It needs
# gradients only, no training, and is a rough guide to the critical batch size. Paceline measures it for its own
# recipe `digits` (a small network for images, on the same pictures, at its first weights):

# %%
_ = run("paceline noise-scale digits --steps 20", seconds=300)

# %% [markdown]
# It prints a **range** for the critical batch size, and a wide one. That is honest: the two agree only in their order
# of magnitude, and the noise scale changes while the training goes on (these are fresh weights). Never let anyone
# sell you *the* best batch size as one number. The line "at 64 samples" puts the noise scale into the law, as C; the
# line on the linear rate belongs to lab 3.
#
# Other tasks have other critical batch sizes:

# %% [markdown] tags=["slide"]
# ## Which batch still pays?
#
# - Below the **critical batch size**, a larger batch saves steps, almost for free.
# - Above it, a larger batch wastes samples.
# - In the paper it grows with the difficulty of the task, and while training goes on.

# %% tags=["slide"]
# McCandlish et al. 2018 (arXiv:1812.06162), table 1: at the start, and averaged over the training.
published = {
    "MNIST (digits)": (20, 200),
    "SVHN (house numbers)": (50, 500),
    "CIFAR-10 (pictures)": (300, 900),
    "ImageNet (pictures)": (1_000, 15_000),
    "Billion Word (text; tokens)": (700, 100_000),
    "Dota 1v1 (a game; frames)": (50_000, 3_000_000),
}
figure, axes = plt.subplots(figsize=(7.5, 3))
for row, (start, average) in enumerate(published.values()):
    axes.plot([start, average], [row, row], color="C0", linewidth=6, solid_capstyle="butt", alpha=0.4)
    axes.plot(start, row, "o", color="C1", label="at the start" if row == 0 else None)
    axes.plot(average, row, "s", color="C0", label="average over the training" if row == 0 else None)
axes.set_yticks(range(len(published)), list(published))
axes.set(xscale="log", xlabel="critical batch size", title="Critical batch sizes (McCandlish et al. 2018)")
axes.invert_yaxis()
axes.legend(fontsize=9)
plt.show()

# %% [markdown]
# The harder the task, the larger the batch that still pays, the paper found. That is good news for those who need
# many devices: the long trainings are those that can be shared out. Goyal et al. (2017) showed how far it goes on
# ImageNet: with the learning rate scaled to the batch, and warmed up (raised step by step at the beginning),
# ResNet-50 kept its accuracy up to batches of about 8,000 pictures.

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
# Here the epochs were held fixed, and the price of too large a batch shows as error. Lab 3 is about that.

# %% [markdown]
# ## 4. Where does the time of a step go?
#
# A step (an **iteration**) of a real training has more parts than our little function:
#
# | part | what happens |
# |---|---|
# | data | the next batch is read, decoded and put together |
# | copy | it goes to the device (`h2d`, "host to device") |
# | forward | the network computes its answers and the loss |
# | backward | the gradient of every weight is computed |
# | communication | several devices average their gradients: nothing yet, with one |
# | update | the optimizer changes the weights |
# | the rest | a running average of the weights (`ema`), records (`logging`), Python itself (`host`) |
#
# Paceline writes down how long each part took, for every run. Let us train its recipe `digits` for three epochs, and
# ask. ("Top-1 accuracy" is the share of the held-out pictures whose digit is told rightly.)

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
# **To think about.** Suppose `data_wait` were half of the step. Would a second GPU help? What would?
#
# <details><summary>Answer</summary>
#
# A second GPU that waits for the same data would wait all the same. First let the data come faster (more reading
# processes, smaller pictures, a packed data set); then look again. Always ask where the time goes before you buy
# anything.
#
# </details>

# %% [markdown]
# ## 5. Learning curves: what will more data bring?
#
# Long trainings exist because there is so much data. Does more of it help? A **learning curve** shows the error on
# **held-out** samples (which were not trained on) against the number of training samples. Hestness et al. (2017)
# measured such curves for translation, language models, images and speech, and describe three parts: too little data,
# a power law, and a level that more data does not pass.

# %% [markdown] tags=["slide"]
# ## The power law
#
# In the middle, error = a · nᵇ: on logarithmic axes a straight line, whose slope b is below 0.
#
# - Hestness et al. (2017) found b between −0.07 and −0.35 in their four fields.
# - To halve the error takes 2^(−1/b) times the data.
# - A few small trainings tell what a large data set will bring.

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
# train on 1,000 and look. Small sets scatter a great deal, so each point is the mean of several trials, each with
# other held-out pictures, other training pictures and other first weights.
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
# by
# <code>np.polyfit(np.log(samples), np.log(errors), 1)</code>, put in <code>np.log(more)</code>, and take
# <code>np.exp</code>.
#
# </details>


# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
def extrapolate(samples: np.ndarray, errors: np.ndarray, more: float) -> tuple[float, float]:
    b, log_a = np.polyfit(np.log(samples), np.log(errors), 1)
    return b, np.exp(log_a + b * np.log(more))


# %%
def held_out_error(samples: int, seed: int, steps: int = 600) -> float:
    """Percent of 797 held-out digits told wrongly after a training on so many."""
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
print(f"b = {slope:.2f}. Predicted for 1,000 samples: {predicted:.1f} % wrong.")

# %% [markdown]
# Write down whether you believe it: will the measurement be better or worse? Then run the next cell.

# %% [markdown] tags=["slide"]
# ## Predict, then measure
#
# Four small trainings, a line, and the training that it foretells.

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
print(f"{TRIALS} trials at 1,000 samples: from {found.min():.2f} to {found.max():.2f} %.")
assert slope < -0.35, "steeper than the paper's lines"
assert 0.5 < predicted / found.mean() < 2

# %% [markdown]
# *Learnt: four small trainings foretell a larger one, if it stays on the line. Show a prediction beside its
# measurement.*
#
# What such a small set **can** show: that there is a line, and how to use it. What it **cannot**: where the line ends
# (we do not have ten times the data to see it level off), whether its slope holds for other tasks (this one is easy,
# and its line steeper than those of the paper's four fields), or tell apart slopes that differ little (see how far
# the trials scatter). And one network of one size was trained for the same number of steps each time; the paper chose
# the best model for each amount. Finally, our held-out pictures were drawn at random, so people who wrote them also
# wrote training pictures; those of new writers may be harder.

# %% [markdown]
# ## 6. What several devices can do, and what limits them
#
# Now put it together. Time to a result is epochs × samples / throughput. Data parallelism raises the **throughput**:
# it cuts each batch into parts, one for each device.

# %% [markdown] tags=["slide"]
# ## Data parallelism
#
# Share out the samples of a batch; average the gradients; make the same update everywhere.

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
# make **the same step** as one device with the whole batch, up to rounding; only, each has a quarter of the
# arithmetic. Then they must agree on the mean, which means sending gradients to one another at every step (all-reduce
# is the name for it; lab 2a builds one). This has a price, and so:
#
# - the **speed-up** on N devices is the time on one, divided by the time on N;
# - the **efficiency** is the speed-up divided by N: 100 % would be perfect.
#
# What keeps it below 100 %? Whatever does not become shorter with more devices. If a share s of the time stays as it
# is, and the rest is shared out among N devices, then the time that was 1 becomes s + (1 − s) / N. This is **Amdahl's
# law** (1967).
#
# **Exercise 1.6.** Write Amdahl's law. Before you run the check: what is the most that s = 5 % ever allows?


# %% tags=["exercise"]
def speed_up(devices: float, serial: float) -> float:
    """The speed-up where the share `serial` (0 to 1) of the time does not become shorter."""
    raise NotImplementedError  # yours to write


# %% tags=["check"]
with exercise("1.6"):
    assert speed_up(8, 0.0) != 1 / 8, "this is the time that is left: the speed-up is one over it"
    assert np.isclose(speed_up(8, 0.0), 8), "with nothing serial, 8 devices are 8 times as fast"
    assert np.isclose(speed_up(8, 1.0), 1), "with everything serial, 8 devices are as fast as one"
    assert np.isclose(speed_up(2, 0.5), 4 / 3), "half of it serial, 2 devices: 1 / (0.5 + 0.25) is 1.33"
    print(f"s = 5 %: {speed_up(8, 0.05):.1f} on 8 devices, {speed_up(1000, 0.05):.1f} on 1,000, never 20")

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>
#
# One over the time that is left: <code>serial + (1 - serial) / devices</code>.
#
# </details>


# %% tags=["answer"] jupyter={"source_hidden": true}
# Answer
def speed_up(devices: float, serial: float) -> float:
    return 1 / (serial + (1 - serial) / devices)


# %% [markdown]
# *Learnt: what is not shared out decides in the end, however small it is.*
#
# NVIDIA's figures from the beginning give the speed-up on eight A100. Which share s would explain it?

# %% [markdown] tags=["slide"]
# ## Speed-up and efficiency
#
# - speed-up = time on one device / time on N
# - efficiency = speed-up / N
# - Amdahl: speed-up = 1 / (s + (1 − s) / N), with s the share that is not shared out

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
# Do not take the right half of this picture too seriously. Amdahl's law speaks of one fixed piece of work. In
# practice one gives each device as many samples as before, so the batch grows with the devices, and the fixed part
# matters less: Goyal et al. (2017) report an efficiency of about 90 % going from 8 to 256 GPUs, with a batch of
# 8,192. But then section 3 strikes: **a larger batch may need more epochs.** Only the time to a result counts, and it
# has both in it.

# %% [markdown] tags=["slide"]
# ## What to remember
#
# 1. Time = epochs × samples / throughput.
# 2. SGD: many rough steps. The noise of a batch falls as 1 / √B only.
# 3. Throughput rises with the batch, then flattens; epochs rise beyond the critical batch size.
# 4. Measure where a step's time goes before you change anything.
# 5. Small trainings foretell larger ones; what is not shared out limits the speed-up.

# %% [markdown]
# **With real runs**, these commands do what you did by hand:
#
# | question | command |
# |---|---|
# | where does the time of my steps go? | `paceline report RUN --timing` |
# | how large a batch still pays? | `paceline noise-scale RECIPE` |
# | and measured? | `paceline sweep-batch RECIPE --batch-sizes … --to METRIC=VALUE` |
# | how fast is it at each batch size? | `paceline bench RECIPE --batch-sizes …` |
# | what would more devices bring? | `paceline scale RECIPE --world-sizes 1,2,4` |
# | how many do I need by Friday? | `paceline plan RECIPE --deadline 72h` |
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
# **Next:** lab 2a builds data parallelism from its parts: processes that send each other gradients.
