"""Image folders: PATH/{train,val or test}/CLASS/* or PATH/CLASS/*.

A slow file listing is cached, keyed by the folder's path. The cache is valid while every class folder is unchanged:
adding, removing or renaming a file changes its folder's times. A file overwritten in place changes only itself, so the
sizes of a few files are checked.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data.disk_cache import Arrays, recall_arrays, remember_arrays, stamp_or_none
from paceline.data.image.dataset import NOT_IMAGES, DatasetRequest, Problems, SkippedFile, StoredImages, file_splits
from paceline.data.image.sets import FILES, IMAGENET
from paceline.data.image.source import EXTENSIONS, FileSource, NameArray, SampleSource
from paceline.data.splits import TEST, TRAIN, VALIDATION, split_folders
from paceline.errors import DataError, data_error, did_you_mean
from paceline.host.machine import cache_folder
from paceline.parsing.files import TOO_FRESH_NS, SkippedItems, has_extension, is_folder, refuse_archive, visible_entries
from paceline.parsing.plain_text import one_form, quoted
from paceline.plugins.dataset_registry import dataset

MIN_CACHED_SECONDS = 0.5  # quicker listings are repeated
_VERSION = 3
_SPOT_CHECKS = 64


@dataclass(frozen=True)
class Listing:
    """The files of one split's class folders.

    Attributes:
        classes: Class names, sorted.
        names: File names relative to the root, sorted by class and name.
        sizes: Their sizes in bytes, int64.
        labels: Class index of each file, int64.
    """

    classes: tuple[str, ...]
    names: NameArray
    sizes: NDArray[np.int64]
    labels: NDArray[np.int64]

    def labels_among(self, classes: Sequence[str]) -> NDArray[np.int64]:
        """Return the labels as indices into other classes; -1 for classes that are not among them."""
        if tuple(classes) == self.classes:
            return self.labels
        numbers = {name: number for number, name in enumerate(classes)}
        spelled = one_form(self.classes, classes)
        return np.array([numbers.get(spelled[name], -1) for name in self.classes], dtype=np.int64)[self.labels]


def list_folders(
    root: Path, folders: Sequence[Path], problems: Problems, *, remembered: bool
) -> tuple[list[Listing], str, str]:
    """List split folders with class folders, below ``root`` or ``root`` itself.

    Args:
        root: Folder to which names are relative.
        folders: Folders to list.
        problems: Collects deviations from the layout.
        remembered: Whether to use a cached listing, and to cache this one if it has no problems.

    Returns:
        The listing of each; SHA-256 over the relative paths and sizes of all files; and the time taken or the cache
        used, for people.
    """
    memory, begin, now = cache_file(root), time.perf_counter(), time.time_ns()
    classes = [sorted(entry.name for entry in visible_entries(folder) if is_folder(entry)) for folder in folders]
    # Recorded before listing, so that concurrent changes are detected.
    paths = [
        path for folder, names in zip(folders, classes, strict=True) for path in (folder, *map(folder.joinpath, names))
    ]
    stamps = list(map(stamp_or_none, paths))
    state = repr([_VERSION, list(map(os.path.abspath, paths)), classes, stamps])
    if remembered and (arrays := recall_arrays(memory)) is not None:
        with suppress(ValueError, LookupError, TypeError, AttributeError):  # written by another version
            cached_listing = _from_cache(arrays, state, root, classes)
            if cached_listing is not None:
                seconds, count = time.perf_counter() - begin, sum(len(each.names) for each in cached_listing[0])
                since = f"from a cached listing, unchanged since ({seconds:.1f} s; {memory})"
                return *cached_listing, f"{count:,} files, {since}"
    wrong_before = problems.count
    hashed = hashlib.sha256()
    listings: list[Listing] = []
    for folder, names in zip(folders, classes, strict=True):
        # A training class may have no held-out images.
        trained = {each.classes[label] for each in listings for label in np.unique(each.labels)}
        listings.append(_list_classes(root, folder, names, hashed, problems, trained))
    digest = hashed.hexdigest()
    seconds = time.perf_counter() - begin
    how = f"{sum(len(each.names) for each in listings):,} files, listed in {seconds:.1f} s"
    is_settled = all(stamp is not None and max(stamp[2:]) < now - TOO_FRESH_NS for stamp in stamps)
    is_clean = remembered and problems.count == wrong_before
    if is_clean and seconds >= MIN_CACHED_SECONDS and is_settled and stamps == list(map(stamp_or_none, paths)):
        arrays = {"state": np.array(state.encode("ascii", "backslashreplace")), "digest": np.array(digest)}
        for index, listing in enumerate(listings):
            arrays[f"joined{index}"] = listing.names.blob
            arrays[f"lengths{index}"] = np.diff(listing.names.ends).astype(np.uint32)
            arrays[f"sizes{index}"] = listing.sizes
            arrays[f"counts{index}"] = np.bincount(listing.labels, minlength=len(listing.classes))
        how += ", and remembered" if remember_arrays(memory, arrays) else ""
    return listings, digest, how


def cache_file(root: Path) -> Path:
    """Return the cache file of a folder's listing."""
    key = hashlib.sha256(os.fsencode(os.path.abspath(root))).hexdigest()[:32]
    return cache_folder() / "folders" / f"{key}.npz"


