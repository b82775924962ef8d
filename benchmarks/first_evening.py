"""What do a folder of photos and a few minutes on a CPU come to, with Paceline, fastai and Ultralytics?

Each contender is used as its first page says, on the same folder (PHOTOS/train/CLASS and PHOTOS/val/CLASS), by a
separate process; fastai's and Ultralytics' programs are peers/evening_NAME.py. A run of one epoch and a longer one
find out how many epochs the budget of seconds holds, imports and scoring included; each round has its seed. The
contenders that can take one start from the same local weights file, of timm's tf_efficientnet_lite0; nothing is
downloaded.

    python benchmarks/first_evening.py PHOTOS WEIGHTS.safetensors [--seconds 180] [--rounds 3] [--size 96] [--dry-run]

``--junk`` instead gives each the photos with a broken file, a film and an empty class folder, and says what happens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import environments
from hardware import facts, write_result

PEERS = Path(__file__).parent / "peers"

CONTENDERS = {
    "Paceline, from weights": ("paceline", True, ("data.sampling=uniform",)),
    "Paceline, from weights, classes drawn equally often": ("paceline", True, ("data.sampling=balanced",)),
    "Paceline, from scratch": ("paceline", False, ("data.sampling=uniform",)),
    "fastai, from weights": ("fastai", True, ()),
    "fastai, from scratch": ("fastai", False, ()),
    "Ultralytics, from scratch": ("ultralytics", False, ()),
}


def once(options: argparse.Namespace, name: str, epochs: int, seed: int = 0) -> tuple[float, float]:
    """Train and score; returns seconds of the whole process, and top-1 accuracy in %.

    Raises:
        subprocess.CalledProcessError: If it fails.
    """
    who, from_weights, more = CONTENDERS[name]
    photos, weights, size = options.photos, options.weights, options.size
    with tempfile.TemporaryDirectory(prefix="evening-") as folder:
        out = Path(folder) / "out.json"
        if who == "paceline":
            command_overrides = [f"train.duration={epochs} epochs", f"seed={seed}", *more]
            if from_weights:
                given = ["model.name=tf_efficientnet_lite0", f"model.initialize_from={weights}"]
                command_overrides += [*given, f"data.image_size={size}"]
            command = [
                sys.executable,
                "-m",
                "paceline",
                "train",
                str(photos),
                *command_overrides,
                "--run-dir",
                f"{folder}/run",
            ]
        else:
            given = [str(size), str(epochs), str(weights) if from_weights else "-", str(out), str(seed)]
            command = [
                str(environments.python_of("fastai-timm" if who == "fastai" else who)),
                str(PEERS / f"evening_{who}.py"),
                str(photos),
                *given,
            ]
        variables = os.environ | {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false", "HF_HUB_OFFLINE": "1"}
        started = time.perf_counter()
        subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=variables)
        seconds = time.perf_counter() - started
        if who == "paceline":
            summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
            return seconds, float(summary["metrics"]["top1_accuracy"])
        return seconds, float(json.loads(out.read_text())["top1_accuracy"])


def epochs_in(options: argparse.Namespace, name: str) -> int:
    """How many epochs the budget holds."""
    one = once(options, name, 1)[0]
    for epochs in (3, 13, 43):  # until their time stands out from that of imports
        more = once(options, name, epochs)[0] - one
        if more > 10:
            break
    return max(1, int((options.seconds - one) / (more / (epochs - 1))) + 1)


def with_junk(photos: Path, into: Path) -> Path:
    """A copy of the photos, with what people's folders hold besides."""
    shutil.copytree(photos, into)
    first = min((into / "train").iterdir())
    whole = min(first.iterdir()).read_bytes()
    (first / "half.jpg").write_bytes(whole[: len(whole) // 2])
    (first / "nothing.jpg").touch()
    (first / "film.mp4").write_bytes(bytes(5000))
    (first / "Thumbs.db").write_bytes(bytes(500))
    (into / "train" / "empty").mkdir()
    return into


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, default=96, help="pixels, for networks from weights and for the peers")
    parser.add_argument("--junk", action="store_true")
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    known = facts()
    options.photos, options.weights = options.photos.absolute(), options.weights.absolute()
    if options.junk:
        with tempfile.TemporaryDirectory() as scratch:
            options.photos, options.size = with_junk(options.photos, Path(scratch) / "photos"), 32
            for name in ("Paceline, from scratch", "fastai, from scratch", "Ultralytics, from scratch"):
                try:
                    print(f"{name}: trained, {once(options, name, 1)}")
                except subprocess.CalledProcessError as error:
                    last = "\n".join((error.stdout + error.stderr).strip().splitlines()[-12:])
                    print(f"{name}: exit {error.returncode}\n{last}")
        return
    found: dict[str, Any] = {}
    for name in CONTENDERS:
        found[name] = {"epochs": epochs_in(options, name), "seconds": [], "top1_accuracy": []}
        print(f"{name}: {found[name]['epochs']} epochs", flush=True)
    for seed in range(options.rounds):
        for name, seen in found.items():
            seconds, accuracy = once(options, name, seen["epochs"], seed)
            seen["seconds"].append(seconds)
            seen["top1_accuracy"].append(accuracy)
            print(f"{name}: {accuracy:.1f} % in {seconds:.0f} s", flush=True)
    lines = [f"{options.seconds:.0f} seconds for each; photos at {options.size} pixels.", ""]
    lines += [
        f"| contender | epochs | seconds, median | top-1, median of {options.rounds} seeds | lowest | highest |",
        "|---|---|---|---|---|---|",
    ]
    for name, seen in found.items():
        scores, seconds = seen["top1_accuracy"], statistics.median(seen["seconds"])
        middle = f"{statistics.median(scores):.1f} % | {min(scores):.1f} | {max(scores):.1f}"
        lines.append(f"| {name} | {seen['epochs']} | {seconds:.0f} | {middle} |")
    print("\n".join(lines))
    if not options.dry_run:
        print(write_result("first-evening", {"contenders": found}, lines, known))


if __name__ == "__main__":
    main()
