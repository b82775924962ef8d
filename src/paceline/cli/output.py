"""How do commands print: one JSON document, or aligned lines for people?"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

# Where a command notes in click's context what it is to end with, before it tells of it: perhaps nobody reads that.
EXIT_CODE = "paceline.exit_code"


def program() -> str:
    """How to call Paceline again from here: by name if that finds it, else by the path it was called with."""
    called = Path(sys.argv[0])
    if called.name != "paceline" or shutil.which("paceline") is not None:
        return "paceline"
    return os.path.relpath(called) if called.resolve().is_relative_to(Path.cwd()) else str(called)


def print_json(document: Any) -> None:
    """Print one JSON document on standard output; numbers that are not finite become null."""
    from paceline.records.run_directory import encode_json

    click.echo(json.dumps(json.loads(encode_json(document)), indent=2))


def print_pairs(pairs: Mapping[str, Any], *, indent: str = "  ") -> None:
    """Print names and values in two columns."""
    width = max((len(name) for name in pairs), default=0)
    for name, value in pairs.items():
        click.echo(f"{indent}{name:<{width}}  {value}")


def print_table(header: tuple[str, ...], rows: Iterable[tuple[Any, ...]], *, indent: str = "  ") -> None:
    """Print a table with columns as wide as their contents."""
    cells = [header, *(tuple(str(cell) for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for row in cells:
        click.echo((indent + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))).rstrip())
