"""COCO annotations, parsed from JSON into arrays; no code is run, and malformed entries are reported.

The format is COCO's (Lin et al. 2014): `images`, `categories` and `annotations`, whose boxes are left, top, width and
height, and whose masks are polygons or run lengths, as lists or compressed strings.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.decode import decode
from paceline.data.image.source import Image
from paceline.data.splits import TEST, TRAIN, UNREAD_SPLITS, VALIDATION, split_folders, split_of
from paceline.errors import DataError
from paceline.parsing.files import SkippedItems, list_files, refuse_archive, refuse_special_inputs
from paceline.parsing.plain_text import load_json, one_form, utf8
from paceline.plugins.dataset_registry import StandIn, dataset
from paceline.recipe.data import Data
from paceline_vision.detection.dataset import BoxDataset, DetectedObjects
from paceline_vision.detection.plausibility import implausible
from paceline_vision.inspection import pictures_with_boxes
from paceline_vision.sets.shapes import assumed_shapes

_OFFSET, _CONTINUES, _NEGATIVE = 48, 32, 16  # to characters of a compressed string, which hold 5 bits each
_LONGEST_NUMBER = 7  # characters, 35 bits: more than the number of pixels of any accepted picture


def outline_fault(outline: Any, height: int, width: int) -> str | None:
    """Explain why a segmentation cannot be drawn in a picture of this size; None if it can.

    Args:
        outline: The segmentation, without NaN, with which comparisons would be meaningless.
        height: The picture's height.
        width: The picture's width.
    """
    if isinstance(outline, dict):
        return _rle_fault(outline, height, width)
    if not isinstance(outline, list) or not outline:
        return "it must be a list of polygons, or run lengths (a mapping of counts and size)"
    return next((fault for each in outline if (fault := _polygon_fault(each, height, width))), None)


def mask_of(outline: Any, height: int, width: int) -> NDArray[np.uint8]:
    """Draw a valid segmentation, uint8 [H, W] of 0 and 1."""
    if isinstance(outline, dict):
        counts = _counts(outline["counts"])
        assert counts is not None
        pixels = np.repeat((np.arange(len(counts)) % 2).astype(np.uint8), counts)
        return pixels.reshape(width, height).T  # runs are in column order
    from pycocotools import mask

    polygons: NDArray[np.uint8] = mask.decode(mask.merge(mask.frPyObjects(outline, height, width)))
    return polygons


def _has_pixels(outline: Any, height: int, width: int) -> bool:
    """Whether a valid segmentation covers any pixel."""
    if isinstance(outline, dict):
        counts = _counts(outline["counts"])
        return counts is not None and any(counts[1::2])
    from pycocotools import mask

    return bool(mask.area(mask.frPyObjects(outline, height, width)).any())


def _edges(outline: Any) -> list[float]:
    """Return left, top, right and bottom edge of a segmentation's polygons."""
    numbers = [[number for polygon in outline for number in polygon[axis::2]] for axis in (0, 1)]
    return [pick(each) for pick in (min, max) for each in numbers]


def _polygon_fault(polygon: Any, height: int, width: int) -> str | None:
    if not isinstance(polygon, list) or not set(map(type, polygon)) <= {int, float}:
        return "a polygon must be a list of numbers"
    if len(polygon) < 6 or len(polygon) % 2:
        return f"a polygon has {len(polygon)} numbers; it must have x and y of at least three points"
    # A corner may lie outside the picture; a distant one would make the library allocate memory for the whole edge.
    far = max(height, width)
    if min(polygon) < -far or max(polygon) > 2 * far:
        return "a polygon has coordinates far outside the picture"
    return None


def _rle_fault(runs: dict[str, Any], height: int, width: int) -> str | None:
    if runs.get("size") != [height, width]:
        return f"its run lengths have the size {runs.get('size')}, but the picture has {[height, width]}"
    counts = _counts(runs.get("counts"))
    if counts is None:
        return "its counts are neither a list of non-negative numbers nor a compressed string"
    filled = int(counts.sum())
    if filled != height * width:
        return f"its run lengths fill {filled:,} pixels, but the picture has {height * width:,}"
    return None


