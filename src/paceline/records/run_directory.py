"""Layout of a run directory, and atomic writes.

JSON in a run directory is strict: a number that is not finite is written as ``null``, because JSON cannot express it.
If a loss was infinite or NaN, an incident event says so.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import RunDirectoryError
from paceline.host.system import FOLDER
from paceline.parsing.files import refuse_special_outputs, special_kind
from paceline.parsing.plain_text import utf8

_ADVICE = {
    errno.EACCES: "Give yourself permission for it, or choose another directory.",
    errno.EPERM: "Give yourself permission for it, or choose another directory.",
    errno.EROFS: "The file system is read-only: choose another directory.",
    errno.EMFILE: "This process may not open more files: raise its limit (ulimit -n).",
    errno.ENOTDIR: "A part of the path is a file: choose another directory.",
    errno.EEXIST: "A part of the path is a file: choose another directory.",
    errno.ENOSPC: "The disk is full: free some space or choose another directory.",
    errno.EFBIG: "This process may not write larger files: raise its limit (ulimit -f).",
    errno.EDQUOT: "The disk quota is used up: free some space or choose another directory.",
}


class _RunPath:
    """Return the path of a file or folder of a run directory, relative to its root."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, run: RunDirectory, _: type[RunDirectory]) -> Path:
        return run.root / self._path


@dataclass(frozen=True)
class RunDirectory:
    """The layout of one run's files under ``root``.

    Attributes:
        root: The directory.
        descriptors: Descriptors of the files that :meth:`check_in_place` watches.
        identity: The run's identity; written again at its first complete checkpoint.
        recipe: The resolved recipe.
        plan: Every derived number.
        environment: Versions, hardware, revision and command line.
        events: Events, one JSON object per line.
        summary: The outcome, written at every stop.
        checkpoints: The folder of checkpoints.
        ledger: The folder of ledger files, one per rank.
        sample_lengths: Length of each training sample, if steps are balanced by length.
        sample_classes: Class of each training sample, if samples are drawn by class.
        shard_sizes: Samples in each file, if they are read a few files at a time.
        confusion: The confusion matrix of the last evaluation.
        examples: Some samples of the last evaluation, with their predictions.
        details: Details of the last evaluation, if samples do not have one label each.
        first_batch: Samples of the first training batch as the network saw them.
        figures: Pictures that the task drew of the last evaluation's model.
        tensorboard: The folder of TensorBoard files.
        report: The HTML report.
    """

    root: Path
    descriptors: Mapping[Path, int] = field(default_factory=dict, repr=False, compare=False)

    identity = _RunPath("run.json")
    recipe = _RunPath("recipe.yaml")
    plan = _RunPath("plan.json")
    environment = _RunPath("environment.json")
    events = _RunPath("events.jsonl")
    summary = _RunPath("summary.json")
    checkpoints = _RunPath("checkpoints")
    ledger = _RunPath("ledger")
    sample_lengths = _RunPath("sample_lengths.npy")
    sample_classes = _RunPath("sample_classes.npy")
    shard_sizes = _RunPath("shard_sizes.npy")
    confusion = _RunPath("evaluation/confusion.json")
    examples = _RunPath("evaluation/examples.json")
    details = _RunPath("evaluation/details.json")
    first_batch = _RunPath("first_batch.json")
    figures = _RunPath("evaluation/figures.json")
    tensorboard = _RunPath("tensorboard")
    report = _RunPath("report.html")

    @property
    def evaluation_files(self) -> tuple[Path, ...]:
        """All files of the last evaluation."""
        return self.confusion, self.examples, self.details, self.figures

    def tracked(self, tracker: str) -> Path:
        """The run's name in trackers."""
        return self.root / tracker / "paceline.json"

    def profile(self, step: int) -> Path:
        """Return the folder of a profile that starts after this many steps."""
        return self.root / "profile" / f"step-{step:08d}"

    def create(self) -> None:
        """Create the directory if needed, and check that it is writable.

        Raises:
            RunDirectoryError: If it cannot be created or written to.
        """
        probe = self.root / f".writable-{os.getpid()}"
        with file_operation("use", self.root, noun="run directory"):
            self.root.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.unlink()

    def exists(self) -> bool:
        """Whether a run has been started here."""
        return self.recipe.is_file()

    @contextlib.contextmanager
    def hold_open(self) -> Iterator[RunDirectory]:
        """Hold open the files that a run must not lose while it trains, for :meth:`check_in_place`.

        An open descriptor keeps the inode's number from being reused, or changed by a network file system.

        Raises:
            RunDirectoryError: If a part cannot be opened.
        """
        with contextlib.ExitStack() as stack:
            descriptors = {}
            for path in (self.root, self.checkpoints, self.ledger, self.events):
                with file_operation("open", path):
                    if path == self.events:
                        path.touch()
                    descriptors[path] = os.open(path, os.O_RDONLY)
                stack.callback(os.close, descriptors[path])
            yield replace(self, descriptors=descriptors)

    def check_in_place(self, *, before_saving: bool = True) -> None:
        """Check that the paths held open still lead to the same files.

        Args:
            before_saving: Whether an unresponsive disk is an error too. Step records continue without it.

        Raises:
            RunDirectoryError: If one was moved, removed, replaced or unmounted.
        """
        for path, descriptor in self.descriptors.items():
            try:
                is_in_place = os.path.samestat(os.stat(path), os.fstat(descriptor))
            except (FileNotFoundError, NotADirectoryError):
                is_in_place = False
            except OSError as error:
                if not before_saving:
                    return
                raise file_error("look at", path, error) from error
            if not is_in_place:
                raise RunDirectoryError(
                    f"'{path}' was moved, removed or unmounted while the run trained; nothing more is saved. Bring "
                    "it back, or give the run directory's new place, and run the same command again."
                )


