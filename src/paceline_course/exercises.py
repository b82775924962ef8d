"""Exercises of a notebook: whether each is done, and what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """What the check of an exercise found.

    Attributes:
        name: Of the exercise, such as ``2a.3``.
        is_done: Whether every check passed.
        missing: What is still missing, in one sentence; empty if it is done.
    """

    name: str
    is_done: bool
    missing: str = ""

    def __str__(self) -> str:
        return f"{self.name}  done" if self.is_done else f"{self.name}  not yet: {self.missing}"


# The latest of each exercise in this process, for `paceline labs check`.
VERDICTS: dict[str, Verdict] = {}


@contextmanager
def exercise(name: str) -> Iterator[None]:
    """Run checks of an exercise, say what came of them, and let the notebook go on either way.

    A check is an ``assert`` with a message for the student. What a cell that was not filled in does (``...`` used as a
    number, ``NotImplementedError``) counts as not done; an error of another kind is told with its type.

    Args:
        name: Number of the lab, a dot, number of the exercise: ``2a.3``.
    """
    try:
        yield
    except AssertionError as error:
        verdict = Verdict(name, is_done=False, missing=str(error) or "a check failed")
    except NotImplementedError:
        verdict = Verdict(name, is_done=False, missing="nothing is written here yet")
    except Exception as error:  # noqa: BLE001  # whatever a student's code raises is told, and the notebook goes on
        verdict = Verdict(name, is_done=False, missing=f"{type(error).__name__}: {error}")
    else:
        verdict = Verdict(name, is_done=True)
    VERDICTS[name] = verdict
    print(verdict)
