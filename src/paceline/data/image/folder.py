"""Which images does a folder hold, and of which class? PATH/{train,val or test}/CLASS/* or PATH/CLASS/*."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.decode import image_header
from paceline.data.image.source import FileSource, SampleSource, SubsetSource
from paceline.data.image.splits import split_off, stratified_split
from paceline.errors import DataError, did_you_mean

EXTENSIONS = ("bmp", "gif", "jpeg", "jpg", "png", "ppm", "tif", "tiff", "webp")
_HELD_OUT = ("val", "test")
_PROBED = 256

Fault = Callable[[str], None]
"""Told in one sentence what is wrong with a folder's layout; if it returns, that part of the folder is left out."""


def refuse(message: str) -> None:
    """Take a folder as it should be, or not at all: what a run does.

    Raises:
        DataError: Always.
    """
    raise DataError(message)


@dataclass(frozen=True)
class Probe:
    """What the heads of some of a folder's files say.

    Attributes:
        count: Files looked at.
        size: Height and width if all of these have the same, else None.
        greyscale: Whether all of these are.
    """

    count: int
    size: tuple[int, int] | None
    greyscale: bool


@dataclass(frozen=True)
class ImageFolder:
    """An image folder, listed.

    Attributes:
        train: Training images, sorted by class and name.
        validation: Held-out images.
        classes: Class names, sorted; a label is an index into them.
        digest: SHA-256 over the relative paths and sizes of all files.
        split: Where the held-out images come from, for people.
        is_split_off: Whether they were split off the training images.
        channels: What the files are decoded to: 1 or 3.
        probe: What some of the training images look like.
    """

    train: SampleSource
    validation: SampleSource
    classes: tuple[str, ...]
    digest: str
    split: str
    is_split_off: bool
    channels: int
    probe: Probe


@dataclass(frozen=True)
class _Listing:
    """The files of one folder of class folders, as names relative to the root."""

    classes: tuple[str, ...]
    names: list[bytes]
    sizes: list[int]
    labels: NDArray[np.int64]

    def labels_among(self, classes: Sequence[str]) -> NDArray[np.int64]:
        """The labels as indices into other classes, of which this folder's are a part."""
        if tuple(classes) == self.classes:
            return self.labels
        numbers = {name: number for number, name in enumerate(classes)}
        return np.array([numbers[name] for name in self.classes], dtype=np.int64)[self.labels]


def open_image_folder(
    path: str | Path, *, channels: int | None, validation_fraction: float, fault: Fault = refuse
) -> ImageFolder:
    """List an image folder, and look at the heads of a few images.

    Args:
        path: The folder.
        channels: What the files are decoded to, 1 or 3; None for 3 unless all images looked at are greyscale.
        validation_fraction: Share of each class held out where the folder has no split of its own.
        fault: Told of everything that is laid out in another way; raises unless the rest is wanted.

    Raises:
        DataError: If the folder is missing, or is laid out in another way.
    """
    root = _existing_folder(Path(path).expanduser())
    train_folder, held_out_folder = _split_folders(root, fault)
    train = _list_classes(root, train_folder, fault)
    probe = _probe(root, train.names)
    channels = channels or (1 if probe.greyscale else 3)
    sources: tuple[SampleSource, SampleSource]
    classes = train.classes
    if held_out_folder is None:
        source = FileSource(root, train.names, train.labels, channels)
        train_ids, held_out_ids = stratified_split(train.labels, validation_fraction)
        sources = SubsetSource(source, train_ids), SubsetSource(source, held_out_ids)
        digest = _digest(train)
        split = split_off(validation_fraction)
    else:
        held_out = _list_classes(root, held_out_folder, fault)
        _require_same_classes(train_folder, train.classes, held_out_folder, held_out.classes, fault)
        classes = tuple(sorted({*train.classes, *held_out.classes}))
        sources = (
            FileSource(root, train.names, train.labels_among(classes), channels),
            FileSource(root, held_out.names, held_out.labels_among(classes), channels),
        )
        digest = _digest(train, held_out)
        unread = held_out_folder.name == "val" and (root / "test").is_dir()
        split = f"the folder {held_out_folder.name}/{'; test/ is not read' if unread else ''}"
    return ImageFolder(
        train=sources[0],
        validation=sources[1],
        classes=classes,
        digest=digest,
        split=split,
        is_split_off=held_out_folder is None,
        channels=channels,
        probe=probe,
    )


def open_unread_test(path: str | Path, classes: Sequence[str], channels: int) -> SampleSource | None:
    """The images of ``test/`` in a folder of which a run reads ``val/`` instead; None if there are none.

    Args:
        path: The folder.
        classes: What a run knows; images of other classes are left out, and so is what is no image.
        channels: What the files are decoded to, 1 or 3.
    """
    root = Path(path).expanduser()
    if not all((root / name).is_dir() for name in ("train", *_HELD_OUT)):
        return None
    listing = _list_classes(root, root / "test", lambda _: None)
    numbers = {name: number for number, name in enumerate(classes)}
    labels = np.array([numbers.get(name, -1) for name in listing.classes], dtype=np.int64)[listing.labels]
    names = [name for name, label in zip(listing.names, labels, strict=True) if label >= 0]
    return FileSource(root, names, labels[labels >= 0], channels) if names else None


def unread_entries(path: str | Path) -> Iterator[str]:
    """What lies in an image folder and is read by nobody: hidden entries, and files beside class folders."""
    root = Path(path).expanduser()
    train, held_out = _split_folders(root, lambda _: None)
    splits = [train] if held_out is None else [train, held_out]
    for folder in dict.fromkeys([root, *splits]):
        yield from (entry.path for entry in _entries(folder) if not entry.is_dir() or _is_hidden(entry))
    for folder in splits:
        for each in _visible(folder):
            if each.is_dir():
                yield from (entry.path for entry in _entries(Path(each.path)) if _is_hidden(entry))


