"""What is a page made of, and how is it written: one HTML file that opens anywhere, without a network?

A page has sections of blocks. A chart's figure is what Plotly takes, plain dictionaries; its script lies in the page.
"""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import RunDirectoryError
from paceline.pages.assembly import Page, Section, assemble
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


def write_page(path: Path, page: Page) -> Path:
    """Write a page as one file; a reader finds the old one or the new one, never a part.

    Returns:
        The path.

    Raises:
        PacelineError: If Plotly is not installed.
        RunDirectoryError: If the file cannot be written.
    """
    document = assemble(page)
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
