"""The labs: names, files and topics."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline.errors import LabError, did_you_mean
from paceline_course.cells import Exercise, exercises_of, read_notebook, tags_of

_FILE = re.compile(r"(\d+)([a-z]?)_(\w+)\.py")
_HEADING = re.compile(r"^#\s+(?:Lab\s+\w+\s*[:.–-]\s*)?(.+?)\s*$", re.MULTILINE)
_MINUTES = re.compile(r"\*\*Time:\*\* about (\d+) minutes")
_CELL = re.compile(r"^# %%(?: (.*))?$", re.MULTILINE)
_TAGS = re.compile(r"tags=(\[.*?\])")


@dataclass(frozen=True)
class Lab:
    """One notebook of the course, stored as text.

    Attributes:
        path: The notebook's file.
    """

    path: Path

    @property
    def number(self) -> str:
        """The lab's number, such as ``2a``."""
        return self.path.stem.partition("_")[0]

    @property
    def name(self) -> str:
        """The file name after the number, such as ``ddp``."""
        return self.path.stem.partition("_")[2]

    @property
    def order(self) -> tuple[int, str]:
        """Sort key: the position in the course."""
        match = re.fullmatch(r"(\d+)([a-z]?)", self.number)
        assert match is not None  # all_labs() accepts only such file names
        return int(match[1]), match[2]

    @property
    def file_name(self) -> str:
        """File name of a student's notebook."""
        return f"{self.path.stem}.ipynb"

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that belong to the lab: those in the folder with its name."""
        return tuple(sorted((self.path.parent / self.name).glob("*.*")))

    def copy_files(self, folder: Path) -> None:
        """Copy the lab's files into a folder."""
        for path in self.files:
            shutil.copy(path, folder / path.name)

    @cached_property
    def notebook(self) -> Any:
        """The notebook in nbformat's form; do not change it."""
        return read_notebook(self.path)

    @cached_property
    def outline(self) -> Any:
        """The cells' type, tags and text, parsed without nbformat and jupytext."""
        _, *cells = _CELL.split(self.path.read_text(encoding="utf-8"))
        return SimpleNamespace(cells=list(map(_outline_cell, cells[::2], cells[1::2])))

    @property
    def title(self) -> str:
        """The first heading, without the lab's number."""
        texts = [cell.source for cell in self.outline.cells if cell.cell_type == "markdown"]
        match = next((found for text in texts if (found := _HEADING.search(text))), None)
        return match[1] if match else self.name.replace("_", " ")

    @property
    def minutes(self) -> int | None:
        """Duration that the text states (``**Time:** about 90 minutes``); None if it states none."""
        match = _MINUTES.search(self.path.read_text(encoding="utf-8"))
        return int(match[1]) if match else None

    @cached_property
    def exercises(self) -> tuple[Exercise, ...]:
        """The exercises, in order."""
        return tuple(exercises_of(self.notebook, self.path.name))

    @property
    def exercise_names(self) -> list[str]:
        """The exercises' names, such as ``2a.3``, in order."""
        return [each.name for each in exercises_of(self.outline, self.path.name)]

    @property
    def answers(self) -> dict[str, str]:
        """The instructor's answer to each exercise, as the source of a cell that replaces the exercise's cell."""
        text = (self.path.parent / "instructor" / f"{self.number}.py").read_text(encoding="utf-8")
        _, *cells = _CELL.split(text)
        return {name: re.sub("^# (?=%%)", "", source.strip()) for name, source in zip(*[iter(cells)] * 2, strict=True)}

    @property
    def slides(self) -> int:
        """Number of slides; each begins with a Markdown cell."""
        return sum("slide" in tags_of(cell) and cell.cell_type == "markdown" for cell in self.outline.cells)


def _outline_cell(options: str | None, text: str) -> SimpleNamespace:
    is_markdown = (options or "").startswith("[markdown]")
    tags = _TAGS.search(options or "")
    source = re.sub("^# ?", "", text, flags=re.MULTILINE) if is_markdown else text
    return SimpleNamespace(
        cell_type="markdown" if is_markdown else "code",
        metadata={"tags": json.loads(tags[1]) if tags else []},
        source=source.strip(),
    )


def course_folder() -> Path:
    """Return the folder of the course's notebooks.

    Raises:
        LabError: If there are no notebooks.
    """
    folder = Path(__file__).with_name("notebooks")
    if not any(folder.glob("*_*.py")):
        raise LabError(f"the labs are missing: {folder} contains none. Reinstall Paceline.")
    return folder


def all_labs() -> tuple[Lab, ...]:
    """Return all labs, in the order of the course."""
    labs = [Lab(path) for path in course_folder().iterdir() if _FILE.fullmatch(path.name)]
    return tuple(sorted(labs, key=lambda lab: lab.order))


def find_lab(number: str) -> Lab:
    """Return the lab with a number or name.

    Raises:
        LabError: If there is none.
    """
    labs = all_labs()
    for lab in labs:
        if number.lower() in (lab.number, lab.name, lab.path.stem, lab.path.name, lab.file_name):
            return lab
    names = ", ".join(lab.number for lab in labs)
    raise LabError(f"there is no lab '{number}'.{did_you_mean(number, [lab.name for lab in labs])} There are: {names}.")
