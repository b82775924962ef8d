"""Find out, before a run, whether reading a sample again gives the same: what a resume relies on.

A few samples are read in forked processes, so that what reading changes in the data set is not changed here: twice,
and in a process that has read nothing before, in another order, as another loader process, at another time and with
other hashes. The generators of Python, NumPy, torch and albumentations are seeded for each sample, so what they draw is
no difference.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import random
import stat
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from paceline.data.batch import tensors_in
from paceline.data.objects.elsewhere import (
    as_other_worker,
    with_later_clock,
    with_other_addresses,
    with_other_hashes,
    with_sets_in_other_order,
)
from paceline.data.objects.keyed import KeyedReader
from paceline.data.objects.parts import code_in, parts_of

_WAIT_SECONDS = 60.0
# Larger columns are compared by 64 of their samples.
_MOST_BYTES = 2**28
# Reading again stops after this time; every sample is read once, so that the digest does not depend on the time.
_BUDGET_SECONDS = 4.0
_AFTER_OTHERS = " depends on the samples that were read before it"
_KEPT = " keeps the random draws of its first read: cache it before its random transforms"
_SHARED = ", whose position loader processes share: open it in [i], once for each process, or give workers=0"
_OTHERWISE = ", which differs from process to process"
Change = Callable[[Any], None]
_CHANGES: dict[str, Change] = {
    " depends on the clock, which a resumed run reads later: leave the time out of it": with_later_clock,
    " depends on the process that reads it (its number or id)": as_other_worker,
    f" depends on hash(){_OTHERWISE}: use zlib.crc32 or hashlib": with_other_hashes,
    f" depends on id(), an address{_OTHERWISE}: use the sample's number": with_other_addresses,
    f" depends on the order of a set{_OTHERWISE}: sort it": with_sets_in_other_order,
}
_CLOCK = {"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "now", "utcnow", "today"}
_FRESH = {"default_rng", "SystemRandom", "urandom", "uuid4", "token_bytes", "token_hex", "Random", "RandomState"}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was learned from a few samples.

    Attributes:
        difference: Why a sample is not the same when it is read again, as a sentence; empty if it is.
        digest: SHA-256 of the samples' content; empty if they differ, or some content is of unknown type.
        seconds: Median time to read a sample; None if none was read.
        contents: Digest of each sample that was read, by its number.
        shared: Which open file the samples are read from by its position, as a sentence; empty if there is none.
    """

    difference: str = ""
    digest: str = ""
    seconds: float | None = None
    contents: Mapping[str, str] = field(default_factory=dict)
    shared: str = ""