def _counts(counts: Any) -> NDArray[np.int64] | None:
    """Return run lengths as numbers; None if they are malformed."""
    if isinstance(counts, str):
        return _decompressed(counts)
    if not isinstance(counts, list) or not set(map(type, counts)) <= {int}:
        return None
    return np.array(counts, dtype=np.int64) if all(0 <= each < 2**35 for each in counts) else None


def _decompressed(text: str) -> NDArray[np.int64] | None:
    """Decode the string form, in which each number from the fourth on is relative to the number two before it."""
    codes = np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8).astype(np.int64) - _OFFSET
    if not len(codes) or codes.min() < 0 or codes.max() >= 2 * _CONTINUES or codes[-1] & _CONTINUES:
        return None
    lasts = np.flatnonzero(codes & _CONTINUES == 0)
    firsts = np.concatenate([[0], lasts[:-1] + 1])
    lengths = lasts - firsts + 1
    if lengths.max() > _LONGEST_NUMBER:
        return None
    shifts = 5 * (np.arange(len(codes)) - np.repeat(firsts, lengths))
    counts = np.add.reduceat((codes & (_CONTINUES - 1)) << shifts, firsts)
    counts -= np.where(codes[lasts] & _NEGATIVE, 1 << 5 * lengths, 0)
    counts[1::2] = counts[1::2].cumsum()
    counts[2::2] = counts[2::2].cumsum()
    return counts if counts.min() >= 0 else None


_HOW = "download it again, correct it, or point data.path at the folder of COCO's annotations and pictures"
_SHOWN = 5  # maximum number of faults in a message
_FILES = ("annotations.json", "_annotations.coco.json")  # in a split's folder; the second is Roboflow's
_WORDS = {TRAIN: "train", VALIDATION: "val", TEST: "test"}  # with which the names of published sets begin
_COMPARED = 50_000  # annotations
_LISTS = ("images", "categories", "annotations")
_MOST = 2**31  # pixels; larger coordinates are not in any picture, and too large for an integer array


@dataclass(frozen=True, kw_only=True)
class Annotations:
    """The annotations of a file; the objects of picture i are rows ``bounds[i]`` to ``bounds[i + 1]``.

    Attributes:
        names: File names of the pictures, ordered by image id.
        sizes: Their heights and widths, int64 [N, 2].
        bounds: Bounds of each picture's rows, int64 [N + 1].
        boxes: Edges, float64 [M, 4].
        labels: Class indices, int64 [M].
        crowd: bool [M].
        outlines: Polygons or run lengths of each object, as in the file; None if not requested.
        implausible: A sentence for each kind of implausible box or outline.
    """

    names: list[str]
    sizes: NDArray[np.int64]
    bounds: NDArray[np.int64]
    boxes: NDArray[np.float64]
    labels: NDArray[np.int64]
    crowd: NDArray[np.bool_]
    outlines: list[Any] | None
    implausible: tuple[str, ...] = ()


