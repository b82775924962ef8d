"""Options and arguments that several commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from paceline.distributed.environment import read_launch
from paceline.machine import available_cores

if TYPE_CHECKING:
    from paceline.recipe.schema import Recipe

json_option: Callable[[Any], Any] = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document on standard output and nothing else."
)
overrides_argument: Callable[[Any], Any] = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
processes_option: Callable[[Any], Any] = click.option(
    "--processes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Start N ranks on this machine (default: one per GPU, 1 on a CPU; `train` leaves out GPUs that cannot share "
    "the global batch evenly). Leave it out under torchrun or Slurm.",
)
weights_option: Callable[[Any], Any] = click.option(
    "--weights",
    type=click.Choice(["auto", "model", "ema"]),
    default="auto",
    show_default=True,
    help="Which set of weights; auto takes the moving average where there is one.",
)
best_option: Callable[[Any], Any] = click.option(
    "--best", is_flag=True, help="Use the best checkpoint of a run directory instead of the newest."
)
trust_code_option: Callable[[Any], Any] = click.option(
    "--trust-code", is_flag=True, help="Let the weights' own recipe import code of its own (package.module:factory)."
)


def is_first_process() -> bool:
    """Whether this process is the one that prints."""
    return read_launch(os.environ).world.is_first


@dataclass(frozen=True)
class Processes:
    """How many ranks a command is to start on this machine, and what the user should know of it."""

    count: int
    notice: str | None = None


def usable_gpus(asked: str, present: Mapping[str, int]) -> int:
    """GPUs that ``parallel.device`` can mean, 0 where it means none that several processes could share out.

    Args:
        asked: The recipe's value.
        present: Number of devices by kind, ``cuda`` and ``xpu``; ``auto`` takes the first kind there is.
    """
    if asked == "auto":
        return next((count for kind in ("cuda", "xpu") if (count := present.get(kind, 0))), 0)
    return present.get(asked, 0)


def choose_processes(asked: int | None, gpus: int, to_train: Recipe | None = None) -> Processes:
    """As many ranks as asked for, else one per GPU.

    Args:
        asked: What ``--processes`` says, if it says anything.
        gpus: What :func:`usable_gpus` found.
        to_train: A recipe whose global batch the ranks must share evenly; None where they only score samples.
    """
    if asked is not None:
        return Processes(asked)
    if to_train is None:
        return Processes(max(1, gpus))
    from paceline.recipe.batching import default_processes

    recipe, count = to_train, default_processes(to_train, gpus)
    if count >= gpus or recipe.parallel.strategy == "single":
        return Processes(count)
    sizes = f"batch.global_size={recipe.batch.global_size}"
    if recipe.batch.micro_size != "auto":
        sizes += f" in micro-batches of {recipe.batch.micro_size}"
    return Processes(count, f"{count} of {gpus} GPUs are used: no more of them can share {sizes} evenly")


def present_gpus() -> dict[str, int]:
    """Devices of the kinds that several processes can share out."""
    import torch

    return {"cuda": torch.cuda.device_count(), "xpu": torch.xpu.device_count()}


def is_one_of_several(processes: int | None) -> bool:
    """Whether this process was started as one of a world's: then it starts no others.

    Raises:
        click.UsageError: If it is, and is asked to.
    """
    if read_launch(os.environ).source == "alone":
        return False
    if processes is not None:
        raise click.UsageError(
            "--processes starts ranks of its own, but this process is one of several already; leave it out under "
            "torchrun or Slurm."
        )
    return True


def launch(processes: Processes, arguments: Sequence[str]) -> int | None:
    """Start several ranks and return their exit code; None means that one is enough: go on in this process."""
    if processes.count < 2:
        return None
    from paceline.distributed.local_launch import launch_local

    sys.stdout.flush()
    return launch_local(arguments, processes.count, cores=available_cores())
