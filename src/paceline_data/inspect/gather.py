"""Open the images to check, read all of them on all cores, and keep the results in a few arrays.

The images come from a folder, an archive, or a recipe's data section, split as in a run. The work is distributed over
all cores; a damaged image may crash its reading process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast

import numpy as np

from paceline.data.image.dataset import Problems
from paceline.data.image.datasets import ImageDataset, open_dataset
from paceline.data.image.file_checks import spread
from paceline.data.image.sets.archives import find_archive
from paceline.data.image.sets.image_folder import open_unread_test, unread_entries
from paceline.data.image.source import BrokenImageError, Ids, JoinedSource, SampleSource
from paceline.errors import DataError, PacelineError, RecipeError
from paceline.host.system import blocked_signals, existing_signals, forking, receive_signals
from paceline.parsing.plain_yaml import yaml_line
from paceline.plugins.dataset_registry import Pictures, annotated_at, detect_dataset, named
from paceline.plugins.references import is_reference
from paceline.recipe.load import load_recipe, set_by, shipped_recipes
from paceline.recipe.schema import Recipe
from paceline.storage.addresses import is_address
from paceline.storage.cache import local_path
from paceline_data.inspect.compare import is_same_picture
from paceline_data.inspect.look import BIT, ROW, Defect, Rows, Viewer, look

_OF_IMAGES = ("image_classification", "image_multilabel", "image_regression", "distillation")
# The recipe of a folder of annotated pictures, by the kind of the data set; boxes are checked without masks.
_BASES: dict[str | None, tuple[str, ...]] = {
    "boxes": ("shapes-maskrcnn", "model.name=small_fasterrcnn"),
    "masks": ("shapes-segmentation",),
}
# Keys about preprocessing, which is not checked; a custom source may need any key.
_WITHOUT_EFFECT = (
    *("data.augment", "data.mix.", "data.progressive", "data.interpolation", "data.evaluation_"),
    *("data.backend", "data.workers", "data.prefetch", "data.on_bad", "data.max_broken"),
)


@dataclass(frozen=True)
class CheckedData:
    """The data to check.

    Attributes:
        dataset: The data set as a run would open it; for a folder that a run rejects, the usable part.
        learned: Targets of an image: one of ``classes``, any number of ``labels``, or ``numbers``.
        splits: Images by split; ``test`` holds images in a folder that a run does not read.
        problems: Problems for which a run would reject a folder or a table.
        unread: Non-image files in a folder.
        root: Common folder or file of the paths, if any.
        implausible: A sentence for each kind of implausible annotation.
        is_folder: Whether the root is a folder of class folders, not a copy of an address.
    """

    dataset: ImageDataset
    learned: Literal["classes", "labels", "numbers"]
    splits: dict[str, SampleSource]
    problems: Problems = field(default_factory=Problems)
    unread: tuple[str, ...] = ()
    root: Path | None = None
    is_folder: bool = False
    implausible: tuple[str, ...] = ()


def open_subject(source: str, overrides: Sequence[str]) -> CheckedData:
    """Open what the user specifies: a folder, an archive, a built-in recipe or a recipe file.

    Raises:
        PacelineError: If it does not exist, or contains nothing to check.
    """
    recipe = _recipe(source, overrides)
    data = recipe.data
    if data.dataset == "synthetic":
        raise RecipeError(
            f"{source!r} trains on noise (data.dataset=synthetic), so there is nothing to check.", path=source
        )
    path, problems = data.path, Problems()
    if path is not None:
        data = replace(data, path=local_path(path, key="data.path"))
    if (open_pictures := _annotated(data.dataset)) is not None:
        dataset, implausible = _open(open_pictures, replace(recipe, data=data), source)
        splits = {"train": dataset.train, "validation": dataset.validation}
        folder = Path(data.path or "")
        return CheckedData(dataset, "labels", splits, unread=dataset.left_out, root=folder, implausible=implausible)
    try:
        dataset = open_dataset(data, problems, several_labels=recipe.task == "image_multilabel")
    except PacelineError as error:
        if is_reference(recipe.task):
            raise DataError(
                f"task={recipe.task} may read its data itself, and check-data looks at sets of images only, not at "
                f"data.dataset={data.dataset} ({str(error).rstrip('.')}); nothing was checked."
            ) from error
        raise
    learned: Any = "labels" if recipe.task == "image_multilabel" else "numbers"
    if dataset.train.labels.ndim == 1:
        learned = "classes"
    splits = {"train": dataset.train, "validation": dataset.validation}
    if dataset.holdout is not None:
        splits["holdout"] = dataset.holdout
    unread = dataset.left_out
    root = None if data.path is None else Path(data.path)
    is_folder = root is not None and (
        data.dataset == "image_folder" or (data.dataset == "cifar10" and find_archive(root, "cifar10") is None)
    )
    if root is not None and is_folder:
        test = open_unread_test(root, dataset.classes, dataset.channels)
        if test is not None:
            splits["test"] = test
        unread = tuple(unread_entries(root))
    return CheckedData(dataset, learned, splits, problems, unread, root, is_folder and not is_address(path))


def _open(open_pictures: Pictures, recipe: Recipe, source: str) -> tuple[Any, tuple[str, ...]]:
    """Open pictures with annotations; of a folder's masks of 0 and 255, 255 is a class, as in `paceline train`."""
    try:
        return open_pictures(recipe)
    except DataError as error:
        if error.key != "data.mask_values" or recipe.data.mask_values is not None or not annotated_at(Path(source)):
            raise
        values: Any = error.value
        return open_pictures(replace(recipe, data=replace(recipe.data, mask_values=values)))


