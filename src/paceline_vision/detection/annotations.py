"""Pictures with annotated objects as lists in COCO's form, into which every format is read; checked, then arrays.

The lists are COCO's (Lin et al. 2014): `images`, `categories` and `annotations`, whose boxes are left, top, width and
height, and whose masks are polygons or run lengths, as lists or compressed strings. No code is run, and malformed
entries are reported.
"""

from __future__ import annotations

import codecs
import hashlib
import importlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePath
from typing import Any
from unicodedata import normalize
from xml.etree import ElementTree as ET

import numpy as np
from numpy.typing import NDArray

from paceline.data.disk_cache import cached, stamp_or_none
from paceline.data.image.dataset import stratified_split
from paceline.data.image.decode import decode, upright_size
from paceline.data.image.source import Image
from paceline.data.splits import TEST, TRAIN, UNREAD_SPLITS, VALIDATION, split_of
from paceline.errors import DataError, data_error
from paceline.parsing.files import SkippedItems, is_folder, list_files, refuse_archive, refuse_special_inputs
from paceline.parsing.plain_text import load_json, one_form, utf8
from paceline.recipe.data import Data
from paceline_vision.detection.dataset import BoxDataset, DetectedObjects
from paceline_vision.detection.outlines import edges, has_pixels, mask_of, outline_fault
from paceline_vision.detection.plausibility import implausible

_SHOWN = 5  # maximum number of faults in a message
_READERS = 8
_LOOKED_AT = 2**16  # bytes
_ENTRIES, _FOLDERS, _INSIDE = 10_000, 100, 1_000  # of a folder, and of each folder in it
_POINTS = 32  # of the polygon of an ellipse
_RECTANGLE = 10  # numbers: four corners, and maybe the first one again
_COMPARED = 50_000  # annotations
_RULE = (
    "COCO's numbers are pixels of the stored picture: left, top, width and height of a box, x and y of each point of "
    "an outline"
)
_LISTS = ("images", "categories", "annotations")
_MOST = 2**31  # pixels; larger coordinates are not in any picture, and too large for an integer array
_MOST_BYTES = 8 * 2**30  # of an annotation file; parsed, it takes several times as much memory


@dataclass(frozen=True, kw_only=True)
class AnnotatedSet:
    """Pictures of a split, with their objects, as a format's reader found them.

    Attributes:
        file: The annotation file, or folder of such files, for messages.
        folder: The folder of the pictures.
        tree: `images`, `categories` and `annotations` in COCO's form, not yet checked.
        own_files: Files in the folder of the pictures that hold annotations.
        places: Where each annotation is, for messages; None: its position and id in the list of COCO's file.
        rule: What the format's numbers are, as a sentence.
        is_upright: Whether coordinates are those of the picture after its EXIF rotation, not of the stored pixels.
    """

    file: Path
    folder: Path
    tree: Any
    own_files: frozenset[str] = frozenset()
    places: Sequence[str] | None = None
    rule: str = _RULE
    is_upright: bool = False

    def place(self, position: int) -> str:
        """Return where an annotation is."""
        if self.places is not None:
            return self.places[position]
        each = self.tree["annotations"][position]
        number = each.get("id") if isinstance(each, dict) else None
        return f"annotations[{position}]{'' if number is None else f' (id {abbreviate(number)})'}"

    def refuse(self, faults: Sequence[str]) -> None:
        """Raise DataError with the first faults, if any."""
        if faults:
            count = f"{len(faults):,} faults, first {_SHOWN}: " if len(faults) > _SHOWN else ""
            how = "" if self.places is not None else "download it again, "
            raise DataError(
                f"{self.file}: {count}{'; '.join(faults[:_SHOWN])}; {how}correct it, or point data.path at the folder "
                f"of the annotations and pictures.",
                path=self.file,
            )


