"""Findings and statistics of an image set: duplicates, leaks, classes, sizes, brightness, decoding cost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.source import Ids
from paceline.data.labels import listed_names, similar_names
from paceline.parsing.plain_text import quoted
from paceline_data.inspect.gather import MAX_NAMED, CheckedData, Progress, SampleFacts, same_pictures
from paceline_data.inspect.look import BROKEN, FEW, IMBALANCED, KINDS, OF_SAMPLES, SEVERITIES, Kind

Hashes = NDArray[np.uint64]

# Two hashes that differ in at most 5 of 64 bits agree in at least one of 6 bands of bits.
MOST_BITS = 5
_BANDS = ((0, 11), (11, 11), (22, 11), (33, 11), (44, 10), (54, 10))
_MOST_IN_BAND = 4096  # maximum images per band value; a set with more is full of similar images
_MOST_MATCHES = 8  # of a sample, that are compared with it
_AT_ONCE = 1 << 20  # pairs in memory
_SET_BITS = np.array([number.bit_count() for number in range(1 << 16)], dtype=np.uint8)


def first_of(content: Hashes, present: NDArray[np.bool_], late: NDArray[np.bool_] | None = None) -> Ids:
    """Return for each sample the first one with the same content, possibly itself; int64 [N].

    Args:
        content: 128-bit digests as pairs of words, [N, 2].
        present: Mask of the samples that have a digest.
        late: Mask of the samples that come after all others.
    """
    first = np.arange(len(content), dtype=np.int64)
    numbers = np.flatnonzero(present)
    if len(numbers) == 0:
        return first
    rank = numbers if late is None else numbers + len(content) * late[numbers]
    order = numbers[np.lexsort((rank, content[numbers, 1], content[numbers, 0]))]
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (content[order[1:]] != content[order[:-1]]).any(axis=1)
    first[order] = order[np.flatnonzero(begins)[np.cumsum(begins) - 1]]
    return first


def near_duplicates(hashes: Hashes, split_of: Ids, first: Ids) -> Ids:
    """Return pairs of a sample and one of the most similar ones in earlier splits, nearest first, int64 [pairs, 2].

    A background that many images share makes their hashes equal, so that a sample's copy is not always the first.
    Identical files and samples with hash 0 are left out.
    """
    found = np.empty((0, 3), dtype=np.int64)
    seen = np.flatnonzero(hashes)
    for split in np.unique(split_of[seen])[1:]:
        queries, candidates = seen[split_of[seen] == split], seen[split_of[seen] < split]
        for first_ids, second_ids in _candidates(hashes, queries, candidates):
            bits = _unequal_bits(hashes[first_ids], hashes[second_ids])
            close = (first[first_ids] != first[second_ids]) & (bits <= MOST_BITS)
            if close.any():
                found = _nearest(found, np.stack([first_ids[close], bits[close], second_ids[close]], axis=1))
    return found[:, [0, 2]]


def _candidates(hashes: Hashes, queries: Ids, known_ids: Ids) -> Iterator[tuple[Ids, Ids]]:
    """Yield pairs that agree in a band, some million at a time."""
    for shift, width in _BANDS:
        band = (hashes >> np.uint64(shift)) & np.uint64((1 << width) - 1)
        order = known_ids[np.argsort(band[known_ids], kind="stable")]
        begins = np.searchsorted(band[order], band[queries], side="left")
        counts = np.minimum(np.searchsorted(band[order], band[queries], side="right") - begins, _MOST_IN_BAND)
        totals = np.cumsum(counts)
        start = 0
        while start < len(queries):
            before = totals[start - 1] if start else 0
            stop = max(int(np.searchsorted(totals, before + _AT_ONCE, side="right")), start + 1)
            part = counts[start:stop]
            within = np.arange(part.sum()) - np.repeat(np.cumsum(part) - part, part)
            yield np.repeat(queries[start:stop], part), order[np.repeat(begins[start:stop], part) + within]
            start = stop


def _unequal_bits(one: Hashes, two: Hashes) -> Ids:
    return np.asarray(_SET_BITS[(one ^ two).view(np.uint16).reshape(-1, 4)].sum(axis=1, dtype=np.int64))


def _nearest(found: Ids, more: Ids) -> Ids:
    """Return the rows (sample, bits, other) of both, a sample's nearest few, sorted."""
    rows = np.unique(np.concatenate([found, more]), axis=0)
    begins = np.flatnonzero(np.diff(rows[:, 0], prepend=-1))
    place = np.arange(len(rows)) - np.repeat(begins, np.diff(begins, append=len(rows)))
    return rows[place < _MOST_MATCHES]