def _annotated(name: str) -> Pictures | None:
    """Return what opens the pictures of a data set of another kind than images; None if it has none."""
    return next((each.pictures for each in named(name) if each.pictures is not None), None)


def has_images(recipe: Recipe) -> bool:
    """Whether a recipe's data are images; a custom task may use those of the data section."""
    return recipe.task in _OF_IMAGES or _annotated(recipe.data.dataset) is not None or is_reference(recipe.task)


def _recipe(source: str, overrides: Sequence[str]) -> Recipe:
    """Return the recipe that would train on this data."""
    recipe = _load(source, overrides)
    if not has_images(recipe):
        reads = "paceline.fit" if recipe.objects else f"`paceline train {source} --plan-only`"
        raise DataError(
            f"check-data and review look at images, not at task={recipe.task} with data.dataset={recipe.data.dataset}; "
            f"nothing was checked. {reads} reads the data and reports what is wrong."
        )
    for key in set_by(overrides):
        if not key.startswith("data.") or (key.startswith(_WITHOUT_EFFECT) and not is_reference(recipe.data.dataset)):
            raise RecipeError(
                f"override '{key}' has no effect: check-data looks only at the stored images, not at the rest of a "
                "recipe. Remove it."
            )
    return recipe


def _load(source: str, overrides: Sequence[str]) -> Recipe:
    local = local_path(source, key="SOURCE")
    path = Path(local).expanduser()
    is_recipe = source in shipped_recipes() or path.suffix in (".yaml", ".yml") or (path / "recipe.yaml").is_file()
    if is_recipe:
        return load_recipe(local, overrides).recipe
    located = f"data.path={yaml_line(source)}"
    if annotated := annotated_at(path):
        base, *options = _BASES[annotated[0].kind]
        return load_recipe(base, [*options, f"data.dataset={annotated[0].name}", located, *overrides]).recipe
    try:
        kind = detect_dataset(local)
    except DataError as error:
        raise DataError(
            f"{source!r} is not a folder or archive of images, a recipe file or a shipped recipe ({error})", path=source
        ) from None
    base = "cifar10" if kind == "cifar10" else "image_folder"
    return load_recipe(base, [f"data.dataset={kind}", located, *overrides]).recipe


Progress = Callable[[str, int, int], None]
"""Called with the current activity, the amount done, and the total."""

MAX_NAMED = 10_000
_KILLED = "killed, as the system does when memory runs out"


@dataclass(frozen=True)
class SampleFacts:
    """Facts about the checked samples.

    Attributes:
        samples: All samples.
        numbers: Indices of checked samples, ascending.
        rows: Facts about each of these.
        details: By kind, (position in ``numbers``, details) of the first ten thousand.
    """

    samples: JoinedSource
    numbers: Ids
    rows: Rows
    details: dict[str, dict[int, str]] = field(default_factory=dict)

    def has(self, kind: str) -> Ids:
        """Return the positions of the samples of a kind."""
        return np.flatnonzero(self.rows["traits"] & BIT[kind])

    def add(self, position: int, defects: Sequence[Defect]) -> None:
        """Record a sample's kind."""
        for kind, detail in defects:
            self.rows["traits"][position] |= BIT[kind]
            by_position = self.details.setdefault(kind, {})
            if detail and len(by_position) < MAX_NAMED:
                by_position[position] = detail


def gather(
    samples: JoinedSource, viewers: Sequence[Viewer], *, limit: int | None, workers: int, progress: Progress
) -> SampleFacts:
    """Check every sample, or ``limit`` of them, with each split's viewer."""
    numbers = spread(len(samples), limit)
    facts = SampleFacts(samples, numbers, np.zeros(len(numbers), dtype=ROW))

    warm: list[int] = []

    def work(piece: range, note: Note) -> tuple[Rows, list[tuple[int, list[Defect]]]]:
        rows = np.zeros(len(piece), dtype=ROW)
        defects = []
        for row, position in enumerate(piece):
            note(position)
            _, source, sample = samples.find(int(numbers[position]))
            viewer = viewers[samples.part_numbers[numbers[position]]]
            if not warm:  # a process's first image includes the time to load the decoder
                warm.append(position)
                look(source, sample, viewer, rows[row].copy())
            if faults := look(source, sample, viewer, rows[row]):
                defects.append((position, faults))
        return rows, defects

    done = 0
    for result in in_parallel(work, len(numbers), workers=workers):
        if isinstance(result, WorkerFailure):
            code = result.exit_code
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            facts.add(result.item, [("reader_died", _KILLED if code == -signal.SIGKILL else how)])
            done += 1
        else:
            rows, defects = result.result
            facts.rows[result.piece.start : result.piece.stop] = rows
            for position, said in defects:
                facts.add(position, said)
            done += len(result.piece)
        progress("looking at images", done, len(numbers))
    return facts


