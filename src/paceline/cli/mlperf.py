"""`paceline mlperf`: write logs of runs in MLPerf's format."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.options import LocalPath, json_option
from paceline.cli.output import echo, print_json


@click.command("mlperf")
@click.argument("targets", nargs=-1, required=True, type=LocalPath(str), metavar="RUN... [KEY=VALUE]...")
@click.option(
    "--output",
    type=LocalPath(file_okay=False),
    metavar="FOLDER",
    help="Write result_0.txt, result_1.txt, … there (default: mlperf/result_0.txt in each run directory).",
)
@json_option
def command(targets: tuple[str, ...], output: Path | None, as_json: bool) -> int:
    """Write the log in MLPerf's format of each run directory RUN that has ended.

    The file is a log in MLPerf's format, as of its ResNet-50 in Training 4.0, and not an MLPerf result. Keys of
    telemetry.submission, such as telemetry.submission.org=NAME, add what the runs' recipes leave open.

    \b
    Examples:
      paceline mlperf runs/mine
      paceline mlperf runs/seed-* --output results
    """
    from paceline.recipe.mlperf import NOT_A_RESULT
    from paceline.records.run_directory import RunDirectory
    from paceline.telemetry.mlperf_log import write_mlperf_log

    overrides = [each for each in targets if "=" in each and not Path(each).exists()]
    runs = [Path(each) for each in targets if each not in overrides]
    if not runs:
        raise click.UsageError("name a run directory.")
    places = [None if output is None else output / f"result_{number}.txt" for number in range(len(runs))]
    if output is not None and (others := sorted({*output.glob("result_*.txt")} - {*places})):
        # MLPerf's checkers treat all logs of a folder as runs of one result.
        raise click.UsageError(f"'{others[0]}' belongs to other runs; name another --output, or remove it.")
    if twice := next((run for run in runs if runs.count(run) > 1), None):
        raise click.UsageError(f"'{twice}' is named twice; name each run once.")
    logs = [write_mlperf_log(RunDirectory(run), overrides, place) for run, place in zip(runs, places, strict=True)]
    if as_json:
        written = [{"run_dir": str(run), "log": str(log)} for run, log in zip(runs, logs, strict=True)]
        print_json({"runs": written, "note": NOT_A_RESULT})
    else:
        for log in logs:
            echo(str(log))
        echo(f"Each file is {NOT_A_RESULT}.")
    return 0
