"""Sum the points; 70 of 100 pass."""

from __future__ import annotations

import json

import pytest

from paceline_course.grading.marks import Criterion, Marks


@pytest.mark.parametrize(("points", "passed"), [(69.0, False), (70.0, True), (100.0, True)])
def test_passed(points: float, passed: bool) -> None:
    marks = Marks((Criterion("a", "A", points, 100.0, reason="so" if points < 100 else ""),))
    assert marks.passed is passed
    assert [one.name for one in marks.lost] == (["a"] if points < 100 else [])


def test_no_marks_do_not_pass() -> None:
    assert not Marks(()).passed


def test_json() -> None:
    marks = Marks((Criterion("a", "A", 1, 2, "why", seen={"ratio": 2.0}), Criterion("b", "B", 3, 3)), 1.234, 5.678)
    found = json.loads(json.dumps(marks.to_json()))
    assert (found["points"], found["most"], found["passed"]) == (4, 5, True)
    assert found["criteria"][0] == {
        "name": "a",
        "title": "A",
        "points": 1,
        "most": 2,
        "reason": "why",
        "note": "",
        "seen": {"ratio": 2.0},
    }