class AnnotationCollector:
    """Pictures and their objects, which a format's reader adds one by one.

    Args:
        folder: The folder of all pictures.
        file: The annotation file, or folder of such files, for messages.
        rule: What the format's numbers are, as a sentence.
        classes: Names of all classes in the format's order; None: those of the objects, sorted.
    """

    def __init__(self, folder: Path, file: Path, rule: str, classes: Sequence[str] | None = None) -> None:
        self._every = AnnotatedSet(file=file, folder=folder, tree={}, places=(), rule=rule, is_upright=True)
        self._classes = classes
        self._images: dict[str, list[dict[str, Any]]] = {}
        self._objects: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
        self.own_files: set[str] = set()
        self.faults: list[str] = []

    def add_picture(self, split: str, name: str, size: tuple[int, int]) -> None:
        """Start a picture of a split (empty without splits) by its path in the folder, and its height and width."""
        images = self._images.setdefault(split, [])
        images.append({"id": len(images), "file_name": name, "height": size[0], "width": size[1]})
        self._objects.setdefault(split, [])

    def add_object(
        self,
        split: str,
        place: str,
        label: str,
        *,
        box: Sequence[float] = (),
        polygons: Sequence[Sequence[float]] = (),
        runs: Mapping[str, Any] | None = None,
    ) -> None:
        """Add an object to the split's last picture.

        Args:
            split: As above.
            place: Where it is, for messages.
            label: Name of its class.
            box: Left, top, right and bottom; empty: around the polygons.
            polygons: x and y of each point.
            runs: Run lengths, if there are no polygons.
        """
        numbers = [*box, *(number for polygon in polygons for number in polygon)]
        has_points = all(len(each) >= 2 and not len(each) % 2 for each in polygons)
        if not numbers or not all(map(is_coordinate, numbers)) or not has_points:
            self.faults.append(f"{place} has {abbreviate(numbers)}, which must be numbers of at most {_MOST:,} pixels")
            return
        left, top, right, bottom = box or edges(polygons)
        left, right, top, bottom = min(left, right), max(left, right), min(top, bottom), max(top, bottom)
        outline: Any = runs or [list(each) for each in polygons]
        entry = {"image_id": len(self._images[split]) - 1, "bbox": [left, top, right - left, bottom - top]}
        self._objects[split].append((place, label, entry | {"segmentation": outline, "iscrowd": 0}))

    def read(
        self,
        found: Mapping[str, tuple[str, Any]],
        add: Callable[[str, str, Any, tuple[int, int]], None],
        data: Data,
        left_out: SkippedItems,
        split: Callable[[str], str] = lambda picture: split_of(PurePath(picture).parent) or "",
    ) -> BoxDataset:
        """Add pictures with what was read for each, and return the data set; for formats of one entry per picture.

        Args:
            found: Where each picture's entry is, and its content, by the picture's path in the folder.
            add: Adds the objects of a picture, given its split, the place, the content, and its height and width.
            data: The recipe's section.
            left_out: What was left out so far.
            split: Returns a picture's split.

        Raises:
            DataError: If the reader found faults, or no picture.
        """
        for picture, size in sizes_of(self._every.folder, list(found), data, left_out).items():
            part = split(picture)
            self.add_picture(part, picture, size)
            add(part, *found[picture], size)
        sets = self.sets()
        if not sets:
            raise data_error(self._every.file, "holds no picture with annotations: correct the path, or add them.")
        return box_dataset(data, sets, left_out)

    def sets(self) -> dict[str, AnnotatedSet]:
        """Return the pictures of each split.

        Raises:
            DataError: If the reader found faults.
        """
        found = {label for objects in self._objects.values() for _, label, _ in objects}
        classes = {
            name: number for number, name in enumerate(sorted(found) if self._classes is None else self._classes)
        }
        self._every.refuse(self.faults)
        return {
            split: replace(
                self._every,
                tree={
                    "images": images,
                    "categories": [{"id": number, "name": name} for name, number in classes.items()],
                    "annotations": [entry | {"category_id": classes[name]} for _, name, entry in self._objects[split]],
                },
                own_files=frozenset(self.own_files),
                places=[place for place, _, _ in self._objects[split]],
            )
            for split, images in self._images.items()
        }


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

    @property
    def owner(self) -> NDArray[np.int64]:
        """Position of each object's picture, int64 [M]."""
        return np.repeat(np.arange(len(self.names)), np.diff(self.bounds))


class AnnotatedPictures:
    """The pictures of one split.

    Args:
        found: The set that they are from.
        annotations: Its annotations.
        samples: Positions of the pictures.
    """

    def __init__(self, found: AnnotatedSet, annotations: Annotations, samples: NDArray[np.int64]) -> None:
        self._folder, self._is_upright = os.fspath(found.folder), found.is_upright
        self._annotations, self._samples = annotations, samples
        self.sizes: NDArray[np.int64] = annotations.sizes[self._samples]

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, sample: int) -> Image:
        """Decode the picture, with EXIF rotation only if its annotations have it; raises BrokenImageError."""
        return decode(self.path(sample), 3, turned=self._is_upright)

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


