"""The time in which a recipe reaches an accuracy on CIFAR-10, and what its peers' recipes reach in that time.

Runs ``paceline train RECIPE`` as a user would, once per seed, one after the other. A run has reached the target at the
end of its first evaluation that is no worse; evaluations before it are in its time, so that a recipe which evaluates
only at its end is measured as it is. Three times are told: from the command's start (imports, listing and decoding the
files, the network's first weights are in it); of the steps and evaluations alone, with the images in memory (the public
record's own clock has the whitening of the first layer in it too); and processor seconds of the whole command. Runs
that do not reach the target are counted and have no time.

    python benchmarks/cifar10_speedrun.py cifar10-speedrun-cpu data.path=CIFAR10 --target 90 --seeds 0 1 2 --peers all
    python benchmarks/cifar10_speedrun.py cifar10-speedrun data.path=CIFAR10 --target 94 --seeds $(seq 0 19)

``--peers`` then gives each peer's default or documented settings (peers/cifar.py) as many seconds of steps on the same
machine as our steps and evaluations took, at the median, and the precision that our recipe takes there. With
``--budget SECONDS`` they get so many; then ``--seeds`` may be given without a number, for no runs of ours. What each
reached is written as soon as it ends.

``--record PROGRAM`` runs the public record's own program, a copy of yours of airbench94_muon.py, as often on the same
images and GPU (peers/cifar_record.py).

``--step`` measures instead what a step of the recipe's network costs in processor time on the CPU, on one thread: as it
begins, where freed memory goes back to the system and where it is kept for the next step, as training does
(``trainer/process_settings.py``); and after ``model.freeze_after`` holds what it names.
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
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import cifar
import cifar_record
from hardware import facts, spread, write_result

from paceline.errors import PacelineError
from paceline.models.build import build_model
from paceline.models.transfer import freeze
from paceline.recipe.load import load_recipe
from paceline.recipe.model import ModelSection
from paceline.trainer.process_settings import keep_freed_memory

_ROUNDS = 5


def measure(recipe: str, overrides: Sequence[str], seed: int, run: Path, target: float) -> dict[str, Any]:
    """One run by the command line."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.time()
    command = [sys.executable, "-m", "paceline", "train", recipe, *overrides, f"seed={seed}", "--run-dir", str(run)]
    subprocess.run([*command, "--json"], stdout=subprocess.DEVNULL, check=True)
    ended, after = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    plan = json.loads((run / "plan.json").read_text())
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    scored = [each for each in events if each["event"] == "evaluation"]
    reached = next((each for each in scored if each["top1_accuracy"] >= target), None)
    return {
        "seed": seed,
        "precision": plan["precision"],
        # At the end, of the weights or their average; of earlier evaluations the best would be chosen by chance.
        "top1_accuracy": max(each["top1_accuracy"] for each in scored if each["step"] == scored[-1]["step"]),
        "reached_at_step": None if reached is None else reached["step"],
        "seconds_from_command": None if reached is None else reached["time"] - started,
        # Of what came before it; with an average of the weights, both are scored at the same step.
        "seconds_of_steps": None if reached is None else _steps_and_scores(scored, reached["step"]),
        "train_seconds": scored[-1]["train_seconds"],
        "evaluation_seconds": sum(each["seconds"] for each in scored),
        "all_steps_seconds": _steps_and_scores(scored, scored[-1]["step"]),
        "command_seconds": ended - started,
        "processor_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


def _steps_and_scores(scored: Sequence[dict[str, Any]], step: int) -> float:
    """Seconds in training steps and evaluations until the end of those at a step."""
    until = [each for each in scored if each["step"] <= step]
    return float(until[-1]["train_seconds"] + sum(each["seconds"] for each in until))


def race(options: argparse.Namespace, runs: Sequence[dict[str, Any]], precision: str, known: dict[str, Any]) -> None:
    """What peers reach in the seconds of our steps and evaluations, or in ``--budget``; a result file for each."""
    seconds = options.budget or statistics.median(each["all_steps_seconds"] for each in runs)
    threads = options.threads or torch.get_num_threads()
    given = {"seconds": seconds, "precision": precision, "threads": threads}
    for name, seen in cifar.reached(_racers(options), _images(options), seconds, precision=precision, threads=threads):
        line = cifar.summary_of_run(seen, seconds)
        print(line, flush=True)
        if not options.dry_run:
            print(write_result(f"{options.recipe}-beside-{name}", {**given, **seen}, [line], known), flush=True)


def _racers(options: argparse.Namespace) -> list[str]:
    return list(cifar.RACERS) if "all" in options.peers else list(options.peers)


def _precision(options: argparse.Namespace) -> str:
    """What our recipe computes in on this machine, beside peers that compute on the CPU.

    Raises:
        SystemExit: If ours would take something faster.
    """
    command = [sys.executable, "-m", "paceline", "train", options.recipe, *options.overrides, "--plan-only", "--json"]
    plan = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)["plan"]
    if plan["device"] != "cpu":
        sys.exit(f"The peers train on the CPU, and ours would on {plan['device']}: add parallel.device=cpu.")
    return str(plan["precision"])


def _path(options: argparse.Namespace) -> str:
    return next((each.partition("=")[2] for each in options.overrides if each.startswith("data.path=")), "")


def _images(options: argparse.Namespace) -> Path:
    return Path(_path(options))


