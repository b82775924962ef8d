"""Compare a stretch that was computed again with what the run recorded: state, ledger, losses and scores."""

from __future__ import annotations

import heapq
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import field
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.checkpoint.format import encode
from paceline.checkpoint.manifest import read_components, read_manifest
from paceline.records.ledger import LedgerEntry, LedgerStream, ledger_files
from paceline.records.reader import read_events, strip_timings
from paceline.records.run_directory import RunDirectory
from paceline.reports.audit import used_samples
from paceline_advisor import Json, frozen

_FIRST = ("model", "ema", "optimizer")
# What depends on the clock, or counts launches.
_LEFT_OUT = {"clock": None, "progress": ("resumes", "earlier_seconds")}
_OF_TENSORS_ONLY = ("progress", "window", "clock")
# Values of records that are compared where bits may differ, the loss within the tolerance; a count of right answers may
# change by one.
_TOLERATED = ("samples", "epoch", "lr", "loss")
# Values of a step record that are not means over the steps since the one before.
_OF_ONE_STEP = {"epoch", "samples", "lr", "grad_norm"}
_NAMED = 4
# What the norm of a tensor may differ by where bits may: ten times as much as between two computations of the stretch
# here, one of them with narrower vectors, but at least and at most this. See benchmarks/tolerance.py.
_MARGIN, _LEAST_TOLERATED, _MOST_TOLERATED = 10, 1e-5, 0.1
# A choice, for devices whose rounding cannot be changed from outside.
_TOLERANCE_A_STEP = 1e-3
_SCORES = ("weights_sha256", "ema_sha256", "metrics", "samples", "epoch", "ledger")


@frozen
class FirstDifference:
    """Where a run differs from what was computed again.

    Attributes:
        begin: First step of the stretch, excluded; None for the whole run.
        end: Its last step.
        step: The first step that differs; None for the whole run.
        component: ``model``, ``optimizer``, ``ledger``, ``records``, …
        tensor: Name of the tensor or of the value.
        index: Index of the tensor's first number that differs.
        ulps: How far the two numbers are apart, in units in the last place.
        cause: What was found, in a sentence.
    """

    begin: int | None
    end: int | None
    step: int | None
    component: str
    tensor: str | None = None
    index: tuple[int, ...] | None = None
    ulps: int | None = None
    cause: str

    def to_json(self) -> Json:
        """Return it as one JSON object."""
        index = None if self.index is None else list(self.index)
        return {
            "from": self.begin,
            "to": self.end,
            "step": self.step,
            "component": self.component,
            "tensor": self.tensor,
            "index": index,
            "ulps": self.ulps,
            "cause": self.cause,
        }


@frozen
class Tolerance:
    """How far tensors may differ where bits may: relative differences, in the 2-norm.

    Attributes:
        largest: The largest of all, which holds for records and for tensors that were not measured.
        tensors: That of each measured tensor, by component and name.
    """

    largest: float
    tensors: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def chosen(cls, steps: int) -> Tolerance:
        """Return one that grows with the steps, where nothing can be measured."""
        return cls(largest=min(_MOST_TOLERATED, _TOLERANCE_A_STEP * steps))

    @classmethod
    def measured(cls, again: Path, narrow: Path) -> Tolerance:
        """Return that of a stretch, from its end after two computations that round differently."""
        found = dict[str, float]()
        for component in read_manifest(again).components.keys() - _OF_TENSORS_ONLY:
            states = (read_components(path, (component,))[component] for path in (again, narrow))
            tensors, others = (encode(each, where=component)[1] for each in states)
            for name, tensor in tensors.items():
                other = others.get(name)
                if isinstance(tensor, torch.Tensor) and isinstance(other, torch.Tensor) and tensor.is_floating_point():
                    differs = _MARGIN * _relative(tensor, other)
                    found[f"{component} {name}"] = min(_MOST_TOLERATED, max(_LEAST_TOLERATED, differs))
        return cls(largest=max(found.values(), default=_LEAST_TOLERATED), tensors=found)

    @property
    def least(self) -> float:
        """The smallest of all."""
        return min(self.tensors.values(), default=self.largest)

    def of(self, component: str, name: str) -> float:
        """Return that of a tensor."""
        return self.tensors.get(f"{component} {name}", self.largest)


@frozen
class FoundDifference:
    """A value of the state that differs; fields as of :class:`FirstDifference`."""

    component: str
    tensor: str
    index: tuple[int, ...] | None = None
    ulps: int | None = None
    cause: str