def annotation_file(data: Data) -> tuple[Path, Path]:
    """Return the folder of a recipe's ``data.path``, by default that of its ``data.annotations``, and the latter.

    Raises:
        DataError: If one of them is not there.
    """
    assert data.annotations is not None
    file = Path(data.annotations).expanduser()
    root = file.parent if data.path is None else existing_folder(data, "the pictures")
    if not file.is_file():
        inside = [each for each in (root / file.name, root / "annotations" / file.name) if each.is_file()]
        near = f"; there is {str(inside[0])!r}" if inside else ""
        raise DataError(
            f"data.annotations={data.annotations} is not a file{near}: correct the path.",
            key="data.annotations",
            value=data.annotations,
            path=file,
        )
    return root, file


def is_coordinate(value: Any) -> bool:
    """Whether a value is a number that is neither NaN nor too large for any picture."""
    return type(value) in (int, float) and bool(abs(value) <= _MOST)


def begins_with(file: Path, first: bytes, *names: bytes) -> bool:
    """Whether a file begins with a character, and its first 64 KiB hold one of some names; it is not parsed."""
    try:
        if not file.is_file():  # a named pipe may block for ever
            return False
        with file.open("rb") as content:
            start = content.read(_LOOKED_AT).removeprefix(codecs.BOM_UTF8)
    except OSError:
        return False
    return start.lstrip().startswith(first) and any(each in start for each in names)