# Bin edges of the histogram of CPU time per decoded image, in milliseconds.
_HISTOGRAM_EDGES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_SLOWEST = 5


def class_counts(subject: CheckedData) -> dict[str, NDArray[np.int64]]:
    """Count the samples of each class or label, by split; empty for numeric targets."""
    count = 0 if subject.learned == "numbers" else len(subject.dataset.classes)
    labels = {name: source.labels for name, source in subject.splits.items()}
    if subject.learned == "classes":
        return {name: np.bincount(each, minlength=count) for name, each in labels.items()}
    return {name: (each[:, :count] == 1).sum(axis=0) for name, each in labels.items()}


def class_figures(subject: CheckedData) -> dict[str, Any]:
    """Return the sample counts per class and their imbalance."""
    counts = class_counts(subject)
    train = counts["train"]
    smallest, largest = (int(train.min()), int(train.max())) if len(train) else (0, 0)
    return {
        "count": len(subject.dataset.classes),
        "smallest_train": smallest,
        "largest_train": largest,
        "imbalance": largest / smallest if smallest else None,
        "samples": {
            name: {split: int(each[index]) for split, each in counts.items()}
            for index, name in enumerate(subject.dataset.classes[: len(train)])
        },
    }


def size_figures(gathered: SampleFacts, read: Ids) -> dict[str, Any]:
    """Return heights, widths, pixels and bytes of the readable images."""
    rows = gathered.rows[read]
    pixels = rows["height"].astype(np.int64) * rows["width"]
    measured = {"height": rows["height"], "width": rows["width"], "pixels": pixels, "file_bytes": rows["file_bytes"]}
    return {name: _quantiles(values) for name, values in measured.items()} if len(rows) else {}


def cost_figures(gathered: SampleFacts, read: Ids) -> dict[str, Any]:
    """Return the decoding cost: CPU time per image, its histogram, the slowest files, and images/s on one core."""
    milliseconds = 1000.0 * gathered.rows["seconds"][read].astype(np.float64)
    if len(read) == 0:
        return {}
    counts = np.histogram(milliseconds, bins=[0.0, *_HISTOGRAM_EDGES, np.inf])[0]
    slowest = read[np.argsort(-milliseconds, kind="stable")[:_SLOWEST]]
    return {
        "cpu_ms_per_image": _quantiles(milliseconds),
        "images_per_second_per_core": 1000.0 / float(milliseconds.mean()),
        "histogram": [
            {"from_ms": low, "to_ms": high, "images": int(count)}
            for low, high, count in zip((0.0, *_HISTOGRAM_EDGES), (*_HISTOGRAM_EDGES, None), counts, strict=True)
        ],
        "slowest": [
            {
                "path": gathered.samples.path(int(gathered.numbers[position])),
                "cpu_ms": 1000.0 * float(gathered.rows[position]["seconds"]),
                **{key: int(gathered.rows[position][key]) for key in ("width", "height", "file_bytes")},
            }
            for position in slowest.tolist()
        ],
    }


