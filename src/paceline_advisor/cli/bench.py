"""`paceline bench`: how fast does a recipe train, or its network answer, and has that become slower?"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import click

from paceline.cli.options import (
    FiniteRange,
    LocalPath,
    json_option,
    overrides_argument,
    refuse_idle,
    trust_code_option,
    weights_option,
)
from paceline.cli.output import concluded, echo, print_json, print_table
from paceline.cli.streams import ends_in_order
from paceline.errors import did_you_mean
from paceline.recipe.running import Parallel
from paceline.recipe.training import Train

if TYPE_CHECKING:
    from paceline.report.benchmark_comparison import Comparison
    from paceline_advisor.bench.report import BenchReport

_ONLY_WITH = {
    "inference": ("weights",),
    "to": ("runs", "price_per_hour"),
    "grid": ("backends", "parts", "rounds", "launches"),
}


def _names(_: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Read a list with commas."""
    names = () if value is None else tuple(word.strip() for word in value.split(","))
    if "" in names:
        raise click.BadParameter(f"{value!r} is no list; give names with commas, for example cpu,cuda.")
    if twice := [name for name in names if names.count(name) > 1]:
        raise click.BadParameter(f"{value!r} names {twice[0]} twice; name each once.")
    return names


def _known(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    """The same, of names that the recipe's key knows: one that nobody knows would only be a row without a figure."""
    words = _names(context, parameter, value)
    section, key = (Train, "precision") if parameter.name == "precisions" else (Parallel, "device")
    known = get_args(get_type_hints(section)[key])
    if wrong := [word for word in words if word not in known]:
        hint = did_you_mean(wrong[0], known)
        raise click.BadParameter(f"{wrong[0]!r} is no {key}.{hint} Choose from {', '.join(known)}.")
    return words


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    words = _names(context, parameter, value)
    if not all(word.isdecimal() and int(word) for word in words):
        raise click.BadParameter(f"{value!r} is no list of batch sizes; give whole numbers, for example 32,64,128.")
    return tuple(map(int, words))


def _parts(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    known = ("together", "compute", "data")
    words = _names(context, parameter, value)
    if wrong := [word for word in words if word not in known]:
        raise click.BadParameter(f"{wrong[0]!r} is no part; choose from {', '.join(known)}.")
    return words or known


class _BenchGroup(click.Group):
    """`bench RECIPE` measures, `bench compare A B` compares: the first word says which."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, "--help", "-h"):
            args = ["recipe", *args]
        elif args[0] in ("--help", "-h"):
            args = ["recipe", "--help"]
        return super().parse_args(ctx, args)


@click.group("bench", cls=_BenchGroup, short_help="Measure how fast a recipe trains or answers, and compare.")
def command() -> None:
    """Measure, or compare what was measured."""


@command.command("recipe")
@click.argument("recipe")
@overrides_argument
@click.option("--batch-sizes", callback=_numbers, metavar="N,...", help="Global batch sizes (default: the recipe's).")
@click.option("--devices", callback=_known, metavar="NAME,...", help="cpu, cuda, ... (default: the recipe's).")
@click.option("--precisions", callback=_known, metavar="NAME,...", help="fp32, bf16, ... (default: the recipe's).")
@click.option("--backends", callback=_names, metavar="NAME,...", help="Who reads the samples: pytorch, dali, ...")
@click.option("--parts", callback=_parts, metavar="NAME,...", help="together, compute, data (default: all three).")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Turns of each combination.")
@click.option("--seconds", type=FiniteRange(min=0.01), default=2.0, show_default=True, help="How long a turn is timed.")
@click.option(
    "--launches",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Do all of it so often, in new processes each time.",
)
@click.option("--processes", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks of each run.")
@click.option("--inference", is_flag=True, help="Measure how fast the network answers; RECIPE may be a run then.")
@weights_option
@trust_code_option
@click.option("--to", metavar="METRIC=VALUE", help="Train until an evaluation is as good: top1_accuracy=94.")
@click.option("--runs", type=click.IntRange(min=1), default=5, show_default=True, help="Runs with --to, a seed each.")
@click.option("--price-per-hour", type=FiniteRange(min=0), help="Of the machine, for what --to costs.")
@click.option("--output", type=LocalPath(), metavar="DIR", help="Write JSON, Markdown and a plot there.")
@json_option
@click.pass_context
def measure(ctx: click.Context, /, recipe: str, overrides: tuple[str, ...], as_json: bool, **chosen: Any) -> int:
    """Measure how fast RECIPE trains: images a second over batch sizes, devices, precisions and back-ends.

    Each combination is a run of its own, opened as training opens it, in a temporary directory. Runs take turns, up to
    four at a time. `together` is training as it is, `compute` trains on the same batch again and again, `data` only
    brings the batches. What cannot run is a row with the reason.

    With --inference it measures how long the network takes to answer, by batch size and in MLPerf's scenarios. With
    --to it trains until a metric is reached, several times, and says how long that took and what it cost.

    `paceline bench compare A B` says whether B is slower than A: see its --help.

    Exit code 1 if nothing could be measured.

    \b
    Examples:
      paceline bench digits --batch-sizes 32,64,128
      paceline bench resnet50 data.path=imagenet --precisions fp32,bf16 --backends pytorch,dali --output before
      paceline bench runs/photos --inference --devices cpu,cuda
      paceline bench cifar10_fast data.path=cifar --to top1_accuracy=94 --runs 5 --price-per-hour 3
      paceline bench compare before after
    """
    mode = "inference" if chosen["inference"] else "to" if chosen["to"] else "grid"
    _check_options(ctx, mode)
    if chosen["output"] is not None:
        from paceline.records.run_directory import make_folder

        make_folder(chosen["output"], "benchmark.json", "benchmark.md", "benchmark.html")
    make = {"inference": _latency, "to": _target, "grid": _grid}[mode]
    # The user's code may run in this process, and may print.
    with ends_in_order(), contextlib.redirect_stdout(sys.stderr):
        report, extra = make(recipe, overrides, chosen)
    written = [] if chosen["output"] is None else [*report.write(chosen["output"]), *extra]
    code = concluded(passed=report.measured_any)
    if as_json:
        print_json(report.to_json())
    else:
        _show(report)
        for path in written:
            echo(f"written: {path}")
    return code


def _check_options(ctx: click.Context, mode: str) -> None:
    """Refuse options without effect: nothing asked for is left out silently."""
    if ctx.params["inference"] and ctx.params["to"]:
        raise click.UsageError("--inference and --to measure two different things; give one of them.", ctx)
    idle = [name for other, names in _ONLY_WITH.items() if other != mode for name in names]
    idle += {"inference": ["processes"], "to": ["batch_sizes", "devices", "precisions", "seconds"]}.get(mode, [])
    for name in idle:
        needs = next((other for other, names in _ONLY_WITH.items() if name in names and other != "grid"), None)
        refuse_idle(ctx, name, f"it is for --{needs}" if needs else f"with --{mode} it says nothing")


def _say(line: str) -> None:
    echo(line, err=True)


def _grid(recipe: str, overrides: tuple[str, ...], chosen: dict[str, Any]) -> tuple[BenchReport, list[Path]]:
    from paceline_advisor.bench.grid import Asked, measure_grid
    from paceline_advisor.bench.report import BenchReport, throughput_notes

    names = ("batch_sizes", "devices", "precisions", "backends", "parts", "rounds", "launches", "processes")
    settings = {name: chosen[name] for name in names}
    asked = Asked(recipe=recipe, overrides=overrides, block_seconds=chosen["seconds"], **settings)
    loaded, rows = measure_grid(asked, _say)
    report = BenchReport(
        kind="throughput",
        name=loaded.name,
        recipe=loaded.recipe,
        settings={**settings, "seconds": chosen["seconds"]},
        rows=rows,
        notes=throughput_notes(rows),
    )
    return report, []


def _latency(recipe: str, overrides: tuple[str, ...], chosen: dict[str, Any]) -> tuple[BenchReport, list[Path]]:
    from paceline_advisor.bench.latency import LatencyAsked, measure_latency
    from paceline_advisor.bench.report import BenchReport, latency_notes

    names = ("weights", "batch_sizes", "devices", "precisions", "seconds")
    settings = {name: chosen[name] for name in names}
    asked = LatencyAsked(target=recipe, overrides=overrides, trust_code=chosen["trust_code"], **settings)
    name, made_from, rows = measure_latency(asked, _say)
    report = BenchReport(
        kind="latency", name=name, recipe=made_from, settings=settings, rows=rows, notes=latency_notes(rows)
    )
    return report, []


def _target(recipe: str, overrides: tuple[str, ...], chosen: dict[str, Any]) -> tuple[BenchReport, list[Path]]:
    from paceline_advisor.bench.report import BenchReport, target_notes
    from paceline_advisor.bench.target import Target, TargetAsked, run_to_target, write_dawnbench

    names = ("runs", "price_per_hour", "processes")
    settings = {name: chosen[name] for name in names}
    asked = TargetAsked(recipe=recipe, overrides=overrides, target=Target.parse(chosen["to"]), **settings)
    loaded, runs, row = run_to_target(asked, _say)
    report = BenchReport(
        kind="time_to_target",
        name=loaded.name,
        recipe=loaded.recipe,
        settings={"to": chosen["to"], **settings},
        rows=[row],
        notes=target_notes(row),
    )
    folder = chosen["output"]
    return report, [] if folder is None else write_dawnbench(folder, loaded, runs, asked)


def _show(report: BenchReport) -> None:
    print_table(*report.table())
    for note in report.notes:
        echo(f"  {note}")


@command.command("compare")
@click.argument("a", type=LocalPath())
@click.argument("b", type=LocalPath())
@click.option(
    "--tolerance",
    type=FiniteRange(min=0),
    default=5.0,
    show_default=True,
    metavar="PERCENT",
    help="By how much B may be slower.",
)
@click.option(
    "--confidence",
    type=FiniteRange(min=50, max=100, min_open=True, max_open=True),
    default=95.0,
    show_default=True,
    metavar="PERCENT",
    help="That two equal things pass, all lines together.",
)
@json_option
def compare_command(a: Path, b: Path, tolerance: float, confidence: float, as_json: bool) -> int:
    """Say whether B is slower than A: two results of `paceline bench --output`, or two run directories.

    A is what it was, B what it is now. Exit code 1 if anything is slower by more than the tolerance, beyond doubt; 0 if
    not, and it is said where there is not enough evidence.

    \b
    Examples:
      paceline bench compare before after
      paceline bench compare runs/monday runs/tuesday --tolerance 2
    """
    from paceline.report.benchmark_comparison import compare

    found = compare(a, b, tolerance=tolerance / 100, confidence=confidence / 100)
    code = concluded(passed=not found.regressed)
    if as_json:
        print_json(found.to_json())
    else:
        _show_comparison(found)
    return code


def _show_comparison(found: Comparison) -> None:
    rows = []
    for line in found.lines:
        ratio = line.slower
        change = "" if ratio is None else f"{100 * (ratio.middle - 1):+.1f} %"
        ends = "" if ratio is None else f"{100 * (ratio.low - 1):+.1f} to {100 * (ratio.high - 1):+.1f} %"
        rows.append((line.name, change, ends, line.verdict, line.note))
    print_table(("what", "time of B", "interval", "verdict", ""), rows)
    for name, (one, other) in found.differences.items():
        echo(f"  not the same: {name} is {one} in A and {other} in B")
    for note in found.notes:
        echo(f"  {note}")
    if found.undecided:
        echo("  Where there is not enough evidence: measure longer, with more --rounds or --launches.")
    limit = f"{100 * found.tolerance:g} %"
    echo(f"  {'B is slower' if found.regressed else 'Nothing is shown to be slower'} by more than {limit}.")
