"""Count the false alarms of `paceline verify --all` on honest runs.

Sixty runs of sixteen kinds, of most kinds four with other optimizers, schedules, augmentations and seeds, are trained
as commands and then verified. Where a fork reproduces a command, it is forked from a process that has imported torch
(tests/fork_server.py). Every finished run is kept in ``--progress``, and the same command continues from there.

    python benchmarks/honest_runs.py --progress honest.jsonl [--only KIND ...] [--dry-run]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from hardware import facts, write_result
from PIL import Image

import paceline
from paceline_advisor.launches import CommandProcess, last_step, said

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import fork_server

IMAGES = """
model: {name: small_resnet, channels_last: false, options: {width: 4, stages: 1, depth: 1}}
data: {dataset: digits, validation_fraction: 0.2}
batch: {global_size: 16}
optimizer: {lr: 0.05}
schedule: {name: constant}
train: {duration: 12 steps, precision: fp32}
evaluate: {every: 4 steps}
checkpoint: {every: 4 steps, keep: 9}
parallel: {device: cpu, threads: 1}
telemetry: {log_every: 1 steps, trackers: [], report: off}
"""
TEXT = """
task: language_modeling
model: {name: gpt, options: {depth: 1, width: 16, heads: 2}}
data: {dataset: text_folder, path: books, validation_fraction: 0.4, text: {context: 16}}
batch: {global_size: 4}
optimizer: {lr: 0.05}
schedule: {name: constant}
train: {duration: 12 steps, precision: fp32}
evaluate: {every: 4 steps, batch_size: 4}
checkpoint: {every: 4 steps, keep: 9}
parallel: {device: cpu, threads: 1}
telemetry: {log_every: 1 steps, trackers: [], report: off}
"""
# A kill comes between two steps only if a step takes long enough to be seen.
CODE = """
import time

import torch

import paceline


class Slow(paceline.ImageClassification):
    def loss(self, model, batch):
        time.sleep(0.05)
        return super().loss(model, batch)


class Own(paceline.ImageClassification):
    def loss(self, model, batch):
        return super().loss(model, batch) + 0.01 * torch.rand(()) * model(batch.inputs).square().mean()
"""
VARIANTS = (
    ("seed=1", "optimizer.momentum=0.9", "optimizer.weight_decay=0.01"),
    ("seed=2", "optimizer.name=adamw", "optimizer.lr=0.01", "optimizer.clip_norm=0.5"),
    ("seed=3", "schedule.name=cosine", "schedule.warmup=3 steps", "evaluate.every=3 steps"),
    ("seed=4", "optimizer.name=adamw", "optimizer.lr=0.01", "schedule.name=cosine", "train.ema=0.8"),
)
# Of images only.
AUGMENTED = ((), ("model.options.dropout=0.3",), ("data.mix.mixup=0.2", "data.augment.flip=0.5"), ())


@dataclass(frozen=True)
class Launch:
    """One of a run's launches: its processes, where it is stopped, and after which step it is killed."""

    processes: int = 1
    until: str | None = None
    kill_after: int | None = None


@dataclass(frozen=True)
class Kind:
    """A kind of run: overrides, launches, whether a fork can reproduce it, and the number of runs."""

    words: tuple[str, ...] = ()
    launches: tuple[Launch, ...] = (Launch(),)
    recipe: str = "images.yaml"
    is_forked: bool = True
    runs: int = len(VARIANTS)


TABLE = ("data.dataset=csv", "data.path=pictures/table.csv", "data.channels=1", "data.augment.crop=pad")
KINDS = {
    "killed and resumed": Kind(("task=mine:Slow",), (Launch(kill_after=3), Launch(kill_after=9), Launch())),
    "another number of processes": Kind((), (Launch(2, until="6 steps"), Launch(1))),
    "exact, another number of processes": Kind(
        ("parallel.exact=true", "parallel.logical_ranks=2"), (Launch(1, until="5 steps"), Launch(2))
    ),
    "LoRA": Kind(("model.adapters.rank=2",), is_forked=False),
    "moving average": Kind(("train.ema=0.9",)),
    "mixture": Kind(("data.dataset=mixture", "data.path=pictures", "data.mixture={a: 3, table.csv: 1}")),
    "balanced classes": Kind((*TABLE, "data.sampling=balanced")),
    "accumulation": Kind(("batch.micro_size=4",)),
    "two processes": Kind((), (Launch(2),)),
    "loader processes": Kind(("data.workers=2", "data.backend=pytorch")),
    "bf16": Kind(("train.precision=bf16",)),
    "compiled": Kind(("model.compile=true",), is_forked=False, runs=2),  # each launch compiles anew
    "two processes, accumulation, moving average": Kind(
        ("batch.micro_size=4", "train.ema=0.5"), (Launch(2, until="7 steps"), Launch(2)), runs=2
    ),
    "text": Kind(recipe="text.yaml"),
    "own task": Kind(("task=mine:Own",)),
    "made longer twice": Kind((), (Launch(until="7 steps"), Launch(until="9 steps"), Launch())),
}


