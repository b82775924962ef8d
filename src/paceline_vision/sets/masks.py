"""A folder of images and label maps: PATH/{train,val}/images/NAME.jpg and PATH/{train,val}/masks/NAME.png.

A mask is a palette, 8-bit grey or black-and-white PNG whose values are class indices, or listed in `data.mask_values`;
255 is otherwise ignored. All masks are read once when the folder is opened; their values are cached until a mask
changes.
"""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pillow
from PIL import UnidentifiedImageError

from paceline.data.disk_cache import cached, stamp_or_none
from paceline.data.image.dataset import stratified_split
from paceline.data.image.decode import BrokenImageError, decode, read_file, upright_size
from paceline.data.image.pillow_pixels import LARGEST_PIXELS
from paceline.data.image.source import EXTENSIONS, Image
from paceline.data.splits import SPLIT_NAMES, TEST, TRAIN, split_folders
from paceline.errors import DataError, data_error, did_you_mean
from paceline.parsing.files import SkippedItems, has_extension, is_folder, list_files, visible_entries
from paceline.parsing.plain_text import one_form
from paceline.plugins.dataset_registry import Place, dataset
from paceline.recipe.data import Data
from paceline_vision.detection.annotations import existing_folder
from paceline_vision.inspection import WITH_LABEL_MAPS
from paceline_vision.segmentation.dataset import IGNORED, LabelMap, MaskDataset

_INDICES = ("L", "P", "P;1", "P;2", "P;4")  # Pillow's pixel modes that keep the stored values
_BLACK_AND_WHITE = "1"  # read as 0 and 255
_UNLISTED = 254
_READERS = 8
_SHOWN = 5  # maximum number of faults in a message
_FORMAT = "a mask must be a palette or 8-bit grey PNG whose values are class indices"
# Common names of the other pixel types of a PNG, by Pillow's modes.
_PIXELS = {
    "L": "grey of 2 or 4 bits",
    "LA": "grey and transparency",
    "RGB": "colours (RGB)",
    "RGBA": "colours and transparency (RGBA)",
    "I": "grey of 16 bits",
    "I;16": "grey of 16 bits",
}


@dataclass(frozen=True)
class FolderSource:
    """The images of one split with their masks.

    Attributes:
        images: Paths of the images.
        masks: Paths of their masks.
        classes: Number of classes.
        values: ``data.mask_values``.
    """

    images: tuple[str, ...]
    masks: tuple[str, ...]
    classes: int
    values: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def read(self, sample: int) -> tuple[Image, LabelMap]:
        """Decode image and mask, the image rotated by EXIF; raises BrokenImageError."""
        image, stored = decode(self.images[sample], 3), read_mask(self.masks[sample])
        # The files may have changed since the check.
        labels = _classes_of(self.values)[stored]
        highest = int(labels[labels != IGNORED].max(initial=0))
        if fault := _fault(self.images[sample], image.shape[:2], labels.shape, highest, self.classes):
            raise BrokenImageError(self.masks[sample], fault)
        return image, labels

    def path(self, sample: int) -> str:
        """Return the image's path."""
        return self.images[sample]

    def chosen(self, samples: Sequence[int]) -> FolderSource:
        """Return a source of some of the images."""
        images, masks = (tuple(each[sample] for sample in samples) for each in (self.images, self.masks))
        return FolderSource(images, masks, self.classes, self.values)


def _classes_of(values: tuple[int, ...] | None) -> LabelMap:
    """Return the class of each value of a mask, uint8 [256]; 254, which no class has, of values that are not listed."""
    if values is None:
        return np.arange(256, dtype=np.uint8)
    classes = np.full(256, _UNLISTED, dtype=np.uint8)
    classes[IGNORED] = IGNORED
    classes[list(values)] = np.arange(len(values))
    return classes


