"""`paceline roofline`: which layers arithmetic holds back, and which memory, on a named device?"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import json_option, overrides_argument, recipe_argument
from paceline.cli.output import open_console, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.studies.roofline.bounds import LayerBound
    from paceline.studies.roofline.report import RooflineReport
    from paceline.studies.roofline.shapes import ShapeFinding

_NARROWEST = 130


@click.command("roofline", short_help="Say what holds each layer of a step back on a device: arithmetic or memory.")
@recipe_argument
@overrides_argument
@click.option(
    "--device",
    metavar="NAME",
    help="A device by name (h100, a100, v100, t4, …), whether it is here or not; cpu measures this one once. Without "
    "it: the one that is here.",
)
@click.option("--top", type=click.IntRange(min=1), default=15, show_default=True, help="How many layers to show.")
@json_option
def command(recipe: str, overrides: tuple[str, ...], device: str | None, top: int, as_json: bool) -> None:
    """Hold a training step of RECIPE against what a device can do, layer by layer and phase by phase.

    The step is done on fake tensors: nothing is computed and no data is read. Times are the least that each operator
    can take by itself, so that a real step takes longer; with --json, all layers are told.

    \b
    Examples:
      paceline roofline resnet50 --device a100
      paceline roofline image_folder model.name=mobilenetv2_100 --device h100 --top 30
      paceline roofline digits --device cpu --json
    """
    from paceline.studies.roofline.study import roofline

    # Code of the user's own may print.
    with contextlib.redirect_stdout(sys.stderr):
        report = roofline(recipe, overrides, device=device)
    if as_json:
        print_json(report.to_json())
    else:
        _show(report, top)


def _show(report: RooflineReport, top: int) -> None:
    console = open_console(markup=False)
    if not console.is_terminal:
        console.width = _NARROWEST
    for line in report.headline():
        console.print(line)
    console.print(_phases(report))
    console.print(_layers(sorted(report.layers, key=lambda each: -each.seconds)[:top]))
    wasteful = [each for each in report.shapes if each.seconds_lost > 0 and each.tiling is not None]
    wasteful.sort(key=lambda each: -each.seconds_lost)
    if wasteful:
        console.print(_shapes(wasteful[:top]))
    for line in report.remarks():
        console.print(line)


def _table(title: str, *columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("layer", "kind", "phase", "bound", "tile") else "right")
    return table


def _phases(report: RooflineReport) -> Table:
    table = _table("by phase", "phase", "GFLOP", "MB", "least ms", "share")
    for name, each in report.phases().items():
        table.add_row(name, *_work(each["flops"], each["bytes"]), *_time(each["seconds"], each["share"]))
    return table


def _layers(layers: list[LayerBound]) -> Table:
    columns = ("layer", "kind", "phase", "GFLOP", "MB", "FLOP/byte", "ridge", "bound", "least ms", "share")
    table = _table("layers by their least time", *columns)
    for each in layers:
        table.add_row(
            *(each.layer or ("(network)" if each.kind else f"({each.phase})"), each.kind, each.phase),
            *_work(each.flops, each.bytes_read + each.bytes_written),
            *(f"{each.intensity:.1f}", f"{each.ridge:.1f}", each.bound),
            *_time(each.seconds, each.share),
        )
    return table


def _shapes(findings: list[ShapeFinding]) -> Table:
    columns = ("layer", "phase", "m × n × k", "tile", "tiles", "waves", "wasted", "better n", "lost ms")
    table = _table("products whose tiles and waves waste most (predicted)", *columns)
    for each in findings:
        tiling, product = each.tiling, each.product
        assert tiling is not None
        times = f" × {product.count}" if product.count > 1 else ""
        table.add_row(
            *(each.layer, each.phase, f"{product.m} × {product.n} × {product.k}{times}"),
            *(f"{tiling.tile[0]}×{tiling.tile[1]}", _tiles(tiling.tiles, tiling.splits), str(tiling.waves)),
            *(f"{tiling.waste:.0%}", " or ".join(str(n) for n in each.better if n is not None) or "–"),
            f"{each.seconds_lost * 1e3:.3g}",
        )
    return table


def _tiles(tiles: int, splits: int) -> str:
    return f"{tiles}" if splits == 1 else f"{tiles} × {splits}"


def _work(flops: float, moved: float) -> tuple[str, str]:
    return f"{flops / 1e9:,.2f}", f"{moved / 1e6:,.1f}"


def _time(seconds: float, share: float) -> tuple[Any, ...]:
    return f"{seconds * 1e3:.3g}", f"{share:.1%}"
