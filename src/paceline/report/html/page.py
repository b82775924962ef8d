"""The report: one page about a run, or a comparison of several, from their run directories alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RunDirectoryError
from paceline.files import refuse_odd_outputs
from paceline.pages.page import Block, Page, Section, Text, write_page
from paceline.pages.shown import Shown
from paceline.records.reader import read_summary
from paceline.records.run_directory import RunDirectory, cannot
from paceline.report.html.config import environment, recipe
from paceline.report.html.outcome import facts_of, outcome
from paceline.report.html.predictions import predictions
from paceline.report.html.runs import RunRecord, read_runs
from paceline.report.html.scaling import scaling
from paceline.report.html.speed import memory, speed
from paceline.report.html.timeline import findings, happened, proof, steps_in_words
from paceline.report.html.training import training
from paceline.units import format_bytes

_Maker = Callable[[Sequence[RunRecord]], Iterator[Block]]
_SECTIONS: dict[str, _Maker] = {
    "Outcome": outcome,
    "Training": training,
    "Speed": speed,
    "Memory": memory,
    "Scaling": scaling,
    "Predictions": predictions,
    "Events": happened,
    "Samples": proof,
    "Doctor": findings,
    "Recipe": recipe,
    "Environment": environment,
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report that was written.

    Attributes:
        path: The file.
        runs: What it is about.
    """

    path: Path
    runs: Sequence[RunRecord]

    def to_json(self) -> dict[str, Any]:
        """As one JSON object."""
        return {
            "report": str(self.path),
            "size_bytes": self.path.stat().st_size,
            "runs": [facts_of(run) for run in self.runs],
        }

    def __paceline__(self) -> Shown:
        """Where the page is."""
        return Shown(blocks=(f"{self.path} ({format_bytes(self.path.stat().st_size)})",))


# Of events, read in half a second. Who stops a run by a signal may give it little time.
_MOST_BYTES_IN_A_HURRY = 8_000_000

_PAGE_START = b"<!doctype html>"


def report_at_the_end(directory: RunDirectory) -> None:
    """Write the report of a run that has just come to its end, unless a signal asked it to and it would take long.

    Raises:
        RunDirectoryError: If it is not written, with what to do instead.
    """
    is_hurried = directory.summary.is_file() and read_summary(directory).details.get("ending") == "signal"
    if is_hurried and directory.events.stat().st_size > _MOST_BYTES_IN_A_HURRY:
        raise RunDirectoryError(
            f"a run that is told to stop may have little time, and its records are many; `paceline report "
            f"{directory.root}` writes it."
        )
    write_report([directory.root], directory.report)


def write_report(run_dirs: Sequence[Path], output: Path | None = None) -> Report:
    """Write the report of one run, or the comparison of several.

    Args:
        run_dirs: The run directories, each once.
        output: The file; None is ``report.html`` in the directory of the only run, or here where there are several.

    Raises:
        RunDirectoryError: If one of them is no run, or the file cannot be written.
    """
    if output is not None:
        refuse_odd_outputs(output)
        _refuse_other_file(output)
    runs = read_runs(run_dirs)
    if output is None:
        output = runs[0].path / "report.html" if len(runs) == 1 else Path("report.html")
    return Report(path=write_page(output, page_of(runs)), runs=runs)


def _refuse_other_file(path: Path) -> None:
    """Refuse to replace a file that is not a page.

    Raises:
        RunDirectoryError: If it is not empty and does not begin as a page does, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            begins = file.read(len(_PAGE_START))
    except FileNotFoundError:
        return
    except OSError as error:
        raise cannot("read", path, error) from error
    if begins and begins.lower() != _PAGE_START:
        raise RunDirectoryError(f"'{path}' exists, is not an HTML page, and is not replaced: give another name.")


def page_of(runs: Sequence[RunRecord]) -> Page:
    """The page; a section that has nothing to tell is left out."""
    order = list(_SECTIONS)
    if len(runs) > 1:
        # What differs is why one compares: it comes before what came of it.
        order.insert(1, order.pop(order.index("Recipe")))
    sections = ((title, _blocks(_SECTIONS[title], runs)) for title in order)
    return Page(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared",
        subtitle=_subtitle(runs),
        sections=tuple(Section(title=title, blocks=blocks) for title, blocks in sections if blocks),
    )


def _blocks(make: _Maker, runs: Sequence[RunRecord]) -> tuple[Block, ...]:
    """A section's blocks; files that are not what they should be spoil their own section only."""
    try:
        return tuple(make(runs))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        told = f"a file in the run directory holds something unexpected ({type(error).__name__}: {error})."
        return (Text(told, kind="bad"),)


def _subtitle(runs: Sequence[RunRecord]) -> str:
    if len(runs) > 1:
        return ", ".join(run.name for run in runs[:8]) + ", …" * (len(runs) > 8)
    run = runs[0]
    network = run.recipe.get("model.name")
    data = run.recipe.get("data.dataset")
    return f"{network or 'A network'} on {data or 'its data'}, {steps_in_words(run)}, in {run.path}"
