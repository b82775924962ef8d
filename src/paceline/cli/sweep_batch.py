"""`paceline sweep-batch`: what does a larger batch bring, by real runs to a target?"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.ending import ends_in_order
from paceline.cli.options import LocalPath, json_option, overrides_argument, recipe_argument
from paceline.cli.output import concluded, echo, print_json, print_table
from paceline.units import Duration

if TYPE_CHECKING:
    from paceline.studies.batch_sweep.report import SweepReport

_RULES = ("constant", "linear", "sqrt", "tuned")


def _words(value: str) -> tuple[str, ...]:
    """Read a list with commas."""
    words = tuple(word.strip() for word in value.split(","))
    if twice := [word for word in words if words.count(word) > 1]:
        raise click.BadParameter(f"{value!r} names {twice[0]} twice; name each once.")
    return words


def _sizes(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    words = _words(value)
    if not all(word.isdecimal() and int(word) for word in words):
        raise click.BadParameter(f"{value!r} is no list of batch sizes; give whole numbers, for example 16,64,256.")
    return tuple(sorted(map(int, words)))


def _rules(_: click.Context, __: click.Parameter, value: str) -> tuple[str, ...]:
    words = _words(value)
    if wrong := [word for word in words if word not in _RULES]:
        raise click.BadParameter(f"{wrong[0]!r} is no rule; choose from {', '.join(_RULES)}.")
    return words


def _duration(_: click.Context, __: click.Parameter, value: str | None) -> Duration | None:
    try:
        return None if value is None else Duration.parse(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from error


@click.command("sweep-batch", short_help="Measure steps and samples to a target over batch sizes, and find the knee.")
@recipe_argument
@overrides_argument
@click.option("--batch-sizes", callback=_sizes, required=True, metavar="N,...", help="Global batch sizes.")
@click.option("--to", required=True, metavar="METRIC=VALUE", help="Where to get to: top1_accuracy=94.")
@click.option(
    "--lr-rules",
    callback=_rules,
    default="linear",
    show_default=True,
    metavar="NAME,...",
    help="How the rate follows the batch, from the recipe's own: constant, linear, sqrt, or tuned, which tries five.",
)
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each, a seed each.")
@click.option(
    "--max",
    "longest",
    callback=_duration,
    metavar="DURATION",
    help="End a run that is not there by then (default: the recipe's train.duration).",
)
@click.option("--processes", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks of each run.")
@click.option(
    "--output",
    type=LocalPath(),
    metavar="DIR",
    help="Write runs as they finish, and sweep-batch.json and .html; the same command there goes on.",
)
@json_option
def command(recipe: str, overrides: tuple[str, ...], batch_sizes: tuple[int, ...], as_json: bool, **chosen: Any) -> int:
    """Train RECIPE to a target with several batch sizes, and say what a larger batch brings.

    Each run is a training of its own in a scratch directory, until the first evaluation that is as good. Up to the
    knee a larger batch saves steps nearly in proportion, beyond it it costs samples: the law of both is fitted to the
    runs of each rule, and the knee printed with its interval. Runs that do not get there count as such.

    A schedule that ends with the run makes the steps depend on its length; with schedule.name=constant they do not.

    Exit code 1 if no run got there.

    \b
    Examples:
      paceline sweep-batch digits schedule.name=constant --batch-sizes 16,32,64,128,256 --to top1_accuracy=95
      paceline sweep-batch cifar10 data.path=cifar --batch-sizes 64,256,1024 --to top1_accuracy=90 \
          --lr-rules linear,sqrt --output sweep
    """
    from paceline.studies.batch_sweep.report import conclude
    from paceline.studies.batch_sweep.sweep import SweepAsked, sweep
    from paceline.studies.bench.report import check_folder
    from paceline.studies.bench.target import Target

    output: Path | None = chosen["output"]
    if output is not None:
        check_folder(output)
    asked = SweepAsked(
        recipe=recipe,
        overrides=overrides,
        target=Target.parse(chosen["to"]),
        batch_sizes=batch_sizes,
        rules=chosen["lr_rules"],
        seeds=chosen["seeds"],
        longest=chosen["longest"],
        processes=chosen["processes"],
        output=output,
    )
    with ends_in_order(), contextlib.redirect_stdout(sys.stderr):
        report = conclude(sweep(asked, lambda line: echo(line, err=True)))
    written: list[Path] = []
    if output is not None:
        from paceline.studies.batch_sweep.page import write_sweep

        written = write_sweep(output, report)
    code = concluded(passed=any(run.reached for run in report.runs))
    if as_json:
        print_json(report.to_json())
    else:
        _show(report)
        for path in written:
            echo(f"written: {path}")
    return code


def _show(report: SweepReport) -> None:
    from paceline.studies.batch_sweep.page import COLUMNS, table_rows
    from paceline.studies.batch_sweep.report import knee_in_words

    echo(f"{report.name} to {report.target}, {report.seeds} runs each")
    for rule in report.rules:
        echo(f"\n{rule.rule} rule: {knee_in_words(rule)}")
        print_table(COLUMNS, table_rows(rule))
    for note in report.notes:
        echo(f"  {note}")
