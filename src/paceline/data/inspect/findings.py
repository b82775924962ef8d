"""What is wrong or odd about the images, from what was gathered about them?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paceline.data.image.source import Ids
from paceline.data.inspect.duplicates import first_of, look_alikes
from paceline.data.inspect.figures import class_counts
from paceline.data.inspect.gather import MOST_NAMED, Gathered, Progress, similar
from paceline.data.inspect.kinds import BROKEN, FEW, IMBALANCED, KINDS, OF_SAMPLES, Kind
from paceline.data.inspect.subject import Sentences, Subject

_LOOKS_THE_SAME = 0.95


@dataclass(frozen=True)
class Entry:
    """One sample, file, class or sentence that a finding is about.

    Attributes:
        name: A path, a class name or a sentence.
        split: Of a sample, the split it is in.
        detail: What more there is to say.
        other: Of a copy, what it is a copy of.
    """

    name: str
    split: str | None = None
    detail: str = ""
    other: str | None = None


@dataclass(frozen=True)
class Finding:
    """Something that was found.

    Attributes:
        kind: What.
        count: How often.
        entries: Where, the first ten thousand.
    """

    kind: Kind
    count: int
    entries: tuple[Entry, ...]


def find_all(subject: Subject, gathered: Gathered, *, workers: int, progress: Progress) -> tuple[Finding, ...]:
    """Everything there is to report, the worst first."""
    found = [
        *_of_folder(subject),
        *_of_samples(gathered),
        *_of_copies(gathered, workers=workers, progress=progress),
        *_of_classes(subject),
    ]
    order = list(KINDS)
    ranks = {"breaks": 0, "spoils": 1, "costs": 2, "notice": 3}
    return tuple(sorted(found, key=lambda each: (ranks[each.kind.severity], order.index(each.kind.name))))


def _of_folder(subject: Subject) -> Iterator[Finding]:
    for name, told in (("layout", subject.layout), ("unread", subject.unread)):
        if told.count:
            yield _told(name, told)


def _told(name: str, told: Sentences) -> Finding:
    return Finding(KINDS[name], told.count, tuple(map(Entry, sorted(told.first))))


def _of_samples(gathered: Gathered) -> Iterator[Finding]:
    for kind in OF_SAMPLES:
        positions = gathered.has(kind.name)
        if kind.name == "grey_among_colour" and len(positions) == len(whole(gathered)):
            continue
        if len(positions):
            said = gathered.said.get(kind.name, {})
            entries = (
                _entry(gathered, position, said.get(position, "")) for position in positions[:MOST_NAMED].tolist()
            )
            yield Finding(kind, len(positions), tuple(entries))


def whole(gathered: Gathered) -> Ids:
    """Positions of the samples that can be read."""
    return np.flatnonzero((gathered.rows["traits"] & BROKEN) == 0)


def _entry(gathered: Gathered, position: int, detail: str = "", other: int | None = None) -> Entry:
    samples = gathered.samples
    number = int(gathered.numbers[position])
    return Entry(
        name=samples.path(number),
        split=samples.names[samples.split_of[number]],
        detail=detail,
        other=None if other is None else samples.path(int(gathered.numbers[other])),
    )


def _of_copies(gathered: Gathered, *, workers: int, progress: Progress) -> Iterator[Finding]:
    present = np.zeros(len(gathered.numbers), dtype=bool)
    present[whole(gathered)] = True
    first = first_of(gathered.rows["content"], present)
    split_of = gathered.samples.split_of[gathered.numbers]
    labels = gathered.samples.labels[gathered.numbers]
    copies = np.flatnonzero(first != np.arange(len(first)))
    elsewhere = split_of[copies] != split_of[first[copies]]
    contradicting = labels[copies] != labels[first[copies]]
    for name, which in (
        ("leak", elsewhere),
        ("contradiction", contradicting),
        ("duplicate", ~elsewhere & ~contradicting),
    ):
        yield from _pairs(gathered, name, np.stack([copies[which], first[copies[which]]], axis=1))
    pairs = look_alikes(gathered.rows["hash"], split_of, first)
    alike = similar(gathered, pairs, workers=workers, progress=progress)
    yield from _pairs(gathered, "near_leak", pairs[alike >= _LOOKS_THE_SAME])


def _pairs(gathered: Gathered, name: str, pairs: Ids) -> Iterator[Finding]:
    if len(pairs):
        named = pairs[:MOST_NAMED].tolist()
        yield Finding(KINDS[name], len(pairs), tuple(_entry(gathered, one, other=two) for one, two in named))


def _of_classes(subject: Subject) -> Iterator[Finding]:
    classes = subject.dataset.classes
    counts = class_counts(subject)
    train, held_out = counts["train"], counts["validation"]
    if len(train) and train.max() > IMBALANCED * max(int(train.min()), 1):
        extremes = [int(train.argmax()), int(train.argmin())]
        yield _classes("imbalance", [Entry(classes[each], detail=_images(train[each])) for each in extremes])
    few = [Entry(classes[each], detail=_images(train[each])) for each in np.flatnonzero(train < FEW)]
    yield from [_classes("small_class", few)] if few else []
    lacking = [Entry(classes[each]) for each in np.flatnonzero(held_out == 0)] if held_out.sum() else []
    yield from [_classes("no_held_out", lacking)] if lacking else []
    alike = defaultdict(list)
    for name in classes:
        alike["".join(name.casefold().split())].append(name)
    same = [Entry(names[1], other=names[0]) for names in alike.values() if len(names) > 1]
    yield from [_classes("alike_names", same)] if same else []


def _images(count: int) -> str:
    return f"{count:,} image{'' if count == 1 else 's'}"


def _classes(name: str, entries: list[Entry]) -> Finding:
    return Finding(KINDS[name], len(entries), tuple(entries))
