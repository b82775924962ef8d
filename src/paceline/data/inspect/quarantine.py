"""Move files that break a run, and leaks, out of an image folder; nothing is deleted, and a script moves them back.

Each file or folder is moved by one rename, after the undo script is on the disk. So if the process is killed, every
file is at its old path or at the one in the script.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.data.inspect.findings import Finding
from paceline.errors import DataError
from paceline.files import visible_entries

UNDO = "undo.sh"
_BACK = b"""\
#!/bin/sh
# Moves back what `paceline check-data` moved into this folder. Run it with: sh undo.sh
back() {
    if [ ! -e "$1" ] && [ ! -L "$1" ]; then return; fi
    if [ -e "$2" ] || [ -L "$2" ]; then echo "not moved back, since there is another: $2" >&2; return; fi
    mkdir -p "$(dirname "$2")" && mv "$1" "$2"
}
"""


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """The moved files.

    Attributes:
        folder: The quarantine folder.
        moved: Old and new path of each file or folder.
        kinds: Names of the findings whose files were all moved.
    """

    folder: Path
    moved: tuple[tuple[str, str], ...]
    kinds: frozenset[str]

    @property
    def undo(self) -> str:
        """The command that moves everything back."""
        return f"sh {shlex.quote(str(self.folder / UNDO))}"


def check_place(root: Path, folder: Path) -> None:
    """Reject a folder to which files of ``root`` cannot be moved.

    Raises:
        DataError: If one contains the other, they are on different file systems, or the path is a file.
    """
    inside, outside = folder.resolve(), root.resolve()
    if inside.is_relative_to(outside) or outside.is_relative_to(inside):
        raise DataError(
            f"--quarantine {folder}: it and the data ({root}) must not contain each other; give a folder next to the "
            "data."
        )
    inner = inside
    while not inner.exists():
        inner = inner.parent
    if not inner.is_dir():
        raise DataError(f"--quarantine {folder}: {str(inner)!r} is a file; give a folder, which need not exist.")
    if inner.stat().st_dev != outside.stat().st_dev:
        raise DataError(
            f"--quarantine {folder}: it is on another file system than the data, and files are only moved by renaming, "
            "which cannot lose them; give a folder next to the data."
        )


def move_away(findings: Iterable[Finding], root: Path, folder: Path) -> Quarantine:
    """Move broken files from ``root`` to ``folder``, keeping their paths relative to ``root``.

    For images in two splits, the held-out copies are moved. Without a held-out folder the split depends on the
    remaining images, so all copies but one are moved. If a class would become empty, its whole folder is moved.

    Raises:
        DataError: If something cannot be moved; name conflicts in ``folder`` are detected before anything is moved.
    """
    is_split = (root / "val").is_dir() or (root / "test").is_dir()
    copies = ("leak",) if is_split else ("leak", "duplicate")
    moving = [
        each
        for each in findings
        if (each.kind.severity == "breaks" and each.kind.name != "layout") or each.kind.name in copies
    ]
    to_move = {Path(entry.name) for each in moving for entry in each.entries}
    train = root / "train" if (root / "train").is_dir() else root
    for splits in ((train,), (root / "val", root / "test")):
        for parent in {path.parent for path in to_move if path.parent.parent in splits}:
            is_still_trained_on = parent.parent != train and (train / parent.name).is_dir()
            if is_still_trained_on and train / parent.name not in to_move:
                continue
            if all(Path(entry.path) in to_move for entry in visible_entries(parent)):
                to_move.add(parent)
    paths = sorted(path for path in to_move if not to_move.intersection(path.parents))
    moves = [(path, folder / path.relative_to(root)) for path in paths]
    if present := [str(target) for _, target in moves if os.path.lexists(target)]:
        raise DataError(
            f"--quarantine {folder}: {present[0]!r} is there already (and {len(present) - 1:,} more of the names), and "
            "nothing is overwritten; nothing was moved: give another folder."
        )
    if moves:
        _write_undo(folder, moves)
    for source, target in moves:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(source, target)
        except OSError as error:
            raise DataError(
                f"{str(source)!r} could not be moved to {str(target)!r}: {error.strerror}; to undo the earlier moves, "
                f"run: sh {shlex.quote(str(folder / UNDO))}"
            ) from None
    moved_paths = frozenset(path for path, _ in moves)

    def is_gone(finding: Finding) -> bool:
        names = [Path(entry.name) for entry in finding.entries]
        return finding.count == len(names) and all(moved_paths.intersection((name, *name.parents)) for name in names)

    resolved_kinds = frozenset(each.kind.name for each in findings if is_gone(each))
    return Quarantine(folder=folder, moved=tuple((str(a), str(b)) for a, b in moves), kinds=resolved_kinds)


def _write_undo(folder: Path, moves: Iterable[tuple[Path, Path]]) -> None:
    """Append to the undo script before anything is moved; raises DataError."""
    script = folder / UNDO
    lines = [f"back {shlex.quote(os.path.abspath(new))} {shlex.quote(os.path.abspath(old))}\n" for old, new in moves]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(script, "ab") as file:
            if not file.tell():
                file.write(_BACK)
            file.write(b"".join(map(os.fsencode, lines)))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DataError(f"{str(script)!r} cannot be written: {error.strerror}; nothing was moved.") from None
