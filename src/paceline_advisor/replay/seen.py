"""`paceline seen`: which steps of which runs used a sample, and which weights have not."""

from __future__ import annotations

import contextlib
import filecmp
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from paceline.command import Log
from paceline.data.batch import Placement
from paceline.errors import DataError, PacelineError
from paceline.host.world import World
from paceline.pages.page import Table
from paceline.pages.shown import Shown
from paceline.parsing.units import counted, format_count
from paceline.recipe.load import OWN_LOOP, load_recipe
from paceline.records.environment import in_folder_of
from paceline.records.ledger import ledger_files
from paceline.records.reader import read_environment, read_plan_to_resume, read_recipe
from paceline.records.run_directory import RunDirectory, existing_run
from paceline.reports.audit import used_samples
from paceline.trainer.subject import Subject
from paceline.training_record import beginning
from paceline_advisor import Json, frozen, named, picked
from paceline_advisor.commands import Seen
from paceline_advisor.replay.points import points_of
from paceline_advisor.replay.verify import CannotTellError

_MOST_STEPS = 12


@frozen
class Sighting:
    """What a run did with a sample.

    Attributes:
        run: The run directory, as given.
        sample_id: The sample's number in the training set; None if it is not in it.
        name: Its name there, or in the held-out set; empty if the sample was given by its number.
        is_held_out: Whether it is held out, so that it was scored, but not trained on.
        steps: The steps that used it, from 1.
        epochs: The epochs of these steps, from 1.
        clean_checkpoints: Steps of the kept checkpoints that were saved before any use.
        used_checkpoints: Steps of the others.
        began_with: Where the initial weights came from; empty for random ones.
        unknown: Why nothing can be told; empty otherwise.
    """

    run: Path
    sample_id: int | None = None
    name: str = ""
    is_held_out: bool = False
    steps: tuple[int, ...] = ()
    epochs: tuple[int, ...] = ()
    clean_checkpoints: tuple[int, ...] = ()
    used_checkpoints: tuple[int, ...] = ()
    began_with: str = ""
    unknown: str = ""

    def __str__(self) -> str:
        """The answer in a few words."""
        if self.unknown:
            return "cannot tell"
        if self.is_held_out:
            return "held out: scored, not trained on"
        if self.sample_id is None:
            return "not in its data"
        if not self.steps:
            return "not used yet"
        return f"used in {counted(len(self.steps), 'step')}: {named([f'{each:,}' for each in self.steps], _MOST_STEPS)}"


@frozen
class SeenReport:
    """Result of a search.

    Attributes:
        sample: The sample, as given.
        sightings: One for each run.
    """

    sample: str
    sightings: tuple[Sighting, ...]

    def to_json(self) -> Json:
        """Return the report as one JSON object."""
        keys = ("sample_id", "name", "is_held_out", "steps", "epochs", "clean_checkpoints", "used_checkpoints")
        runs = [{"run": str(each.run), **picked(each, *keys, "began_with", "unknown")} for each in self.sightings]
        return {"sample": self.sample, "runs": runs}

    def __paceline__(self) -> Shown:
        """Show a row for each run, and what the ledgers cannot know."""

        def steps(some: tuple[int, ...]) -> str:
            return named([f"{each:,}" for each in some]) or "none"

        rows, lines = [], []
        for each in self.sightings:
            number = "" if each.sample_id is None else f"{each.sample_id:,}"
            rows.append((str(each.run), number, str(each), steps(each.used_checkpoints), steps(each.clean_checkpoints)))
            if each.unknown:
                lines.append(f"{each.run}: {each.unknown}.")
            if each.began_with:
                lines.append(f"{each.run} began with {each.began_with}, whose samples its ledger does not hold.")
        columns = ("run", "number", "sample", "checkpoints after a use", "before any")
        names = dict.fromkeys(each.name for each in self.sightings if each.name)
        unknown = [each for each in self.sightings if each.unknown]
        ok = CannotTellError(f"cannot tell for {counted(len(unknown), 'run')}.") if unknown else True
        return Shown(title=", ".join(names) or self.sample, blocks=[Table(columns=columns, rows=rows), *lines], ok=ok)


