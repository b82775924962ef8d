"""A page: sections of blocks, written as one HTML file that opens anywhere, without a network.

A chart's figure is what Plotly takes, plain dictionaries; Plotly's script lies in the page.
Its content policy lets it load nothing and run two scripts only, known by their digests. So a text that slipped through
unescaped would still do nothing.
"""

from __future__ import annotations

import base64
import gzip
import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, RunDirectoryError
from paceline.escaping import html_text
from paceline.files import refuse_odd_outputs
from paceline.pages.blocks import Block, Gallery, Marked, Picture, Table, Text, Tile, Tiles
from paceline.pages.charts import Chart

__all__ = [
    "Block",
    "Chart",
    "Gallery",
    "Marked",
    "Page",
    "Picture",
    "Section",
    "Table",
    "Text",
    "Tile",
    "Tiles",
    "write_page",
]

# These draw with WebGL, for which Plotly makes functions out of text.
_WEBGL = ("gl", "surface", "3d", "splom", "parcoords", "cone", "volume", "isosurface", "streamtube")


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page.

    Attributes:
        title: Its heading.
        blocks: From top to bottom; charts that follow one another stand side by side where there is room.
    """

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page: what it is about, and its sections.

    Attributes:
        title: Its heading, and the name of the browser's tab.
        subtitle: A sentence beneath it.
        sections: From top to bottom.
    """

    title: str
    subtitle: str
    sections: Sequence[Section]


def write_page(path: Path, page: Page) -> Path:
    """Write a page as one file; a reader finds the old one or the new one, never a part.

    Returns:
        The path.

    Raises:
        PacelineError: If Plotly is not installed.
        RunDirectoryError: If the file cannot be written, or something else than a file is there.
    """
    refuse_odd_outputs(path)
    document = _assemble(page)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # A page can be made again: it is not worth waiting for the disk.
            # Names of files may hold what is no Unicode.
            temporary.write_bytes(document.encode("utf-8", "replace"))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunDirectoryError(
            f"Cannot write the page '{path}': {reason}. Choose a file in a folder you may write to."
        ) from error
    return path


def _assemble(page: Page) -> str:
    """The page as one HTML document."""
    charts = list(_numbered(page))
    body = "\n".join(_body(page, {id(chart): number for number, chart in charts}))
    script = _own("page.js")
    digests = [script_digest(script.encode())]
    scripts = []
    if charts:
        packed = plotly_script()
        digests.append(packed.digest)
        figures = {f"chart-{number}": chart.figure() for number, chart in charts}
        scripts = [
            f'<script type="application/json" id="figures">{_script_json(figures)}</script>',
            f'<script type="application/gzip" id="plotly">{packed.text}</script>',
        ]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(digests, charts)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<meta name="generator" content="Paceline">',
            '<link rel="icon" href="data:,">',
            f"<title>{html_text(page.title)}</title>\n<style>{_own('page.css')}</style>\n</head>\n<body>",
            body,
            *scripts,
            f"<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


def _script_json(document: Any) -> str:
    """JSON that may stand in a script element: nothing in it ends the element or a line."""
    text = json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _numbered(page: Page) -> Iterator[tuple[int, Chart]]:
    """Every chart with the number of its figure, each number once."""
    charts = [block for section in page.sections for block in section.blocks if isinstance(block, Chart)]
    taken = {chart.number for chart in charts if chart.number is not None}
    following = 1
    for chart in charts:
        if chart.number is not None:
            yield chart.number, chart
            continue
        while following in taken:
            following += 1
        yield following, chart
        taken.add(following)


def _policy(digests: Sequence[str], charts: Sequence[tuple[int, Chart]]) -> str:
    kinds = {str(trace.get("type", "scatter")) for _, chart in charts for trace in chart.traces}
    makes_functions = any(kind.endswith(_WEBGL) for kind in kinds)
    scripts = " ".join([*(f"'sha256-{digest}'" for digest in digests), *["'unsafe-eval'"] * makes_functions])
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _body(page: Page, numbers: dict[int, int]) -> Iterator[str]:
    yield '<a class="skip" href="#content">Skip to the content</a>'
    yield f'<header><div><h1>{html_text(page.title)}</h1><p class="subtitle">{html_text(page.subtitle)}</p></div>'
    yield '<button type="button" id="theme" hidden></button></header>'
    if len(page.sections) > 1:
        links = (
            f'<li><a href="#section-{at}">{html_text(section.title)}</a></li>'
            for at, section in enumerate(page.sections)
        )
        yield f'<nav aria-label="Sections"><ul>{"".join(links)}</ul></nav>'
    yield '<main id="content" tabindex="-1">'
    yield '<p id="trouble" class="warning" role="status" hidden></p>'
    if numbers:
        yield "<noscript><p class=warning>Charts need JavaScript; their figures are in the tables below them.</p>"
        yield "</noscript>"
    for at, section in enumerate(page.sections):
        yield f'<section aria-labelledby="section-{at}"><h2 id="section-{at}">{html_text(section.title)}</h2>'
        yield from _blocks(section.blocks, numbers)
        yield "</section>"
    yield "</main>\n<footer>Made by Paceline. This file loads nothing: it can be kept and sent. "
    yield "In charts, drag to look closer and double-click to go back.</footer>"


def _blocks(blocks: Sequence[Block], numbers: dict[int, int]) -> Iterator[str]:
    for are_charts, together in groupby(blocks, key=lambda block: isinstance(block, Chart)):
        if are_charts:
            yield '<div class="charts">'
        for block in together:
            yield from block.figure_html(numbers[id(block)]) if isinstance(block, Chart) else block.html()
        if are_charts:
            yield "</div>"


@cache
def _own(name: str) -> str:
    return files("paceline.pages").joinpath(name).read_text(encoding="utf-8")


_SCRIPT = Path("package_data") / "plotly.min.js"


@dataclass(frozen=True)
class PackedScript:
    """A script as it lies in a page.

    Attributes:
        text: gzip, in base64.
        digest: SHA-256 of the script unpacked, in base64, as a browser's content policy takes it.
    """

    text: str
    digest: str


@cache
def plotly_script() -> PackedScript:
    """Plotly's script, packed; takes a quarter of a second, once per process.

    Raises:
        PacelineError: If Plotly is not installed.
    """
    # Looks for the package without importing it.
    found = importlib.util.find_spec("plotly")
    folders = [Path(each) for each in (found.submodule_search_locations or ())] if found else []
    files = [folder / _SCRIPT for folder in folders if (folder / _SCRIPT).is_file()]
    if not files:
        raise PacelineError("there is no Plotly to draw charts with; install it: pip install plotly")
    script = files[0].read_bytes()
    # Without a time in it the same script gives the same page.
    packed = gzip.compress(script, compresslevel=6, mtime=0)
    return PackedScript(base64.b64encode(packed).decode("ascii"), script_digest(script))


def script_digest(script: bytes) -> str:
    """What a content policy knows a script by."""
    return base64.b64encode(sha256(script).digest()).decode("ascii")
