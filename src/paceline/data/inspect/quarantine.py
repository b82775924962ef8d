"""Move what breaks a run, and what leaks, out of a folder of images; nothing is deleted, and a script moves it back.

Each file or folder is moved by one rename, after the script that moves it back is on the disk: whenever the process is
killed, everything is at its old place or at the one that the script names.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.data.inspect.findings import Finding
from paceline.errors import DataError
from paceline.files import visible

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
    """What was moved away.

    Attributes:
        folder: Where to.
        moved: Old and new path of each file or folder.
        kinds: Names of the findings of which everything was moved.
    """

    folder: Path
    moved: tuple[tuple[str, str], ...]
    kinds: frozenset[str]

    @property
    def undo(self) -> str:
        """The command that moves everything back."""
        return f"sh {shlex.quote(str(self.folder / UNDO))}"


def check_place(root: Path, folder: Path) -> None:
    """Refuse a folder that files of ``root`` cannot be moved to.

    Raises:
        DataError: If one lies in the other, they are on two file systems, or there is a file in its place.
    """
    inside, outside = folder.resolve(), root.resolve()
    if inside.is_relative_to(outside) or outside.is_relative_to(inside):
        raise DataError(
            f"--quarantine {folder}: it and the data ({root}) must not contain each other; give a folder next to the "
            "data."
        )
    there = inside
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise DataError(f"--quarantine {folder}: {str(there)!r} is a file; give a folder, which need not exist.")
    if there.stat().st_dev != outside.stat().st_dev:
        raise DataError(
            f"--quarantine {folder}: it is on another file system than the data, and files are only moved by renaming, "
            "which cannot lose them; give a folder next to the data."
        )


def move_away(findings: Iterable[Finding], root: Path, folder: Path) -> Quarantine:
    """Move what findings call broken from ``root`` to ``folder``, under the names that it has in ``root``.

    Of images that are in two splits, the held-out copies are moved; without a held-out folder, which images are held
    out changes with those that are left, and all copies but one are.
    The folder of a class of which nothing would be left is moved as a whole.

    Raises:
        DataError: If something cannot be moved; of names that are taken in ``folder``, before anything is.
    """
    is_split = (root / "val").is_dir() or (root / "test").is_dir()
    copies = ("leak",) if is_split else ("leak", "duplicate")
    moving = [
        each
        for each in findings
        if (each.kind.severity == "breaks" and each.kind.name != "layout") or each.kind.name in copies
    ]
    asked = {Path(entry.name) for each in moving for entry in each.entries}
    train = root / "train" if (root / "train").is_dir() else root
    for splits in ((train,), (root / "val", root / "test")):
        for parent in {path.parent for path in asked if path.parent.parent in splits}:
            is_still_trained_on = parent.parent != train and (train / parent.name).is_dir()
            if is_still_trained_on and train / parent.name not in asked:
                continue
            if all(Path(entry.path) in asked for entry in visible(parent)):
                asked.add(parent)
    paths = sorted(path for path in asked if not asked.intersection(path.parents))
    moves = [(path, folder / path.relative_to(root)) for path in paths]
    if taken := [str(target) for _, target in moves if os.path.lexists(target)]:
        raise DataError(
            f"--quarantine {folder}: {taken[0]!r} is there already (and {len(taken) - 1:,} more of the names), and "
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
    gone = frozenset(path for path, _ in moves)

    def is_gone(finding: Finding) -> bool:
        names = [Path(entry.name) for entry in finding.entries]
        return finding.count == len(names) and all(gone.intersection((name, *name.parents)) for name in names)

    whole = frozenset(each.kind.name for each in findings if is_gone(each))
    return Quarantine(folder=folder, moved=tuple((str(a), str(b)) for a, b in moves), kinds=whole)


def _write_undo(folder: Path, moves: Iterable[tuple[Path, Path]]) -> None:
    """Add to the script that moves everything back, before anything is moved; raises DataError."""
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
