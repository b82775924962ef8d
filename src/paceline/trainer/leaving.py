"""What is written for people to look at when a run has come to an end, and has its records?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.errors import RunDirectoryError
from paceline.records.run_directory import RunDirectory
from paceline.telemetry.mlperf_log import write_mlperf_log

if TYPE_CHECKING:
    from paceline.trainer.run import Run

Reporter = Callable[[RunDirectory], object]


def leave_pages(run: Run, report: Reporter | None) -> None:
    """Have the report and the log in MLPerf's format written, where the recipe wants them.

    Whatever goes wrong with them, the run has ended as it did.
    """
    if not run.world.is_first:
        return
    try:
        run.directory.check_in_place()
    except RunDirectoryError:
        return  # told already; nothing is written under the old name
    asked = run.recipe.telemetry
    if asked.mlperf:
        _leave(run, "the log in MLPerf's format", write_mlperf_log)
    if report is not None and asked.report:
        _leave(run, "the report", report)


def _leave(run: Run, what: str, write: Reporter) -> None:
    try:
        write(run.directory)
    except Exception as error:  # noqa: BLE001  # a page to look at is not worth a run
        with contextlib.suppress(Exception):
            run.display.message(f"note: {what} could not be written: {error}")
