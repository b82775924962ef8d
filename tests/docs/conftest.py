"""How a page of documentation is read: its code blocks, and the comments before them that say what to do with them.

``<!-- runs -->`` before a ``console`` or ``python`` block has it run, ``<!-- file: NAME -->`` has a block written to a
file, ``<!-- messages -->`` before a table has its first column looked up in the source. In a console block, lines
after a command are its output; ``...`` stands for the rest of a line, or for any number of lines on a line of its own;
``[exit code N]`` ends the output of a command that does not exit with 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^```(\w*)\s*$")
_COMMENT = re.compile(r"^<!-- (runs|file|messages)(?:: (\S+))? -->$")
_EXIT = re.compile(r"^\[exit code (\d+)\]$")
_CELL = re.compile(r"^# %%(?: (.*))?$", re.MULTILINE)


@dataclass
class Command:
    """One line after ``$``, with the output the page shows; None where it shows none."""

    text: str
    output: list[str] = field(default_factory=list)
    exit_code: int = 0

    @property
    def pattern(self) -> str | None:
        """A regular expression for the output, or None if any will do."""
        if not self.output:
            return None
        return "".join(
            r"(?:[^\n]*\n)*" if line == "..." else re.escape(line).replace(r"\.\.\.", r"[^\n]*") + "\n"
            for line in self.output
        )


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, text, first line's number, and the comments above it."""

    language: str
    text: str
    line: int
    notes: Mapping[str, str]

    @property
    def runs(self) -> bool:
        """Whether the page asks for it to be run."""
        return "runs" in self.notes

    @property
    def commands(self) -> list[Command]:
        """The commands of a console block; each line of a block without ``$`` is one."""
        lines = [line.rstrip() for line in self.text.splitlines() if line.strip()]
        if not any(line.startswith("$ ") for line in lines):
            return [Command(line) for line in lines]
        found: list[Command] = []
        for line in lines:
            code = _EXIT.match(line)
            if line.startswith("$ "):
                found.append(Command(line[2:]))
            elif code:
                found[-1].exit_code = int(code[1])
            else:
                found[-1].output.append(line)
        return found


@dataclass(frozen=True)
class Page:
    """A page, taken apart."""

    path: Path
    prose: str
    blocks: tuple[Block, ...]
    messages: tuple[str, ...]


def markdown_of(notebook: str) -> str:
    """A notebook in percent format as Markdown: text, and a block of Python for each code cell."""
    cells = _CELL.split(notebook)[1:]
    return "".join(
        re.sub(r"^# ?", "", source, flags=re.MULTILINE)
        if (options or "").startswith("[markdown]")
        else f"\n```python{source}\n```\n"
        for options, source in zip(cells[::2], cells[1::2], strict=True)
    )


def read_page(path: Path) -> Page:
    """Take a page, or a notebook in percent format, apart into prose and blocks."""
    text = path.read_text(encoding="utf-8")
    prose: list[str] = []
    blocks: list[Block] = []
    messages: list[str] = []
    notes: dict[str, str] = {}
    opened: tuple[str, int] | None = None
    inside: list[str] = []
    for number, line in enumerate((markdown_of(text) if path.suffix == ".py" else text).splitlines(), start=1):
        fence, comment = _FENCE.match(line), _COMMENT.match(line)
        if opened is None and fence:
            opened, inside = (fence[1], number + 1), []
        elif opened is not None and line.strip() == "```":
            blocks.append(Block(opened[0], "\n".join(inside) + "\n", opened[1], notes))
            opened, notes = None, {}
        elif opened is not None:
            inside.append(line)
        elif comment:
            notes = {**notes, comment[1]: comment[2] or ""}
        else:
            prose.append(line)
            if "messages" in notes and line.startswith("| `"):
                messages.append(line.split("`")[1])
            elif line.strip() and not line.startswith("|"):
                notes = {}
    assert opened is None, f"{path}: a block that begins at line {opened} has no end"
    return Page(path, "\n".join(prose), tuple(blocks), tuple(messages))


@pytest.fixture(scope="session")
def page() -> Callable[[Path], Page]:
    """``page(path)``: a page, taken apart."""
    return read_page


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder the project lies in."""
    return ROOT
