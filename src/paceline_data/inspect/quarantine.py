"""Move files that break a run, and leaks, out of an image folder; nothing is deleted, and a script moves them back.

Each file or folder is moved by one rename, after the undo script is on the disk. So if the process is killed, every
file is at its old path or at the one in the script. A path is not a file: what lies behind a link is not moved.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.data.splits import TEST, TRAIN, VALIDATION, split_folders
from paceline.errors import DataError
from paceline.parsing.files import is_folder, visible_entries
from paceline.records.run_directory import write_bytes
from paceline_data.inspect.findings import DataFinding

UNDO = "undo.sh"
_EFFECTIVE = os.access in os.supports_effective_ids  # not everywhere
_MOST_LINKS = 40  # in a path, as in Linux
_BACK = b"""\
#!/bin/sh
# Moves back what Paceline moved, the last first. Run it with: sh undo.sh
back() {
    if [ ! -e "$1" ] && [ ! -L "$1" ]; then rmdir "$(dirname "$1")" 2>/dev/null || true; return; fi
    if [ -e "$2" ] || [ -L "$2" ]; then echo "not moved back, since there is another: $2" >&2; return; fi
    mkdir -p "$(dirname "$2")" && mv "$1" "$2" && { rmdir "$(dirname "$1")" 2>/dev/null || true; }
}
"""


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """The moved files.

    Attributes:
        folder: The quarantine folder.
        moved: Old and new path of each file or folder.
        kept: What was not moved because of a link: its path, and the reason.
        kinds: Names of the findings whose files were all moved.
    """

    folder: Path
    moved: tuple[tuple[str, str], ...]
    kept: tuple[tuple[str, str], ...]
    kinds: frozenset[str]

    @property
    def undo(self) -> str:
        """The command that moves everything back."""
        return f"sh {shlex.quote(str(self.folder / UNDO))}"


def check_place(root: Path, folder: Path, option: str = "--quarantine") -> None:
    """Reject a folder to which files of ``root`` cannot be moved.

    Args:
        root: The data.
        folder: The folder.
        option: What names the folder, for the message.

    Raises:
        DataError: If one contains the other, they are on different file systems, or the path is a file.
    """
    inside, outside = folder.resolve(), root.resolve()
    if inside.is_relative_to(outside) or outside.is_relative_to(inside):
        raise DataError(
            f"{option} {folder}: it and the data ({root}) must not contain each other; give a folder next to the data.",
            path=folder,
        )
    inner = inside
    while not inner.exists():
        inner = inner.parent
    if not inner.is_dir():
        raise DataError(
            f"{option} {folder}: {str(inner)!r} is a file; give a folder, which need not exist.", path=folder
        )
    if inner.stat().st_dev != outside.stat().st_dev:
        raise DataError(
            f"{option} {folder}: it is on another file system than the data, and files are only moved by "
            "renaming, which cannot lose them; give a folder next to the data.",
            path=folder,
        )


def move_away(findings: Sequence[DataFinding], root: Path, folder: Path) -> Quarantine:
    """Move broken files from ``root`` to ``folder``, keeping their paths relative to ``root``.

    For images in two splits, the held-out copies are moved; of a file and a link to it, the link. Without a held-out
    folder the split depends on the remaining images, so all copies but one are moved. If a class would become empty,
    its whole folder is moved. Nothing is moved from behind a link, nor what a remaining link leads to.

    Raises:
        DataError: If something cannot be moved. Name conflicts in ``folder``, read-only folders and other file systems
            are detected before anything is moved; after another failure, everything is moved back.
    """
    real_root = Path(os.path.realpath(root))
    to_move, kept = _chosen(findings, root, real_root)
    samples = {name for each in findings for entry in each.entries if entry.split for name in (entry.name, entry.other)}
    kept |= led_to(root, to_move, samples)
    to_move -= kept.keys()
    paths = sorted(path for path in to_move if not to_move.intersection(path.parents))
    moves = [(root / path, folder / path) for path in paths]
    move_files(moves, folder, f"--quarantine {folder}")

    def is_gone(finding: DataFinding) -> bool:
        names = [Path(entry.name) for entry in finding.entries]
        moved = {path for path, _ in moves}
        return finding.count == len(names) and all(moved.intersection((name, *name.parents)) for name in names)

    return Quarantine(
        folder=folder,
        moved=tuple((str(a), str(b)) for a, b in moves),
        kept=tuple((str(root / path), kept[path]) for path in sorted(kept)),
        kinds=frozenset(each.kind.name for each in findings if is_gone(each)),
    )


def led_to(root: Path, paths: Collection[Path], samples: Iterable[str | None] = ()) -> dict[Path, str]:
    """Return which of some paths, relative to ``root``, a link leads to that is not one of them, with the reason.

    Args:
        root: The data.
        paths: What is to be moved.
        samples: Paths of samples, which may pass through linked folders.
    """
    to_move, real_root, kept = set(paths), Path(os.path.realpath(root)), dict[Path, str]()
    if not to_move:
        return kept
    readers = {*_links(real_root), *(Path(os.path.relpath(each, root)) for each in samples if each)}
    needs = {path: needed for path in sorted(readers) if (needed := to_move.intersection(_passed(real_root, path)))}
    while held := {
        each: f"{path} leads to it"
        for path, needed in needs.items()
        if to_move.isdisjoint((path, *path.parents))
        for each in needed & to_move
    }:
        to_move -= held.keys()
        kept |= held
    return kept


def _chosen(findings: Sequence[DataFinding], root: Path, real_root: Path) -> tuple[set[Path], dict[Path, str]]:
    """Return what to move, relative to the root; and what lies behind a link instead, with the reason."""
    splits = split_folders(root)
    held_out = [Path(splits[split]) for split in (VALIDATION, TEST) if split in splits]
    copies = ("leak",) if held_out else ("leak", "duplicate")
    # If there are no classes to train on, the folders next to them may be the data.
    has_classes = any(map(is_folder, visible_entries(root / splits.get(TRAIN, ""))))
    stays = ("layout",) if has_classes else ("layout", "unread_folder")
    found = {
        Path(entry.name).relative_to(root)
        for each in findings
        if (each.kind.severity == "breaks" and each.kind.name not in stays) or each.kind.name in copies
        for entry in each.entries
    }
    links = ((path, [each for each in path.parents if each.name and (real_root / each).is_symlink()]) for path in found)
    kept = {path: f"behind the link {behind[-1]}" for path, behind in links if behind}
    to_move = found - kept.keys()
    train = Path(splits.get(TRAIN, ""))
    for parents in ([train], held_out):
        for parent in {path.parent for path in to_move if path.parent.parent in parents}:
            is_still_trained_on = parent.parent != train and (root / train / parent.name).is_dir()
            if is_still_trained_on and train / parent.name not in to_move:
                continue
            if all(Path(entry.path).relative_to(root) in to_move for entry in visible_entries(root / parent)):
                to_move.add(parent)
    return to_move, kept


def _links(root: Path) -> Iterator[Path]:
    """Yield all links below a folder, relative to it; none is followed."""
    folders = [str(root)]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    yield Path(entry.path).relative_to(root)
                elif entry.is_dir():
                    folders.append(entry.path)


def _passed(root: Path, path: Path) -> Iterator[Path]:
    """Yield every file, folder and link below ``root`` that is visited when a path in it is opened, as real paths."""
    place, parts, links = root, list(path.parts[::-1]), 0
    while parts and links < _MOST_LINKS:
        part = parts.pop()
        place = place.parent if part == os.pardir else place / part
        if place.is_relative_to(root):
            yield place.relative_to(root)
        if place.is_symlink():
            parts += reversed(Path(os.readlink(place)).parts)
            place, links = place.parent, links + 1


def move_files(moves: Sequence[tuple[Path, Path]], folder: Path, name: str) -> None:
    """Move everything, or nothing, after adding it to the undo script.

    Args:
        moves: Old and new path of each file or folder.
        folder: The folder of the undo script.
        name: What asked for it, for messages.

    Raises:
        DataError: As for :func:`move_away`.
    """
    disk = next(each for each in (folder, *folder.absolute().parents) if each.exists()).stat().st_dev
    for source, target in moves:
        is_folder = source.is_dir() and not source.is_symlink()
        changed = (source.parent, source) if is_folder else (source.parent,)
        closed = [each for each in changed if not os.access(each, os.W_OK | os.X_OK, effective_ids=_EFFECTIVE)]
        why = ""
        if os.path.lexists(target):
            why = f"{str(target)!r} is there already, and nothing is overwritten: give another folder."
        elif source.lstat().st_dev != disk:
            why = f"{str(source)!r} is on another file system, and files are only moved by renaming: move it by hand."
        elif closed:
            why = f"{str(closed[0])!r} is read-only: give this user write permission (chmod u+w)."
        if why:
            raise DataError(f"{name}: nothing was moved, since {why}", path=folder)
    if moves:
        _write_undo(folder, moves)
    made = list[Path]()
    for number, (source, target) in enumerate(moves):
        made += [each for each in target.parents if not each.exists()]
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(source, target)
        except OSError as error:
            _move_back(moves[:number], made)
            raise DataError(
                f"{str(source)!r} could not be moved to {str(target)!r}: {error.strerror}; the others were moved "
                f"back. If one is still in {str(folder)!r}, run: sh {shlex.quote(str(folder / UNDO))}",
                path=source,
            ) from None


def _move_back(moves: Sequence[tuple[Path, Path]], made: Iterable[Path]) -> None:
    """Move back what was moved, and remove the folders that were made for it."""
    for old, new in reversed(moves):
        with suppress(OSError):
            os.rename(new, old)
    for each in sorted(made, reverse=True):  # the inner ones first
        with suppress(OSError):
            each.rmdir()


def _write_undo(folder: Path, moves: Iterable[tuple[Path, Path]]) -> None:
    """Put the moves first in the undo script, before anything is moved; raises DataError."""
    script = folder / UNDO
    lines = [f"back {shlex.quote(os.path.abspath(new))} {shlex.quote(os.path.abspath(old))}\n" for old, new in moves]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        earlier = script.read_bytes().removeprefix(_BACK) if script.exists() else b""
        write_bytes(script, _BACK + b"".join(map(os.fsencode, lines)) + earlier)
    except OSError as error:
        raise DataError(f"{str(script)!r} cannot be written: {error.strerror}; nothing was moved.") from None