def compare_states(recorded: Path, again: Path, tolerance: Tolerance | None) -> Iterator[FoundDifference]:
    """Yield what differs between two checkpoints, component by component.

    Args:
        recorded: The run's checkpoint.
        again: The checkpoint computed again.
        tolerance: How far tensors may differ; None for equal bits.
    """
    mine, theirs = read_manifest(recorded).components, read_manifest(again).components
    others = sorted((mine.keys() | theirs.keys()).difference(_FIRST))
    for name in (*(each for each in _FIRST if each in mine.keys() | theirs.keys()), *others):
        if name in mine.keys() ^ theirs.keys():
            where = "only the run has it" if name in mine else "the run lacks it"
            yield FoundDifference(component=name, tensor="", cause=f"{name}: {where}")
        elif (skipped := _LEFT_OUT.get(name, ())) is not None and (tolerance is None or name not in _OF_TENSORS_ONLY):
            states = [read_components(path, (name,))[name] for path in (recorded, again)]
            old, new = ({key: each for key, each in state.items() if key not in skipped} for state in states)
            yield from _compare_state(name, old, new, tolerance)


def first_state_difference(recorded: Path, again: Path) -> FoundDifference | None:
    """Return the first difference of weights, average and optimizer; settings of the optimizer are the recipe's."""
    found = compare_states(recorded, again, None)
    return next(
        (each for each in found if each.component not in _OF_TENSORS_ONLY and "param_groups" not in each.tensor), None
    )


def _compare_state(component: str, old: Json, new: Json, tolerance: Tolerance | None) -> Iterator[FoundDifference]:
    (structure, tensors), (other, others) = (encode(each, where=component) for each in (old, new))
    for name, tensor in tensors.items():
        if isinstance(found := others.get(name), torch.Tensor) and isinstance(tensor, torch.Tensor):
            yield from _compare_tensor(component, name, tensor, found, tolerance)
    path = _first_unequal(structure, other)
    if path is not None and tolerance is None:
        name, was, now = path
        yield FoundDifference(
            component=component, tensor=name, cause=f"{component} {name} is {was}, and {now} computed again"
        )


def _compare_tensor(
    component: str, name: str, old: torch.Tensor, new: torch.Tensor, tolerance: Tolerance | None
) -> Iterator[FoundDifference]:
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        kinds = [f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in (old, new)]
        cause = f"{component} {name} is {kinds[0]}, and {kinds[1]} computed again"
        yield FoundDifference(component=component, tensor=name, cause=cause)
        return
    rows = [each.contiguous().reshape(-1).view(torch.uint8).reshape(each.numel(), -1) for each in (old, new)]
    unequal = (rows[0] != rows[1]).any(dim=1) if old.numel() else torch.zeros(0, dtype=torch.bool)
    if not unequal.any():
        return
    relative = _relative(old, new)
    if tolerance is not None and old.dtype.is_floating_point and relative <= tolerance.of(component, name):
        return
    count, at = int(unequal.sum()), int(unequal.nonzero()[0])
    index = tuple(int(each) for each in np.unravel_index(at, old.shape))
    was, now = (each.reshape(-1)[at].item() for each in (old, new))
    ulps = _ulps(old.reshape(-1)[at], new.reshape(-1)[at])
    cause = f"{component} {name}{list(index)} is {was!r}, and {now!r} computed again"
    cause += f"; {count} of {old.numel()} numbers differ, by {relative:.1e} of the tensor's norm"
    yield FoundDifference(component=component, tensor=name, index=index, ulps=ulps, cause=cause)


