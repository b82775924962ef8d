"""`paceline band`: hold a run's curves against those of other seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.options import LocalPath, json_option
from paceline.cli.output import echo, print_json, print_table
from paceline.units import format_bytes

if TYPE_CHECKING:
    from paceline.insight.bands.judge import Verdict


@click.group("band", short_help="Hold a run's curves against those of other seeds.")
def command() -> None:
    """A band says how far the curves of one recipe lie apart if only the seed differs; small recipes bring theirs.

    \b
    Examples:
      paceline band check runs/mine
      paceline band make runs/seed-* --output mine.band.json
      paceline band check runs/monday --band mine.band.json
    """


@command.command("make", short_help="Make a band of runs that differ by their seed.")
@click.argument("runs", type=LocalPath(), nargs=-1, required=True, metavar="RUN...")
@click.option("--output", "-o", type=LocalPath(dir_okay=False), required=True, help="The file, in JSON.")
@click.option("--name", default="", help="What the band is of (default: as the recipe is called).")
@json_option
def make(runs: tuple[Path, ...], output: Path, name: str, as_json: bool) -> int:
    """Make a band of five or more completed runs RUN of one recipe, each with a seed of its own.

    \b
    Examples:
      paceline band make runs/seed-* --output mine.band.json
    """
    from paceline.insight.bands.band import make_band, write_band

    band = make_band(runs, name)
    write_band(band, output)
    facts = {"file": str(output), "band": band.name, "runs": band.count, "limit": band.limit}
    facts["outside"] = [str(runs[at]) for at in band.outsiders]
    if as_json:
        print_json({**facts, "curves": [each.name for each in band.curves]})
    else:
        echo(f"{output}: {band.count} runs of {band.name}, {format_bytes(output.stat().st_size)}")
        for at in band.outsiders:
            echo(f"note: {runs[at]} would leave the band of the others; look at it before you rely on this one.")
    return 0


@command.command("check", short_help="Say where a run is outside a band.")
@click.argument("run", type=LocalPath())
@click.option(
    "--band",
    type=LocalPath(dir_okay=False),
    help="A file of `paceline band make` (default: the band that the recipe brings).",
)
@json_option
def check(run: Path, band: Path | None, as_json: bool) -> int:
    """Hold the run directory RUN, of a run that is over or under way, against a band. Exits with 0 either way.

    \b
    Examples:
      paceline band check runs/mine
      paceline band check runs/monday --band mine.band.json --json
    """
    from paceline.insight.bands.judge import check_run

    found = check_run(run, band)
    if as_json:
        print_json(found.to_json())
    else:
        _show(found)
    return 0


def _show(found: Verdict) -> None:
    if found.why_not:
        echo(f"Not compared: {found.why_not}.")
        return
    if found.departures:
        rows = [
            (
                each.curve,
                f"{each.first_step}-{each.last_step}",
                f"{each.value:.4g}",
                f"{each.low:.4g} to {each.high:.4g}",
            )
            for each in found.departures
        ]
        print_table(("curve", "steps", "this run", "band"), rows, indent="")
    inside = found.points - len(found.departures)
    echo(f"{inside} of {found.points} points are inside the band of {found.runs} runs of {found.band}.")
    if found.differences:
        echo(f"Other than theirs: {', '.join(found.differences)}")
