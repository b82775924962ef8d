"""How long until the first optimizer step, beside a plain script that imports torch and does the same?

Both start as fresh processes, in turns. The clock runs from the start of the process to the end of the first
optimizer step: imports, reading the embedded digits, building the network, one step. Paceline also reads its
recipe, makes its plan, its run directory and its records. The plain script reads the digits' file directly, as
Paceline does; through scikit-learn's own loader it would start later.

    python benchmarks/startup.py [--runs 9]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hardware import spread, write_result

PLAIN = """
import gzip, importlib.util, pathlib, sys, time
import numpy as np
import torch
import torch.nn.functional as F
from paceline.models.small_resnet import small_resnet
from json import loads

settings = loads(sys.argv[1])
folder = pathlib.Path(importlib.util.find_spec("sklearn").submodule_search_locations[0])
with gzip.open(folder / "datasets" / "data" / "digits.csv.gz") as file:
    table = np.loadtxt(file, delimiter=",")
images = torch.from_numpy(table[:, :-1].reshape(-1, 1, 8, 8).astype(np.float32) / 16)
labels = torch.from_numpy(table[:, -1].astype(np.int64))
torch.manual_seed(0)
model = small_resnet(num_classes=10, in_channels=1, **settings["options"]).to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
ids = torch.randperm(len(images))[: settings["batch"]]
loss = F.cross_entropy(model(images[ids].contiguous(memory_format=torch.channels_last)), labels[ids])
loss.backward()
optimizer.step()
print(time.time())
"""


def plain_seconds(settings: str) -> float:
    """Seconds to the plain script's first step."""
    started = time.time()
    done = subprocess.run([sys.executable, "-c", PLAIN, settings], capture_output=True, text=True, check=True)
    return float(done.stdout) - started


def own_seconds() -> float:
    """Seconds to Paceline's first step, by the time in its first step record."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        overrides = [
            "train.duration=1 steps",
            "evaluate.every=off",
            "telemetry.log_every=1 steps",
            "schedule.warmup=null",
        ]
        started = time.time()
        subprocess.run(
            [sys.executable, "-m", "paceline", "train", "digits", *overrides, "--run-dir", str(run)],
            capture_output=True,
            check=True,
        )
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return float(next(event["time"] for event in events if event["event"] == "step")) - started


def digits_settings() -> str:
    """What the plain script must know of the recipe: batch size and network options."""
    from paceline.recipe.load import load_recipe

    recipe = load_recipe("digits").recipe
    return json.dumps({"batch": recipe.batch.global_size, "options": recipe.model.options})


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    settings = digits_settings()
    own_seconds(), plain_seconds(settings)  # fills the file cache
    pairs = [(own_seconds(), plain_seconds(settings)) for _ in range(options.runs)]
    ratio, own, plain = (
        spread([a / b for a, b in pairs]),
        spread([a for a, _ in pairs]),
        spread([b for _, b in pairs]),
    )
    line = (
        f"First optimizer step of digits after {ratio['median']:.3f} times the plain script's time (median "
        f"of {ratio['runs']} pairs, {ratio['minimum']:.2f} to {ratio['maximum']:.2f}; the plain "
        f"script takes {plain['median']:.1f} s)."
    )
    print(line)
    if not options.dry_run:
        print(write_result("first-step", {"ratio": ratio, "own_seconds": own, "plain_seconds": plain}, [line]))


if __name__ == "__main__":
    main()
