"""`paceline doctor`: what holds a run back, with evidence, and what each change is worth."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import LocalPath, json_option, overrides_argument, recipe_argument, refuse_idle
from paceline.cli.output import concluded, echo, open_console, print_json
from paceline.cli.streams import ends_in_order
from paceline.recipe.load import load_recipe

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.recipe.schema import Recipe
    from paceline_advisor.doctor.findings import Finding
    from paceline_advisor.doctor.improving import Improved
    from paceline_advisor.doctor.study import Diagnosis

_COLOURS = {"breaks": "bold red", "slows": "yellow", "spoils": "magenta", "notice": "cyan"}
_MOST_PLACES = 5


@click.command("doctor", short_help="Find what holds a run back, and measure what each change is worth.")
@recipe_argument
@overrides_argument
@click.option(
    "--device", metavar="NAME", help="Judge for this device (a100, t4, cpu, …), also where it is not; default: here."
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Judge a run of N processes; default: 1, or 2 where parallel.strategy needs several.",
)
@click.option("--measure", "measured", is_flag=True, help="Measure the gain of each change, in short bursts in turns.")
@click.option(
    "--rounds", type=click.IntRange(min=4), default=8, show_default=True, help="Turns of each change with --measure."
)
@click.option(
    "--apply",
    "improved",
    type=LocalPath(dir_okay=False),
    metavar="FILE",
    help="Write the recipe with the changes that train the same thing and go together; with --measure, those that "
    "gained.",
)
@json_option
def command(
    recipe: str,
    overrides: tuple[str, ...],
    device: str | None,
    processes: int | None,
    measured: bool,
    rounds: int,
    improved: Path | None,
    as_json: bool,
) -> int:
    """Examine RECIPE, or the run of a run directory: which mistakes make it slow or spoil it?

    Looked at are the recipe and its plan, the network's modules on tensors without content, and what your own code
    does in one micro-batch of a few samples, on the CPU; pictures with objects are shown small there. Each finding has
    its evidence (values, layers, lines of code), the reason with its source, and what to change. Nothing is trained,
    written or changed, but FILE.

    Exit code 1 if something breaks, slows or spoils a run, 0 if not.

    \b
    Examples:
      paceline doctor digits
      paceline doctor resnet50 --device a100
      paceline doctor mine.yaml data.workers=4 --measure --apply better.yaml
    """
    from paceline_advisor.doctor.improving import check_new, write_improved
    from paceline_advisor.doctor.measuring import Pace, measure
    from paceline_advisor.doctor.study import Asked, examine

    if improved is not None:
        check_new(improved)
    if measured and device is not None and not _runs_here(device, load_recipe(recipe, overrides).recipe):
        raise click.UsageError(
            f"--measure measures on the device that is here, not on '{device}'; leave one of them out."
        )
    if not measured:
        refuse_idle(click.get_current_context(), "rounds", "it is for --measure")
    # What is measured is the run as it would be here.
    asked = Asked(recipe=recipe, overrides=overrides, device=None if measured else device, processes=processes)
    # The user's code runs in this process, and may print.
    with ends_in_order(), contextlib.redirect_stdout(sys.stderr):
        diagnosis = examine(asked, lambda line: echo(line, err=True))
        if measured:
            diagnosis = measure(diagnosis, Pace(rounds=rounds), lambda line: echo(line, err=True))
        made = None if improved is None else write_improved(improved, diagnosis, measured=measured)
    code = concluded(passed=diagnosis.is_healthy)
    if as_json:
        print_json(diagnosis.to_json() | _applied(made))
    else:
        _show(diagnosis)
        _show_applied(improved, made, "no change was measured to gain" if measured else "there is no change to make")
    return code


def _runs_here(device: str, recipe: Recipe) -> bool:
    """Whether a named device is the one that a run would take."""
    from paceline_advisor.doctor.target import choose_target

    here, named = choose_target(None, recipe), choose_target(device, recipe)
    return (here.machine.device, here.device) == (named.machine.device, named.device)


def _show(diagnosis: Diagnosis) -> None:
    console = open_console(soft_wrap=True)
    console.print(
        f"{diagnosis.recipe} on {diagnosis.device}{'' if diagnosis.is_here else ' (not here: predictions)'}: "
        f"{diagnosis.precision}, {diagnosis.global_batch} samples a step"
        f"{f' on {diagnosis.processes} processes' if diagnosis.processes > 1 else ''}",
        markup=False,
    )
    for finding in diagnosis.findings:
        _show_finding(console, finding)
    for what, why in diagnosis.unseen.items():
        console.print(f"not seen: {what}: {why}", markup=False)
    count = sum(finding.counts for finding in diagnosis.findings)
    left = len(diagnosis.findings) - count
    found = f"{count} finding{'s' * (count > 1)}" if count else "no bottleneck found"
    found += f", {left} of notice or without gain" if left else ""
    console.print(
        f"{found}: {diagnosis.checks} checks in {1e3 * diagnosis.check_seconds:.0f} ms, "
        f"{diagnosis.seconds:.1f} s with what they look at."
    )


def _show_finding(console: Console, finding: Finding) -> None:
    from rich.markup import escape

    colour = _COLOURS[finding.severity]
    console.print(f"[{colour}]{finding.severity:<6}[/]  [bold]{finding.name}[/]: {escape(finding.evidence)}")
    # Evidence names the first places itself.
    for place in [each for each in finding.places[:_MOST_PLACES] if str(each) not in finding.evidence]:
        console.print(f"        at {place}", markup=False)
    console.print(f"        {finding.why} ({finding.source})", markup=False)
    console.print(f"        change: {finding.advice.words}{_kept(finding)}", markup=False)
    if finding.gain is None:
        # What is said of sizes says itself that it is a prediction.
        label = "" if finding.expected.startswith("predicted: ") else "expected, not measured: "
        console.print(f"        {label}{finding.expected}", markup=False)
    else:
        label = "measured: " if finding.gain.is_certain else ""  # no gain says itself that it was measured
        console.print(f"        {label}{finding.gain}; expected was: {finding.expected}", markup=False)


def _kept(finding: Finding) -> str:
    return {"same": "", "rounding": " [the numbers round otherwise]", "training": " [trains something else]"}[
        finding.advice.keeps
    ]


def _applied(made: Improved | None) -> dict[str, Any]:
    if made is None:
        return {"applied": [], "left_out": {}, "changes": []}
    return {"applied": [each.name for each in made.met], "left_out": made.left_out, "changes": made.lines}


def _show_applied(path: Path | None, made: Improved | None, why_not: str) -> None:
    if path is None or made is None:
        return
    for name, why in made.left_out.items():
        echo(f"not changed: {name}: {why}")
    if not made.met:
        echo(f"{path} was not written: {why_not}")
        return
    echo(f"{path}: the recipe with {', '.join(each.name for each in made.met)} changed:")
    for line in made.lines:
        echo(f"  {line}")
