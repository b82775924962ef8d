"""The reference answer earns everything; each wrong answer loses what it should, for the right reason, and no more.

A wrong answer is a small change of the reference, kept as a row of a table in ``wrong/``.
"""

from __future__ import annotations

import json
import tomllib
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import paceline_course
from paceline.errors import PacelineError
from paceline_course.grading import Marks, grade
from paceline_course.grading.grade import Host
from paceline_course.grading.supervise import Limits

NOTEBOOKS = Path(paceline_course.__file__).parent / "notebooks"
REFERENCE = NOTEBOOKS / "instructor" / "reference.py"
TABLES = sorted((Path(__file__).parent / "wrong").glob("*.toml"))
LIMITS = Limits(processor_seconds=12, idle_seconds=5)

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="hangs are recognised by what /proc tells"),
]


@dataclass(frozen=True)
class Answer:
    """One row: ``lost`` are the criteria that lose points, ``ALL`` for every one that needs a program that trains."""

    name: str
    about: str
    changes: list[list[str]]
    lost: list[str] = field(default_factory=list)
    says: str = ""
    # What it would hide, or be hidden by, in the same program.
    not_with: list[str] = field(default_factory=list)

    def program(self) -> str:
        return changed(REFERENCE.read_text(), [self])

    @property
    def is_apart(self) -> bool:
        """Whether it has a program of its own: little else would be trained, or seen."""
        return len(self.lost) > 2 or not {"ALL", "ends", "throughput", "inside", "same_weights"}.isdisjoint(self.lost)


def changed(text: str, answers: Sequence[Answer]) -> str:
    for answer in answers:
        for old, new in answer.changes:
            if text.count(old) != 1:
                raise ValueError(f"{answer.name} changes {old!r}, which stands {text.count(old)} times")
            text = text.replace(old, new)
    return text


def together(answers: Sequence[Answer]) -> list[list[Answer]]:
    """What is wrong in one way each, put together so that each criterion is lost once: a program for many mistakes."""
    text = REFERENCE.read_text()
    found: list[list[Answer]] = []
    for answer in answers:
        group = next((group for group in found if all(_fit(answer, other, text) for other in group)), None)
        if group is None:
            found.append([answer])
        else:
            group.append(answer)
    return found


def _fit(one: Answer, other: Answer, text: str) -> bool:
    hides = one.name in other.not_with or other.name in one.not_with
    if hides or one.is_apart or other.is_apart or not {*one.lost}.isdisjoint(other.lost):
        return False
    try:
        return changed(text, [one, other]) == changed(text, [other, one])
    except ValueError:  # one changes what the other has changed
        return False


WRONG = together([Answer(name, **row) for table in TABLES for name, row in tomllib.loads(table.read_text()).items()])
RIGHT = [Answer(name, **row) for name, row in tomllib.loads((TABLES[0].parents[1] / "right.toml").read_text()).items()]


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """Torch is loaded once for all gradings of this file."""
    with closing(Host()) as started:
        yield started


def test_the_reference_earns_all_points(tmp_path: Path) -> None:
    told: list[str] = []
    marks = grade(REFERENCE, on_progress=told.append)
    assert reasons(marks) == {}
    assert (marks.points, marks.most, marks.passed) == (100, 100, True)
    assert len(told) >= 9
    assert json.loads(json.dumps(marks.to_json()))["points"] == 100
    # Measured at 8 to 15 on two cores.
    assert marks.processor_seconds < 60


@pytest.mark.parametrize("right", RIGHT, ids=lambda right: right.name)
def test_other_right_answers_earn_all_points(right: Answer, host: Host, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(right.program())
    assert reasons(grade(program, limits=LIMITS, host=host)) == {}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: ",".join(each.name for each in wrong))
def test_a_wrong_answer_loses_what_it_should(wrong: list[Answer], host: Host, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(changed(REFERENCE.read_text(), wrong))
    marks = grade(program, limits=LIMITS, host=host)
    lost = reasons(marks)
    if wrong[0].lost == ["ALL"]:
        assert set(lost) == {one.name for one in marks.criteria} - {"inside"}
        assert wrong[0].says in lost["ends"]
        assert not marks.passed
        return
    assert set(lost) == {name for each in wrong for name in each.lost}, lost
    for each in wrong:
        assert each.says in lost[each.lost[0]], each.name


def test_the_skeleton_runs_and_earns_next_to_nothing(host: Host) -> None:
    marks = grade(NOTEBOOKS / "assessment" / "skeleton.py", limits=LIMITS, host=host)
    assert marks.points <= 1
    assert "not every rank made an optimizer step" in reasons(marks)["ends"]


@pytest.mark.parametrize("how", ["start_new_session=False", "start_new_session=True", "start_new_session=True, env={}"])
def test_nothing_that_it_started_is_left(how: str, host: Host, tmp_path: Path) -> None:
    program, mark = tmp_path / "train.py", f"sleep(600)  # {uuid.uuid4().hex}"
    program.write_text(
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.{mark}'], {how})\n"
    )
    marks = grade(program, limits=LIMITS, host=host)
    assert marks.points <= 1
    lines = [entry / "cmdline" for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    assert [path for path in lines if mark.encode() in content(path)] == []


def test_too_many_processes_too_much_memory_and_too_large_files_end_it(host: Host, tmp_path: Path) -> None:
    said = []
    for body in (
        "import os, time\nfor _ in range(40):\n    if os.fork() == 0:\n        break\ntime.sleep(60)\n",
        "import torch\nfull = torch.ones(3 << 30)\n",
        "open('large', 'wb').write(bytes(65 << 20))\n",
    ):
        program = tmp_path / "train.py"
        program.write_text(body)
        said.append(reasons(grade(program, limits=LIMITS, host=host))["ends"])
    assert "more processes than allowed" in said[0]
    assert "RuntimeError" in said[1]
    assert "OSError" in said[2]


def test_the_system_may_end_what_is_endless_before_the_grader_looks(host: Host, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("while True:\n    pass\n")
    told: list[str] = []
    marks = grade(program, on_progress=told.append, limits=Limits(processor_seconds=0.5, poll_seconds=1e6), host=host)
    assert "with 1 process did not end: it exceeded the limit of processor time" in reasons(marks)["ends"]
    assert told == ["1 process, network plain"], "it would only be the same again"


def test_a_file_that_is_not_there_or_a_notebook_is_told(tmp_path: Path) -> None:
    (tmp_path / "lab.ipynb").write_text("{}")
    with pytest.raises(PacelineError, match="is a notebook"):
        grade(tmp_path / "lab.ipynb")
    with pytest.raises(PacelineError, match="There is no file"):
        grade(Path("nowhere.py"))


def reasons(marks: Marks) -> dict[str, str]:
    return {one.name: one.reason for one in marks.lost}


def content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended meanwhile
        return b""
