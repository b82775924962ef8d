"""What does the report cost at the end of a training, and what does it weigh?

A short run of the digits is made, and its step records are repeated up to so many. Each report is written by a fresh
process, as a training's is; the clock runs from after the import of torch, which a training has, to the page's being
there. Seconds are of the processor, which a busy machine changes little.

    python benchmarks/report.py [--runs 5]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hardware import spread, write_result

import paceline

COUNTS = (100, 1_000, 10_000, 100_000)
PROGRAM = """
import sys, time
from pathlib import Path
from typing import Any
import torch
begun = time.process_time()
from paceline.reports.html.page import write_report
report = write_report([Path(sys.argv[1])])
print(time.process_time() - begun, report.path.stat().st_size)
"""


def repeated(run: Path, count: int) -> None:
    """Make the run's records so many."""
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [each for each in lines if each["event"] == "step"]
    told = [lines[0]]
    for at in range(count):
        step = dict(steps[at % len(steps)])
        step["step"] = step["position"] = at + 1
        told.append(step)
    (run / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*told, lines[-1]]))


def measure(run: Path) -> tuple[float, int]:
    """Processor seconds and bytes of one report."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(run)], capture_output=True, text=True, check=True)
    seconds, size = done.stdout.split()
    return float(seconds), int(size)


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    measured: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        often = {"train.duration": "2 epochs", "telemetry.log_every": "1 steps"}
        paceline.train("digits", overrides=often, run_dir=run, quiet=True)
        for count in COUNTS:
            repeated(run, count)
            found = [measure(run) for _ in range(options.runs)]
            measured[str(count)] = {"seconds": [each for each, _ in found], "bytes": found[-1][1]}
            print(count, measured[str(count)])
    write(measured)


def write(measured: dict[str, dict[str, Any]]) -> None:
    """Write the result."""
    told = []
    for count, found in measured.items():
        found["seconds"] = spread(found["seconds"])
        seconds = found["seconds"]
        told.append(
            f"{int(count):,} step records: {seconds['median']:.2f} s of the processor ({seconds['minimum']:.2f} to "
            f"{seconds['maximum']:.2f}, {seconds['runs']} processes), {found['bytes'] / 1e6:.2f} MB"
        )
    lines = ["The first report of a process that has loaded torch.", "", *(f"- {line}" for line in told)]
    print(write_result("report-cost", {"by_records": measured}, lines))


if __name__ == "__main__":
    main()
