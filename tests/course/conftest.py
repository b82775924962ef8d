"""A small lab, and students' notebooks of it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_EXIT_SECONDS = 20.0  # for killed processes to exit on a busy machine

SAMPLE = """\
# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["slide"]
# # Lab 9b: Sums of numbers
#
# How to add numbers. **Time:** about 90 minutes; an exercise takes 5 minutes.

# %% tags=["setup"]
from paceline_course import exercise

numbers = [1, 2, 3]

# %%
unused = "no check needs this cell"
print(len(Path("extra.txt").read_text()) if False else "figures")

# %% tags=["slide"]
print("the sum is", sum(numbers))

# %% [markdown]
# **Exercise 9b.1.**


# %% tags=["exercise"]
def add(values: list[int]) -> int:
    raise NotImplementedError


# %% tags=["check"]
with exercise("9b.1"):
    assert add(numbers) == sum(numbers), f"the sum of {numbers} is not {add(numbers)}"

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>A loop.</details>


# %% tags=["answer"]
pass

# %% [markdown] tags=["slide"]
# ## A prediction

# %% tags=["exercise"]
# %%writefile guess.py
total = ...

# %% tags=["setup"]
expected = sum(numbers)

# %% tags=["check"]
with exercise("9b.2"):
    from guess import total

    assert total == expected, "write the sum into the file, as a number"
    assert add(numbers) == 6

# %% [markdown] tags=["hint"]
# <details><summary>Hint</summary>Add them.</details>

# %% tags=["answer"]
pass
"""

ANSWERS = """\
# %% 9b.1
def add(values: list[int]) -> int:
    return sum(values)


# %% 9b.2
# %%writefile guess.py
total = 6
"""


@pytest.fixture
def lab(tmp_path: Path) -> Any:
    """A lab of two exercises, with an additional file."""
    from paceline_course.course import Lab

    pytest.importorskip("jupytext", reason="needs jupytext")
    path = tmp_path / "course" / "9b_sums.py"
    (path.parent / "sums").mkdir(parents=True)
    (path.parent / "sums" / "extra.txt").write_text("extra")
    (path.parent / "instructor").mkdir()
    (path.parent / "instructor" / "9b.py").write_text(ANSWERS)
    path.write_text(SAMPLE)
    return Lab(path)


@pytest.fixture
def student(lab: Any, tmp_path: Path) -> Callable[..., Path]:
    """``student({"9b.1": source, …})``: a started notebook with these exercises filled in."""
    import nbformat

    from paceline_course.cells import read_notebook
    from paceline_course.starting import start_lab

    def write(sources: dict[str, str], change: Callable[[Any], None] = lambda _: None) -> Path:
        notebook = read_notebook(start_lab(lab, tmp_path / uuid.uuid4().hex))
        for exercise in lab.exercises:
            cell = notebook.cells[exercise.written]
            cell.source = sources.get(exercise.name, cell.source)
        change(notebook)
        path = tmp_path / "mine.ipynb"
        nbformat.write(notebook, path)
        return path

    return write


@pytest.fixture(autouse=True)
def no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if a process that the test started, directly or indirectly, is still running."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("PACELINE_TEST_OF_LABS", mark)
    yield
    deadline = time.monotonic() + _EXIT_SECONDS
    while (left := _alive(mark.encode())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def _alive(mark: bytes) -> list[bytes]:
    """Command lines of the processes whose environment has the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes())
        except OSError:
            continue
    return found