def write_data(folder: Path) -> None:
    """Write recipes, code, texts and images: twelve in folders of classes, 48 in a table with unequal classes."""
    draws = np.random.default_rng(1)
    (folder / "images.yaml").write_text(IMAGES)
    (folder / "text.yaml").write_text(TEXT)
    (folder / "mine.py").write_text(CODE)
    (folder / "books").mkdir()
    for number in range(9):
        (folder / "books" / f"{number}.txt").write_text(f"the {number}th book says more. " * (2 * number % 5 + 1))
    rows, pictures = ["path,label"], folder / "pictures"
    names = [*(f"a/{'xy'[n % 2]}/{n}.png" for n in range(24)), *(f"{n}.png" for n in range(48))]
    for name in names:
        (pictures / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draws.integers(0, 255, (8, 8), dtype=np.uint8)).save(pictures / name)
    rows += [f"{n}.png,{'x' if n % 6 else 'y'}" for n in range(48)]
    (pictures / "table.csv").write_text("\n".join(rows) + "\n")


def train(folder: Path, run: Path, kind: Kind, words: Sequence[str]) -> int:
    """Train a run launch by launch; returns the number of kills that came before its end.

    Raises:
        RuntimeError: If a launch fails.
    """
    killed = 0
    for launch in kind.launches:
        arguments = ["train", kind.recipe, *words, "--run-dir", str(run), "--processes", str(launch.processes)]
        arguments += ["--until", launch.until] if launch.until else []
        with CommandProcess(
            arguments,
            folder / "log",
            limit_seconds=300,
            folder=folder,
            variables={"PYTHONPATH": os.environ["PYTHONPATH"]},
        ) as process:
            if launch.kill_after is not None:
                after = launch.kill_after
                process.wait_until(lambda after=after: last_step(run) >= after)
                killed += process.process.poll() is None
                process.kill()
            elif (code := process.wait()) not in (0, 75):
                raise RuntimeError(f"exit code {code}: {said(process)}\n{process.err}")
    return killed


def measure(folder: Path, name: str, variant: int) -> dict[str, Any]:
    """Train and verify one run."""
    kind, run = KINDS[name], folder / f"{list(KINDS).index(name)}-{variant}"
    words = [*VARIANTS[variant], *(AUGMENTED[variant] if kind.recipe == "images.yaml" else ()), *kind.words]
    popen: Callable[..., Any] = fork_server.Popen if kind.is_forked else subprocess.Popen
    with patch.object(subprocess, "Popen", popen):
        started = time.perf_counter()
        kills = train(folder, run, kind, words)
        trained = time.perf_counter()
        document = paceline.verify(run, all=True, trust_code=True).document
    return {
        "kind": name,
        "words": words,
        "kills": kills,
        "stretches": document["stretches"],
        "verdict": document["verdict"],
        "unlike": document["unlike"],
        "differences": document["differences"],
        "reason": document["reason"],
        "train_seconds": trained - started,
        "verify_seconds": document["seconds"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and verify the runs, write the result files; 1 if there is an alarm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--progress", type=Path, required=True, help="file of finished runs, a line each")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    known = facts()
    found: list[dict[str, Any]] = []
    if options.progress.exists():
        found = [json.loads(line) for line in options.progress.read_text().splitlines()]
    done = {(each["kind"], each["variant"]) for each in found}
    with tempfile.TemporaryDirectory(prefix="honest-") as scratch, options.progress.open("a") as progress:
        os.chdir(scratch)
        write_data(Path(scratch))
        for variant in range(len(VARIANTS)):
            for name in options.only:
                if (name, variant) not in done and variant < KINDS[name].runs:
                    found.append({**measure(Path(scratch), name, variant), "variant": variant})
                    progress.write(json.dumps(found[-1]) + "\n")
                    progress.flush()
                    print(
                        name, variant, found[-1]["verdict"], found[-1]["differences"], found[-1]["reason"], flush=True
                    )
    alarms = [each for each in found if each["verdict"] != "equal" or each["unlike"]]
    stretches = sum(each["stretches"] for each in found)
    summary = (
        f"{len(alarms)} alarms on {len(found)} honest runs of {len(KINDS)} kinds, in which all {stretches} stretches "
        f"were computed again; {sum(each['kills'] for each in found)} SIGKILLs came before the end of a run."
    )
    lines = [
        summary,
        "",
        "| kind | runs | equal in every bit | stretches |",
        "|---|---|---|---|",
    ]
    for name in KINDS:
        own = [each for each in found if each["kind"] == name]
        equal = sum(each not in alarms for each in own)
        lines.append(f"| {name} | {len(own)} | {equal} | {sum(each['stretches'] for each in own)} |")
    print("\n".join(lines))
    if not options.dry_run:
        result = {"alarms": len(alarms), "kinds": len(KINDS), "stretches": stretches, "runs": found}
        print(write_result("honest-runs", result, lines, known))
    return int(bool(alarms))


if __name__ == "__main__":
    sys.exit(main())