def pixel_figures(subject: CheckedData, gathered: SampleFacts, read: Ids) -> dict[str, Any]:
    """Return mean and standard deviation per channel, in [0, 1], of the training images, and those that a run uses."""
    in_train = gathered.samples.part_numbers[gathered.numbers[read]] == 0
    rows = gathered.rows[read[in_train]]
    if len(rows) == 0:
        return {}
    channels = subject.dataset.channels
    mean = rows["mean"].astype(np.float64).mean(axis=0)[:channels]
    square = rows["square"].astype(np.float64).mean(axis=0)[:channels]
    return {
        "mean": mean.tolist(),
        "std": np.sqrt(np.maximum(square - mean**2, 0.0)).tolist(),
        "run_mean": list(subject.dataset.mean),
        "run_std": list(subject.dataset.std),
    }


def _quantiles(values: NDArray[Any]) -> dict[str, float]:
    low, middle, high = np.quantile(values, (0.05, 0.5, 0.95))
    return {
        "minimum": float(values.min()),
        "p5": float(low),
        "median": float(middle),
        "p95": float(high),
        "maximum": float(values.max()),
        "mean": float(values.mean(dtype=np.float64)),
    }


@dataclass(frozen=True)
class FindingEntry:
    """A sample, file, class or sentence that a finding refers to.

    Attributes:
        name: A path, a class name or a sentence.
        split: Split of a sample.
        detail: Further details.
        other: Original of a duplicate.
    """

    name: str
    split: str | None = None
    detail: str = ""
    other: str | None = None


@dataclass(frozen=True)
class DataFinding:
    """A finding.

    Attributes:
        kind: Kind of finding.
        count: Number of occurrences.
        entries: The first ten thousand occurrences.
    """

    kind: Kind
    count: int
    entries: tuple[FindingEntry, ...]


def find_all(
    subject: CheckedData, gathered: SampleFacts, *, workers: int, progress: Progress
) -> tuple[DataFinding, ...]:
    """Return all findings, worst first."""
    found = [
        *_of_folder(subject),
        *_of_samples(gathered),
        *_of_copies(gathered, workers=workers, progress=progress),
        *_unlabelled(subject, gathered, workers=workers, progress=progress),
        *_of_classes(subject),
    ]
    worst, order = list(SEVERITIES), list(KINDS)
    return tuple(sorted(found, key=lambda each: (worst.index(each.kind.severity), order.index(each.kind.name))))


def _of_folder(subject: CheckedData) -> Iterator[DataFinding]:
    messages = {"layout": list(subject.problems.sentences()), "unread": list(subject.unread)}
    messages["implausible"] = list(subject.implausible)
    for kind, path, _ in subject.problems.bad:
        messages.setdefault(kind.removesuffix("s"), []).append(path)
    for name, entries in messages.items():
        if entries:
            yield DataFinding(KINDS[name], len(entries), tuple(map(FindingEntry, sorted(entries)[:MAX_NAMED])))


def _of_samples(gathered: SampleFacts) -> Iterator[DataFinding]:
    for kind in OF_SAMPLES:
        positions = gathered.has(kind.name)
        if kind.name == "grey_among_colour" and len(positions) == len(whole(gathered)):
            continue
        if len(positions):
            details = gathered.details.get(kind.name, {})
            entries = (
                _entry(gathered, position, details.get(position, "")) for position in positions[:MAX_NAMED].tolist()
            )
            yield DataFinding(kind, len(positions), tuple(entries))


def whole(gathered: SampleFacts) -> Ids:
    """Return the indices of the readable samples."""
    return np.flatnonzero((gathered.rows["traits"] & BROKEN) == 0)


def _entry(gathered: SampleFacts, position: int, detail: str = "", other: int | None = None) -> FindingEntry:
    samples = gathered.samples
    number = int(gathered.numbers[position])
    path, other_path = samples.path(number), None if other is None else samples.path(int(gathered.numbers[other]))
    if other_path is not None and (file := _file(path)) and file == _file(other_path):
        detail = "one file, by a link"
    return FindingEntry(name=path, split=samples.find(number)[0], detail=detail, other=other_path)