# ------------------------------------------------------------------------------------------------- listing


def _list_classes(
    root: Path,
    folder: Path,
    classes: Sequence[str],
    hashed: hashlib._Hash,
    problems: Problems,
    may_be_empty: Collection[str],
) -> Listing:
    if not classes:
        problems.add(
            "{} contains no folders, but images are expected as {}/CLASS/*: make one folder per class, or correct "
            f"data.path. {NOT_IMAGES}",
            repr(str(folder)),
            folder.name,
        )
    elif len(classes) == 1 and not problems.allows_one_class:
        problems.add(_ONE_CLASS, repr(str(folder)), repr(classes[0]))
    for name, form in one_form(classes).items():
        if name != form:
            sentence = "{} has the class folders {} and {}, one name in two Unicode forms (NFC and NFD): join them."
            problems.add(sentence, repr(str(folder)), quoted(form), quoted(name))
    spelled = one_form(classes, may_be_empty)
    prefix = os.fsencode(os.path.relpath(folder, root) + os.sep) if folder != root else b""
    names: list[bytes] = []
    sizes: list[int] = []
    counts = []
    for name in classes:
        try:
            files = _list_images(folder / name, problems)
        except DataError as error:
            problems.add("{1}", repr(str(folder / name)), str(error))
            files = []
        else:
            if not files and spelled[name] not in may_be_empty:
                problems.bad.append(SkippedFile("empty_folders", str(folder / name)))
        lead = prefix + os.fsencode(name + os.sep)
        names += [lead + os.fsencode(file) for file, _ in files]
        sizes += [size for _, size in files]
        counts.append(len(files))
    hashed.update(b"".join(b"%s\0%d\n" % file for file in zip(names, sizes, strict=True)))
    return Listing(
        tuple(classes),
        NameArray.of(names),
        np.array(sizes, dtype=np.int64),
        np.repeat(np.arange(len(classes), dtype=np.int64), counts),
    )


def _list_images(folder: Path, problems: Problems) -> list[tuple[str, int]]:
    """Return name and size of every image in a class folder, sorted by name; raises DataError if unlistable."""
    files = []
    entries = sorted(visible_entries(folder), key=attrgetter("name"), reverse=True)
    while entries:
        entry = entries.pop()  # freed, with the status that it keeps, before the next
        size: int | None = 0  # broken or cyclic link; reported as a broken image when it is read
        with suppress(OSError):
            status = entry.stat()
            size = status.st_size if stat.S_ISREG(status.st_mode) else None
        if is_folder(entry):
            problems.bad.append(SkippedFile("nested_folders", entry.path))
        elif size is None:  # named pipe, socket or device: reading it may block forever
            problems.bad.append(SkippedFile("special_files", entry.path))
        elif not has_extension(entry.name, EXTENSIONS):
            kind = "heic_images" if has_extension(entry.name, ("heic", "heif")) else "other_files"
            problems.bad.append(SkippedFile(kind, entry.path))
        else:
            files.append((entry.name, size))
    return files


# ---------------------------------------------------------------------------------------------- remembering


