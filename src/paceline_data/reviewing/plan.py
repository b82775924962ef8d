"""The plan of a review: a file of decisions, one JSON object a line; of a file's decisions, the last one counts.

Several processes may append to one plan: each holds its lock, and first reads what the others have appended. A line is
on the disk before it counts, so a kill loses at most the decision that is being written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from paceline.errors import DataError, VersionError
from paceline.host.system import lock_file
from paceline.parsing.files import refuse_special_inputs
from paceline.parsing.plain_text import load_json
from paceline.records.run_directory import file_operation, sync_directory

Action = Literal["keep", "move", "aside", "undecided"]
_VERSION = 1
_FIRST = b'{"paceline_review": %d}\n' % _VERSION


@dataclass(frozen=True)
class Decision:
    """What to do with a file.

    Attributes:
        file: Its path, relative to the data.
        action: ``keep`` it, ``move`` it to a class, set it ``aside``, or ``undecided`` to withdraw a decision.
        digest: Of its content when it was looked at.
        to: The class that it is moved to.
        new: Whether that class may be made; without it, a class that does not exist is a mistake.
    """

    file: str
    action: Action
    digest: str
    to: str | None = None
    new: bool = False


class ChangedError(DataError):
    """Another reviewer has decided about a file in the meantime."""


def content_digest(path: Path) -> str:
    """Return the digest of a file's content.

    Raises:
        DataError: If it is gone, or not a regular file.
    """
    refuse_special_inputs(path)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be read: {error.strerror}.", path=path) from None


class ReviewPlan:
    """A plan in a file, shared with other processes.

    Attributes:
        path: The file.
        decisions: The last decision about each file, without withdrawn ones, as of the last :meth:`refresh`.
        mutex: Held by the thread that uses the plan.
        changed: Files in the order in which their decisions were read; one may occur several times.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.decisions: dict[str, Decision] = {}
        self.changed: list[str] = []
        self._inode, self._end, self._lines = -1, 0, 0
        self.mutex = threading.RLock()

    def refresh(self) -> None:
        """Read what other processes have decided; raises PacelineError as :meth:`locked` does."""
        with self.mutex:
            if self.path.exists():
                with file_operation("read", self.path), self.path.open("rb") as file:
                    self._read(file)
            else:
                self._forget()

    def record(self, decision: Decision, before: Decision | None) -> None:
        """Append a decision.

        Args:
            decision: The decision.
            before: The decision about this file that the reviewer knows of.

        Raises:
            ChangedError: If there is another one.
            PacelineError: As for :meth:`locked`.
        """
        with self.locked() as file:
            now = self.decisions.get(decision.file)
            if now != before:
                raise ChangedError(f"{decision.file!r} has been decided by another reviewer: look at it again.")
            with file_operation("write", self.path):
                file.write(
                    json.dumps({key: value for key, value in asdict(decision).items() if value}).encode() + b"\n"
                )
                file.flush()
                os.fsync(file.fileno())
            self._read(file)

    @contextlib.contextmanager
    def locked(self) -> Iterator[BinaryIO]:
        """Hold the plan, up to date, so that no other process decides or applies; it is made if it does not exist.

        Raises:
            PacelineError: If it cannot be read or written, or a line is not a decision.
        """
        with self.mutex, contextlib.ExitStack() as stack:
            while True:
                with file_operation("open", self.path):
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    refuse_special_inputs(self.path)
                    file = stack.enter_context(self.path.open("a+b"))
                    lock_file(file)
                    if os.path.exists(self.path) and os.path.samestat(os.stat(self.path), os.fstat(file.fileno())):
                        break
                stack.close()  # it was applied while this process waited
            self._read(file)
            with file_operation("write", self.path):
                self._end_last_line(file)
                if os.fstat(file.fileno()).st_size == 0:
                    file.write(_FIRST)
                    sync_directory(self.path.parent)
                file.flush()
            self._read(file)
            yield file

    def _end_last_line(self, file: BinaryIO) -> None:
        """Complete a line that a person wrote without an end; remove one whose writer was killed."""
        file.seek(self._end)
        if not (tail := file.read()):
            return
        if self._lines == 0 and not _FIRST.startswith(tail):
            self._parsed(tail)  # refuses another file, before it is changed
        try:
            load_json(tail)
        except ValueError:  # nobody was told that it counts
            file.truncate(self._end)
        else:
            file.write(b"\n")

    def _forget(self) -> None:
        self.changed += self.decisions
        self.decisions, self._inode, self._end, self._lines = {}, -1, 0, 0

    def _read(self, file: BinaryIO) -> None:
        """Read the lines that are new."""
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._end:
            self._forget()
            self._inode = status.st_ino
        file.seek(self._end)
        for line in file:
            if not line.endswith(b"\n"):
                return
            decision = self._parsed(line)
            self._end += len(line)
            self._lines += 1
            if decision is not None:
                self.changed.append(decision.file)
                self.decisions.pop(decision.file, None)
                if decision.action != "undecided":
                    self.decisions[decision.file] = decision

    def _parsed(self, line: bytes) -> Decision | None:
        """Return a line's decision; None for the first line and an empty one."""
        try:
            found: Any = load_json(line) if line.strip() else None
        except ValueError:
            found = 0
        if self._lines == 0:
            version = found.get("paceline_review") if isinstance(found, dict) else None
            if version is None:
                raise DataError(
                    f"{str(self.path)!r} is not a plan of `paceline review`: its first line is not "
                    f"{_FIRST.decode().strip()}.",
                    path=self.path,
                )
            if version != _VERSION:
                raise VersionError.of(self.path, version)
            return None
        if found is None:
            return None
        fields = found if isinstance(found, dict) else {}
        is_decision = (
            fields.keys() <= {"file", "action", "digest", "to", "new"}
            and all(isinstance(fields.get(key), str) for key in ("file", "action", "digest"))
            and fields["action"] in get_args(Action)
            and isinstance(fields.get("to"), str) == (fields["action"] == "move")
            and fields.get("new", False) in (False, fields["action"] == "move")
        )
        if not is_decision:
            raise DataError(
                f"{str(self.path)!r}, line {self._lines + 1}, is not a decision: it has file, digest and an action "
                f"({', '.join(get_args(Action))}), and with move the class, to. Correct or remove it.",
                path=self.path,
            )
        return Decision(**fields)
