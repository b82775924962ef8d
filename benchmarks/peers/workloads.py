"""What is compared: one training for all contenders, and the figures that are read from its clock."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from given import SAMPLES, Spec

from paceline.host.machine import available_cores

Seen = Mapping[str, Any]
_USUAL_STEPS = 6
EVERYWHERE = ("raw", "raw-tuned", "torchvision", "timm", "accelerate", "lightning", "fastai", "composer", "paceline")
_ON_GPU = ("raw", "raw-tuned", "timm", "accelerate", "lightning", "paceline")


@dataclass(frozen=True)
class Figure:
    """One number of a training.

    Attributes:
        title: What it is, with its unit.
        of: Computes it from the training and what its clock wrote.
        more_is_better: Whether the largest wins.
    """

    title: str
    of: Callable[[Spec, Seen], float]
    more_is_better: bool = False


@dataclass(frozen=True)
class Workload:
    """One training that every contender does.

    Attributes:
        title: For people.
        spec: The training.
        figures: What is read from it, by key.
        resumed: What is read from a second training that goes on from its checkpoint.
        contenders: Who does it; by default all that are meant for the CPU too.
    """

    title: str
    spec: Spec
    figures: Mapping[str, Figure]
    resumed: Mapping[str, Figure] | None = None
    contenders: tuple[str, ...] = EVERYWHERE


def step_milliseconds(spec: Spec, seen: Seen) -> float:
    """Of the timed steps, all of their time: what a step waited for is part of it."""
    steps = seen["steps"]
    return float(1000 * (steps[-1] - steps[spec.warmup - 1]) / (len(steps) - spec.warmup))


def images_per_second(spec: Spec, seen: Seen) -> float:
    """Images of the timed steps over their time."""
    return spec.batch * 1000 / step_milliseconds(spec, seen)


def evaluated_per_second(spec: Spec, seen: Seen) -> float:
    """Held-out images over the time that scoring them took."""
    started, ended = seen["evaluations"][0]
    return float(spec.evaluate / (ended - started))


def first_step_seconds(_spec: Spec, seen: Seen) -> float:
    """From the start of the process to the end of its first optimizer step."""
    return float(seen["steps"][0] - seen["started"])


def _after_saves(spec: Spec, seen: Seen) -> list[list[float]]:
    """Seconds of all steps from each save to the next.

    They begin one step early, since some contenders call the clock after the save and some before; what is still
    written beside later steps is in them too.
    """
    each = [after - before for before, after in itertools.pairwise(seen["steps"])]
    every = spec.save_every
    return [each[at - 2 : at - 2 + every] for at in range(every, len(each) - every + 2, every)]


def pause_milliseconds(spec: Spec, seen: Seen) -> float:
    """What a save adds to the steps after it, beside the last six before the next save: the median of the saves.

    Beside steps so near, since a machine whose speed drifts makes more of a difference than the save.
    """
    added = []
    for stretch in _after_saves(spec, seen):
        first, last = stretch[:-_USUAL_STEPS], stretch[-_USUAL_STEPS:]
        added.append(sum(first) - len(first) * statistics.median(last))
    return 1000 * statistics.median(added)


def standstill_milliseconds(spec: Spec, seen: Seen) -> float:
    """What a save adds to the longest step after it: the median of the saves."""
    added = [max(stretch) - statistics.median(stretch[-_USUAL_STEPS:]) for stretch in _after_saves(spec, seen)]
    return 1000 * statistics.median(added)


def saving_step_milliseconds(spec: Spec, seen: Seen) -> float:
    """A step of a training that saves so often."""
    return 1000 * statistics.mean(itertools.chain.from_iterable(_after_saves(spec, seen)))


def peak_mebibytes(_spec: Spec, seen: Seen) -> float:
    """Largest resident memory of the process."""
    return float(seen["peak_rss_bytes"] / 2**20)


def device_mebibytes(_spec: Spec, seen: Seen) -> float:
    """Most that torch's allocator has handed out on the GPU."""
    return float(seen["peak_device_bytes"] / 2**20)


