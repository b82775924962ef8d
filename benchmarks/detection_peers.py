"""Compare detectors from Paceline and Ultralytics, after a few processor minutes on a hundred pictures.

Two generated sets in COCO's layout: `shapes`, four classes of filled shapes on noise, and `letters`, six letters on
stripes. Each contender trains from scratch, on one thread, in a separate process: Paceline by `paceline train FOLDER`,
Ultralytics by peers/detection_ultralytics.py. Two short runs measure how many epochs fit the budget of processor
seconds, imports included; each round has its seed. pycocotools scores the predictions of both on the same held-out
pictures.

    python benchmarks/detection_peers.py [--seconds 100] [--rounds 2] [--sets shapes,letters] [--python PYTHON]

``--python`` is an interpreter with Ultralytics, instead of the one that peers/environments.py makes. ``--paceline``
adds overrides to Paceline's command and ``--ultralytics`` replaces settings, to compare choices.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import environments
import numpy as np
from hardware import facts, write_result
from PIL import Image, ImageDraw, ImageFont
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from wrong_labels import SHAPES, draw_shape

PEERS = Path(__file__).parent / "peers"
SIDE = 160
COUNTS = {"train": 100, "val": 100}
CLASSES = {"shapes": SHAPES[:4], "letters": tuple("AEKRSX")}
FIGURES = ("map50", "map")


def stamp(kind: str, name: str, side: int, draws: np.random.Generator) -> tuple[Image.Image, Image.Image]:
    """Draw an object of about this side in a random colour; returns it and its mask, cut to what is seen."""
    if kind == "letters":
        mask = Image.new("L", (2 * side, 2 * side))
        font = ImageFont.load_default(size=side)
        ImageDraw.Draw(mask).text((side, side), name, fill=255, font=font, anchor="mm")
        mask = mask.rotate(float(draws.uniform(-15, 15)))
    else:
        drawn = draw_shape(name, draws).resize((2 * side, 2 * side), Image.Resampling.NEAREST)
        mask = drawn.point(lambda grey: 255 * (grey > 100))
    mask = mask.crop(mask.getbbox())
    colour = tuple(int(each) for each in draws.integers(120, 256, 3))
    return Image.new("RGB", mask.size, colour), mask


def background(kind: str, draws: np.random.Generator) -> Image.Image:
    """Draw soft noise, or stripes for letters."""
    if kind == "letters":
        stripes = 50 + 40 * np.sin(np.arange(SIDE) / draws.uniform(2, 9))[:, None, None]
        return Image.fromarray((stripes + draws.integers(0, 30, (SIDE, SIDE, 3))).astype(np.uint8))
    return Image.fromarray(draws.integers(0, 110, (20, 20, 3), dtype=np.uint8)).resize((SIDE, SIDE))


def make_set(kind: str, root: Path) -> None:
    """Write the pictures in COCO's layout."""
    draws = np.random.default_rng(0)
    categories = [{"id": number, "name": name} for number, name in enumerate(CLASSES[kind], 1)]
    (root / "annotations").mkdir(parents=True)
    for split, count in COUNTS.items():
        images, objects = list[dict[str, Any]](), list[dict[str, Any]]()
        (root / f"{split}2017").mkdir()
        for number in range(count):
            picture, taken = background(kind, draws), np.zeros((SIDE, SIDE), dtype=bool)
            for _ in range(int(draws.integers(1, 7))):
                label, side = int(draws.integers(len(CLASSES[kind]))), int(draws.integers(16, 56))
                object_, mask = stamp(kind, CLASSES[kind][label], side, draws)
                width, height = mask.size
                left, top = (int(draws.integers(0, SIDE - each)) for each in (width, height))
                if taken[top : top + height, left : left + width].any():
                    continue
                taken[top : top + height, left : left + width] = True
                picture.paste(object_, (left, top), mask)
                box = {"bbox": [left, top, width, height], "area": width * height, "iscrowd": 0}
                objects.append({"id": len(objects) + 1, "image_id": number, "category_id": label + 1, **box})
            images.append({"id": number, "file_name": f"{number:03}.png", "width": SIDE, "height": SIDE})
            picture.save(root / f"{split}2017" / f"{number:03}.png")
        annotations = {"images": images, "annotations": objects, "categories": categories}
        (root / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(annotations))


def score(root: Path, found: list[dict[str, Any]]) -> dict[str, float]:
    """Score boxes as COCO does, in %."""
    if not found:
        return dict.fromkeys(FIGURES, 0.0)
    with contextlib.redirect_stdout(None):
        truth = COCO(str(root / "annotations" / "instances_val2017.json"))
        judged = COCOeval(truth, truth.loadRes(found), "bbox")
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
    return {"map50": 100 * float(judged.stats[1]), "map": 100 * float(judged.stats[0])}