def look(options: Seen, log: Log) -> SeenReport:
    """Find the steps of runs that used a sample.

    Raises:
        PacelineError: If a run's records are damaged, its data are not here, or no run's data hold the sample.
    """
    runs = [(path, existing_run(path.absolute())) for path in options.runs]
    found = []
    for path, run in runs:
        if len(runs) > 1:
            log(f"searching {path}")
        try:
            found.append(_look(path, run, options.sample))
        except CannotTellError as error:
            found.append(Sighting(run=path, unknown=" ".join(str(error).split()).rstrip(".")))
    if not any(each.unknown or each.is_held_out or each.sample_id is not None for each in found):
        raise DataError(
            f"no sample of {named([str(path) for path in options.runs])} is called {options.sample!r}: give a file of "
            "the data, the end of its path, or a sample's number."
        )
    return SeenReport(sample=options.sample, sightings=tuple(found))


def _look(path: Path, run: RunDirectory, sample: str) -> Sighting:
    tree, samples = read_recipe(run), int(read_plan_to_resume(run)["train_samples"])
    name, held_out = "", False
    number: int | None
    if sample.isascii() and sample.isdecimal() and not Path(sample).exists():
        number = int(sample)
        if number >= samples:
            raise DataError(f"{path} has the samples 0 to {format_count(samples - 1)}, found {sample}; choose one.")
    elif tree.get("task") == OWN_LOOP:
        raise CannotTellError("a program with paceline.Loop trained it, so that names are not known; give a number.")
    else:
        number, name, held_out = _named(run, sample)
    uses = {} if number is None else _uses(run, number)
    first = min(uses, default=None)
    points = [each for each in points_of(run)[0] if each.path is not None]
    used = [each for each in points if first is not None and each.position >= first]
    return Sighting(
        run=path,
        sample_id=number,
        name=name,
        is_held_out=held_out,
        steps=tuple(sorted(uses)),
        epochs=tuple(sorted(set(uses.values()))),
        clean_checkpoints=tuple(each.step for each in points if each not in used),
        used_checkpoints=tuple(each.step for each in used),
        began_with=beginning(tree),
    )


def _uses(run: RunDirectory, sample: int) -> dict[int, int]:
    """Return the steps that used a sample, with their epochs, from 1."""
    uses = {}
    for path in ledger_files(run.ledger):
        for entry in used_samples(run.root, int(path.stem.rpartition("-")[2])):
            if sample in entry.ids:
                uses[entry.step] = entry.epoch + 1
    return uses


def _named(run: RunDirectory, sample: str) -> tuple[int | None, str, bool]:
    """Return the number and the name of a sample given by its name, and whether it is held out.

    Raises:
        CannotTellError: If the data cannot be opened here, or are not those of the run.
        DataError: If several samples have the name.
    """
    wanted = Path(sample).absolute()
    with in_folder_of(read_environment(run)):
        names = list(_names(run))
        found = [each for each in names if _is(each[1], sample, wanted)]
        if not found and wanted.is_file():
            found = [each for each in names if _same_bytes(wanted, Path(each[1]))]
    if len(found) > 1:
        raise DataError(
            f"{len(found):,} samples of {run.root} match {sample!r}: {named([name for _, name, _ in found])}; "
            "give the whole name of one, or its number."
        )
    if not found:
        return None, "", False
    ((number, name, held_out),) = found
    return None if held_out else number, name, held_out


def _names(run: RunDirectory) -> Iterator[tuple[int, str, bool]]:
    """Yield number, name and whether it is held out, of each sample of the run's data."""
    recipe, digest = load_recipe(run.root).recipe, read_plan_to_resume(run)["data"].get("digest")
    with contextlib.ExitStack() as stack:
        try:
            subject = stack.enter_context(Subject.open(recipe, World(), "task"))
            pipeline = stack.enter_context(
                contextlib.closing(subject.task.open_pipeline(Placement(device=torch.device("cpu"))))
            )
        except PacelineError as error:
            raise CannotTellError(f"its data cannot be opened here ({error}); give the sample's number.") from error
        if subject.data.description.get("digest") != digest:
            raise CannotTellError(
                "names, sizes or number of its samples have changed since it was trained, and so have the numbers: "
                "restore the data, or give the sample's number."
            )
        for held_out, count in ((False, subject.data.train_samples), (True, subject.data.evaluation_samples)):
            for number in range(count):
                yield number, pipeline.sample_name(number, training=not held_out), held_out


def _is(name: str, sample: str, wanted: Path) -> bool:
    return name == sample or name.endswith(f"/{sample}") or os.path.abspath(name) == str(wanted)


def _same_bytes(one: Path, other: Path) -> bool:
    try:
        return one.stat().st_size == other.stat().st_size and filecmp.cmp(one, other, shallow=False)
    except OSError:
        return False
