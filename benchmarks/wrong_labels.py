"""How many of the labels that were moved at random does `paceline check-data RUN --folds 5` find?

5 % of the labels of each set are moved to another class: digits, drawn shapes, paragraphs of Python's documentation,
and, where their archive is given, photos (CIFAR-10). A run is trained on them, and its samples are checked in five
folds, as the command does. Counted are moved labels that are named, and named ones that were not moved.

    python benchmarks/wrong_labels.py [--sets digits,topics,shapes,photos] [--seeds 3] [--photos cifar10-jpeg.tar.gz]
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hardware import write_result
from PIL import Image, ImageDraw

import paceline
from paceline.data.image.sets.digits import read_digits
from paceline.parsing.units import counted
from paceline.recipe.load import load_recipe
from paceline.tasks.task import build_task

MOVED = 0.05
FOLDS = 5
SHAPES = ("circle", "cross", "square", "star", "triangle")
DIGITS = ("data.image_size=8", "data.workers=0", "train.duration=8 epochs", "parallel.threads=1")
SMALL = (
    *("model.name=small_resnet", "model.options={width: 8, stages: 3}", "data.image_size=32", "batch.global_size=64"),
    *("optimizer.lr=0.2", "train.precision=fp32", "train.label_smoothing=0.1", "data.workers=0", "parallel.threads=1"),
)


def draw_shape(name: str, draws: np.random.Generator) -> Image.Image:
    """Draw a shape of any size, angle and grey on a noisy background."""
    image = Image.fromarray(draws.integers(0, 90, (32, 32), dtype=np.uint8))
    x, y, radius = draws.uniform(11, 21), draws.uniform(11, 21), draws.uniform(5, 10)
    turn, fill = draws.uniform(0, 2 * np.pi), int(draws.integers(120, 256))
    draw = ImageDraw.Draw(image)
    if name == "circle":
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
        return image
    if name == "cross":
        for angle in (turn, turn + np.pi / 2):
            across, along = radius * np.cos(angle), radius * np.sin(angle)
            draw.line((x - across, y - along, x + across, y + along), fill=fill, width=3)
        return image
    count, inner = {"square": (4, 1.0), "triangle": (3, 1.0), "star": (10, 0.45)}[name]
    angles = turn + 2 * np.pi * np.arange(count) / count
    radii = radius * np.where(np.arange(count) % 2, inner, 1.0)
    corners = zip(x + radii * np.cos(angles), y + radii * np.sin(angles), strict=True)
    draw.polygon([(float(a), float(b)) for a, b in corners], fill=fill)
    return image


def moved_labels(labels: Sequence[str], draws: np.random.Generator) -> list[str]:
    """Return the labels, of which 5 % are moved to another class."""
    classes, found = sorted(set(labels)), list(labels)
    for at in draws.choice(len(labels), round(MOVED * len(labels)), replace=False).tolist():
        found[at] = str(draws.choice([each for each in classes if each != labels[at]]))
    return found


def as_folder(root: Path, images: Sequence[Image.Image], labels: Sequence[str], given: Sequence[str]) -> set[str]:
    """Write class folders; return the paths of the moved images."""
    moved = set()
    for number, (image, label, folder) in enumerate(zip(images, labels, given, strict=True)):
        path = root / folder / f"{number:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
        if label != folder:
            moved.add(str(path))
    return moved


def digits(root: Path, draws: np.random.Generator, _: argparse.Namespace) -> tuple[set[str], list[str]]:
    """Return the moved ones of scikit-learn's digits, and what to train."""
    source = read_digits()
    images = [Image.fromarray(source.read(at)[:, :, 0]) for at in range(len(source))]
    labels = [str(label) for label in source.labels]
    moved = as_folder(root, images, labels, moved_labels(labels, draws))
    return moved, ["digits", "data.dataset=image_folder", f"data.path={root}", *DIGITS]


def shapes(root: Path, draws: np.random.Generator, _: argparse.Namespace) -> tuple[set[str], list[str]]:
    """Return the moved ones of 1,000 drawn shapes, and what to train."""
    labels = [SHAPES[number % len(SHAPES)] for number in range(1000)]
    moved = as_folder(root, [draw_shape(each, draws) for each in labels], labels, moved_labels(labels, draws))
    return moved, ["image_folder", f"data.path={root}", *SMALL, "train.duration=24 epochs"]


