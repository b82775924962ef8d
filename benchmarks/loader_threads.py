"""Do threads read images faster than loader processes?

The photographs of ``loader_processes.py``, random resized crops, two readers. Both kinds take turns (A B A B …), each
measured with a main thread that only takes batches, and with one that works in the interpreter for 10 ms a batch, as a
training loop of a small network does: threads wait for the interpreter's lock meanwhile. A free-threaded Python
(PEP 703) has no such lock; its result files have another name.

    python benchmarks/loader_threads.py [--rounds 5] [--images 2000] [--dry-run]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hardware import spread, write_result
from loader_processes import AUGMENT, photographs

from paceline.data.image.source import FileSource
from paceline.data.image.transforms import View
from paceline.data.loaders.pytorch import PytorchBackend, SliceReader
from paceline.data.order import StepGeometry
from paceline.data.pipeline import prefetch_map
from paceline.host.world import World

READERS, BATCH = 2, 64


def images_per_second(kind: str, source: FileSource, size: int, working_seconds: float, images: int) -> float:
    """Rate at which the main thread gets batches."""
    view = View(image_size=size, channels=3, augment=AUGMENT)
    slices = StepGeometry(seed=0, samples=len(source), global_batch_size=BATCH, logical_ranks=1).stream(
        0, 10**6, World()
    )
    backend = PytorchBackend(source, view, workers=READERS if kind == "processes" else 0)
    reader = SliceReader(source, view)
    try:
        threaded = prefetch_map(reader.__getitem__, slices, threads=READERS, prefetch=2)
        batches: Any = backend.batches(slices) if kind == "processes" else threaded
        for _ in range(6):
            next(batches)
        began, done = time.perf_counter(), 0
        while done < images:
            done += len(next(batches).ids)
            until = time.perf_counter() + working_seconds
            while time.perf_counter() < until:
                pass
        return done / (time.perf_counter() - began)
    finally:
        batches.close()
        backend.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows, lines = [], []
    with tempfile.TemporaryDirectory() as folder:
        source = photographs(Path(folder), 20 * BATCH)
        for size in (224, 64):
            for milliseconds in (0, 10):
                found: dict[str, list[float]] = {"processes": [], "threads": []}
                for _ in range(options.rounds):
                    for kind, rates in found.items():
                        rates.append(images_per_second(kind, source, size, milliseconds / 1000, options.images))
                ratio = spread([a / b for a, b in zip(found["threads"], found["processes"], strict=True)])
                rates_found = {kind: spread(rates) for kind, rates in found.items()}
                rows.append({"size": size, "working_milliseconds": milliseconds, **rates_found, "ratio": ratio})
                lines.append(
                    f"- {size} pixels, main thread working {milliseconds} ms a batch: threads "
                    f"{rates_found['threads']['median']:,.0f} images/s, processes "
                    f"{rates_found['processes']['median']:,.0f}; {ratio['median']:.2f} times as many "
                    f"({ratio['minimum']:.2f} to {ratio['maximum']:.2f})"
                )
                print(lines[-1], flush=True)
    if not options.dry_run:
        has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()  # after the imports, which may switch it on
        claim = "loader-threads" if has_lock else "loader-threads-free-threaded"
        print(write_result(claim, {"measurements": rows}, lines))


if __name__ == "__main__":
    main()