def _from_cache(
    arrays: Arrays, state: str, root: Path, classes: Sequence[Sequence[str]]
) -> tuple[list[Listing], str] | None:
    """Return the cached listing and its digest; None if the state differs, or some files have another size."""
    if arrays["state"].item() != state.encode("ascii", "backslashreplace"):
        return None
    listings = []
    for index, names in enumerate(classes):
        ends = np.concatenate([[0], np.cumsum(arrays[f"lengths{index}"].astype(np.int64))]).astype(np.int64)
        labels = np.repeat(np.arange(len(names), dtype=np.int64), arrays[f"counts{index}"])
        listings.append(
            Listing(tuple(names), NameArray(arrays[f"joined{index}"], ends), arrays[f"sizes{index}"], labels)
        )
    for listing in listings:
        for index in _drawn().permutation(len(listing.names))[:_SPOT_CHECKS].tolist():
            size = 0
            with suppress(OSError):
                size = os.stat(os.path.join(os.fsencode(root), listing.names[index])).st_size
            if size != listing.sizes[index]:
                return None
    return listings, str(arrays["digest"].item())


def _drawn() -> np.random.Generator:
    """Return a generator that differs each time, except between the ranks of a launch: they must find the same."""
    port = os.environ.get("MASTER_PORT", "")
    return np.random.default_rng([int(port), int(time.time() // 3600)] if port.isdecimal() else None)


_ONE_CLASS = (
    "{} has one class folder, {}, but a classifier needs at least two: add the other classes, or point data.path at "
    "the folder that holds them all."
)

_DEEPER = (
    "{} holds no class folders: there are only folders in its folders {}. Point data.path at the folder of the class "
    "folders; if these are splits, name them train and val."
)


@dataset("image_folder", keys=FILES, size=IMAGENET)
def open_image_folder(request: DatasetRequest) -> StoredImages:
    """List a folder of class folders, and probe the headers of a few images.

    Raises:
        DataError: If the folder is missing, or has another layout.
    """
    root, problems, left_out = _existing_folder(request.path), request.problems, SkippedItems()
    problems.allows_one_class |= request.data.score_all
    train_folder, held_out_folder, unread = _split_folders(root, problems, score_all=request.data.score_all)
    folders = [each for each in (train_folder, held_out_folder) if each is not None]
    listings, digest, how = list_folders(root, folders, problems, remembered=not request.tolerant)
    _require_images_in_classes(train_folder, listings[0], problems)
    split = ""
    spelled = one_form(listings[-1].classes, listings[0].classes)
    if held_out_folder is not None:
        first = {listings[0].classes[label] for label in np.unique(listings[0].labels)}
        second = {spelled[listings[1].classes[label]] for label in np.unique(listings[1].labels)}
        second |= first & set(spelled.values())  # a training class may have no held-out images
        _require_same_classes(train_folder, first, held_out_folder, second, problems)
        split = f"the folder {held_out_folder.name}/{f'; {unread.name}/ is not read' if unread else ''}"
    elif unread:
        split = f"{unread.name}/ has no classes and is not read"
    elif request.data.score_all and train_folder != root:
        split = f"the folder {train_folder.name}/"
    classes = tuple(sorted({*listings[0].classes, *spelled.values()}))
    if request.data.on_bad == "skip" and not request.tolerant:
        used = np.unique(np.concatenate([each.labels_among(classes) for each in listings]))
        kept = tuple(classes[label] for label in used.tolist())
        if len(kept) < (1 if problems.allows_one_class else 2) <= len(classes):
            problems.add(_ONE_CLASS, repr(str(root)), ", ".join(map(repr, kept)) or "none with an image")
        classes = kept
    for name in unread_entries(root):
        left_out.add("files outside the class folders", os.path.relpath(name, root))
    sources = [FileSource(root, each.names, each.labels_among(classes), 3) for each in listings]
    return file_splits(
        request, sources, split, classes=classes, digest=digest, listing=how, left_out=left_out.summaries()
    )


def open_unread_test(path: str | Path, classes: Sequence[str], channels: int) -> SampleSource | None:
    """Return the images of a test split in a folder whose runs read a validation split; None if there are none.

    Args:
        path: The folder.
        classes: The run's classes; images of other classes and other files are left out.
        channels: Channels to decode to, 1 or 3.
    """
    root = Path(path).expanduser()
    *_, test = _split_folders(root, Problems(), score_all=False)
    if test is None:
        return None
    ((listing,), *_) = list_folders(root, [test], Problems(), remembered=False)
    labels = listing.labels_among(classes)
    names = [listing.names[index] for index in np.flatnonzero(labels >= 0).tolist()]
    return FileSource(root, names, labels[labels >= 0], channels) if names else None


def unread_entries(path: str | Path) -> Iterator[str]:
    """Return the entries outside the class folders, which are not read."""
    root = Path(path).expanduser()
    train, held_out, test = _split_folders(root, Problems(), score_all=False)
    for folder in dict.fromkeys([root, train, held_out or test]):  # a test split is the last if it has no classes
        if folder is not None:
            is_unread = folder == test and not held_out
            yield from (entry.path for entry in visible_entries(folder) if is_unread or not is_folder(entry))


def _existing_folder(root: Path) -> Path:
    if root.is_dir():
        return root
    refuse_archive(root)
    if root.exists():
        raise DataError(f"data.path is {str(root)!r}, which is a file; it must be the folder that holds the images.")
    parent, missing = root.parent, root
    while not parent.is_dir():
        parent, missing = parent.parent, parent
    siblings = [entry.name for entry in visible_entries(parent)]
    raise DataError(
        f"data.path is {str(root)!r}, but {str(parent.absolute())!r} has no {missing.name!r}: "
        f"correct the path.{did_you_mean(missing.name, siblings)}"
    )


def _split_folders(root: Path, problems: Problems, *, score_all: bool) -> tuple[Path, Path | None, Path | None]:
    """Return the folders of the training classes, of the held-out ones (None: split off), and an unread test split.

    A test split without classes is not read.
    """
    splits = split_folders(root)
    names = sorted(entry.name for entry in visible_entries(root) if is_folder(entry))
    train, held_out = splits.get(TRAIN), splits.get(VALIDATION, splits.get(TEST))
    if train is None and held_out is not None and not score_all:
        if names != [held_out] and not any(map(is_folder, visible_entries(root / held_out))):
            raise data_error(
                root,
                f"has {held_out!r}, which holds no class folders, next to folders: if those are the classes, move "
                f"{held_out!r} out of {root.name!r}; `paceline predict` labels its images.",
            )
        problems.add(
            "{} has {} but no 'train': put the training images into train/CLASS/, or, if {} is a class, rename it.",
            *map(repr, (str(root), held_out, held_out)),
        )
    # Without a folder to train on, what is left may be just that.
    if train is not None or (score_all and held_out is not None):
        read = (held_out,) if train is None else splits.values()
        problems.bad += [SkippedFile("unread_folders", str(root / name)) for name in names if name not in read]
    if train is None:
        return root / (held_out or ""), None, None
    unread = root / splits[TEST] if {VALIDATION, TEST} <= splits.keys() else None
    if held_out is not None and held_out == splits.get(TEST) and not score_all:
        # As in a competition: images alone, or in one folder that is not a class.
        trained, tested = ({e.name for e in visible_entries(root / each) if is_folder(e)} for each in (train, held_out))
        if len(tested) <= 1 < len(trained) and set(one_form(tested, trained).values()).isdisjoint(trained):
            return root / train, None, root / held_out
    return root / train, None if held_out is None else root / held_out, unread


def _require_images_in_classes(folder: Path, listing: Listing, problems: Problems) -> None:
    """Add a problem, and no others, if all class folders hold folders instead of images: they are not those meant."""
    nested = {os.path.dirname(each.path) for each in problems.bad if each.kind == "nested_folders"}
    if listing.classes and not len(listing.names) and nested >= {str(folder / name) for name in listing.classes}:
        problems.bad = [each for each in problems.bad if each.kind not in ("nested_folders", "empty_folders")]
        problems.add(_DEEPER, repr(str(folder)), ", ".join(map(repr, listing.classes[:3])))


def _require_same_classes(train: Path, first: set[str], held_out: Path, second: set[str], problems: Problems) -> None:
    missing_classes = [
        f"{str(folder)!r} lacks the classes {', '.join(map(quoted, missing))}"
        for folder, missing in ((held_out, sorted(first - second)), (train, sorted(second - first)))
        if missing
    ]
    if missing_classes:
        problems.add(
            "{}, but {}/ and {}/ must hold the same classes: add or rename the class folders.",
            " and ".join(missing_classes),
            train.name,
            held_out.name,
        )
