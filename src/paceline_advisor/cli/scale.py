"""`paceline scale`: what would more GPUs bring, and what would hold them back?"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import click

from paceline.cli.options import json_option, overrides_argument, recipe_argument, refuse_idle
from paceline.cli.output import echo, print_json, print_table
from paceline.cli.streams import ends_in_order
from paceline_advisor.cli.scaling_options import figure_options, read_asked, shown_hours, where_options

if TYPE_CHECKING:
    from paceline_advisor.scaling.study import Row, ScaleReport

_STRATEGIES: dict[str, tuple[Literal["ddp", "fsdp"], ...]] = {
    "both": ("ddp", "fsdp"),
    "ddp": ("ddp",),
    "fsdp": ("fsdp",),
}


def _sizes(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise click.BadParameter(f"{value!r} is no list of numbers of GPUs; give whole numbers, for example 1,2,4,8.")
    return tuple(sorted({int(part) for part in parts}))


@click.command("scale", short_help="Predict what more GPUs bring, and measure what can be measured here.")
@recipe_argument
@overrides_argument
@click.option(
    "--world-sizes",
    default="1,2,4,8",
    show_default=True,
    callback=_sizes,
    metavar="N,...",
    help="Numbers of GPUs; of processes, where there are none.",
)
@click.option(
    "--strategy", type=click.Choice(list(_STRATEGIES)), default="both", show_default=True, help="Which to predict."
)
@click.option(
    "--batch-per-gpu",
    type=click.IntRange(min=1),
    metavar="N",
    help="Give each GPU N samples, so that the step grows with their number (weak scaling), as published tables do. "
    "Without it the recipe's global batch is shared out (strong scaling).",
)
@where_options
@figure_options
@click.option("--measure", is_flag=True, help="Run the recipe here in these sizes too, and print what was predicted.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Turns of each measurement.")
@json_option
def command(
    recipe: str,
    overrides: tuple[str, ...],
    world_sizes: tuple[int, ...],
    strategy: str,
    batch_per_gpu: int | None,
    measure: bool,
    rounds: int,
    as_json: bool,
    **rest: Any,
) -> int:
    """Predict how RECIPE scales: samples per second, efficiency, hours and cost with DDP and FSDP.

    It takes one device's figure: yours (--throughput, --step-seconds), or measured here if the cluster is this
    machine or has its GPU, or else the bound that the GPU's peak and memory set, which is said. What others add is
    computed from the cluster's links, the network's layers and the host's work. The range is what comes of it if that
    costs half or twice as much, and the model errs as it did on average on tables it had not seen.

    \b
    Examples:
      paceline scale digits --world-sizes 1,2 --measure
      paceline scale resnet50 --cluster dgx-a100 --throughput 2470 --batch-per-gpu 256
      paceline scale resnet50 --cluster my-cluster.yaml --step-seconds 0.11 --one-gpu-batch 256 --world-sizes 8,64
    """
    from paceline_advisor.scaling.study import scale

    asked = replace(
        read_asked(recipe, overrides, batch_per_gpu, rest),
        sizes=world_sizes,
        strategies=_STRATEGIES[strategy],
        measure=measure,
        rounds=rounds,
    )
    if asked.figure.is_given and not measure:
        refuse_idle(click.get_current_context(), "rounds", "nothing is measured without --measure")
    # The user's code runs in this process, and may print.
    with ends_in_order(), contextlib.redirect_stdout(sys.stderr):
        report = scale(asked, lambda line: echo(line, err=True))
    if as_json:
        print_json(report.to_json())
    else:
        _show(report)
    return 0


def _show(report: ScaleReport) -> None:
    echo(f"{report.recipe} ({report.parameters:,} parameters, {report.precision}) on {report.cluster.title}")
    echo(f"  one device: {report.basis}")
    for notice in report.notices:
        echo(f"  note: {notice}")
    measured = any(row.measured is not None for row in report.rows)
    header = ("GPUs", "strategy", "batch", "passes", "samples/s", "range", "efficiency", "hours", "cost", "limited by")
    if report.cluster.shares_cores:
        header = ("processes", *header[1:])
    print_table(
        (*header, "measured", "error") if measured else header,
        [(*_row(row), *(_measured(row) if measured else ())) for row in report.rows],
    )
    if report.is_bound:
        echo(
            "  One GPU's rate cannot be beaten, nor so many times that by several; neither is to be expected: give one "
            "GPU's --throughput."
        )
    else:
        echo("  Predicted. The range: what more devices add costs half or twice as much, and the model errs by 8 %.")


def _row(row: Row) -> tuple[object, ...]:
    found = row.prediction
    low, high = found.samples / found.high_seconds, found.samples / found.low_seconds
    return (
        found.devices,
        row.strategy,
        f"{found.samples:,}",
        row.passes,
        _rate(found.rate),
        f"{_rate(low)} – {_rate(high)}",
        f"{found.efficiency:.1%}",
        shown_hours(row.hours),
        "" if row.cost is None else f"${row.cost:,.2f}",
        found.limit,
    )


def _measured(row: Row) -> tuple[object, ...]:
    if row.measured is None or row.error is None:
        return ("", "")
    return (_rate(row.measured.middle), f"{row.error:+.1%}")


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
