"""Data sets of images: the request that opens one, what its opener returns, and its default split.

The default split is always the same: it depends on the labels and the fraction alone, not on the run's seed, so that
accuracies of different runs can be compared. Drawn by the samples' order, it may change where one is added; drawn by
hashes of their names, one that is added moves at most one other.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.heads import broken_files
from paceline.data.image.source import (
    ArraySource,
    FileSource,
    HeadedSource,
    SampleSource,
    SubsetSource,
    array_digest,
    with_channels,
)
from paceline.errors import DataError
from paceline.files import LeftOut
from paceline.recipe.data import Data
from paceline.units import format_count

Ids = NDArray[np.int64]
Hashes = NDArray[np.uint64]

# Arbitrary, and fixed for good: another key is another split.
_KEY = 0x70616365
_HOLDOUT_KEY = 0x686F6C64


def strata(labels: NDArray[Any]) -> Ids:
    """The class of every sample, int64 [N]; one for all where targets are rows of numbers."""
    return labels if labels.ndim == 1 else np.zeros(len(labels), dtype=np.int64)


def stratified_split(labels: Ids, fraction: float, *, key: int = _KEY, hashes: Hashes | None = None) -> tuple[Ids, Ids]:
    """Split samples into (training ids, held-out ids), both sorted, holding out the same share of each class.

    Of a class with n samples, round(fraction · n) are held out: at least one where n ≥ 2, and never all of
    them. A fraction of 0 holds out none.

    Args:
        labels: Class index of every sample, int64 [N], or other targets [N, K].
        fraction: Share to hold out, in [0, 1).
        key: Which of the splits of that size.
        hashes: A number for each sample, uint64 [N], of which the lowest of each class are held out, whatever the key
            and the order; None to draw by the order.
    """
    held_out = np.zeros(len(labels), dtype=bool)
    if fraction > 0 and len(labels):
        labels = strata(labels)
        by_class = np.argsort(labels, kind="stable")
        classes, starts = np.unique(labels[by_class], return_index=True)
        for label, members in zip(classes, np.split(by_class, starts[1:]), strict=True):
            # Ranked by raw words: numpy promises the raw stream of Philox for ever, but not what shuffle makes of it.
            generator = np.random.Philox(key=np.array([key, int(label)], dtype=np.uint64))
            words = generator.random_raw(len(members)) if hashes is None else hashes[members]
            wanted = min(max(round(fraction * len(members)), 1), len(members) - 1)
            held_out[members[np.argsort(words, kind="stable")[:wanted]]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def hold_out(labels: Ids, fraction: float, hashes: Hashes | None = None) -> tuple[Ids, Ids]:
    """Split training samples into those to train on and those to choose by, drawn apart from the evaluation's."""
    return stratified_split(labels, fraction, key=_HOLDOUT_KEY, hashes=hashes)


def stratified_order(labels: Ids, hashes: Hashes) -> Ids:
    """Order samples so that the first so many of them hold the same share of each class, within one sample.

    One of each class comes first. The first 100 are among the first 200: what is taken is nested. (It is the method
    of Webster, by which seats of a parliament are given to parties.)

    Args:
        labels: Class index of every sample, int64 [N].
        hashes: A number for each, uint64 [N], by which those of one class follow one another.
    """
    labels = strata(labels)
    by_class = np.lexsort((np.arange(len(labels)), hashes, labels))
    counts = np.bincount(labels, minlength=1)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    rank = np.arange(len(labels)) - starts
    # The middle of its sample's share of the class; all classes' first ones before anything else.
    place = np.where(rank == 0, -1.0, (rank + 0.5) / np.repeat(counts, counts))
    ordered: Ids = by_class[np.lexsort((hashes[by_class], place))]
    return ordered


