"""`paceline resume`: resume a run with its recorded recipe, directory and processes."""

from __future__ import annotations

import contextlib
import os
import shlex
from functools import reduce
from pathlib import Path
from typing import Any

import click

from paceline.cli.options import (
    Between,
    LocalPath,
    changing_processes_option,
    is_one_of_several,
    json_option,
    max_restarts_option,
    overrides_argument,
    rank_count,
    trust_recipe_option,
    until_option,
)
from paceline.cli.train import command as train
from paceline.errors import RunDirectoryError
from paceline.machine import available_cores
from paceline.recipe.load import PATH_KEYS, load_recipe
from paceline.records.reader import read_environment, read_plan
from paceline.records.run_directory import RunDirectory, existing_run
from paceline.world import COMMAND_VARIABLE


@click.command("resume")
@click.argument("run", type=LocalPath())
@overrides_argument
@changing_processes_option
@max_restarts_option
@until_option
@trust_recipe_option
@json_option
def command(
    run: Path, overrides: tuple[str, ...], processes: int | Between | None, max_restarts: int, as_json: bool
) -> int:
    """Resume RUN with its recipe, in the directory and with the processes that it was started with.

    KEY=VALUE changes what may change during a run, such as train.duration. A complete run says so. Under torchrun or
    Slurm, the processes are those found there.

    \b
    Examples:
      paceline resume runs/photos
      paceline resume runs/photos train.duration="40 epochs"
    """
    directory = existing_run(run.absolute())
    loaded = load_recipe(directory.root, overrides)  # what it names is imported with --trust-code only
    # A path means what it means here, wherever the run was started.
    for key, origin in loaded.origins.items():
        if key in PATH_KEYS and origin == "override":
            overrides += (f"{key}={reduce(getattr, key.split('.'), loaded.recipe)}",)
    environment: dict[str, Any] = {}
    with contextlib.suppress(RunDirectoryError):  # a damaged one is set aside when the run begins
        environment = read_environment(directory)
    words = ["paceline", "train", str(directory.root), "--run-dir", str(directory.root)]
    if not is_one_of_several(processes, max_restarts):
        recorded = str(environment.get("command", "")).split()
        if processes is None:
            processes = _recorded_processes(directory, recorded)
        text = _option(recorded, "--max-restarts")
        max_restarts = max_restarts or (int(text) if text.isdecimal() else 0)
        count = f"{processes.lowest}:{processes.highest}" if isinstance(processes, Between) else str(processes)
        words += ["--processes", count, *(["--max-restarts", str(max_restarts)] if max_restarts else [])]
    place = Path(str(environment.get("directory", "")))
    os.environ[COMMAND_VARIABLE] = shlex.join(words)
    try:
        with contextlib.chdir(place) if place.is_absolute() and place.is_dir() else contextlib.nullcontext():
            code: int = click.get_current_context().invoke(
                train,
                recipe=str(directory.root),
                overrides=overrides,
                run_dir=directory.root,
                processes=processes,
                max_restarts=max_restarts,
                as_json=as_json,
            )
            return code
    finally:
        del os.environ[COMMAND_VARIABLE]


def _recorded_processes(directory: RunDirectory, recorded: list[str]) -> int | Between:
    """The processes of the recorded command; where it does not say, as many as the run had.

    Raises:
        click.UsageError: If this machine has fewer cores.
    """
    with contextlib.suppress(click.BadParameter):
        return rank_count(_option(recorded, "--processes"))
    size = int(read_plan(directory).get("world_size", 1))
    if size > available_cores():
        raise click.UsageError(
            f"the run was trained by {size} processes, and this machine has {available_cores()} cores; start them by "
            "torchrun or Slurm as before, or give --processes."
        )
    return size


def _option(words: list[str], name: str) -> str:
    """The value of an option among words; empty if it is not there."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == name or word.startswith(f"{name}="):
            return after if word == name else word.partition("=")[2]
    return ""
