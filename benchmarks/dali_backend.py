"""How much processor time does an image cost through `dali`, and through `pytorch`, and how far are pixels apart?

Both read the same JPEG files of 500 x 375 pixels, parts of scikit-learn's two photographs, and show the same random
parts at 224 pixels, flipped or not. They take turns (A B A B …) with one thread each, in this process, whose processor
time is what is measured: reading, decoding, resizing and making batches, all threads together.

    python benchmarks/dali_backend.py [--images 256] [--rounds 5] [--batch-size 64]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from hardware import spread, write_result
from PIL import Image

from paceline.data.batch import Backend
from paceline.data.image.source import FileSource
from paceline.data.image.transforms import View
from paceline.data.loaders.pytorch import PytorchBackend
from paceline.data.order import StepGeometry
from paceline.data.slices import SampleSlice
from paceline.host.world import World
from paceline.recipe.data import Augment
from paceline.records.environment import package_versions
from paceline_ops.dali.backend import DaliBackend

WIDTH, HEIGHT = 500, 375


def write_photographs(root: Path, count: int) -> FileSource:
    """Write parts of both photographs, turned and mirrored, as files of quality 90 and 4:2:0."""
    from sklearn.datasets import load_sample_images

    generator = np.random.default_rng(0)
    photos = load_sample_images().images
    names = []
    for number in range(count):
        photo = photos[number % 2][:: generator.choice([-1, 1]), :: generator.choice([-1, 1])]
        top = generator.integers(0, photo.shape[0] - HEIGHT + 1)
        left = generator.integers(0, photo.shape[1] - WIDTH + 1)
        part = np.ascontiguousarray(photo[top : top + HEIGHT, left : left + WIDTH])
        names.append(f"{number:05d}.jpg".encode())
        Image.fromarray(part).save(root / names[-1].decode(), quality=90)
    return FileSource(root, names, np.arange(count, dtype=np.int64) % 2, 3)


def cost(backend: Backend, geometry: StepGeometry, epoch: int) -> float:
    """Processor time of an epoch, in ms per image."""
    steps = geometry.epochs.phases[0].steps_per_epoch
    started = time.process_time()
    images = sum(
        len(each.ids) for each in backend.batches(geometry.stream(epoch * steps, (epoch + 1) * steps, World()))
    )
    return 1000 * (time.process_time() - started) / images


def differences(source: FileSource, view: View) -> dict[str, float]:
    """How far the pixels of both back-ends are apart, in grey levels, over all images shown once."""
    ids = np.arange(len(source))
    piece = SampleSlice(step=0, epoch=0, logical_rank=0, ids=ids, step_weight=len(ids))
    shown = []
    for backend in (DaliBackend(source, view, threads=1), PytorchBackend(source, view, workers=0)):
        shown += [batch.inputs.int() for batch in backend.batches([piece])]
        backend.close()
    levels = (shown[0] - shown[1]).abs()
    return {
        "largest": float(levels.max()),
        "mean": float(levels.float().mean()),
        "share_over_one": float((levels > 1).float().mean()),
    }


def measure(backends: dict[str, Backend], geometry: StepGeometry, rounds: int) -> dict[str, list[float]]:
    """Costs of each back-end in turn; the first epoch of each is not counted."""
    found: dict[str, list[float]] = {name: [] for name in backends}
    for epoch in range(rounds + 1):
        for name, backend in backends.items():
            value = cost(backend, geometry, epoch)
            if epoch:
                found[name].append(value)
    for backend in backends.values():
        backend.close()
    return found


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = Augment(crop="random_resized", flip=0.5)
    plain = View(image_size=224, channels=3, mean=(0.5,) * 3)
    views = {"random parts": replace(plain, augment=parts), "evaluation": plain}
    views |= {f"{name}, bicubic": replace(view, interpolation="bicubic") for name, view in views.items()}
    result = {}
    lines = [
        f"CPU-ms per image, medians of {options.rounds} rounds, of {WIDTH}x{HEIGHT} JPEG files at 224 pixels;",
        "and how far apart the two back-ends' pixels are, in grey levels.",
        "",
        "| view | pytorch | dali | pytorch/dali | largest | mean | over one level |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        source = write_photographs(Path(folder), options.images)
        geometry = StepGeometry(seed=0, samples=options.images, global_batch_size=options.batch_size, logical_ranks=1)
        for name, view in views.items():
            backends: dict[str, Backend] = {
                "pytorch": PytorchBackend(source, view, workers=0),
                "dali": DaliBackend(source, view, threads=1),
            }
            found = measure(backends, geometry, options.rounds)
            ratio = statistics.median(p / d for p, d in zip(found["pytorch"], found["dali"], strict=True))
            part_costs = differences(source, view)
            result[name] = {key: spread(values) for key, values in found.items()} | {
                "ratio": ratio,
                "levels": part_costs,
            }
            costs = (f"{statistics.median(found[key]):.2f}" for key in ("pytorch", "dali"))
            levels = (
                f"{part_costs['largest']:.0f}",
                f"{part_costs['mean']:.2f}",
                f"{100 * part_costs['share_over_one']:.3f} %",
            )
            lines.append(f"| {' | '.join((name, *costs, f'{ratio:.2f}', *levels))} |")
    print(*lines, sep="\n")
    print(write_result("dali-backend", {"results": result, "versions": package_versions()}, lines))


if __name__ == "__main__":
    main()
