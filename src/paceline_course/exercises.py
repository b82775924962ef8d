"""Checks of exercises: whether each is done, and what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """Result of an exercise's check.

    Attributes:
        name: The exercise's name, such as ``2a.3``.
        is_done: Whether every check passed.
        missing: What is still missing, in one sentence; empty if it is done.
    """

    name: str
    is_done: bool
    missing: str = ""

    def __str__(self) -> str:
        return f"{self.name}  done" if self.is_done else f"{self.name}  not yet: {self.missing}"


# The latest verdict on each exercise in this process.
VERDICTS: dict[str, Verdict] = {}


@contextmanager
def exercise(name: str) -> Iterator[None]:
    """Run the checks of an exercise and print the verdict; the notebook continues either way.

    A check is an ``assert`` with a message for the student. Any other exception counts as not done too:
    ``NotImplementedError`` means that nothing is written yet, and the message of any other names its type.

    Args:
        name: The lab's number, a dot and the exercise's number: ``2a.3``.
    """
    try:
        yield
    except AssertionError as error:
        verdict = Verdict(name, is_done=False, missing=str(error) or "a check failed")
    except NotImplementedError:
        verdict = Verdict(name, is_done=False, missing="nothing is written here yet")
    except Exception as error:  # noqa: BLE001  # report whatever a student's code raises; the notebook continues
        verdict = Verdict(name, is_done=False, missing=f"{type(error).__name__}: {error}")
    else:
        verdict = Verdict(name, is_done=True)
    VERDICTS[name] = verdict
    print(verdict)


def use_answer(name: str) -> None:
    """Run the course's answer to an exercise in the notebook, unless the exercise is done, so that later cells work.

    Args:
        name: The exercise's name, such as ``2a.3``.
    """
    if name in VERDICTS and VERDICTS[name].is_done:
        print(f"{name}  later cells use your code")
        return
    from IPython import get_ipython

    from paceline_course.course import find_lab

    get_ipython().run_cell(find_lab(name.partition(".")[0]).answers[name])
    print(f"{name}  later cells use the course's answer; run your own cell again before you repeat the check")
