"""`paceline drill`: kills, full disks and torn files, tried on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from paceline.cli.options import json_option, overrides_argument, recipe_argument
from paceline.cli.output import concluded, echo, print_json, print_table
from paceline.cli.streams import ends_in_order

if TYPE_CHECKING:
    from paceline_advisor.drill.study import DrillReport, Trial


@click.command("drill", short_help="Disturb runs of a recipe in every way there is, and see that nothing is lost.")
@recipe_argument
@overrides_argument
@click.option(
    "--processes", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Ranks of a run."
)
@click.option("--steps", type=click.IntRange(min=1), default=40, show_default=True, help="Length of a run.")
@click.option("--only", metavar="NAME[,NAME]...", help="Try these faults only.")
@click.option("--keep", is_flag=True, help="Keep the scratch directory, and say where it is.")
@json_option
def command(
    recipe: str,
    overrides: tuple[str, ...],
    processes: int,
    steps: int,
    only: str | None,
    keep: bool,
    as_json: bool,
) -> int:
    """Drill RECIPE: kill, stop, starve and spoil short runs of it, and compare each with an undisturbed one.

    Everything happens in a temporary directory; nothing of yours is written. With several processes the runs are
    exact, so that their number may change. Exit code 1 if a fault cost anything.

    \b
    Examples:
      paceline drill digits
      paceline drill image_folder data.path=photos --processes 2
      paceline drill digits --only kill-all,disk-full --keep
    """
    from paceline_advisor.drill.study import Asked, drill

    names = tuple(name.strip() for name in only.split(",")) if only is not None else ()
    asked = Asked(recipe=recipe, overrides=overrides, processes=processes, steps=steps, only=names, keep=keep)
    with ends_in_order():
        report = drill(asked, lambda line: echo(line, err=True))
    code = concluded(passed=report.passed)
    if as_json:
        print_json(report.to_json())
    else:
        _show(report)
    return code


def _show(report: DrillReport) -> None:
    print_table(
        ("fault", "result", "exit", "steps again", "recovered in", "lost", "what it said"),
        [_row(trial) for trial in report.trials],
        indent="",
    )
    for trial in report.trials:
        if trial.reason:
            echo(f"{trial.fault} {trial.result}: {trial.reason}")
    count = {kind: sum(trial.result == kind for trial in report.trials) for kind in ("pass", "FAIL", "skipped")}
    echo(
        f"{count['pass']} passed, {count['FAIL']} failed, {count['skipped']} skipped: {report.steps} steps, "
        f"{report.processes} process{'es' if report.processes > 1 else ''}, {report.seconds:.0f} s."
    )
    if report.scratch is not None:
        echo(f"The runs are in {report.scratch}")


def _row(trial: Trial) -> tuple[object, ...]:
    if trial.exit_code is None:
        return (trial.fault, trial.result, "", "", "", "", "")
    seconds = "" if trial.seconds_to_recover is None else f"{trial.seconds_to_recover:.1f} s"
    again = "" if trial.steps_again is None else trial.steps_again
    lost = ", ".join(trial.lost) or "nothing"
    return (trial.fault, trial.result, trial.exit_code, again, seconds, lost, trial.message[:100])
