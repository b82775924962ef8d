"""Check of a lab's exercises: the student's cells run with the checks as shipped."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.errors import LabError
from paceline_course.cells import names_in, read_notebook, tags_of
from paceline_course.course import Lab
from paceline_course.exercises import Verdict
from paceline_course.scratch import Ended, run_apart, scratch_folder


@dataclass
class Written:
    """What a student's notebook has for one exercise.

    Attributes:
        setup: Set-up cells before it, since the exercise before.
        cells: What is written: the exercise's cell, and those between it and its check.
    """

    setup: list[str] = field(default_factory=list)
    cells: list[str] = field(default_factory=list)


def check_lab(lab: Lab, file: Path, *, seconds: float) -> list[Verdict]:
    """Say of each exercise of a lab whether it is done.

    Only set-up cells, exercises and checks are run, in a process and a scratch folder of their own. After each check
    comes the lab's answer, as in the notebook, so that an exercise does not depend on the ones before.

    Args:
        lab: The lab.
        file: The student's notebook, or Python file in percent format.
        seconds: How long all of it may take.

    Raises:
        LabError: If the file is no notebook of this lab, or the lab's set-up does not run here.
    """
    if not lab.exercises:
        raise LabError(f"lab {lab.number} has no exercises to check.")
    plan = list(_plan(lab, written_in(read_notebook(file), lab, file)))
    with scratch_folder() as folder:
        lab.lay_out(folder / "work")
        (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        notes = folder / "notes.jsonl"
        notes.touch()
        ended = run_apart("paceline_course.session", [str(folder / "plan.json"), str(notes)], folder, seconds=seconds)
        return _verdicts(lab, plan, _read(notes), ended, seconds)


def written_in(notebook: Any, lab: Lab, file: Path) -> dict[str, Written]:
    """What a student wrote for each exercise.

    An exercise is known by the check behind it, wherever it stands now.

    Raises:
        LabError: If the notebook has no exercise of this lab.
    """
    names = [exercise.name for exercise in lab.exercises]
    found: dict[str, Written] = {}
    now, inside = Written(), False
    for cell in notebook.cells:
        tags = tags_of(cell)
        if cell.cell_type != "code":
            continue
        if "check" in tags:
            found.update({name: now for name in names_in(cell) if name in names and name not in found})
            now, inside = Written(), False
        elif "setup" in tags:
            now.setup.append(cell.source)
        elif "exercise" in tags or (inside and "answer" not in tags):
            now.cells.append(cell.source)
            inside = True
    if not found:
        raise LabError(
            f"'{file}' has no exercise of lab {lab.number}, each of which is known by the check cell behind it; "
            f"`paceline labs start {lab.number}` writes a notebook that has them."
        )
    return found


def _plan(lab: Lab, written: dict[str, Written]) -> Iterator[dict[str, str]]:
    """Cells to run, in order; the lab's own order counts, whatever the student has moved."""
    shipped = {cell.source for cell in lab.notebook.cells if "setup" in tags_of(cell)}
    begun = {exercise.written: exercise.name for exercise in lab.exercises if exercise.name in written}
    ended = {exercise.check: exercise for exercise in lab.exercises if exercise.name in written}
    for at, cell in enumerate(lab.notebook.cells):
        if "setup" in tags_of(cell):
            yield {"kind": "setup", "exercise": "", "source": cell.source}
        if at in begun:
            yield from _own(begun[at], written[begun[at]], shipped)
        if at in ended:
            name, answer = ended[at].name, lab.notebook.cells[ended[at].answer]
            yield {"kind": "check", "exercise": name, "source": cell.source}
            yield {"kind": "answer", "exercise": name, "source": answer.source}


def _own(name: str, own: Written, shipped: set[str]) -> Iterator[dict[str, str]]:
    # As they are in the lab, they have run; what a student has changed or added comes on top.
    for source in (each for each in own.setup if each not in shipped):
        yield {"kind": "own setup", "exercise": name, "source": source}
    for source in own.cells:
        yield {"kind": "student", "exercise": name, "source": source}


def _read(notes: Path) -> dict[int, dict[str, Any]]:
    """What is noted of each cell; the last line may be torn."""
    found: dict[int, dict[str, Any]] = {}
    for line in notes.read_text(encoding="utf-8").split("\n")[:-1]:
        note = json.loads(line)
        found[note["begun"] if "begun" in note else note["ended"]] = note
    return found


def _verdicts(
    lab: Lab, plan: Sequence[dict[str, str]], notes: dict[int, dict[str, Any]], ended: Ended, seconds: float
) -> list[Verdict]:
    if not notes:
        last = ended.complaints.splitlines()[-1] if ended.complaints else f"exit code {ended.code}"
        install = ": pip install 'paceline[labs]'" if last.startswith("ModuleNotFoundError") else ""
        raise LabError(f"the checks of lab {lab.number} cannot be started ({last}){install}.")
    for position, note in notes.items():
        if note.get("error") and plan[position]["kind"] == "setup":
            raise LabError(f"the set-up of lab {lab.number} does not run here: {note['error']}.")
    stuck = plan[max(notes)] if ended.code != 0 else None
    if stuck is not None and stuck["kind"] == "setup":
        raise LabError(f"the set-up of lab {lab.number} {_why(ended, seconds)}.")
    return [_verdict(exercise.name, plan, notes, stuck, _why(ended, seconds)) for exercise in lab.exercises]


def _verdict(
    name: str, plan: Sequence[dict[str, str]], notes: dict[int, dict[str, Any]], stuck: dict[str, str] | None, why: str
) -> Verdict:
    steps = [position for position, step in enumerate(plan) if step["exercise"] == name]
    if not steps:
        return Verdict(name, is_done=False, missing="its cell, or the check behind it, is missing from the notebook")
    for position in steps:
        note = notes.get(position, {})
        said = [Verdict(**verdict) for verdict in note.get("verdicts", ()) if verdict["name"] == name]
        if said:
            return replace(said[-1], missing=_explained(said[-1].missing))
        if note.get("error"):
            return Verdict(name, is_done=False, missing=_explained(note["error"]))
    if stuck is not None and stuck["exercise"] == name:
        return Verdict(name, is_done=False, missing=f"it {why}")
    before = f"{stuck['exercise']} {why}" if stuck is not None else "its check says nothing"
    return Verdict(name, is_done=False, missing=f"not looked at, because {before}")


def _explained(missing: str) -> str:
    """Say what a name that is not there may come from: cells that are not run here."""
    if "NameError: " not in missing:
        return missing
    return f"{missing} (here only set-up cells and the exercise's own are run: import and define in them what you need)"


def _why(ended: Ended, seconds: float) -> str:
    """What stopped a process before its end, as a sentence goes on after its subject."""
    if ended.code is None:
        return f"was still running after {seconds:g} s: is there a loop that does not end? (--seconds gives more time)"
    if ended.code < 0:
        return f"ended Python with {signal.Signals(-ended.code).name}"
    return f"ended Python with exit code {ended.code}"
