"""A command's result as shown to people, in a terminal and on a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.errors import PacelineError
from paceline.pages.page import Block, Page, Section, Table, Text, write_page
from paceline.records.run_directory import write_json

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Blocks for the terminal and the page.

    Attributes:
        title: Heading; empty if the first block needs none.
        subtitle: What was measured: recipe, sizes.
        blocks: Lines, text, tables and mappings of names to values, in order; for the terminal only, also anything that
            rich can print. The terminal omits charts and folded tables.
        on_page: Additional blocks of the page.
        ok: True, or why the command exits with 1: a sentence for standard error (empty if the blocks explain it), or an
            error to raise after the result is shown.
    """

    title: str = ""
    subtitle: str = ""
    blocks: Sequence[Block | Mapping[str, Any] | RenderableType]
    on_page: Sequence[Block] = ()
    ok: bool | str | PacelineError = True


class Result(Protocol):
    """The result of a command."""

    def __paceline__(self) -> Shown:
        """Return the human-readable form."""

    def to_json(self) -> Mapping[str, Any] | Sequence[Any]:
        """Return the result as one JSON document."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """A result made of human-readable text and one JSON document.

    Attributes:
        shown: The human-readable form.
        document: What ``--json`` prints.
    """

    shown: Shown
    document: Mapping[str, Any] | Sequence[Any]

    def __paceline__(self) -> Shown:
        """Return the human-readable form."""
        return self.shown

    def to_json(self) -> Mapping[str, Any] | Sequence[Any]:
        """Return the document."""
        return self.document


def write_result(folder: Path, name: str, result: Result) -> list[Path]:
    """Write ``NAME.json`` and ``NAME.html`` into an existing folder, and return both paths."""
    write_json(folder / f"{name}.json", result.to_json())
    return [folder / f"{name}.json", write_page(folder / f"{name}.html", page_of(result.__paceline__()))]


def page_of(shown: Shown) -> Page:
    """Return what is shown as a page."""
    blocks: list[Block] = []
    for block in shown.blocks:
        if isinstance(block, str):
            blocks.append(Text(block))
        elif isinstance(block, Mapping):
            rows = [(key, str(value)) for key, value in block.items()]
            blocks.append(Table(columns=("", ""), rows=rows, caption=shown.title))
        elif isinstance(block, Block):
            blocks.append(block)
    section = Section(title=shown.title, blocks=(*blocks, *shown.on_page))
    return Page(title=shown.title, subtitle=shown.subtitle, sections=(section,))
