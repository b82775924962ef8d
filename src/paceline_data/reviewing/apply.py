"""Apply a plan: move files to their classes, or next to the data, by one rename each, after all have been checked.

The plan and its digests are the journal. If the process is killed, the same command recognises what has been moved and
moves the rest; the undo script, which is written first, moves everything back. In the end the plan gets another name.
"""

from __future__ import annotations

import contextlib
import os
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from paceline.data.splits import TEST, TRAIN, VALIDATION, split_folders
from paceline.errors import DataError, PacelineError, data_error, did_you_mean
from paceline.host.system import FOLDER, lock_file
from paceline.parsing.files import free_name, is_folder, is_ignored, visible_entries
from paceline.records.run_directory import file_operation
from paceline_data.inspect.quarantine import UNDO, check_place, led_to, move_files
from paceline_data.reviewing.plan import Decision, ReviewPlan, content_digest

ASIDE = "aside"
_NAMED = 5
_SPLITS = ("train", "val", "test")  # such a folder next to the classes would be read as a split
_LONGEST_NAME = 255  # bytes of a file's name


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What was done.

    Attributes:
        moved: Old and new path of each file.
        earlier: Number of files that an interrupted call had moved.
        plan: Where the plan is now.
        undo: The script that moves everything back.
    """

    moved: tuple[tuple[str, str], ...]
    earlier: int
    plan: Path
    undo: Path


def apply_plan(plan: ReviewPlan, root: Path, *, version: int | None = None) -> Applied:
    """Move the files of a plan; nothing is overwritten or deleted but class folders that become empty.

    Args:
        plan: The plan; files that are set aside go next to it.
        root: The data.
        version: Number of decisions read when the reviewer confirmed; None to apply whatever the plan holds.

    Raises:
        PacelineError: If the plan does not fit the files; then nothing is moved.
    """
    if not plan.path.is_file():
        raise data_error(plan.path, "does not exist, so there is nothing to apply: give the plan that a review wrote.")
    folder = plan.path.parent
    check_place(root, folder, "--plan")
    with _alone(root), plan.locked():
        if version is not None and version != len(plan.changed):
            raise DataError("the plan has been changed by another reviewer: look at it again, then apply it.")
        layout = _Layout(root)
        moves, done, problems = list[tuple[Path, Path]](), list[Path](), list[str]()
        chosen = [each for _, each in sorted(plan.decisions.items()) if each.action in ("move", "aside")]
        taken: set[Path] = set()
        for decision in chosen:
            try:
                target = _target(decision, root, layout, folder, taken)
            except PacelineError as error:
                problems.append(str(error))
                continue
            if target is None:
                done.append(root / decision.file)
            else:
                moves.append((root / decision.file, target))
                taken.add(target)
        held = led_to(root, [path.relative_to(root) for path, _ in moves])
        problems += [f"{str(path)!r} stays, since the link {reason}." for path, reason in sorted(held.items())]
        if problems:
            more = [f"… and {len(problems) - _NAMED:,} more."] * (len(problems) > _NAMED)
            advice = "Review these files again, or remove their lines from the plan."
            raise DataError(
                f"{str(plan.path)!r}: nothing was moved.", *problems[:_NAMED], *more, advice, path=plan.path
            )
        move_files(moves, folder, str(plan.path))
        for parent in {path.parent for path in (*done, *(path for path, _ in moves))} - {root}:
            with contextlib.suppress(OSError):  # others are in it
                parent.rmdir()
        applied = free_name(plan.path.with_name(f"{plan.path.name}.applied"))
        with file_operation("rename", plan.path):
            plan.path.rename(applied)
    return Applied(moved=tuple((str(a), str(b)) for a, b in moves), earlier=len(done), plan=applied, undo=folder / UNDO)


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Let no other process apply a plan to this folder, as far as its file system knows locks."""
    with file_operation("open", root, noun="folder"):
        descriptor = os.open(root, os.O_RDONLY | FOLDER)
    try:
        with contextlib.suppress(OSError):
            lock_file(descriptor)
        yield
    finally:
        os.close(descriptor)


