"""Check the exercises of a lab: run the student's cells with the shipped checks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.errors import LabError
from paceline.host.processes import signal_name
from paceline_course.cells import names_in, read_notebook, tags_of
from paceline_course.course import Lab
from paceline_course.exercises import Verdict
from paceline_course.scratch import ScratchResult, run_in_scratch, scratch_folder


@dataclass
class StudentCells:
    """A student's cells for one exercise.

    Attributes:
        setup: Set-up cells since the previous exercise's check.
        cells: The exercise's cell, and those between it and its check.
    """

    setup: list[str] = field(default_factory=list)
    cells: list[str] = field(default_factory=list)


def check_lab(lab: Lab, file: Path, *, seconds: float) -> list[Verdict]:
    """Check each exercise of a lab.

    Only set-up cells, exercises, checks and answers run, in a separate process and a scratch folder. After each check
    the lab's answer runs, as in the notebook, so an exercise does not depend on earlier ones.

    Args:
        lab: The lab.
        file: The student's notebook, or Python file in percent format.
        seconds: Timeout for all exercises together.

    Raises:
        LabError: If the file is not a notebook of this lab, or the lab's set-up fails.
    """
    if not lab.exercises:
        raise LabError(f"lab {lab.number} has no exercises to check.")
    plan = list(_plan(lab, student_cells(read_notebook(file), lab, file)))
    with scratch_folder() as folder:
        lab.copy_files(folder / "work")
        (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        notes = folder / "notes.jsonl"
        notes.touch()
        paths = [str(folder / "plan.json"), str(notes)]
        result = run_in_scratch("paceline_course.session", paths, folder, seconds=seconds)
        return _verdicts(lab, plan, _read(notes), result, seconds)


def student_cells(notebook: Any, lab: Lab, file: Path) -> dict[str, StudentCells]:
    """Return a student's cells for each exercise.

    An exercise is identified by the check that follows it, even if the student has moved it.

    Raises:
        LabError: If the notebook has no exercise of this lab.
    """
    names = [exercise.name for exercise in lab.exercises]
    found: dict[str, StudentCells] = {}
    current, inside = StudentCells(), False
    for cell in notebook.cells:
        tags = tags_of(cell)
        if cell.cell_type != "code":
            continue
        if "check" in tags:
            found.update({name: current for name in names_in(cell) if name in names and name not in found})
            current, inside = StudentCells(), False
        elif "setup" in tags:
            current.setup.append(cell.source)
        elif "exercise" in tags or (inside and "answer" not in tags):
            current.cells.append(cell.source)
            inside = True
    if not found:
        raise LabError(
            f"'{file}' has no exercise of lab {lab.number}: an exercise is identified by the check cell after it. "
            f"`paceline labs start {lab.number}` writes a notebook with all exercises."
        )
    return found


def _plan(lab: Lab, written: dict[str, StudentCells]) -> Iterator[dict[str, str]]:
    """Yield the cells to run, in the lab's order even if the student has moved cells."""
    shipped = {cell.source for cell in lab.notebook.cells if "setup" in tags_of(cell)}
    begun = {exercise.written: exercise.name for exercise in lab.exercises if exercise.name in written}
    ended = {exercise.check: exercise for exercise in lab.exercises if exercise.name in written}
    answers = lab.answers
    for at, cell in enumerate(lab.notebook.cells):
        if "setup" in tags_of(cell):
            yield {"kind": "setup", "exercise": "", "source": cell.source}
        if at in begun:
            yield from _student_steps(begun[at], written[begun[at]], shipped)
        if at in ended:
            name = ended[at].name
            yield {"kind": "check", "exercise": name, "source": cell.source}
            yield {"kind": "answer", "exercise": name, "source": answers[name]}


def _student_steps(name: str, own: StudentCells, shipped: set[str]) -> Iterator[dict[str, str]]:
    # The shipped set-up cells have run already; only those that the student changed or added run here.
    for source in (each for each in own.setup if each not in shipped):
        yield {"kind": "own setup", "exercise": name, "source": source}
    for source in own.cells:
        yield {"kind": "student", "exercise": name, "source": source}


def _read(notes: Path) -> dict[int, dict[str, Any]]:
    """Return the latest note on each cell; the last line may be incomplete."""
    found: dict[int, dict[str, Any]] = {}
    for line in notes.read_text(encoding="utf-8").split("\n")[:-1]:
        note = json.loads(line)
        found[note["begun"] if "begun" in note else note["ended"]] = note
    return found


def _verdicts(
    lab: Lab, plan: Sequence[dict[str, str]], notes: dict[int, dict[str, Any]], ended: ScratchResult, seconds: float
) -> list[Verdict]:
    if not notes:
        last = ended.stderr.splitlines()[-1] if ended.stderr else f"exit code {ended.code}"
        install = ": pip install 'paceline[labs]'" if last.startswith("ModuleNotFoundError") else ""
        raise LabError(f"the checks of lab {lab.number} cannot be started ({last}){install}.")
    for position, note in notes.items():
        if note.get("error") and plan[position]["kind"] == "setup":
            raise LabError(f"the set-up of lab {lab.number} failed: {note['error']}.")
    stuck = plan[max(notes)] if ended.code != 0 else None
    if stuck is not None and stuck["kind"] == "setup":
        raise LabError(f"the set-up of lab {lab.number} {_why(ended, seconds)}.")
    return [_verdict(exercise.name, plan, notes, stuck, _why(ended, seconds)) for exercise in lab.exercises]


def _verdict(
    name: str, plan: Sequence[dict[str, str]], notes: dict[int, dict[str, Any]], stuck: dict[str, str] | None, why: str
) -> Verdict:
    steps = [position for position, step in enumerate(plan) if step["exercise"] == name]
    if not steps:
        return Verdict(name, is_done=False, missing="its cell, or the check after it, is missing from the notebook")
    for position in steps:
        note = notes.get(position, {})
        said = [Verdict(**verdict) for verdict in note.get("verdicts", ()) if verdict["name"] == name]
        if said:
            return replace(said[-1], missing=_explained(said[-1].missing))
        if note.get("error"):
            return Verdict(name, is_done=False, missing=_explained(note["error"]))
    if stuck is not None and stuck["exercise"] == name:
        return Verdict(name, is_done=False, missing=f"it {why}")
    before = f"{stuck['exercise']} {why}" if stuck is not None else "its check gave no verdict"
    return Verdict(name, is_done=False, missing=f"not checked, because {before}")


def _explained(missing: str) -> str:
    """Explain an undefined name: cells that define it may not run in a check."""
    if "NameError: " not in missing:
        return missing
    return (
        f"{missing} (only set-up cells and the exercise's own cells run here: import and define in them what you need)"
    )


def _why(ended: ScratchResult, seconds: float) -> str:
    """Return why a process ended early, as the part of a sentence after its subject."""
    if ended.code is None:
        return f"was still running after {seconds:g} s: is there an infinite loop? (--seconds gives more time)"
    if ended.code < 0:
        return f"ended Python with {signal_name(ended.code)}"
    return f"ended Python with exit code {ended.code}"
