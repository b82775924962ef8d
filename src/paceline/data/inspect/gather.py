"""Look at the samples of all splits, on all cores, and keep what is known about them in a few numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.data.image.source import BrokenImageError, Ids, Image
from paceline.data.inspect.kinds import BIT
from paceline.data.inspect.look import ROW, Defect, Rows, Viewer, grey_parts, look
from paceline.data.inspect.readers import Died, Note, in_parallel
from paceline.data.inspect.subject import Samples

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""

MOST_NAMED = 10_000
_PARTS = 32


@dataclass(frozen=True)
class Gathered:
    """What was found out about the samples that were looked at.

    Attributes:
        samples: All samples.
        numbers: Those that were looked at, ascending.
        rows: What is known of each of these.
        said: By kind, (position in ``numbers``, what more there is to say) of the first ten thousand.
    """

    samples: Samples
    numbers: Ids
    rows: Rows
    said: dict[str, dict[int, str]] = field(default_factory=dict)

    def has(self, kind: str) -> Ids:
        """Positions of the samples that are of a kind."""
        return np.flatnonzero(self.rows["traits"] & BIT[kind])

    def add(self, position: int, defects: Sequence[Defect]) -> None:
        """Note what a sample is."""
        for kind, detail in defects:
            self.rows["traits"][position] |= BIT[kind]
            named = self.said.setdefault(kind, {})
            if detail and len(named) < MOST_NAMED:
                named[position] = detail


def spread(count: int, limit: int | None) -> Ids:
    """At most ``limit`` of ``count`` numbers, evenly spread."""
    if limit is None or limit >= count:
        return np.arange(count, dtype=np.int64)
    return (np.arange(limit, dtype=np.int64) * count + count // 2) // limit


def gather(
    samples: Samples, viewers: Sequence[Viewer], *, limit: int | None, workers: int, progress: Progress
) -> Gathered:
    """Look at every sample, or at ``limit`` of them, with each split's viewer."""
    numbers = spread(len(samples), limit)
    found = Gathered(samples, numbers, np.zeros(len(numbers), dtype=ROW))

    warm: list[int] = []

    def work(piece: range, note: Note) -> tuple[Rows, list[tuple[int, list[Defect]]]]:
        rows = np.zeros(len(piece), dtype=ROW)
        defects = []
        for place, position in enumerate(piece):
            note(position)
            source, sample = samples.find(int(numbers[position]))
            viewer = viewers[samples.split_of[numbers[position]]]
            if not warm:  # a process's first image pays for loading the decoder, too
                warm.append(position)
                look(source, sample, viewer, rows[place].copy())
            if said := look(source, sample, viewer, rows[place]):
                defects.append((position, said))
        return rows, defects

    done = 0
    for result in in_parallel(work, len(numbers), workers=workers):
        if isinstance(result, Died):
            found.add(result.item, [("reader_died", _ending(result.exit_code))])
            done += 1
        else:
            rows, defects = result.result
            found.rows[result.piece.start : result.piece.stop] = rows
            for position, said in defects:
                found.add(position, said)
            done += len(result.piece)
        progress("looking at images", done, len(numbers))
    return found


def similar(
    gathered: Gathered, pairs: Ids, *, workers: int, progress: Progress
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """How similar the two images of each pair of positions are: correlation of 32x32 grey parts, float32 [pairs]."""
    result = np.zeros(len(pairs), dtype=np.float32)

    def work(piece: range, note: Note) -> list[float]:
        values = []
        for number in piece:
            note(number)
            values.append(_correlation(*(_parts(gathered, int(position)) for position in pairs[number])))
        return values

    done = 0
    for each in in_parallel(work, len(pairs), workers=workers):
        if not isinstance(each, Died):
            result[each.piece.start : each.piece.stop] = each.result
            done += len(each.piece)
        progress("comparing images that look the same", done, len(pairs))
    return result


def _parts(gathered: Gathered, position: int) -> Image | None:
    source, sample = gathered.samples.find(int(gathered.numbers[position]))
    try:
        return grey_parts(source.read(sample), _PARTS, _PARTS)
    except BrokenImageError:  # it was whole when it was looked at
        return None


def _correlation(one: Image | None, other: Image | None) -> float:
    if one is None or other is None:
        return 0.0
    return float(np.corrcoef(one.reshape(-1), other.reshape(-1))[0, 1])


def _ending(exit_code: int) -> str:
    if exit_code == -9:
        return "killed, as the system does when memory is short"
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
