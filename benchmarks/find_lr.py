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
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
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
    recipe: str,
    grid: Sequence[float],
    settings: dict[str, Any],
    rules: Sequence[str] | None,
    scratch: Path,
    overrides: dict[str, Any],
    known: dict[str, float],
) -> dict[str, Any]:
    """The range test of one seed, and the accuracy at every rate; what is known already is not trained again."""
    started = time.perf_counter()
    found = paceline.find_lr(recipe, overrides=overrides, quiet=True, **settings)
    seconds = time.perf_counter() - started
    suggested = {name: None if each.lr is None else found.lr(name) for name, each in found.suggestions.items()}
    trained = {name: rate for name, rate in suggested.items() if rate is not None and (not rules or name in rules)}
    print(f"seed {overrides['seed']}: {suggested} in {seconds:.1f} s, {found.ending}", flush=True)
    reached = dict(known)
    for rate in dict.fromkeys([*grid, *trained.values()]):
        if f"{rate:g}" not in reached:
            reached[f"{rate:g}"] = accuracy(recipe, overrides, rate, scratch)
            print(f"  seed {overrides['seed']}, rate {rate:g}: {reached[f'{rate:g}']:.2f} %", flush=True)
    return {
        "seed": overrides["seed"],
        "find_lr_seconds": seconds,
        "ending": found.ending,
        "losses": [round(loss, 5) for loss in found.losses],
        "suggested": suggested,
        "reached": reached,
    }


def summarised(seeds: Sequence[dict[str, Any]], grid: Sequence[float]) -> tuple[dict[str, Any], list[str]]:
    """Means over the seeds, and what they say."""
    means = {f"{rate:g}": statistics.mean(each["reached"][f"{rate:g}"] for each in seeds) for rate in grid}
    best = max(means, key=lambda rate: means[rate])
    lines = ["Grid: " + ", ".join(f"{rate}: {mean:.2f} %" for rate, mean in means.items()) + "."]
    rules: dict[str, Any] = {}
    for name in seeds[0]["suggested"]:
        given = [f"{each['suggested'][name]:g}" for each in seeds if each["suggested"][name] is not None]
        reached = [each["reached"][rate] for each, rate in zip(seeds, given, strict=False) if rate in each["reached"]]
        rates = ", ".join(
            "none" if each["suggested"][name] is None else f"{each['suggested'][name]:g}" for each in seeds
        )
        if len(reached) < len(seeds):
            rules[name] = None
            lines.append(f"{name}: {rates}: not trained for every seed.")
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
    parser.add_argument("--rules", nargs="+", help="whose suggestions are trained (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="seeds that are done at the same time")
    parser.add_argument("--again", type=Path, help="a result file, whose trainings are not done again")
    parser.add_argument("--lowest", type=float)
    parser.add_argument("--steps", type=int)
    options = parser.parse_intermixed_args(arguments)
    overrides_by_key: dict[str, Any] = dict(word.split("=", 1) for word in options.overrides)
    settings = {name: value for name in ("lowest", "steps") if (value := getattr(options, name)) is not None}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if options.subset:
            subset(Path(overrides_by_key["data.path"]), options.subset, scratch / "images")
            overrides_by_key["data.path"] = str(scratch / "images")
        pairs = [f"{key}={value}" for key, value in overrides_by_key.items()]
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            asked_of = [{**_read(pairs), "seed": seed} for seed in options.seeds]
            known = [_known(options.again, seed) for seed in options.seeds]
            seeds = list(
                pool.map(
                    partial(of_seed, options.recipe, options.grid, settings, options.rules, scratch), asked_of, known
                )
            )
    result, lines = summarised(seeds, options.grid)
    print("\n".join(lines))
    header = {"overrides": options.overrides, "subset": options.subset, "settings": settings}
    print(write_result(f"find-lr-{options.name or options.recipe}", {**header, **result, "seeds": seeds}, lines))


def _read(pairs: Sequence[str]) -> dict[str, Any]:
    """Overrides as typed on a command line, as values."""
    import yaml

    return {key: yaml.safe_load(value) for key, value in (pair.split("=", 1) for pair in pairs)}


def _known(earlier: Path | None, seed: int) -> dict[str, float]:
    """Accuracies of a seed, by rate, that an earlier result has."""
    if earlier is None:
        return {}
    found = json.loads(earlier.read_text())["seeds"]
    return next((each["reached"] for each in found if each["seed"] == seed), {})


if __name__ == "__main__":
    main()
