"""The points of a run that a replay can begin at, and a run directory as it was at one of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.checkpoint.format import read_header
from paceline.checkpoint.manifest import Manifest, check_sizes, read_components
from paceline.checkpoint.store import Best, CheckpointStore, checkpoint_name
from paceline.errors import CheckpointError
from paceline.parsing.plain_text import load_json
from paceline.recipe.load import stored_recipe
from paceline.recipe.schema import CODE_KEYS, TRAINING_CODE_KEYS, Recipe, refuse_foreign_code
from paceline.records.events import truncate_after
from paceline.records.ledger import truncate_ledgers
from paceline.records.reader import delete_evaluations_after, read_recipe
from paceline.records.run_directory import RunDirectory, file_operation, sync_directory
from paceline_advisor import frozen

Place = Callable[[Path, Path], object]
"""Puts a file or folder of the run at a path of the copy."""


@frozen
class Point:
    """The start of a run, or one of its checkpoints.

    Attributes:
        step: Optimizer steps done.
        position: Global batches used.
        path: The checkpoint; None for the start.
        manifest: Its manifest; None for the start.
    """

    step: int = 0
    position: int = 0
    path: Path | None = None
    manifest: Manifest | None = None

    @classmethod
    def of(cls, path: Path) -> Point:
        """Return the point of a checkpoint, of which names and sizes are checked.

        Raises:
            CheckpointError: If it is damaged.
        """
        manifest = check_sizes(path)
        position = manifest.facts.get("position")
        if type(position) is not int:
            raise CheckpointError(f"{path} says 'position' is {position!r}, expected a whole number.", path=path)
        return cls(step=manifest.step, position=position, path=path, manifest=manifest)

    @property
    def facts(self) -> dict[str, Any]:
        """What its manifest says of the run; empty for the start."""
        return {} if self.manifest is None else dict(self.manifest.facts)

    def header(self) -> dict[str, str]:
        """Return the metadata of its weights file; empty if there is none."""
        entry = None if self.manifest is None else self.manifest.components.get("model")
        if entry is None or self.path is None or not entry.tensor_files:
            return {}
        with file_operation("read", self.path):
            return dict(read_header(self.path / entry.tensor_files[0])[1])

    def recipe(self, run: RunDirectory) -> Recipe:
        """Return the recipe of the launch that saved it; the run's where the weights carry none.

        Raises:
            RecipeError: If it names code to import, and the user did not allow that.
        """
        stored = self.header().get("recipe")
        where = run.recipe if stored is None else self.path
        tree = read_recipe(run) if stored is None else load_json(stored)
        recipe = stored_recipe(tree, str(where))
        refuse_foreign_code(tree, recipe, str(where), trusted=False, keys=(*CODE_KEYS, *TRAINING_CODE_KEYS))
        return recipe

    def state(self, component: str) -> dict[str, Any]:
        """Return a component's state; empty without a checkpoint, or if the checkpoint has no such component."""
        if self.path is None or self.manifest is None or component not in self.manifest.components:
            return {}
        return read_components(self.path, (component,))[component]

    def best(self) -> Best | None:
        """Return the best evaluation up to it."""
        best = self.state("progress").get("best") or {}
        return Best(best["step"], best["metric"], best["value"], best["weights"]) if best else None


def copy_as_of(
    run: RunDirectory, point: Point, target: Path, *, steps: Collection[int], place: Place, rest: Place | None = None
) -> RunDirectory:
    """Make a run directory as it was when a checkpoint was saved, without changing the run's.

    Args:
        run: The run.
        point: The checkpoint.
        target: The directory to make.
        steps: The checkpoints that it has.
        place: Puts a checkpoint there.
        rest: Puts every other entry of the run directory there; None leaves out what a resume does not read.
    """
    made, store = RunDirectory(target), CheckpointStore(run.checkpoints)
    records = [run.recipe, run.plan, run.environment, run.identity, run.events]
    records += [run.sample_lengths, run.sample_classes, run.shard_sizes]
    cut = {path.name for path in records} | {run.checkpoints.name, run.ledger.name, "evaluation", ".lock"}
    gone = {run.summary.name, run.report.name, ".set-aside"}
    target.mkdir(parents=True)
    for path in (path for path in records if path.is_file()):
        shutil.copy2(path, target / path.name)
    for folder in (run.ledger, run.confusion.parent):
        if folder.is_dir():
            shutil.copytree(folder, target / folder.name)
    if rest is not None:
        for each in sorted(run.root.iterdir()):
            if each.name not in cut | gone:
                rest(each, target / each.name)
    for folder in (made.checkpoints, made.ledger):
        folder.mkdir(exist_ok=True)
    for step in steps:
        place(store.path(step), made.checkpoints / checkpoint_name(step))
    truncate_after(made.events, point.position)
    truncate_ledgers(made.ledger, point.position)
    delete_evaluations_after(made, point.position)
    CheckpointStore(made.checkpoints).name_best(point.best())
    return made


def link_tree(source: Path, target: Path) -> None:
    """Give a file, or the files of a folder, a second name; copied where the file system has no hard links."""

    def link(name: str, other: str) -> None:
        try:
            os.link(name, other, follow_symlinks=False)
        except OSError:
            shutil.copy2(name, other, follow_symlinks=False)

    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True, copy_function=link)
    else:
        link(str(source), str(target))


def sync_tree(folder: Path) -> None:
    """Make all of a folder's files and names durable."""
    for root, _, files in os.walk(folder):
        for name in files:
            path = Path(root, name)
            if path.is_file() and not path.is_symlink():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        sync_directory(Path(root))


def points_of(run: RunDirectory, *, begin: int = 0) -> tuple[tuple[Point, ...], dict[int, str]]:
    """Return the start of a run and its checkpoints, in order, and why others cannot be used, by step.

    Args:
        run: The run.
        begin: The first step that the run itself took: that of the parent's checkpoint, for a fork.
    """
    store, damaged = CheckpointStore(run.checkpoints), dict[int, str]()
    points = [] if begin else [Point()]
    for step in store.steps():
        try:
            point = Point.of(store.path(step))
        except CheckpointError as error:
            damaged[step] = str(error)
            continue
        if point.step != step:
            damaged[step] = f"{point.path} was saved at step {point.step}"
        elif step >= begin and step:
            points.append(point)
    return tuple(points), damaged


@frozen
class Stretch:
    """The steps between two points."""

    begin: Point
    end: Point

    def __str__(self) -> str:
        return f"steps {self.begin.step} to {self.end.step}"

    @property
    def batches(self) -> int:
        """Global batches in it."""
        return self.end.position - self.begin.position


def stretches_of(points: tuple[Point, ...]) -> tuple[Stretch, ...]:
    """Return the stretches between consecutive points."""
    return tuple(Stretch(begin=begin, end=end) for begin, end in pairwise(points))
