"""Files and folders that appear under their final name only when complete and checked."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from paceline.checkpoint.durable import reporting_disk_errors
from paceline.errors import CheckpointError
from paceline.records.run_directory import sync_directory


def check_output(output: Path) -> None:
    """Check, before any work, that the output name is free: nothing is overwritten.

    Raises:
        CheckpointError: If the path exists, or one of its parents is a file.
    """
    with reporting_disk_errors("look for", output):
        if output.exists() or output.is_symlink():
            raise CheckpointError(
                f"--output={output} already exists and is not overwritten; give another name.", path=output
            )
        above, _ = _folders(output)
    if not above.is_dir():
        raise CheckpointError(f"--output={output}: '{above}' is not a directory; give another name.", path=output)


@contextlib.contextmanager
def put_in_place(output: Path) -> Iterator[Path]:
    """Yield a temporary path to write a file or folder to, and rename it to ``output`` at the end of the block.

    If the block fails, its output is removed, and neither ``output`` nor missing parent folders are created.

    Raises:
        CheckpointError: If ``output`` exists, or writing fails.
    """
    check_output(output)
    # In the nearest existing parent, and so on the same disk. Keeps the extension, which some libraries check.
    above, missing = _folders(output)
    partial = above / f".{output.stem}.partial-{secrets.token_hex(4)}{output.suffix}"
    with reporting_disk_errors("write the weights to", output):
        try:
            yield partial
            for each in (*partial.rglob("*"), partial):
                if each.is_dir():
                    sync_directory(each)
                    continue
                with each.open("rb") as file:
                    os.fsync(file.fileno())
            check_output(output)
            try:
                for each in reversed(missing):
                    each.mkdir(exist_ok=True)
                partial.rename(output)
            except OSError:
                for each in missing:
                    with contextlib.suppress(OSError):  # not removed if another program put something in
                        each.rmdir()
                raise
            for each in (*missing, above):
                sync_directory(each)
        finally:
            with contextlib.suppress(OSError):
                if partial.is_dir():
                    shutil.rmtree(partial)
                partial.unlink(missing_ok=True)


def _folders(output: Path) -> tuple[Path, list[Path]]:
    """Return the nearest existing parent folder, if any, and the missing ones below it, nearest first."""
    missing = list(itertools.takewhile(lambda each: not os.path.lexists(each), output.parents))
    return output.parents[len(missing)], missing
