"""`paceline find-batch`: the largest micro-batch that fits, found by trying."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.options import (
    LocalPath,
    choose_processes,
    json_option,
    overrides_argument,
    present_gpus,
    recipe_argument,
    study_processes_option,
    usable_gpus,
)
from paceline.cli.output import echo, print_json, print_pairs
from paceline.cli.streams import ends_in_order
from paceline.recipe.load import load_recipe, to_yaml
from paceline.units import format_bytes, format_count, parse_bytes

if TYPE_CHECKING:
    from paceline_advisor.memory.find_batch import FoundBatch


def _bytes(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from error


@click.command("find-batch", short_help="Find the largest micro-batch that this machine trains, by trying.")
@recipe_argument
@overrides_argument
@study_processes_option
@click.option(
    "--memory",
    callback=_bytes,
    metavar="SIZE",
    help="What each process may take, for example 4GiB (default: a whole GPU, or its share of the main memory that is "
    "free).",
)
@click.option(
    "--apply",
    "apply_to",
    type=LocalPath(dir_okay=False),
    metavar="FILE",
    help="Write the recipe with the micro-batch found.",
)
@json_option
def command(
    recipe: str,
    overrides: tuple[str, ...],
    processes: int | None,
    memory: int | None,
    apply_to: Path | None,
    as_json: bool,
) -> int:
    """Find the largest micro-batch of RECIPE that survives two whole steps and an evaluation on all ranks.

    Sizes are doubled and then bisected; each is a real run in processes of its own, with optimizer state and moving
    average, on a few samples that are repeated. The global batch and the learning rate stay: smaller micro-batches are
    added up. The estimate of `paceline estimate` is printed beside what was measured.

    \b
    Examples:
      paceline find-batch resnet50 data.path=IMAGENET
      paceline find-batch digits --processes 2 --memory 1GiB --apply smaller.yaml
    """
    from paceline_advisor.doctor.improving import check_new
    from paceline_advisor.memory.find_batch import find_batch

    if apply_to is not None:
        check_new(apply_to)
    loaded = load_recipe(recipe, overrides)
    gpus = usable_gpus(loaded.recipe.parallel.device, present_gpus()) if processes is None else 0
    count = choose_processes(processes, gpus, loaded.recipe).count
    with ends_in_order(), contextlib.redirect_stdout(sys.stderr):
        found = find_batch(loaded, processes=count, memory=memory, say=lambda line: echo(line, err=True))
    if apply_to is not None:
        apply_to.write_text(to_yaml(found.recipe), encoding="utf-8")
    if as_json:
        print_json({"recipe": loaded.name, **found.to_json()})
    else:
        _show(loaded.name, found, apply_to)
    return 0


def _show(name: str, found: FoundBatch, applied: Path | None) -> None:
    recipe = found.recipe
    limit = "all of its memory" if found.memory is None else f"{format_bytes(found.memory)} for each process"
    refused = "" if found.refused is None else f"; {format_count(found.refused)} do not"
    parts = found.accumulation_steps
    echo(f"Largest micro-batch of {name} on {found.device}, {limit}")
    lines = {
        "fits": f"{format_count(found.largest)} samples{refused}",
        "so set": f"batch.micro_size={found.micro_size}",
        "a step": f"{format_count(recipe.batch.global_size)} samples = {found.processes} "
        f"process{'es' * (found.processes > 1)} x {parts} micro-batch{'es' * (parts > 1)} x {found.micro_size}; the "
        f"global batch and the learning rate of {recipe.optimizer.lr:g} stay",
    }
    if found.measured is not None:
        lines["measured"] = f"{format_bytes(found.measured)} with {format_count(found.largest)} samples"
    if found.estimated is not None:
        error = "" if found.error is None else f", {100 * found.error:+.1f} % off"
        lines["estimated"] = f"{format_bytes(found.estimated)}{error}"
    elif found.why_not:
        lines["estimated"] = f"no: {found.why_not}"
    print_pairs(lines)
    if applied is not None:
        echo(f"\nWritten to {applied}.")
