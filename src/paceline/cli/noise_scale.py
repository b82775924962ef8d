"""`paceline noise-scale`: up to which batch does a larger one pay, by the noise of the gradients?"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.ending import ends_in_order
from paceline.cli.options import (
    LocalPath,
    choose_processes,
    is_first_process,
    is_one_of_several,
    json_option,
    launch,
    overrides_argument,
    present_gpus,
    study_processes_option,
    trust_recipe_option,
    usable_gpus,
)
from paceline.cli.output import concluded, echo, print_json, print_pairs, print_table
from paceline.recipe.load import load_recipe
from paceline.units import format_count

if TYPE_CHECKING:
    from paceline.studies.noise_scale import NoisePoint, NoiseReport


@click.command("noise-scale", short_help="Say how large a batch still pays, by the noise of the gradients.")
@click.argument("target", metavar="RECIPE|RUN")
@trust_recipe_option
@overrides_argument
@click.option(
    "--steps", type=click.IntRange(min=2), default=50, show_default=True, help="Batches at each set of weights."
)
@study_processes_option
@click.option("--output", type=LocalPath(), metavar="DIR", help="Write noise-scale.json and .html there.")
@click.option("--scratch", type=LocalPath(), hidden=True)
@json_option
def command(
    target: str,
    overrides: tuple[str, ...],
    steps: int,
    processes: int | None,
    output: Path | None,
    scratch: Path | None,
    as_json: bool,
) -> int:
    """Measure the gradient noise scale of RECIPE at its fresh weights, or of RUN at each checkpoint it has kept.

    Nothing is trained and nothing of the run is touched: the gradients of a batch's parts are held against the whole
    batch's. The critical batch, beyond which a larger one costs more samples than it saves steps, is of the noise
    scale's order of magnitude, and is given as a range. It grows as training goes on: fresh weights say least. To
    follow it in a run itself, at no extra pass, set telemetry.noise_scale.

    \b
    Examples:
      paceline noise-scale digits --steps 100
      paceline noise-scale runs/photos --output noise
      paceline noise-scale resnet50 data.path=IMAGENET --processes 2
    """
    from paceline.studies.bench.report import check_folder

    if output is not None:
        check_folder(output)
    if not is_one_of_several(processes):
        recipe = load_recipe(target, overrides).recipe
        gpus = usable_gpus(recipe.parallel.device, present_gpus()) if processes is None else 0
        with tempfile.TemporaryDirectory(prefix="paceline-noise-") as folder:
            words = ["noise-scale", target, *overrides, "--steps", str(steps), "--scratch", folder]
            words += [] if output is None else ["--output", str(output)]
            launched = launch(choose_processes(processes, gpus, recipe), [*words, "--json"] if as_json else words)
        if launched is not None:
            return launched
    elif scratch is None:
        raise click.UsageError("noise-scale starts its ranks itself: run it alone, with --processes N.")
    report = _measure(target, overrides, steps, scratch)
    code = concluded(passed=report.has_figure)
    if is_first_process():
        if not report.has_figure:
            echo("paceline: no noise scale was found at any of the weights; give more --steps.", err=True)
        _tell(report, output, as_json=as_json)
    return code


def _measure(target: str, overrides: tuple[str, ...], steps: int, scratch: Path | None) -> NoiseReport:
    from paceline.distributed.environment import read_launch
    from paceline.studies.noise_scale import NoiseAsked, measure_noise

    count = read_launch(os.environ).world.world_size
    asked = NoiseAsked(target=target, overrides=overrides, steps=steps, processes=count, scratch=scratch)
    with ends_in_order(), contextlib.redirect_stdout(sys.stderr):
        return measure_noise(asked, lambda line: echo(line, err=True) if is_first_process() else None)


def _tell(report: NoiseReport, output: Path | None, *, as_json: bool) -> None:
    written: list[Path] = []
    if output is not None:
        from paceline.studies.noise_page import write_noise

        written = write_noise(output, report)
    if as_json:
        print_json(report.to_json())
        return
    unit = report.unit
    parts = report.global_batch_size // report.micro_batch_size
    echo(f"Gradient noise of {report.name}, batches of {report.global_batch_size} in {parts} parts")
    columns = ("step", "noise scale", "95 % interval", "critical batch")
    print_table(columns if unit == "samples" else (*columns[:3], f"critical batch, {unit}"), map(_row, report.points))
    if (costs := report.costs()) is not None:
        print_pairs(
            {
                f"at {_figure(report.batch_weight)} {unit}": f"{costs['steps_ratio']:.3g} times the fewest steps, "
                f"{costs['examples_ratio']:.3g} times the fewest {unit}",
                "a linear rate there": f"{costs['linear_rate_excess']:.3g} times what the noise bears",
            }
        )
    echo("  The critical batch is of the noise scale's order of magnitude; `paceline sweep-batch` measures it.")
    for path in written:
        echo(f"written: {path}")


def _row(point: NoisePoint) -> tuple[str, ...]:
    from paceline.formulas.noise import critical_range

    found = point.averages.noise_scale()
    if found is None:
        return (format_count(point.step), "not to be told from none", "", "")
    low, high = critical_range(found)
    return (format_count(point.step), _figure(found.middle), _range(found.low, found.high), _range(low, high))


def _range(low: float, high: float) -> str:
    return f"{_figure(low)} to {_figure(high)}" if math.isfinite(high) else f"above {_figure(low)}"


def _figure(value: float) -> str:
    """Three digits of it."""
    return f"{float(f'{value:.3g}'):,.10g}"
