"""Measure what a review of wrong labels adds to the network of ``examples/second_evening.sh``, and compare fastai.

For each seed, the example draws photos (5 % of the labels are wrong, one class is rare, some files are junk), trains,
takes every suggestion of ``check-data --folds 3`` and trains again. fastai then gets the photos as they were, without
the files that its ``verify_images`` rejects, the same weights (timm's tf_efficientnet_lite0) and image size, and at
least the processor seconds that the example used for everything: the machine may be shared, so seconds of the whole
process tree count, not those of a clock. Scores are means of the recalls of all classes on the held-out photos, whose
labels are right. The example was written with seed 0, which is not measured.

    python benchmarks/second_evening.py [--images 80] [--seeds 3] [--dry-run]
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import environments
from hardware import facts, write_result

ROOT = Path(__file__).parents[1]
SIZE = 64
TIMED = re.compile(r"^\(([\d.]+) \+ ([\d.]+) seconds of processor time\)$", re.MULTILINE)
CONTENDERS = ("Paceline, without review", "Paceline, with review", "fastai")


def processor_seconds(command: Sequence[str | Path], folder: Path) -> float:
    """Run a command, and return the processor seconds of it and its children."""
    variables = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (folder / "log.txt").open("a") as log:
        subprocess.run(command, check=True, cwd=folder, env=variables, stdout=log, stderr=subprocess.STDOUT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def recalls(predictions: Path) -> dict[str, float]:
    """Return the recall of each class, in %."""
    right = defaultdict(list)
    with predictions.open() as file:
        for row in csv.DictReader(file):
            right[row["target_class"]].append(row["prediction"] == row["target"])
    return {name: 100 * statistics.mean(each) for name, each in right.items()}


def moved_labels(folder: Path) -> dict[str, int]:
    """Count wrong labels, labels that the review changed, and wrong ones among these."""
    lines = (folder / "photos-review/plan.jsonl.applied").read_text().splitlines()[1:]
    names = [Path(json.loads(line)["file"]) for line in lines]
    changed = [each.parent.name != each.name.partition("-")[0] for each in names]
    subprocess.run(["sh", folder / "photos-review/undo.sh"], check=True, capture_output=True)
    subprocess.run(["sh", folder / "aside/undo.sh"], check=True, capture_output=True)
    wrong = [each for each in folder.glob("photos/train/*/*.png") if each.parent.name != each.name.partition("-")[0]]
    return {"wrong": len(wrong), "named": len(changed), "found": sum(changed)}


def fastai(folder: Path, epochs: int, seed: int) -> tuple[float, dict[str, float]]:
    """Train fastai on the photos; return processor seconds and recalls."""
    out = folder / "fastai.json"
    python = environments.python_of("fastai-timm")
    words = [str(SIZE), str(epochs), folder / "imagenet.safetensors", out, str(seed), "verify"]
    seconds = processor_seconds(
        [python, ROOT / "benchmarks/peers/evening_fastai.py", folder / "photos", *words], folder
    )
    return seconds, json.loads(out.read_text())["recalls"]


def fastai_in(folder: Path, seconds: float, rates: list[float]) -> int:
    """Return the fewest epochs that take the seconds; times of 1 and 4 epochs are measured once."""
    if not rates:
        one, four = (fastai(folder, epochs, 0)[0] for epochs in (1, 4))
        rates += one, (four - one) / 3
    return 1 + max(0, -int(-(seconds - rates[0]) // rates[1]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=80, help="of a large class")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    known = facts()
    rates = list[float]()
    found: dict[str, Any] = {
        name: {"seconds": [], "recalls": [], "balanced_recall": [], "star_recall": []} for name in CONTENDERS
    }
    labels: dict[str, Any] = {"wrong": 0, "named": 0, "found": 0}
    epochs = list[int]()
    for seed in range(1, 1 + options.seeds):
        with tempfile.TemporaryDirectory(prefix="evening-") as scratch:
            folder = Path(scratch)
            script = ["bash", ROOT / "examples/second_evening.sh", str(options.images), str(seed), folder]
            seconds = [0.0, processor_seconds(script, folder)]
            seconds[0] = sum(map(float, TIMED.findall((folder / "log.txt").read_text())[1]))  # after check-data
            scores = [recalls(folder / f"{name}.csv") for name in ("first", "second")]
            for key, count in moved_labels(folder).items():
                labels[key] += count
            epochs.append(fastai_in(folder, seconds[1], rates))
            used, of_fastai = fastai(folder, epochs[-1], seed)
        for (name, seen), each, spent in zip(found.items(), [*scores, of_fastai], [*seconds, used], strict=True):
            seen["seconds"].append(spent)
            seen["recalls"].append(each)
            seen["balanced_recall"].append(statistics.mean(each.values()))
            seen["star_recall"].append(each["star"])
            print(f"seed {seed}, {name}: {seen['balanced_recall'][-1]:.1f} %, stars {each['star']:.1f} %", flush=True)
        right = labels["named"] - labels["found"]
        lines = [
            f"{options.images} training photos of each of four classes, and {options.images // 10} stars.",
            f"{labels['wrong']} labels are wrong; the review moved {labels['found']} of them, and {right} right ones.",
            "",
            f"| contender | processor seconds | mean recall, median of {len(epochs)} | lowest | highest | stars |",
            "|---|---|---|---|---|---|",
        ]
        for name, seen in found.items():
            each, stars = seen["balanced_recall"], statistics.median(seen["star_recall"])
            middle = f"{statistics.median(each):.1f} % | {min(each):.1f} | {max(each):.1f}"
            lines.append(f"| {name} | {statistics.median(seen['seconds']):.0f} | {middle} | {stars:.1f} % |")
        print("\n".join(lines), flush=True)
        if not options.dry_run:
            result = {"contenders": found, "labels": labels, "fastai_epochs": epochs, "images": options.images}
            print(write_result("second-evening", result, lines, known), flush=True)


if __name__ == "__main__":
    main()
