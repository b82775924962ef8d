"""`paceline check-data`: what in a set of images would break or spoil a run, found before it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import json_option, overrides_argument, trust_recipe_option
from paceline.cli.output import concluded, open_console, print_json
from paceline.cli.streams import ends_in_order
from paceline.escaping import one_line

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.data.inspect.check import DataReport
    from paceline.data.inspect.findings import Entry, Finding
    from paceline.data.inspect.gather import Progress

_NAMED = 5
_BAR = 30
_COLOURS = {"breaks": "bold red", "spoils": "magenta", "costs": "yellow", "notice": "cyan"}


@click.command("check-data")
@click.argument("source")
@trust_recipe_option
@overrides_argument
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Processes that read (default: one per core).")
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="Look at N images only, spread over all of them."
)
@json_option
def command(source: str, overrides: tuple[str, ...], workers: int | None, limit: int | None, as_json: bool) -> int:
    """Check SOURCE: a folder of images, an archive, or a recipe by name or file, whose data section is checked.

    Every image is read as a run reads it. Reported are images that a run cannot read (breaks), images in two splits
    or two classes (spoils), what makes reading slow (costs) and what may not be meant (notice), each with file names
    and what to do. Nothing in SOURCE is changed. KEY=VALUE changes the data section, for example
    data.validation_fraction=0.1.

    Exit code 1 if anything breaks or spoils a run, 0 if not.

    \b
    Examples:
      paceline check-data photos
      paceline check-data photos --limit 2000
      paceline check-data resnet50 data.path=imagenet --json
    """
    from paceline.data.inspect.check import Asked, check_data

    asked = Asked(source=source, overrides=overrides, workers=workers, limit=limit)
    # A recipe may name code of the user's, which may print.
    with ends_in_order(), contextlib.redirect_stdout(sys.stderr), _progress() as progress:
        report = check_data(asked, progress)
    code = concluded(passed=report.passed)
    if as_json:
        print_json(report.to_json())
    else:
        _show(report)
    return code


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on a terminal; nothing where standard error is a file."""
    if not sys.stderr.isatty():
        yield lambda _what, _done, _total: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    # Drawn by hand: processes are forked meanwhile, which no thread should see.
    bars = Progress(
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
    )
    tasks: dict[str, Any] = {}

    def show(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total)
        bars.update(tasks[what], completed=done, total=total, refresh=True)

    with bars:
        yield show


def _show(report: DataReport) -> None:
    console = open_console(soft_wrap=True)
    _show_subject(console, report)
    for finding in report.findings:
        _show_finding(console, finding, report.root)
    _show_figures(console, report)
    _show_verdict(console, report)


def _show_finding(console: Console, finding: Finding, root: str | None) -> None:
    kind = finding.kind
    name = f"{finding.count:,} {kind.name.replace('_', ' ')}"
    console.print(f"[{_COLOURS[kind.severity]}]{kind.severity:<6}[/]  [bold]{name}[/]: {kind.means}; {kind.advice}")
    for entry in finding.entries[:_NAMED]:
        console.print(f"        {_line(entry, root)}", markup=False)
    if finding.count > _NAMED:
        console.print(f"        … and {finding.count - _NAMED:,} more (--json names them)")


def _show_subject(console: Console, report: DataReport) -> None:
    splits = ", ".join(f"{each['samples']:,} {name}" for name, each in report.splits.items())
    console.print(
        f"{one_line(report.source)}: {report.dataset}, {report.classes['count']} classes, {splits}", markup=False
    )
    checked, samples = (sum(each[key] for each in report.splits.values()) for key in ("checked", "samples"))
    if checked < samples:
        console.print(f"looked at {checked:,} of {samples:,} images; copies of the others are not found")


def _line(entry: Entry, root: str | None) -> str:
    parts = [_relative(entry.name, root)]
    if entry.detail:
        parts.append(f"({_relative(entry.detail, root)})")
    if entry.other is not None:
        parts.append(f"= {_relative(entry.other, root)}")
    return " ".join(parts)


def _relative(text: str, root: str | None) -> str:
    return one_line(text.removeprefix(root.rstrip(os.sep) + os.sep) if root is not None else text)


def _show_figures(console: Console, report: DataReport) -> None:
    classes = report.classes
    console.print(f"classes   {classes['smallest_train']:,} to {classes['largest_train']:,} training images each")
    if report.sizes:
        for name in ("width", "height"):
            each = report.sizes[name]
            console.print(
                f"{name:<9} {each['minimum']:.0f} to {each['maximum']:.0f} pixels, half of them up to "
                f"{each['median']:.0f}"
            )
    if report.pixels:
        for name in ("mean", "std"):
            found, used = (_numbers(report.pixels[key]) for key in (name, f"run_{name}"))
            console.print(f"{name:<9} {found} of the training images; a run uses {used}", markup=False)
    if report.cost:
        _show_cost(console, report)


def _numbers(values: list[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def _show_cost(console: Console, report: DataReport) -> None:
    cost = report.cost
    speed = f"{cost['images_per_second_per_core']:,.0f}"
    console.print(
        f"decoding  {cost['cpu_ms_per_image']['mean']:.2f} ms of processor time per image: one core decodes {speed} "
        f"images/s\n          a network that takes M images/s needs M / {speed} workers, and more for resizing and "
        "augmentation"
    )
    most = max(bar["images"] for bar in cost["histogram"])
    shown = [bar for bar in cost["histogram"] if bar["images"]]
    for bar in shown:
        end = f"{bar['to_ms']:g}" if bar["to_ms"] is not None else "…"
        drawn = "█" * max(1, round(_BAR * bar["images"] / most))
        between = f"{bar['from_ms']:g}–{end} ms"
        console.print(f"        {between:>10}  {drawn} {bar['images']:,}")
    for slow in cost["slowest"][:1]:
        console.print(
            f"        slowest: {_relative(slow['path'], report.root)}, {slow['cpu_ms']:.1f} ms, "
            f"{slow['width']}x{slow['height']}",
            markup=False,
        )


def _show_verdict(console: Console, report: DataReport) -> None:
    found = ", ".join(f"{count:,} {severity}" for severity, count in report.count.items() if count) or "nothing found"
    verdict = "[green]passed[/]" if report.passed else "[bold red]failed[/]"
    console.print(
        f"{verdict}: {found}; {report.seconds:.1f} s with {report.workers} process{'es' * (report.workers != 1)}."
    )
