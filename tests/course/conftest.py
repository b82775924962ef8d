"""A small lab, and students' notebooks of it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_TO_END_SECONDS = 20.0  # of what is killed, until it has had the processor to end on

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
# What a sum is. It takes about an hour and a half; exercises take five minutes.

# %% tags=["setup"]
from paceline_course import exercise

numbers = [1, 2, 3]

# %%
shown = "what no check needs"
print(len(Path("beside.txt").read_text()) if False else "figures")

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


# %% tags=["answer"] jupyter={"source_hidden": true}
def add(values: list[int]) -> int:
    return sum(values)


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

# %% tags=["answer"] jupyter={"source_hidden": true}
# %%writefile guess.py
total = 6
"""


@pytest.fixture
def lab(tmp_path: Path) -> Any:
    """A lab of two exercises, with a file beside it."""
    from paceline_course.course import Lab

    pytest.importorskip("jupytext", reason="needs jupytext, which the extra labs brings")
    path = tmp_path / "course" / "9b_sums.py"
    (path.parent / "sums").mkdir(parents=True)
    (path.parent / "sums" / "beside.txt").write_text("beside")
    (path.parent / "sums" / "reference.py").write_text("an answer to look up")
    path.write_text(SAMPLE)
    return Lab(path)


@pytest.fixture
def student(lab: Any, tmp_path: Path) -> Callable[..., Path]:
    """``student({"9b.1": source, …})``: a notebook with these exercises written, the others as they were."""
    import nbformat

    from paceline_course.starting import for_student

    def write(sources: dict[str, str], change: Callable[[Any], None] = lambda _: None) -> Path:
        notebook = for_student(lab.notebook)
        for exercise in lab.exercises:
            cell = notebook.cells[exercise.written]
            cell.source = sources.get(exercise.name, cell.source)
        change(notebook)
        path = tmp_path / "mine.ipynb"
        nbformat.write(notebook, path)
        return path

    return write


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process that a test started, at whatever remove, is alive after it."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("PACELINE_TEST_OF_LABS", mark)
    yield
    deadline = time.monotonic() + _TO_END_SECONDS
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
