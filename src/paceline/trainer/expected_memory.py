"""Expected main memory of a run on a CPU: the one figure of `train`, `train --plan-only` and `estimate`.

The forecast measures it in processes that do nothing but the run. A run does so before its first step. The other
commands start the run's processes, which end after the forecast.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from paceline.command import Log
from paceline.errors import TrainingError
from paceline.host.machine import available_cores, cache_folder
from paceline.host.processes import ProcessGroup, without_rank_variables
from paceline.parsing.files import remember
from paceline.parsing.plain_text import load_json
from paceline.parsing.units import format_bytes, format_seconds
from paceline.recipe.load import to_yaml
from paceline.recipe.schema import Recipe
from paceline.records.reader import read_events
from paceline.records.run_directory import RunDirectory
from paceline.telemetry.clock import family_bytes, resident_bytes
from paceline.trainer.run_views import ProbedRun

FORECAST_ONLY = "PACELINE_FORECAST_ONLY"
"""Set for processes that end after the forecast of their run."""

# Largest difference of two measurements of one run: the kernel decides which pages of libraries are in memory.
_NOISE = 0.03
_LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class ExpectedMemory:
    """Expected peak of a run's main memory, in bytes.

    Attributes:
        each: Of its largest rank, with all pages that the rank has in memory, also of libraries.
        together: Of all ranks, their loader processes and their launcher; shared pages count once.
        ranks: Number of ranks.
    """

    each: int
    together: int
    ranks: int

    @classmethod
    def of_run(cls, run: ProbedRun, peak: int | None) -> Self | None:
        """Return the figure of a run from the expected peak of this rank; None if a rank has none. A collective.

        If another command has measured nearly the same for this recipe, its figure is returned.
        """
        found = run.collectives.gather((peak, (peak or 0) - resident_bytes()))
        is_alone, reads = run.world.world_size == 1, run.world.local_rank == 0
        families = run.collectives.gather(family_bytes(os.getpid() if is_alone else os.getppid()) if reads else 0)
        peaks = [each for each, _ in found if each is not None]
        if len(peaks) < len(found):
            return None
        together = sum(families) + sum(growth for _, growth in found)
        measured = cls(max(peaks), max(together, *peaks), len(peaks))
        return run.collectives.on_rank_zero(lambda: measured._agreed(run.recipe.without_mirror()))

    def _agreed(self, recipe: Recipe) -> Self:
        """Return the remembered figure of a recipe if it is the same but for noise, else remember this one."""
        key = sha256(f"{self.ranks} {to_yaml(recipe)}".encode()).hexdigest()[:16]
        path = cache_folder() / "memory" / f"{key}.json"
        with suppress(OSError, ValueError, TypeError):
            known = type(self)(**load_json(path.read_bytes()))
            if all(abs(value / getattr(self, name) - 1) <= _NOISE for name, value in vars(known).items()):
                return known
        remember(path, json.dumps(vars(self)).encode())
        return self

    @classmethod
    def from_record(cls, record: Mapping[str, Any], ranks: int) -> Self:
        """Read the record of a forecast."""
        return cls(record["expected_memory_bytes"], record["expected_total_memory_bytes"], ranks)

    def to_record(self) -> dict[str, float]:
        """Return the figures for the record of a forecast."""
        return {"expected_memory_bytes": self.each, "expected_total_memory_bytes": self.together}

    def in_words(self, noun: str = "") -> str:
        """Describe it, as part of a sentence."""
        each = f"{format_bytes(self.each)}{noun}" + " each" * (self.ranks > 1)
        return each if self.together == self.each else f"{each}, {format_bytes(self.together)} for all processes"


def forecast_apart(recipe: Recipe, processes: int, log: Log) -> dict[str, Any]:
    """Return the record of a run's forecast, made by processes that start as the run's do.

    Args:
        recipe: The run's recipe.
        processes: Its processes.
        log: Receives a line before they start, as they take seconds.

    Raises:
        TrainingError: If they fail, take too long, or make no forecast; or if they would be more than the cores here.
    """
    if processes > (cores := available_cores()):
        raise TrainingError(f"the run has {processes} processes, and this machine has {cores} cores")
    log("starting the run's processes, to measure their time and memory")
    with tempfile.TemporaryDirectory(prefix="paceline-") as scratch, ProcessGroup() as group:
        path, run_dir, said = (Path(scratch) / name for name in ("recipe.yaml", "run", "said"))
        path.write_text(to_yaml(recipe.without_mirror()), encoding="utf-8")
        arguments = ["train", str(path), "--run-dir", str(run_dir), "--processes", str(processes)]
        environment = {**without_rank_variables(os.environ), FORECAST_ONLY: "1"}
        child = group.start(
            [sys.executable, "-P", "-m", "paceline", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
        if group.wait(_LIMIT_SECONDS).reason == "time":
            raise TrainingError(f"the run's first passes took longer than {format_seconds(_LIMIT_SECONDS)}")
        if child.code:
            raise TrainingError(child.exit_message.removeprefix("paceline: "))
        events = read_events(RunDirectory(run_dir).events, kinds={"measurement"})
        found = next((event for event in events if event["what"] == "forecast"), None)
    if found is None:
        raise TrainingError("sharded runs, and those of several processes and fewer than 20 steps, are not measured")
    return found
