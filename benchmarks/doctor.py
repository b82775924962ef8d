"""Is what the doctor says a change is worth still so when it is measured again? On this machine, for planted mistakes.

    python benchmarks/doctor.py [--rounds N]

Each recipe has a mistake for which a change of the recipe is proposed. All changes are measured, and then once more in
other processes. A gain is confirmed if the second one lies in the interval of the first.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hardware import write_result
from PIL import Image

from paceline_advisor.commands import Doctor
from paceline_advisor.doctor.findings import Gain
from paceline_advisor.doctor.study import examine, measure

WIDE = (
    *("model.name=small_resnet", "model.options={width: 32, stages: 2}", "data.image_size=32", "data.classes=10"),
    *("batch.global_size=8", "telemetry.log_every=10 steps"),
)
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "fp32": ("synthetic", (*WIDE, "train.precision=fp32")),
    "channels first": ("synthetic", (*WIDE, "model.channels_last=false")),
    "a record for every step": (
        "digits",
        ("model.options={width: 4, stages: 1}", "batch.global_size=16", "telemetry.log_every=1 step"),
    ),
    "no loader processes": (
        "image_folder",
        ("data.workers=0", "data.image_size=64", "model.name=small_resnet", "batch.global_size=16"),
    ),
}


def folder(root: Path) -> Path:
    """Photographs are costly to decode: smooth noise of 400 pixels, as JPEG."""
    noise = np.random.default_rng(0)
    for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (root / name).mkdir(parents=True)
        for number in range(64):
            small = noise.integers(0, 256, (50, 50, 3), dtype=np.uint8)
            Image.fromarray(small).resize((400, 400), Image.Resampling.BICUBIC).save(root / name / f"{number}.jpg")
    return root


def confirm(name: str, command: Doctor, **pace: Any) -> list[dict[str, Any]]:
    """Measure a recipe's changes twice."""
    diagnosis = examine(command, lambda _: None)
    first, second = (measure(diagnosis, lambda line: print(f"  {line}", file=sys.stderr), **pace) for _ in range(2))
    again = {each.name: each.gain for each in second.findings}
    rows = []
    for finding in first.findings:
        gain, repeated = finding.gain, again[finding.name]
        if gain is None or repeated is None:
            continue
        rows.append(
            {
                "case": name,
                "finding": finding.name,
                "gain": vars(gain),
                "again": vars(repeated),
                "inside": gain.low <= repeated.middle <= gain.high,
                "overlap": _overlap(gain, repeated),
                "expected": finding.expected,
            }
        )
    return rows


def _overlap(one: Gain, other: Gain) -> bool:
    return max(one.low, other.low) <= min(one.high, other.high)


def main() -> None:
    """Measure all cases and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--block-seconds", type=float, default=2.0)
    chosen = parser.parse_args()
    pace = {"rounds": chosen.rounds, "block_seconds": chosen.block_seconds}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        photos = folder(Path(scratch) / "photos")
        for name, (recipe, overrides) in CASES.items():
            print(name, file=sys.stderr)
            path = (f"data.path={photos}",) if recipe == "image_folder" else ()
            rows += confirm(name, Doctor(recipe=recipe, overrides=(*overrides, *path)), **pace)
    inside = sum(row["inside"] for row in rows)
    lines = [
        f"{inside} of {len(rows)} gains, measured again, lie in the interval of the first measurement.",
        "",
        "| planted | change for | gain | interval | again | inside | expected |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        gain, again = row["gain"], row["again"]
        lines.append(
            f"| {row['case']} | `{row['finding']}` | {gain['middle']:.3f} | {gain['low']:.3f} to {gain['high']:.3f} | "
            f"{again['middle']:.3f} | {'yes' if row['inside'] else 'no'} | {row['expected']} |"
        )
    print("\n".join(lines))
    path = write_result("doctor", {"rounds": chosen.rounds, "rows": rows}, lines)
    print(path)


if __name__ == "__main__":
    main()