def run(command: Sequence[str], folder: str) -> float:
    """Run a command; returns the seconds of the processor that it took.

    Raises:
        subprocess.CalledProcessError: If it fails.
    """
    offline = {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false", "YOLO_CONFIG_DIR": folder, "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=os.environ | offline)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def once(options: argparse.Namespace, who: str, root: Path, epochs: int, seed: int) -> tuple[float, list[Any]]:
    """Train; returns the processor's seconds, and the boxes on held-out pictures as COCO's results."""
    with tempfile.TemporaryDirectory(prefix="detection-") as folder:
        out = Path(folder) / "out.json"
        if who == "Ultralytics":
            python = options.python or environments.python_of("ultralytics")
            program = str(PEERS / "detection_ultralytics.py")
            what = [str(each) for each in (root, SIDE, epochs, out, seed, options.ultralytics)]
            seconds = run([str(python), program, *what], folder)
            return seconds, json.loads(out.read_text())
        paceline = [sys.executable, "-m", "paceline"]
        chosen = [f"train.duration={epochs} epochs", f"seed={seed}", "evaluate.every=off", "parallel.threads=1"]
        seconds = run([*paceline, "train", str(root), *chosen, *options.paceline, "--run-dir", "run"], folder)
        run([*paceline, "evaluate", "run", "--predictions", "found.jsonl"], folder)
        lines = (Path(folder) / "found.jsonl").read_text().splitlines()
        return seconds, [box for line in lines for box in boxes_of(json.loads(line))]


def boxes_of(line: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the boxes of a line of `paceline evaluate --predictions` as COCO's results."""
    image = int(Path(line["sample"]).stem)
    return [
        {
            "image_id": image,
            "category_id": label + 1,
            "score": sure,
            "bbox": [left, top, right - left, bottom - top],
        }
        for (left, top, right, bottom), label, sure in zip(line["boxes"], line["labels"], line["scores"], strict=True)
    ]


def epochs_in(options: argparse.Namespace, who: str, root: Path) -> int:
    """How many epochs the budget holds, by two short runs."""
    few, many = (once(options, who, root, epochs, 0)[0] for epochs in (1, 4))
    return max(1, round((options.seconds - few) / max((many - few) / 3, 0.01)) + 1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sets", default=",".join(CLASSES))
    parser.add_argument("--python", type=Path)
    parser.add_argument("--paceline", type=shlex.split, default=[])
    parser.add_argument("--ultralytics", default="{}", help="settings of its training, as JSON")
    parser.add_argument("--contenders", default="Paceline,Ultralytics")
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    known, found = facts(), dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="detection-") as scratch:
        for kind in options.sets.split(","):
            root = Path(scratch) / kind
            make_set(kind, root)
            of_set = dict[str, Any]()
            for who in options.contenders.split(","):
                of_set[who] = {"epochs": epochs_in(options, who, root), "seconds": [], **{each: [] for each in FIGURES}}
                print(f"{kind}, {who}: {of_set[who]['epochs']} epochs", flush=True)
            for seed in range(options.rounds):
                for who, seen in of_set.items():
                    seconds, boxes = once(options, who, root, seen["epochs"], seed)
                    for name, value in {"seconds": seconds, **score(root, boxes)}.items():
                        seen[name].append(value)
                    print(f"{kind}, {who}: mAP {seen['map'][-1]:.1f} in {seconds:.0f} s", flush=True)
            found[kind] = of_set
    setting = (
        f"{options.seconds:.0f} seconds of the processor for each, from scratch, on one thread; {COUNTS['train']} "
        f"pictures of {SIDE} pixels, scored on {COUNTS['val']} others; medians of {options.rounds} seeds."
    )
    lines = [
        setting,
        "",
        "| set | contender | epochs | processor seconds | mAP at 0.5 | mAP at 0.5 to 0.95 | lowest, highest |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, of_set in found.items():
        for who, seen in of_set.items():
            seconds, at_half, over_all = (statistics.median(seen[name]) for name in ("seconds", *FIGURES))
            ends = f"{min(seen['map']):.1f}, {max(seen['map']):.1f}"
            lines.append(
                f"| {kind} | {who} | {seen['epochs']} | {seconds:.0f} | {at_half:.1f} | {over_all:.1f} | {ends} |"
            )
    print("\n".join(lines))
    if not options.dry_run:
        print(write_result("detection-peers", {"sets": found}, lines, known))


if __name__ == "__main__":
    main()
