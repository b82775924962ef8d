"""How fast do batches of small images come from memory, beside a loop written by hand and other loaders?

Every contender makes an epoch of training batches of 32x32 images that are in memory as uint8: shifted by up to four
pixels, the border mirrored, and flipped with probability one half. They take turns, an epoch each (A B C … A B C …), in
one process with as many threads, so that a machine whose speed drifts slows all alike. What the clock includes is a
whole epoch: order, draws, indices, pixels and labels, and starting a contender's threads or processes for it.

Two kinds are compared with their like: batches of bytes, and batches of normalised floats.

- by hand: torch alone, the fastest that we could write: all shifts are a view of the images with their borders, of
  which a batch is one indexing; the mirror image is chosen by `torch.where`. Once in each batch, and once for an epoch
  at once, as the fast runs on CIFAR-10 do it (KellerJordan/cifar10-airbench).
- Paceline: `data.backend=memory` as a run has it, from the order of samples to the batch.
- torchvision: its transforms on Pillow's images, in a DataLoader with as many workers as cores.
- FFCV: a file of raw images, where it is installed (libopencv-dev, libturbojpeg0-dev and pkg-config, then pip install
  ffcv).

    python benchmarks/memory.py [--images PATH] [--batch-size 512] [--rounds 7] [--threads 2]

PATH is CIFAR-10 as `data.path` takes it; without it there are 50,000 images of noise.
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hardware import spread, write_result

from paceline.data.batch import Normalize, Placement, to_device
from paceline.data.image.datasets import open_dataset
from paceline.data.image.source import ArraySource
from paceline.data.image.transforms import View
from paceline.data.loaders.memory import MemoryBackend
from paceline.data.order import StepGeometry
from paceline.host.machine import available_cores
from paceline.host.world import World
from paceline.recipe.data import Augment, Data

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
SIZE, PADDING = 32, 4
AUGMENT = Augment(crop="pad", padding=PADDING, padding_mode="reflect", flip=0.5)

Contender = Callable[[int], Iterator[torch.Tensor]]
"""Makes the batches of the epoch so numbered."""


def read_images(path: Path | None) -> ArraySource:
    """CIFAR-10's training images, or noise."""
    if path is None:
        generator = np.random.default_rng(0)
        pixels = generator.integers(0, 256, (50_000, SIZE, SIZE, 3), dtype=np.uint8)
        return ArraySource(pixels, generator.integers(0, 10, len(pixels)), "noise")
    train = open_dataset(Data(dataset="cifar10", path=str(path))).train
    return ArraySource(np.stack([train.read(sample) for sample in range(len(train))]), train.labels, "cifar10")


def windows(images: torch.Tensor) -> torch.Tensor:
    """Every shift of every image, as a view [N, C, 9, 9, S, S] of the images with their borders."""
    padded = F.pad(images.float(), (PADDING,) * 4, mode="reflect").to(torch.uint8)
    return padded.unfold(2, SIZE, 1).unfold(3, SIZE, 1)


def by_hand(source: ArraySource, batch: int, *, floats: bool, at_once: bool = False) -> Contender:
    """A loop of tensors: shift by indexing a view of all shifts, flip by choosing between an image and its mirror."""
    images = torch.from_numpy(source.images.transpose(0, 3, 1, 2).copy())
    shifts, labels = windows(images), torch.from_numpy(source.labels)
    scale = torch.tensor([1 / (255 * each) for each in STD]).view(1, 3, 1, 1)
    shift = torch.tensor([-mean / std for mean, std in zip(MEAN, STD, strict=True)]).view(1, 3, 1, 1)

    def varied(rows: torch.Tensor) -> torch.Tensor:
        top, left = torch.randint(0, 2 * PADDING + 1, (2, len(rows)))
        inputs = shifts[rows, :, top, left]
        return torch.where(torch.rand(len(rows), 1, 1, 1) < 0.5, inputs.flip(-1), inputs)

    def epoch(_: int) -> Iterator[torch.Tensor]:
        order = torch.randperm(len(images))
        whole = varied(order) if at_once else None
        for number, rows in enumerate(order.split(batch)):
            inputs = varied(rows) if whole is None else whole[number * batch : number * batch + len(rows)]
            labels[rows]
            yield inputs.float().mul_(scale).add_(shift) if floats else inputs

    return epoch


def paceline(source: ArraySource, batch: int, *, floats: bool, channels_last: bool) -> Contender:
    """Our own, as a run has it."""
    view = View(image_size=SIZE, channels=3, augment=AUGMENT, seed=0, mean=MEAN)
    backend = MemoryBackend(source, view, channels_last=channels_last)
    geometry = StepGeometry(seed=0, samples=len(source), global_batch_size=batch, logical_ranks=1)
    steps = geometry.epochs.phases[0].steps_per_epoch
    placement = Placement(device=torch.device("cpu"), channels_last=channels_last)
    normalize = Normalize(MEAN, STD, placement)

    def epoch(number: int) -> Iterator[torch.Tensor]:
        raw = backend.batches(geometry.stream(number * steps, (number + 1) * steps, World()))
        for each in to_device(raw, normalize, placement) if floats else raw:
            # Bytes come as a view with gaps between rows; those who are compared with have none.
            yield each.inputs if floats else torch.empty_like(each.inputs).copy_(each.inputs)

    return epoch


