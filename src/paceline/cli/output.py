"""Output of commands: one JSON document, or aligned lines for people."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.parsing.plain_text import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

EXIT_CODE = "paceline.exit_code"
"""In the context's ``meta``: what the command is to end with if its reader leaves."""


def program() -> str:
    """Return how to call Paceline again from here: by name if that finds it, else by the path it was called with."""
    called = Path(sys.argv[0])
    if called.name != "paceline" or shutil.which("paceline") is not None:
        return "paceline"
    return os.path.relpath(called) if called.resolve().is_relative_to(Path.cwd()) else str(called)


def store_exit_code(code: int) -> int:
    """Store the current command's exit code before it prints: its reader may close the pipe (``| head``)."""
    click.get_current_context().meta[EXIT_CODE] = code
    return code


def store_verdict(*, passed: bool) -> int:
    """Store that the current command ends with 0 or 1, before it prints the reason."""
    return store_exit_code(0 if passed else 1)


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text. All commands print with this, since texts may contain names of files, classes and downloads."""
    click.echo(printable(str(text)), err=err, nl=nl)  # noqa: TID251  # the one place


def open_console(*, soft_wrap: bool = False, markup: bool = True) -> Console:
    """Return a rich console on standard output, for the same texts as :func:`echo`.

    A closed pipe ends the command as ``click.echo`` would.
    """
    from rich.console import Console
    from rich.segment import Segment

    class StandardOutput(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for each in super().render(renderable, options):
                yield each if each.control else Segment(printable(each.text), each.style)

        def on_broken_pipe(self) -> None:
            # By default rich exits with 1, which some commands use as a verdict.
            raise BrokenPipeError

    return StandardOutput(highlight=False, soft_wrap=soft_wrap, markup=markup)


def print_json(document: Any) -> None:
    """Print one JSON document on standard output; non-finite numbers become null."""
    from paceline.records.run_directory import encode_json

    echo(json.dumps(json.loads(encode_json(document)), indent=2))


def print_pairs(pairs: Mapping[str, Any]) -> None:
    """Print names and values in two columns."""
    width = max((len(name) for name in pairs), default=0)
    for name, value in pairs.items():
        echo(f"  {name:<{width}}  {value}")


def print_table(header: tuple[str, ...], rows: Iterable[tuple[Any, ...]], *, indent: str = "  ") -> None:
    """Print a table with columns as wide as their contents."""
    cells = [header, *(tuple(str(cell) for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for row in cells:
        echo((indent + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))).rstrip())