def _relative(old: torch.Tensor, new: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the tensor computed again."""
    if old.dtype.is_complex:
        old, new = torch.view_as_real(old), torch.view_as_real(new)
    first, second = old.double(), new.double()
    return float((first - second).norm() / second.norm().clamp_min(1e-30))


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _ulps(old: torch.Tensor, new: torch.Tensor) -> int | None:
    """Return the number of representable values between two numbers; None for complex ones."""
    if old.dtype.is_complex:
        return None
    if not old.dtype.is_floating_point:
        return abs(int(old) - int(new))
    width = old.element_size()

    def rank(value: torch.Tensor) -> int:
        bits = int(value.reshape(1).view(_BITS[width]))
        return bits if bits >= 0 else -(bits + (1 << (8 * width - 1)))

    return abs(rank(old) - rank(new))


def _first_unequal(old: Any, new: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Return the path of the first plain value that differs, with both values."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        pairs = [(f"{path}.{key}".strip("."), old.get(key), new.get(key)) for key in {**old, **new}]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = [(f"{path}.{i}".strip("."), *each) for i, each in enumerate(zip(old, new, strict=True))]
    else:
        same = type(old) is type(new) and (old == new or (isinstance(old, float) and _bits(old) == _bits(new)))
        return None if same else (path, old, new)
    return next((found for name, was, now in pairs if (found := _first_unequal(was, now, name))), None)


def _bits(value: float) -> bytes:
    return struct.pack("<d", value)


@frozen
class RecordFound:
    """A record that differs: its step, position and kind, the value's name, and a sentence."""

    step: int
    position: int
    kind: str
    name: str
    cause: str


def compare_records(
    run: RunDirectory, again: RunDirectory, begin: int, end: int, tolerance: Tolerance | None, *, shared: bool = False
) -> RecordFound | None:
    """Return the first step record or evaluation after position ``begin``, up to ``end``, that differs.

    With ``shared``, only what both have is compared, and means over steps only where these are the same steps.
    """
    old, new = (_records(each, begin, end) for each in (run, again))
    for key in sorted(old.keys() & new.keys() if shared else old.keys() | new.keys()):
        position, _, kind, weights = key
        was, now = old.get(key), new.get(key)
        if shared and was and now:
            names = was.keys() & now.keys()
            if kind == "step" and _steps_before(old, position) != _steps_before(new, position):
                names &= _OF_ONE_STEP
            was, now = (
                {name: each[name] for name in each if name in names} | {"step": each["step"]} for each in (was, now)
            )
        what = f"the {'step record' if kind == 'step' else f'evaluation of {weights}'}"
        if was is None or now is None:
            gone = f"{what} of step {position} is {'missing' if was is None else 'not one of the run'}"
            return RecordFound(step=position, position=position, kind=kind, name=kind, cause=gone)
        for name in {**was, **now} if tolerance is None else _TOLERATED:
            if not _is_close(was.get(name), now.get(name), tolerance if name == "loss" else None):
                step = int(now["step"])
                where = "in the other run" if shared else "was computed again"
                cause = f"{what} of step {step} says {name}={was.get(name)}, and {now.get(name)} {where}"
                return RecordFound(step=step, position=position, kind=kind, name=name, cause=cause)
    return None


def shared_positions(first: RunDirectory, second: RunDirectory, end: int) -> list[int]:
    """Return the positions up to ``end`` of which both runs have a step record."""
    old, new = (_records(each, 0, end) for each in (first, second))
    return sorted(each[0] for each in old.keys() & new.keys() if each[2] == "step")


def _steps_before(records: Mapping[tuple[int, int, str, str], Json], position: int) -> int | None:
    return max((each[0] for each in records if each[2] == "step" and each[0] < position), default=None)


def _records(run: RunDirectory, begin: int, end: int) -> dict[tuple[int, int, str, str], Json]:
    """Return facts of the step and evaluation records after a position up to another, in their order."""
    found = {}
    for each in read_events(run.events, kinds=("step", "evaluation")) if run.events.exists() else ():
        position = each.get("position", each["step"])
        if begin < position <= end:
            weights = f"{each.get('split', '')} {each.get('weights', '')}".strip()
            key = (position, each["event"] != "step", each["event"], weights)
            found[key] = strip_timings(each)
    return found


def _is_close(old: Any, new: Any, tolerance: Tolerance | None) -> bool:
    if tolerance is None or type(old) not in (int, float) or type(new) not in (int, float):
        return bool(old == new)
    return bool(abs(old - new) <= tolerance.largest * max(abs(old), abs(new), 1.0))


def compare_ledgers(run: RunDirectory, again: RunDirectory, begin: int, end: int) -> tuple[int, str] | None:
    """Return the first step after position ``begin``, up to ``end``, that used other samples, and a sentence."""
    old, new = (_entries(each, begin, end) for each in (run, again))
    for step in sorted(old.keys() | new.keys()):
        if sorted(old[step]) != sorted(new[step]):
            what = "holds other samples than those computed again" if old[step] else "lacks the samples"
            return step, f"the ledger {what} for step {step}"
    return None


def _entries(run: RunDirectory, begin: int, end: int) -> dict[int, list[tuple[Any, ...]]]:
    found: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for each in LedgerStream(run.ledger).take():
        if begin < each.step <= end:
            if isinstance(each, LedgerEntry):
                found[each.step].append((each.epoch, -1, each.ids.tobytes(), each.broken.tobytes()))
            else:
                found[each.step].append((each.epoch, each.first, each.samples.to_bytes(8, "little"), each.digest))
    return found


def compare_samples(first: RunDirectory, second: RunDirectory, begin: int) -> tuple[int, str] | None:
    """Return the first step after ``begin`` that used other samples, whichever process used them, and a sentence.

    Raises:
        RunDirectoryError: If a ledger is damaged.
    """
    for (step, ids), (_, others) in zip(*(_samples(each, begin) for each in (first, second)), strict=False):
        if ids != others:
            only = [sorted(set(one) - set(other))[:_NAMED] for one, other in ((ids, others), (others, ids))]
            return step, f"step {step} used samples {only[0]} only in the first run, and {only[1]} only in the second"
    return None


def _samples(run: RunDirectory, begin: int) -> Iterator[tuple[int, list[int]]]:
    """Yield each step after one, with the ids of its samples."""
    ranks = (used_samples(run.root, rank) for rank in range(len(ledger_files(run.ledger))))
    for step, entries in groupby(heapq.merge(*ranks, key=attrgetter("step")), key=attrgetter("step")):
        if step > begin:
            yield step, sorted(sample for each in entries for sample in each.ids.tolist())


def compare_outcomes(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first value of ``summary.json`` that differs, by name, and a sentence."""
    for key in _SCORES:
        if found := _first_unequal(old.get(key), new.get(key), key):
            name, was, now = found
            return name, f"summary.json says {name}={was}, and {now} was computed again"
    return None
