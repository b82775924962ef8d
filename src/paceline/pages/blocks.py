"""Page blocks other than charts: paragraphs, tables, headline figures and pictures.

All text is plain and is escaped on output, whatever its source. The only markup in a paragraph is `backticks` for code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from paceline.parsing.plain_text import html_text

_CODE = re.compile(r"`([^`]+)`")
_NUMBER = re.compile(r"^[−+-]?[\d,.]+(e[+-]?\d+)?( ?(%|[a-zA-Zµ/]{1,12}))?$")
_MISSING = "–"
# Pictures come from files; these formats cannot hold anything but a picture.
_PICTURE = re.compile(r"^data:image/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]+$")


@runtime_checkable
class Block(Protocol):
    """A block of a section."""

    def html(self) -> Iterator[str]:
        """Return the block's HTML elements, in order."""


class Marked(str):
    """A highlighted table cell or recipe value."""

    __slots__ = ()


class Text:
    """Paragraphs; `backticks` mark code."""

    def __init__(self, *paragraphs: str, kind: Literal["plain", "good", "warning", "bad"] = "plain") -> None:
        """Take paragraphs; a kind other than plain labels them with a word, not by colour alone."""
        self.paragraphs = paragraphs
        self.kind = kind

    def html(self) -> Iterator[str]:
        """Return one element per paragraph."""
        prefix = {"plain": "", "good": "Good: ", "warning": "Note: ", "bad": "Failed: "}[self.kind]
        for paragraph in self.paragraphs:
            label = f"<strong>{prefix}</strong>" if prefix else ""
            yield f'<p class="{self.kind}">{label}{inline(paragraph)}</p>'


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under named columns.

    Attributes:
        columns: Their headings.
        rows: Cells: text, numbers, or None if unknown. The first cell names the row.
        caption: The table's caption.
        folded: Whether it is collapsed under its caption.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""
    folded: bool = False

    def html(self) -> Iterator[str]:
        """Return a table that scrolls sideways, also by keyboard, if it is too wide."""
        name = html_text(self.caption)
        if self.folded:
            yield f"<details><summary>{html_text(self.caption)}</summary>"
        yield f'<div class="table" role="region" aria-label="{name}" tabindex="0"><table>'
        yield f"<caption{' class=hidden' * self.folded}>{html_text(self.caption)}</caption>"
        texts = [[cell_text(cell) for cell in row] for row in self.rows]
        present = [[row[at] for row in texts if row[at] not in (_MISSING, "")] for at in range(len(self.columns))]
        numeric = [bool(cells) and all(map(_NUMBER.match, cells)) for cells in present]
        yield "<thead><tr>"
        for heading, is_numeric in zip(self.columns, numeric, strict=True):
            yield f'<th scope="col"{_class(is_numeric)}>{html_text(heading)}</th>'
        yield "</tr></thead><tbody>"
        for row, cells in zip(self.rows, texts, strict=True):
            yield f"<tr>{''.join(_cells(row, cells, numeric))}</tr>"
        yield "</tbody></table></div>"
        if self.folded:
            yield "</details>"


@dataclass(frozen=True)
class Tile:
    """One headline figure.

    Attributes:
        label: What it is.
        value: The number with its unit.
        note: A short note below it.
    """

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Tiles:
    """Headline figures side by side."""

    tiles: Sequence[Tile]

    def html(self) -> Iterator[str]:
        """Return a description list."""
        yield '<dl class="tiles">'
        for tile in self.tiles:
            note = f'<dd class="note">{html_text(tile.note)}</dd>' if tile.note else ""
            yield f"<div><dt>{html_text(tile.label)}</dt><dd>{html_text(tile.value)}</dd>{note}</div>"
        yield "</dl>"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A small picture with its caption.

    Attributes:
        data: A data URL of a PNG, JPEG, WebP or GIF.
        caption: Text below it.
        alternative: Alternative text, for screen readers and as a tooltip.
    """

    data: str
    caption: str
    alternative: str


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """Pictures side by side; one without valid image data shows only its text.

    Attributes:
        pictures: In order.
        caption: What they are.
        folded: Whether it is collapsed under its caption.
    """

    pictures: Sequence[Picture]
    caption: str
    folded: bool = False

    def html(self) -> Iterator[str]:
        """Return a list of figures under its caption."""
        told = inline(self.caption)
        yield f"<details><summary>{told}</summary>" if self.folded else f'<p class="description">{told}</p>'
        yield '<ul class="gallery">'
        for each in self.pictures:
            alternative = html_text(each.alternative)
            is_picture = _PICTURE.match(each.data)
            image = (
                f'<img src="{each.data}" alt="{alternative}">' if is_picture else f'<p class="note">{alternative}</p>'
            )
            caption = html_text(each.caption)
            yield f'<li><figure title="{alternative}">{image}<figcaption>{caption}</figcaption></figure></li>'
        yield "</ul>"
        if self.folded:
            yield "</details>"


def inline(text: str) -> str:
    """Convert a paragraph's text: `backticks` become code, everything else is escaped."""
    return _CODE.sub(r"<code>\1</code>", html_text(text))


def cell_text(cell: object) -> str:
    """Format a cell: numbers with six significant digits, whole numbers in full."""
    if cell is None:
        return _MISSING
    if isinstance(cell, bool) or not isinstance(cell, (int, float)):
        return str(cell)
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:,.6g}"


def _class(is_numeric: bool) -> str:
    return " class=number" if is_numeric else ""


def _cells(row: Sequence[object], cells: Sequence[str], numeric: Sequence[bool]) -> Iterator[str]:
    for column, (cell, text) in enumerate(zip(row, cells, strict=True)):
        written = f"<mark>{html_text(text)}</mark>" if isinstance(cell, Marked) else html_text(text)
        if column == 0:
            yield f'<th scope="row"{_class(numeric[0])}>{written}</th>'
        else:
            yield f"<td{_class(numeric[column])}>{written}</td>"
