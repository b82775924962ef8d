"""Image data sets: the request that opens one, the opened result, and the default split.

The default split is fixed: it depends on the labels and the fraction alone, not on the run's seed, so accuracies of
different runs are comparable. A split by sample order may change when samples are added; with a split by name hashes,
an added sample moves at most one other.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.file_checks import broken_files
from paceline.data.image.source import (
    ArraySource,
    FileSource,
    Hashes,
    Ids,
    ImageFiles,
    SampleSource,
    SubsetSource,
    array_digest,
    with_channels,
)
from paceline.errors import DataError
from paceline.parsing.files import SkippedItems
from paceline.parsing.units import format_count
from paceline.recipe.data import Data

# Arbitrary and fixed: another key gives another split.
_KEY = 0x70616365
_HOLDOUT_KEY = 0x686F6C64


def strata(labels: NDArray[Any]) -> Ids:
    """The class of every sample, int64 [N]; a single class if targets are rows of numbers."""
    return labels if labels.ndim == 1 else np.zeros(len(labels), dtype=np.int64)


def stratified_split(labels: Ids, fraction: float, *, key: int = _KEY, hashes: Hashes | None = None) -> tuple[Ids, Ids]:
    """Split samples into sorted (training ids, held-out ids), holding out the same share of each class.

    Of a class with n samples, round(fraction · n) are held out: at least one if n ≥ 2, and never all. A fraction of 0
    holds out none. A fraction of 1, to score all samples, returns all twice.

    Args:
        labels: Class index of every sample, int64 [N], or other targets [N, K].
        fraction: Share to hold out, in [0, 1].
        key: Selects one of the splits of that size.
        hashes: A number per sample, uint64 [N]: the lowest of each class are held out, whatever the key and the order;
            None to split by order.
    """
    if fraction == 1:
        return np.arange(len(labels)), np.arange(len(labels))
    held_out = np.zeros(len(labels), dtype=bool)
    if fraction > 0 and len(labels):
        labels = strata(labels)
        by_class = np.argsort(labels, kind="stable")
        classes, starts = np.unique(labels[by_class], return_index=True)
        for label, members in zip(classes, np.split(by_class, starts[1:]), strict=True):
            # Ranked by raw words: numpy guarantees Philox's raw stream, but not the result of shuffle.
            generator = np.random.Philox(key=np.array([key, int(label)], dtype=np.uint64))
            keys = generator.random_raw(len(members)) if hashes is None else hashes[members]
            count = min(max(round(fraction * len(members)), 1), len(members) - 1)
            held_out[members[np.argsort(keys, kind="stable")[:count]]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def hold_out(labels: Ids, fraction: float, hashes: Hashes | None = None) -> tuple[Ids, Ids]:
    """Split off training samples for model selection, independently of the evaluation split."""
    return stratified_split(labels, fraction, key=_HOLDOUT_KEY, hashes=hashes)


def stratified_order(labels: Ids, hashes: Hashes) -> Ids:
    """Order samples so that every prefix has the same share of each class, to within one sample.

    One sample of each class comes first. Prefixes are nested: the first 100 are among the first 200. (This is Webster's
    method for allocating seats in a parliament.)

    Args:
        labels: Class index of every sample, int64 [N].
        hashes: A number per sample, uint64 [N], that orders the samples of a class.
    """
    labels = strata(labels)
    by_class = np.lexsort((np.arange(len(labels)), hashes, labels))
    counts = np.bincount(labels, minlength=1)
    rank = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    # Position of a sample: the middle of its share of the class, with the first sample of every class ahead.
    position = np.where(rank == 0, -1.0, (rank + 0.5) / np.repeat(counts, counts))
    ordered: Ids = by_class[np.lexsort((hashes[by_class], position))]
    return ordered


def describe_split(fraction: float) -> str:
    """Describe the origin of held-out images drawn by :func:`stratified_split`."""
    if fraction == 0:
        return "none (data.validation_fraction=0)"
    if fraction == 1:
        return "all, also any that the run was trained on"
    return f"{100 * fraction:.4g}% of each class, always the same (data.validation_fraction)"


# Hint for files that are not images.
NOT_IMAGES = (
    "For text, write a recipe with task and data.path (docs/guide/language-models.md); "
    "likewise for COCO boxes (docs/guide/detection.md)."
)
_MAX_NAMED = 3
_PROBE_SIZE = 256

SKIP_REASONS = {
    "other_files": "files that are not images",
    "heic_images": "HEIC images, which need pip install 'paceline[heic]'",
    "special_files": "named pipes, sockets and devices",
    "nested_folders": "folders inside class folders, which are not searched",
    "empty_folders": "class folders without images",
    "unread_folders": "folders next to those of the splits, which are not read",
    "broken_images": "images that cannot be opened",
}
"""Unusable but skippable data, by their name in plans."""


class SkippedFile(NamedTuple):
    """A file or folder that is unusable but can be skipped.

    Attributes:
        kind: A key of ``SKIP_REASONS``.
        path: Its path.
        detail: Further detail.
    """

    kind: str
    path: str
    detail: str = ""


class Problems:
    """Collects the problems of a source, to report them all at once.

    Attributes:
        bad: Files and folders that can be skipped.
        allows_one_class: Whether a folder may have a single class, as in a mixture.
    """

    def __init__(self) -> None:
        self.bad: list[SkippedFile] = []
        self.allows_one_class = False
        self._fatal: dict[str, list[tuple[str, ...]]] = {}
        self._rows: dict[str, list[tuple[str, ...]]] = {}

    @property
    def count(self) -> int:
        """Number of problems found."""
        return len(self.bad) + self.rows + sum(map(len, self._fatal.values()))

    def add(self, sentence: str, subject: str, *details: str) -> None:
        """Add a problem that must be fixed: a sentence, the same for all of its kind, and its arguments."""
        self._fatal.setdefault(sentence, []).append((subject, *details))

    @property
    def rows(self) -> int:
        """Number of table rows that can be skipped."""
        return sum(map(len, self._rows.values()))

    def add_row(self, sentence: str, subject: str, *details: str) -> None:
        """Add, in the same form, a table row that can be skipped."""
        self._rows.setdefault(sentence, []).append((subject, *details))

    def sentences(self) -> Iterator[str]:
        """Return a sentence for each problem that is not about a file or folder."""
        for sentence, arguments in (*self._fatal.items(), *self._rows.items()):
            yield from (sentence.format(*filled) for filled in arguments)

    def left_out(self, root: Path, *, skips: bool) -> tuple[str, ...]:
        """Report skipped data, one sentence per kind; broken images only if they are skipped."""
        rows = starmap(_summarise_kind, self._rows.items())
        bad = [each for each in self.bad if skips or each.kind != "broken_images"]
        return (*_count_skipped(bad, root).summaries(), *(f"left out: {each}" for each in rows))

    def refuse(self, request: DatasetRequest) -> None:
        """Raise an error for problems that the recipe does not allow to skip.

        Raises:
            DataError: With the number and the first of each kind, and what to do.
        """
        data = request.data
        skips = data.on_bad == "skip"
        broken = [each for each in self.bad if each.kind == "broken_images"]
        bad = [] if skips else [each for each in self.bad if each.kind != "broken_images"]
        if len(broken) > data.broken_limit:
            bad += broken
        sentences = {**self._fatal, **({} if skips else self._rows)}
        lines = [" ".join(starmap(_summarise_kind, sentences.items()))] if sentences else []
        if bad:
            found = "a file or folder" if len(bad) == 1 else f"{format_count(len(bad))} files or folders"
            lines.append(f"{str(request.path)!r} has {found} that a run cannot use:")
            lines += [f"  {line}" for line in _count_skipped(bad, request.path).counts()]
        if bad or (sentences and not self._fatal):
            lines.append("To train without them, add data.on_bad=skip.")
        if bad and data.dataset == "image_folder":
            command = f"paceline check-data {shlex.quote(str(request.path))} --quarantine DIR"
            lines.append(f"To move them out of the folder: {command}")
        if lines:
            raise DataError(*lines)


def _count_skipped(bad: Sequence[SkippedFile], root: Path) -> SkippedItems:
    left_out = SkippedItems()
    order = list(SKIP_REASONS)
    for kind, path, detail in sorted(bad, key=lambda each: order.index(each.kind)):
        left_out.add(SKIP_REASONS[kind], os.path.relpath(path, root if root.is_dir() else root.parent), detail)
    return left_out


def _summarise_kind(sentence: str, arguments: Sequence[tuple[str, ...]]) -> str:
    first = sentence.format(*arguments[0])
    if len(arguments) == 1:
        return first
    named = ", ".join(what for what, *_ in arguments[1 : 1 + _MAX_NAMED]) + ", …" * (len(arguments) > 1 + _MAX_NAMED)
    return f"{first.removesuffix('.')} (and {len(arguments) - 1:,} more: {named})."


@dataclass(frozen=True, kw_only=True)
class DatasetRequest:
    """Request to open a data set.

    Attributes:
        data: The recipe's section.
        problems: Collects problems of the layout, files and rows; collected items are skipped.
        tolerant: Whether to return the rest despite problems.
        tries_files: Whether to check that files can be opened; not needed if all are read anyway.
        in_any_order: Whether images are read in random order; packing reads sequentially.
        several_labels: Whether images are multi-label: ``labels`` are then 0 or 1, [len, classes].
    """

    data: Data
    problems: Problems = field(default_factory=Problems)
    tolerant: bool = False
    tries_files: bool = True
    in_any_order: bool = True
    several_labels: bool = False

    @property
    def path(self) -> Path:
        """Path of the data.

        Raises:
            DataError: If the recipe does not give it.
        """
        return self.data.needed_path()

    @property
    def channels(self) -> int | None:
        """Channels to decode to, 1 or 3; None for the images' channels."""
        return None if self.data.channels == "auto" else self.data.channels

    def refuse_problems(self) -> None:
        """Raise DataError for found problems, unless the caller tolerates them."""
        if not self.tolerant:
            self.problems.refuse(self)


