"""`paceline report` and `audit`: a run directory as a page or a proof."""

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

    The page shows curves, speed, memory, predictions, events and the recipe of the run directories RUN. The file is
    self-contained and loads nothing. The runs may be over, failed or under way; several are compared.

    --bundle writes instead a zip file for a bug report: recipe, plan, records and versions, without data, weights,
    secrets, or names of files and hosts. It lists them first.

    --timing prints instead how long each phase of a run's step takes, which ranks wait for which, and the bottleneck.

    Examples:
      paceline report runs/mine
      paceline report runs/small runs/large --output small-and-large.html
      paceline report runs/mine --timing
    """

    runs: Annotated[tuple[Path, ...], Shape(metavar="RUN...", argument=True)]
    output: Annotated[
        Path | None,
        Shape(metavar="FILE.html"),
        "The page (default: report.html in the run directory; in the current directory for several runs).",
    ] = None
    bundle: Annotated[bool, "Write a zip file for a bug report; write no page."] = False
    timing: Annotated[bool, "Print where one run's step time went; write no page."] = False

    def run(self, log: Log) -> Result:
        """Write the page or the bundle, or read the timing."""
        if self.bundle:
            if len(self.runs) > 1 or self.timing:
                raise click.UsageError("--bundle is for one run, without --timing: give one RUN alone.")
            from paceline.reports.bundle import write_bundle

            return write_bundle(self.runs[0], self.output, log)
        if not self.timing:
            from paceline.reports.html.page import write_report

            return write_report(self.runs, self.output)
        if len(self.runs) > 1 or self.output is not None:
            raise click.UsageError("--timing prints the timing of one run and writes no page: give one RUN alone.")
        from paceline.reports.attribution import attribute_run

        return attribute_run(self.runs[0])


@command("audit")
@dataclass(frozen=True, kw_only=True)
class Audit:
    """Prove that a run used each sample exactly once per epoch.

    The ledger in the run directory RUN records the samples that every process trained on. Exit code 1, with one
    sentence per problem, if a sample was repeated, left out, or used out of order.

    RUN may also be the folder of a paceline.ledger.Ledger, which another trainer's loop has written.
    """

    run_dir: Annotated[Path, Shape(metavar="RUN")]

    def run(self, _: Log) -> Result:
        """Audit the run."""
        from paceline.reports.audit import audit_run

        return audit_run(self.run_dir)
