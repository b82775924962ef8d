"""How good are the learning rates that `paceline find-lr` suggests, beside the best of a grid?

For each seed a range test as the command does it, and then trainings of the recipe, as `paceline train` does them: with
each rate of the grid, and with each rule's suggestion for that seed. Compared are mean accuracies over the seeds, in
points of per cent. Of a folder of images, ``--subset`` takes so many of each class of both splits, linked in a
temporary directory.

    python benchmarks/find_lr.py digits --seeds 0 1 2
    python benchmarks/find_lr.py cifar10 data.path=PATH --subset 1000 200 model.options.width=8
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hardware import write_result

import paceline

GRID = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def subset(source: Path, counts: Sequence[int], target: Path) -> None:
    """Link the first images of every class of an image folder's two splits."""
    for split, count in zip(("train", "test"), counts, strict=True):
        for label in sorted(path for path in (source / split).iterdir() if path.is_dir()):
            folder = target / split / label.name
            folder.mkdir(parents=True)
            for image in sorted(label.iterdir())[:count]:
                (folder / image.name).symlink_to(image.resolve())


def accuracy(recipe: str, overrides: dict[str, Any], rate: float, scratch: Path) -> float:
    """Top-1 accuracy in % at the end of one training; chance where it did not come to its end."""
    changes = {**overrides, "optimizer.lr": rate, "checkpoint.every": "off", "telemetry.trackers": []}
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        try:
            done = paceline.train(recipe, overrides=changes, run_dir=Path(folder) / "run", quiet=True)
        except paceline.PacelineError as error:
            print(f"  rate {rate:g}: {error}", flush=True)
            return 10.0
    return float(done.metrics["top1_accuracy"])


def of_seed(
    recipe: str, overrides: dict[str, Any], grid: Sequence[float], settings: dict[str, Any], scratch: Path
) -> dict[str, Any]:
    """The range test of one seed, and the accuracy at every rate."""
    begun = time.perf_counter()
    found = paceline.find_lr(recipe, overrides=overrides, quiet=True, **settings)
    seconds = time.perf_counter() - begun
    suggested = {name: None if each.lr is None else found.lr(name) for name, each in found.suggestions.items()}
    print(f"seed {overrides['seed']}: {suggested} in {seconds:.1f} s, {found.ending}", flush=True)
    reached = {f"{rate:g}": accuracy(recipe, overrides, rate, scratch) for rate in grid}
    print(f"  grid {reached}", flush=True)
    by_rule = {
        name: None if rate is None else accuracy(recipe, overrides, rate, scratch) for name, rate in suggested.items()
    }
    print(f"  suggested {by_rule}", flush=True)
    return {
        "seed": overrides["seed"],
        "find_lr_seconds": seconds,
        "ending": found.ending,
        "losses": [round(loss, 5) for loss in found.losses],
        "suggested": suggested,
        "grid": reached,
        "accuracy": by_rule,
    }


def summarised(seeds: Sequence[dict[str, Any]], grid: Sequence[float]) -> tuple[dict[str, Any], list[str]]:
    """Means over the seeds, and what they say."""
    means = {f"{rate:g}": statistics.mean(each["grid"][f"{rate:g}"] for each in seeds) for rate in grid}
    best = max(means, key=lambda rate: means[rate])
    lines = ["Grid: " + ", ".join(f"{rate}: {mean:.2f} %" for rate, mean in means.items()) + "."]
    rules: dict[str, Any] = {}
    for name in seeds[0]["suggested"]:
        reached = [each["accuracy"][name] for each in seeds]
        rates = ", ".join(
            "none" if each["suggested"][name] is None else f"{each['suggested'][name]:g}" for each in seeds
        )
        if any(each is None for each in reached):
            rules[name] = None
            lines.append(f"{name}: {rates}: not for every seed.")
            continue
        behind = means[best] - statistics.mean(reached)
        rules[name] = {"mean": statistics.mean(reached), "behind_best": behind}
        lines.append(
            f"{name}: {rates}: {statistics.mean(reached):.2f} %, {behind:+.2f} points behind the best, {best}."
        )
    return {"grid_means": means, "best": best, "rules": rules}, lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--grid", type=float, nargs="+", default=GRID)
    parser.add_argument("--subset", type=int, nargs=2, metavar=("TRAIN", "TEST"))
    parser.add_argument("--name", help="of the result files, where it is not the recipe's")
    parser.add_argument("--lowest", type=float)
    parser.add_argument("--steps", type=int)
    options = parser.parse_intermixed_args(arguments)
    asked: dict[str, Any] = dict(word.split("=", 1) for word in options.overrides)
    settings = {name: value for name in ("lowest", "steps") if (value := getattr(options, name)) is not None}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if options.subset:
            subset(Path(asked["data.path"]), options.subset, scratch / "images")
            asked["data.path"] = str(scratch / "images")
        pairs = [f"{key}={value}" for key, value in asked.items()]
        seeds = [
            of_seed(options.recipe, {**_read(pairs), "seed": seed}, options.grid, settings, scratch)
            for seed in options.seeds
        ]
    result, lines = summarised(seeds, options.grid)
    print("\n".join(lines))
    said = {"overrides": options.overrides, "subset": options.subset, "settings": settings}
    print(write_result(f"find-lr-{options.name or options.recipe}", {**said, **result, "seeds": seeds}, lines))


def _read(pairs: Sequence[str]) -> dict[str, Any]:
    """Overrides as typed on a command line, as values."""
    import yaml

    return {key: yaml.safe_load(value) for key, value in (pair.split("=", 1) for pair in pairs)}


if __name__ == "__main__":
    main()
