"""`paceline report`: one page to look at, of a run or of several beside one another."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.options import LocalPath, json_option
from paceline.cli.output import echo, print_json
from paceline.units import format_bytes


@click.command("report", short_help="Write one HTML page about a run, or several compared, that opens offline.")
@click.argument("runs", type=LocalPath(), nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--output",
    type=LocalPath(dir_okay=False),
    metavar="FILE.html",
    help="The page (default: report.html in the run directory; here, if there are several runs).",
)
@json_option
def command(runs: tuple[Path, ...], output: Path | None, as_json: bool) -> int:
    """Write what the run directories RUN tell as one HTML file: curves, speed, memory, predictions, events, recipe.

    The file holds all it needs and loads nothing. The runs may be over, failed or under way; several are compared.

    \b
    Examples:
      paceline report runs/mine
      paceline report runs/small runs/large --output small-and-large.html
    """
    from paceline.report.html.page import write_report

    report = write_report(runs, output)
    if as_json:
        print_json(report.to_json())
    else:
        echo(f"{report.path} ({format_bytes(report.path.stat().st_size)})")
    return 0
