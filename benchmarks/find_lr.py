"""How near to the best of a grid are the learning rates that `paceline find-lr` suggests, and how much do they vary?

Each recipe is trained with every rate of a grid, and tested with `find-lr`'s defaults and several seeds. The best rate
is the one with the lowest held-out loss, as a mean over the seeds of the grid. The seeds of the tests are apart: no two
tests are the same. Every finished part is kept in ``--progress``, and the same command continues from there.

    python benchmarks/find_lr.py --progress find-lr.jsonl [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from hardware import facts, write_result
from PIL import Image
from sklearn.datasets import load_digits

import paceline

ADAMW = ["optimizer.name=adamw", "optimizer.weight_decay=0.05"]
RECIPES: dict[str, list[str]] = {
    "digits, SGD": ["digits", "train.duration=4 epochs"],
    "digits, AdamW": ["digits", "train.duration=4 epochs", *ADAMW],
    "digits, Muon": ["digits", "train.duration=4 epochs", "optimizer.name=muon"],
    "digits, LoRA and AdamW": [
        *("digits", "train.duration=4 epochs", "optimizer.name=adamw"),
        *("model.adapters.rank=4", "model.initialize_from={trained}"),
    ],
    "folder, SGD": [
        *("image_folder", "data.path={photos}", "data.validation_fraction=0.2", "data.workers=0", "data.image_size=32"),
        *("model.name=small_resnet", "model.options.width=8", "model.options.stages=3", "batch.global_size=32"),
        *("train.precision=fp32", "train.duration=2 epochs", "parallel.threads=1"),
    ],
    "figures, AdamW": ["figures", "train.duration=2 epochs"],
    "figures, SGD": ["figures", "train.duration=2 epochs", "optimizer.name=sgd", "optimizer.weight_decay=0.0005"],
    "discs, AdamW": ["discs", "train.duration=2 epochs"],
    "DLRM, AdamW": ["dlrm-synthetic", "data.samples=60000", "train.duration=1 epochs"],
    "small GPT, AdamW": [
        *("gpt-small-docs", "optimizer.name=adamw", "parallel.threads=1", "data.text.context=32"),
        *("model.options.depth=1", "model.options.width=32", "train.duration=150 steps", "evaluate.every=150 steps"),
    ],
}
LOW = ("digits, LoRA and AdamW", "figures, AdamW", "discs, AdamW", "DLRM, AdamW")
RATES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
SEEDS = (50, 60, 70, 80, 90)  # not those on which the rules were chosen; `find-lr` takes the next ones too
GRID_SEEDS = (0, 1)
ALLOWED = 3.0


def grid(name: str) -> tuple[float, ...]:
    """Six rates, two to the decade."""
    first = 0 if name in LOW else 3 if "SGD" in name else 1
    return RATES[first : first + 6]


def write_photos(root: Path) -> None:
    """Write scikit-learn's digits as coloured and noisy PNG files, in ten classes."""
    digits, generator = load_digits(), np.random.default_rng(0)
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        folder = root / f"digit-{label}"
        folder.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray((image * 15).astype(np.uint8)).resize((32, 32), Image.Resampling.BICUBIC)
        colours = np.asarray(small, dtype=float)[..., None] * generator.uniform(0.6, 1, 3)
        noisy = (colours + generator.normal(0, 8, (32, 32, 3))).clip(0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / f"{number}.png")


