"""Options and arguments that several commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from paceline.distributed.environment import read_launch

json_option: Callable[[Any], Any] = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document on standard output and nothing else."
)
overrides_argument: Callable[[Any], Any] = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
processes_option: Callable[[Any], Any] = click.option(
    "--processes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Start N ranks on this machine (default: one per GPU, 1 on CPU). Leave it out under torchrun or Slurm.",
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


def launch_if_asked(processes: int | None, arguments: Sequence[str], *, device: str) -> int | None:
    """Start several ranks where that was asked, or where there are several GPUs; None means: go on in this process."""
    if read_launch(os.environ).source != "alone":
        if processes is not None:
            raise click.UsageError(
                "--processes starts ranks of its own, but this process is one of several already; leave it out under "
                "torchrun or Slurm."
            )
        return None
    count = processes if processes is not None else _gpu_count(device)
    if count < 2:
        return None
    from paceline.distributed.local_launch import launch_local

    sys.stdout.flush()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return launch_local(arguments, count, cores=cores)


def _gpu_count(device: str) -> int:
    if device not in ("auto", "cuda"):
        return 1
    import torch

    return torch.cuda.device_count()
