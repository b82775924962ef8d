"""`paceline landscape`: what the loss looks like around a run's weights, and between two runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import (
    FiniteRange,
    LocalPath,
    best_option,
    choose_processes,
    is_first_process,
    is_one_of_several,
    json_option,
    launch,
    processes_option,
    trust_code_option,
    weights_option,
)
from paceline.cli.output import echo, print_json, print_table
from paceline.errors import PacelineError
from paceline.recipe.load import refuse_training_overrides

if TYPE_CHECKING:
    from paceline_advisor.landscape.report import LandscapeReport, RunLandscape
    from paceline_advisor.landscape.study import LandscapeRequest

_MEASURES = ("curve", "surface", "trajectory", "sharpness", "curvature", "line")


def _measures(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    parts = tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
    if not parts or not set(parts) <= set(_MEASURES):
        raise click.BadParameter(f"{value!r} is no list of measures; give some of {', '.join(_MEASURES)}.")
    return parts


def _samples(_: click.Context, __: click.Parameter, value: str) -> int | None:
    if value == "all":
        return None
    if not value.isdecimal() or int(value) < 2:
        raise click.BadParameter(f"{value!r} is no number of samples; give a whole number of at least 2, or all.")
    return int(value)


def _epsilons(_: click.Context, __: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        parts = tuple(float(part) for part in value.split(","))
    except ValueError:
        parts = ()
    if not parts or not all(0 < part < 1 for part in parts):
        raise click.BadParameter(f"{value!r} is no list of sizes between 0 and 1; give 1e-3,5e-4, for example.")
    return parts


@click.command("landscape", short_help="Draw the loss around a run's weights, and measure how sharp the minimum is.")
@click.argument("runs", nargs=-1, required=True, type=LocalPath(str), metavar="RUN... [KEY=VALUE]...")
@click.option(
    "--measure",
    callback=_measures,
    metavar="WHAT,...",
    help="Some of curve, surface, trajectory, sharpness, curvature, and line (between two runs). By default all of one "
    "run; of several, sharpness and curvature, and of two the line.",
)
@click.option(
    "--split",
    type=click.Choice(["train", "validation"]),
    default="train",
    show_default=True,
    help="Whose loss. Training samples are shown as held-out ones are, without augmentation.",
)
@click.option(
    "--samples",
    default="1024",
    show_default=True,
    callback=_samples,
    metavar="N|all",
    help="Most samples of each split, always the same for a seed.",
)
@click.option(
    "--batch-norm",
    type=click.Choice(["recomputed", "stored"]),
    help="Statistics of each batch, as in training (the default), or those that the run stored.",
)
@click.option(
    "--points", type=click.IntRange(min=3), default=21, show_default=True, help="Points of a curve or of the line."
)
@click.option("--grid", type=click.IntRange(min=3), default=11, show_default=True, help="Points of a surface's side.")
@click.option(
    "--range",
    "reach",
    type=FiniteRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="How far curves and surfaces go; at 1, each filter has moved by its own norm.",
)
@click.option(
    "--epsilon",
    "epsilons",
    default="1e-3,5e-4",
    show_default=True,
    callback=_epsilons,
    metavar="SIZE,...",
    help="Sizes of the box of Keskar's sharpness.",
)
@click.option(
    "--iterations", type=click.IntRange(min=1), default=10, show_default=True, help="Of L-BFGS-B, from each start."
)
@click.option(
    "--subspace", type=click.IntRange(min=1), metavar="P", help="Keep that search in a random subspace of P dimensions."
)
@click.option(
    "--products", type=click.IntRange(min=2), default=40, show_default=True, help="Most Hessian-vector products."
)
@click.option(
    "--tolerance",
    type=FiniteRange(min=0, min_open=True),
    default=0.01,
    show_default=True,
    help="Largest residual of the top eigenvalue, as a share of it.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of directions and samples.")
@weights_option
@best_option
@trust_code_option
@processes_option
@click.option(
    "--output",
    type=LocalPath(file_okay=False),
    metavar="DIR",
    help="Write landscape.json and landscape.html, a page with all charts, into this folder.",
)
@json_option
def command(runs: tuple[str, ...], processes: int | None, output: Path | None, as_json: bool, **asked: Any) -> int:
    """Look at the loss around the weights of RUN, and between two: run directories, checkpoints or safetensors files.

    Curves and surfaces go along random directions, scaled filter by filter; a trajectory goes through a run's
    checkpoints; sharpness is Keskar's, curvature the largest eigenvalue of the Hessian. Nothing in a run directory is
    changed. Several processes share the points.

    \b
    Examples:
      paceline landscape runs/digits --output landscapes/digits
      paceline landscape runs/small-batch runs/large-batch
      paceline landscape runs/digits --measure sharpness,curvature --samples all --processes 2
    """
    targets = tuple(Path(each) for each in runs if "=" not in each or Path(each).exists())
    overrides = tuple(each for each in runs if Path(each) not in targets)
    if not targets:
        raise click.UsageError(
            "no run was named, only overrides; give a run directory, a checkpoint or a weights file."
        )
    refuse_training_overrides(overrides)
    _make_output(output, targets)
    if not is_one_of_several(processes):
        arguments = ["landscape", *runs, *_spelled(asked), *(["--output", str(output)] if output else [])]
        launched = launch(choose_processes(processes, 1), [*arguments, "--json"] if as_json else arguments)
        if launched is not None:
            return launched
    from paceline_advisor.landscape.study import explore

    report = explore(_request(targets, overrides, asked))
    if not is_first_process():
        return 0
    files = [] if output is None else _write(report, output)
    if as_json:
        print_json(report.to_json())
    else:
        _show(report)
        for path in files:
            echo(f"written: {path}")
    return 0


def _make_output(output: Path | None, targets: tuple[Path, ...]) -> None:
    for target in targets:
        if output is not None and output.resolve().is_relative_to(target.resolve()):
            raise PacelineError(
                f"--output={output} is inside the run '{target}', which is only read; give another folder."
            )
    if output is not None:
        from paceline.records.run_directory import make_folder

        make_folder(output, "landscape.json", "landscape.html")


def _spelled(asked: dict[str, Any]) -> list[str]:
    """The options as words, for the processes that are started."""
    names = {"reach": "range", "epsilons": "epsilon"}
    words: list[str] = []
    for name, value in asked.items():
        option = f"--{names.get(name, name).replace('_', '-')}"
        if value is True:
            words.append(option)
        elif name == "samples":
            words += [option, "all" if value is None else str(value)]
        elif isinstance(value, tuple):
            words += [option, ",".join(map(str, value))]
        elif value is not None and value is not False:
            words += [option, str(value)]
    return words


def _request(targets: tuple[Path, ...], overrides: tuple[str, ...], asked: dict[str, Any]) -> LandscapeRequest:
    from paceline_advisor.landscape.opening import Selection
    from paceline_advisor.landscape.sharpness import Box
    from paceline_advisor.landscape.study import LandscapeRequest

    chosen = {name: asked[name] for name in ("weights", "best", "trust_code", "samples", "seed", "batch_norm")}
    same = {name: asked[name] for name in ("measure", "split", "points", "grid", "reach", "epsilons")}
    return LandscapeRequest(
        targets=targets,
        selection=Selection(overrides=overrides, **chosen),
        box=Box(iterations=asked["iterations"], subspace=asked["subspace"]),
        products=asked["products"],
        tolerance=asked["tolerance"],
        **same,
    )


def _write(report: LandscapeReport, folder: Path) -> list[Path]:
    from paceline.pages.page import write_page
    from paceline.records.run_directory import write_json
    from paceline_advisor.landscape.charts import page_of

    document = folder / "landscape.json"
    write_json(document, report.to_json())
    return [document, write_page(folder / "landscape.html", page_of(report))]


def _show(report: LandscapeReport) -> None:
    from paceline_advisor.landscape.charts import comparison

    norms = "" if report.batch_norm == "none" else f", BatchNorm's statistics {report.batch_norm}"
    echo(f"Loss over {report.samples[report.split]:,} {report.split} samples{norms}, seed {report.seed}")
    print_table(*comparison(report))
    for run in report.runs:
        _show_run(run)
    if report.line is not None:
        echo(f"from the first to the second: {report.line.in_words()}")
    for note in report.notes:
        echo(f"note: {note}")


def _show_run(run: RunLandscape) -> None:
    if run.curve is not None:
        name, values = next(iter(run.curve.values.items()))
        shown = range(0, len(values), max(1, (len(values) - 1) // 10))
        echo(f"{run.run}: {name} along a random direction")
        print_table(("at", name), [(f"{run.curve.positions[at]:+.2f}", f"{values[at]:.4f}") for at in shown])
    if run.trajectory is not None:
        first, second = (f"{100 * share:.1f} %" for share in run.trajectory.explained)
        echo(
            f"{run.run}: {len(run.trajectory.steps)} checkpoints, steps {run.trajectory.steps[0]} to "
            f"{run.trajectory.steps[-1]}; {first} of their way lies along the first axis of the plane, {second} along "
            "the second"
        )
    if run.curvature is not None:
        echo(
            f"{run.run}: top eigenvalue {run.curvature.value:.4g}, residual {run.curvature.residual:.1e} of it after "
            f"{run.curvature.products} products; lowest seen {run.curvature.lowest:.4g}"
        )
