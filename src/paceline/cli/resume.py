"""`paceline resume`: resume a run with its recorded recipe, directory and processes."""

from __future__ import annotations

import contextlib
import os
import shlex
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import click

from paceline.cli.options import ProcessRange, is_launched_rank, rank_count
from paceline.cli.train import ChangingProcesses, MaxRestarts, Train, Until
from paceline.command import Overrides, Shape, command
from paceline.errors import RunDirectoryError
from paceline.machine import available_cores
from paceline.recipe.load import PATH_KEYS, load_recipe
from paceline.records.reader import read_environment, read_plan
from paceline.records.run_directory import RunDirectory, existing_run
from paceline.world import COMMAND_VARIABLE


@command("resume")
@dataclass(frozen=True, kw_only=True)
class Resume:
    """Resume RUN with its recipe, in its directory and with its number of processes.

    KEY=VALUE changes settings that may change during a run, such as train.duration. A complete run only says so. Under
    torchrun or Slurm, their processes are used.

    Examples:
      paceline resume runs/photos
      paceline resume runs/photos train.duration="40 epochs"
    """

    run: Annotated[Path, Shape(recipe=True)]
    overrides: Overrides = ()
    processes: ChangingProcesses = None
    max_restarts: MaxRestarts = 0
    until: Until = None

    def stream(self, *, as_json: bool) -> int:
        """Continue training in the run's directory."""
        directory, overrides, processes = existing_run(self.run.absolute()), self.overrides, self.processes
        max_restarts = self.max_restarts
        loaded = load_recipe(directory.root, overrides)  # code that it names is imported only with --trust-code
        # Relative paths are resolved here, wherever the run was started.
        overrides += tuple(each for each in loaded.overrides if each.partition("=")[0] in PATH_KEYS)
        environment: dict[str, Any] = {}
        with contextlib.suppress(RunDirectoryError):  # a damaged one is set aside when the run starts
            environment = read_environment(directory)
        arguments = ["paceline", "train", str(directory.root), "--run-dir", str(directory.root)]
        if not is_launched_rank(processes, max_restarts):
            command_line = str(environment.get("command", ""))
            # Options of a script that called paceline.train have other meanings.
            recorded = command_line.split() if " train " in command_line else []
            if processes is None:
                processes = _recorded_processes(directory, recorded)
            text = _option(recorded, "--max-restarts")
            max_restarts = max_restarts or (int(text) if text.isdecimal() else 0)
            count = f"{processes.lowest}:{processes.highest}" if isinstance(processes, ProcessRange) else str(processes)
            arguments += ["--processes", count, *(["--max-restarts", str(max_restarts)] if max_restarts else [])]
        train = Train(
            recipe=str(directory.root),
            overrides=overrides,
            run_dir=directory.root,
            processes=processes,
            max_restarts=max_restarts,
            until=self.until,
        )
        folder = Path(str(environment.get("directory", "")))
        os.environ[COMMAND_VARIABLE] = shlex.join(arguments)
        try:
            with contextlib.chdir(folder) if folder.is_absolute() and folder.is_dir() else contextlib.nullcontext():
                return train.stream(as_json=as_json)
        finally:
            del os.environ[COMMAND_VARIABLE]


def _recorded_processes(directory: RunDirectory, recorded: list[str]) -> int | ProcessRange:
    """Return the number of processes of the recorded command; by default the number that the run had.

    Raises:
        click.UsageError: If this machine has fewer cores.
    """
    with contextlib.suppress(ValueError):
        return rank_count(_option(recorded, "--processes"))
    size = int(read_plan(directory).get("world_size", 1))
    if size > available_cores():
        raise click.UsageError(
            f"the run was trained with {size} processes, and this machine has {available_cores()} cores; start them "
            "with torchrun or Slurm as before, or give --processes."
        )
    return size


def _option(words: list[str], name: str) -> str:
    """Return the value of an option among words; empty without it."""
    for word, following in pairwise([*words, ""]):
        if word == name or word.startswith(f"{name}="):
            return following if word == name else word.partition("=")[2]
    return ""