class Pictures(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Images in memory through torchvision's transforms, one by one."""

    def __init__(self, source: ArraySource) -> None:
        from torchvision import transforms

        self._images, self._labels = source.images, source.labels.tolist()
        self._transform = transforms.Compose(
            [
                transforms.ToPILImage(),
                transforms.RandomCrop(SIZE, padding=PADDING, padding_mode="reflect"),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._transform(self._images[index]), self._labels[index]


def torchvision(source: ArraySource, batch: int, workers: int) -> Contender:
    """torchvision's transforms in a DataLoader."""
    loader = torch.utils.data.DataLoader(Pictures(source), batch_size=batch, shuffle=True, num_workers=workers)

    def epoch(_: int) -> Iterator[torch.Tensor]:
        for inputs, _labels in loader:
            yield inputs

    return epoch


def ffcv(source: ArraySource, batch: int, workers: int, scratch: Path) -> Contender:
    """FFCV on raw images, with its own shift and flip; bytes."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import IntDecoder, SimpleRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, RandomTranslate, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    class Rows(torch.utils.data.Dataset[tuple[Any, int]]):
        def __len__(self) -> int:
            return len(source)

        def __getitem__(self, index: int) -> tuple[Any, int]:
            return source.images[index], int(source.labels[index])

    path = scratch / "images.beton"
    fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
    DatasetWriter(str(path), fields, num_workers=1).from_indexed_dataset(Rows())
    pixels = [
        SimpleRGBImageDecoder(),
        RandomHorizontalFlip(),
        RandomTranslate(padding=PADDING),
        ToTensor(),
        ToTorchImage(channels_last=False, convert_back_int16=False),
    ]
    loader = Loader(
        str(path),
        batch_size=batch,
        num_workers=workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines={"image": pixels, "label": [IntDecoder(), ToTensor()]},
    )

    def epoch(_: int) -> Iterator[torch.Tensor]:
        for inputs, _labels in loader:
            yield inputs

    return epoch


def cpu_seconds() -> float:
    """Processor time of this process, its threads and its ended children."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def measure(contenders: dict[str, Contender], rounds: int, slow: Sequence[str], samples: int) -> dict[str, Any]:
    """Seconds of each, round by round, in turns; the slow ones in the first rounds only."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, epoch in contenders.items():
            if name in slow and number > 2:
                continue
            started, used = time.perf_counter(), cpu_seconds()
            total = sum(len(inputs) for inputs in epoch(number))
            if total != samples:
                raise AssertionError(f"{name} gave {total} images of {samples}")
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - started)
                cpu[name].append(cpu_seconds() - used)
    return {
        name: {
            "images_per_second": spread([samples / each for each in seconds[name]]),
            "cpu_microseconds_per_image": spread([1e6 * each / samples for each in cpu[name]]),
            "seconds": seconds[name],
        }
        for name in contenders
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--without", nargs="*", default=[], help="contenders to leave out: torchvision, ffcv")
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    source, batch = read_images(options.images), options.batch_size
    with tempfile.TemporaryDirectory() as scratch:
        contenders: dict[str, Contender] = {
            "by hand, bytes": by_hand(source, batch, floats=False),
            "Paceline, bytes": paceline(source, batch, floats=False, channels_last=True),
            "by hand, an epoch at once, bytes": by_hand(source, batch, floats=False, at_once=True),
            "by hand, floats": by_hand(source, batch, floats=True),
            "Paceline, floats": paceline(source, batch, floats=True, channels_last=True),
            "Paceline, floats, channels first": paceline(source, batch, floats=True, channels_last=False),
        }
        if "ffcv" not in options.without and importlib.util.find_spec("ffcv") is not None:
            contenders["FFCV, bytes"] = ffcv(source, batch, options.threads, Path(scratch))
        if "torchvision" not in options.without:
            contenders["torchvision, floats"] = torchvision(source, batch, options.threads)
        slow = ["torchvision, floats"]
        found = measure(contenders, options.rounds, slow, len(source))
    lines = [
        f"{name}: {row['images_per_second']['median']:,.0f} images/s, "
        f"{row['cpu_microseconds_per_image']['median']:.2f} CPU-µs per image"
        for name, row in found.items()
    ]
    ratios = {
        f"{ours} / {theirs}": statistics.median(
            b / a for a, b in zip(found[ours]["seconds"], found[theirs]["seconds"], strict=False)
        )
        for ours, theirs in (
            ("Paceline, bytes", "by hand, bytes"),
            ("Paceline, bytes", "FFCV, bytes"),
            ("Paceline, floats", "by hand, floats"),
            ("Paceline, floats, channels first", "by hand, floats"),
            ("Paceline, floats", "torchvision, floats"),
        )
        if theirs in found
    }
    lines += [f"{name}: {ratio:.2f} times as many images/s (median of rounds)" for name, ratio in ratios.items()]
    lines += [] if "FFCV, bytes" in found else ["FFCV was not measured: it is not installed, or was left out."]
    print("\n".join(lines))
    facts = {"images": source.name, "samples": len(source), "batch_size": batch, "threads": options.threads}
    if not options.dry_run:
        print(write_result("memory", {**facts, "contenders": found, "ratios": ratios}, lines))


if __name__ == "__main__":
    main()
