"""Does a run on a CPU use the memory that `paceline train`, its `--plan-only` and `paceline estimate` print?

Each run starts in cold processes and is trained to its end, with evaluation, checkpoints and report. The command prints
its expected memory before the first step. Meanwhile its processes are observed: the peak of each rank is the kernel's
own (VmHWM). The peak of all is the sum of their highest proportional memory (PSS), in which shared pages count once; it
is too low if other programs on the machine use the same libraries, so nothing else should run.

Cases marked as left out were not used to choose the allowance for what comes after the forecast.

    python benchmarks/expected_memory.py [--only PART-OF-NAME] [--agree] [--dry-run]

With --agree, `--plan-only` and `estimate` are run as well, and their figures are compared with that of `train`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardware import write_result

from paceline.parsing.units import format_bytes
from paceline.records.reader import read_events
from paceline.telemetry.clock import peak_resident_of, proportional_bytes
from paceline_advisor.launches import CommandProcess

_LIMIT_SECONDS = 550.0
_LOOK_SECONDS = 0.2
# Proportional memory takes the kernel longer to count, so it is read in every tenth look only.
_EVERY = 10
_SHORT = ("train.duration=24 steps", "evaluate.every=12 steps", "checkpoint.every=12 steps", "train.until=null")


@dataclass(frozen=True)
class Case:
    """One run: a recipe, overrides of it, processes, and whether it was left out when choosing the allowance."""

    recipe: str
    overrides: tuple[str, ...] = ()
    processes: int = 1
    left_out: bool = False

    @property
    def name(self) -> str:
        """Its name in tables."""
        return " ".join((self.recipe, *self.overrides)) + f", {self.processes} processes" * (self.processes > 1)

    @property
    def arguments(self) -> list[str]:
        """Recipe, overrides and processes on the command line."""
        return [self.recipe, *_SHORT, *self.overrides, "--processes", str(self.processes)]


CASES = (
    Case("digits"),
    Case("figures"),
    Case("discs"),
    Case("gpt-small-docs"),
    Case("dlrm-synthetic"),
    Case("docs-topics"),
    Case("digits", processes=2),
    Case("shapes-maskrcnn"),
    Case("shapes-segmentation", left_out=True),
    Case("bert-tiny-docs", left_out=True),
    Case("discs", processes=2, left_out=True),
    Case("digits", ("optimizer=null", "optimizer.name=adamw", "optimizer.lr=1e-3"), left_out=True),
    Case("docs-topics", ("model.adapters.rank=8",), left_out=True),
    Case("digits", ("parallel.exact=true",), left_out=True),
    Case("dlrm-synthetic", processes=2, left_out=True),
    Case("synthetic", ("model.name=mobilenetv3_small_050", "data.image_size=64", "batch.global_size=8"), left_out=True),
    Case("digits", ("data.workers=2",), left_out=True),
    Case("figures", ("batch.global_size=256",), left_out=True),
    Case("gpt-small-docs", ("train.precision=fp32",), left_out=True),
    Case("shapes-segmentation", ("train.ema=0.99",), processes=2, left_out=True),
    Case("synthetic", ("model.name=resnet26", "data.image_size=32", "batch.global_size=8"), left_out=True),
    Case("bert-tiny-docs", processes=2, left_out=True),
    Case("synthetic", ("model.name=vit_tiny_patch16_224", "batch.global_size=2"), left_out=True),
)


def measured(case: Case, scratch: Path) -> dict[str, Any]:
    """Train a case, and return its expected and measured memory in bytes."""
    run_dir = scratch / "run"
    arguments = ["train", *case.arguments, "--run-dir", str(run_dir)]
    peaks: dict[int, int] = {}
    shares: dict[int, int] = {}
    variables = {"XDG_CACHE_HOME": str(scratch)}
    with CommandProcess(arguments, scratch / "said", limit_seconds=_LIMIT_SECONDS, variables=variables) as run:
        ranks: list[int] = []
        looks = 0
        while run.process.poll() is None and time.monotonic() - run.begun < _LIMIT_SECONDS:
            if looks % _EVERY == 0:
                ranks = max(ranks, run.ranks(), key=len)
                for pid in run.family() if case.processes > 1 else ():
                    shares[pid] = max(shares.get(pid, 0), proportional_bytes(pid))
            for pid in ranks:
                peaks[pid] = max(peaks.get(pid, 0), peak_resident_of(pid))
            looks += 1
            time.sleep(_LOOK_SECONDS)
        if run.process.poll() != 0:
            raise SystemExit(f"{case.name}: {run.err[-500:] or run.out[-500:]}")
    events = read_events(run_dir / "events.jsonl", kinds={"measurement"})
    expected = next(each for each in events if each["what"] == "forecast")
    found = {
        "case": case.name,
        "processes": case.processes,
        "left_out": case.left_out,
        "expected_bytes": expected["expected_memory_bytes"],
        "measured_bytes": max(peaks[pid] for pid in ranks),
        "expected_total_bytes": expected["expected_total_memory_bytes"],
        "measured_total_bytes": sum(shares.values()) or None,
        "seconds": time.monotonic() - run.begun,
    }
    found["error"] = found["expected_bytes"] / found["measured_bytes"] - 1
    if case.processes > 1:
        found["total_error"] = found["expected_total_bytes"] / found["measured_total_bytes"] - 1
    return found


def said_by_others(case: Case, scratch: Path) -> dict[str, int]:
    """Return the figures of the two commands that do not train."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(scratch)}
    found = {}
    for command, arguments in (
        ("plan-only", ["train", *case.arguments, "--plan-only", "--json"]),
        ("estimate", ["estimate", *case.arguments, "--device", "cpu", "--json"]),
    ):
        said = subprocess.run(
            [sys.executable, "-m", "paceline", *arguments], env=environment, capture_output=True, text=True, check=False
        )
        document = json.loads(said.stdout)
        found[command] = document.get("expected_memory_bytes") or document["needed_bytes"]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Train all cases and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--agree", action="store_true", help="compare the figures of three commands")
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    lines = ["| run | used to choose | expected | measured | error |", "|---|---|---|---|---|"]
    for case in CASES:
        if options.only not in case.name:
            continue
        with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
            row = measured(case, Path(scratch))
            if options.agree:
                row |= said_by_others(case, Path(scratch))
        rows.append(row)
        for kind, what in (("", " each" * (case.processes > 1)), ("total_", " in all")):
            if kind and case.processes == 1:
                continue
            sizes = " | ".join(format_bytes(row[f"{name}_{kind}bytes"]) for name in ("expected", "measured"))
            seen = "no" if case.left_out else "yes"
            lines.append(f"| {case.name}{what} | {seen} | {sizes} | {100 * row[f'{kind}error']:+.1f} % |")
            print(lines[-1], flush=True)
        print(json.dumps(row), file=sys.stderr, flush=True)
    if not options.dry_run and not options.only:
        print(write_result("expected-memory", {"cases": rows}, lines))


if __name__ == "__main__":
    main()
