"""Events of a run, and their keys in ``events.jsonl``.

One frozen dataclass per event. :meth:`Event.to_json` gives the object that goes into the file, to trackers and to the
display: ``event`` (the kind), ``step``, ``position``, ``time`` (Unix seconds), then the fields under their own names.
The entries of the mappings ``metrics``, ``inputs``, ``timings`` and ``details`` are merged into the top level, so that
a task may add its own values.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, TypeVar, dataclass_transform

from paceline.errors import RunDirectoryError
from paceline.parsing.plain_text import load_json
from paceline.records.run_directory import (
    encode_json,
    file_operation,
    refuse_special_file,
    sync_directory,
    write_bytes,
)

T = TypeVar("T")
Numbers = Mapping[str, float | None]
Status = Literal["completed", "stopped", "failed"]
Weights = Literal["model", "ema"]

_FLATTENED = frozenset({"metrics", "timings", "details", "inputs"})
INPUTS = frozenset({"input_mean", "input_std"})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def _event(kind: type[T]) -> type[T]:
    return dataclass(frozen=True, kw_only=True)(kind)


@_event
class Event:
    """Base of all events.

    Attributes:
        step: Optimizer steps done when it happened; 0 before the first.
        position: Global batches used up by then, which skipped steps make larger than ``step``; None is
            the same as ``step``.
        time: Unix time in seconds.
    """

    kind: ClassVar[str]

    step: int
    position: int | None = None
    time: float = field(default_factory=time.time)

    def to_json(self) -> dict[str, Any]:
        """Return the event as written to ``events.jsonl``.

        Raises:
            ValueError: If a metric, timing or detail has the name of another key.
        """
        document: dict[str, Any] = {"event": self.kind, "step": self.step, "time": self.time}
        for name in (one.name for one in fields(self)):
            value = getattr(self, name)
            if name == "position" and value is None:
                continue
            if name not in _FLATTENED:
                document[name] = value
                continue
            clash = sorted(document.keys() & value.keys())
            if clash:
                raise ValueError(f"{self.kind} events have keys {clash} already: rename these {name}")
            document.update(value)
        return document


@_event
class StartEvent(Event):
    """The processes of a run started training: once per launch, at step 0 or the step restored.

    Attributes:
        details: ``run``, the run's identity; ``opening_seconds``, the time since the launch; ``log_every``, the steps
            between step records, None if they vary.
    """

    kind: ClassVar[str] = "start"

    recipe: str
    world_size: int
    total_steps: int
    version: str
    details: Mapping[str, Any] = field(default_factory=dict)


@_event
class ResumeEvent(Event):
    """Training resumes from a checkpoint.

    Attributes:
        checkpoint: Name of the checkpoint's folder.
        resumes: How often the run has been resumed, including this time.
        world_size: Number of processes from here on.
    """

    kind: ClassVar[str] = "resume"

    checkpoint: str
    resumes: int
    world_size: int
    details: Mapping[str, Any] = field(default_factory=dict)


@_event
class StepEvent(Event):
    """A log record; loss and timings are over the steps since the previous record.

    Attributes:
        epoch: Epoch the step belongs to, counted from 1.
        samples: Samples seen since the start of the run.
        loss: Mean training loss per sample, in nats; None if every step was skipped.
        lr: Learning rate of this step.
        grad_norm: L2 norm of this step's gradient before clipping; None if it was not computed.
        grad_scale: Loss scale of fp16 training; 1 without one.
        timings: Timings of the step clock: ``step_seconds`` per step, and of these ``data_wait_seconds``,
            ``h2d_seconds``, ``forward_seconds``, ``backward_seconds``, ``communication_seconds``,
            ``optimizer_seconds``, ``ema_seconds``, ``logging_seconds`` and ``host_seconds`` (None if one cannot be
            separated from others); ``data_wait_fraction`` and ``throughput_samples_per_second``. On a device with
            streams also ``launch_<phase>_seconds``, by the host's clock, and ``device_lag_seconds``; on one whose peak
            is known ``mfu``; where samples have tokens ``throughput_tokens_per_second``, ``padding_fraction`` and
            ``token_imbalance``.
        metrics: The task's own values, by name; with ``telemetry.noise_scale``, ``noise_scale`` in samples with
            ``noise_scale_low`` and ``noise_scale_high``, and what it is the ratio of, ``gradient_variance`` and
            ``gradient_square``: averages over about the last 50 measured steps (None if inconclusive).
        details: With several processes, ``slowest_rank``, ``slowest_phase`` and ``slowest_factor``, and
            ``rank_seconds``: minimum, median and maximum over them for each phase. Of a loop of your own, ``logged``:
            the names of what it logs.
    """

    kind: ClassVar[str] = "step"

    epoch: int
    samples: int
    loss: float | None
    lr: float
    grad_norm: float | None = None
    grad_scale: float | None = None
    timings: Numbers = field(default_factory=dict)
    metrics: Numbers = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)


@_event
class EvaluationEvent(Event):
    """One pass over a held-out split.

    Attributes:
        epoch: Epoch the last step belongs to, counted from 1.
        split: Name of the split.
        weights: Which of the two sets of weights was evaluated.
        samples: Samples scored, each once.
        seconds: Time the pass took.
        train_seconds: Time in training steps until then, over all launches; None if it was not measured.
        metrics: ``loss``, ``top1_accuracy``, ``top5_accuracy``, ... by name; accuracies in percent.
        inputs: ``input_mean`` and ``input_std`` of the network's inputs; not for tokens.
    """

    kind: ClassVar[str] = "evaluation"

    epoch: int
    split: str
    weights: Weights
    samples: int
    seconds: float
    train_seconds: float | None = None
    metrics: Numbers = field(default_factory=dict)
    inputs: Numbers = field(default_factory=dict)


@_event
class ObservationEvent(Event):
    """What a step or an evaluation shows of how the network learns; see ``docs/run-directory.md``.

    Attributes:
        split: ``train`` or ``validation``.
        details: ``losses``, what each loss function was given; of steps also ``blocks``, the gradients and updates of
            the network's parts, and more.
    """

    kind: ClassVar[str] = "observation"

    split: str
    details: Mapping[str, Any] = field(default_factory=dict)


@_event
class CheckpointEvent(Event):
    """A checkpoint is being saved. Written before it is committed, so that a complete one always has its event.

    Attributes:
        checkpoint: Name of the checkpoint's folder.
    """

    kind: ClassVar[str] = "checkpoint"

    checkpoint: str
    details: Mapping[str, Any] = field(default_factory=dict)


@_event
class ProfileEvent(Event):
    """Some steps were profiled.

    Attributes:
        first_step: The first profiled step, from 1.
        last_step: The last profiled step.
        tool: The tool: ``torch``, or ``nsys``, which stores its own results.
        folder: Folder of the profile, relative to the run directory; None with ``nsys``.
    """

    kind: ClassVar[str] = "profile"

    first_step: int
    last_step: int
    tool: str
    folder: str | None


@_event
class IncidentEvent(Event):
    """An incident, whether or not the run survived it.

    Attributes:
        incident: Identifier of the kind: ``broken_sample``, ``damaged_checkpoint``, ``foreign_checkpoint``,
            ``foreign_ledger``, ``missing_records``, ``damaged_output``, ``nonfinite_loss``, ``nonfinite_gradient``,
            ``nonfinite_weights``, ``nonfinite_metric``, ``diverged``, ``slow_rank``, ``restart``, ``recompile``,
            ``slow_compile``, ``profile``, ``linear_lr_rule``, ``not_kept``, ``tracker``, ``mirror``, ``mirror_back``,
            ``mirror_retries``, ``mirror_behind``; of :class:`paceline.Loop` ``impure_data``, ``unkept``,
            ``pending_gradients``, ``left_loop``.
        message: One sentence for a person.
    """

    kind: ClassVar[str] = "incident"

    incident: str
    message: str
    details: Mapping[str, Any] = field(default_factory=dict)


@_event
class MeasurementEvent(Event):
    """A measurement of the run's network before a launch's first step, or of its first steps; it changes nothing.

    Attributes:
        what: ``compile``, ``deterministic``, ``flops`` or ``forecast``.
        message: One sentence for a person.
        seconds: Duration of the measurement.
        metrics: The figures.
    """

    kind: ClassVar[str] = "measurement"

    what: str
    message: str
    seconds: float
    metrics: Numbers = field(default_factory=dict)


@_event
class StopEvent(Event):
    """The loop ended before the last step: a signal, early stopping, an error."""

    kind: ClassVar[str] = "stop"

    reason: str
    details: Mapping[str, Any] = field(default_factory=dict)


@_event
class FinishEvent(Event):
    """The processes of a run ended; ``summary.json`` has the details.

    Attributes:
        details: ``message``, the error, if the first process failed.
    """

    kind: ClassVar[str] = "finish"

    status: Status
    train_seconds: float
    total_seconds: float
    details: Mapping[str, Any] = field(default_factory=dict)


def detach(path: Path) -> None:
    """Copy a file with several hard links (``cp -al``, ``ln``) to a new inode, so that the other links keep theirs.

    Call it before a file is appended to or cut in place. A file with a single link, or a missing one, is left
    unchanged.

    Raises:
        RunDirectoryError: If the disk fails; the file is then unchanged.
    """
    with file_operation("copy", path):
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


class AppendFile:
    """A file that is only appended to; writes are buffered until :meth:`flush`.

    A file with several hard links is copied first (:func:`detach`).

    Args:
        path: The file, created with its folder if needed; the folder's parent must exist.
        buffering: Bytes of the buffer; -1 for the system's choice.

    Raises:
        RunDirectoryError: If the file cannot be opened; later, if a write fails.
    """

    def __init__(self, path: Path, *, buffering: int = -1) -> None:
        self._path = path
        refuse_special_file(path)
        detach(path)
        with file_operation("open", path):
            path.parent.mkdir(exist_ok=True)
            self._file = path.open("ab", buffering=buffering)
            sync_directory(path.parent)

    def write(self, content: bytes) -> None:
        """Append bytes."""
        with file_operation("write", self._path):
            self._file.write(content)

    def flush(self, *, durable: bool = False) -> None:
        """Pass all data to the operating system; with ``durable``, wait until it is on the disk."""
        with file_operation("write", self._path):
            self._file.flush()
            if durable:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush durably and close; closing twice is harmless."""
        if self._file.closed:
            return
        try:
            self.flush(durable=True)
        finally:
            # Only the file descriptor is left to close: closing the file would retry the failed write.
            with contextlib.suppress(OSError):
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EventWriter(AppendFile):
    """Appends events to a file, one JSON object per line.

    Events are buffered: flushing at every log record lets readers follow the run, and a kill loses at most the events
    after it. Call :func:`truncate_after` first if the file exists.
    """

    def append(self, event: Event | Mapping[str, Any]) -> None:
        """Add one event.

        Raises:
            ValueError: If a mapping lacks ``event`` or ``step``.
        """
        document = event.to_json() if isinstance(event, Event) else event
        if "event" not in document or "step" not in document:
            raise ValueError(f"an event has the keys 'event' and 'step', found {sorted(document)}")
        self.write(encode_json(document).encode("utf-8") + b"\n")


