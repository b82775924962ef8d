"""Find out, before a run, whether reading a sample again gives the same: what a resume relies on.

A few samples are read in a forked process, so that what reading changes in the data set is not changed here: twice,
after other samples, as another loader process, and where strings hash differently. The generators of Python, NumPy,
torch and albumentations are seeded for each sample, so what they draw is no difference.
"""

from __future__ import annotations

import builtins
import hashlib
import io
import json
import multiprocessing
import os
import random
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from paceline.data.batch import tensors_in
from paceline.data.objects.keyed import KeyedReader
from paceline.data.objects.parts import parts_of

_WAIT_SECONDS = 60.0
# Larger columns are compared by 64 of their samples.
_MOST_BYTES = 2**28
# Reading again stops after this time; every sample is read once, so that the digest does not depend on the time.
_BUDGET_SECONDS = 4.0
_AFTER_OTHERS = " depends on the samples that were read before it"
_SETS = (set, frozenset)
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
    """

    difference: str = ""
    digest: str = ""
    seconds: float | None = None
    contents: Mapping[str, str] = field(default_factory=dict)


def read_again(reader: KeyedReader) -> Reading:
    """Read the first, middle and last samples several times, in another process, and compare.

    Nothing is learned where processes cannot be forked, or if that process fails: the same error then appears where it
    can be explained.
    """
    if reader.samples.columns is not None:
        columns = [*tensors_in(reader.samples.columns)]
        is_large = sum(each.nbytes for each in columns) > _MOST_BYTES
        return Reading(digest=_digest([each[:: max(1, len(each) // 64) if is_large else 1] for each in columns]))
    if sys.platform != "linux":
        return Reading()
    forward = _in_child(_read, reader)
    if forward is None:
        return Reading()
    reading = Reading(**forward)
    backward = {} if reading.difference or not reading.digest else _in_child(_read_backward, reader)
    for sample, digest in (backward or {}).items():
        if digest != reading.contents.get(sample, digest):
            return replace(reading, difference=_name(reader, int(sample)) + _AFTER_OTHERS + _where(reader), digest="")
    return reading


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
    try:
        found = read(reader)
    except Exception:  # noqa: BLE001  # reported when the run reads the sample
        os._exit(1)
    sender.send_bytes(json.dumps(found).encode())
    os._exit(0)


def _chosen(reader: KeyedReader) -> list[int]:
    count = len(reader.samples)
    return sorted({0, count // 2, count - 1})


def _read_backward(reader: KeyedReader) -> dict[str, Any]:
    """Return the digests of the samples, read in the opposite order in a data set that has read none before."""
    return {str(sample): _digest([reader.read(sample, 0)]) for sample in reversed(_chosen(reader))}


def _read(reader: KeyedReader) -> dict[str, Any]:
    """Compare readings of a few samples, one change of circumstances at a time; the first difference is reported."""
    chosen = _chosen(reader)
    started, first, seconds = time.perf_counter(), dict[int, bytes](), list[float]()
    for sample in chosen:
        begun = time.perf_counter()
        read = reader.read(sample, 0)
        seconds.append(time.perf_counter() - begun)
        if device := next((each.device for each in tensors_in(read) if each.device.type not in ("cpu", "meta")), None):
            return {"difference": f"{_name(reader, sample)} is on {device}, where loader processes cannot read it"}
        first[sample] = bytes_of(read)
        is_early = time.perf_counter() - started < _BUDGET_SECONDS
        if is_early and bytes_of(reader.read(sample, 0)) != first[sample]:
            return {"difference": _name(reader, sample) + _cause(reader), "seconds": min(seconds)}
    middle = sorted(seconds)[len(seconds) // 2]
    changes: list[tuple[str, Callable[[], Any]]] = [
        (_AFTER_OTHERS + _where(reader), lambda: None),
        (" depends on the process that reads it (its number or id)", lambda: _as_other_worker(reader.samples.data)),
        (" depends on hash(), which differs from process to process", _with_other_hash),
        (" depends on the order of a set, which differs from process to process", lambda: _reorder_sets(reader)),
    ]
    for difference, change in changes:
        change()
        for sample in reversed(chosen):
            if bytes_of(reader.read(sample, 0)) != first[sample]:
                return {"difference": _name(reader, sample) + difference, "seconds": middle}
            if time.perf_counter() - started > 2 * _BUDGET_SECONDS:
                break
    whole = all(content for content in first.values())
    contents = {str(sample): hashlib.sha256(content).hexdigest() for sample, content in first.items() if content}
    return {"digest": _joined([*first.values()]) if whole else "", "seconds": middle, "contents": contents}


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
        yield from value.__code__.co_names
        for constant in value.__code__.co_consts:
            if isinstance(constant, types.CodeType):
                yield from constant.co_names


def _as_other_worker(data: Any) -> None:
    info = torch_worker.WorkerInfo(id=1, num_workers=3, seed=1, dataset=data)
    torch_worker._worker_info = info  # noqa: SLF001  # what get_worker_info() returns in a loader process
    number = os.getpid() + 1
    patch("os.getpid", lambda: number).start()


def _with_other_hash() -> None:
    def salted(value: Any) -> int:
        return built_in(("salted", value)) if isinstance(value, str | bytes) else built_in(value)

    built_in = builtins.hash
    builtins.hash = salted


class _OtherOrder(set[Any]):
    """A set of the same members in the opposite order, as another hash seed may give."""

    def __iter__(self) -> Iterator[Any]:
        return iter([*super().__iter__()][::-1])


def _reorder_sets(reader: KeyedReader) -> None:
    patch("builtins.set", _OtherOrder).start()
    for owner in list(parts_of(reader.samples.data)):
        named = vars(owner) if hasattr(owner, "__dict__") and not isinstance(owner, type) else {}
        for name, value in list(named.items()):
            if isinstance(value, _SETS) and any(isinstance(each, str | bytes | tuple) for each in value):
                named[name] = _OtherOrder(value)
        if isinstance(owner, types.FunctionType):
            for name in owner.__code__.co_names:
                if isinstance(value := owner.__globals__.get(name), set | frozenset):
                    owner.__globals__[name] = _OtherOrder(value)


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
