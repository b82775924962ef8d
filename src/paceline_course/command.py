"""`paceline labs`: start labs, check exercises, make slides and mark the assessment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from paceline.cli.options import FiniteRange, LocalPath, json_option
from paceline.cli.output import echo, print_json, print_table, store_verdict
from paceline.command import command
from paceline.errors import LabError
from paceline.parsing.files import refuse_special_outputs

_lab_argument: Callable[[Any], Any] = click.argument("number", metavar="N")


@command("labs", group="More", place=4)
@click.group("labs", short_help="Work through the course: start a lab, check exercises, mark the assessment.")
def labs() -> None:
    """A course on training with several devices: notebooks that run on two CPU cores and check your exercises.

    \b
    Examples:
      paceline labs list
      paceline labs start 1
      paceline labs check 1
      paceline labs slides 1 --output slides.html
      paceline labs grade training.py
    """


def _started(file_name: str) -> list[Path]:
    """Return the copies of a notebook in the current directory and its subfolders."""
    return [path for path in (Path(file_name), *sorted(Path().glob(f"*/{file_name}"))) if path.exists()]


@labs.command("list", short_help="List the labs: topic, duration, exercises.")
@json_option
def list_labs(as_json: bool) -> None:
    """List the labs in the order of the course."""
    from paceline_course.course import all_labs

    labs: list[dict[str, Any]] = [
        {
            "number": lab.number,
            "title": lab.title,
            "minutes": lab.minutes,
            "exercises": lab.exercise_names,
            "slides": lab.slides,
            "started": bool(_started(lab.file_name)),
        }
        for lab in all_labs()
    ]
    if as_json:
        print_json(labs)
        return
    rows = [
        (
            lab["number"],
            lab["title"],
            lab["minutes"] or "",
            len(lab["exercises"]),
            "yes" if lab["started"] else "no",
        )
        for lab in labs
    ]
    print_table(("lab", "title", "minutes", "exercises", "started here"), rows, indent="")


@labs.command("start", short_help="Write the notebook of a lab and open it.")
@_lab_argument
@click.argument("folder", type=LocalPath(file_okay=False), default=Path())
@click.option("--no-open", is_flag=True, help="Do not open Jupyter.")
@json_option
def start(number: str, folder: Path, no_open: bool, as_json: bool) -> int:
    """Write the notebook of lab N and its files into FOLDER (default: the current directory), and open it in Jupyter.

    No file is overwritten. Jupyter opens only on a terminal and if it is installed.

    \b
    Examples:
      paceline labs start 1
      paceline labs start 2a course --no-open
    """
    from paceline_course.course import find_lab
    from paceline_course.starting import start_lab

    lab = find_lab(number)
    notebook = start_lab(lab, folder)
    if as_json:
        print_json({"number": lab.number, "title": lab.title, "notebook": str(notebook)})
        return 0
    echo(f"Lab {lab.number}, {lab.title}: {notebook}")
    echo(f"Check your exercises: paceline labs check {lab.number} {notebook}")
    if find_spec("jupyterlab") and not no_open and sys.stdout.isatty():
        return subprocess.call([sys.executable, "-P", "-m", "jupyterlab", str(notebook)])
    echo(f"Open it: jupyter lab {notebook}")
    return 0


@labs.command("check", short_help="Check the exercises of a lab.")
@_lab_argument
@click.argument("file", type=LocalPath(dir_okay=False), required=False)
@click.option(
    "--seconds", type=FiniteRange(1, 3600), default=180, show_default=True, help="Time limit for all exercises."
)
@json_option
def check(number: str, file: Path | None, seconds: float, as_json: bool) -> int:
    """Check which exercises of lab N are done in FILE (default: the lab's notebook in the current directory).

    FILE is a notebook, or a Python file in jupytext's percent format. Only set-up cells, exercises and checks run, in
    a temporary folder. The checks are always the course's own, even if FILE changes them. Save the notebook first.

    Exit code 0 if all are done, else 1.

    \b
    Examples:
      paceline labs check 1
      paceline labs check 2a course/2a_ddp.ipynb --json
    """
    from paceline_course.checking import check_lab
    from paceline_course.course import find_lab

    lab = find_lab(number)
    if file is None:
        file = Path(lab.file_name)
        if not file.exists():
            found = _started(lab.file_name)
            yours = f"name your notebook: `paceline labs check {lab.number} {found[0] if found else 'FILE'}`"
            writes = "" if found else f"create it with `paceline labs start {lab.number}`, or "
            raise LabError(f"there is no {file} here; {writes}{yours}.")
    verdicts = check_lab(lab, file, seconds=seconds)
    done = sum(each.is_done for each in verdicts)
    code = store_verdict(passed=done == len(verdicts))
    if as_json:
        exercises = [{"name": each.name, "done": each.is_done, "missing": each.missing} for each in verdicts]
        print_json({"lab": lab.number, "file": str(file), "done": done, "exercises": exercises})
    else:
        for each in verdicts:
            echo(str(each))
        echo(f"{done} of {len(verdicts)} done")
    return code


@labs.command("slides", short_help="Make the slides of a lab.")
@_lab_argument
@click.option(
    "--output",
    type=LocalPath(dir_okay=False),
    required=True,
    metavar="FILE",
    help="File to write: Marp Markdown (.md), or an offline HTML page (.html), which needs Marp CLI.",
)
@click.option("--marp", type=LocalPath(), metavar="PATH", help="Path of Marp CLI (default: marp).")
@click.option(
    "--seconds", type=FiniteRange(1, 7200), default=900, show_default=True, help="Time limit for running the lab."
)
@json_option
def slides(number: str, output: Path, marp: Path | None, seconds: float, as_json: bool) -> int:
    """Make the slides of lab N: one file with all figures.

    For the figures, the whole lab is run in a temporary folder. This can take minutes.

    \b
    Examples:
      paceline labs slides 1 --output slides.md
      paceline labs slides 1 --output slides.html --marp node_modules/.bin/marp
    """
    from paceline_course.course import find_lab
    from paceline_course.execution import execute
    from paceline_course.slides import find_marp, slides_of, to_html

    lab = find_lab(number)
    if output.suffix not in (".md", ".html"):
        raise LabError(f"'{output}' must end in .md or .html.")
    if not output.parent.is_dir():
        raise LabError(f"there is no folder '{output.parent}' for '{output.name}'.")
    refuse_special_outputs(output)
    program = find_marp(marp) if output.suffix == ".html" else None
    executed = execute(lab.notebook, lab, seconds=seconds)
    if executed.error:
        raise LabError(f"lab {lab.number} failed: {executed.error}.")
    text = slides_of(executed.notebook, lab.title)
    try:
        output.write_text(text if program is None else to_html(text, program), encoding="utf-8")
    except OSError as error:
        raise LabError(f"'{output}' cannot be written ({error.strerror}).") from error
    if as_json:
        print_json({"lab": lab.number, "slides": lab.slides, "file": str(output)})
    else:
        echo(f"{output}: {lab.slides} slide{'s' * (lab.slides != 1)}")
    return 0


@labs.command("grade", short_help="Run and mark a program of the assessment.")
@click.argument("file", type=LocalPath(dir_okay=False))
@json_option
def grade(file: Path, as_json: bool) -> int:
    """Mark FILE, a training program for the assessment, by running it with 1, 2 and 3 processes.

    The whole program must be in FILE: only this file is copied into a temporary folder. It runs within limits of
    time, memory and processes. The result gives a reason for each lost point.

    Exit code 0 if it passes, else 1.

    \b
    Examples:
      paceline labs grade training.py
      paceline labs grade training.py --json > marks.json
    """
    if not file.is_file():
        raise LabError(f"there is no file '{file}'; name your program for the assessment.")
    from paceline_course.grading import grade as mark

    marks = mark(file, on_progress=lambda line: echo(line, err=True))
    code = store_verdict(passed=marks.passed)
    if as_json:
        print_json({"file": str(file), **marks.to_json()})
        return code
    rows = [(one.title, f"{one.points:g}", f"{one.most:g}") for one in marks.criteria]
    print_table(("criterion", "points", "of"), [*rows, ("total", f"{marks.points:g}", f"{marks.most:g}")], indent="")
    titles_by_text: dict[str, list[str]] = {}  # print a reason that several criteria share once
    for one in marks.criteria:
        for text in filter(None, (one.reason, one.note)):
            titles_by_text.setdefault(text, []).append(one.title)
    for text, titles in titles_by_text.items():
        echo(f"\n{'; '.join(titles)}: {text}")
    echo("\nPassed." if marks.passed else "\nNot passed.")
    return code