STEP = Figure("milliseconds a step", step_milliseconds)
IMAGES = Figure("images/s", images_per_second, more_is_better=True)
START = Figure("seconds to the first step", first_step_seconds)
PEAK = Figure("MiB resident at most", peak_mebibytes)
ALLOCATED = Figure("MiB allocated on the GPU at most", device_mebibytes)
_RESNET50 = Spec(network="resnet50", image_size=224, batch=256, precision="bf16", device="cuda", threads=4)

WORKLOADS: Mapping[str, Workload] = {
    "loop-64": Workload(
        "loop overhead: 120,078 parameters, batch 64",
        Spec(steps=160, warmup=40),
        {"step_milliseconds": STEP, "first_step_seconds": START, "peak_mebibytes": PEAK},
    ),
    "loop-4": Workload(
        "loop overhead: the same at batch 4", Spec(batch=4, steps=800, warmup=100), {"step_milliseconds": STEP}
    ),
    "folder-64": Workload(
        "ResNet-18 at 64 pixels from JPEG files, bf16, 2 loader processes",
        Spec(network="resnet18", data="folder", image_size=64, precision="bf16", steps=40, warmup=8, workers=2),
        {"images_per_second": IMAGES},
    ),
    "folder-160": Workload(
        "ResNet-18 at 160 pixels from JPEG files, bf16, 2 loader processes",
        Spec(network="resnet18", data="folder", image_size=160, precision="bf16", steps=16, warmup=4, workers=2),
        {"images_per_second": IMAGES},
    ),
    "memory": Workload(
        "images of CIFAR-10's size held in memory, shifted and flipped, batch 512",
        Spec(data="memory", batch=512, steps=60, warmup=10, workers=1),
        {"images_per_second": IMAGES},
    ),
    "ddp-2": Workload(
        "two processes over gloo, ResNet-18 at 32 pixels, bf16, batch 128",
        Spec(network="resnet18", precision="bf16", batch=128, steps=40, warmup=8, threads=1, processes=2),
        {"images_per_second": IMAGES},
    ),
    "evaluation": Workload(
        f"scoring {SAMPLES:,} images of 32 pixels with ResNet-18, bf16, batch 100",
        Spec(network="resnet18", precision="bf16", batch=100, steps=2, warmup=1, evaluate=SAMPLES),
        {"evaluated_per_second": Figure("images/s scored", evaluated_per_second, more_is_better=True)},
    ),
    "checkpoint": Workload(
        "checkpoints of ResNet-50 (205 MB with momentum), one every 20 steps",
        Spec(network="resnet50", batch=16, precision="bf16", steps=80, warmup=0, saves=4),
        {
            "saving_step_milliseconds": Figure("milliseconds a step, saves included", saving_step_milliseconds),
            "standstill_milliseconds": Figure(
                "milliseconds by which a save lengthens one step at most", standstill_milliseconds
            ),
            "pause_milliseconds": Figure("milliseconds that a save costs in all", pause_milliseconds),
        },
        resumed={"first_step_seconds": Figure("seconds to the first step of a resumed run", first_step_seconds)},
    ),
    "gpu-resident": Workload(
        "ResNet-50 on a GPU, one batch of 256 that lies there, bf16",
        replace(_RESNET50, data="resident", steps=100, warmup=20),
        {"images_per_second": IMAGES, "device_mebibytes": ALLOCATED},
        contenders=_ON_GPU,
    ),
    "gpu-folder": Workload(
        "ResNet-50 on a GPU at 224 pixels from JPEG files, batch 256, bf16",
        replace(_RESNET50, data="folder", steps=60, warmup=30, workers=available_cores()),
        {"images_per_second": IMAGES},
        contenders=("raw", "timm", "paceline", "paceline-packed", "paceline-dali"),
    ),
}
