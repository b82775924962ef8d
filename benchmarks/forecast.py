"""Compare the time and memory that a run expects with what it took, until its process ended.

Runs of different kinds follow one another, each in a separate process. Their images are generated JPEG files. The order
is that of the table, once for each of ``--rounds``; each round has its own seed.

    python benchmarks/forecast.py [--only NAME ...] [--rounds N] [--dry-run]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hardware import facts, write_result
from PIL import Image

PHOTOS = ["image_folder", "data.path={photos}", "train.precision=fp32"]
RUNS = {
    "digits": ["digits"],
    "digits, batch 8": ["digits", "batch.global_size=8", "train.duration=3 epochs"],
    "digits, two processes": ["digits", "--processes", "2"],
    "digits, adamw, no average": ["digits", "optimizer.name=adamw", "optimizer.lr=0.001", "train.ema=off"],
    "digits, exact": ["digits", "parallel.exact=true", "train.duration=4 epochs"],
    "digits, 10 steps": ["digits", "train.duration=10 steps"],
    "figures": ["figures", "train.duration=3 epochs"],
    "discs": ["discs", "train.duration=3 epochs"],
    "U-Net": ["shapes-segmentation", "train.duration=100 steps", "data.detection.generated.samples=400"],
    "topics, adapters": ["docs-topics", "model.adapters.rank=8", "optimizer.name=adamw", "train.duration=40 steps"],
    "a small GPT": ["gpt-small-docs", "train.duration=40 steps"],
    "a small BERT": ["bert-tiny-docs", "train.duration=60 steps"],
    "DLRM": ["dlrm-synthetic"],
    "Mask R-CNN": ["shapes-maskrcnn", "train.duration=60 steps"],
    "ResNet-18, 12 steps": [*PHOTOS, "model.name=resnet18", "data.image_size=96", "train.duration=12 steps"],
    "ResNet-18, 96 pixels": [*PHOTOS, "model.name=resnet18", "data.image_size=96", "train.duration=4 epochs"],
    "ResNet-18, 32 pixels": [*PHOTOS, "model.name=resnet18", "data.image_size=32", "train.duration=8 epochs"],
    "MobileNetV3, loader process": [
        *PHOTOS,
        "model.name=mobilenetv3_small_100",
        "data.image_size=128",
        "data.workers=1",
        "train.duration=4 epochs",
    ],
    "ResNet-50, 64 pixels": [*PHOTOS, "model.name=resnet50", "data.image_size=64", "train.duration=2 epochs"],
}
# What is worth a GPU, in place of those whose networks are too small for one.
ON_A_GPU = {
    "ResNet-50, 224 pixels, bf16": [
        *("image_folder", "data.path={photos}", "model.name=resnet50", "data.image_size=224", "train.precision=bf16"),
        *("batch.global_size=64", "data.workers=8", "train.duration=16 epochs"),
    ],
}


def write_photos(root: Path, images: int = 800) -> None:
    """Write JPEG files of smooth noise, 400 by 300 pixels, in two classes."""
    generator = np.random.default_rng(0)
    for number in range(images):
        small = generator.integers(0, 255, (15, 20, 3), dtype=np.uint8)
        folder = root / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(small).resize((400, 300), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=90)


def compare(arguments: Sequence[str], run_dir: Path) -> dict[str, Any]:
    """Train, and return seconds and bytes as expected and as measured, from the forecast to the process's end."""
    command = [sys.executable, "-P", "-m", "paceline", "train", *arguments, "--run-dir", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    ended = time.time()
    if done.returncode:
        raise SystemExit(done.stderr)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    expected = next(each for each in events if each.get("what") == "forecast")
    finish = next(each for each in events if each["event"] == "finish")
    summary = json.loads((run_dir / "summary.json").read_text())
    memory, seconds = expected["expected_memory_bytes"], ended - expected["time"]
    low, high = expected["expected_seconds_low"], expected["expected_seconds_high"]
    return {
        "expected_seconds": expected["expected_seconds"],
        "low": low,
        "high": high,
        "seconds": seconds,
        "time_ratio": seconds / expected["expected_seconds"],
        "is_inside": low <= seconds <= high,
        "closing_seconds": ended - finish["time"],
        "memory_ratio": None if memory is None else memory / summary["peak_memory_bytes"],
        "measuring_seconds": expected["seconds"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Train each, and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*RUNS, *ON_A_GPU], default=list(RUNS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    known, found = facts(), {}
    lines = [
        "| run | expected | measured | measured / expected | memory, expected / measured |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        photos = Path(scratch) / "photos"
        write_photos(photos)
        for number, (seed, name) in enumerate((seed, name) for seed in range(options.rounds) for name in options.only):
            words = [each.format(photos=photos) for each in (RUNS | ON_A_GPU)[name]]
            one = compare([*words, f"seed={seed}"], Path(scratch) / f"run-{number}")
            found[f"{name}, seed {seed}"] = one
            memory = "" if one["memory_ratio"] is None else f"{one['memory_ratio']:.2f}"
            lines.append(
                f"| {name} | {one['low']:.1f} to {one['high']:.1f} s | {one['seconds']:.1f} s | "
                f"{one['time_ratio']:.2f} | {memory} |"
            )
            print(lines[-1], flush=True)
    ratios = [each["time_ratio"] for each in found.values()]
    inside, longer = sum(each["is_inside"] for each in found.values()), sum(each > 1 for each in ratios)
    summary = (
        f"{inside} of {len(ratios)} runs within the expected range; median ratio {statistics.median(ratios):.2f}, "
        f"{min(ratios):.2f} to {max(ratios):.2f}; {longer} took longer than the middle of the range."
    )
    lines += ["", summary]
    print(lines[-1])
    if not options.dry_run:
        print(write_result("forecast", {"runs": found}, lines, known))


if __name__ == "__main__":
    main()
