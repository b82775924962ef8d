"""Findings and statistics of an image set: duplicates, leaks, classes, sizes, brightness, decoding cost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.file_checks import spread
from paceline.data.image.source import Ids
from paceline.data.labels import listed_names, similar_names
from paceline.parsing.plain_text import quoted
from paceline_data.inspect.gather import MAX_NAMED, CheckedData, Progress, SampleFacts, same_pictures
from paceline_data.inspect.look import BROKEN, FEW, IMBALANCED, KINDS, OF_SAMPLES, SEVERITIES, Kind

Digests = NDArray[np.uint64]
Parts = NDArray[np.uint8]
Numbers = NDArray[np.float32]

_LEAST_ALIKE = 0.9  # correlation of the parts of two images
_MOST_MATCHES = 8  # of a sample, that are compared with it
_NOISE = 5.0  # out of 255: of the parts of a resized or cropped copy
_FITTED = 20_000  # images, evenly spread, that tell how parts vary
_QUERIES, _KNOWN = 1024, 8192  # compared at once


def first_of(content: Digests, present: NDArray[np.bool_], late: NDArray[np.bool_] | None = None) -> Ids:
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


def near_duplicates(parts: Parts, split_of: Ids, first: Ids) -> Ids:
    """Return pairs of a sample and one of the most similar ones in earlier splits, nearest first, int64 [pairs, 2].

    Similar are images whose parts correlate. What varies little among all images, such as a background or layout that
    they share, says little, so the nearest ones are those by Mahalanobis distance. Identical files and samples without
    parts are left out.
    """
    seen = np.flatnonzero(parts.any(axis=1))
    pairs = [np.empty((0, 2), dtype=np.int64)]
    if len(seen):
        view = _whitening(parts[seen[spread(len(seen), _FITTED)]])
    for split in np.unique(split_of[seen])[1:]:
        queries, known = seen[split_of[seen] == split], seen[split_of[seen] < split]
        distance, other = _nearest(parts, queries, known, first, view)
        order = np.lexsort((other, distance))
        distance, other = np.take_along_axis(distance, order, axis=1), np.take_along_axis(other, order, axis=1)
        found = np.isfinite(distance)
        pairs.append(np.stack([np.broadcast_to(queries[:, None], other.shape)[found], other[found]], axis=1))
    return np.concatenate(pairs)


def _whitening(parts: Parts) -> Numbers:
    """Return the matrix that gives images of unit covariance, apart from the noise of copies, float32 [144, 144]."""
    variances, directions = np.linalg.eigh(np.atleast_2d(np.cov(_centred(parts).T)))
    return np.asarray(directions / np.sqrt(variances.clip(0) + _NOISE**2), dtype=np.float32)


def _centred(parts: Parts) -> Numbers:
    return np.asarray(parts - parts.mean(axis=1, dtype=np.float32, keepdims=True), dtype=np.float32)


def _nearest(parts: Parts, queries: Ids, known: Ids, first: Ids, view: Numbers) -> tuple[Numbers, Ids]:
    """Return distance (inf where there is none) and id of the known images nearest to each query, [queries, 8]."""
    distance = np.full((len(queries), _MOST_MATCHES), np.inf, dtype=np.float32)
    other = np.zeros((len(queries), _MOST_MATCHES), dtype=np.int64)
    for begin in range(0, len(known), _KNOWN):
        ids = known[begin : begin + _KNOWN]
        images = _centred(parts[ids])
        units, whitened = images / np.linalg.norm(images, axis=1, keepdims=True), images @ view
        for at in range(0, len(queries), _QUERIES):
            asked = _centred(parts[queries[at : at + _QUERIES]])
            alike = asked @ units.T >= _LEAST_ALIKE * np.linalg.norm(asked, axis=1, keepdims=True)
            rows = np.flatnonzero(alike.any(axis=1))
            if not len(rows):
                continue
            seen = asked[rows] @ view
            away = (seen**2).sum(axis=1, keepdims=True) + (whitened**2).sum(axis=1) - 2 * seen @ whitened.T
            away[~alike[rows] | (first[queries[at + rows], None] == first[ids])] = np.inf
            away = np.concatenate([distance[at + rows], away], axis=1)
            names = np.concatenate([other[at + rows], np.broadcast_to(ids, (len(rows), len(ids)))], axis=1)
            best = np.argpartition(away, _MOST_MATCHES - 1, axis=1)[:, :_MOST_MATCHES]
            distance[at + rows] = np.take_along_axis(away, best, axis=1)
            other[at + rows] = np.take_along_axis(names, best, axis=1)
    return distance, other


# Bin edges of the histogram of CPU time per decoded image, in milliseconds.
_HISTOGRAM_EDGES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_SLOWEST = 5


def class_counts(subject: CheckedData) -> dict[str, NDArray[np.int64]]:
    """Count the samples of each class or label, by split; without classes for numeric targets."""
    count = 0 if subject.learned == "numbers" else len(subject.dataset.classes)
    labels = {name: source.labels for name, source in subject.splits.items()}
    if subject.learned == "classes":
        return {name: np.bincount(each, minlength=count) for name, each in labels.items()}
    return {name: (each[:, :count] == 1).sum(axis=0) for name, each in labels.items()}


def _without_images(subject: CheckedData) -> NDArray[np.bool_]:
    """Return a mask of the classes whose folders are empty in every split: they are findings, not classes."""
    counts: NDArray[np.int64] = np.sum(list(class_counts(subject).values()), axis=0)
    empty = {os.path.basename(path) for kind, path, _ in subject.problems.bad if kind == "empty_folders"}
    names = subject.dataset.classes[: len(counts)]
    is_empty: NDArray[np.bool_] = (counts == 0) & np.array([name in empty for name in names], dtype=bool)
    return is_empty


def class_figures(subject: CheckedData) -> dict[str, Any]:
    """Return the sample counts per class and their imbalance."""
    counts, is_empty = class_counts(subject), _without_images(subject)
    train = counts["train"]
    kept = train[~is_empty]
    smallest, largest = (int(kept.min()), int(kept.max())) if len(kept) else (0, 0)
    return {
        "count": len(subject.dataset.classes) - int(is_empty.sum()),
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
        *_sample_findings(gathered),
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


def _sample_findings(gathered: SampleFacts) -> Iterator[DataFinding]:
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
    pairs = near_duplicates(gathered.rows["parts"], split_of, first)
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
    pairs = near_duplicates(gathered.rows["parts"], is_unlabelled, np.arange(len(gathered.numbers)))
    pairs = pairs[same_pictures(gathered, pairs, workers=workers, progress=progress)]
    yield from _pairs(gathered, "unlabelled", pairs[np.unique(pairs[:, 0], return_index=True)[1]])


def _pairs(gathered: SampleFacts, name: str, pairs: Ids) -> Iterator[DataFinding]:
    if len(pairs):
        named = pairs[:MAX_NAMED].tolist()
        yield DataFinding(KINDS[name], len(pairs), tuple(_entry(gathered, one, other=two) for one, two in named))


def _of_classes(subject: CheckedData) -> Iterator[DataFinding]:
    counts, is_empty = class_counts(subject), _without_images(subject)
    train, held_out = (counts[split][~is_empty] for split in ("train", "validation"))
    classes = [name for name, skipped in zip(subject.dataset.classes, is_empty, strict=False) if not skipped]

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
