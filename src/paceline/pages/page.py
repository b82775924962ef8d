"""A page: sections of blocks, written as one HTML file that opens anywhere, without a network.

A chart is plain Plotly dictionaries; Plotly's script is embedded in the page. The content security policy blocks all
loading and allows only two scripts, by digest. So even text that was left unescaped could not run.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from itertools import count, groupby
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.pages.blocks import Block, Gallery, Marked, Picture, Table, Text, Tile, Tiles
from paceline.pages.charts import Chart
from paceline.parsing.files import refuse_special_outputs
from paceline.parsing.plain_text import html_text
from paceline.records.run_directory import file_operation, write_bytes

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

_SCRIPT = "plotly/package_data/plotly.min.js"
# These traces use WebGL, for which Plotly builds functions from text.
_WEBGL = ("gl", "surface", "3d", "splom", "parcoords", "cone", "volume", "isosurface", "streamtube")


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page.

    Attributes:
        title: Its heading.
        blocks: From top to bottom; consecutive charts are placed side by side if there is room.
    """

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, kw_only=True, repr=False)
class Page:
    """A page with its title and sections.

    Attributes:
        title: Its heading and the browser tab's title.
        subtitle: A sentence below it.
        sections: From top to bottom.
    """

    title: str
    subtitle: str
    sections: Sequence[Section]

    def save(self, path: str | Path) -> Path:
        """Write it as one HTML file, as :func:`write_page` does."""
        return write_page(Path(path), self)

    def __repr__(self) -> str:
        return f"Page({self.title!r})"

    def _repr_html_(self) -> str:
        """Show it in a notebook, in a frame that loads nothing."""
        style = "width: 100%; height: 480px; border: 0"
        return (
            f'<iframe title="{html_text(self.title)}" style="{style}" srcdoc="{html.escape(_assemble(self))}"></iframe>'
        )


def write_page(path: Path, page: Page) -> Path:
    """Write a page as one file, atomically: a reader never sees a partial page.

    Returns:
        The path.

    Raises:
        PacelineError: If Plotly is not installed.
        RunDirectoryError: If the file cannot be written, or its path is not a regular file.
    """
    refuse_special_outputs(path)
    with file_operation("make", path.parent, noun="folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
    # File names may contain bytes that are not valid Unicode.
    write_bytes(path, _assemble(page).encode("utf-8", "replace"))
    return path


def _assemble(page: Page) -> str:
    """Return the page as one HTML document."""
    charts = [block for section in page.sections for block in section.blocks if isinstance(block, Chart)]
    body = "\n".join(_body(page, charts))
    script = files("paceline.pages").joinpath("page.js").read_text(encoding="utf-8")
    style = files("paceline.pages").joinpath("page.css").read_text(encoding="utf-8")
    digests = [script_digest(script.encode())]
    scripts = []
    if charts:
        packed, digest = plotly_script()
        digests.append(digest)
        figures = {f"chart-{number}": chart.figure() for number, chart in enumerate(charts, 1)}
        scripts = [
            f'<script type="application/json" id="figures">{_script_json(figures)}</script>',
            f'<script type="application/gzip" id="plotly">{packed}</script>',
        ]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(digests, charts)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<meta name="generator" content="Paceline">',
            '<link rel="icon" href="data:,">',
            f"<title>{html_text(page.title)}</title>\n<style>{style}</style>\n</head>\n<body>",
            body,
            *scripts,
            f"<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


def _script_json(document: Any) -> str:
    """Return JSON that is safe inside a script element: it cannot end the element or a line."""
    text = json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _policy(digests: Sequence[str], charts: Sequence[Chart]) -> str:
    kinds = {str(trace.get("type", "scatter")) for chart in charts for trace in chart.traces}
    makes_functions = any(kind.endswith(_WEBGL) for kind in kinds)
    scripts = " ".join([*(f"'sha256-{digest}'" for digest in digests), *["'unsafe-eval'"] * makes_functions])
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _body(page: Page, charts: Sequence[Chart]) -> Iterator[str]:
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
    if charts:
        yield "<noscript><p class=warning>Charts need JavaScript; their figures are in the tables below them.</p>"
        yield "</noscript>"
    numbers = count(1)
    for at, section in enumerate(page.sections):
        heading = f' aria-labelledby="section-{at}"><h2 id="section-{at}">{html_text(section.title)}</h2>'
        yield "<section" + (">" if section.title == page.title else heading)
        for are_charts, group in groupby(section.blocks, key=lambda block: isinstance(block, Chart)):
            yield '<div class="charts">' * are_charts
            for block in group:
                yield from block.html(next(numbers)) if isinstance(block, Chart) else block.html()
            yield "</div>" * are_charts
        yield "</section>"
    yield "</main>\n<footer>Made by Paceline. This file loads nothing: it can be kept and sent. "
    yield "In charts, drag to zoom in and double-click to reset." * bool(charts) + "</footer>"


@cache
def plotly_script() -> tuple[str, str]:
    """Pack Plotly's script; takes about 0.25 s, once per process.

    Returns:
        The embedded script (gzip, base64) and its digest in content-security-policy form.

    Raises:
        PacelineError: If Plotly is not installed.
    """
    try:
        script = Path(str(distribution("plotly").locate_file(_SCRIPT))).read_bytes()
    except (PackageNotFoundError, FileNotFoundError):
        raise PacelineError("charts need Plotly, which is not installed: pip install 'paceline[vision]'") from None
    # Without a timestamp, the same script gives the same page.
    packed = gzip.compress(script, compresslevel=6, mtime=0)
    return base64.b64encode(packed).decode("ascii"), script_digest(script)


def script_digest(script: bytes) -> str:
    """Return a script's digest for the content security policy."""
    return base64.b64encode(sha256(script).digest()).decode("ascii")
