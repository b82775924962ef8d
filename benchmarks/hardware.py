"""What did a benchmark run on? The facts every result file states."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.host.machine import available_cores, cpu_name

RESULTS = Path(__file__).parent / "results"
_LOAD_BEFORE = os.getloadavg()[0]  # at the import: a benchmark is a load itself from then on
_SOURCES = ("src", "benchmarks", ":!benchmarks/results")


def facts() -> dict[str, Any]:
    """Hardware, versions, revision, command and date."""
    return {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "cpu": cpu_name(),
        "vectors": torch.backends.cpu.get_cpu_capability(),  # one name may stand for processors of several kinds
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "load_average_before": _LOAD_BEFORE,
        "revision": _revision(),
        "command": " ".join(["python", *sys.argv]),
    }


def _revision() -> str:
    """The commit whose sources these are; ``+`` behind it if something of them was changed and not committed."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=RESULTS.parents[1])

    changed = git("status", "--porcelain", "--", *_SOURCES).stdout != ""
    return git("rev-parse", "--short", "HEAD").stdout.strip() + "+" * changed


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range of repeated measurements."""
    return {
        "runs": len(values),
        "median": statistics.median(values),
        "minimum": min(values),
        "maximum": max(values),
    }


def write_result(claim: str, result: dict[str, Any], lines: Sequence[str], known: dict[str, Any] | None = None) -> Path:
    """Write ``results/<claim>_<hardware>_<yyyy-mm>`` as JSON, and as Markdown for people.

    ``known`` are the :func:`facts` where they were taken before the measurement.
    """
    known = known or facts()
    hardware = "".join(
        c if c.isalnum() else "-" for c in str(known["device"] if known["device"] != "cpu" else known["cpu"])
    )
    name = f"{claim}_{hardware.strip('-').lower()}_{str(known['date'])[:7]}"
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"claim": claim, "facts": known, **result}, indent=2) + "\n")
    header = [f"# {claim}", "", *lines, "", *(f"- {key}: {value}" for key, value in known.items()), ""]
    path.with_suffix(".md").write_text("\n".join(header))
    return path