class CocoSource:
    """The pictures of one split."""

    def __init__(self, folder: Path, annotations: Annotations, samples: NDArray[np.int64] | None = None) -> None:
        """Use the pictures in ``folder`` at positions ``samples``, or all."""
        self._folder = os.fspath(folder)
        self._annotations = annotations
        self._samples = np.arange(len(annotations.names)) if samples is None else samples
        self.sizes: NDArray[np.int64] = annotations.sizes[self._samples]

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, sample: int) -> Image:
        """Decode the picture as stored, without EXIF rotation, to match the annotations; raises BrokenImageError."""
        return decode(self.path(sample), 3, turned=False)

    def objects(self, sample: int, *, masks: bool) -> DetectedObjects:
        """Return its annotations."""
        annotations, row = self._annotations, int(self._samples[sample])
        rows = slice(int(annotations.bounds[row]), int(annotations.bounds[row + 1]))
        pixels = None
        if masks:
            assert annotations.outlines is not None
            height, width = map(int, annotations.sizes[row])
            pixels = np.zeros((rows.stop - rows.start, height, width), dtype=np.uint8)
            for index, outline in enumerate(annotations.outlines[rows]):
                pixels[index] = mask_of(outline, height, width)
        return DetectedObjects(
            boxes=annotations.boxes[rows], labels=annotations.labels[rows], crowd=annotations.crowd[rows], masks=pixels
        )

    def path(self, sample: int) -> str:
        """Return the picture's path."""
        return os.path.join(self._folder, self._annotations.names[int(self._samples[sample])])


@dataset(
    "coco", kind="boxes", keys=("path", "detection"), stand_in=StandIn(assumed_shapes), pictures=pictures_with_boxes
)
def open_coco(data: Data) -> BoxDataset:
    """Open COCO's folders, or ``PATH/{train,val or test}/`` with pictures and ``annotations.json``.

    Raises:
        DataError: If they are missing, or the annotations are malformed.
    """
    root = existing_folder(data, "annotations/ and train2017/")
    masks = data.detection.masks is True
    if masks:
        try:
            # Checked here, because masks are drawn only later, in the middle of training.
            importlib.import_module("pycocotools.mask")
        except ImportError:
            raise DataError(
                "COCO's masks are drawn by pycocotools, which is not installed: pip install 'paceline[detection]', or "
                "set data.detection.masks=false."
            ) from None
    digest, left_out, splits_read = hashlib.sha256(), SkippedItems(), []
    for split in (TRAIN, VALIDATION):
        name = _WORDS[split]
        found, tests = _sets(root, split), _sets(root, TEST) if split == VALIDATION else []
        for _, file in tests if found else ():
            left_out.add(UNREAD_SPLITS, os.path.relpath(file, root))
        found = found or tests
        if len(found) > 1:
            names = ", ".join(file.name for _, file in found)
            raise DataError(f"{found[0][1].parent} holds several sets for '{name}' ({names}); leave one there.")
        if not found:
            raise DataError(
                f"{root} holds neither annotations/instances_{name}2017.json nor {name}/annotations.json, nor "
                f"Roboflow's {name}/_annotations.coco.json: export or convert the annotations to COCO's format, one "
                "file for each split, or point data.path at their folder.",
                path=root,
            )
        [(folder, file)] = found
        splits_read.append((folder, file, *read_annotations(file, masks=masks, note=digest.update)))
    (train_folder, train_file, train, classes), (held_folder, held_file, held_out, held_classes) = splits_read
    if classes != dict(zip(held_classes, one_form(held_classes.values(), classes.values()).values(), strict=True)):
        raise DataError(
            f"{held_file}: its categories are not those of {train_file.name}; both splits must have the same.",
            path=held_file,
        )
    samples, counts = _trainable(train_file, train, keep_empty=data.detection.keep_empty)
    for folder, _, said, _ in splits_read:
        _report_unnamed(folder, said, left_out)
    implausible = tuple(sentence for _, _, said, _ in splits_read for sentence in said.implausible)
    splits = CocoSource(train_folder, train, samples), CocoSource(held_folder, held_out)
    return BoxDataset(
        name="coco",
        train=splits[0],
        validation=splits[1],
        classes=tuple(classes.values()),
        digest=digest.hexdigest(),
        facts=counts,
        files=tuple(split.path(sample) for split in splits for sample in range(len(split))),
        implausible=implausible,
        is_unscored=bool(len(held_out.names) and held_out.crowd.all()),
        left_out=(
            *(
                f"{key.removesuffix('_left_out').replace('_', ' ')}: {n:,} left out of training"
                for key, n in counts.items()
            ),
            *implausible,
            *left_out.summaries(),
        ),
    )