def refuse_special_file(path: Path) -> None:
    """Refuse a record that is a named pipe, a socket or a device: opening it could block forever.

    Raises:
        RunDirectoryError: Naming the record and its kind.
    """
    kind = special_kind(path)
    if kind and kind != "a folder":  # opening it reports the error
        raise RunDirectoryError(f"'{path}' is {kind}, not a file: remove it, or restore the file from a copy.")


def existing_run(path: Path, expected: str = "the directory of a started run, its --run-dir") -> RunDirectory:
    """Return the run directory of that name.

    Args:
        path: The run directory.
        expected: What to give instead, for the message.

    Raises:
        RunDirectoryError: If it does not exist, does not contain a run, or cannot be accessed.
    """
    directory = RunDirectory(path)
    with file_operation("read", path, noun="run directory"):
        reason = "" if directory.exists() else no_run_message(path, expected)
    if reason:
        raise RunDirectoryError(reason)
    return directory


def no_run_message(path: Path, expected: str) -> str:
    """Return the error for a path without a run, with the reason.

    Args:
        path: The path without a run.
        expected: What to give instead.
    """
    if kind := special_kind(RunDirectory(path).recipe):
        return f"'{RunDirectory(path).recipe}' is {kind}, not a file: remove it, or restore the file from a copy."
    message = f"there is no run directory '{path}'"
    if path.exists():
        message = f"'{path}' holds no run ({'no recipe.yaml' if path.is_dir() else 'it is a file'})"
    suggestion = f" Did you mean {path.parent}?" if RunDirectory(path.parent).exists() else ""
    return f"{message}; give {expected}.{suggestion}"


def default_run_directory(recipe_name: str, *, parent: Path = Path("runs")) -> Path:
    """Create and return a new directory ``runs/<recipe>-<date>-<time>``.

    The directory is created here because only that proves that no other run, started in the same second by the same job
    array, has taken the same name.

    Args:
        recipe_name: A shipped recipe's name or a path, of which the file name is used.
        parent: The folder of runs.

    Raises:
        RunDirectoryError: If the directory cannot be created.
    """
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(recipe_name).stem).strip("-.") or "run"
    base = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    count = 1
    while True:
        path = parent / (base if count == 1 else f"{base}-{count}")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except FileExistsError as error:
            if not parent.is_dir():
                raise file_error("create", path, error, noun="run directory") from error
            count += 1
        except OSError as error:
            raise file_error("create", path, error, noun="run directory") from error
        else:
            return path


