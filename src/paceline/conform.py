"""What a training program tells `paceline conform`: the samples it reads and uses, and numbers such as the rate.

Without that command, :func:`watched` returns the data set itself and the other functions do nothing. Each process
appends lines to a separate file, each in one write: a killed process loses no line. This file needs nothing but Python:
the command also lends it to environments in which Paceline is not installed.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

_T = TypeVar("_T")
Role = Literal["train", "evaluation"]


def watched(dataset: _T, role: Role = "train", *, key: Callable[[Any], Any] | None = None) -> _T:
    """Return a data set that reports which samples are read, in its place.

    A data set with ``len`` and ``[i]`` reports its indices, or what ``key`` returns of a sample. An iterable one
    reports what ``key`` returns, by default a digest of the sample. Otherwise the data set behaves as before.
    """
    if _LOG is None:
        return dataset
    torch_data = sys.modules.get("torch.utils.data")
    has_indices = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    # torch gives every stream a [i] that raises.
    base: Any = _Indexed if has_indices and not _is_stream(dataset, torch_data) else _Iterable
    if base is _Iterable and hasattr(dataset, "__len__"):
        base = _Sized
    if torch_data is None:
        return base(dataset, role, key)  # type: ignore[no-any-return]  # it behaves like the data set
    kind = torch_data.Dataset if base is _Indexed else torch_data.IterableDataset
    return _joined(base, kind)(dataset, role, key)  # type: ignore[no-any-return]  # it behaves like the data set


def used(ids: Iterable[Any], role: Role = "train") -> None:
    """Report the samples of one batch of this process: trained on, or counted by an evaluation.

    Call it before the step whose checkpoint includes the batch. Loaders read ahead; with it, only what was used counts.
    """
    if _LOG is not None:
        _LOG.unit("used", role, [_plain(each) for each in ids])


def value(name: str, step: int, number: float) -> None:
    """Report a number that a resumed run must continue, such as the learning rate of a step."""
    if _LOG is not None:
        _LOG.write(e="value", name=name, step=int(step), number=float(number))


class _Log:
    """The lines of this process, and where it has to stop.

    ``PACELINE_CONFORM`` is the folder of the lines, ``PACELINE_CONFORM_SAVES`` the pattern of checkpoints, and
    ``PACELINE_CONFORM_STOP`` a JSON object: after ``at`` lines of the ``kind`` in rank 0 the process kills itself, or
    with ``tear`` it ends in the first write that would make a file larger than ``tear`` bytes.
    """

    def __init__(self, folder: str) -> None:
        self.folder, self.owner, self.file, self.is_torn = Path(folder), 0, -1, False
        self.rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
        self.stop = json.loads(os.environ.get("PACELINE_CONFORM_STOP") or "{}")
        self.saves = os.environ.get("PACELINE_CONFORM_SAVES") or ""
        self.units, self.seen = {"read": 0, "used": 0}, self.look()

    def look(self) -> list[tuple[str, int, int]]:
        """Return path, time and size of each checkpoint file; they change when one is saved."""
        found = []
        for top in sorted(glob.glob(self.saves)) if self.saves else ():
            for path in (top, *(os.path.join(at, name) for at, _, names in os.walk(top) for name in sorted(names))):
                try:
                    status = os.stat(path)
                except OSError:  # renamed or pruned in between
                    continue
                found.append((path, status.st_mtime_ns, status.st_size))
        return found

    def write(self, **entry: Any) -> None:
        """Append a line; to another file in a forked process."""
        if self.is_torn:
            return
        if self.owner != os.getpid():
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{self.rank}-{os.getpid()}.jsonl"
            self.owner, self.file = os.getpid(), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.write(self.file, (json.dumps({"t": time.monotonic_ns(), **entry}) + "\n").encode())

    def unit(self, kind: str, role: Role, ids: list[Any], **more: Any) -> None:
        """Report a read sample or a used batch, and a checkpoint that was saved before it; stop here if asked."""
        if role == "train" and not more.get("worker") and (now := self.look()) != self.seen:
            self.seen = now
            self.write(e="saved")
        self.write(e=kind, role=role, ids=ids, **more)
        if role != "train" or more.get("worker") or self.rank:
            return
        self.units[kind] += 1
        if self.stop.get("kind") == kind and self.units[kind] == self.stop["at"]:
            self.write(e="stop")
            if "tear" not in self.stop:
                os.kill(os.getpid(), signal.SIGKILL)
            import resource

            self.is_torn = True  # this file, too, could not grow any longer
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)  # which this process may not raise
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.stop["tear"], most))


_LOG = _Log(os.environ["PACELINE_CONFORM"]) if os.environ.get("PACELINE_CONFORM") else None


class _Watched:
    """A data set that reports its reads; anything else is asked of the data set."""

    def __init__(self, dataset: Any, role: Role, key: Callable[[Any], Any] | None) -> None:
        self._watched, self._role, self._key, self._owner = dataset, role, key, os.getpid()
        if _LOG is not None:
            _LOG.write(e="data", role=role, samples=len(dataset) if isinstance(self, _Indexed) else None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "__getitems__":
            raise AttributeError(name)
        return getattr(self._watched, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self._watched, self._role, self._key, self._owner)

    def _report(self, index: Any, item: Any, before: Mapping[str, str]) -> Any:
        digest = _digest(item)
        name = digest if index is None and self._key is None else index if self._key is None else self._key(item)
        after = _random_states()
        draws = {kind: before[kind] + after[kind] for kind in before if before[kind] != after[kind]}
        worker = os.getpid() != self._owner
        if _LOG is not None:
            _LOG.unit("read", self._role, [_plain(name)], digest=digest, draws=draws, worker=worker)
        return item


class _Indexed(_Watched):
    def __len__(self) -> int:
        return len(self._watched)

    def __getitem__(self, index: Any) -> Any:
        before = _random_states()
        return self._report(index, self._watched[index], before)


class _Iterable(_Watched):
    def __iter__(self) -> Iterator[Any]:
        items = iter(self._watched)
        while True:
            before = _random_states()
            try:
                item = next(items)
            except StopIteration:
                return
            yield self._report(None, item, before)


class _Sized(_Iterable):
    def __len__(self) -> int:
        return len(self._watched)


def _is_stream(dataset: Any, torch_data: Any) -> bool:
    return torch_data is not None and isinstance(dataset, torch_data.IterableDataset)


def _again(dataset: Any, role: Role, key: Callable[[Any], Any] | None, owner: int) -> Any:
    """Return a copy in a spawned loader process."""
    result: Any = watched(dataset, role, key=key)
    if result is not dataset:
        vars(result)["_owner"] = owner
    return result


def _joined(base: type[Any], kind: type[Any]) -> type[Any]:
    return type(base.__name__, (base, kind), {})


def _random_states() -> dict[str, str]:
    """Return digests of the global generators that this process has loaded."""
    states: dict[str, bytes] = {}
    if (own := sys.modules.get("random")) is not None:
        states["random"] = repr(own.getstate()).encode()
    if (numpy := sys.modules.get("numpy.random")) is not None and hasattr(numpy, "get_state"):
        _, words, *place = numpy.get_state()
        states["numpy.random"] = words.tobytes() + repr(place).encode()
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_rng_state"):
        states["torch"] = torch.get_rng_state().numpy().tobytes()
    return {kind: hashlib.blake2b(state, digest_size=8).hexdigest() for kind, state in states.items()}


def _digest(item: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in _parts(item):
        digest.update(part)
    return digest.hexdigest()


def _parts(item: Any) -> Iterator[bytes]:
    """Yield the content of a sample: of what it consists, in order; of unknown objects only their class."""
    if isinstance(item, Mapping):
        for name, each in item.items():
            yield repr(name).encode()
            yield from _parts(each)
    elif isinstance(item, list | tuple):
        for each in item:
            yield from _parts(each)
    elif hasattr(item, "numpy") and hasattr(item, "detach"):
        yield from _parts(item.detach().cpu().numpy())
    elif hasattr(item, "tobytes"):
        yield item.tobytes()
    elif isinstance(item, bytes | str | int | float | bool | None):
        yield repr(item).encode()
    else:
        yield type(item).__qualname__.encode()


def _plain(name: Any) -> Any:
    """Return an id that JSON has: of a tensor or NumPy number its value."""
    name = name.item() if hasattr(name, "item") else name
    return name if isinstance(name, int | str) else str(name)