def suggested(recipe: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The rates that one call of `find-lr` suggests by each rule, and the range that it prints."""
    found = paceline.find_lr(recipe, overrides=overrides, quiet=True)
    chosen = found.suggestion()
    return {
        "rates": {name: each.lr for name, each in found.suggestions.items()},
        "range": [chosen.low, chosen.high],
        "why_not": chosen.why_not,
        "steps": found.sweep.planned_steps,
        "curves": [[float(f"{loss:.5g}") for loss in each] for each in found.curves],
    }


def held_out_loss(recipe: str, overrides: Mapping[str, Any], scratch: Path) -> float:
    """The held-out loss at the end of a training."""
    quiet = {"checkpoint.every": "off", "telemetry.trackers": [], "telemetry.report": False}
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        done = paceline.train(recipe, overrides={**overrides, **quiet}, run_dir=Path(folder) / "run", quiet=True)
    loss = float(done.metrics["loss"])
    return loss if math.isfinite(loss) else 1e9


def summarised(found: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Ratios and distances of each recipe, and of each rule over all recipes."""
    recipes: dict[str, Any] = {}
    lines = [
        "| recipe | best of the grid | suggested | largest / smallest | farthest from the best |",
        "|---|---|---|---|---|",
    ]
    for name, parts in found.items():
        losses = {rate: statistics.mean(parts[f"loss {rate:g} {seed}"] for seed in GRID_SEEDS) for rate in grid(name)}
        best = min(losses, key=lambda rate: losses[rate])
        tests = [parts[f"test {seed}"] for seed in SEEDS]
        rules = {rule: _compared([each["rates"][rule] for each in tests], best) for rule in tests[0]["rates"]}
        recipes[name] = {
            "best": best,
            "losses": losses,
            "rules": rules,
            "tests": [{key: each[key] for key in each if key != "curves"} for each in tests],
        }
        chosen = rules["median"]
        rates = ", ".join("none" if rate is None else f"{rate:.2g}" for rate in chosen["rates"])
        lines.append(f"| {name} | {best:g} | {rates} | {chosen['ratio']:.2f} | {chosen['distance']:.1f} × |")
    lines += ["", "| rule | largest ratio over seeds | recipes within 3 × with every seed |", "|---|---|---|"]
    overall: dict[str, Any] = {}
    for rule in next(iter(recipes.values()))["rules"]:
        each = [one["rules"][rule] for one in recipes.values()]
        near = sum(not one["none"] and one["distance"] <= ALLOWED for one in each)
        overall[rule] = {"ratio": max(one["ratio"] or 1.0 for one in each), "near": near, "recipes": len(each)}
        lines.append(f"| {rule} | {overall[rule]['ratio']:.1f} | {near} of {len(each)} |")
    return {"recipes": recipes, "rules": overall}, lines


def _compared(rates: Sequence[float | None], best: float) -> dict[str, Any]:
    known = [rate for rate in rates if rate is not None]
    return {
        "rates": rates,
        "none": len(rates) - len(known),
        "ratio": max(known) / min(known) if known else None,
        "distance": max(max(rate / best, best / rate) for rate in known) if known else None,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not measured yet, and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--progress", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    options = parser.parse_args(arguments)
    known = facts()
    found: dict[str, dict[str, Any]] = {name: {} for name in options.only}
    if options.progress.exists():
        for name, part, value in map(json.loads, options.progress.read_text().splitlines()):
            found.setdefault(name, {})[part] = value

    def measure(name: str, part: str, function: Callable[[], Any]) -> None:
        if part not in found[name]:
            found[name][part] = value = function()
            with options.progress.open("a") as file:
                file.write(json.dumps((name, part, value)) + "\n")
            print(name, part, value, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        write_photos(scratch / "photos")
        paceline.train("digits", overrides={"train.duration": "1 epochs"}, run_dir=scratch / "trained", quiet=True)
        places = {"photos": scratch / "photos", "trained": scratch / "trained"}
        for name in options.only:
            recipe, *words = (word.format(**places) for word in RECIPES[name])
            overrides = {key: yaml.safe_load(value) for key, value in (word.split("=", 1) for word in words)}
            for seed in SEEDS:
                measure(name, f"test {seed}", partial(suggested, recipe, {**overrides, "seed": seed}))
            for rate, seed in ((rate, seed) for seed in GRID_SEEDS for rate in grid(name)):
                chosen = {**overrides, "seed": seed, "optimizer.lr": rate}
                measure(name, f"loss {rate:g} {seed}", partial(held_out_loss, recipe, chosen, scratch))
    result, lines = summarised({name: found[name] for name in options.only})
    print("\n".join(lines))
    print(write_result("find-lr", result, lines, known))


if __name__ == "__main__":
    main()
