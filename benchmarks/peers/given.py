"""What every contender gets: the same networks, images and clock.

A contender is a program of its own, ``run_NAME.py SPEC.json OUT.json``, that trains as its library's documentation
says and calls the clock after each optimizer step. This file imports torch and torchvision only, since each runs in
an environment of its own, and torchvision where it is used: it loads torch's compiler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

CLASSES = 10
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
LR, MOMENTUM = 0.001, 0.9
SAMPLES = 10_000
RESUMED_STEPS = 8
_EPOCHS = 1_000  # more than any training reaches before its steps are done


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One training.

    Attributes:
        network: ``lecture_net``, ``resnet18`` or ``resnet50``.
        data: ``tensors`` (batches cut from a tensor), ``memory`` (images in memory, shifted and flipped), ``folder``
            (JPEG files, random resized crops, flipped) or ``resident`` (one batch that lies on the device, again and
            again).
        folder: FOLDER/{train,val}/CLASS/*.jpg.
        image_size: Height and width of what the network sees, in pixels.
        batch: Images per optimizer step over all processes.
        steps: Optimizer steps that are timed.
        warmup: Optimizer steps before them.
        precision: ``fp32``, or ``bf16`` for autocast.
        channels_last: Memory layout.
        device: ``cpu`` or ``cuda``.
        threads: Of each process.
        workers: Loader processes of each process.
        processes: Ranks.
        evaluate: Held-out images that are scored once at the end; 0: none.
        saves: How many checkpoints are written during the timed steps, evenly.
        resume: Whether the training goes on from the newest checkpoint in ``scratch``.
        scratch: A folder for whatever is written, the same for a training and its resumption.
    """

    network: str = "lecture_net"
    data: str = "tensors"
    folder: str = ""
    image_size: int = 32
    batch: int = 64
    steps: int = 200
    warmup: int = 20
    precision: str = "fp32"
    channels_last: bool = True
    device: str = "cpu"
    threads: int = 2
    workers: int = 0
    processes: int = 1
    evaluate: int = 0
    saves: int = 0
    resume: bool = False
    scratch: str = "."

    @property
    def total(self) -> int:
        """Optimizer steps in all, those of a training that is gone on from included."""
        return self.warmup + self.steps + (RESUMED_STEPS if self.resume else 0)

    @property
    def local_batch(self) -> int:
        """Images per optimizer step and process."""
        return self.batch // self.processes

    @property
    def save_every(self) -> int:
        """Steps between two checkpoints; 0 if none is written."""
        return self.steps // self.saves if self.saves else 0

    @property
    def layout(self) -> torch.memory_format:
        """Of weights and images."""
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context of the forward pass."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "bf16")

    def placed(self, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch on the device, in the memory layout of the weights."""
        inputs = inputs.to(self.device, non_blocking=True, memory_format=self.layout)
        return inputs, labels.to(self.device, non_blocking=True)


@dataclass
class Clock:
    """When did what end? Seconds of ``time.time``, since the harness knows when the process was started."""

    spec: Spec
    steps: list[float] = field(default_factory=list)
    evaluations: list[tuple[float, float]] = field(default_factory=list)
    seen: int = 0

    def step(self) -> None:
        """An optimizer step has ended; on a GPU, its kernels have too where the timed steps begin and end."""
        if self.spec.device == "cuda" and len(self.steps) + 1 in (self.spec.warmup, self.spec.total):
            torch.cuda.synchronize()
        self.steps.append(time.time())

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around scoring the held-out images."""
        started = time.time()
        yield
        self.evaluations.append((started, time.time()))

    def write(self, path: str, **more: Any) -> None:
        """Write the measurements on the first rank; no rank leaves while another still communicates."""
        rank = int(os.environ.get("RANK", "0"))  # of those whose group is no more
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            rank = torch.distributed.get_rank()
        if rank:
            return
        seen = {
            "steps": self.steps,
            "evaluations": self.evaluations,
            "peak_rss_bytes": peak_bytes(),
            "peak_device_bytes": torch.cuda.max_memory_allocated() if self.spec.device == "cuda" else 0,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            **more,
        }
        Path(path).write_text(json.dumps(seen))


def peak_bytes() -> int:
    """Largest resident memory of this process; what getrusage says is never less than its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def begin() -> tuple[Spec, Clock, str]:
    """Read the command line, set threads and seed; returns what to do, the clock, and where to write."""
    spec = Spec(**json.loads(Path(sys.argv[1]).read_text()))
    torch.set_num_threads(spec.threads)
    torch.manual_seed(0)
    return spec, Clock(spec), sys.argv[2]


def as_json(spec: Spec) -> str:
    """The training as :func:`run_in_thread` reads it."""
    return json.dumps(dataclasses.asdict(spec))


def build(spec: Spec) -> nn.Module:
    """The network, with random weights."""
    if spec.network == "lecture_net":
        return lecture_net()
    from torchvision.models import get_model

    return get_model(spec.network, num_classes=CLASSES)


def lecture_net() -> nn.Module:
    """The network of a lecture's demonstration: PyTorch's CIFAR-10 tutorial with 128 channels; 120,078 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(3, 128, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(128, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)),
    )


