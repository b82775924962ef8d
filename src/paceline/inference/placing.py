"""How does a file or folder appear under its name only once it is whole and checked?"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from paceline.checkpoint.durable import reporting_disk_errors
from paceline.errors import CheckpointError
from paceline.records.run_directory import sync_directory


def check_output(output: Path) -> None:
    """See before any work whether a new file or folder can have this name: nothing is written over.

    Raises:
        CheckpointError: If something is there, or a part of the path is a file.
    """
    if output.exists() or output.is_symlink():
        raise CheckpointError(f"--output={output} exists already and is not written over; give another name.")
    above = _nearest(output)
    if not above.is_dir():
        raise CheckpointError(f"--output={output}: '{above}' is no directory; give another name.")


@contextlib.contextmanager
def put_in_place(output: Path) -> Iterator[Path]:
    """Give a path to write a file or folder to, and rename it to ``output`` at the end of the block.

    If the block fails, what it wrote is removed, and neither ``output`` nor a folder above it that was missing appears.

    Raises:
        CheckpointError: If ``output`` exists, or the disk refuses.
    """
    check_output(output)
    # In the folder that will hold the missing ones, so on the same disk. The same ending, as some libraries look at it.
    above = _nearest(output)
    partial = above / f".{output.stem}.partial-{os.getpid()}{output.suffix}"
    with reporting_disk_errors("write the weights to", output):
        _remove(partial)
        try:
            yield partial
            for each in (*partial.rglob("*"), partial) if partial.is_dir() else (partial,):
                _flush(each)
            check_output(output)
            output.parent.mkdir(parents=True, exist_ok=True)
            partial.rename(output)
            for each in output.parents[: output.parents.index(above) + 1]:
                sync_directory(each)
        finally:
            _remove(partial)


def _nearest(output: Path) -> Path:
    """The nearest of the folders above that is there, if it is one."""
    return next(each for each in output.parents if os.path.lexists(each))


def _flush(path: Path) -> None:
    if path.is_dir():
        sync_directory(path)
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