class _Layout:
    """The class folders of a folder of images, with splits or without.

    Attributes:
        classes: The folder names by class name, for each folder that holds classes, relative to the root.
    """

    def __init__(self, root: Path) -> None:
        splits = split_folders(root)
        parents = {splits.get(TRAIN, ""), *(splits[each] for each in (VALIDATION, TEST) if each in splits)}
        self.classes = {
            PurePath(parent): {
                unicodedata.normalize("NFC", each.name): each.name
                for each in visible_entries(root / parent)
                if is_folder(each) and (parent or each.name not in splits.values())
            }
            for parent in sorted(parents)
        }

    def folder(self, path: PurePath, name: str, *, new: bool) -> PurePath:
        """Return the folder of a class in a file's split; in a split without images of it, it may not exist.

        Raises:
            DataError: If there is no such class, or the file is in no split.
        """
        parent = next((each for each in path.parents if each in self.classes), None)
        if parent is None:
            raise data_error(str(path), "is in no split, so it can only be set aside.")
        form = unicodedata.normalize("NFC", name)
        known = {key: value for each in self.classes.values() for key, value in each.items()}
        if new:
            known.setdefault(form, check_class_name(form))
        if form not in known:
            raise DataError(f"there is no class {name!r} to move to.{did_you_mean(name, known)}", value=name)
        return parent / self.classes[parent].get(form, known[form])


def place_of(file: str) -> PurePath:
    """Return the path of a file in the data, relative to them.

    Raises:
        DataError: If it leads out of them.
    """
    path = PurePath(file)
    is_plain = str(path) == file and not path.is_absolute() and ".." not in path.parts and "\0" not in file
    if not is_plain or not path.parts:
        raise data_error(file, "is not the path of a file in the data.")
    return path


def is_inside(root: Path, file: str) -> bool:
    """Whether a path in a plan, which anybody may have written, leads to a file in the data, also through links."""
    try:
        return (root / place_of(file)).resolve().is_relative_to(root.resolve())
    except (DataError, OSError, RuntimeError):  # a loop of links
        return False


def check_class_name(name: str) -> str:
    """Return the name of a new class as that of its folder.

    Raises:
        DataError: If it cannot be one.
    """
    form = unicodedata.normalize("NFC", name.strip())
    is_readable = form.isprintable() and "/" not in form and not form.startswith(".") and not is_ignored(form)
    if not form or not is_readable or form in _SPLITS or len(form.encode()) > _LONGEST_NAME:
        raise DataError(
            f"{name!r} cannot be a class: its folder's name has no '/', begins without a dot, and is none of "
            f"{', '.join(_SPLITS)}.",
            value=name,
        )
    return form


def class_names(root: Path) -> tuple[str, ...]:
    """Return the names of the class folders, sorted."""
    return tuple(sorted({name for each in _Layout(root).classes.values() for name in each.values()}))


def _target(decision: Decision, root: Path, layout: _Layout, folder: Path, taken: set[Path]) -> Path | None:
    """Return where a file goes; None if it is there.

    Raises:
        DataError: If it has changed, or cannot go there.
    """
    path = place_of(decision.file)
    source, wanted = root / path, folder / ASIDE / path
    if decision.to is not None:
        wanted = root / layout.folder(path, decision.to, new=decision.new) / path.name
    # A name that is taken gets a part of the digest, so that an interrupted call finds it again.
    candidates = (wanted, wanted.with_name(f"{wanted.stem}-{decision.digest[:12]}{wanted.suffix}"))
    _check_links(source, wanted, root)
    if not os.path.lexists(source):
        if any(each.is_file() and content_digest(each) == decision.digest for each in candidates):
            return None
        raise data_error(source, "is gone since it was reviewed.")
    if content_digest(source) != decision.digest:
        raise data_error(source, "has changed since it was reviewed.")
    if wanted == source:
        raise data_error(source, "is in that class already.")
    target = next((each for each in candidates if not os.path.lexists(each) and each not in taken), None)
    if target is None:
        raise data_error(source, f"stays: {str(candidates[1])!r} is there already, and nothing is overwritten.")
    return target


def _check_links(source: Path, target: Path, root: Path) -> None:
    """Refuse to move a file through a link, or a link to where it would lead elsewhere; raises DataError."""
    for each in (source, target) if target.is_relative_to(root) else (source,):
        for above in each.relative_to(root).parents:
            if above.name and (root / above).is_symlink():
                raise data_error(source, f"stays: {str(root / above)!r} is a link, and nothing is moved through one.")
    is_moved = source.is_symlink() and target.is_relative_to(root)
    if is_moved and os.path.realpath(target.parent / os.readlink(source)) != os.path.realpath(source):
        raise data_error(source, "stays: it is a link that would lead to another place from there.")