def existing_folder(data: Data, content: str) -> Path:
    """Return the folder that a recipe names as its ``data.path``; ``content`` says what the data set expects in it.

    Raises:
        DataError: If it is not given, or not a folder.
    """
    root = data.needed_path(f"the folder that holds {content}")
    refuse_archive(root)
    if not root.is_dir():
        raise DataError(
            f"data.path={data.path} is not a folder; give the one that holds {content}.", key="data.path", path=root
        )
    return root


def read_annotations(
    file: Path, *, masks: bool, note: Callable[[bytes], object] = len
) -> tuple[Annotations, dict[int, str]]:
    """Read an annotation file, and its class names by category id, ascending.

    Args:
        file: The JSON file.
        masks: Whether to keep masks.
        note: Called with the file's content, for its digest.

    Raises:
        DataError: If it is malformed, or most of its boxes are implausible; names the first faults and their number.
    """
    refuse_special_inputs(file)
    try:
        content = file.read_bytes()
        tree = load_json(content, parse_constant=str)  # NaN and Infinity become text, and so are not numbers
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as COCO's annotations ({error}); {_HOW}.", path=file) from error
    note(content)
    if not isinstance(tree, dict):
        _refuse(file, ["it is not a mapping of images, annotations and categories"])
    _refuse(file, [f"it has no list '{name}'" for name in _LISTS if not isinstance(tree.get(name), list)][:1])
    faults: list[str] = []
    images, classes = _images(tree["images"], faults), _classes(tree["categories"], faults)
    _refuse(file, faults)
    rows = list(_rows(tree["annotations"], images, classes, faults, masks=masks))
    _refuse(file, faults)
    sides = np.array([images[row[0]][:0:-1] for row in rows], dtype=np.float64).reshape(-1, 2)
    # Without masks, outlines are not checked before this, and a large file's would take too long.
    has_edges = [
        isinstance(row[4], list) and (masks or (len(rows) <= _COMPARED and not outline_fault(row[4], *size)))
        for row, size in zip(rows, sides[:, ::-1].tolist(), strict=True)
    ]
    edges = [_edges(row[4]) if known else [np.nan] * 4 for row, known in zip(rows, has_edges, strict=True)]
    outlines = np.array(edges, dtype=np.float64).reshape(-1, 4)
    told = implausible(file, tree["annotations"], sides, outlines, masks=masks)
    return replace(_arranged(images, classes, rows, masks=masks), implausible=tuple(told)), classes


def _refuse(file: Path, faults: list[str]) -> None:
    """Raise DataError with the first faults of a file, if any."""
    if faults:
        count = f"{len(faults):,} faults, first {_SHOWN}: " if len(faults) > _SHOWN else ""
        raise DataError(f"{file}: {count}{'; '.join(faults[:_SHOWN])}; {_HOW}.", path=file)


def _images(entries: list[Any], faults: list[str]) -> dict[int, tuple[str, int, int]]:
    """Return file name, height and width by image id, ascending."""
    images: dict[int, tuple[str, int, int]] = {}
    names: set[str] = set()
    for position, each in enumerate(entries):
        tree: dict[str, Any] = each if isinstance(each, dict) else {}
        number: Any = tree.get("id")
        name: Any = tree.get("file_name")
        sides: list[Any] = [tree.get("height"), tree.get("width")]
        have_sides = all(type(side) is int and 1 <= side <= _MOST for side in sides)
        if type(number) is not int or not _is_file_name(name) or not have_sides:
            faults.append(f"images[{position}] must have id, file_name, height and width, and is {_abbreviate(each)}")
            continue
        if number in images:
            faults.append(f"images[{position}] has the id {_abbreviate(number)}, which another one has")
        elif os.path.normpath(name) in names:
            faults.append(f"images[{position}] (id {number}) has the file_name {name!r}, which another one has")
        elif Path(name).is_absolute() or ".." in Path(name).parts:
            faults.append(f"images[{position}] is outside the folder of pictures: {name!r}")
        images[number] = (name, sides[0], sides[1])
        names.add(os.path.normpath(name))
    return dict(sorted(images.items()))