def read_mask(path: str) -> LabelMap:
    """Decode a mask to its stored values.

    Raises:
        BrokenImageError: If it cannot be read, or has more than one value per pixel.
    """
    content = read_file(path)
    try:
        with Pillow.open(io.BytesIO(content), formats=("PNG",)) as mask:
            if mask.width * mask.height > LARGEST_PIXELS:
                raise BrokenImageError(path, f"{mask.width}x{mask.height} pixels; at most {LARGEST_PIXELS:,} are read")
            if mask.tile[0][3] == _BLACK_AND_WHITE:
                return np.asarray(mask.convert("L"))
            if mask.tile[0][3] not in _INDICES:
                raise BrokenImageError(path, f"its pixels are {_PIXELS.get(mask.mode, mask.mode)}, but {_FORMAT}")
            return np.asarray(mask)
    except (OSError, SyntaxError, ValueError, IndexError, Pillow.DecompressionBombError) as error:
        why = "" if isinstance(error, UnidentifiedImageError) else f" ({error})"  # which contains an address
        raise BrokenImageError(path, f"{_FORMAT}{why}") from error


def _split_folders(root: Path, *, score_all: bool) -> list[Path]:
    """Return the folders of the training and the held-out images, or that of the held-out ones alone, to score them."""
    splits = split_folders(root)
    folders = [root / splits[each] for each in SPLIT_NAMES if each in splits]
    folders = [each for each in folders if (each / "images").is_dir()][:2]
    if len(folders) > 1 and folders[1].name == splits.get(TEST) and not (folders[1] / "masks").is_dir():
        folders.pop()  # as in a competition
    if not folders or folders[0].name == splits.get(TRAIN):
        return folders
    if not score_all:
        raise data_error(root, f"has {folders[0].name}/images but no train/images: add it.")
    return folders[:1]


def _has_masks(place: Place) -> bool:
    """Whether a folder, or a split in it, has the folders images and masks."""
    folders = [place.path / each for each in ("", *split_folders(place.path).values())] if place.is_folder else []
    return any((each / "images").is_dir() and (each / "masks").is_dir() for each in folders)


@dataset(
    "masks",
    kind="masks",
    sniff=_has_masks,
    keys=("path", "mask_values", "validation_fraction"),
    pictures=WITH_LABEL_MAPS,
)
def open_masks(data: Data) -> MaskDataset:
    """Open the folder given in a recipe's `data` section.

    Raises:
        DataError: If its layout differs, or masks do not match their images or classes; names the files.
    """
    root, left_out = existing_folder(data, "images/ and masks/"), SkippedItems()
    folders = _split_folders(root, score_all=data.score_all)
    found = [_paired(folder, left_out) for folder in (folders or [root])]
    _report_unread(root, folders, left_out)
    images, masks = (tuple(path for pairs in found for path in pairs[side]) for side in (0, 1))
    stored, sizes, unreadable = _contents(masks)
    present = _classes_held(stored, data.mask_values, unreadable)
    classes_held = present[:, :IGNORED]
    highest = np.where(classes_held.any(axis=1), IGNORED - 1 - classes_held[:, ::-1].argmax(axis=1), 0)
    names = _class_names(root, highest, data.mask_values)
    faults = {}
    for at, image in enumerate(images):
        shape = (int(sizes[at, 0]), int(sizes[at, 1]))
        if fault := unreadable.get(at) or _fault(image, upright_size(image), shape, int(highest[at]), len(names)):
            faults[at] = f"{masks[at]!r}: {fault}"
            left_out.add("images whose mask does not fit", os.path.relpath(image, root), faults[at])
    if faults and data.on_bad == "refuse":
        fault_text = "; ".join(list(faults.values())[:_SHOWN])
        more = f"{len(faults):,} masks do not fit, first {_SHOWN}: " if len(faults) > _SHOWN else ""
        raise DataError(f"{more}{fault_text}. Correct or remove them, or leave them out with data.on_bad=skip.")
    source = FolderSource(images, masks, len(names), data.mask_values)
    count = len(found[0][0])
    kept = [[at for at in part if at not in faults] for part in (range(count), range(count, len(images)))]
    if len(folders) > 1:
        split = f"the folder {folders[1].name}/"
    else:
        ids = np.array(kept[0], dtype=np.int64)
        parts = stratified_split(np.zeros(len(ids), dtype=np.int64), data.validation_fraction)
        kept = [ids[part].tolist() for part in parts]
        split = f"{100 * data.validation_fraction:.4g}% of the images, always the same (data.validation_fraction)"
        split = f"the folder {folders[0].name}/" if data.score_all and folders else split
    if not kept[0]:
        raise data_error(root, "has no image with a mask to train on: put NAME.png into masks/ for each image.")
    missing = [name for number, name in enumerate(names) if not present[kept[0], number].any()]
    if len(names) - len(missing) < 2:
        raise _too_few_classes(root, is_ignored=bool(present[:, IGNORED].any()) and data.mask_values is None)
    empty = f"{len(missing)} of {len(names)} classes have no pixel in any training mask: {', '.join(missing[:_SHOWN])}"
    digest = hashlib.sha256(repr(names if data.mask_values is None else (names, data.mask_values)).encode())
    for at in sorted(at for part in kept for at in part):
        for path in (images[at], masks[at]):
            digest.update(os.fsencode(f"{os.path.relpath(path, root)}\0{os.stat(path).st_size}\n"))
    return MaskDataset(
        name="masks",
        train=source.chosen(kept[0]),
        validation=source.chosen(kept[1]),
        classes=names,
        digest=digest.hexdigest(),
        files=tuple(path for part in kept for at in part for path in (images[at], masks[at])),
        split=split,
        is_split_off=len(folders) < 2,
        implausible=_implausible(root, masks, present, names, [at for part in kept for at in part]),
        left_out=(*left_out.summaries(), *([empty] if missing else [])),
    )


