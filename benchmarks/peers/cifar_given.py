"""What is every contender of the CIFAR-10 race given? The images, a budget of seconds, and the faster numbers.

A contender is a program of its own, ``cifar_NAME.py BUDGET.json OUT.json``, with the settings that its authors give for
CIFAR-10, or else its defaults. What they leave open is chosen in its favour: the precision that our recipe takes on
this machine (bf16 only where the processor has products in it), channels last, a schedule fitted to as many steps as
the budget holds, and the mean of each image's answers and its mirror's.
Loading the images, finding out how long a step takes, and scoring are not in the budget. This file imports torch and
torchvision only.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

CLASSES, SIDE = 10, 32
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_TRIED, _FIRST = 16, 4
_SCORED_AT_ONCE = 500


@dataclass(kw_only=True)
class Budget:
    """One contender's training.

    Attributes:
        data: A file of arrays: ``train_images`` and ``test_images`` uint8 [N, 32, 32, 3], and their labels.
        seconds: That its steps may take.
        precision: ``fp32``, or ``bf16`` for autocast.
        threads: Of the process.
        workers: Loader processes beside it.
        seed: Of the weights and the order.
        out: Where the result goes.
        steps: Optimizer steps that fit.
        took: Seconds that they took.
    """

    data: str
    seconds: float
    precision: str
    threads: int = 2
    workers: int = 1
    seed: int = 0
    out: str = ""
    steps: int = 0
    took: float = 0.0
    arrays: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def race(self) -> Iterator[None]:
        """Around the training."""
        started = time.perf_counter()
        yield
        self.took = time.perf_counter() - started

    def write(self, model: nn.Module, batch: int) -> None:
        """Score the network on the test images, and write what it reached."""
        model.eval()
        images, labels = self.arrays["test_images"], torch.from_numpy(self.arrays["test_labels"])
        correct = 0
        show = transforms.Normalize(MEAN, STD)
        for first in range(0, len(labels), _SCORED_AT_ONCE):
            part = torch.from_numpy(images[first : first + _SCORED_AT_ONCE]).permute(0, 3, 1, 2).float() / 255
            shown = show(part)
            with torch.inference_mode():
                answers = model(shown).float().softmax(1) + model(shown.flip(3)).float().softmax(1)
            correct += int((answers.argmax(1) == labels[first : first + _SCORED_AT_ONCE]).sum())
        reached = {
            "top1_accuracy": 100 * correct / len(labels),
            "steps": self.steps,
            "epochs": self.steps * batch / len(self.arrays["train_labels"]),
            "train_seconds": self.took,
        }
        Path(self.out).write_text(json.dumps(reached))


def begin() -> Budget:
    """Read the command line, set threads and seed, and load the images."""
    budget = Budget(**json.loads(Path(sys.argv[1]).read_text()), out=sys.argv[2])
    torch.set_num_threads(budget.threads)
    torch.manual_seed(budget.seed)
    with np.load(budget.data) as arrays:
        budget.arrays = {name: arrays[name] for name in arrays.files}
    return budget


class Fast(nn.Module):
    """A network in the faster numbers and channels last."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        super().__init__()
        self.is_bf16 = precision == "bf16"
        self.model = model.to(memory_format=torch.channels_last)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images to logits in fp32."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_bf16):
            answers: torch.Tensor = self.model(images.contiguous(memory_format=torch.channels_last))
        return answers.float()


class Pictures(Dataset[tuple[Any, int]]):
    """The training images as pictures, through transforms; ``count`` of them, so that one pass is a training."""

    def __init__(self, budget: Budget, transform: Any, count: int | None = None) -> None:
        self.images, self.labels = budget.arrays["train_images"], budget.arrays["train_labels"]
        self.transform = transform
        self.count = len(self.labels) if count is None else count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        which = index % len(self.labels)
        picture = Image.fromarray(self.images[which])
        return (picture if self.transform is None else self.transform(picture)), int(self.labels[which])


def shifted() -> Any:
    """What is usually done to CIFAR's training images."""
    return transforms.Compose(
        [
            transforms.RandomCrop(SIDE, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


def loader(budget: Budget, transform: Any, batch: int, steps: int) -> DataLoader[Any]:
    """So many shuffled batches."""
    pictures = Pictures(budget, transform, steps * batch)
    return DataLoader(pictures, batch_size=batch, shuffle=True, drop_last=True, num_workers=budget.workers)


def fit_steps(
    budget: Budget, model: nn.Module, batches: Callable[[int], Any], optimizer: Callable[[Any], torch.optim.Optimizer]
) -> int:
    """How many steps the budget holds, by a few of a copy of the network; kept in the budget too.

    Args:
        budget: Of which the seconds are read.
        model: The network.
        batches: Makes a loader of so many batches.
        optimizer: Makes an optimizer of parameters.
    """
    tried = copy.deepcopy(model)
    stepping, ends = optimizer(tried.parameters()), []
    for images, labels in batches(_TRIED):
        F.cross_entropy(tried(images), labels).backward()
        stepping.step()
        stepping.zero_grad()
        ends.append(time.perf_counter())
    each = (ends[-1] - ends[_FIRST - 1]) / (len(ends) - _FIRST)
    budget.steps = max(int(budget.seconds / each), 10)
    return budget.steps
