"""Options and arguments that several commands share."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.distributed.environment import read_launch
from paceline.host.machine import available_cores
from paceline.plugins.references import trusting_code
from paceline.storage.cache import local_path

if TYPE_CHECKING:
    from paceline.distributed.local_launch import Restarts
    from paceline.recipe.schema import Recipe

json_option: Callable[[Any], Any] = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document on standard output and nothing else."
)


class LocalPath(click.Path):
    """A local path; ``~`` is the home directory, even if the shell does not expand it (``--run-dir=~/runs``)."""

    def __init__(self, path_type: type = Path, **checks: bool) -> None:
        super().__init__(path_type=path_type, **checks)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the absolute or relative path; an empty one, as from an unset variable, is refused."""
        if value == "":
            self.fail("the path is empty.", param, ctx)
        return super().convert(os.path.expanduser(value), param, ctx)


class WeightsPath(LocalPath):
    """Location of weights: a path, or the address of a file or hub folder, which is copied to this machine."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path.

        Raises:
            StorageError: If it is an address that cannot be downloaded.
        """
        if isinstance(value, str):
            value = local_path(value, key="TARGET")
        return super().convert(value, param, ctx)


class FiniteRange(click.FloatRange):
    """A number within a range. click's own type also accepts ``nan`` and ``inf``, which are useless here."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse the number.

        Raises:
            click.BadParameter: If it is not a number, not finite, or out of range.
        """
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


@dataclass(frozen=True)
class ProcessRange:
    """A number of ranks that may change: initially ``highest``, and at least ``lowest`` after failures."""

    lowest: int
    highest: int


def rank_count(text: str) -> int | ProcessRange:
    """Read ``N`` or ``MIN:MAX``.

    Raises:
        ValueError: If it has neither format.
    """
    match = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", text)
    if match is None or (match[2] and int(match[1]) > int(match[2])):
        raise ValueError(f"{text!r} is not a number of ranks; give at least 1, or MIN:MAX")
    return ProcessRange(int(match[1]), int(match[2])) if match[2] else int(match[1])


def _trust(context: click.Context, _: click.Parameter, value: bool) -> bool:  # the name that click calls
    context.meta[_TRUST] = value
    if value:
        context.with_resource(trusting_code())
    return value


_TRUST = "paceline.trust_code"
TRUST_CODE: dict[str, Any] = {
    "is_flag": True,
    "callback": _trust,
    "help": "Let the recipe inside a run or a weights file import code (package.module:factory).",
}
"""The option ``--trust-code``, which is acted on where a recipe is read."""


def refuse_unused(context: click.Context, name: str, reason: str) -> None:
    """Refuse an option that was typed and has no effect: a request is never ignored silently.

    Args:
        context: The command's context.
        name: The parameter's name.
        reason: The reason, in words.

    Raises:
        click.UsageError: If it was typed.
    """
    if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
        option = next(each.opts[0] for each in context.command.params if each.name == name)
        raise click.UsageError(f"{option} has no effect here: {reason}. Leave it out.", context)


def is_first_process() -> bool:
    """Whether this process is the one that prints."""
    return read_launch(os.environ).world.is_first


@dataclass(frozen=True)
class Processes:
    """The number of ranks that a command starts on this machine, and a notice for the user.

    Attributes:
        count: Number of ranks.
        notice: Why it is not what you might expect.
        fewer: Numbers that may continue after a failure, the largest first.
    """

    count: int
    notice: str | None = None
    fewer: tuple[int, ...] = ()


def usable_gpus(device: str) -> int:
    """Count the GPUs here that match a value of ``parallel.device``; 0 if processes cannot share them."""
    import torch

    present = {"cuda": torch.cuda.device_count(), "xpu": torch.xpu.device_count()}
    return next(filter(None, present.values()), 0) if device == "auto" else present.get(device, 0)


def choose_processes(requested: int | ProcessRange | None, recipe: Recipe) -> Processes:
    """Return the ranks of ``--processes``, else one per GPU; they must share the global batch evenly."""
    from paceline.plan.batching import default_processes, usable_processes

    if isinstance(requested, int):
        return Processes(requested)
    if isinstance(requested, ProcessRange):
        usable = usable_processes(recipe, requested.lowest, requested.highest)
        if not usable:
            return Processes(requested.highest)  # the plan refuses it, and names those that fit
        count, *fewer = usable
        notice = f"{count} of {requested.highest} processes are started: more cannot share the global batch evenly"
        return Processes(count, None if count == requested.highest else notice, tuple(fewer))
    gpus = usable_gpus(recipe.parallel.device)
    count = default_processes(recipe, gpus)
    if count >= gpus or recipe.parallel.strategy == "single":
        return Processes(count)
    sizes = f"batch.global_size={recipe.batch.global_size}"
    if recipe.batch.micro_size != "auto":
        sizes += f" in micro-batches of {recipe.batch.micro_size}"
    return Processes(count, f"{count} of {gpus} GPUs are used: more cannot share {sizes} evenly")


def is_launched_rank(processes: int | ProcessRange | None, max_restarts: int = 0) -> bool:
    """Whether this process is one of several ranks, and therefore starts no others.

    Raises:
        click.UsageError: If it is, and is also asked to start others.
    """
    if read_launch(os.environ).source == "alone":
        return False
    if max_restarts:
        raise click.UsageError(
            "--max-restarts is for ranks that Paceline starts itself, but this process is one of several already; give "
            "it to torchrun."
        )
    if processes is not None:
        raise click.UsageError(
            "--processes starts its own ranks, but this process is one of several already; leave it out under "
            "torchrun or Slurm."
        )
    return True


def launch(processes: Processes, arguments: Sequence[str], restarts: Restarts | None = None) -> int | None:
    """Start several ranks and return their exit code; None means that one is enough: continue in this process."""
    if processes.count < 2 and restarts is None:
        return None
    if click.get_current_context().meta.get(_TRUST) and "--trust-code" not in arguments:
        arguments = [*arguments, "--trust-code"]
    from paceline.distributed.local_launch import launch_local

    sys.stdout.flush()
    return launch_local(arguments, processes.count, cores=available_cores(), restarts=restarts)