def _paired(folder: Path, left_out: SkippedItems) -> tuple[list[str], list[str]]:
    """Return the images and masks of one split with the same path up to the extension; others are left out."""
    by_stem: dict[str, dict[str, str]] = {"images": {}, "masks": {}}
    for kind, endings in (("images", EXTENSIONS), ("masks", ("png",))):
        if not (folder / kind).is_dir():
            near = did_you_mean(kind, [each.name for each in visible_entries(folder)])
            raise data_error(folder, f"has no folder {kind}/, which task=segmentation reads.{near}")
        for name in list_files(folder / kind, left_out):
            stem, path = os.path.splitext(name)[0], os.path.join(folder, kind, name)
            if not has_extension(name, endings):
                left_out.add(f"files in {kind}/ with other extensions", path)
            elif stem in by_stem[kind]:
                left_out.add(f"{kind} with the same name as another one", path)
            else:
                by_stem[kind][stem] = path
    images, masks = by_stem["images"], by_stem["masks"]
    for reason, paths, others in (("images without a mask", images, masks), ("masks without an image", masks, images)):
        for stem in sorted(paths.keys() - others.keys()):
            left_out.add(reason, paths[stem])
    both = sorted(images.keys() & masks.keys())
    return [images[stem] for stem in both], [masks[stem] for stem in both]


def _report_unread(root: Path, folders: Sequence[Path], left_out: SkippedItems) -> None:
    """Report other files and folders in the folder of images and masks."""
    read = {"classes.txt", *(each.name for each in folders or [root / "images", root / "masks"])}
    for folder, known in [(root, read), *((each, {"images", "masks"}) for each in folders)]:
        for entry in visible_entries(folder):
            if entry.name not in known:
                kind = "folders" if is_folder(entry) else "files"
                left_out.add(f"{kind} that are not read", os.path.relpath(entry.path, root))


def _contents(masks: Sequence[str]) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
    """Read all masks; return their values, bool [N, 256], their sizes, int64 [N, 2], and reasons for invalid ones."""

    def look(path: str) -> tuple[list[int], int, int] | str:
        try:
            labels = read_mask(path)
        except BrokenImageError as error:
            return error.reason
        return np.flatnonzero(np.bincount(labels.ravel())).tolist(), labels.shape[0], labels.shape[1]

    def are_masks(looks: list[Any]) -> bool:
        return not any(isinstance(each, str) for each in looks)

    now = time.time_ns()
    with ThreadPoolExecutor(_READERS) as pool:
        stamps = list(pool.map(stamp_or_none, masks))
        looks = cached("masks", masks, stamps, lambda: list(pool.map(look, masks)), now=now, is_kept=are_masks)
    present, sizes = np.zeros((len(masks), 256), dtype=bool), np.zeros((len(masks), 2), dtype=np.int64)
    reasons = {}
    for at, each in enumerate(looks):
        if isinstance(each, str):
            reasons[at] = each
        else:
            present[at, each[0]], sizes[at] = True, each[1:]
    return present, sizes, reasons


