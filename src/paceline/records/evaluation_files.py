"""Which files of a run directory speak of its last evaluation, and are they still true of a run that goes on?"""

from __future__ import annotations

from paceline.errors import RunDirectoryError
from paceline.records.reader import read_json
from paceline.records.run_directory import RunDirectory


def forget_evaluations_after(directory: RunDirectory, position: int) -> None:
    """Remove what is told of an evaluation later than ``position``: the run that goes on will make it again."""
    for path in (directory.confusion, directory.examples):
        if not path.is_file():
            continue
        try:
            told = read_json(path)
            is_later = int(told["position"]) > position
        except (RunDirectoryError, KeyError, TypeError, ValueError):
            is_later = True  # half a file of another disk: nobody could read it
        if is_later:
            path.unlink(missing_ok=True)