def _is_file_name(name: object) -> bool:
    """Whether a name is a valid file name: not empty, not `.`, without null bytes and lone surrogates."""
    if not isinstance(name, str) or not name or "\0" in name or os.path.normpath(name) in (".", ".."):
        return False
    return name.encode("utf-8", "ignore").decode() == name


def _classes(entries: list[Any], faults: list[str]) -> dict[int, str]:
    classes, names = dict[int, str](), set[str]()
    for position, each in enumerate(entries):
        number, name = (each.get("id"), each.get("name")) if isinstance(each, dict) else (None, None)
        if type(number) is not int or not isinstance(name, str) or utf8(name) != name:
            faults.append(f"categories[{position}] must have id and name, and is {_abbreviate(each)}")
            continue
        if number in classes:
            faults.append(f"categories[{position}] has the id {_abbreviate(number)}, which another one has")
        elif normalize("NFC", name) in names:
            faults.append(f"categories[{position}] has the name {name!r}, which another one has")
        classes[number] = name
        names.add(normalize("NFC", name))
    return dict(sorted(classes.items()))


def _rows(
    entries: list[Any], images: dict[int, Any], classes: dict[int, str], faults: list[str], *, masks: bool
) -> Iterator[tuple[int, int, list[float], bool, Any]]:
    """Return image, class, box, crowd flag and outline of each valid annotation."""
    for position, each in enumerate(entries):
        fault = _annotation_fault(each, images, classes, masks=masks)
        if fault is not None:
            number = each.get("id") if isinstance(each, dict) else None
            faults.append(f"annotations[{position}]{'' if number is None else f' (id {_abbreviate(number)})'} {fault}")
            continue
        yield each["image_id"], each["category_id"], each["bbox"], bool(each.get("iscrowd")), each.get("segmentation")


def _annotation_fault(each: Any, images: dict[int, Any], classes: dict[int, str], *, masks: bool) -> str | None:
    """Explain what is wrong with an annotation; None if it is valid."""
    if not isinstance(each, dict):
        return f"must be a mapping, found {_abbreviate(each)}"
    image, kind, crowd = each.get("image_id"), each.get("category_id"), each.get("iscrowd", 0)
    if type(image) is not int or image not in images:
        return f"has the image_id {_abbreviate(image)}, which no image has"
    if type(kind) is not int or kind not in classes:
        return f"has the category_id {_abbreviate(kind)}, which no category has"
    box: Any = each.get("bbox")
    # Comparisons with NaN are false.
    is_box = isinstance(box, list) and len(box) == 4 and all(type(n) in (int, float) and abs(n) <= _MOST for n in box)
    if not is_box or min(box[2:]) < 0:
        return f"has the bbox {_abbreviate(box)}, which must be left, top, width and height; the last two not negative"
    if crowd not in (0, 1):
        return f"has the iscrowd {_abbreviate(crowd)}, which must be 0 or 1"
    outline = each.get("segmentation")
    _, height, width = images[image]
    fault = outline_fault(outline, height, width) if masks else None
    if fault is not None:
        return f"has the segmentation {_abbreviate(outline)}: {fault} (data.detection.masks=false reads no masks)"
    return None


