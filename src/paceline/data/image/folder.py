"""Image folders: PATH/{train,val or test}/CLASS/* or PATH/CLASS/*."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from paceline.data.image.dataset import Probe, StoredImages, in_splits
from paceline.data.image.decode import image_header
from paceline.data.image.listing import EXTENSIONS, Fault, Names, Problems, list_folders
from paceline.data.image.source import FileSource, SampleSource
from paceline.errors import DataError, did_you_mean
from paceline.files import LeftOut, entries_of, is_folder, is_ignored, visible

_HELD_OUT = ("val", "test")
_PROBED = 256


def open_image_folder(
    path: str | Path, *, channels: int | None, validation_fraction: float, fault: Fault | None = None
) -> StoredImages:
    """List an image folder, and look at the heads of a few images.

    Args:
        path: The folder.
        channels: What the files are decoded to, 1 or 3; None for 3 unless all images looked at are greyscale.
        validation_fraction: Share of each class held out where the folder has no split of its own.
        fault: Told of everything that is laid out in another way, if the rest is wanted.

    Raises:
        DataError: If the folder is missing, or is laid out in another way.
    """
    root = _existing_folder(Path(path).expanduser())
    problems, left_out = Problems(), LeftOut()
    train_folder, held_out_folder = _split_folders(root, problems)
    folders = [each for each in (train_folder, held_out_folder) if each is not None]
    listed = list_folders(root, folders, problems, remembered=fault is None)
    train = listed.listings[0]
    if held_out_folder is not None:
        _require_same_classes(train_folder, train.classes, held_out_folder, listed.listings[1].classes, problems)
    problems.tell(fault)
    probe = probe_files(root, train.names)
    channels = channels or (1 if probe.greyscale else 3)
    classes, split = train.classes, ""
    if held_out_folder is not None:
        classes = tuple(sorted({*classes, *listed.listings[1].classes}))
        unread = held_out_folder.name == "val" and (root / "test").is_dir()
        split = f"the folder {held_out_folder.name}/{'; test/ is not read' if unread else ''}"
    for folder in dict.fromkeys([root, *folders]):
        for entry in visible(folder):
            if not is_folder(entry):
                left_out.add("files outside the class folders", os.path.relpath(entry.path, root))
    return in_splits(
        [FileSource(root, each.names, each.labels_among(classes), channels) for each in listed.listings],
        split,
        validation_fraction,
        classes=classes,
        digest=listed.digest,
        listing=listed.how,
        channels=channels,
        probe=probe,
        left_out=left_out.told(),
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
    (listing,) = list_folders(root, [root / "test"], Problems(), remembered=False).listings
    labels = listing.labels_among(classes)
    names = [listing.names[index] for index in np.flatnonzero(labels >= 0).tolist()]
    return FileSource(root, names, labels[labels >= 0], channels) if names else None


def unread_entries(path: str | Path) -> Iterator[str]:
    """Return what lies in an image folder and is not read: ignored names, and files outside the class folders."""
    root = Path(path).expanduser()
    train, held_out = _split_folders(root, Problems())
    splits = [train] if held_out is None else [train, held_out]
    for folder in dict.fromkeys([root, *splits]):
        yield from (entry.path for entry in entries_of(folder) if not is_folder(entry) or is_ignored(entry.name))
    for folder in splits:
        for each in visible(folder):
            if is_folder(each):
                yield from (entry.path for entry in entries_of(Path(each.path)) if is_ignored(entry.name))


def probe_files(root: Path, names: Names) -> Probe:
    """Look at the heads of at most 256 files spread evenly over the folder, which takes milliseconds."""
    chosen = range(0, len(names), -(-len(names) // _PROBED) or 1)
    paths = [os.path.join(root, os.fsdecode(names[index])) for index in chosen]
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
    siblings = [entry.name for entry in visible(parent)]
    raise DataError(
        f"data.path is {str(root)!r}, but {str(parent.absolute())!r} has no {missing.name!r}: "
        f"correct the path.{did_you_mean(missing.name, siblings)}"
    )


def _split_folders(root: Path, problems: Problems) -> tuple[Path, Path | None]:
    """Return the folder of the training classes, and that of the held-out ones (None: to be split off)."""
    names = sorted(entry.name for entry in visible(root) if is_folder(entry))
    held_out = next((name for name in _HELD_OUT if name in names), None)
    if "train" not in names:
        if held_out is not None:
            problems.add(
                "{} has {} but no 'train': put the training images into train/CLASS/, or, if {} is a class, rename it.",
                *map(repr, (str(root), held_out, held_out)),
            )
            return root / held_out, None
        return root, None
    for name in names:
        if name not in ("train", *_HELD_OUT):
            problems.add(
                "{1} has {0} next to 'train', which would not be read: held-out images belong in 'val' or 'test', "
                "classes in 'train'; rename or move the folder.",
                repr(name),
                repr(str(root)),
            )
    return root / "train", None if held_out is None else root / held_out


def _require_same_classes(
    train: Path, first: tuple[str, ...], held_out: Path, second: tuple[str, ...], problems: Problems
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
        problems.add(
            "{}, but {}/ and {}/ must hold the same classes: add or rename the class folders.",
            " and ".join(lacking),
            train.name,
            held_out.name,
        )


__all__ = ["EXTENSIONS", "open_image_folder", "probe_files"]
