"""Is the number of loader processes that `data.workers=auto` measures as good as the best of all combinations?

Trains for some steps with every number of loader processes and batches ready, in turn, round by round, and holds the
measured choice against the best of them.
    python benchmarks/loader_choice.py --images DIR [--model small_resnet] [--size 128] [--rounds 3] [--seconds 4]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hardware import write_result

PREFETCH = (1, 2, 4)


def recipe(arguments: argparse.Namespace, images: Path, **data: object) -> dict[str, object]:
    """A classifier of photographs, cropped at random."""
    return {
        "base": "image_folder",
        "model": {"name": arguments.model, "options": None},
        "data": {
            "path": str(images),
            "backend": "pytorch",
            "image_size": arguments.size,
            "augment": {"crop": "random_resized", "flip": 0.5},
            **data,
        },
        "batch": {"global_size": 32},
        "train": {"duration": "100000 steps"},
        "parallel": {"device": "cpu", "threads": arguments.threads},
        "evaluate": {"every": "off"},
        "checkpoint": {"every": "off"},
        "telemetry": {"trackers": [], "log_every": "5 steps"},
    }


def rate(document: dict[str, object], seconds: float) -> float:
    """Images per second of a real run, from its records after the first two."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.json"
        path.write_text(json.dumps(document))
        command = [sys.executable, "-m", "paceline", "train", str(path), "--run-dir", f"{folder}/run"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            events = Path(folder) / "run" / "events.jsonl"
            times: list[tuple[float, int]] = []
            while process.poll() is None:
                time.sleep(0.05)
                with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
                    found = [json.loads(line) for line in events.read_text().splitlines()]
                    times = [(each["time"], each["samples"]) for each in found if each["event"] == "step"]
                if len(times) > 3 and times[-1][0] - times[1][0] > seconds:
                    process.kill()
    (started, first), (ended, last) = times[1], times[-1]
    return (last - first) / (ended - started)


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="an image folder")
    parser.add_argument("--model", default="small_resnet")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.json"
        path.write_text(json.dumps(recipe(arguments, arguments.images)))
        done = subprocess.run(
            [sys.executable, "-m", "paceline.trainer.feeding", str(path), str(cores), str(os.getpid())],
            check=True,
            capture_output=True,
            text=True,
        )
    table = {int(count): value for count, value in json.loads(done.stdout.splitlines()[-1])["rates"].items()}
    from paceline.data.image.feed_rates import FeedRates

    chosen = FeedRates(table, 0.0).best
    found: dict[tuple[int, int], list[float]] = {}
    for _ in range(arguments.rounds):
        for workers, ready in itertools.product(range(cores + 1), PREFETCH):
            document = recipe(arguments, arguments.images, workers=workers, prefetch=ready)
            found.setdefault((workers, ready), []).append(rate(document, arguments.seconds))
            print(workers, ready, f"{found[workers, ready][-1]:.0f}", flush=True)
    medians = {key: statistics.median(values) for key, values in found.items()}
    best = max(medians, key=lambda key: medians[key])
    share = medians[chosen, 2] / medians[best]
    measured = ", ".join(f"{workers}: {value:.0f}" for workers, value in table.items())
    lines = [
        f"Measured beforehand, images per second by loader processes: {measured}.",
        f"Chosen: {chosen}, which train {medians[chosen, 2]:.0f} images/s (median of {arguments.rounds} runs).",
        f"Best of {len(medians)} combinations: {best[0]} processes, {best[1]} batches ready each, {medians[best]:.0f}.",
        f"The choice comes to {100 * share:.1f} % of the best.",
    ]
    print("\n".join(lines))
    if not arguments.dry_run:
        runs = [
            {"workers": w, "prefetch": p, "images_per_second": [round(v, 1) for v in values]}
            for (w, p), values in found.items()
        ]
        result = {"measured": table, "chosen": chosen, "share_of_best": share, "combinations": runs}
        print(write_result("loader-choice", result, lines))


if __name__ == "__main__":
    main()
