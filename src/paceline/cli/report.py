"""`paceline report`, `audit` and `mlperf`: a run directory as a page, a proof or a log."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click

from paceline.command import Log, Shape, command
from paceline.pages.shown import Document, Result, Shown


@command("report")
@dataclass(frozen=True, kw_only=True)
class Report:
    """Write one HTML page about runs, or print where step time went.

    The page shows curves, speed, memory, predictions, events and the recipe of the run directories RUN. The file is
    self-contained and loads nothing. The runs may be over, failed or under way; several are compared.

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
    timing: Annotated[bool, "Print where one run's step time went; write no page."] = False

    def run(self, _: Log) -> Result:
        """Write the page, or read the timing."""
        if not self.timing:
            from paceline.report.html.page import write_report

            return write_report(self.runs, self.output)
        if len(self.runs) > 1 or self.output is not None:
            raise click.UsageError("--timing prints the timing of one run and writes no page: give one RUN alone.")
        from paceline.report.attribution import attribute_run

        return attribute_run(self.runs[0])


@command("audit")
@dataclass(frozen=True, kw_only=True)
class Audit:
    """Prove that a run used each sample exactly once per epoch.

    The ledger in the run directory RUN records the samples that every process trained on. Exit code 1, with one
    sentence per problem, if a sample was repeated, left out, or used out of order.
    """

    run_dir: Annotated[Path, Shape(metavar="RUN")]

    def run(self, _: Log) -> Result:
        """Audit the run."""
        from paceline.report.audit import audit_run

        return audit_run(self.run_dir)


@command("mlperf")
@dataclass(frozen=True, kw_only=True)
class MlperfLogs:
    """Write the log in MLPerf's format of each run directory RUN that has ended.

    The file is a log in MLPerf's format, as of its ResNet-50 in Training 4.0, and not an MLPerf result. Keys of
    telemetry.submission, such as telemetry.submission.org=NAME, fill in what the runs' recipes leave open.

    Examples:
      paceline mlperf runs/mine
      paceline mlperf runs/seed-* --output results
    """

    targets: Annotated[tuple[str, ...], Shape(metavar="RUN... [KEY=VALUE]...", argument=True, path="local")]
    output: Annotated[
        Path | None,
        Shape(metavar="FOLDER", path="folder"),
        "Write result_0.txt, result_1.txt, … there (default: mlperf/result_0.txt in each run directory).",
    ] = None

    def run(self, _: Log) -> Result:
        """Write the logs."""
        from paceline.plan.mlperf import NOT_A_RESULT
        from paceline.records.run_directory import RunDirectory
        from paceline.telemetry.mlperf_log import write_mlperf_log

        overrides = [each for each in self.targets if "=" in each and not Path(each).exists()]
        runs = [Path(each) for each in self.targets if each not in overrides]
        if not runs:
            raise click.UsageError("name a run directory.")
        output = self.output
        paths = [None if output is None else output / f"result_{number}.txt" for number in range(len(runs))]
        if output is not None and (others := sorted({*output.glob("result_*.txt")} - {*paths})):
            # MLPerf's checkers treat all logs in a folder as runs of one result.
            raise click.UsageError(f"'{others[0]}' belongs to other runs; name another --output, or remove it.")
        if repeated := next((run for run in runs if runs.count(run) > 1), None):
            raise click.UsageError(f"'{repeated}' is named twice; name each run once.")
        logs = [write_mlperf_log(RunDirectory(run), overrides, path) for run, path in zip(runs, paths, strict=True)]
        written = [{"run_dir": str(run), "log": str(log)} for run, log in zip(runs, logs, strict=True)]
        return Document(
            document={"runs": written, "note": NOT_A_RESULT},
            shown=Shown(blocks=[*map(str, logs), f"Each file is {NOT_A_RESULT}."]),
        )
