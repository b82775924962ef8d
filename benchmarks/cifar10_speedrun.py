"""In what time does a recipe reach an accuracy on CIFAR-10, from the start of the command and from its first step?

Runs ``paceline train RECIPE`` as a user would, once per seed, one after the other. A run has reached the target at the
end of its first evaluation that is no worse; evaluations before it are in its time, so that a recipe which evaluates
only at its end is measured as it is. From the command's start: imports, listing and decoding the files, the network's
first weights are in it. Runs that do not reach the target are counted and have no time.

    python benchmarks/cifar10_speedrun.py cifar10-speedrun-cpu data.path=PATH --target 90 --seeds 0 1 2 3 4
    python benchmarks/cifar10_speedrun.py cifar10-speedrun data.path=PATH --target 94 --seeds $(seq 0 19)

``--step`` measures instead what a step of the recipe's network costs in processor time on the CPU, on one thread: as it
begins, and after ``model.freeze_after`` holds what it names.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hardware import spread, write_result
from torch.nn import functional

from paceline.models.build import build_model
from paceline.models.transfer import freeze
from paceline.recipe.load import load_recipe

_ROUNDS = 5


def measure(recipe: str, overrides: Sequence[str], seed: int, run: Path, target: float) -> dict[str, Any]:
    """One run by the command line."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.time()
    command = [sys.executable, "-m", "paceline", "train", recipe, *overrides, f"seed={seed}", "--run-dir", str(run)]
    subprocess.run([*command, "--json"], stdout=subprocess.DEVNULL, check=True)
    ended, after = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    first = next(each["time"] for each in events if each["event"] == "start")
    scored = [each for each in events if each["event"] == "evaluation"]
    reached = next((each for each in scored if each["top1_accuracy"] >= target), None)
    return {
        "seed": seed,
        # At the end, of the weights or their average; of earlier evaluations the best would be chosen by chance.
        "top1_accuracy": max(each["top1_accuracy"] for each in scored if each["step"] == scored[-1]["step"]),
        "reached_at_step": None if reached is None else reached["step"],
        "seconds_from_command": None if reached is None else reached["time"] - begun,
        "seconds_from_first_step": None if reached is None else reached["time"] - first,
        "train_seconds": scored[-1]["train_seconds"],
        "evaluation_seconds": sum(each["seconds"] for each in scored),
        "command_seconds": ended - begun,
        "processor_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


def step_costs(recipe: str) -> dict[str, float]:
    """Processor seconds of a step of 500 images on one thread, in bf16 and channels last; the least of a few."""
    torch.set_num_threads(1)
    asked, last = load_recipe(recipe).recipe.model, torch.channels_last
    torch.manual_seed(0)
    images, labels = torch.randn(500, 3, 32, 32).to(memory_format=last), torch.randint(0, 10, (500,))
    found = {}
    for name, held in (("as it begins", ()), ("with freeze_after's parameters held", tuple(asked.freeze_after))):
        network = build_model(asked, num_classes=10, in_channels=3).to(memory_format=last)
        freeze(network, (*asked.frozen, *held))
        seconds = []
        for _ in range(_ROUNDS):
            begun = time.process_time()
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.cross_entropy(network(images), labels)
            loss.backward()
            network.zero_grad()
            seconds.append(time.process_time() - begun)
        found[name] = min(seconds)
    return found


def told(recipe: str, target: float, runs: Sequence[dict[str, Any]]) -> list[str]:
    """The result for people."""
    accuracies = [each["top1_accuracy"] for each in runs]
    reached = [each for each in runs if each["reached_at_step"] is not None]
    processor = statistics.median(each["processor_seconds"] for each in runs)
    lines = [
        (
            f"{recipe}: mean top-1 {statistics.mean(accuracies):.2f} % ({min(accuracies):.2f} to "
            f"{max(accuracies):.2f}) over {len(runs)} seed(s); {len(reached)} of {len(runs)} reached {target:g} %; "
            f"{processor:.0f} s of processor time a run (median)."
        )
    ]
    for key, what in (("seconds_from_command", "the command's start"), ("seconds_from_first_step", "the first step")):
        if reached:
            found = spread([each[key] for each in reached])
            lines.append(
                f"From {what} to {target:g} %: {found['median']:.1f} s "
                f"({found['minimum']:.1f} to {found['maximum']:.1f}), evaluation included."
            )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--target", type=float, default=90.0, help="top-1 accuracy in percent")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--step", action="store_true", help="measure the processor time of a step instead")
    options = parser.parse_intermixed_args(arguments)
    if options.step:
        costs = step_costs(options.recipe)
        whole, held = costs.values()
        lines = [
            f"{options.recipe}, a step of 500 images, one thread: "
            + "; ".join(f"{seconds:.3f} s {name}" for name, seconds in costs.items())
            + f", {100 * (1 - held / whole):.0f} % less."
        ]
        result: dict[str, Any] = {"processor_seconds": costs}
    else:
        with tempfile.TemporaryDirectory() as scratch:
            runs = [
                measure(options.recipe, options.overrides, seed, Path(scratch) / f"seed-{seed}", options.target)
                for seed in options.seeds
            ]
        lines = told(options.recipe, options.target, runs)
        result = {"target": options.target, "runs": runs}
    print("\n".join(lines))
    print(write_result(f"{options.recipe}{'-step' if options.step else ''}", result, lines))


if __name__ == "__main__":
    main()