def first_entries(folder: str | Path, most: int = _ENTRIES) -> list[os.DirEntry[str]]:
    """Return the first entries of a folder, which may hold millions; none if it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return list(islice(entries, most))
    except OSError:  # the function that opens it reports the reason
        return []


def first_files(root: Path, ending: str) -> Iterator[Path]:
    """Yield files with an ending in a folder and in its folders, of the first entries of each."""
    entries = first_entries(root)
    folders = islice(filter(is_folder, entries), _FOLDERS)
    for found in (entries, *(first_entries(each.path, _INSIDE) for each in folders)):
        yield from (Path(each.path) for each in found if each.name.endswith(ending))


def ellipse(x: float, y: float, across: float, down: float, turned: float = 0.0) -> list[float]:
    """Return x and y of points on an ellipse, turned by some degrees around its centre."""
    cosine, sine = math.cos(math.radians(turned)), math.sin(math.radians(turned))
    angles = [2 * math.pi * each / _POINTS for each in range(_POINTS)]
    points = [(across * math.cos(each), down * math.sin(each)) for each in angles]
    return [each for a, b in points for each in (x + a * cosine - b * sine, y + a * sine + b * cosine)]


def sizes_of(folder: Path, names: Sequence[str], data: Data, left_out: SkippedItems) -> dict[str, tuple[int, int]]:
    """Return height and width of each picture after its EXIF rotation, from the files' headers.

    Raises:
        DataError: If some cannot be read, unless ``data.on_bad`` leaves them out.
    """
    paths = [os.path.join(folder, name) for name in names]

    def look() -> list[Any]:
        return list(pool.map(upright_size, paths))

    now = time.time_ns()
    with ThreadPoolExecutor(_READERS) as pool:
        stamps = list(pool.map(stamp_or_none, paths))
        sizes = cached("sizes", paths, stamps, look, now=now, is_kept=lambda looks: None not in looks)
    broken = [name for name, size in zip(names, sizes, strict=True) if size is None]
    if broken and data.on_bad == "refuse":
        raise data_error(
            folder,
            f"has {len(broken):,} pictures that cannot be read ({', '.join(map(repr, broken[:_SHOWN]))}): replace or "
            "remove them, or leave them out with data.on_bad=skip.",
        )
    for name in broken:
        left_out.add("pictures that cannot be read", name)
    return {name: (size[0], size[1]) for name, size in zip(names, sizes, strict=True) if size is not None}


def read_content(file: Path) -> bytes:
    """Return the content of an annotation file.

    Raises:
        DataError: If it is not a regular file, too large, or cannot be read.
    """
    refuse_special_inputs(file)
    try:
        if (size := file.stat().st_size) > _MOST_BYTES:
            raise data_error(file, f"has {size:,} bytes, and at most {_MOST_BYTES:,} are read: split it.")
        return file.read_bytes()
    except OSError as error:
        raise data_error(file, f"cannot be read ({error}): correct it.") from error


def read_json(file: Path, content: bytes, form: str) -> Any:
    """Parse an annotation file, with NaN and Infinity as text, so that they are not numbers.

    Raises:
        DataError: If it is not JSON; ``form`` says what it should be.
    """
    try:
        return load_json(content, parse_constant=str)
    except ValueError as error:
        raise DataError(
            f"{file} cannot be read as {form} ({error}); download it again, or correct it.", path=file
        ) from error


def read_xml(file: Path, tool: str) -> Any:
    """Parse an annotation file.

    Raises:
        DataError: If it is not XML in UTF-8, or declares entities, which could grow without limit; names the tool.
    """
    try:
        content = read_content(file).decode("utf-8-sig")  # other encodings would hide declarations
        if "<!DOCTYPE" in content or "<!ENTITY" in content:
            raise data_error(file, f"declares entities, which {tool}'s files never do: export it again.")
        return ET.fromstring(content)
    except (ET.ParseError, ValueError) as error:
        raise data_error(file, f"cannot be read as {tool}'s annotations ({error}): export it again.") from error


def box_dataset(
    data: Data, sets: Mapping[str, AnnotatedSet], left_out: SkippedItems, digest: str | None = None
) -> BoxDataset:
    """Check the annotations of all splits, and return their pictures; without a held-out split, hold out a part.

    Args:
        data: The recipe's section.
        sets: By split; the key is empty where the data has none.
        left_out: What was left out so far.
        digest: Identifies the annotations; None: computed from the sets.

    Raises:
        DataError: If they are malformed, most boxes are implausible, or most pictures are missing.
    """
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
    found = _chosen(sets, left_out)
    read = [annotations_of(each, masks=masks) for each in found]
    train, classes = read[0]
    for each, (_, others) in zip(found[1:], read[1:], strict=True):
        if classes != dict(zip(others, one_form(others.values(), classes.values()).values(), strict=True)):
            raise DataError(
                f"{each.file}: its categories are not those of {found[0].file.name}; both splits must have the same.",
                path=each.file,
            )
    ids, held_ids = np.arange(len(train.names)), np.arange(len(read[-1][0].names))
    split = f"the folder {found[-1].folder.name}/" if len({each.folder for each in found}) > 1 else "the data's own"
    if len(found) == 1:
        ids, held_ids = stratified_split(_rarest_classes(train), data.validation_fraction)
        split = f"{100 * data.validation_fraction:.4g}% of the pictures, always the same (data.validation_fraction)"
    samples, counts = _trainable(found[0].file, train, ids, keep_empty=data.detection.keep_empty)
    for folder in dict.fromkeys(each.folder for each in found):
        here = [(each, said.names) for each, (said, _) in zip(found, read, strict=True) if each.folder == folder]
        _report_unnamed([each for each, _ in here], [names for _, names in here], left_out)
    told = tuple(sentence for said, _ in read for sentence in said.implausible)
    splits = (AnnotatedPictures(found[0], train, samples), AnnotatedPictures(found[-1], read[-1][0], held_ids))
    return BoxDataset(
        name=data.dataset,
        train=splits[0],
        validation=splits[1],
        classes=tuple(classes.values()),
        digest=digest or hashlib.sha256(json.dumps([each.tree for each in found]).encode()).hexdigest(),
        facts=counts,
        files=tuple(each.path(sample) for each in splits for sample in range(len(each))),
        implausible=told,
        is_outlined=_are_outlined([each for part in found for each in part.tree["annotations"]]),
        is_unscored=bool(len(held_ids) and read[-1][0].crowd[np.isin(read[-1][0].owner, held_ids)].all()),
        split=split,
        is_split_off=len(found) == 1,
        left_out=(
            *(
                f"{key.removesuffix('_left_out').replace('_', ' ')}: {n:,} left out of training"
                for key, n in counts.items()
            ),
            *told,
            *left_out.summaries(),
        ),
    )


def _are_outlined(entries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all objects have an outline, and some are not rectangles, which many tools write for boxes."""
    outlines = [each.get("segmentation") for each in entries]
    # Without masks, they have not been checked.
    lists = (each for each in outlines if isinstance(each, list))
    has_shape = any(isinstance(part, list) and len(part) > _RECTANGLE for each in lists for part in each)
    return all(outlines) and (has_shape or any(isinstance(each, dict) for each in outlines))