def alike_names(classes: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of classes whose names differ by case or space only."""
    alike = defaultdict(list)
    for name in classes:
        alike["".join(name.casefold().split())].append(name)
    return [(names[0], names[1]) for names in alike.values() if len(names) > 1]


def split_off(fraction: float) -> str:
    """Say where held-out images come from that :func:`stratified_split` has drawn."""
    if fraction == 0:
        return "none (data.validation_fraction=0)"
    return f"{100 * fraction:.4g}% of each class, always the same (data.validation_fraction)"


_NAMED = 3
_PROBED = 256

BAD = {
    "other_files": "files that are not images",
    "heic_images": "HEIC images, which need pip install 'paceline[heic]'",
    "special_files": "named pipes, sockets and devices",
    "nested_folders": "folders inside class folders, which are not searched",
    "empty_folders": "class folders without images",
    "unread_folders": "folders next to train/ that are neither val/ nor test/",
    "broken_images": "images that cannot be opened",
}
"""What a run cannot use and can do without, by its name in plans."""


class Bad(NamedTuple):
    """A file or folder that a run cannot use, but can skip.

    Attributes:
        kind: A key of ``BAD``.
        path: Its path. detail: Further detail.
    """

    kind: str
    path: str
    detail: str = ""


class Problems:
    """Collects the problems of a source, to report all at once.

    Attributes:
        bad: Files and folders that can be left out.
        allows_one_class: Whether a folder may have one class only, as a part of a mixture.
    """

    def __init__(self) -> None:
        self.bad: list[Bad] = []
        self.allows_one_class = False
        self._stopping: dict[str, list[tuple[str, ...]]] = {}
        self._rows: dict[str, list[tuple[str, ...]]] = {}

    @property
    def count(self) -> int:
        """How many were found."""
        return len(self.bad) + self.rows + sum(map(len, self._stopping.values()))

    def add(self, sentence: str, what: str, *more: str) -> None:
        """Take one to be corrected: a sentence, the same for all of its kind, what it is about, what is filled in."""
        self._stopping.setdefault(sentence, []).append((what, *more))

    @property
    def rows(self) -> int:
        """How many rows of a table can be left out."""
        return sum(map(len, self._rows.values()))

    def add_row(self, sentence: str, what: str, *more: str) -> None:
        """Take, in the same form, a row of a table that can be left out."""
        self._rows.setdefault(sentence, []).append((what, *more))

    def sentences(self) -> Iterator[str]:
        """Say each that is not a file or folder."""
        for sentence, found in (*self._stopping.items(), *self._rows.items()):
            yield from (sentence.format(*filled) for filled in found)

    def left_out(self, root: Path, *, skips: bool) -> tuple[str, ...]:
        """Report what is left out, one sentence per kind; broken images only if they are skipped."""
        rows = starmap(_all_of_a_kind, self._rows.items())
        bad = [each for each in self.bad if skips or each.kind != "broken_images"]
        return (*_counted(bad, root).told(), *(f"left out: {each}" for each in rows))

    def refuse(self, request: DatasetRequest) -> None:
        """Refuse problems that the recipe does not allow to skip.

        Raises:
            DataError: With the number and the first of each kind, and what to do.
        """
        data = request.data
        skips = data.on_bad == "skip"
        broken = [each for each in self.bad if each.kind == "broken_images"]
        bad = [] if skips else [each for each in self.bad if each.kind != "broken_images"]
        if len(broken) > data.most_broken:
            bad += broken
        sentences = {**self._stopping, **({} if skips else self._rows)}
        lines = [" ".join(starmap(_all_of_a_kind, sentences.items()))] if sentences else []
        if bad:
            lines.append(f"{str(request.path)!r} has {format_count(len(bad))} files or folders that a run cannot use:")
            lines += [f"  {line}" for line in _counted(bad, request.path).listed()]
        if bad or (sentences and not self._stopping):
            lines.append("To train without them, add data.on_bad=skip.")
        if bad and data.dataset == "image_folder":
            command = f"paceline check-data {shlex.quote(str(request.path))} --quarantine DIR"
            lines.append(f"To move them out of the folder: {command}")
        if lines:
            raise DataError(*lines)


def _counted(bad: Sequence[Bad], root: Path) -> LeftOut:
    counted = LeftOut()
    order = list(BAD)
    for kind, path, detail in sorted(bad, key=lambda each: order.index(each.kind)):
        counted.add(BAD[kind], os.path.relpath(path, root if root.is_dir() else root.parent), detail)
    return counted


def _all_of_a_kind(sentence: str, found: Sequence[tuple[str, ...]]) -> str:
    first = sentence.format(*found[0])
    if len(found) == 1:
        return first
    named = ", ".join(what for what, *_ in found[1 : 1 + _NAMED]) + ", …" * (len(found) > 1 + _NAMED)
    return f"{first.removesuffix('.')} (and {len(found) - 1:,} more: {named})."


@dataclass(frozen=True, kw_only=True)
class DatasetRequest:
    """What a data set is opened with.

    Attributes:
        data: The recipe's section.
        problems: Collects the defects of the layout, the files and the rows; what it takes is left out.
        tolerant: Whether the rest is wanted despite problems.
        tries_files: Whether files are tried for whether they can be opened; who reads all of them anyway does not.
        in_any_order: Whether images will be read in any order; packing reads them in theirs.
        score_all: Whether all images of a folder without a split of its own are to be scored, and none trained on.
        several_labels: Whether an image has any number of labels: ``labels`` are then 0 or 1, [len, classes].
    """

    data: Data
    problems: Problems = field(default_factory=Problems)
    tolerant: bool = False
    tries_files: bool = True
    in_any_order: bool = True
    score_all: bool = False
    several_labels: bool = False

    @property
    def path(self) -> Path:
        """Path of the data.

        Raises:
            DataError: If the recipe does not say.
        """
        if self.data.path is None:
            raise DataError(f"data.dataset={self.data.dataset} needs data.path: set it to where the data is.")
        return Path(self.data.path).expanduser()

    @property
    def validation_fraction(self) -> float:
        """Share of each class held out if the data has no split."""
        return self.data.validation_fraction

    @property
    def channels(self) -> int | None:
        """Channels to decode to, 1 or 3; None for what the images have."""
        return None if self.data.channels == "auto" else self.data.channels

    def refuse_problems(self) -> None:
        """Refuse what was found, unless the caller wants the rest in any case; raises DataError."""
        if not self.tolerant:
            self.problems.refuse(self)


@dataclass(frozen=True)
class Probe:
    """Facts from the headers of some images.

    Attributes:
        count: Images looked at.
        size: Height and width if all of these have the same, else None.
        greyscale: Whether all of these are.
    """

    count: int
    size: tuple[int, int] | None
    greyscale: bool


class Statistics(NamedTuple):
    """Mean and standard deviation per channel, on the scale 0 … 1, and what they are of."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    told: str


@dataclass(frozen=True, kw_only=True)
class StoredImages:
    """The images of a data set, opened.

    Attributes:
        train: Training images.
        validation: Held-out images.
        classes: Class names; a label is an index into them. Of other targets what each column is called.
        digest: Tells the data set from others: a hash of the content, or of file names and sizes.
        split: Where the held-out images come from, for people; empty if there is nothing to say.
        is_split_off: Whether they were split off the training images, of whose source both are parts.
        channels: What the images are decoded to: 1 or 3.
        probe: What some of the training images look like.
        statistics: Known mean and standard deviation; None for those that pretrained models expect.
        listing: How the images were found, or what reading them costs, for people.
        left_out: Data that is not used, one sentence per kind.
        left_out_counts: How much of what a run cannot use was skipped, by its name in plans.
    """

    train: SampleSource
    validation: SampleSource
    classes: tuple[str, ...]
    digest: str
    split: str
    is_split_off: bool
    channels: int
    probe: Probe
    statistics: Statistics | None = None
    listing: str = ""
    left_out: tuple[str, ...] = ()
    left_out_counts: Mapping[str, int] = field(default_factory=dict)


def probe(source: HeadedSource, samples: Sequence[int] | None = None) -> Probe:
    """Look at the heads of at most 256 images, spread evenly over a source or some of its samples."""
    samples = range(len(source)) if samples is None else samples
    chosen = samples[:: max(1, -(-len(samples) // _PROBED))]
    heads = [head for head in map(source.head, chosen) if head is not None]
    sizes = {size for size, _ in heads}
    return Probe(
        count=len(heads),
        size=sizes.pop() if len(sizes) == 1 else None,
        greyscale=bool(heads) and all(grey for _, grey in heads),
    )


def file_splits(request: DatasetRequest, sources: Sequence[HeadedSource], held_out: str, **facts: Any) -> StoredImages:
    """As :func:`in_splits`, of image files, which become grey if all training images looked at are.

    Args:
        request: Says how many channels there are to be, if it says, and which share of each class to hold out.
        sources: Training images, and held-out ones if the data has them; their ``channels`` are set.
        held_out: See :func:`in_splits`.
        **facts: Further attributes of :class:`StoredImages`.

    Raises:
        DataError: If the recipe does not let what is wrong with them be left out.
    """
    if request.tries_files:
        first, *others = sources
        tried = _openable(request, first)
        sources = [tried, *(tried if each is first else _openable(request, each) for each in others)]
    request.refuse_problems()
    if request.data.on_bad == "skip":
        bad = request.problems.bad
        counts = Counter(each.kind for each in bad) + Counter(rows=request.problems.rows)
        facts["left_out_counts"] = {f"{kind}_left_out": counts[kind] for kind in (*BAD, "rows") if kind in counts}
        broken = [os.path.relpath(each.path, request.path) for each in bad if each.kind == "broken_images"]
        if broken:
            facts["digest"] = hashlib.sha256(repr([facts["digest"], *broken]).encode()).hexdigest()
    if not request.tolerant:
        facts["left_out"] = (
            *facts.get("left_out", ()),
            *request.problems.left_out(request.path, skips=request.data.on_bad == "skip"),
        )
    found = probe(sources[0])
    channels = request.channels or (1 if found.greyscale else 3)
    for source in sources:
        source.channels = channels
    return in_splits(sources, held_out, request.validation_fraction, channels=channels, probe=found, **facts)


def _openable(request: DatasetRequest, source: HeadedSource) -> HeadedSource:
    """Try a source of files; return it without those that cannot be opened, where the recipe says to skip them."""
    if not isinstance(source, FileSource):
        return source
    broken = broken_files(source)
    request.problems.bad += [Bad("broken_images", source.path(each), reason) for each, reason in broken.items()]
    return source.without(list(broken)) if broken and request.data.on_bad == "skip" else source


def in_splits(
    sources: Sequence[SampleSource],
    held_out: str,
    validation_fraction: float,
    **facts: Any,
) -> StoredImages:
    """The training and the held-out images, or a share of each class held out where there are only training images.

    Args:
        sources: Training images, and held-out ones if the data has them.
        held_out: Where those come from, for people; of data without them, what else there is to say of splits.
        validation_fraction: Share of each class to hold out otherwise.
        **facts: Further attributes of :class:`StoredImages`.
    """
    is_split_off = len(sources) == 1
    if is_split_off:
        (whole,) = sources
        sources = [SubsetSource(whole, ids) for ids in stratified_split(whole.labels, validation_fraction)]
        held_out = "; ".join(each for each in (split_off(validation_fraction), held_out) if each)
    train, validation = sources
    return StoredImages(train=train, validation=validation, split=held_out, is_split_off=is_split_off, **facts)


def pixel_images(
    request: DatasetRequest,
    sources: Sequence[ArraySource],
    held_out: str = "",
    *,
    classes: tuple[str, ...],
    statistics: Statistics,
) -> StoredImages:
    """As :func:`in_splits`, of pixels in memory, all of one size; the digest is that of the pixels as they are given.

    Args:
        request: Says how many channels there are to be, if it says.
        sources: Training images, and held-out ones if the data has them.
        held_out: See :func:`in_splits`.
        classes: See :class:`StoredImages`.
        statistics: Likewise.
    """
    stored = sources[0].images.shape[-1]
    channels = request.channels or stored
    return in_splits(
        [ArraySource(with_channels(each.images, channels), each.labels, each.name) for each in sources],
        held_out,
        request.validation_fraction,
        classes=classes,
        digest=array_digest(*sources),
        channels=channels,
        probe=Probe(len(sources[0]), sources[0].size(0), greyscale=stored == 1),
        statistics=statistics,
    )


@dataclass(frozen=True, kw_only=True)
class ImageDataset:
    """Labelled images in two splits, and their preprocessing.

    Attributes:
        name: What the recipe calls it.
        train: Training images.
        validation: Held-out images.
        classes: Class names; a label is an index into them. Of other targets what each column is called.
        channels: 1 or 3, of every image the sources give.
        image_size: Height and width the model sees, in pixels.
        holdout: Images of the training split that are not trained on, to choose by after training; None if there are
            none.
        native_size: Height and width of the stored images if all share them, else None.
        is_split_off: Whether the held-out images were split off the training images, of whose source both are parts.
        selection: What part of the data is used, and how much of it was skipped, for the plan; empty if all is used.
        digest: Says whether two runs saw the same data; a hash of the content, or of file names and sizes.
        mean: Per-channel mean that is subtracted from pixels, on the scale 0 … 1.
        std: Per-channel standard deviation they are divided by.
        target_mean: What was subtracted from each column of numbers to learn; empty where there are none.
        target_std: What they were then divided by.
        reasons: Why a value that the recipe left open is what it is, by its name in the recipe; under
            ``validation`` where the held-out images come from; and why ``validation_fraction`` has no effect, if it
            has none.
        left_out: Data that is not used, one sentence per kind.
    """

    name: str
    train: SampleSource
    validation: SampleSource
    classes: tuple[str, ...]
    channels: int
    image_size: int
    holdout: SampleSource | None = None
    native_size: tuple[int, int] | None = None
    is_split_off: bool = False
    selection: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    target_mean: tuple[float, ...] = ()
    target_std: tuple[float, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