def file_error(verb: str, path: Path, error: OSError, *, noun: str = "file") -> RunDirectoryError:
    """Describe a failed file operation for the user: what was tried, why it failed, what to change."""
    reason = error.strerror or str(error)
    advice = _ADVICE.get(error.errno or 0, "Check the path and the disk.")
    return RunDirectoryError(f"Cannot {verb} the {noun} '{path}': {reason}. {advice}", path=path)


@contextlib.contextmanager
def file_operation(verb: str, path: Path, *, noun: str = "file") -> Iterator[None]:
    """Describe a file operation of the block that fails, as :func:`file_error` does."""
    try:
        yield
    except OSError as error:
        raise file_error(verb, path, error, noun=noun) from error


def make_folder(folder: Path, *names: str) -> None:
    """Create the folder that a command's ``--output`` names, and check the files that will be written there.

    Args:
        folder: The folder.
        names: Names of the files.

    Raises:
        RunDirectoryError: If it cannot be created, or one of the names exists and is not a regular file.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise RunDirectoryError(f"--output {folder} is a file; name a folder.") from None
    except OSError as error:
        raise file_error("make", folder, error, noun="folder") from error
    refuse_special_outputs(*(folder / name for name in names))


def write_json(path: Path, document: Any) -> None:
    """Write a JSON file atomically: a reader, or the next process, finds either the old or the new text.

    Raises:
        RunDirectoryError: If the disk fails; the old file is then still there.
    """
    write_text(path, encode_json(document, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file as :func:`write_json` does."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file as :func:`write_json` does: temporary file, fsync, rename, fsync of the directory."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with file_operation("write", path):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


@dataclass(frozen=True)
class Identity:
    """Content of ``run.json``.

    Attributes:
        id: Random; also in the manifest of each of the run's checkpoints.
        has_checkpoint: Whether a checkpoint was ever complete. From then on the run never starts over by itself.
        parent: Of a fork, the ``run_id`` and ``step`` that it began from.
    """

    id: str
    has_checkpoint: bool = False
    parent: Mapping[str, Any] | None = None

    @classmethod
    def new(cls) -> Identity:
        """Return the identity of a new run."""
        return cls(secrets.token_hex(16))


def write_identity(directory: RunDirectory, identity: Identity) -> None:
    """Write ``run.json`` durably, unless its content is unchanged.

    Raises:
        RunDirectoryError: If the disk fails.
    """
    content = {key: value for key, value in asdict(identity).items() if value is not None}
    path, text = directory.identity, encode_json(content, indent=2) + "\n"
    with file_operation("read", path):
        if path.is_file() and path.read_bytes() == text.encode():
            return
    write_text(path, text)


def sync_directory(path: Path) -> None:
    """Make created, renamed and removed names in a directory durable."""
    if not FOLDER:  # a system that cannot open folders flushes their names itself
        return
    handle = os.open(path, os.O_RDONLY | FOLDER)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def encode_json(document: Any, *, indent: int | None = None) -> str:
    """Encode as strict JSON in valid UTF-8: non-finite numbers become ``null``, and paths strings."""
    try:
        text = json.dumps(document, indent=indent, allow_nan=False, ensure_ascii=False, default=json_value)
    except ValueError:
        # Only a document with a non-finite number gets here; walking every document would cost more.
        text = json.dumps(_finite(document), indent=indent, allow_nan=False, ensure_ascii=False)
    # A file name may not be valid UTF-8. Its escape means the same in JSON.
    return text if text.isascii() else utf8(text)


def json_value(value: Any) -> Any:
    """Return the JSON counterpart of a value that ``json`` does not support."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be stored in a JSON file: {value!r}")


def _finite(value: Any) -> Any:
    """Copy a document with None for every non-finite number."""
    match value:
        case None | bool() | str() | int():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return _finite(json_value(value))