def _chosen(sets: Mapping[str, AnnotatedSet], left_out: SkippedItems) -> list[AnnotatedSet]:
    """Return the set to train on and, if any, the one to evaluate; report the others."""
    train = next((each for each in (TRAIN, "") if each in sets), None)
    if train is None:
        first = next(iter(sets.values()))
        raise data_error(
            first.file, f"has pictures of the splits {', '.join(sets)}, but none to train on: add a split called train."
        )
    held_out = next((each for each in (VALIDATION, TEST) if each in sets), None)
    for name in sets.keys() - {train, held_out}:
        unread = sets[name]
        if unread.places is None:
            left_out.add(UNREAD_SPLITS, f"{unread.file.parent.name}/{unread.file.name}")
        for image in () if unread.places is None else unread.tree["images"]:
            left_out.add(f"pictures of the split {name or 'without a name'}, which is not read", image["file_name"])
    return [sets[train], *([] if held_out is None else [sets[held_out]])]


def _rarest_classes(annotations: Annotations) -> NDArray[np.int64]:
    """Return the class of each picture that the fewest pictures have, int64 [N], so that a split has rare ones, too."""
    pairs = np.unique(np.stack([annotations.owner, annotations.labels]), axis=1)
    by_number = np.argsort(np.bincount(pairs[1]), kind="stable")
    ranks = np.full(len(annotations.names), len(by_number), dtype=np.int64)
    np.minimum.at(ranks, pairs[0], np.argsort(by_number)[pairs[1]])
    return ranks


def annotations_of(found: AnnotatedSet, *, masks: bool) -> tuple[Annotations, dict[int, str]]:
    """Check a set's annotations and return them, and its class names by category id, ascending.

    Args:
        found: The set.
        masks: Whether to keep masks.

    Raises:
        DataError: If it is malformed, or most of its boxes are implausible; names the first faults and their number.
    """
    tree = found.tree
    if not isinstance(tree, dict):
        found.refuse(["it is not a mapping of images, annotations and categories"])
    found.refuse([f"it has no list '{name}'" for name in _LISTS if not isinstance(tree.get(name), list)][:1])
    faults: list[str] = []
    images, classes = _images(tree["images"], faults), _classes(tree["categories"], faults)
    found.refuse(faults)
    rows = list(_rows(found, images, classes, faults, masks=masks))
    found.refuse(faults)
    sides = np.array([images[row[0]][:0:-1] for row in rows], dtype=np.float64).reshape(-1, 2)
    # Without masks, outlines are not checked before this, and a large file's would take too long.
    has_edges = [
        isinstance(row[4], list) and (masks or (len(rows) <= _COMPARED and not outline_fault(row[4], *size)))
        for row, size in zip(rows, sides[:, ::-1].tolist(), strict=True)
    ]
    bounds = [edges(row[4]) if known else [np.nan] * 4 for row, known in zip(rows, has_edges, strict=True)]
    outlines = np.array(bounds, dtype=np.float64).reshape(-1, 4)
    told = implausible(
        found.file, tree["annotations"], sides, outlines, masks=masks, place=found.place, rule=found.rule
    )
    return replace(_arranged(images, classes, rows, masks=masks), implausible=tuple(told)), classes


def _images(entries: list[Any], faults: list[str]) -> dict[int, tuple[str, int, int]]:
    """Return file name, height and width by image id, ascending."""
    images: dict[int, tuple[str, int, int]] = {}
    names: set[str] = set()
    for position, each in enumerate(entries):
        tree: dict[str, Any] = each if isinstance(each, dict) else {}
        number: Any = tree.get("id")
        name: Any = tree.get("file_name")
        name = name.replace("\\", "/") if isinstance(name, str) else name  # as exported on Windows
        sides: list[Any] = [tree.get("height"), tree.get("width")]
        have_sides = all(type(side) is int and 1 <= side <= _MOST for side in sides)
        if type(number) is not int or not _is_file_name(name) or not have_sides:
            faults.append(f"images[{position}] must have id, file_name, height and width, and is {abbreviate(each)}")
            continue
        if number in images:
            faults.append(f"images[{position}] has the id {abbreviate(number)}, which another one has")
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
            faults.append(f"categories[{position}] must have id and name, and is {abbreviate(each)}")
            continue
        if number in classes:
            faults.append(f"categories[{position}] has the id {abbreviate(number)}, which another one has")
        elif normalize("NFC", name) in names:
            faults.append(f"categories[{position}] has the name {name!r}, which another one has")
        classes[number] = name
        names.add(normalize("NFC", name))
    return dict(sorted(classes.items()))


