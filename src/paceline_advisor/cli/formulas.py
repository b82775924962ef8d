"""`paceline formulas`: the field's rules of thumb, computed, each with its source."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import json_option
from paceline.cli.output import echo, print_json, print_pairs

if TYPE_CHECKING:
    from paceline_advisor.formulas.catalogue import Formula


@click.command("formulas", short_help="Compute a rule of thumb: rooflines, memory, batch sizes, scaling, time.")
@click.argument("name", required=False)
@click.argument("arguments", nargs=-1, metavar="[KEY=VALUE]...")
@json_option
def command(name: str | None, arguments: tuple[str, ...], as_json: bool) -> None:
    """Compute NAME from the arguments given; without arguments, say what it is, and without NAME, list all.

    Several values of one argument are separated by commas. Results are in the units that names end with; those that end
    with none are shares, ratios or counts.

    \b
    Examples:
      paceline formulas
      paceline formulas zero_bytes
      paceline formulas zero_bytes parameters=7.5e9 stage=2 devices=64
      paceline formulas olympic_mean values=12.0191,12.0239,12.0339,12.04,12.0224
    """
    from paceline_advisor.formulas.catalogue import find_formula, formulas

    if name is None:
        _show_all(list(formulas().values()), as_json=as_json)
        return
    formula = find_formula(name)
    if formula.needs and not arguments:
        _show_one(formula, as_json=as_json)
        return
    used, value = formula.compute(arguments)
    if as_json:
        print_json({**formula.describe(), "arguments": used, "value": value})
    else:
        echo(f"{formula.name}({', '.join(f'{key}={_written(each)}' for key, each in used.items())})")
        echo(f"  = {_written(value)}")


def _show_all(known: list[Formula], *, as_json: bool) -> None:
    if as_json:
        print_json([each.describe() for each in known])
        return
    topic = ""
    for each in known:
        if each.topic != topic:
            echo(f"{'' if not topic else chr(10)}{each.topic}")
        topic = each.topic
        echo(f"  {each.name}")
        echo(f"      {each.summary}")
        echo(f"      [{each.source}]")


def _show_one(formula: Formula, *, as_json: bool) -> None:
    if as_json:
        print_json(formula.describe())
        return
    echo(f"{formula.summary}\n")
    needs: dict[str, Any] = dict.fromkeys(formula.needs, "must be given")
    print_pairs({**needs, **{key: f"{_written(value)} unless given" for key, value in formula.defaults.items()}})
    echo(f"\nSource: {formula.source}")


def _written(value: Any) -> str:
    match value:
        case bool() | str():
            return str(value).lower()
        case float():
            # An interval may have an open end.
            return f"{value:.6g}" if not 1e15 <= abs(value) < math.inf or value != int(value) else f"{value:.6e}"
        case list() | tuple():
            return f"({', '.join(map(_written, value))})"
        case dict():
            return ", ".join(f"{key} {_written(each)}" for key, each in value.items())
    return str(value)
