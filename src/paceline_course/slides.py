"""Slides from the cells tagged ``slide``, as Marp Markdown with embedded figures."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.errors import LabError
from paceline_course.cells import tags_of

_HEAD = """\
---
marp: true
title: {title}
paginate: true
math: mathjax
style: |
  section {{ font-family: "Noto Sans", "DejaVu Sans", Helvetica, Arial, sans-serif; }}
  section {{ font-size: 28px; padding: 44px 64px; }}
  section {{ display: flex; flex-direction: column; justify-content: flex-start; }}
  section h1, section h2 {{ color: #0b4f6c; }}
  section pre {{ font-size: 20px; }}
  section > * {{ flex: 0 0 auto; margin: 0 0 0.5em; }}
  section > p:has(> img) {{ flex: 1 1 0; min-height: 0; }}
  section > p > img {{ width: 100%; height: 100%; object-fit: contain; }}
---
"""
_LINES_OF_OUTPUT = 12
# Markdown lines that the next line never continues (headings, tables, HTML, fences, quotes, formulas); and lines that
# begin a block.
_SINGLE = re.compile(r"\s*(#|\||<|>|```|~~~|\$\$)")
_BLOCK = re.compile(rf"{_SINGLE.pattern}|\s*([-*+]|\d+[.)])\s")
_MARP = "marp"
_TIMEOUT_SECONDS = 180
# Emoji images would be loaded from the network; line breaks in the source are not line breaks on the slide.
_CONFIGURATION = {"options": {"emoji": {"unicode": False, "shortcode": False}, "markdown": {"breaks": False}}}


def slides_of(notebook: Any, title: str) -> str:
    """Return the slides of an executed lab as Marp Markdown, with figures as data URIs.

    Args:
        notebook: The executed notebook.
        title: The lab's title.

    Raises:
        LabError: If no cell has the tag ``slide``.
    """
    slides: list[list[str]] = []
    for cell in notebook.cells:
        if "slide" not in tags_of(cell):
            continue
        if cell.cell_type == "markdown":
            slides.append([_unwrapped(cell.source.strip())])
        elif slides:
            slides[-1] += _outputs(cell)
    if not slides:
        raise LabError(f"no cell of '{title}' has the tag slide.")
    return _HEAD.format(title=json.dumps(title)) + "\n\n---\n\n".join("\n\n".join(slide) for slide in slides) + "\n"


def _unwrapped(text: str) -> str:
    """Join each paragraph and list item into one line: by default Marp shows every line end as a break."""
    lines: list[str] = []
    fenced = may_continue = False
    for line in text.splitlines():
        if may_continue and line.strip() and not _BLOCK.match(line):
            lines[-1] += f" {line.strip()}"
            continue
        lines.append(line)
        fenced ^= line.lstrip().startswith(("```", "~~~"))
        may_continue = not fenced and bool(line.strip()) and not _SINGLE.match(line)
    return "\n".join(lines)


def _outputs(cell: Any) -> Iterator[str]:
    for output in cell.get("outputs", ()):
        if output.output_type == "stream":
            if output.name == "stdout" and output.text.strip():
                yield _fenced(output.text)
        elif output.output_type in ("display_data", "execute_result"):
            yield from _displayed(output.data)


def _displayed(data: Any) -> Iterator[str]:
    if "image/png" in data:
        yield f"![](data:image/png;base64,{''.join(data['image/png'].split())})"
    elif "text/markdown" in data:
        yield _unwrapped(data["text/markdown"].strip())
    elif "text/plain" in data:
        yield _fenced(data["text/plain"])


def _fenced(text: str) -> str:
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).strip("\n").splitlines()
    if len(lines) > _LINES_OF_OUTPUT:
        lines = [*lines[: _LINES_OF_OUTPUT - 1], "…"]
    fence = "```" if "```" not in text else "~~~~"
    return "\n".join((f"{fence}text", *lines, fence))


def find_marp(path: Path | None) -> str:
    """Return the path of Marp CLI, which converts slides to HTML.

    Args:
        path: The program the user named; None to search PATH for ``marp``.

    Raises:
        LabError: If it is not found.
    """
    found = shutil.which(str(path) if path is not None else _MARP)
    if found is None:
        raise LabError(
            f"HTML slides need Marp CLI, and there is no program '{path or _MARP}'; install it with `npm install "
            "--global @marp-team/marp-cli`, name it with --marp PATH, or write Markdown: --output slides.md."
        )
    return found


def to_html(markdown: str, marp: str) -> str:
    """Convert slides to one HTML page that needs no network.

    Raises:
        LabError: If Marp CLI fails.
    """
    with tempfile.TemporaryDirectory(prefix="labs-") as name:
        folder = Path(name)
        source, page, options = (folder / each for each in ("slides.md", "slides.html", "options.json"))
        source.write_text(markdown, encoding="utf-8")
        options.write_text(json.dumps(_CONFIGURATION), encoding="utf-8")
        words = [marp, str(source), "--output", str(page), "--config-file", str(options), "--no-stdin"]
        try:
            done = subprocess.run(
                words,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=_TIMEOUT_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LabError(f"'{marp}' made no slides ({error}); write Markdown: --output slides.md.") from error
        if done.returncode or not page.exists():
            message = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise LabError(f"'{marp}' made no slides ({html.unescape(message[0])}); is it Marp CLI?")
        return page.read_text(encoding="utf-8")
