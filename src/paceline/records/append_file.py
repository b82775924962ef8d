"""How does a record file grow, without waiting for the disk until it must?"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.records.run_directory import cannot, refuse_odd_record, sync_directory


def detach(path: Path) -> None:
    """Give a file that has several names (``cp -al``, ``ln``) an inode of its own, so that the others keep theirs.

    Call it before a file is appended to or cut in place. A file with one name, or none, is left as it is.

    Raises:
        RunDirectoryError: If the disk refuses; the file is then as it was.
    """
    try:
        if not path.is_file() or path.stat().st_nlink == 1:
            return
        target = path.resolve()
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            shutil.copyfile(target, temporary)
            shutil.copymode(target, temporary)
            with temporary.open("r+b") as file:
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(target.parent)
    except OSError as error:
        raise cannot("copy", path, error) from error


class AppendFile:
    """A file that is only appended to; what is written is buffered until :meth:`flush`.

    A file with several names is copied first (:func:`detach`).

    Args:
        path: The file, made if need be with its folder, whose parent is there.
        buffering: Bytes of the buffer; -1 for the system's choice.

    Raises:
        RunDirectoryError: If the file cannot be opened; later, if the disk refuses a write.
    """

    def __init__(self, path: Path, *, buffering: int = -1) -> None:
        self._path = path
        refuse_odd_record(path)
        detach(path)
        try:
            path.parent.mkdir(exist_ok=True)
            self._file = path.open("ab", buffering=buffering)
            sync_directory(path.parent)
        except OSError as error:
            raise cannot("open", path, error) from error

    def write(self, content: bytes) -> None:
        """Add bytes to the end."""
        try:
            self._file.write(content)
        except OSError as error:
            raise cannot("write", self._path, error) from error

    def flush(self, *, durable: bool = False) -> None:
        """Hand everything to the operating system; with ``durable`` wait until the disk has it."""
        try:
            self._file.flush()
            if durable:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise cannot("write", self._path, error) from error

    def close(self) -> None:
        """Flush durably and close; closing twice is harmless."""
        if self._file.closed:
            return
        try:
            self.flush(durable=True)
        finally:
            # Of the file only the descriptor is left to close: what could not be written would be tried once more.
            with contextlib.suppress(OSError):
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
