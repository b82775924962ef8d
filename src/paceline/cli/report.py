"""`paceline report`: one page about a run or several compared, or where the time of a run's steps went."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click

from paceline.command import Log, Shape, command
from paceline.pages.shown import Result


@command("report")
@dataclass(frozen=True, kw_only=True)
class Report:
    """Write one HTML page about runs, or print where step time went.

    The page shows what the run directories RUN tell: curves, speed, memory, predictions, events, recipe. The file holds
    all it needs and loads nothing. The runs may be over, failed or under way; several are compared.

    --timing prints instead how long each phase of a run's step takes, who waits for whom, and what holds it back.

    Examples:
      paceline report runs/mine
      paceline report runs/small runs/large --output small-and-large.html
      paceline report runs/mine --timing
    """

    runs: Annotated[tuple[Path, ...], Shape(metavar="RUN...", argument=True)]
    output: Annotated[
        Path | None,
        Shape(metavar="FILE.html"),
        "The page (default: report.html in the run directory; here, if there are several runs).",
    ] = None
    timing: Annotated[bool, "Print where the time of one run's steps went; write no page."] = False

    def run(self, _: Log) -> Result:
        """Write the page, or read the timing."""
        if not self.timing:
            from paceline.report.html.page import write_report

            return write_report(self.runs, self.output)
        if len(self.runs) > 1 or self.output is not None:
            raise click.UsageError("--timing prints the timing of one run and writes no page: give one RUN alone.")
        from paceline.report.attribution import attribute_run

        return attribute_run(self.runs[0])