def _rows(
    found: AnnotatedSet, images: dict[int, Any], classes: dict[int, str], faults: list[str], *, masks: bool
) -> Iterator[tuple[int, int, list[float], bool, Any]]:
    """Return image, class, box, crowd flag and outline of each valid annotation."""
    for position, each in enumerate(found.tree["annotations"]):
        fault = _annotation_fault(each, images, classes, masks=masks)
        if fault is not None:
            faults.append(f"{found.place(position)} {fault}")
            continue
        yield each["image_id"], each["category_id"], each["bbox"], bool(each.get("iscrowd")), each.get("segmentation")


def _annotation_fault(each: Any, images: dict[int, Any], classes: dict[int, str], *, masks: bool) -> str | None:
    """Explain what is wrong with an annotation; None if it is valid."""
    if not isinstance(each, dict):
        return f"must be a mapping, found {abbreviate(each)}"
    image, kind, crowd = each.get("image_id"), each.get("category_id"), each.get("iscrowd", 0)
    if type(image) is not int or image not in images:
        return f"has the image_id {abbreviate(image)}, which no image has"
    if type(kind) is not int or kind not in classes:
        return f"has the category_id {abbreviate(kind)}, which no category has"
    box: Any = each.get("bbox")
    is_box = isinstance(box, list) and len(box) == 4 and all(map(is_coordinate, box))
    if not is_box or min(box[2:]) < 0:
        return f"has the bbox {abbreviate(box)}, which must be left, top, width and height; the last two not negative"
    if crowd not in (0, 1):
        return f"has the iscrowd {abbreviate(crowd)}, which must be 0 or 1"
    outline = each.get("segmentation")
    _, height, width = images[image]
    fault = outline_fault(outline, height, width) if masks else None
    if fault is not None:
        return f"has the segmentation {abbreviate(outline)}: {fault} (data.detection.masks=false reads no masks)"
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


def abbreviate(value: Any) -> str:
    """Return a value in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _trainable(
    file: Path, annotations: Annotations, among: NDArray[np.int64], *, keep_empty: bool
) -> tuple[NDArray[np.int64], dict[str, int]]:
    """Return the positions of training pictures among some, and a report of those left out, if any.

    Raises:
        DataError: If there are none.
    """
    owner = annotations.owner
    within = np.clip(annotations.boxes, 0, annotations.sizes[owner][:, [1, 0, 1, 0]])
    has_extent = (within[:, 2:] > within[:, :2]).all(axis=1)
    outlined = zip(annotations.outlines or [None] * len(owner), annotations.sizes[owner].tolist(), strict=True)
    is_drawn = np.array([each is None or has_pixels(each, *size) for each, size in outlined], dtype=bool) & has_extent
    samples = among if keep_empty else np.intersect1d(owner[is_drawn & ~annotations.crowd], among)
    if not len(samples):
        hint = "; data.detection.keep_empty=true trains on pictures without one" * (len(among) > 0)
        raise DataError(f"{file}: none of its {len(among):,} pictures has an object to learn from{hint}.", path=file)
    counted = np.isin(owner, among) & ~annotations.crowd
    left_out = {
        "pictures_without_objects_left_out": len(among) - len(samples),
        "boxes_without_extent_left_out": int((~has_extent & counted).sum()),
        "masks_without_pixels_left_out": int((has_extent & ~is_drawn & counted).sum()),
    }
    return samples, {name: count for name, count in left_out.items() if count}


def _report_unnamed(sets: Sequence[AnnotatedSet], names: Sequence[Sequence[str]], left_out: SkippedItems) -> None:
    """Report files in the folder of some sets that their annotations do not mention, and pictures that are not there.

    Raises:
        DataError: If most pictures are not there.
    """
    folder = sets[0].folder
    known = {os.path.normpath(name): name for each in names for name in each}
    files = set(list_files(folder, left_out) if folder.is_dir() else ())
    for name in sorted(files - known.keys() - frozenset().union(*(each.own_files for each in sets))):
        left_out.add("files that the annotations do not name", f"{folder.name}/{name}")
    missing = [known[each] for each in known.keys() - files if not (folder / each).exists()]
    if 2 * len(missing) > len(known):
        raise DataError(
            f"{len(missing):,} of the {len(known):,} pictures that the annotations name are not in {folder}, for "
            f"example {min(missing)!r}: put them there, or correct their file_name."
        )
    for name in sorted(missing):
        left_out.add("pictures that are not there and stop a run", f"{folder.name}/{name}")