def step_costs(recipe: str) -> dict[str, float]:
    """Processor seconds of a step of 500 images, in bf16 and channels last; the least of a few."""
    model = load_recipe(recipe).recipe.model
    cases = [("as it begins, memory given back", (), False), ("as it begins", (), True)]
    if model.freeze_after:
        cases.append(("with freeze_after's parameters held", tuple(model.freeze_after), True))
    found = {}
    for name, held, is_kept in cases:
        with keep_freed_memory(torch.device("cpu")) if is_kept else nullcontext():
            found[name] = _step_cost(model, (*model.frozen, *held))
    return found


def _step_cost(settings: ModelSection, frozen: Sequence[str]) -> float:
    last = torch.channels_last
    torch.manual_seed(0)
    images, labels = torch.randn(500, 3, 32, 32).to(memory_format=last), torch.randint(0, 10, (500,))
    network = build_model(settings, num_classes=10, in_channels=3).to(memory_format=last)
    freeze(network, frozen)
    seconds = []
    for _ in range(_ROUNDS):
        started = time.process_time()
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(network(images), labels)
        loss.backward()
        network.zero_grad()
        seconds.append(time.process_time() - started)
    return min(seconds)


def summary_of_run(recipe: str, target: float, runs: Sequence[dict[str, Any]]) -> list[str]:
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
    for key, what in (
        ("seconds_from_command", "From the command's start to"),
        ("seconds_of_steps", "Steps and evaluations alone, with the images in memory, to"),
    ):
        if reached:
            found = spread([each[key] for each in reached])
            lines.append(
                f"{what} {target:g} %: {found['median']:.1f} s ({found['minimum']:.1f} to {found['maximum']:.1f})."
            )
    return lines


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What is to be measured; what cannot be is refused here, and not after hours of runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--target", type=float, default=90.0, help="top-1 accuracy in percent")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--peers", nargs="+", default=[], choices=[*cifar.RACERS, "all"], help="contenders beside it")
    parser.add_argument("--budget", type=float, help="seconds of steps for each peer")
    parser.add_argument("--record", type=Path, metavar="PROGRAM", help="the public record's program, to run beside it")
    parser.add_argument("--threads", type=int, help="of ours and of each peer; by default the recipe's, and all cores")
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    parser.add_argument("--step", action="store_true", help="measure the processor time of a step instead")
    options = parser.parse_intermixed_args(arguments)
    try:
        load_recipe(options.recipe, options.overrides)
        if not options.step:
            _check(options)
    except (PacelineError, ValueError) as error:
        parser.error(str(error))
    return options


def _check(options: argparse.Namespace) -> None:
    if options.record and not options.seeds:
        raise ValueError("--record runs as often as there are --seeds")
    if options.record and not options.record.is_file():
        raise ValueError(f"there is no program at {options.record}")
    if options.record and not torch.cuda.is_available():
        raise ValueError("the public record's program needs a GPU, and PyTorch sees none here")
    if options.budget and not options.peers:
        raise ValueError("--budget is the peers', and no --peers were named")
    if not (options.seeds or options.budget):
        raise ValueError("--seeds without a number needs --peers and --budget")
    _check_images(options)


def _check_images(options: argparse.Namespace) -> None:
    if not _path(options):
        raise ValueError("where are the images? Give data.path=PATH: CIFAR-10's archive, or folders train and test")
    if not _images(options).exists():
        raise ValueError(f"there is nothing at {_path(options)}: correct data.path")
    if options.peers or options.record:
        cifar.held_by(_images(options))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    options = parse_options(arguments)
    if options.step:
        torch.set_num_threads(1)
    elif options.threads:
        torch.set_num_threads(options.threads)  # for the result's facts; each program sets its own
    known = facts()
    if options.step:
        costs = step_costs(options.recipe)
        each = "; ".join(f"{seconds:.3f} s {name}" for name, seconds in costs.items())
        _tell(options, {"processor_seconds": costs}, [f"A step of 500 images, one thread: {each}."], known)
        return
    # Where the images lie is no part of the result.
    known["command"] = known["command"].replace(f"data.path={_path(options)}", "data.path=CIFAR10")
    precision = _precision(options) if options.peers else ""
    cifar.prepare(_racers(options))
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        threads = [] if options.threads is None else [f"parallel.threads={options.threads}"]
        for seed in options.seeds:
            run = Path(scratch) / f"seed-{seed}"
            runs.append(measure(options.recipe, [*options.overrides, *threads], seed, run, options.target))
            # After each, since all of them may take hours.
            _tell(
                options,
                {"target": options.target, "runs": runs},
                summary_of_run(options.recipe, options.target, runs),
                known,
            )
    if options.record:
        found = cifar_record.record(options.record, _images(options), len(runs))
        lines = [*summary_of_run(options.recipe, options.target, runs), *cifar_record.summary_of_run(found)]
        _tell(options, {"target": options.target, "runs": runs, "record": found}, lines, known)
    if options.peers:
        race(options, runs, precision, known)


def _tell(options: argparse.Namespace, result: dict[str, Any], lines: Sequence[str], known: dict[str, Any]) -> None:
    print("\n".join(lines), flush=True)
    if not options.dry_run:
        print(write_result(f"{options.recipe}{'-step' if options.step else ''}", result, lines, known), flush=True)


if __name__ == "__main__":
    main()