def same_pictures(
    gathered: SampleFacts, pairs: Ids, *, workers: int, progress: Progress
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return a mask of the pairs of images that show the same picture, bool [pairs]."""
    result = np.zeros(len(pairs), dtype=bool)

    def work(piece: range, note: Note) -> list[bool]:
        values = []
        for number in piece:
            note(number)
            one, other = (int(gathered.numbers[position]) for position in pairs[number])
            try:
                values.append(is_same_picture(gathered.samples.read(one), gathered.samples.read(other)))
            except BrokenImageError:  # it was readable when it was checked
                values.append(False)
        return values

    done = 0
    for each in in_parallel(work, len(pairs), workers=workers):
        if not isinstance(each, WorkerFailure):
            result[each.piece.start : each.piece.stop] = each.result
            done += len(each.piece)
        progress("comparing images that look the same", done, len(pairs))
    return result


T = TypeVar("T")
Note = Callable[[int], None]
Work = Callable[[range, Note], T]

# Per process: large enough to amortise process starts, small enough to show progress.
_LEAST_ITEMS, _MOST_ITEMS = 32, 256
_PIECES = 8  # work items per worker
_STOP_SIGNALS = existing_signals("SIGINT", "SIGTERM", "SIGHUP")


@dataclass(frozen=True)
class WorkerResult(Generic[T]):
    """A finished piece of work with its result."""

    piece: range
    result: T


@dataclass(frozen=True)
class WorkerFailure:
    """An item during which its process died, with the exit code."""

    item: int
    exit_code: int


def _run_worker(work: Work[Any], piece: range, connection: Connection, current: Any) -> None:
    """Process a piece of work in a child process."""
    # A terminal sends SIGINT to all processes; the parent ends its children.
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    receive_signals(_STOP_SIGNALS)
    warnings.simplefilter("ignore")
    threading.Thread(target=exit_with_parent, daemon=True).start()

    def note(item: int) -> None:
        current.value = item

    try:
        connection.send((False, work(piece, note)))
    except Exception:  # noqa: BLE001 (raised again where it can be told)
        connection.send((True, traceback.format_exc()))


def exit_with_parent() -> None:
    """Exit when the parent process is gone, even if it was killed or this process hangs in a read."""
    first = multiprocessing.parent_process()
    assert first is not None
    wait([first.sentinel])
    os._exit(1)


def in_parallel(work: Work[T], items: int, *, workers: int) -> Iterator[WorkerResult[T] | WorkerFailure]:
    """Run ``work`` on items 0 … ``items`` - 1 in several processes, and yield results as they arrive.

    An item during which a process dies is yielded as :class:`WorkerFailure`; another process handles the rest.

    Args:
        work: Processes a range of items; calls its second argument with each item before starting it.
        items: Number of items.
        workers: Number of processes.
    """
    size = min(max(_LEAST_ITEMS, items // (_PIECES * workers)), _MOST_ITEMS)
    waiting = deque(range(begin, min(begin + size, items)) for begin in range(0, items, size))
    running: dict[Any, tuple[range, Any, Any]] = {}
    context = forking()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                piece, current = waiting.popleft(), context.RawValue("q", -1)
                current.value = piece.start
                receiver, sender = context.Pipe()
                process = context.Process(target=_run_worker, args=(work, piece, sender, current), daemon=True)
                # Signals are blocked, or an interrupt could be lost: exceptions in Python's fork hooks are not
                # propagated.
                with blocked_signals(_STOP_SIGNALS):
                    process.start()
                    running[receiver] = piece, process, current
                sender.close()
            for connection in wait(list(running)):
                piece, process, current = running[connection]
                reply: tuple[bool, Any] | None
                try:
                    reply = cast(Connection, connection).recv()
                except (EOFError, ConnectionResetError):
                    reply = None
                process.join()
                del running[connection]
                if reply is None:
                    item = int(current.value)
                    waiting.extendleft(each for each in (range(item + 1, piece.stop), range(piece.start, item)) if each)
                    yield WorkerFailure(item, process.exitcode or 0)
                elif reply[0]:
                    raise RuntimeError(f"a process that reads images failed:\n{reply[1]}")
                else:
                    yield WorkerResult(piece, reply[1])
    finally:
        for _, process, _ in running.values():
            process.kill()
            process.join()
