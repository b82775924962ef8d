"""Do the shipped language models, and the detector of shapes, reach what their recipes say, and in what time?

python benchmarks/text_accuracy.py [gpt-small-docs bert-tiny-docs] [--threads 2]
python benchmarks/text_accuracy.py shapes-maskrcnn                  # its result is called after it
python benchmarks/text_accuracy.py --trained runs/gpt runs/bert     # of runs that were trained already
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hardware import write_result

import paceline

# What the recipes' comments promise: the metric, and its worst value.
STATED = {
    "gpt-small-docs": ("bits_per_byte", 1.6),
    "bert-tiny-docs": ("masked_accuracy", 64.0),
    "shapes-maskrcnn": ("box_map", 35.0),
}
TEXTS = ["gpt-small-docs", "bert-tiny-docs"]


def of_run(name: str, run_dir: Path) -> dict[str, Any]:
    """What a finished run came to."""
    summary = json.loads((run_dir / "summary.json").read_text())
    plan = json.loads((run_dir / "plan.json").read_text())
    metric, stated = STATED[name]
    reached = summary["metrics"][metric]
    return {
        "recipe": name,
        "metric": metric,
        "stated": stated,
        "reached": reached,
        "holds": reached <= stated if metric == "bits_per_byte" else reached >= stated,
        "steps": summary["step"],
        "threads": plan["threads_per_process"],
        "training_seconds": summary["train_seconds"],
        "metrics": summary["metrics"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, compare and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=TEXTS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trained", nargs="+", type=Path, help="run directories, in the order of the recipes")
    parser.add_argument("--note", help="what else is to be known, for the result file")
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    rows = []
    for index, name in enumerate(options.recipes):
        if options.trained:
            rows.append(of_run(name, options.trained[index]))
            continue
        with tempfile.TemporaryDirectory() as scratch:
            overrides = {"parallel.threads": options.threads, "telemetry.trackers": []}
            paceline.train(name, overrides=overrides, run_dir=Path(scratch) / "run")
            rows.append(of_run(name, Path(scratch) / "run"))
    lines = [
        f"{row['recipe']}: {row['metric']} {row['reached']:.3f} (stated: {row['stated']:g}, "
        f"{'reached' if row['holds'] else 'MISSED'}) after {row['steps']} steps, {row['training_seconds']:.0f} s of "
        f"training on {row['threads']} thread(s)."
        for row in rows
    ]
    lines += [options.note] if options.note else []
    print("\n".join(lines))
    if not options.dry_run:
        name = "text-accuracy" if set(options.recipes) <= set(TEXTS) else f"accuracy-{options.recipes[0]}"
        print(write_result(name, {"measurements": rows}, lines))


if __name__ == "__main__":
    main()