def _implausible(
    root: Path, masks: Sequence[str], present: np.ndarray, names: Sequence[str], used: Sequence[int]
) -> tuple[str, ...]:
    """Return a sentence for each kind of mask that holds next to nothing, with the first one."""
    at = np.unique(np.array(used, dtype=np.int64))
    others = present[at, 1:IGNORED].any(axis=1)
    kinds = {
        f"hold the first class alone, {names[0]!r}": present[at, 0] & ~others,
        f"hold {IGNORED} alone, so that no pixel counts": ~present[at, :IGNORED].any(axis=1),
    }
    return tuple(
        f"{int(which.sum()):,} of {len(at):,} masks {kind}, first {os.path.relpath(masks[at[which.argmax()]], root)!r}"
        for kind, which in kinds.items()
        if which.any()
    )


def _too_few_classes(root: Path, *, is_ignored: bool) -> DataError:
    """Return the error for training masks of one class, and maybe of pixels with the value for ignored ones."""
    why = f", and {IGNORED}, which means 'ignored': data.mask_values=[0, {IGNORED}] makes {IGNORED} a class"
    return DataError(
        f"the training masks of {str(root)!r} hold fewer than two classes{why * is_ignored}.",
        key="data.mask_values" if is_ignored else None,
        value=(0, IGNORED) if is_ignored else None,
        path=root,
    )


def _classes_held(stored: np.ndarray, values: tuple[int, ...] | None, unreadable: dict[int, str]) -> np.ndarray:
    """Return which classes masks hold, bool [N, 256], by their stored values; masks with unlisted ones are invalid."""
    present = np.zeros_like(stored)
    for value, number in enumerate(_classes_of(values)):
        present[:, number] |= stored[:, value]
    for at in () if values is None else np.flatnonzero(present[:, _UNLISTED]).tolist():
        unlisted = set(np.flatnonzero(stored[at]).tolist()) - {*(values or ()), IGNORED}
        unreadable[at] = f"it has the value {min(unlisted)}, which data.mask_values does not list"
    return present


def _fault(image: str, size: tuple[int, ...] | None, mask: tuple[int, ...], highest: int, classes: int) -> str | None:
    """Explain why a mask does not match its image or the classes; None if it does."""
    if size is None:
        return f"its image {image!r} cannot be read"
    if size != mask:
        return f"it has {mask[1]}x{mask[0]} pixels, and its image {size[1]}x{size[0]}; both must have the same"
    if highest >= classes:
        return (
            f"it has the value {highest}, but there are {classes} classes: values are 0 to {classes - 1}, or {IGNORED}"
        )
    return None


def _class_names(root: Path, highest: np.ndarray, values: tuple[int, ...] | None) -> tuple[str, ...]:
    """Return the lines of classes.txt; without it, class numbers up to the highest one in the masks."""
    file = root / "classes.txt"
    if not file.exists():
        count = int(highest.max(initial=0)) + 1 if values is None else len(values)
        return tuple(str(number) for number in range(count))
    try:
        names = tuple(file.read_text(encoding="utf-8-sig").rstrip().splitlines())
    except (OSError, ValueError) as error:
        raise data_error(file, f"cannot be read as class names, one a line ({error}); correct it.") from error
    names = tuple(name.strip() for name in names)
    if not 2 <= len(names) <= IGNORED or len(set(one_form(names).values())) < len(names) or "" in names:
        raise data_error(
            file,
            f"has {len(names)} classes, {len(set(names) - {''})} of them different; there must be 2 to {IGNORED}, "
            "with different names.",
        )
    return names
