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
        CheckpointError: If something is there, or there is no such folder to put it in.
    """
    if not output.parent.is_dir():
        raise CheckpointError(f"--output={output}: there is no directory '{output.parent}'; create it first.")
    if output.exists() or output.is_symlink():
        raise CheckpointError(f"--output={output} exists already and is not written over; give another name.")


@contextlib.contextmanager
def put_in_place(output: Path) -> Iterator[Path]:
    """Give a path beside ``output`` to write a file or folder to, and rename it at the end of the block.

    If the block fails, what it wrote is removed, and ``output`` never appears.

    Raises:
        CheckpointError: If ``output`` exists, or the disk refuses.
    """
    check_output(output)
    # The same ending, as some libraries look at it.
    partial = output.with_name(f".{output.stem}.partial-{os.getpid()}{output.suffix}")
    with reporting_disk_errors("write the weights to", output):
        _remove(partial)
        try:
            yield partial
            for each in (*partial.rglob("*"), partial) if partial.is_dir() else (partial,):
                _flush(each)
            check_output(output)
            partial.rename(output)
            sync_directory(output.parent)
        finally:
            _remove(partial)


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
