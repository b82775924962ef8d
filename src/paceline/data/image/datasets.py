"""Open a recipe's data set, resolve every ``auto`` with its reason, and digest its files.

Sets of up to ``MOST_IMAGES`` images and ``LARGEST_BYTES`` are read once before the first run, so that a resumed run
detects changed pixels under the same names and sizes. The digest is cached while all files keep their size, times and
inode. For larger sets, a run compares names and sizes.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.disk_cache import cached, stamp_of
from paceline.data.image.dataset import DatasetRequest, ImageDataset, Problems, StoredImages
from paceline.data.image.decode import read_file
from paceline.data.image.selection import select
from paceline.data.image.source import BrokenImageError, Content, encoded_source, files_of
from paceline.data.labels import odd_class_names
from paceline.errors import DataError, RecipeError
from paceline.parsing.units import format_bytes
from paceline.plugins.dataset_registry import open_registered
from paceline.plugins.references import is_reference
from paceline.recipe.data import Data

MOST_IMAGES = 20_000
LARGEST_BYTES = 512 * 2**20
TOO_LARGE = (
    f"none: more than {MOST_IMAGES:,} images or {format_bytes(LARGEST_BYTES)}; a resume compares names and sizes"
)
_NOT_COMPARED = (
    f"copies are not looked for among more than {MOST_IMAGES:,} images, or {format_bytes(LARGEST_BYTES)} in files of "
    "equal size: `paceline check-data` finds them"
)
_UNREADABLE = "none, since {!r} cannot be read: a resume compares names and sizes"
_READERS = 8  # each thread mostly waits for the disk
_AT_ONCE = 64


def content_of(dataset: ImageDataset) -> tuple[str | None, str, str]:
    """Digest the image files of all splits with :func:`content_hashes`; None without files.

    Returns:
        The digest, a description of its scope, and a sentence about images with two labels or in two splits, if any.
    """
    splits = [each for each in (dataset.train, dataset.validation, dataset.holdout) if each is not None]
    sources = [each for each in map(encoded_source, splits) if each is not None]
    if len(sources) < len(splits) or any(files_of(each, np.arange(0)) is None for each in splits):
        return None, "", ""
    if sum(map(len, splits)) > MOST_IMAGES:
        return None, TOO_LARGE, _NOT_COMPARED
    paths = {path for each in splits for path in files_of(each, np.arange(len(each))) or ()}
    samples = [(source, sample) for source in sources for sample in range(len(source))]
    names = [source.path(sample) for source, sample in samples]

    def read(index: int) -> Content:
        source, sample = samples[index]
        return source.encoded(sample)

    hashes, detail = content_hashes(sorted(paths), len(samples), read, dataset.digest, names=names)
    if hashes is None:
        return None, detail, _NOT_COMPARED if detail == TOO_LARGE else ""
    labels = np.concatenate([each.labels for each in splits])
    parts = np.repeat(np.arange(len(splits)), [len(each) for each in splits])
    return _digest(hashes, len(samples)), detail, _copies(names, hashes, {"labels": labels, "splits": parts})


def _copies(names: Sequence[str], hashes: Mapping[int, str], properties: Mapping[str, NDArray[Any]]) -> str:
    """Describe images of the same content that differ in a property; empty if there are none."""
    first: dict[str, int] = {}
    pairs = [(first.setdefault(each, at), at) for at, each in hashes.items() if each != _EMPTY]
    copies = [(one, two) for one, two in pairs if names[one] != names[two]]
    told: dict[tuple[str, str], list[str]] = {}
    for what, values in properties.items():
        if found := [(one, two) for one, two in copies if np.any(values[one] != values[two])]:
            pair, more = " and ".join(repr(names[each]) for each in found[0]), f", and {len(found) - 1:,} more"
            told.setdefault((pair, more * (len(found) > 1)), []).append(what)
    sentences = (
        f"{pair} are the same image with different {' and '.join(w)}{more}" for (pair, more), w in told.items()
    )
    return "; ".join(sentences) + "; `paceline check-data` lists such images" * bool(told)


def content_of_files(files: Sequence[str], description: str, *, limit: int = MOST_IMAGES) -> tuple[str | None, str]:
    """Digest single-image files with :func:`content_hashes`; None without files."""
    if len(files) > limit:
        return None, TOO_LARGE
    if not files:
        return None, ""
    hashes, detail = content_hashes(files, len(files), lambda at: read_file(files[at]), description)
    return _digest(hashes or {}, len(files)), detail


def _digest(hashes: Mapping[int, str], count: int) -> str | None:
    return _hashed(bytes.fromhex("".join(hashes.values()))) if len(hashes) == count else None


def content_hashes(
    paths: Sequence[str], count: int, read: Callable[[int], Content], description: str, *, names: Sequence[str] = ()
) -> tuple[dict[int, str] | None, str]:
    """Hash images, or return the cached hashes if no file has changed.

    Args:
        paths: Files that contain them.
        count: Number of images.
        read: Returns an image's content, or raises BrokenImageError.
        description: Identifies the selection of images in these files.
        names: Their names. In a set that is too large, only images are read that are files of equal size.

    Returns:
        The hash of each image that was read, in order, and a description of their scope; None and the reason, if these
        are too large too or one cannot be read.
    """
    now = time.time_ns()
    try:
        with ThreadPoolExecutor(_READERS) as pool:
            stamps = list(pool.map(stamp_of, paths))
    except OSError as error:
        return None, _UNREADABLE.format(error.filename)
    chosen = list(range(count))
    changes = ((max(times), path) for (_, _, *times), path in zip(stamps, paths, strict=True))
    _, last = max(changes, default=(0, ""))
    detail = f"of {count:,} images; {last!r} changed last"
    size_of = {path: size for path, (size, *_) in zip(paths, stamps, strict=True)}
    if sum(size_of.values()) > LARGEST_BYTES:
        files_of_size = Counter(size_of.values())
        chosen = [at for at, name in enumerate(names) if name in size_of and files_of_size[size_of[name]] > 1]
        detail = TOO_LARGE
        if sum(size_of[names[at]] for at in chosen) > LARGEST_BYTES:
            return None, detail

    def hashes(first: int) -> list[str]:
        return [_hashed(read(at)) for at in chosen[first : first + _AT_ONCE]]

    def find() -> list[str]:
        with ThreadPoolExecutor(_READERS) as pool:
            return [each for part in pool.map(hashes, range(0, len(chosen), _AT_ONCE)) for each in part]

    try:
        found = cached("contents", ("hashes", description, *(names or paths)), stamps, find, now=now)
        return dict(zip(chosen, found, strict=True)), detail
    except BrokenImageError as error:
        return None, _UNREADABLE.format(error.path)


def _hashed(content: Content) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()


_EMPTY = _hashed(b"")


LARGEST_SMALL_IMAGE = 64
_PHOTOGRAPH_SIZE = 224
_SEVERAL = "if an image has several labels, set task=image_multilabel, with data.dataset=csv or parquet"
# Statistics of ImageNet's training images, which pretrained models expect; averaged over channels for greyscale.
_IMAGENET_MEAN = {3: (0.485, 0.456, 0.406), 1: (0.449,)}
_IMAGENET_STD = {3: (0.229, 0.224, 0.225), 1: (0.226,)}


def open_dataset(data: Data, problems: Problems | None = None, *, several_labels: bool = False) -> ImageDataset:
    """Open the data set named in the recipe's `data` section.

    Args:
        data: The section.
        problems: Collects problems of an image folder or a table's rows, to return the rest despite them.
        several_labels: See :class:`DatasetRequest`.

    Raises:
        DataError: If there is no such data set, or it cannot be read.
        RecipeError: If the section does not fit the data set.
    """
    if is_reference(data.dataset):
        dataset = open_registered(data.dataset, {"images": ImageDataset}, data)
    else:
        request = DatasetRequest(data=data, several_labels=several_labels)
        if problems is not None:
            request = replace(request, problems=problems, tolerant=True, tries_files=False)
        dataset = _described(data, open_stored(request))
    dataset = select(data, dataset)
    mean = dataset.mean if data.mean == "auto" else data.mean
    std = dataset.std if data.std == "auto" else data.std
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != dataset.channels:
            raise RecipeError(
                f"data.{name} has {len(values)} values, but the images have {dataset.channels} channels: "
                "give one value per channel, or 'auto'."
            )
    return replace(dataset, mean=mean, std=std)


def open_stored(request: DatasetRequest) -> StoredImages:
    """Open all of a registered data set.

    Raises:
        DataError: If the name is unknown, or it cannot be read.
    """
    data = request.data
    try:
        return open_registered(data.dataset, {"images": StoredImages}, request)
    except (OSError, ValueError, LookupError, RecursionError) as error:
        if data.path is None:
            raise
        raise DataError(
            f"data.path={data.path} cannot be read as data.dataset={data.dataset}: {type(error).__name__}: {error}; "
            "restore it, or correct the path."
        ) from error


def _described(data: Data, stored: StoredImages) -> ImageDataset:
    """Resolve the recipe's automatic values."""
    probe, statistics, channels = stored.probe, stored.statistics, stored.channels
    grey = "all" if probe.greyscale else "not all"
    reasons = {"channels": f"of {probe.count} images tried, {grey} are grey"}
    if data.image_size != "auto":
        image_size, reasons["image_size"] = data.image_size, "as the recipe says"
    elif probe.size is not None and probe.size[0] == probe.size[1] <= LARGEST_SMALL_IMAGE:
        image_size = probe.size[0]
        reasons["image_size"] = f"all of {probe.count} images tried are {image_size}x{image_size}"
    else:
        image_size = _PHOTOGRAPH_SIZE
        reasons["image_size"] = "the usual size for photographs; not all images are small squares of one size"
    why = "ImageNet's, which pretrained models expect" if statistics is None else statistics.origin
    reasons |= dict.fromkeys(("mean", "std"), why)
    if stored.listing:
        reasons["path"] = stored.listing
    if stored.split:
        reasons["validation"] = stored.split
    if stored.split and not stored.is_split_off:
        reasons["validation_fraction"] = f"the data has its own split, {stored.split}"
    is_several = stored.train.labels.ndim > 1
    fix = "separate several labels of an image by ';'" if is_several else _SEVERAL
    if not (is_several and data.target_columns) and (notes := odd_class_names(stored.classes, fix)):
        reasons["classes"] = "; ".join(notes)
    return ImageDataset(
        name=data.dataset,
        train=stored.train,
        validation=stored.validation,
        classes=stored.classes,
        channels=channels,
        image_size=image_size,
        native_size=probe.size,
        is_split_off=stored.is_split_off,
        digest=stored.digest,
        mean=_IMAGENET_MEAN[channels] if statistics is None else statistics.mean,
        std=_IMAGENET_STD[channels] if statistics is None else statistics.std,
        reasons=reasons,
        selection=stored.left_out_counts,
        left_out=stored.left_out,
    )


__all__ = ["ImageDataset", "LARGEST_SMALL_IMAGE", "open_dataset", "open_stored"]
