"""`paceline mlperf`: logs of runs in MLPerf's format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click

from paceline.command import Log, Shape, command
from paceline.pages.shown import Document, Result, Shown


@command("mlperf", group="More", place=6)
@dataclass(frozen=True, kw_only=True)
class MlperfLogs:
    """Write logs of runs in MLPerf's format.

    Each run directory RUN that has ended gets one: in MLPerf's format, as of its ResNet-50 in Training 4.0, and not an
    MLPerf result. Keys of telemetry.submission, such as telemetry.submission.org=NAME, fill in what the runs' recipes
    leave open.

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
        from paceline.records.run_directory import RunDirectory
        from paceline_ops.mlperf.log import write_mlperf_log
        from paceline_ops.mlperf.rules import NOT_A_RESULT

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
