"""`paceline find-lr`: a learning rate, from how the loss goes as the rate rises."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import (
    FiniteRange,
    LocalPath,
    choose_processes,
    is_first_process,
    is_one_of_several,
    json_option,
    launch,
    overrides_argument,
    present_gpus,
    processes_option,
    recipe_argument,
    usable_gpus,
)
from paceline.cli.output import concluded, echo, print_json, print_pairs, print_table
from paceline.cli.streams import ends_in_order
from paceline.recipe.load import load_recipe
from paceline.units import format_count
from paceline_advisor.formulas.lr_range import MEDIAN, NAMES

if TYPE_CHECKING:
    from paceline.recipe.schema import Recipe
    from paceline_advisor.tuning.lr_range.study import RangeTest

_RATE = FiniteRange(min=0, min_open=True)
_SETTINGS = ("lowest", "highest", "steps", "shape", "smoothing", "divergence")


@click.command("find-lr", short_help="Find a learning rate by a range test.")
@recipe_argument
@overrides_argument
@processes_option
@click.option("--lowest", type=_RATE, default=1e-7, show_default=True, help="Learning rate of the first step.")
@click.option("--highest", type=_RATE, default=10.0, show_default=True, help="Learning rate of the last step.")
@click.option("--steps", type=int, default=100, show_default=True, help="Optimizer steps of the test.")
@click.option(
    "--shape",
    type=click.Choice(["exponential", "linear"]),
    default="exponential",
    show_default=True,
    help="How the rate rises.",
)
@click.option(
    "--smoothing",
    type=FiniteRange(min=0, max=1, max_open=True),
    default=0.98,
    show_default=True,
    help="Weight of the past in the loss looked at.",
)
@click.option(
    "--divergence",
    type=FiniteRange(min=1, min_open=True),
    default=4.0,
    show_default=True,
    metavar="FACTOR",
    help="End where that loss is above so many times its best.",
)
@click.option(
    "--suggestion",
    type=click.Choice(NAMES),
    default=MEDIAN,
    show_default=True,
    help="Which suggestion --apply writes.",
)
@click.option(
    "--apply",
    "apply_to",
    type=LocalPath(dir_okay=False),
    metavar="FILE",
    help="Write the recipe with that learning rate.",
)
@click.option("--output", type=LocalPath(), metavar="DIR", help="Write JSON and a page there.")
@json_option
def command(recipe: str, overrides: tuple[str, ...], processes: int | None, as_json: bool, **chosen: Any) -> int:
    """Find a learning rate for RECIPE: a shipped name, a YAML file, or a run directory, whose recipe is tested.

    Trains some steps as a run begins, with a learning rate that rises from step to step, until the loss diverges. Five
    rules read a rate off the curve; the middle one of three of them is the suggestion, unless you choose another. It is
    a run of its own in a temporary directory, and touches nothing else.

    From trained weights, add model.initialize_from=RUN.

    Exit code 1 if the curve has no such point as --suggestion names, 0 otherwise.

    \b
    Examples:
      paceline find-lr digits
      paceline find-lr image_folder data.path=photos model.pretrained=true --highest 1 --output lr
      paceline find-lr mine.yaml --processes 2 --suggestion steepest --apply better.yaml
    """
    from paceline_advisor.tuning.lr_range.sweep import Sweep

    sweep = Sweep(**{name: chosen[name] for name in _SETTINGS})
    loaded = load_recipe(recipe, overrides)
    if is_first_process():
        _check_files(chosen)
    if not is_one_of_several(processes):
        launched = _launch(loaded.recipe, [recipe, *overrides], processes, chosen, as_json=as_json)
        if launched is not None:
            return launched
    from paceline_advisor.tuning.lr_range.study import range_test

    # The user's code runs in this process, and may print.
    with ends_in_order(), contextlib.redirect_stdout(sys.stderr):
        found = range_test(loaded, sweep, say=lambda line: echo(line, err=True))
    code = concluded(passed=found.suggestion(chosen["suggestion"]).lr is not None)
    if is_first_process():
        written = _write(found, chosen)
        if as_json:
            print_json(found.to_json())
        else:
            _show(found, chosen["suggestion"])
            for line in written:
                echo(line)
    return code


def _check_files(chosen: dict[str, Any]) -> None:
    from paceline.records.run_directory import make_folder
    from paceline_advisor.doctor.improving import check_new

    if chosen["apply_to"] is not None:
        check_new(chosen["apply_to"])
    if chosen["output"] is not None:
        make_folder(chosen["output"], "find-lr.json", "find-lr.html")


def _launch(
    recipe: Recipe, words: list[str], processes: int | None, chosen: dict[str, Any], *, as_json: bool
) -> int | None:
    """Start several ranks of the same command, if there are to be several; None if this process is enough."""
    gpus = usable_gpus(recipe.parallel.device, present_gpus()) if processes is None else 0
    count = choose_processes(processes, gpus, recipe)
    if count.notice:
        echo(f"note: {count.notice}", err=True)
    options = {("apply" if name == "apply_to" else name): value for name, value in chosen.items() if value is not None}
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return launch(count, ["find-lr", *words, *arguments, *["--json"] * as_json])


def _write(found: RangeTest, chosen: dict[str, Any]) -> list[str]:
    """Write what was asked for; what to say of it."""
    from paceline_advisor.doctor.improving import write_new
    from paceline_advisor.tuning.lr_range.report import write_report

    lines, rule, applied = [], chosen["suggestion"], chosen["apply_to"]
    if chosen["output"] is not None:
        lines += [f"written: {path}" for path in write_report(chosen["output"], found)]
    if applied is not None and found.suggestion(rule).lr is None:
        lines.append(f"{applied} was not written: there is no suggestion by '{rule}'")
    elif applied is not None:
        write_new(applied, found.improved(rule))
        lines.append(f"{applied}: the recipe with optimizer.lr={found.lr(rule):g}")
    return lines


def _show(found: RangeTest, chosen: str) -> None:
    from paceline_advisor.tuning.lr_range.report import sparkline

    facts, sweep = found.facts, found.sweep
    several = f", {facts['world_size']} processes" if facts["world_size"] > 1 else ""
    echo(f"Range test of {found.name} on {facts['device_name']}{several}")
    print_pairs(
        {
            "rates": f"{sweep.lowest:g} to {sweep.highest:g}, {sweep.shape}, {format_count(sweep.steps)} steps of "
            f"{format_count(facts['global_batch_size'])} samples, {facts['precision']}",
            "ended": f"after {format_count(len(found.rates))} steps at {found.rates[-1]:.3g}: {found.ending_in_words}",
            "loss": f"{sparkline(found)}  {found.averages[0]:.3g} at first, {min(found.averages):.3g} at best",
            "now": f"optimizer.lr={facts['optimizer_lr']:g}",
        }
    )
    echo()
    rows = []
    for name, each in found.suggestions.items():
        rate = "none" if each.lr is None else f"{found.lr(name):g}"
        rows.append((f"{name}{' *' * (name == chosen)}", rate, each.why_not or each.rule))
    print_table(("suggestion", "optimizer.lr", "why"), rows)
    for note in found.notes:
        echo(f"  note: {note}")
