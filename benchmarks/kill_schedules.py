"""Does an exact run that is killed again and again, and goes on with fewer processes each time, keep its bits?

A run with everything that could lose its place (accumulation, augmentation, dropout, BatchNorm, bf16, a moving
average, loader processes, a ragged last step) is trained once by one process without a stop. Then, schedule by
schedule, four processes begin it anew and are all ended by SIGKILL, two go on and are killed, and one trains to the
end. The moments are drawn by lot: some time after a step drawn by lot, wherever the processes are by then, or while a
checkpoint is being written. Digests of weights and average, metrics, and every step and evaluation record without its
clock fields must be equal to those of the first run, and ``paceline audit`` must have no objection.

    python benchmarks/kill_schedules.py [--schedules 30] [--seed 0] [--steps 40] [--dry-run]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hardware import write_result
from resume import RECIPE, Launch, audit_problems, last_step, newest_checkpoint, outcome, row, write_photos

WORLDS = (4, 2, 1)
LONGEST_DELAY_SECONDS = 0.4  # several steps: the kill comes anywhere within one, or between
HEAD = ("schedule", "killed after step, of 4", "resumed by 2 from", "killed after step, of 2", "resumed by 1 from")


def is_saving(run: Path) -> bool:
    """Whether a checkpoint is being written."""
    try:
        return any(name.startswith(".saving-") for name in os.listdir(run / "checkpoints"))
    except FileNotFoundError:
        return False


def train(run: Path, processes: int) -> None:
    """Train to the end.

    Raises:
        RuntimeError: If that fails.
    """
    launch = Launch(run.parent, run, processes=processes)
    try:
        if launch.wait():
            raise RuntimeError(f"the run failed:\n{launch.log()}")
    finally:
        launch.end()


def kill_once(run: Path, processes: int, first: int, last: int, rng: random.Random) -> dict[str, Any]:
    """Train until a moment drawn by lot, and SIGKILL every process."""
    at, delay, in_save = rng.randint(first, last), rng.uniform(0, LONGEST_DELAY_SECONDS), rng.random() < 1 / 3
    launch = Launch(run.parent, run, processes=processes)
    try:
        launch.wait_for(lambda: last_step(run) >= at)
        if in_save:
            launch.wait_for(lambda: is_saving(run))
        else:
            time.sleep(delay)
    finally:
        launch.end()
    return {"step": last_step(run), "in_save": is_saving(run), "newest": newest_checkpoint(run)}


def schedule(run: Path, steps: int, expected: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Four processes, two, and one to the end."""
    kills = [
        kill_once(run, WORLDS[0], 1, steps // 2, rng),
        kill_once(run, WORLDS[1], steps // 2, steps - 10, rng),
    ]
    train(run, WORLDS[2])
    found, objections = outcome(run), audit_problems(run)
    differs = [key for key in expected if found[key] != expected[key]]
    return {"kills": kills, "differs_in": differs, "audit_objections": objections, "equal": not differs + objections}


def table_row(number: int, found: dict[str, Any]) -> str:
    """A schedule as a line of the table."""
    cells: list[object] = [number]
    for kill in found["kills"]:
        cells += [f"{kill['step']}{', in a save' if kill['in_save'] else ''}", kill["newest"]]
    differs = ", ".join(found["differs_in"] + found["audit_objections"])
    return row((*cells, "yes" if found["equal"] else f"no: {differs}"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the schedules, write the result files; 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of the lots")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    rng = random.Random(options.seed)
    table = [row((*HEAD, "equal")), row(["---"] * (len(HEAD) + 1))]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="schedules-") as scratch:
        studio = Path(scratch)
        write_photos(studio / "photos")
        recipe = {
            **RECIPE,
            "train": {**RECIPE["train"], "duration": f"{options.steps} steps"},
            "checkpoint": {"every": "3 steps"},
            "parallel": {**RECIPE["parallel"], "exact": True},
        }
        (studio / "recipe.yaml").write_text(json.dumps(recipe))
        train(studio / "undisturbed", 1)
        expected = outcome(studio / "undisturbed")
        print("\n".join(table), flush=True)
        for number in range(1, options.schedules + 1):
            found.append(schedule(studio / f"schedule-{number}", options.steps, expected, rng))
            table.append(table_row(number, found[-1]))
            print(table[-1], flush=True)
    equal = sum(one["equal"] for one in found)
    kills = [kill for one in found for kill in one["kills"]]
    line = (
        f"{equal} of {len(found)} exact runs of {options.steps} steps ended bit for bit as the undisturbed run of one "
        "process: begun by four processes, killed at a moment drawn by lot, gone on with by two, killed again, and "
        f"finished by one; {sum(kill['in_save'] for kill in kills)} of {len(kills)} kills came in the middle of a save."
    )
    print(f"\n{line}")
    if not options.dry_run:
        print(write_result("kill-schedules", {"recipe": recipe, "schedules": found}, [line, "", *table]))
    return int(equal < len(found))


if __name__ == "__main__":
    sys.exit(main())