def read_again(reader: KeyedReader) -> Reading:
    """Read the first, middle and last samples several times, in other processes, and compare.

    Nothing is learned where processes cannot be forked, or if that process fails: the same error then appears where it
    can be explained.
    """
    if reader.samples.columns is not None:
        columns = [*tensors_in(reader.samples.columns)]
        is_large = sum(each.nbytes for each in columns) > _MOST_BYTES
        return Reading(digest=_digest([each[:: max(1, len(each) // 64) if is_large else 1] for each in columns]))
    if sys.platform != "linux":
        return Reading()
    found = _in_child(_read, reader)
    if found is None:
        return Reading()
    later, moved = found.pop("later", {}), found.pop("moved")
    shared = f"{_name(reader, 0)} is read from the open file '{moved}'{_SHARED}" if moved else ""
    reading = Reading(**found, shared=shared)
    if reading.difference or not reading.digest:
        return reading
    difference = _difference_elsewhere(reader, reading.contents, later)
    return replace(reading, difference=difference, digest="") if difference else reading


def _difference_elsewhere(reader: KeyedReader, contents: Mapping[str, str], later: Mapping[str, str]) -> str:
    """Return what differs in a process that has read nothing yet, and in which everything else is another; a sentence.

    Args:
        reader: Reads the samples.
        contents: Digests of the samples in epoch 0.
        later: Digests of some of them in epoch 1, after epoch 0.
    """

    def unlike(expected: Mapping[str, str], found: Mapping[str, str]) -> str:
        wrong = next((sample for sample, digest in expected.items() if found.get(sample, digest) != digest), "")
        return wrong and _name(reader, int(wrong))

    def read(samples: list[int], changes: Iterable[Change] = (), epochs: tuple[int, ...] = (0,)) -> Any:
        return _in_child(partial(_read_elsewhere, samples=samples, changes=changes, epochs=epochs), reader)

    samples = [*map(int, later)]
    found = read(samples, _CHANGES.values(), (1, 0))
    expected = (later, contents)
    if found is not None and not any(map(unlike, expected, found["read"])):
        return ""
    causes: dict[str, Iterable[Change]] = {_AFTER_OTHERS + _where(reader): ()}
    causes |= {cause: (change,) for cause, change in _CHANGES.items()}
    for cause, changes in causes.items():
        alone = read(samples, changes)
        if alone is not None and (name := unlike(contents, alone["read"][0])):
            return name + cause
    # Only now, since what draws its first samples for another epoch differs as if it depended on others.
    fresh = read(samples, epochs=(1,))
    name = "" if fresh is None else unlike(later, fresh["read"][0])
    return name and name + _KEPT


def _in_child(read: Callable[[KeyedReader], dict[str, Any]], reader: KeyedReader) -> dict[str, Any] | None:
    """Return what a forked process found; None if it failed or took too long."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_serve, args=(read, reader, sender), daemon=True)
    with warnings.catch_warnings():  # Python's about forking with threads; the child takes none of their locks
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    sender.close()
    try:
        found: dict[str, Any] | None = json.loads(receiver.recv_bytes()) if receiver.poll(_WAIT_SECONDS) else None
    except (EOFError, OSError):
        return None
    finally:
        child.kill()
        child.join()
        receiver.close()
    return found


def _serve(read: Callable[[KeyedReader], dict[str, Any]], reader: KeyedReader, sender: Connection) -> None:
    torch.set_num_threads(1)  # the parent's threads do not exist here
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    number, positions = os.getppid() + 1, _positions()
    patch("os.getpid", lambda: number).start()  # the same in all of them, and not the parent's
    try:
        found = read(reader)
    except Exception:  # noqa: BLE001  # reported when the run reads the sample
        found = None
    # The parent has the same positions: they are set back for it.
    moved = [file for file, position in _positions().items() if positions.get(file, position) != position]
    for file in moved:
        os.lseek(file, positions[file], os.SEEK_SET)
    if found is None:
        os._exit(1)
    found["moved"] = os.readlink(f"/proc/self/fd/{moved[0]}") if moved else ""
    sender.send_bytes(json.dumps(found).encode())
    os._exit(0)


def _positions() -> dict[int, int]:
    """Return the positions in files that are open for reading."""
    import fcntl  # Linux only, as this check is

    found = {}
    for file in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # not a file with positions, or closed meanwhile
            if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY and stat.S_ISREG(os.fstat(file).st_mode):
                found[file] = os.lseek(file, 0, os.SEEK_CUR)
    return found


def _read(reader: KeyedReader) -> dict[str, Any]:
    """Read the samples, each twice, and some of them as in the next epoch."""
    count, contents, seconds = len(reader.samples), dict[str, str](), list[float]()
    chosen, whole = sorted({0, count // 2, count - 1}), list[bytes]()
    started = time.perf_counter()
    for sample in chosen:
        begun = time.perf_counter()
        read = reader.read(sample, 0)
        seconds.append(time.perf_counter() - begun)
        if device := next((each.device for each in tensors_in(read) if each.device.type not in ("cpu", "meta")), None):
            return {"difference": f"{_name(reader, sample)} is on {device}, where loader processes cannot read it"}
        whole.append(bytes_of(read))
        is_early = time.perf_counter() - started < _BUDGET_SECONDS
        if is_early and bytes_of(reader.read(sample, 0)) != whole[-1]:
            return {"difference": _name(reader, sample) + _cause(reader), "seconds": min(seconds)}
        if whole[-1]:
            contents[str(sample)] = _joined([whole[-1]])
    again = chosen if time.perf_counter() - started < _BUDGET_SECONDS else chosen[:1]
    return {
        "digest": _joined(whole) if all(whole) else "",
        "seconds": sorted(seconds)[len(seconds) // 2],
        "contents": contents,
        "later": _contents(reader, again, epoch=1),
    }


def _read_elsewhere(
    reader: KeyedReader, *, samples: list[int], changes: Iterable[Change], epochs: tuple[int, ...]
) -> dict[str, Any]:
    """Read samples in the opposite order, as in some epochs, the last of them under changes."""
    *before, last = epochs
    read = [_contents(reader, samples[::-1], epoch) for epoch in before]
    for change in changes:
        change(reader.samples.data)
    return {"read": [*read, _contents(reader, samples[::-1], last)]}


def _contents(reader: KeyedReader, samples: list[int], epoch: int) -> dict[str, str]:
    return {str(sample): _digest([reader.read(sample, epoch)]) for sample in samples}


def _name(reader: KeyedReader, sample: int) -> str:
    return reader.samples.path(sample)


def _cause(reader: KeyedReader) -> str:
    """Return what makes a sample differ each time, as the rest of a sentence."""
    said = " differs each time that it is read"
    if owner := _own_generator(reader.samples.data):
        return f"{said}: {owner} is a separate generator, which is not seeded for each sample"
    names = {name for each in parts_of(reader.samples.data) for name in _names_in(each)}
    if used := sorted(names & _FRESH):
        return f"{said}: it calls {used[0]}()"
    if used := sorted(names & _CLOCK):
        return f"{said}: it reads the clock ({used[0]})"
    return said + _where(reader)


def _where(reader: KeyedReader) -> str:
    """Return what keeps a state between two samples, as the rest of a sentence, if it can be seen."""
    for each in parts_of(reader.samples.data):
        if isinstance(each, io.IOBase):
            return ": it reads on from the position of an open file"
    return ": something changes with each sample that is read, such as a counter or a list"


def _own_generator(data: Any) -> str:
    kinds = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
    for owner in parts_of(data):
        named = vars(owner) if hasattr(owner, "__dict__") and not isinstance(owner, types.FunctionType) else {}
        for name, value in named.items():
            if isinstance(value, kinds):
                return f"{type(owner).__name__}.{name}"
        if isinstance(owner, kinds):
            return f"a {type(owner).__name__}"
    return ""


def _names_in(value: Any) -> Iterator[str]:
    if isinstance(value, types.FunctionType):
        for code in code_in(value.__code__):
            yield from code.co_names


def _digest(values: list[Any]) -> str:
    return _joined([bytes_of(each) for each in values])


def _joined(contents: list[bytes]) -> str:
    return hashlib.sha256(b"".join(contents)).hexdigest()


def bytes_of(value: Any) -> bytes:
    """Return what a sample holds, with its types; empty for content of unknown type, which is then not compared."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta" or value.layout != torch.strided:
            return b""
        flat = value.detach().cpu().contiguous().reshape(-1)
        head = f"{value.dtype}{list(value.shape)}".encode()
        return head + (flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return f"{array.dtype}{array.shape}".encode() + (b"" if array.dtype.hasobject else array.tobytes())
    if isinstance(value, Mapping):
        pairs = [str(key).encode() + b"=" + bytes_of(each) for key, each in value.items()]
        return b"{" + b",".join(pairs) + b"}"
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(bytes_of, value)) + b"]"
    if isinstance(value, str | bytes | int | float | bool | complex | type(None)):
        return repr(value).encode()
    if hasattr(value, "tobytes"):  # a picture of Pillow
        return value.tobytes()  # type: ignore[no-any-return]  # bytes, by that name
    return b""
