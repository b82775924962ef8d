"""`paceline mlperf`: logs of runs in MLPerf's format, and whether the runs converge as the reference does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.options import LocalPath, json_option
from paceline.cli.output import concluded, echo, print_json, print_table

if TYPE_CHECKING:
    from paceline.formulas.convergence import Convergence
    from paceline.insight.convergence import ConvergenceCheck


@click.command("mlperf", short_help="Write logs of runs in MLPerf's format, and compare them with its reference.")
@click.argument("targets", nargs=-1, required=True, type=LocalPath(str), metavar="RUN-OR-LOG... [KEY=VALUE]...")
@click.option(
    "--output",
    type=LocalPath(file_okay=False),
    metavar="FOLDER",
    help="Write result_0.txt, result_1.txt, … there (default: mlperf/result_0.txt in each run directory).",
)
@click.option(
    "--reference",
    type=LocalPath(dir_okay=False),
    metavar="FILE.json",
    help="Reference points of your own, as MLPerf's checker reads them (default: those of ResNet-50 on ImageNet).",
)
@json_option
def command(targets: tuple[str, ...], output: Path | None, reference: Path | None, as_json: bool) -> int:
    """Write the log in MLPerf's format of each run directory RUN that has come to its end; a LOG is read as it is.

    What is written is a log in MLPerf's format, as of its ResNet-50 in Training 4.0, and not an MLPerf result. Keys of
    telemetry.submission, such as telemetry.submission.org=NAME, say what the runs' recipes leave open.

    Of three runs or more, the epochs to the target are compared with MLPerf's reference convergence points at their
    batch size. Exit code 1 if they converge faster than the reference's runs may, or there is nothing to compare with.

    \b
    Examples:
      paceline mlperf runs/mine
      paceline mlperf runs/seed-* --output results
      paceline mlperf runs/seed-* --reference points.json
      paceline mlperf results/result_*.txt
    """
    from paceline.insight.convergence import check_convergence
    from paceline.recipe.mlperf import NOT_A_RESULT

    overrides = [each for each in targets if "=" in each and not Path(each).exists()]
    logs = _logs([Path(each) for each in targets if each not in overrides], overrides, output)
    check = check_convergence(logs, reference)
    passed = check.found is None or check.found.passed
    code = concluded(passed=passed)
    if as_json:
        print_json({**check.to_json(), "note": NOT_A_RESULT})
    else:
        _show(check)
        echo(f"Each file is {NOT_A_RESULT}.")
    return code


def _logs(targets: Sequence[Path], overrides: Sequence[str], output: Path | None) -> list[Path]:
    from paceline.records.run_directory import RunDirectory
    from paceline.telemetry.mlperf_log import write_mlperf_log

    if not targets:
        raise click.UsageError("name a run directory, or a log in MLPerf's format.")
    places = [None if output is None else output / f"result_{number}.txt" for number in range(len(targets))]
    if output is not None and (others := sorted({*output.glob("result_*.txt")} - {*places})):
        # MLPerf's checkers take all of a folder for runs of one result.
        raise click.UsageError(f"'{others[0]}' is of other runs; name another --output, or remove it.")
    return [
        target if target.is_file() else write_mlperf_log(RunDirectory(target), overrides, place)
        for target, place in zip(targets, places, strict=True)
    ]


def _show(check: ConvergenceCheck) -> None:
    rows = [
        (
            str(run.path),
            "reached the target" if run.arrived else "did not reach it",
            f"{run.epochs:g}",
            f"{100 * run.accuracy:.2f} %",
            f"{run.seconds:.1f}",
        )
        for run in check.runs
    ]
    print_table(("log", "", "epochs", "top-1", "seconds"), rows, indent="")
    if check.found is not None:
        echo(_compared(check.found, check.runs[0].global_batch_size))
    if check.remark:
        echo(f"{'Note' if check.found else 'Not compared'}: {check.remark}.")


def _compared(found: Convergence, batch: int) -> str:
    if found.outcome == "too few arrived":
        return "Failed: more than one run did not reach the target."
    mean = f"{found.mean_epochs:.2f} epochs, the fastest and the slowest run left out"
    if found.point is None or found.outcome == "missing":
        return f"Failed: {mean}; there is no reference point for a batch of {batch}."
    points = {
        "found": f"the reference point of a batch of {batch}",
        "interpolated": f"the reference points around a batch of {batch}",
        "slower than the smallest": f"the smallest reference point, of a batch of {found.point.global_batch_size}",
    }
    told = f"{mean}; {points[found.outcome]}: {found.point.mean_epochs:.2f}, and at least {found.least_epochs:.2f}"
    if not found.passed:
        return f"Failed: {told}."
    faster = f" A time would be multiplied by {found.scaling:.4f}." if found.scaling > 1 else ""
    return f"Passed: {told}.{faster}"
