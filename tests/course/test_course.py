"""Find the labs, and read what they state about themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import LabError
from paceline_course.cells import tags_of
from paceline_course.course import Lab, all_labs, find_lab

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "src" / "paceline_course" / "notebooks"


def test_title_duration_and_parts_of_a_lab(lab: Lab) -> None:
    assert (lab.number, lab.name, lab.title) == ("9b", "sums", "Sums of numbers")
    assert lab.minutes == 90
    assert lab.slides == 2
    assert lab.exercise_names == ["9b.1", "9b.2"]
    assert [path.name for path in lab.files] == ["extra.txt"]
    assert lab.answers["9b.2"] == "%%writefile guess.py\ntotal = 6"


def test_outline_equals_notebook() -> None:
    pytest.importorskip("jupytext", reason="needs jupytext")
    for lab in all_labs():
        pairs = list(zip(lab.outline.cells, lab.notebook.cells, strict=True))
        assert all(ours.cell_type == theirs.cell_type and tags_of(ours) == tags_of(theirs) for ours, theirs in pairs)
        assert all(ours.source == theirs.source for ours, theirs in pairs if ours.cell_type == "markdown")
        assert lab.exercise_names == [exercise.name for exercise in lab.exercises]


@pytest.mark.parametrize(
    ("words", "minutes"),
    [
        ("**Time:** about 75 minutes, 5 minutes for each exercise", 75),
        ("It runs in 5 minutes.", None),
    ],
)
def test_duration_is_read_from_the_text(tmp_path: Path, words: str, minutes: int | None) -> None:
    path = tmp_path / "1_x.py"
    path.write_text(f"# %% [markdown]\n# # Lab 1: X\n#\n# {words}\n")
    assert Lab(path).minutes == minutes


def test_all_labs_are_found_in_order() -> None:
    files = {path.name for path in NOTEBOOKS.glob("[0-9]*.py")}
    labs = all_labs()
    assert {lab.path.name for lab in labs} == files
    assert [lab.order for lab in labs] == sorted(lab.order for lab in labs)
    assert f"jupyter lab --log-level=CRITICAL course/{labs[0].file_name}" in (ROOT / "Makefile").read_text()


def test_find_lab_by_number_or_name() -> None:
    first = all_labs()[0]
    assert find_lab(first.number) == find_lab(first.name) == find_lab(first.file_name) == first


@pytest.mark.parametrize("number", ["99", "", "../1", "1.1", "scaling"])
def test_unknown_lab(number: str) -> None:
    with pytest.raises(LabError, match=r"^there is no lab .* There are: 1"):
        find_lab(number)


def test_missing_notebooks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from paceline_course import course

    monkeypatch.setattr(course, "__file__", str(tmp_path / "course.py"))
    with pytest.raises(LabError, match="labs are missing"):
        all_labs()
