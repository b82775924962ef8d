"""The reference program earns all points; each wrong program loses the points it should, with the right reason.

A wrong program is a small change to the reference, described by a table in ``wrong/``.
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
from paceline_course.grading.grade import RunHost
from paceline_course.grading.supervise import ResourceLimits

NOTEBOOKS = Path(paceline_course.__file__).parent / "notebooks"
REFERENCE = NOTEBOOKS / "instructor" / "reference.py"
TABLES = sorted((Path(__file__).parent / "wrong").glob("*.toml"))
LIMITS = ResourceLimits(processor_seconds=12, idle_seconds=5)

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="detecting hangs needs /proc"),
]


@dataclass(frozen=True)
class Variant:
    """A changed reference: ``lost`` are the criteria that lose points, ``ALL`` for all that need a trained network."""

    name: str
    about: str
    changes: list[list[str]]
    lost: list[str] = field(default_factory=list)
    says: str = ""
    # Variants whose effect it would hide in the same program, or that would hide its own.
    not_with: list[str] = field(default_factory=list)

    def program(self) -> str:
        return changed(REFERENCE.read_text(), [self])

    @property
    def runs_alone(self) -> bool:
        """Whether it must be graded alone, because it would hide other mistakes."""
        return len(self.lost) > 2 or not {"ALL", "ends", "throughput", "inside", "same_weights"}.isdisjoint(self.lost)


def changed(text: str, variants: Sequence[Variant]) -> str:
    for variant in variants:
        for old, new in variant.changes:
            if text.count(old) != 1:
                raise ValueError(f"{variant.name} changes {old!r}, which occurs {text.count(old)} times")
            text = text.replace(old, new)
    return text


def combine(variants: Sequence[Variant]) -> list[list[Variant]]:
    """Group variants into programs with several mistakes that lose different criteria, to save time."""
    text = REFERENCE.read_text()
    groups: list[list[Variant]] = []
    for variant in variants:
        group = next((group for group in groups if all(_can_combine(variant, other, text) for other in group)), None)
        if group is None:
            groups.append([variant])
        else:
            group.append(variant)
    return groups


def _can_combine(one: Variant, other: Variant, text: str) -> bool:
    hides = one.name in other.not_with or other.name in one.not_with
    if hides or one.runs_alone or other.runs_alone or not {*one.lost}.isdisjoint(other.lost):
        return False
    try:
        return changed(text, [one, other]) == changed(text, [other, one])
    except ValueError:  # both change the same text
        return False


WRONG = combine([Variant(name, **row) for table in TABLES for name, row in tomllib.loads(table.read_text()).items()])
RIGHT = [Variant(name, **row) for name, row in tomllib.loads((TABLES[0].parents[1] / "right.toml").read_text()).items()]


@pytest.fixture(scope="module")
def host() -> Iterator[RunHost]:
    """One host for all gradings of this file, so that torch is loaded once."""
    with closing(RunHost()) as started:
        yield started


def test_reference_earns_all_points(tmp_path: Path) -> None:
    progress: list[str] = []
    marks = grade(REFERENCE, on_progress=progress.append)
    assert reasons(marks) == {}
    assert (marks.points, marks.most, marks.passed) == (100, 100, True)
    assert len(progress) >= 9
    assert json.loads(json.dumps(marks.to_json()))["points"] == 100
    # Measured at 8 to 15 on two cores.
    assert marks.processor_seconds < 60


@pytest.mark.parametrize("right", RIGHT, ids=lambda right: right.name)
def test_other_correct_programs_earn_all_points(right: Variant, host: RunHost, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(right.program())
    assert reasons(grade(program, limits=LIMITS, host=host)) == {}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: ",".join(each.name for each in wrong))
def test_wrong_programs_lose_the_expected_points(wrong: list[Variant], host: RunHost, tmp_path: Path) -> None:
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


def test_skeleton_earns_almost_nothing(host: RunHost) -> None:
    marks = grade(NOTEBOOKS / "assessment" / "skeleton.py", limits=LIMITS, host=host)
    assert marks.points <= 1
    assert "not every rank made an optimizer step" in reasons(marks)["ends"]


@pytest.mark.parametrize("how", ["start_new_session=False", "start_new_session=True", "start_new_session=True, env={}"])
def test_started_processes_are_ended(how: str, host: RunHost, tmp_path: Path) -> None:
    program, mark = tmp_path / "train.py", f"sleep(600)  # {uuid.uuid4().hex}"
    program.write_text(
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.{mark}'], {how})\n"
    )
    assert grade(program, limits=LIMITS, host=host).points <= 1
    lines = [entry / "cmdline" for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    assert [path for path in lines if mark.encode() in content(path)] == []


def test_limits_of_processes_memory_and_file_size(host: RunHost, tmp_path: Path) -> None:
    ended_for = []
    for body in (
        "import os, time\nfor _ in range(40):\n    if os.fork() == 0:\n        break\ntime.sleep(60)\n",
        "import torch\nfull = torch.ones(3 << 30)\n",
        "open('large', 'wb').write(bytes(65 << 20))\n",
    ):
        program = tmp_path / "train.py"
        program.write_text(body)
        ended_for.append(reasons(grade(program, limits=LIMITS, host=host))["ends"])
    assert "more processes than allowed" in ended_for[0]
    assert "RuntimeError" in ended_for[1]
    assert "OSError" in ended_for[2]


def test_kernel_may_enforce_the_processor_limit_first(host: RunHost, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("while True:\n    pass\n")
    progress: list[str] = []
    marks = grade(
        program, on_progress=progress.append, limits=ResourceLimits(processor_seconds=0.5, poll_seconds=1e6), host=host
    )
    assert "with 1 process did not end: it exceeded the limit of processor time" in reasons(marks)["ends"]
    assert progress == ["1 process, network plain"], "the other runs would fail in the same way"


def test_missing_file_and_notebook(tmp_path: Path) -> None:
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
    except OSError:  # the process has ended
        return b""
