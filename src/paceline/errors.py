"""The errors that a user can cause, and their exit codes.

Every error a user can cause is a :class:`PacelineError`: its message names the value found, the rule it breaks and the
change to make. The command line prints only the message, without a traceback, and exits with ``exit_code``.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar


class PacelineError(Exception):
    """Base of all errors with a message written for the user; each argument is a line of it.

    The fields hold what a program may need of the message, where the code that raises it knows them.

    Attributes:
        key: The recipe key that it is about, dotted; of another trainer's recipe, the option.
        value: The value found.
        path: The file or folder that it is about.
        rule: What the value must be, in words that do not depend on the value.
    """

    exit_code = 2

    def __init__(
        self,
        *lines: object,
        key: str | None = None,
        value: object = None,
        path: str | Path | None = None,
        rule: str | None = None,
    ) -> None:
        super().__init__(*lines)
        self.key, self.value, self.path, self.rule = key, value, path, rule

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_frames(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function's :class:`PacelineError` end in its caller's traceback: the message says what to change."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except PacelineError as error:
            raise error.with_traceback(None) from error.__cause__

    return call


class RecipeError(PacelineError):
    """The recipe, or an override, asks for something that does not exist or has no effect."""


def wrong_kind(key: str, value: object, fix: str) -> RecipeError:
    """Return the error for an argument of a type that it cannot have."""
    return RecipeError(f"{key} is a {type(value).__name__}; give {fix}.", key=key, value=value)


def setting_error(key: str, value: object, problem: str) -> RecipeError:
    """Return the error for the value of a recipe's key: the message begins with both, a duration in quotes."""
    shown = f"'{value}'" if is_dataclass(value) else value
    return RecipeError(f"{key}={shown} {problem}", key=key, value=value)


class DataError(PacelineError):
    """The data is missing, empty, unreadable or not what the recipe says it is."""


def data_error(path: str | Path, problem: str) -> DataError:
    """Return the error for a file or folder of data, which the message begins with."""
    return DataError(f"{str(path)!r} {problem}", path=path)


class ModelError(PacelineError):
    """The model is unknown, or does not fit the data or the weights given."""


class StorageError(PacelineError):
    """An address cannot be reached, read or written."""


class LaunchError(PacelineError):
    """The processes of a run cannot be started or cannot connect to each other."""


class StoppedError(PacelineError):
    """The process received a stop request before there was anything to save."""

    exit_code = 75


class CheckpointError(PacelineError):
    """A checkpoint is missing, damaged, or does not belong to this run."""


class UnreadableError(CheckpointError):
    """A checkpoint cannot be read now: a disk's error, or a link to a disk that is not mounted. It is not damaged."""


class RunDirectoryError(PacelineError):
    """The run directory cannot be used for this run."""


class VersionError(UnreadableError, RunDirectoryError):
    """A file has a format of another version of Paceline. It is not damaged."""

    @classmethod
    def of(cls, path: object, version: object) -> VersionError:
        """Return the error for a file with the version found in it."""
        return cls(
            f"'{path}' has the format version {version}, which this version of Paceline cannot read; nothing was "
            "changed. Use the version of Paceline that wrote it.",
            value=version,
            path=str(path),
        )


class LoopError(PacelineError):
    """A program uses :class:`paceline.Loop` in a way that cannot work."""


class LabError(PacelineError):
    """A lab of the course, or what a student wrote for it, is missing, or cannot be read or run."""


class TrainingError(PacelineError):
    """The run itself failed after it had started."""

    exit_code = 1


class NotFiniteError(PacelineError):
    """Weights, or results computed with them, are not finite."""

    exit_code = 1


class OneProcessError(TrainingError):
    """The run failed on one process; the others only notice that it is missing."""


class LostWorkerError(OneProcessError):
    """A loader process has died; the code running in this process is unrelated."""


class OtherProcessError(TrainingError):
    """The run failed on another process, whose error has the details."""


_CUTOFF, _MAX_GAP = 0.6, 0.15  # similarity from 0 to 1


def did_you_mean(value: str, options: Iterable[str], *, count: int = 3, shown: Callable[[str], str] = str) -> str:
    """Return a sentence with the nearest option names, preceded by a space, or an empty string.

    Args:
        value: The given name.
        options: The possible names.
        count: Maximum number of names.
        shown: How a name is written in the sentence, if that differs from how names are compared.
    """
    names, value = {name.lower(): name for name in options}, value.lower()
    matches = difflib.get_close_matches(value, list(names), n=count, cutoff=_CUTOFF)
    if not matches:
        return ""
    threshold = _similarity(matches[0], value) - _MAX_GAP  # drops weak matches next to a close one
    matches = [name for name in matches if _similarity(name, value) >= threshold]
    return f" Did you mean {' or '.join(repr(shown(names[name])) for name in matches)}?"


def _similarity(name: str, value: str) -> float:
    return difflib.SequenceMatcher(None, name, value).ratio()