def truncate_after(path: Path, position: int) -> int:
    """Remove events later than ``position`` in the data, and a last line torn by a kill; return how many were removed.

    The file is replaced atomically, or keeps its content. A missing file is not created.

    Raises:
        RunDirectoryError: If a line other than the last is not an event.
    """
    refuse_special_file(path)
    lines = list[bytes]()
    with file_operation("read", path), contextlib.suppress(FileNotFoundError):
        lines = path.read_bytes().splitlines(keepends=True)
    kept: list[bytes] = []
    for number, line in enumerate(lines, start=1):
        event = parse_line(line, path, number, is_last=number == len(lines))
        if event is not None and event.get("position", event["step"]) <= position:
            kept.append(line)
    if len(kept) < len(lines):
        write_bytes(path, b"".join(kept))
    else:
        detach(path)  # the resumed run opens it before it appends
    return len(lines) - len(kept)


def parse_line(line: bytes, path: Path, number: int, *, is_last: bool) -> dict[str, Any] | None:
    """Return a line's event, or None for a last line without its end, as a kill leaves it.

    Raises:
        RunDirectoryError: If any other line is not an event.
    """
    torn = is_last and not line.endswith(b"\n")
    if torn:
        return None
    try:
        event = load_json(line)
        counts = event["step"], event.get("position", 0)
        if isinstance(event["event"], str) and all(isinstance(each, int) for each in counts):
            # Each line has new strings for its keys: shared, a run's records take a third less memory.
            return {sys.intern(key): value for key, value in event.items()}
    except (ValueError, TypeError, KeyError):
        pass  # reported below, together with objects that lack the keys
    raise _not_an_event(path, f"Line {number}", repr(line[:60]))


