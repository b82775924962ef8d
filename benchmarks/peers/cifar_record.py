"""In what time, and how accurately, does the public record's own program train on the same images?

The program (KellerJordan/cifar10-airbench, ``airbench94_muon.py``, MIT) is no part of this repository: give its path.
It runs as it is, on a GPU, in a folder where the images lie in the files that it would have made of its download; what
it prints for each run is read. Its first run warms up and is not counted.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from cifar import arrays

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
_COLUMNS = ["run", "epoch", "train_acc", "val_acc", "tta_val_acc", "time_seconds"]


def record(program: Path, source: Path, runs: int) -> dict[str, Any]:
    """What so many runs of the program print; it is ended after them.

    Raises:
        SystemExit: If it ends before, with the last of what it said, or prints another table.
    """
    with tempfile.TemporaryDirectory(prefix="cifar-record-") as folder:
        _files(source, Path(folder) / "cifar10")
        output: list[str] = []
        command = [sys.executable, "-u", str(program.resolve())]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env=dict(os.environ)
        ) as process:
            assert process.stdout is not None
            found = []
            try:
                for line in process.stdout:
                    output.append(line)
                    found = finished(output)
                    if len(found) >= runs:
                        break
            finally:
                process.kill()
        if len(found) < runs:
            sys.exit(f"{program} ended after {len(found)} of {runs} runs:\n{''.join(output[-12:])}")
    return {"program": program.name, "runs": found}


def finished(lines: Iterable[str]) -> list[dict[str, float]]:
    """Accuracy in percent and seconds of the runs in a table that the program prints, the one for warming up left out.

    The number of a run is in its first row only, and its result in the row of the epoch ``eval``.

    Raises:
        SystemExit: If the table has other columns: then it is another program's.
    """
    run, found = "", []
    for line in lines:
        cells = [each.strip() for each in line.strip().strip("|").split("|")]
        if cells[0] == "run" and cells != _COLUMNS:
            sys.exit(
                f"the program's table has the columns {', '.join(cells)}, not {', '.join(_COLUMNS)}: another program?"
            )
        if len(cells) != len(_COLUMNS):
            continue
        run = cells[0] or run
        if cells[1] == "eval" and run.isdecimal():
            found.append({"top1_accuracy": 100 * float(cells[4]), "seconds": float(cells[5])})
    return found


def summary_of_run(found: dict[str, Any]) -> list[str]:
    """For people."""
    accuracies = [each["top1_accuracy"] for each in found["runs"]]
    seconds = [each["seconds"] for each in found["runs"]]
    return [
        "",
        (
            f"The record's own program, {found['program']}, on the same machine and images, {len(seconds)} run(s) "
            f"after one to warm up: mean top-1 {statistics.mean(accuracies):.2f} %, {statistics.median(seconds):.2f} s "
            f"({min(seconds):.2f} to {max(seconds):.2f}) of whitening, steps and final scores."
        ),
    ]


def _files(source: Path, folder: Path) -> None:
    folder.mkdir()
    given = arrays(source)
    for split in ("train", "test"):
        images, labels = (torch.from_numpy(given[f"{split}_{part}"]) for part in ("images", "labels"))
        torch.save({"images": images, "labels": labels, "classes": CLASSES}, folder / f"{split}.pt")