def _probe(root: Path, names: list[bytes]) -> Probe:
    """Look at the heads of at most 256 files spread evenly over the folder, which takes milliseconds."""
    paths = [os.path.join(root, os.fsdecode(name)) for name in names[:: -(-len(names) // _PROBED) or 1]]
    heads = [head for head in map(image_header, paths) if head is not None]
    sizes = {size for size, _ in heads}
    return Probe(
        count=len(heads),
        size=sizes.pop() if len(sizes) == 1 else None,
        greyscale=bool(heads) and all(grey for _, grey in heads),
    )


def _existing_folder(root: Path) -> Path:
    if root.is_dir():
        return root
    if root.exists():
        raise DataError(f"data.path is {str(root)!r}, which is a file; it must be the folder that holds the images.")
    parent, missing = root.parent, root
    while not parent.is_dir():
        parent, missing = parent.parent, parent
    siblings = [entry.name for entry in _visible(parent)]
    raise DataError(
        f"data.path is {str(root)!r}, but {str(parent.absolute())!r} has no {missing.name!r}: "
        f"correct the path.{did_you_mean(missing.name, siblings)}"
    )


def _split_folders(root: Path, fault: Fault) -> tuple[Path, Path | None]:
    """Return the folder of the training classes, and that of the held-out ones (None: to be split off)."""
    names = sorted(entry.name for entry in _visible(root) if entry.is_dir())
    held_out = next((name for name in _HELD_OUT if name in names), None)
    if "train" not in names:
        if held_out is not None:
            fault(
                f"{str(root)!r} has {held_out!r} but no 'train': put the training images into train/CLASS/, "
                f"or, if {held_out!r} is a class, rename it."
            )
            return root / held_out, None
        return root, None
    for name in names:
        if name not in ("train", *_HELD_OUT):
            fault(
                f"{str(root)!r} has {name!r} beside 'train', which would not be read: held-out images "
                "belong in 'val' or 'test', classes in 'train'; rename or move the folder."
            )
    return root / "train", None if held_out is None else root / held_out


def _list_classes(root: Path, folder: Path, fault: Fault) -> _Listing:
    classes = sorted(entry.name for entry in _visible(folder) if entry.is_dir())
    if not classes:
        fault(
            f"{str(folder)!r} has no folders in it, but images are expected as {folder.name}/CLASS/*: make "
            "one folder per class, or correct data.path."
        )
    if len(classes) == 1:
        fault(
            f"{str(folder)!r} has one class folder, {classes[0]!r}, but a classifier needs at least two: add "
            "the other classes, or point data.path at the folder that holds them all."
        )
    prefix = os.fsencode(os.path.relpath(folder, root) + os.sep) if folder != root else b""
    names: list[bytes] = []
    sizes: list[int] = []
    counts = []
    for name in classes:
        files = _list_images(folder / name, fault)
        lead = prefix + os.fsencode(name + os.sep)
        names += [lead + os.fsencode(file) for file, _ in files]
        sizes += [size for _, size in files]
        counts.append(len(files))
    return _Listing(tuple(classes), names, sizes, np.repeat(np.arange(len(classes), dtype=np.int64), counts))


def _list_images(folder: Path, fault: Fault) -> list[tuple[str, int]]:
    """Return name and size of every file of a class folder, sorted by name."""
    files = []
    try:
        entries = _visible(folder)
    except DataError as error:
        fault(str(error))
        return []
    for entry in entries:
        if entry.is_dir():
            fault(
                f"{entry.path!r} is a folder inside a class folder, where only images are read: move its "
                "images up into the class folder, or the folder away."
            )
        elif entry.name.rpartition(".")[2].lower() not in EXTENSIONS:
            fault(
                f"{entry.path!r} is not an image by its extension (read are {', '.join(EXTENSIONS)}): "
                "remove or convert it."
            )
        elif (size := _size(entry)) is None:
            fault(f"{entry.path!r} is neither a file nor a link to one, and reading it may wait for ever: remove it.")
        else:
            files.append((entry.name, size))
    if not entries:
        fault(f"The class folder {str(folder)!r} is empty: put its images there, or remove the folder.")
    files.sort()
    return files


def _size(entry: os.DirEntry[str]) -> int | None:
    """The size of a file in bytes; None for a named pipe, a socket or a device."""
    try:
        found = entry.stat()
    except OSError:  # a link to nowhere or to itself; reported as a broken image when it is read
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    return [entry for entry in _entries(folder) if not _is_hidden(entry)]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except PermissionError as error:
        raise DataError(
            f"{str(folder)!r} cannot be listed ({error.strerror}): give the one who trains the right to read it "
            "(chmod a+rx), or move it away."
        ) from None


def _is_hidden(entry: os.DirEntry[str]) -> bool:
    return entry.name.startswith(".")


def _require_same_classes(
    train: Path, first: tuple[str, ...], held_out: Path, second: tuple[str, ...], fault: Fault
) -> None:
    lacking = [
        f"{str(folder)!r} lacks the classes {', '.join(missing)}"
        for folder, missing in (
            (held_out, sorted(set(first) - set(second))),
            (train, sorted(set(second) - set(first))),
        )
        if missing
    ]
    if lacking:
        fault(
            f"{' and '.join(lacking)}, but {train.name}/ and {held_out.name}/ must hold the same classes: add or "
            "rename the class folders."
        )


def _digest(*listings: _Listing) -> str:
    digest = hashlib.sha256()
    for listing in listings:
        lines = (b"%s\0%d\n" % line for line in zip(listing.names, listing.sizes, strict=True))
        digest.update(b"".join(lines))
    return digest.hexdigest()
