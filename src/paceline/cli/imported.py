"""What do the commands that convert another trainer's options have in common? How they report, and what they write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import LocalPath
from paceline.cli.output import echo, print_json
from paceline.errors import RecipeError

if TYPE_CHECKING:
    from paceline.recipe.imports.draft import Conversion

_OPTIONS = (
    click.option("--output", type=LocalPath(), metavar="FILE", help="Write the recipe here."),
    click.option("--overwrite", is_flag=True, help="Write over a file that is there."),
    click.option(
        "--processes",
        type=click.IntRange(min=1),
        metavar="N",
        help="How many processes train, where the source does not say so; the global batch is theirs together.",
    ),
    click.option(
        "--skip",
        "skipped",
        multiple=True,
        metavar="OPTION",
        help="Convert as if this option were not given; it can be named again for others.",
    ),
)


def import_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that these commands share."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def finish(conversion: Conversion, output: Path | None, *, overwrite: bool, as_json: bool) -> int:
    """Refuse, or write and tell; returns the exit code.

    Raises:
        RecipeError: If an option is refused, or the file is there already.
    """
    from paceline.recipe.imports.draft import refusal

    if conversion.refused:
        raise refusal(conversion)
    if output is not None:
        _write(output, conversion.to_yaml(), overwrite=overwrite)
    if as_json:
        print_json({**conversion.to_json(), "output": None if output is None else str(output)})
        return 0
    if output is None:
        echo(conversion.to_yaml(), nl=False)
    for line in _account(conversion):
        # On standard output there is the recipe, which may go to a file.
        echo(line, err=output is None)
    if output is not None:
        echo(f"Wrote {output}: paceline train {output} --plan-only shows what it comes to.")
    return 0


def _write(output: Path, text: str, *, overwrite: bool) -> None:
    if output.exists() and not overwrite:
        raise RecipeError(f"{output} is there already; give another --output, or --overwrite.")
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{output} cannot be written: {error.strerror}.") from None


def _account(conversion: Conversion) -> list[str]:
    from paceline.recipe.imports.draft import shown_value

    lines: list[str] = []
    titles = {"mapped": "Mapped", "listed": "No equivalent, and none needed"}
    for place, title in titles.items():
        entries = [each for each in conversion.entries if each.place == place]
        lines += [f"{title}: {len(entries)}"] if entries else []
        shown = [(_given(each.option, shown_value(each.value)), each.says) for each in entries]
        width = min(max((len(option) for option, _ in shown), default=0), 40)
        lines += [f"  {option:<{width}}  {says}" for option, says in shown]
    if conversion.differences:
        lines.append(f"Nearly, but not quite: {len(conversion.differences)}")
        lines += [f"  {each.option}: {each.says}" for each in conversion.differences]
    lines += [f"Left out: {name}" for name in conversion.left_out]
    lines += [f"Note: {notice}" for notice in conversion.notices]
    return lines


def _given(option: str, value: str) -> str:
    return option if value == "true" else f"{option} {value}"
