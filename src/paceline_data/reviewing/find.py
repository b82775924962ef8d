"""Find the images to review, in a separate process: what a network needs is freed before the page is served."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.command import Log
from paceline.errors import DataError, PacelineError
from paceline.host.system import forking
from paceline.parsing.units import counted
from paceline.storage.addresses import is_address

if TYPE_CHECKING:
    from paceline_data.inspect.check import DataReport
    from paceline_data.inspect.gather import Progress
    from paceline_data.inspect.wrong_labels import WrongLabels

# Kinds of findings that are shown, in this order, after wrong labels and before mistakes.
_COPIES = ("contradiction", "leak", "near_leak", "duplicate")
_UNREAD = ("not_permitted", "broken_link")  # listed with the reason; without content there is nothing to decide about
_BROKEN = ("empty_file", "not_an_image", "unsupported", "truncated", "corrupt", "too_large", "no_fixed_range")
_KINDS = (*_COPIES, *_UNREAD, *_BROKEN, "unreadable", "other_file", "heic_image", "unfinished", "flat_end", "unread")
_ASIDE = ("leak", "duplicate", *_BROKEN, "unreadable", "other_file", "unread")
WRONG_LABEL, MISTAKE, EARLIER = "likely wrong label", "mistake of the run", "decided earlier"


@dataclass(frozen=True)
class Doubt:
    """A reason to look at a file.

    Attributes:
        kind: What is doubtful, in a few words.
        file: Its path, relative to the data.
        why: More about it.
        other: The file that it is a copy of, or looks like.
        suggested: The class that it may belong to.
        aside: Whether it is suggested to set it aside.
    """

    kind: str
    file: str
    why: str
    other: str | None = None
    suggested: str | None = None
    aside: bool = False


@dataclass(frozen=True)
class Found:
    """What is to be reviewed.

    Attributes:
        root: The data.
        doubts: The doubtful files, the most important first.
        notes: What was not looked for, or is not shown.
    """

    root: Path
    doubts: tuple[Doubt, ...]
    notes: tuple[str, ...]


def open_folder(source: str, overrides: Sequence[str]) -> Path:
    """Return the folder of class folders that is reviewed.

    Raises:
        PacelineError: If the source has another kind of data.
    """
    from paceline_data.inspect.gather import open_subject

    subject = None if is_address(source) else open_subject(source, overrides)
    if subject is None or subject.root is None or not subject.is_folder or subject.learned != "classes":
        raise DataError(
            f"review moves files between class folders, and {source!r} is not a folder of them on this machine; "
            f"`paceline check-data {source}` lists what is doubtful in other data.",
            path=source,
        )
    return subject.root


def find_doubts(
    source: str, overrides: Sequence[str], *, folds: int | None, folder: Path | None, progress: Progress, log: Log
) -> Found:
    """Check the data, and with a run its labels.

    Args:
        source: A folder or a run.
        overrides: Changes to the data section.
        folds: Number of folds of training samples whose labels are checked too; None to leave them out.
        folder: Keeps the folds' runs.
        progress: Called with the progress of the check.
        log: Receives the progress of the predictions.

    Raises:
        PacelineError: If the data cannot be reviewed.
    """
    from paceline_data.inspect.check import check_data

    root = open_folder(source, overrides)
    report = check_data(source, overrides, progress=progress)
    labels = None
    if (run := Path(source).expanduser()).joinpath("plan.json").is_file():
        from paceline_data.inspect.wrong_labels import find_wrong_labels

        labels = find_wrong_labels(run, overrides, folds=folds, output=folder, log=log)
    doubts = tuple(_doubts(report, labels, root))
    return Found(root, doubts, tuple(_notes(report, labels, source, {each.kind for each in doubts})))


def _notes(report: DataReport, labels: WrongLabels | None, source: str, shown: Collection[str]) -> Iterator[str]:
    breaks = (each for each in report.findings if each.kind.severity == "breaks")
    if left_out := sum(each.count for each in breaks if _in_words(each.kind.name) not in shown):
        broken = counted(left_out, "item")
        yield f"not shown: {broken} that break a run, such as folders; `paceline check-data {source}` lists them"
    if labels is None:
        yield "wrong labels and mistakes are shown with a run: train, then `paceline review RUN`"
    elif labels.not_checked:
        yield f"labels not checked: {labels.not_checked}"


def _doubts(report: DataReport, labels: WrongLabels | None, root: Path) -> Iterator[Doubt]:
    def relative(name: str) -> str:
        return os.path.relpath(name, root)

    for each in () if labels is None else labels.found:
        why = f"wrong with a probability of {100 * each.score:.0f} %"
        yield Doubt(WRONG_LABEL, relative(each.sample), why, suggested=each.suggested)
    by_kind = {finding.kind.name: finding for finding in report.findings}
    for finding in (by_kind[name] for name in _KINDS if name in by_kind):
        name = finding.kind.name
        for entry in finding.entries:
            if name not in (*_COPIES, *_UNREAD) and not os.path.isfile(entry.name):
                continue
            why = "; ".join(filter(None, (finding.kind.means, entry.detail)))
            other = None if entry.other is None else relative(entry.other)
            yield Doubt(_in_words(name), relative(entry.name), why, other=other, aside=name in _ASIDE)
    for each in () if labels is None else labels.mistakes:
        why = f"the network answers {each.suggested} with {100 * each.probability:.0f} %"
        yield Doubt(MISTAKE, relative(each.sample), why, suggested=each.suggested)


def _in_words(name: str) -> str:
    return name.replace("_", " ")


def in_a_child(function: Callable[[], Any]) -> Any:
    """Return the result of a function that runs in a separate process, or raise its PacelineError.

    Raises:
        PacelineError: If the process is killed.
    """
    context = forking()
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(function, sender))
    child.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        child.join()
        raise PacelineError(f"the process that checks the images ended with exit code {child.exitcode}.") from None
    finally:
        child.terminate()
        child.join()
    if isinstance(result, PacelineError):
        raise result
    return result


def _run(function: Callable[[], Any], sender: Connection) -> None:
    from paceline_data.inspect.gather import exit_with_parent

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # the parent tells how it ended
    threading.Thread(target=exit_with_parent, daemon=True).start()
    try:
        sender.send(function())
    except PacelineError as error:
        sender.send(error)
