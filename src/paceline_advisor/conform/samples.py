"""Epochs put together from a killed and a resumed run, compared with those of an undisturbed one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline_advisor import frozen
from paceline_advisor.conform.trace import Ids, Trace

# A program that does not report what it used may have read a batch ahead of the one it saves after.
READ_AHEAD = 8
Units = dict[int, Sequence[Ids]]


def ids_of(units: Units) -> list[Any]:
    """Return the ids of all ranks."""
    return [name for each in units.values() for ids in each for name in ids]


@dataclass(frozen=True)
class SampleDifference:
    """An epoch whose samples are not those of an undisturbed one; falsy without one.

    Attributes:
        epoch: Its number, from 0.
        repeated: Uses of a sample after its first, more than in any undisturbed epoch.
        missing: Samples that were never used, more than in any undisturbed epoch.
        twice: The repeated samples.
        never: The samples never used.
    """

    epoch: int = 0
    repeated: int = 0
    missing: int = 0
    twice: tuple[Any, ...] = ()
    never: tuple[Any, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.repeated or self.missing)


@frozen
class ProgramEpochs:
    """The epochs of an undisturbed run.

    Attributes:
        units: By rank, batches or samples in order.
        epochs: Their number.
        universe: All samples.
        is_drawn: Whether the samples are drawn at random.
    """

    units: Units
    epochs: int
    universe: frozenset[Any]
    is_drawn: bool

    @classmethod
    def of(cls, trace: Trace, epochs: int, epoch: str) -> ProgramEpochs:
        """Divide a run into its epochs.

        Raises:
            ValueError: If that is not possible; the message says why.
        """
        if not trace.used and trace.has_workers:
            raise ValueError("loader processes read ahead: report used(ids) to ask this")
        units: Units = dict(trace.units)
        if not units:
            raise ValueError("no sample was read or used through watched(dataset) or used(ids)")
        sizes = {len(each) for each in units.values()}
        if any(size % epochs for size in sizes):
            raise ValueError(
                f"{min(sizes)} {'batches' if trace.used else 'samples'} of a rank are not {epochs} equal epochs"
            )
        whole = {*range(trace.samples)} if trace.samples is not None else set()
        seen = {*ids_of(units)}
        universe = whole if seen <= whole else seen
        return cls(units=units, epochs=epochs, universe=frozenset(universe), is_drawn=epoch == "drawn")

    @property
    def per_epoch(self) -> int:
        """Units of an epoch on rank 0."""
        return len(self.units[0]) // self.epochs

    @property
    def total(self) -> int:
        """Units of the run on rank 0."""
        return len(self.units[0])

    def epoch(self, number: int) -> Units:
        """Return one epoch, by rank."""
        return {rank: _cut(each, number, self.epochs) for rank, each in self.units.items()}

    def joined(self, before: Trace, resumed: Trace, position: int) -> dict[int, Units]:
        """Return the epochs from the one of a checkpoint on, as the weights have seen them.

        The epochs after it are counted from the end of the resumed run, so that whatever came before belongs to it.
        """
        first, offset = divmod(position, self.per_epoch)
        result: dict[int, Units] = {}
        for number in range(first, self.epochs):
            result[number] = {}
            for rank, whole in self.units.items():
                size = len(whole) // self.epochs
                after = resumed.units.get(rank, [])
                begin, end = (max(0, len(after) - (self.epochs - each) * size) for each in (number, number + 1))
                old = before.units.get(rank, [])[first * size : first * size + offset] if number == first else []
                result[number][rank] = [*old, *after[0 if number == first else begin : end]]
        return result

    def compare(self, joined: dict[int, Units]) -> SampleDifference:
        """Return the first epoch whose samples are not those of an undisturbed one."""
        wholes = [Counter(ids_of(self.epoch(number))) for number in range(self.epochs)]
        for number, units in joined.items():
            found, expected = Counter(ids_of(units)), wholes[number]
            if found == expected:
                continue
            if self.is_drawn:
                more, fewer = found - expected, expected - found
                return SampleDifference(number, more.total(), fewer.total(), tuple(more), tuple(fewer))
            most = max(count for whole in wholes for count in whole.values())
            repeated = sum(found.values()) - len(found) - max(whole.total() - len(whole) for whole in wholes)
            lost = [name for name in sorted(self.universe, key=_place) if name not in found]
            missing = len(lost) - max(len(self.universe - whole.keys()) for whole in wholes)
            if repeated > 0 or missing > 0:
                twice = tuple(name for name in sorted(found, key=_place) if found[name] > most)
                return SampleDifference(number, max(0, repeated), max(0, missing), twice, tuple(lost))
        return SampleDifference()

    def best(self, before: Trace, resumed: Trace, positions: Iterable[int]) -> tuple[int, SampleDifference]:
        """Return the position of a checkpoint that explains a resumed run best, the first of equal ones."""
        compared = [(at, self.compare(self.joined(before, resumed, at))) for at in positions]
        return min(compared, key=lambda each: each[1].repeated + each[1].missing)

    def near(self, position: int, kind: str) -> Sequence[int]:
        """Return the positions that a checkpoint seen at ``position`` may have."""
        ahead = 0 if kind == "used" else self.per_epoch // READ_AHEAD
        return range(position, max(-1, position - ahead - 1), -1)


def _cut(units: Sequence[Ids], number: int, epochs: int) -> Sequence[Ids]:
    size = len(units) // epochs
    return units[number * size : (number + 1) * size]


def _place(name: Any) -> tuple[str, Any]:
    """Sort numbers as numbers, and before texts."""
    return type(name).__name__, name