def topics(root: Path, draws: np.random.Generator, _: argparse.Namespace) -> tuple[set[str], list[str]]:
    """Return the moved ones of the paragraphs of Python's documentation, and what to train."""
    task: Any = build_task(load_recipe("docs-topics").recipe)
    data = task.dataset
    rows = [
        (data.tokenizer.decode(corpus.read(at, 0, int(corpus.lengths[at]))), data.classes[labels[at]])
        for corpus, labels in zip((data.train, data.validation), data.labels, strict=True)
        for at in range(len(labels))
    ]
    given = moved_labels([label for _, label in rows], draws)
    root.mkdir(exist_ok=True)
    path = root / "topics.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows((text, label) for (text, _), label in zip(rows, given, strict=True))
    moved = {f"row {number}" for number, ((_, old), new) in enumerate(zip(rows, given, strict=True), 1) if old != new}
    # Smaller than the recipe's network, for time.
    small = "model.options={depth: 1, width: 64, heads: 4}", "data.text.context=64", "parallel.threads=1"
    small = *small, "train.duration=6 epochs", "optimizer={name: adamw, lr: 0.003, weight_decay: 0.1}"
    return moved, ["docs-topics", "data.dataset=text_table", f"data.path={path}", *small]


def photos(root: Path, draws: np.random.Generator, options: argparse.Namespace) -> tuple[set[str], list[str]]:
    """Return the moved ones of CIFAR-10's training images, the first of each class, and what to train."""
    images, labels = list[Image.Image](), list[str]()
    with tarfile.open(options.photos) as archive:
        for entry in archive:
            parts = Path(entry.name).parts
            if entry.isfile() and parts[0] == "train" and int(Path(entry.name).stem) < options.photo_count // 10:
                images.append(Image.open(archive.extractfile(entry)).convert("RGB"))  # type: ignore[arg-type]  # a file
                labels.append(parts[1])
    moved = as_folder(root, images, labels, moved_labels(labels, draws))
    return moved, ["image_folder", f"data.path={root}", *SMALL, "data.augment.crop=pad", "train.duration=12 epochs"]


SETS: dict[str, Callable[..., tuple[set[str], list[str]]]] = {
    "digits": digits,
    "shapes": shapes,
    "topics": topics,
    "photos": photos,
}


def measure(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train, check, and count."""
    with contextlib.ExitStack() as stack:
        if options.keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="labels-")))
        else:
            folder = options.keep.resolve() / f"{name}-{seed}"
            folder.mkdir(parents=True, exist_ok=True)
        moved, (recipe, *overrides) = SETS[name](folder / "data", np.random.default_rng(seed), options)
        run = folder / "run"
        result = paceline.train(
            recipe, overrides=[*overrides, "telemetry.trackers=[]", "telemetry.report=false"], run_dir=run, quiet=True
        )
        samples = sum(build_task(load_recipe(run).recipe).split_sizes() or ())
        found = paceline.check_data(str(run), folds=FOLDS, output=folder / "check").labels
    named = [each["sample"] for each in found["entries"]]
    right = [each for each in named if is_moved(each, moved)]
    return {
        "seed": seed,
        "samples": samples,
        "accuracy": result.summary.metrics["top1_accuracy"],
        "moved": len(moved),
        "named": len(named),
        "found": len(right),
        "false": len(named) - len(right),
        "clean": samples - len(moved),
        "agreement": found["agreement"],
        "findable": found["findable"],
        "not_checked": found["not_checked"],
    }


def is_moved(sample: str, moved: set[str]) -> bool:
    """Whether a sample's name is that of a moved one."""
    return sample.partition(" of ")[0] in moved


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default="digits,topics,shapes", help="each may have its number of seeds: topics:2")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--photo-count", type=int, default=5000)
    parser.add_argument("--keep", type=Path, help="keep the data and runs here, so that the same command resumes")
    options = parser.parse_args(arguments)
    figures, lines = {}, []
    for name, _, seeds in (entry.partition(":") for entry in options.sets.split(",")):
        each = [measure(name, seed, options) for seed in range(int(seeds or options.seeds))]
        total = {key: sum(run[key] for run in each) for key in ("moved", "named", "found", "false", "clean")}
        figures[name] = {
            "runs": each,
            "samples": each[0]["samples"],
            "found_percent": 100 * total["found"] / total["moved"],
            "false_of_named_percent": 100 * total["false"] / max(total["named"], 1),
            "false_of_clean_percent": 100 * total["false"] / total["clean"],
        }
        print(name, figures[name], flush=True)
        lines.append(
            f"{name}: {figures[name]['found_percent']:.1f} % of the moved labels found; "
            f"{figures[name]['false_of_named_percent']:.1f} % of the named ones were right, "
            f"{figures[name]['false_of_clean_percent']:.2f} % of the clean ones ({counted(len(each), 'seed')})."
        )
        print(write_result("wrong-labels", {"folds": FOLDS, "moved_share": MOVED, "sets": figures}, lines))


if __name__ == "__main__":
    main()