def sgd(model: nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
    """The optimizer of every contender that takes one of torch's."""
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, fused=fused)


# ----------------------------------------------------------------------------------------------------- images


def pixels(count: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images, uint8 [N, 3, size, size], and their labels, int64 [N]."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
    return images, torch.randint(0, CLASSES, (count,), generator=generator)


class Batches(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Batches cut from images in memory: one index, one normalisation. The least that a loader can do."""

    def __init__(self, spec: Spec, rank: int = 0, *, evaluation: bool = False) -> None:
        self.spec, self.rank, self.evaluation = spec, rank, evaluation
        count = spec.evaluate if evaluation else SAMPLES
        self.images, self.labels = pixels(count, spec.image_size, seed=int(evaluation))

    def __len__(self) -> int:
        return len(self.images) // self.spec.batch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        order = torch.arange(len(self.images))
        if not self.evaluation:
            order = torch.randperm(len(self.images), generator=generator)
        for first in range(0, len(self) * self.spec.batch, self.spec.batch):
            begin = first + self.rank * self.spec.local_batch
            ids = order[begin : begin + self.spec.local_batch]
            inputs = self.images[ids].to(torch.float32, memory_format=self.spec.layout)
            yield inputs.mul_(1 / (255 * STD[0])).add_(-MEAN[0] / STD[0]), self.labels[ids]


class Resident(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """One batch of noise on the device, again and again: what is left is the network and its update."""

    def __init__(self, spec: Spec) -> None:
        self.batch = spec.placed(
            torch.randn(spec.local_batch, 3, spec.image_size, spec.image_size),
            torch.randint(0, CLASSES, (spec.local_batch,)),
        )

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield self.batch


class InMemory(Dataset[tuple[Any, int]]):
    """Images in memory, as torchvision's CIFAR10 holds them: one PIL image at a time, through its transforms."""

    def __init__(self, spec: Spec, transform: Any) -> None:
        images, labels = pixels(5 * SAMPLES, spec.image_size, seed=0)
        self.images, self.labels = images.permute(0, 2, 3, 1).contiguous().numpy(), labels.tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def shifted(spec: Spec) -> Any:
    """What is usually done to CIFAR's training images."""
    from torchvision import transforms

    return transforms.Compose(
        [
            transforms.RandomCrop(spec.image_size, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


def cropped(spec: Spec) -> Any:
    """What is usually done to photographs: crops of 8 to 100 % of the area, flipped."""
    from torchvision import transforms

    return transforms.Compose(
        [
            transforms.RandomResizedCrop(spec.image_size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


def loader(spec: Spec, rank: int = 0) -> DataLoader[Any]:
    """Training batches by torch's own loader, for contenders that have none of their own."""
    if spec.data == "resident":
        return DataLoader(Resident(spec), batch_size=None)
    if spec.data == "tensors":
        return DataLoader(Batches(spec, rank), batch_size=None)
    if spec.data == "memory":
        dataset: Dataset[Any] = InMemory(spec, shifted(spec))
    else:
        from torchvision.datasets import ImageFolder

        dataset = ImageFolder(f"{spec.folder}/train", cropped(spec))
    return DataLoader(
        dataset,
        batch_size=spec.local_batch,
        shuffle=True,
        drop_last=True,
        num_workers=spec.workers,
        persistent_workers=spec.workers > 0,
        pin_memory=spec.device == "cuda",
    )


def held_out(spec: Spec) -> DataLoader[Any]:
    """Held-out batches, in memory."""
    return DataLoader(Batches(spec, evaluation=True), batch_size=None)


def endless(batches: DataLoader[Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Epoch after epoch."""
    for _ in range(_EPOCHS):
        yield from batches