def _file(path: str) -> tuple[int, int] | None:
    """Return what a path leads to, device and inode; None if it is not that of a file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _links(gathered: SampleFacts, positions: Ids) -> NDArray[np.bool_]:
    """Return a mask of the samples whose file another of these samples reaches through fewer links."""
    paths = {position: gathered.samples.path(int(gathered.numbers[position])) for position in positions.tolist()}
    names: dict[tuple[int, int], list[int]] = {}
    for position, path in paths.items():
        if file := _file(path):
            names.setdefault(file, []).append(position)

    def links(position: int) -> int:
        path = Path(paths[position])
        return sum(each.is_symlink() for each in (path, *path.parents))

    is_link = np.zeros(len(gathered.numbers), dtype=bool)
    is_link[[later for each in names.values() if len(each) > 1 for later in sorted(each, key=links)[1:]]] = True
    return is_link


def _of_copies(gathered: SampleFacts, *, workers: int, progress: Progress) -> Iterator[DataFinding]:
    present = np.zeros(len(gathered.numbers), dtype=bool)
    present[whole(gathered)] = True
    first = first_of(gathered.rows["content"], present)
    if len(copies := np.flatnonzero(first != np.arange(len(first)))):
        first = first_of(gathered.rows["content"], present, _links(gathered, np.union1d(copies, first[copies])))
    split_of = gathered.samples.part_numbers[gathered.numbers]
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
    pairs = near_duplicates(gathered.rows["hash"], split_of, first)
    pairs = pairs[same_pictures(gathered, pairs, workers=workers, progress=progress)]
    nearest = np.unique(pairs[:, 0], return_index=True)[1]
    yield from _pairs(gathered, "near_leak", pairs[nearest])


def _unlabelled(
    subject: CheckedData, gathered: SampleFacts, *, workers: int, progress: Progress
) -> Iterator[DataFinding]:
    """Find images without a label, or an object, that look the same as one with some."""
    labels = np.concatenate([each.labels for each in subject.splits.values()])
    if subject.learned != "labels" or labels.shape[1] == 0:
        return
    is_unlabelled: Ids = np.where(labels.any(axis=1), 0, 1)[gathered.numbers]
    pairs = near_duplicates(gathered.rows["hash"], is_unlabelled, np.arange(len(gathered.numbers)))
    pairs = pairs[same_pictures(gathered, pairs, workers=workers, progress=progress)]
    yield from _pairs(gathered, "unlabelled", pairs[np.unique(pairs[:, 0], return_index=True)[1]])


def _pairs(gathered: SampleFacts, name: str, pairs: Ids) -> Iterator[DataFinding]:
    if len(pairs):
        named = pairs[:MAX_NAMED].tolist()
        yield DataFinding(KINDS[name], len(pairs), tuple(_entry(gathered, one, other=two) for one, two in named))


def _of_classes(subject: CheckedData) -> Iterator[DataFinding]:
    counts = class_counts(subject)
    train, held_out = counts["train"], counts["validation"]
    classes = subject.dataset.classes[: len(train)]

    def sized(number: int) -> FindingEntry:
        count = int(train[number])
        return FindingEntry(classes[number], detail=f"{count:,} image{'' if count == 1 else 's'}")

    findings = {"imbalance": list[FindingEntry]()}
    if len(train) and train.max() > IMBALANCED * max(int(train.min()), 1):
        findings["imbalance"] = [sized(int(train.argmax())), sized(int(train.argmin()))]
    findings["small_class"] = [sized(each) for each in np.flatnonzero(train < FEW).tolist()]
    lacking = np.flatnonzero(held_out == 0).tolist()
    findings["no_held_out"] = [FindingEntry(classes[each]) for each in lacking] if held_out.sum() else []
    findings["listed_names"] = [FindingEntry(name) for name in listed_names(classes)]
    findings["alike_names"] = [FindingEntry(quoted(two), other=quoted(one)) for one, two in similar_names(classes)]
    yield from (DataFinding(KINDS[name], len(entries), tuple(entries)) for name, entries in findings.items() if entries)
