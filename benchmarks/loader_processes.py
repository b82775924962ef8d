"""How early does the first batch come, and what does the beginning of an epoch cost?

First batch: from opening the `pytorch` back-end to its first batch and to its tenth, with eight loader processes that
read photographs of 500x375 as training does; once as it is, all of them reading parts of the first batch, and once
without that, in turns.

Epoch: an index of a million entries and a step that does nothing but wait; the longest of the steps around the end of
an epoch beside the median of all, once with the next epoch's order sorted ahead, as it is, and once without, in turns.
Beside it the processor time of the training thread for a batch there, which does not depend on what else the machine
does.

    python benchmarks/loader_processes.py [--rounds 5] [--workers 8] [--batch-size 64]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from hardware import spread, write_result
from PIL import Image
from sklearn.datasets import load_sample_images

from paceline.data import order
from paceline.data.image.source import FileSource
from paceline.data.image.transforms import View
from paceline.data.loaders import pytorch
from paceline.data.order import StepGeometry
from paceline.host.world import World
from paceline.recipe.data import Augment

ENTRIES = 1_000_000
STEP_SECONDS = 0.015
AUGMENT = Augment(crop="random_resized", flip=0.5)


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Another value for a module's name, for a while."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def photographs(folder: Path, count: int) -> FileSource:
    """The photographs that scikit-learn brings, shifted to make more of them, as a source of ``count`` entries."""
    pictures = load_sample_images().images
    for number in range(8):
        picture = Image.fromarray(np.roll(pictures[number % len(pictures)], 37 * number, axis=1))
        picture.resize((500, 375)).save(folder / f"{number}.jpg", quality=90)
    return FileSource(folder, (b"%d.jpg" % (number % 8) for number in range(count)), np.zeros(count, np.int64), 3)


def first_batches(source: FileSource, batch: int, workers: int) -> tuple[float, float]:
    """Seconds to the first and to the tenth batch."""
    geometry = StepGeometry(seed=0, samples=len(source), global_batch_size=batch, logical_ranks=1)
    started = time.perf_counter()
    backend = pytorch.PytorchBackend(source, View(image_size=224, channels=3, augment=AUGMENT), workers=workers)
    try:
        batches = backend.batches(geometry.stream(0, 10, World()))
        next(batches)
        first = time.perf_counter() - started
        for _ in range(9):
            next(batches)
        return first, time.perf_counter() - started
    finally:
        backend.close()


def boundary(source: FileSource) -> tuple[float, float, float]:
    """Seconds of a median step and of the longest around an epoch's end, and processor seconds of the order there."""
    geometry = StepGeometry(seed=0, samples=len(source), global_batch_size=64, logical_ranks=1)
    last = geometry.epochs.phases[0].steps_per_epoch
    order.epoch_order.cache_clear()
    backend = pytorch.PytorchBackend(source, View(image_size=8, channels=3), workers=2)
    seconds, used = [], []
    try:
        batches = backend.batches(geometry.stream(last - 60, last + 40, World()))
        while True:
            started, cpu = time.perf_counter(), time.thread_time()
            if next(batches, None) is None:
                break
            used.append(time.thread_time() - cpu)
            time.sleep(STEP_SECONDS)
            seconds.append(time.perf_counter() - started)
    finally:
        backend.close()
    # Loader processes are ahead: the order is asked for some steps before the epoch ends.
    return statistics.median(seconds), max(seconds[45:65]), max(used[45:65])


def measure_first(rounds: int, workers: int, batch: int) -> dict[str, Any]:
    """Both ways in turns."""
    found: dict[str, list[tuple[float, float]]] = {"in parts": [], "whole": []}
    with tempfile.TemporaryDirectory() as folder:
        source = photographs(Path(folder), 20 * batch)
        for _ in range(rounds):
            found["in parts"].append(first_batches(source, batch, workers))
            with replaced(pytorch, "split_slice", lambda piece, parts: [piece]):
                found["whole"].append(first_batches(source, batch, workers))
    return {
        name: {"first_seconds": spread([a for a, _ in each]), "ten_seconds": spread([b for _, b in each])}
        for name, each in found.items()
    }


def measure_boundary(rounds: int) -> dict[str, Any]:
    """Both ways in turns."""
    found: dict[str, list[tuple[float, float, float]]] = {"sorted ahead": [], "sorted there": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(8):
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(Path(folder) / f"{number}.jpg")
        names = (b"%d.jpg" % (number % 8) for number in range(ENTRIES))
        source = FileSource(Path(folder), names, np.zeros(ENTRIES, np.int64), 3)
        for _ in range(rounds):
            found["sorted ahead"].append(boundary(source))
            with replaced(order, "_ORDERED_AHEAD", ENTRIES + 1):
                found["sorted there"].append(boundary(source))
    return {
        name: {
            "median_step_seconds": spread([a for a, _, _ in each]),
            "longest_step_seconds": spread([b for _, b, _ in each]),
            "thread_cpu_seconds": spread([c for _, _, c in each]),
        }
        for name, each in found.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    first = measure_first(options.rounds, options.workers, options.batch_size)
    epoch = measure_boundary(options.rounds)
    lines = [
        f"First batch of {options.batch_size} with {options.workers} loader processes, {name}: "
        f"{row['first_seconds']['median']:.2f} s, the tenth after {row['ten_seconds']['median']:.2f} s."
        for name, row in first.items()
    ]
    lines += [
        f"An epoch's order {name}: longest step around its end {1000 * row['longest_step_seconds']['median']:.0f} ms, "
        f"median step {1000 * row['median_step_seconds']['median']:.0f} ms; the training thread's processor time for a "
        f"batch there at most {1000 * row['thread_cpu_seconds']['median']:.1f} ms."
        for name, row in epoch.items()
    ]
    print("\n".join(lines))
    if not options.dry_run:
        print(write_result("loader-processes", {"first_batch": first, "epoch": epoch}, lines))


if __name__ == "__main__":
    main()
