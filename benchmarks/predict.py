"""How many images a second does `paceline predict` label, reading ahead of the network, or one step after the other?

JPEG files, the answers of both ways compared to the bit, turns taken: A B A B. The old way decodes a batch of 64 and
then asks the network; the new way decodes in threads while the network answers. What is timed is everything from the
paths to the answers; files are in the page cache. Weights are those of two steps of training: what they say is of no
interest here.

    python benchmarks/predict.py --images FOLDER-OR-TAR [--count 2000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from hardware import spread, write_result

import paceline
from paceline.inference.predict import load_predictor
from paceline.parsing.files import SkippedItems
from paceline.prediction.predictor import Answer
from paceline.prediction.sources import pictures_of
from paceline.tasks.labelling import TrainedLabeller

BATCH = 64
TOP_K = 5
NETWORKS = {
    "small_resnet, 32 pixels": ("small_resnet", 32),
    "resnet18, 128 pixels": ("resnet18", 128),
}


def unpacked(source: Path, count: int, scratch: Path) -> Path:
    """A folder of so many of the JPEG files."""
    if source.is_dir():
        return source
    folder = scratch / "images"
    folder.mkdir()
    with tarfile.open(source) as archive:
        pictures = (each for each in archive if each.isfile() and each.name.endswith((".jpg", ".jpeg")))
        for number, member in enumerate(islice(pictures, count)):
            content = archive.extractfile(member)
            assert content is not None
            (folder / f"{number:06}.jpg").write_bytes(content.read())
    return folder


def sequential(predictor: TrainedLabeller, paths: list[Path]) -> Iterator[Answer]:
    """The way before: decode a batch, ask, decode the next."""
    for start in range(0, len(paths), BATCH):
        part = paths[start : start + BATCH]
        images = [predictor.prepare(path.read_bytes()) for path in part]
        for path, answer in zip(part, predictor.answer(images, TOP_K), strict=True):
            yield replace(answer, path=path)


def ahead(predictor: TrainedLabeller, paths: list[Path]) -> Iterator[Answer]:
    """The way now."""
    return predictor.predict(paths, top_k=TOP_K, batch_size=BATCH)


def timed(
    variant: Callable[[TrainedLabeller, list[Path]], Iterator[Answer]], predictor: TrainedLabeller, paths: list[Path]
) -> Any:
    """Images a second, and the answers."""
    begin = time.perf_counter()
    answers = list(variant(predictor, paths))
    return len(paths) / (time.perf_counter() - begin), answers


def trained(scratch: Path, name: str, size: int) -> TrainedLabeller:
    """A network of that name after two steps."""
    data = {"dataset": "synthetic", "image_size": size, "channels": 3, "augment": None}
    run = paceline.train(
        "digits",
        overrides={
            "model": {"name": name},
            "data": data,
            "batch.global_size": 8,
            "train.duration": "2 steps",
            "evaluate.every": "off",
            "telemetry.report": False,
        },
        run_dir=scratch / name,
        quiet=True,
    )
    return load_predictor(run.run_dir, device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def measure(predictor: TrainedLabeller, paths: list[Path], rounds: int) -> dict[str, Any]:
    """Both ways in turn."""
    found: dict[str, list[float]] = {"one after the other": [], "ahead": []}
    timed(ahead, predictor, paths[: 2 * BATCH])
    resident = []
    for _ in range(rounds):
        before, old = timed(sequential, predictor, paths)
        now, new = timed(ahead, predictor, paths)
        if old != new:
            raise SystemExit("the two ways differ")
        found["one after the other"].append(before)
        found["ahead"].append(now)
        resident.append(resident_mebibytes())
    return {**{variant: spread(values) for variant, values in found.items()}, "resident_mebibytes": resident}


def resident_mebibytes() -> float:
    """Main memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="JPEG files: a folder, or a tar of them")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"batch": BATCH}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        images = unpacked(arguments.images, arguments.count, scratch)
        paths = [each.path for each in islice(pictures_of([images], SkippedItems()), arguments.count)]
        result["images"] = len(paths)
        for name, (network, size) in NETWORKS.items():
            result[name] = measure(trained(scratch, network, size), paths, arguments.rounds)
    summary = (
        f"{len(paths):,} JPEG files, batches of {BATCH}; images a second, median (lowest to highest) of "
        f"{arguments.rounds} rounds, the two ways in turn. The answers were compared: equal to the bit."
    )
    lines = [
        summary,
        "",
        "| network | one after the other | reading ahead |",
        "|---|---|---|",
    ]
    for name in NETWORKS:
        cells = (result[name][variant] for variant in ("one after the other", "ahead"))
        shown = (f"{each['median']:.0f} ({each['minimum']:.0f} to {each['maximum']:.0f})" for each in cells)
        lines.append(f"| {name} | {' | '.join(shown)} |")
    print("\n".join(lines))
    print(write_result("predict", result, lines))


if __name__ == "__main__":
    main()