def _not_an_event(path: Path, where: str, found: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"{where} of '{path}' is not an event: found {found}. The file is damaged, or was written by another version "
        "of Paceline; restore it from a copy, or start the run in another directory."
    )


# Larger than any number that a run records; sums and products of smaller ones are finite.
_LARGEST, _LARGEST_COUNT = 1e60, 2**63
_LATEST = 253_370_764_800  # the year 9999, in Unix seconds
_MAPPINGS = dict.fromkeys(("Mapping[str, Any]", "Mapping[str, float]"), Mapping)
_TYPES: Mapping[str, Any] = {"int": int, "float": (int, float), "str": str, "Status": str, "Weights": str, **_MAPPINGS}


def wrong_field(own: Iterable[Field[Any]], document: Mapping[str, Any]) -> str | None:
    """Return the first of a dataclass's fields that has another type in a document, or is out of range, as text."""
    for each in own:
        value: Any = document.get(each.name)
        name = str(each.type).removesuffix(" | None")
        if value is None and (each.name not in document or name != each.type):
            continue
        is_valid = isinstance(value, _TYPES.get(name, object)) and not isinstance(value, bool)
        is_valid &= not isinstance(value, int) or abs(value) < _LARGEST_COUNT
        if not is_valid or (each.name == "time" and not 0 <= value < _LATEST):
            return f"{each.name}={str(value)[:60]}"
    return None


def for_display(event: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return an event that can be shown: values that a run never measures become None.

    Raises:
        RunDirectoryError: If one of the event's own fields has another type, or is out of range.
    """
    own = next((fields(each) for each in Event.__subclasses__() if each.kind == event["event"]), fields(Event))
    if wrong := wrong_field(own, event):
        raise _not_an_event(path, f"A {event['event']} record", wrong)
    texts = {each.name for each in own} | {"event", "slowest_phase"}
    others = () if event["event"] in ("step", "evaluation") else (object,)
    return {key: _shown(key, value, (str,) if key in texts else others) for key, value in event.items()}


def _shown(key: str, value: Any, kinds: tuple[type, ...]) -> Any:
    """Return a number that may have been measured, or a value of some other kinds; otherwise None."""
    if isinstance(value, Mapping) and (object in kinds or key.startswith("rank_seconds")):
        return {name: _shown(f"{key}.{name}", each, kinds) for name, each in value.items()}
    if type(value) not in (int, float):
        return value if isinstance(value, kinds) else None
    return None if not abs(value) < _LARGEST or (value < 0 and "seconds" in key) else value
