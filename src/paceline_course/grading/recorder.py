"""Record what one rank of a program does, from its calls and not from its source.

Hooks record the inputs of networks built by the assignment and the steps of every optimizer. Python's audit events
record which files are written. Rows of a batch are recognised by their content, so a student may read, shuffle and
batch the data in any way.

There are two files: a line of JSON for each event, and float32 vectors (weights, gradients, statistics) to which events
refer by offset. Both are written immediately, because a run may be killed at any moment.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline_course import assignment

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events, and how many of their first arguments are paths that they change.
_PATHS = {
    "os.chmod": 1,
    "os.chown": 1,
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rename": 2,
    "os.rmdir": 1,
    "os.truncate": 1,
    "os.utime": 1,
    "shutil.rmtree": 1,
}
# Creating a link changes the folder of its new name, not its target.
_LINKS = ("os.link", "os.symlink")
_NOWHERE = ("/dev/", "/proc/self/")
_SHARED_MEMORY = "/dev/shm"  # refused: files there outlive the run


def is_new_content(args: tuple[Any, ...]) -> bool:
    """Return whether the arguments of an audit event ``open`` replace the content of a file or create one."""
    path, mode, flags = args
    if not isinstance(path, str | bytes | os.PathLike) or os.path.isdir(path):
        return False
    return any(letter in mode for letter in "wx") if isinstance(mode, str) else bool(flags & (os.O_TRUNC | os.O_EXCL))


def written_paths(event: str, args: tuple[Any, ...]) -> list[str]:
    """Return the paths that an audit event (see :func:`sys.audit`) is about to change; for most events none."""
    if event == "open":
        path, mode, flags = args
        is_writing = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & _WRITING)
        paths = [path] if is_writing else []
    elif event in _LINKS:
        paths = [args[1]]
    else:
        paths = list(args[: _PATHS.get(event, 0)])
    # A number refers to a file that is already open.
    names = [os.fsdecode(path) for path in paths if isinstance(path, str | bytes | os.PathLike)]
    return [name for name in names if not _is_nowhere(name)]


def _is_nowhere(name: str) -> bool:
    path = os.path.normpath(name)
    return path.startswith(_NOWHERE) and not path.startswith(_SHARED_MEMORY)


UNKNOWN = -1  # a row that is in neither set; sample v of the validation set is -2 - v


@dataclass(frozen=True)
class RecordingOptions:
    """What to record of a run, and when to kill it.

    Attributes:
        folder: Folder for the records of all ranks.
        scratch: The only directory that the program may write to.
        output: The program's output directory, inside ``scratch``.
        kill_at_step: Step, from 0, before which the rank is killed; None for never.
        tear: Whether to leave the first file that a rank saves after a step half written, and kill the rank.
    """

    folder: str
    scratch: str
    output: str
    kill_at_step: int | None = None
    tear: bool = False


@dataclass
class RankRecorder:
    """Records the events of one rank."""

    rank: int
    watch: RecordingOptions
    pending: list[int] = field(default_factory=list)
    steps: int = 0
    networks: list[nn.Module] = field(default_factory=list)
    trained: nn.Module | None = None
    _place: int = 0
    _unwritten: bytes = b""  # checkpoint saved to memory, not yet written to a file

    def __post_init__(self) -> None:
        stem = Path(self.watch.folder, f"rank-{self.rank}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._events = os.open(stem.with_suffix(".jsonl"), flags)
        self._vectors = os.open(stem.with_suffix(".bin"), flags)
        self._samples = _samples_by_content()

    def __deepcopy__(self, _: Any) -> RankRecorder:
        return self  # a copied network keeps its hooks, which refer to this recorder

    def install(self) -> None:
        """Start recording this process; this cannot be undone."""
        assignment.OBSERVERS.append(self._watch_network)
        register_optimizer_step_pre_hook(self._before_step)
        torch.save = self._saving(torch.save, 1)
        safetensors.torch.save_file = self._saving(safetensors.torch.save_file, 1)
        sys.addaudithook(self._audit)
        os._exit = self._leaving(os._exit)  # some programs call it to end despite running threads

    def note(self, event: str, **values: Any) -> None:
        """Record an event."""
        os.write(self._events, (json.dumps({"event": event, **values}) + "\n").encode())

    def note_end(self, code: int, message: str = "") -> None:
        """Record how the program ended, and the weights it had then."""
        network = self.trained or (self.networks[-1] if self.networks else None)
        self.note(
            "end",
            code=code,
            message=message,
            has_process_group=dist.is_available() and dist.is_initialized(),
            weights=None if network is None else self._vector(network.parameters()),
        )

    def _leaving(self, leave: Callable[[int], NoReturn]) -> Any:
        watched = os.getpid()

        def noted(status: int) -> NoReturn:
            if os.getpid() == watched:  # not in a process that the program forked
                self.note_end(status)
            leave(status)

        return noted

    # -- networks and optimizers

    def _watch_network(self, network: nn.Module) -> None:
        self.networks.append(network)
        network.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, network: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not inputs or not isinstance(inputs[0], Tensor):
            return
        samples = [self._samples.get(row, UNKNOWN) for row in _rows(inputs[0])]
        if network.training and torch.is_grad_enabled():
            self.pending += samples
            return
        validated = [-2 - sample for sample in samples if sample < UNKNOWN]
        if validated or UNKNOWN in samples:
            self.note(
                "validate",
                step=self.steps,
                samples=validated,
                training=network.training,
                statistics=self._vector(b for b in network.buffers() if b.is_floating_point()),
            )

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            return self._note_step(optimizer)

        def noted() -> Any:
            loss = closure()
            self._note_step(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": noted}

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.steps == self.watch.kill_at_step:
            os.kill(os.getpid(), signal.SIGKILL)
        trained = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        for network in self.networks:
            weights = list(network.parameters())
            if any(id(weight) in trained for weight in weights):
                gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
                self.note(
                    "step",
                    samples=self.pending,
                    learning_rate=float(optimizer.param_groups[0]["lr"]),
                    optimizer=_describe(optimizer),
                    weights=self._vector(weights),
                    gradients=self._vector(gradients),
                    seconds=time.monotonic(),
                )
                self.trained = network
                self.steps += 1
                self.pending = []
                return

    def _vector(self, tensors: Any) -> list[int]:
        flat = [tensor.detach().to("cpu", torch.float32).reshape(-1).numpy() for tensor in tensors]
        content = np.concatenate(flat).tobytes() if flat else b""
        os.write(self._vectors, content)
        self._place += len(content)
        return [self._place - len(content), len(content)]

    # -- files

    def _saving(self, save: Callable[..., Any], position: int) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = save(*args, **kwargs)
            target = kwargs.get("f", kwargs.get("filename", args[position] if len(args) > position else None))
            if isinstance(target, str | os.PathLike):
                self._note_written(os.fspath(target))
                if self.watch.tear and self.steps:
                    os.truncate(target, os.path.getsize(target) // 2)
                    os.kill(os.getpid(), signal.SIGKILL)
            elif self.watch.tear and self.steps and target is not None:
                self._tear(target)
            return result

        return watched

    def _tear(self, file: Any) -> None:
        try:
            file.flush()
            descriptor = file.fileno()
        except (AttributeError, OSError):  # saved to memory: _audit() tears the file when it is opened
            self._unwritten = file.getvalue() if isinstance(file, io.BytesIO) else b""
            return
        os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self._unwritten and event == "open" and is_new_content(args) and _is_inside(args[0], self.watch.output):
            content, self._unwritten = self._unwritten, b""
            Path(os.fsdecode(args[0])).write_bytes(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        for path in written_paths(event, args):
            if not _is_inside(path, self.watch.scratch):
                self.note("refused", path=os.path.abspath(path))
                raise PermissionError(f"A graded program may write only to its own directory, not to {path}.")
            if event == "open":
                self._note_written(path)

    def _note_written(self, path: str) -> None:
        if _is_inside(path, self.watch.output):
            self.note("wrote", path=os.path.relpath(os.path.realpath(path), os.path.realpath(self.watch.output)))


def _describe(optimizer: torch.optim.Optimizer) -> str:
    group = optimizer.param_groups[0]
    options = [
        f"{name}={group[name]}" for name in ("momentum", "dampening", "weight_decay", "betas") if group.get(name)
    ]
    options += [name for name in ("nesterov", "maximize") if group.get(name)]
    return f"{type(optimizer).__name__}({', '.join(options)})"


def _samples_by_content() -> dict[bytes, int]:
    training, _ = assignment.training_set().tensors
    validation, _ = assignment.validation_set().tensors
    numbers = {row: -2 - index for index, row in enumerate(_rows(validation))}
    return numbers | {row: index for index, row in enumerate(_rows(training))}


def _rows(batch: Tensor) -> list[bytes]:
    if not batch.numel():
        return []  # reshape(n, -1) fails on empty tensors
    values: NDArray[Any] = batch.detach().cpu().reshape(len(batch), -1).contiguous().numpy()
    return [row.tobytes() for row in values]


def _is_inside(path: str, folder: str) -> bool:
    real, root = os.path.realpath(path), os.path.realpath(folder)
    return real == root or real.startswith(root + os.sep)
