"""`paceline prove`: does a recipe compute what it says, with the user's own task, network and data?"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import click

from paceline.cli.options import json_option, overrides_argument, recipe_argument
from paceline.cli.output import concluded, echo, open_console, print_json
from paceline.cli.streams import ends_in_order

if TYPE_CHECKING:
    from rich.table import Table

    from paceline_advisor.prove.study import ProveReport
    from paceline_advisor.prove.verdict import Check

_NARROWEST = 120


@click.command("prove", short_help="Prove that a recipe computes what it says, with your own task, network and data.")
@recipe_argument
@overrides_argument
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    metavar="N",
    help="Compare with a run of N processes; 1 leaves that out.",
)
@json_option
def command(recipe: str, overrides: tuple[str, ...], processes: int, as_json: bool) -> int:
    """Prove RECIPE: train it for a few steps in several ways, and hold them against plain PyTorch.

    One process with one batch a step, with micro-batches, and several processes must learn the same; the order of
    samples, learning rate, moving average, modes, dropout, buffers and metrics must be what the recipe says. It runs
    on the CPU, in float64 where the network can, in a temporary directory; nothing of yours is written. Exit code 1
    if a check failed.

    \b
    Examples:
      paceline prove digits
      paceline prove digits task=mine:MyTask --processes 4
      paceline prove image_folder data.path=photos --json
    """
    from paceline_advisor.prove.study import Asked, prove

    asked = Asked(recipe=recipe, overrides=overrides, processes=processes)
    # The user's code runs in this process, and may print.
    with ends_in_order(), contextlib.redirect_stdout(sys.stderr):
        report = prove(asked, lambda line: echo(line, err=True))
    code = concluded(passed=report.passed)
    if as_json:
        print_json(report.to_json())
    else:
        _show(report)
    return code


def _show(report: ProveReport) -> None:
    console = open_console()
    if not console.is_terminal:
        console.width = _NARROWEST
    from rich.markup import escape

    console.print(_table(report))
    for check in report.checks:
        if check.verdict == "failed":
            console.print(f"[bold]{check.name}[/bold]: {escape(check.advice)}")
    count = {kind: sum(check.verdict == kind for check in report.checks) for kind in ("passed", "failed")}
    left = len(report.checks) - sum(count.values())
    console.print(
        f"{count['passed']} passed, {count['failed']} failed, {left} not applicable: {report.steps} steps of "
        f"{report.global_batch} samples in {report.micro_batches} micro-batches, {report.processes} "
        f"process{'es' if report.processes > 1 else ''}, {report.numbers}, {report.seconds:.0f} s."
    )


def _table(report: ProveReport) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("difference", justify="right", no_wrap=True)
    table.add_column("limit", justify="right", no_wrap=True)
    table.add_column("what was compared")
    colours = {"passed": "green", "failed": "bold red", "not applicable": "dim"}
    for check in report.checks:
        verdict = f"[{colours[check.verdict]}]{check.verdict}[/]"
        table.add_row(check.name, verdict, _number(check.difference), _number(check.limit), escape(_said(check)))
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _said(check: Check) -> str:
    if check.verdict == "not applicable":
        return check.found
    return f"{check.compared}\n{check.found}" if check.found else check.compared