def _arranged(images: dict[int, Any], classes: dict[int, str], rows: list[Any], *, masks: bool) -> Annotations:
    """Sort rows by image, keeping the file's order within each."""
    position = {number: index for index, number in enumerate(images)}
    index_of = {number: index for index, number in enumerate(classes)}
    owner = np.array([position[row[0]] for row in rows], dtype=np.int64)
    order = np.argsort(owner, kind="stable")
    boxes = np.array([row[2] for row in rows], dtype=np.float64).reshape(-1, 4)[order]
    boxes[:, 2:] += boxes[:, :2]
    # In the network's single precision, a tiny box far from the origin has zero size.
    boxes = boxes.astype(np.float32).astype(np.float64)
    return Annotations(
        names=[name for name, _, _ in images.values()],
        sizes=np.array([size for _, *size in images.values()], dtype=np.int64).reshape(-1, 2),
        bounds=np.searchsorted(owner[order], np.arange(len(images) + 1)),
        boxes=boxes,
        labels=np.array([index_of[row[1]] for row in rows], dtype=np.int64)[order],
        crowd=np.array([row[3] for row in rows], dtype=bool)[order],
        outlines=[rows[index][4] for index in order] if masks else None,
    )


def _trainable(file: Path, annotations: Annotations, *, keep_empty: bool) -> tuple[NDArray[np.int64], dict[str, int]]:
    """Return the positions of training pictures, and a report of those left out, if any.

    Raises:
        DataError: If there are none.
    """
    owner = np.repeat(np.arange(len(annotations.names)), np.diff(annotations.bounds))
    within = np.clip(annotations.boxes, 0, annotations.sizes[owner][:, [1, 0, 1, 0]])
    has_extent = (within[:, 2:] > within[:, :2]).all(axis=1)
    outlined = zip(annotations.outlines or [None] * len(owner), annotations.sizes[owner].tolist(), strict=True)
    is_drawn = np.array([each is None or _has_pixels(each, *size) for each, size in outlined], dtype=bool) & has_extent
    every = np.arange(len(annotations.names))
    samples = every if keep_empty else np.unique(owner[is_drawn & ~annotations.crowd])
    if not len(samples):
        hint = "; data.detection.keep_empty=true trains on pictures without one" * (len(every) > 0)
        raise DataError(f"{file}: none of its {len(every):,} pictures has an object to learn from{hint}.", path=file)
    left_out = {
        "pictures_without_objects_left_out": len(every) - len(samples),
        "boxes_without_extent_left_out": int((~has_extent & ~annotations.crowd).sum()),
        "masks_without_pixels_left_out": int((has_extent & ~is_drawn & ~annotations.crowd).sum()),
    }
    return samples, {name: count for name, count in left_out.items() if count}


def _sets(root: Path, split: str) -> list[tuple[Path, Path]]:
    """Return the picture folder and the annotation file of each set of a split."""
    found = []
    for file in sorted((root / "annotations").glob("instances_*.json")):
        name = file.stem.removeprefix("instances_")
        first = next((each for each, word in _WORDS.items() if name.startswith(word)), None)
        if split == (first or split_of(PurePath(name))):
            folder, in_images = root / name, root / "images" / name
            found.append((in_images if in_images.is_dir() and not folder.is_dir() else folder, file))
    folder = root / split_folders(root, nested=False).get(split, split)
    return found or [(folder, folder / each) for each in _FILES if (folder / each).is_file()][:1]


def _report_unnamed(folder: Path, annotations: Annotations, left_out: SkippedItems) -> None:
    """Report files in a split's folder that its annotations do not mention, and pictures that are not there.

    Raises:
        DataError: If most pictures are not there.
    """
    known = {os.path.normpath(name): name for name in annotations.names}
    files = set(list_files(folder, left_out) if folder.is_dir() else ())
    for name in sorted(files - known.keys() - {*_FILES}):
        left_out.add("files that the annotations do not name", f"{folder.name}/{name}")
    missing = [known[each] for each in known.keys() - files if not (folder / each).exists()]
    if 2 * len(missing) > len(known):
        raise DataError(
            f"{len(missing):,} of the {len(known):,} pictures that the annotations name are not in {folder}, for "
            f"example {min(missing)!r}: put them there, or correct their file_name."
        )
    for name in sorted(missing):
        left_out.add("pictures that are not there and stop a run", f"{folder.name}/{name}")


def _abbreviate(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