@dataclass(frozen=True)
class Probe:
    """Facts from the headers of some images.

    Attributes:
        count: Number of images probed.
        size: Height and width if equal for all of them, else None.
        greyscale: Whether all of them are greyscale.
    """

    count: int
    size: tuple[int, int] | None
    greyscale: bool


class Statistics(NamedTuple):
    """Mean and standard deviation per channel, on the scale 0 … 1, and their origin."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    origin: str


@dataclass(frozen=True, kw_only=True)
class StoredImages:
    """An opened data set of images.

    Attributes:
        train: Training images.
        validation: Held-out images.
        classes: Class names; a label is an index into them. For other targets, the column names.
        digest: Identifies the data set: a hash of the content, or of file names and sizes.
        split: Origin of the held-out images, for people; may be empty.
        is_split_off: Whether they were split off the training images, so that both are parts of one source.
        channels: Channels of decoded images: 1 or 3.
        probe: Properties of some training images.
        statistics: Known mean and standard deviation; None for those of pretrained models.
        listing: How the images were listed, or the cost of reading them, for people.
        left_out: Unused data, one sentence per kind.
        left_out_counts: Number of skipped items, by their name in plans.
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


def probe(source: ImageFiles, samples: Sequence[int] | None = None) -> Probe:
    """Read the headers of at most 256 images, spread evenly over a source or some of its samples."""
    samples = range(len(source)) if samples is None else samples
    chosen = samples[:: max(1, -(-len(samples) // _PROBE_SIZE))]
    heads = [head for head in map(source.head, chosen) if head is not None]
    sizes = {size for size, _ in heads}
    return Probe(
        count=len(heads),
        size=sizes.pop() if len(sizes) == 1 else None,
        greyscale=bool(heads) and all(grey for _, grey in heads),
    )


def file_splits(request: DatasetRequest, sources: Sequence[ImageFiles], held_out: str, **facts: Any) -> StoredImages:
    """The same as :func:`in_splits`, for image files; greyscale if all probed training images are.

    Args:
        request: Gives the number of channels, if set, and the share of each class to hold out.
        sources: Training images, and held-out ones if the data has them; this sets their ``channels``.
        held_out: See :func:`in_splits`.
        **facts: Other attributes of :class:`StoredImages`.

    Raises:
        DataError: If they have problems that the recipe does not allow to skip.
    """
    if request.tries_files:
        first, *rest = sources
        tried = _openable(request, first)
        if tried is not first and not (request.problems.allows_one_class or request.data.score_all):
            kept = np.unique(tried.labels, axis=0)
            if tried.labels.ndim == 1 and len(kept) == 1 < len(facts["classes"]):
                sentence = "{} has one class with images that can be opened, {}, but a classifier needs at least two."
                request.problems.add(sentence, repr(str(request.path)), repr(facts["classes"][kept[0]]))
        sources = [tried, *(tried if each is first else _openable(request, each) for each in rest)]
    request.refuse_problems()
    if request.data.on_bad == "skip":
        bad = request.problems.bad
        counts = Counter(each.kind for each in bad) + Counter(rows=request.problems.rows)
        facts["left_out_counts"] = {
            f"{kind}_left_out": counts[kind] for kind in (*SKIP_REASONS, "rows") if kind in counts
        }
        broken = [os.path.relpath(each.path, request.path) for each in bad if each.kind == "broken_images"]
        if broken:
            facts["digest"] = hashlib.sha256(repr([facts["digest"], *broken]).encode()).hexdigest()
    if not request.tolerant:
        facts["left_out"] = (
            *facts.get("left_out", ()),
            *request.problems.left_out(request.path, skips=request.data.on_bad == "skip"),
        )
    probed = probe(sources[0])
    channels = request.channels or (1 if probed.greyscale else 3)
    for source in sources:
        source.channels = channels
    return in_splits(sources, held_out, request.data.validation_fraction, channels=channels, probe=probed, **facts)


def _openable(request: DatasetRequest, source: ImageFiles) -> ImageFiles:
    """Check a source of files; return it without unreadable ones if the recipe skips them."""
    if not isinstance(source, FileSource):
        return source
    broken = broken_files(source)
    request.problems.bad += [SkippedFile("broken_images", source.path(each), reason) for each, reason in broken.items()]
    return source.exclude(list(broken)) if broken and request.data.on_bad == "skip" else source


def in_splits(sources: Sequence[SampleSource], held_out: str, validation_fraction: float, **facts: Any) -> StoredImages:
    """Return training and held-out images; without held-out ones, hold out a share of each class.

    Args:
        sources: Training images, and held-out ones if the data has them.
        held_out: Origin of held-out images, for people; without them, other information on splits.
        validation_fraction: Share of each class to hold out if there are no held-out images.
        **facts: Other attributes of :class:`StoredImages`.
    """
    is_split_off = len(sources) == 1
    if is_split_off:
        (source,) = sources
        sources = [SubsetSource(source, ids) for ids in stratified_split(source.labels, validation_fraction)]
        described = "" if validation_fraction == 1 and held_out else describe_split(validation_fraction)
        held_out = "; ".join(each for each in (described, held_out) if each)
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
    """The same as :func:`in_splits`, for same-sized pixel arrays in memory; the digest is that of the given pixels.

    Args:
        request: Gives the number of channels, if set.
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
        request.data.validation_fraction,
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
        name: Name in the recipe.
        train: Training images.
        validation: Held-out images.
        classes: Class names; a label is an index into them. For other targets, the column names.
        channels: Channels of every image, 1 or 3.
        image_size: Height and width of the model's input, in pixels.
        holdout: Training images held out for model selection after training; None if there are none.
        native_size: Height and width of the stored images if equal for all, else None.
        is_split_off: Whether the held-out images were split off the training images, so that both are parts of one
            source.
        selection: Which part of the data is used and how much was skipped, for the plan; empty if all is used.
        digest: Identifies the data: a hash of the content, or of file names and sizes.
        mean: Per-channel mean subtracted from pixels, on the scale 0 … 1.
        std: Per-channel standard deviation by which they are divided.
        target_mean: Mean subtracted from each numeric target column; empty if there are none.
        target_std: Standard deviation by which they are then divided.
        reasons: Explanations of automatic values, by recipe key; ``validation`` explains the origin of held-out images;
            also why ``validation_fraction`` has no effect, if so.
        left_out: Unused data, one sentence per kind.
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
