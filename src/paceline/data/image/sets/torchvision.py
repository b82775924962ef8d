"""torchvision data sets: their files or arrays if known, otherwise the images that they return.

Uses the lists of files and labels, but none of torchvision's transforms. For some samples these are compared with what
the data set returns. If the two differ, or there are no lists, images are read through the data set.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.image.dataset import DatasetRequest, Probe, StoredImages, in_splits, probe
from paceline.data.image.decode import BrokenImageError
from paceline.data.image.pillow_pixels import pixels_of
from paceline.data.image.sets import PART
from paceline.data.image.sets.archives import downloading
from paceline.data.image.source import ArraySource, FileSource, Ids, Image, SampleSource, array_digest, with_channels
from paceline.errors import DataError, data_error, did_you_mean
from paceline.parsing.files import SkippedItems, is_ignored_member, list_files
from paceline.plugins.dataset_registry import dataset

PREFIX = "torchvision:"
_TRAIN = ("train", "trainval", "train-standard", "2021_train")
_HELD_OUT = ("val", "valid", "test", "2021_valid")
_SPLIT_PARAMETERS = ("train", "split", "image_set", "version")
_FILES = ("_samples", "samples", "imgs")
_PATHS = ("_image_files", "_images", "_image_paths", "images")
_LABELS = ("targets", "labels", "_labels", "y")
_CLASSES = ("classes", "categories", "all_categories")
# Their __init__ loads pickles of an older layout if present.
_PICKLED = ("MNIST", "FashionMNIST", "KMNIST", "EMNIST", "QMNIST")
# Their __init__ loads a pickle from the working directory.
_REMEMBERED_AS_PICKLES = ("LSUN", "LSUNClass")
# Arguments that Paceline sets or never uses: its transforms are keyed by sample, and its decoder reads files.
_NO_OPTIONS = ("self", "root", "transform", "target_transform", "transforms", "loader", "download")
_MOST_ASKED = 200_000
_COMPARED = 3
_LISTINGS: dict[type, str] = {
    FileSource: "torchvision's list of files, decoded by Paceline",
    ArraySource: "torchvision's array of pixels",
}


@dataset("torchvision:NAME", keys=("path", "download", "options", *PART))
def open_torchvision(request: DatasetRequest) -> StoredImages:
    """Open a data set of ``torchvision.datasets``, with ``data.options`` as additional arguments of its class.

    Raises:
        DataError: If the name is unknown, its files are missing, or its labels are not classes.
    """
    data, name = request.data, request.data.dataset.removeprefix(PREFIX)
    root = None if data.path is None else request.path
    splits, held_out = _open_splits(_class(name, data.options), name, root, data.download, data.options)
    labels = [_labels(each, name) for each in splits]
    classes = _classes(splits[0], labels, data.options)
    sources = [_source(each, label, root) for each, label in zip(splits, labels, strict=True)]
    probed = _probe(sources[0])
    channels = request.channels or (1 if probed.greyscale else 3)
    images = [_with_channels(each, channels) for each in sources]
    return in_splits(
        images,
        held_out,
        request.data.validation_fraction,
        classes=classes,
        digest=_digest(sources, splits),
        channels=channels,
        probe=probed,
        listing=_LISTINGS.get(type(images[0]), "torchvision returns the images one by one"),
        left_out=_left_out(sources, name, root),
    )


class IndexedSource:
    """Images that a data set returns as Pillow images, one at a time."""

    def __init__(self, dataset: Any, labels: Ids, channels: int) -> None:
        self.labels = labels
        self.channels = channels
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, sample: int) -> Image:
        """Read image ``sample`` through the data set, uint8 [H, W, C].

        Raises:
            BrokenImageError: If it cannot be read.
        """
        try:
            return _pixels(self._dataset[sample][0], self.channels)
        except (OSError, SyntaxError, ValueError) as error:  # Pillow raises SyntaxError for a damaged PNG
            raise BrokenImageError(self.path(sample), str(error)) from error

    def path(self, sample: int) -> str:
        """Return the data set's name and the sample's number."""
        return f"{type(self._dataset).__name__}[{sample}]"


def _class(name: str, options: Mapping[str, Any]) -> Any:
    try:
        import torchvision.datasets as known
    except ImportError as error:
        raise DataError(
            f"data.dataset={PREFIX}{name} needs torchvision, which cannot be imported ({error}): run `pip install "
            "torchvision`."
        ) from error
    members = {each: getattr(known, each) for each in known.__all__}
    sets = {each: member for each, member in members.items() if inspect.isclass(member) and each != "VisionDataset"}
    found = sets.get(name)
    if found is None:
        raise DataError(
            f"data.dataset is {PREFIX + name!r}, and torchvision.datasets has no data set {name!r}."
            f"{did_you_mean(name, sets)}"
        )
    accepted = [key for key in inspect.signature(found.__init__).parameters if key not in _NO_OPTIONS]
    unknown = [key for key in options if key in _NO_OPTIONS or (key not in accepted and "kwargs" not in accepted)]
    if unknown:
        raise DataError(
            f"data.options names {unknown[0]!r}, but {name} takes {', '.join(accepted)}."
            f"{did_you_mean(unknown[0], accepted)}"
        )
    return found


def _open_splits(
    factory: Any, name: str, root: Path | None, download: bool, options: Mapping[str, Any]
) -> tuple[list[Any], str]:
    """Open the splits by the names that the class accepts; return them and the origin of the held-out one."""
    parameters = inspect.signature(factory.__init__).parameters
    arguments = dict(options)
    if "root" in parameters:
        arguments["root"] = str(_checked(name, root))
    if download and not parameters.keys() & {"download", "kwargs"}:
        raise DataError(f"torchvision cannot download {name}: get its files yourself, and leave data.download out.")
    if download or "download" in parameters:
        arguments["download"] = download  # a few classes would by default
    # EMNIST and QMNIST pass `train` on; their `split` and `what` mean something else.
    key = next((each for each in _SPLIT_PARAMETERS if each in parameters or name in _PICKLED), None)
    if key is None or (key in options):
        return [_construct(factory, name, root, arguments)], ""
    words: Sequence[Any] = (True,) if key == "train" else _TRAIN

    def first(words: Sequence[Any]) -> tuple[Any, Any]:
        """Return the split by the first name that the class accepts, and the name."""
        for word in words:
            with suppress(ValueError):  # torchvision's errors for an unknown name
                return _construct(factory, name, root, {**arguments, key: word}), word
        return None, ""

    train, _ = first(words)
    held_out, word = first((False,) if key == "train" else _HELD_OUT)
    if train is None:
        raise DataError(f"data.dataset={PREFIX}{name} has no split for training: name one in data.options.")
    if held_out is None:
        return [train], ""
    value_name = "test" if key == "train" else word
    unread = ""
    if value_name in ("val", "valid"):
        with suppress(ValueError, RuntimeError, OSError):
            factory(**{**arguments, key: "test"} | ({"download": False} if download else {}))
            unread = "; test is not read"
    return [train, held_out], f"torchvision's split {value_name}{unread}"


def _construct(factory: Any, name: str, root: Path | None, arguments: Mapping[str, Any]) -> Any:
    """Open a split; missing or damaged files are reported in one sentence."""
    try:
        with downloading(root, name) if root is not None and arguments.get("download") else nullcontext():
            return factory(**arguments)
    except (ValueError, DataError):  # torchvision raises the first for an unknown name
        raise
    except Exception as error:
        raise DataError(
            f"data.dataset={PREFIX}{name} cannot be opened in {str(root)!r} ({type(error).__name__}: "
            f"{' '.join(str(error).split())}): correct data.path or data.options, or, with a network, set "
            "data.download=true."
        ) from error


def _checked(name: str, root: Path | None) -> Path:
    """Reject classes and options that would load pickles."""
    if root is None:
        raise DataError(f"data.dataset={PREFIX}{name} needs data.path: set it to where the data is.")
    if name in _REMEMBERED_AS_PICKLES:
        raise DataError(
            f"data.dataset={PREFIX}{name} keeps its list of images as a pickle in the working directory, and loading "
            "one can run any code: write the images as files, and train with data.dataset=csv or image_folder."
        )
    processed = root / name / "processed"
    if name in _PICKLED and processed.is_dir():
        raise data_error(
            processed,
            "holds files of an older torchvision, which are pickles, and loading those can run any code: remove that "
            "folder; the published files are in raw/.",
        )
    return root


def _labels(dataset: Any, name: str) -> Ids:
    """Return the class of each image, from a list in the data set or by reading every image once."""
    if len(dataset) == 0:
        raise DataError(f"data.dataset={PREFIX}{name} has no images: correct data.path or data.options.")
    samples = _pairs(dataset, len(dataset))
    lists = [getattr(dataset, key, None) for key in _LABELS]
    lists += [] if samples is None else [[label for _, label in samples]]
    for each in lists:
        with suppress(TypeError, ValueError):
            numbers = np.asarray(each)
            if numbers.shape == (len(dataset),) and numbers.dtype.kind in "iu":
                checked = [(dataset[sample][1], numbers[sample]) for sample in _compared(len(dataset))]
                if all(_is_number(each) and int(each) == label for each, label in checked):
                    return numbers.astype(np.int64)
    if len(dataset) > _MOST_ASKED:
        raise DataError(
            f"data.dataset={PREFIX}{name} does not list its labels, and has {len(dataset):,} images that would be read "
            "one by one: write them as files, and train with data.dataset=csv."
        )
    labels = [dataset[sample][1] for sample in range(len(dataset))]
    if odd := [each for each in labels if not isinstance(each, bool) and not _is_number(each)]:
        raise DataError(
            f"data.dataset={PREFIX}{name} labels images by {type(odd[0]).__name__} ({str(odd[0])[:40]}), and a "
            "classifier learns one class of each image: use another data set, or your own factory."
        )
    return np.array([int(each) for each in labels], dtype=np.int64)


def _is_number(value: object) -> bool:
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_integer or (getattr(value, "ndim", None) == 0 and not bool(getattr(value, "is_floating_point", bool)()))


def _pairs(dataset: Any, count: int) -> list[tuple[Any, Any]] | None:
    """Return the data set's list of files and labels, if any."""
    for key in _FILES:
        found = getattr(dataset, key, None)
        if not isinstance(found, list) or len(found) != count:
            continue
        if all(isinstance(each, tuple | list) and len(each) == 2 for each in found[:_COMPARED]):
            return found
    return None


def _compared(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1})


def _classes(dataset: Any, labels: Sequence[Ids], options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the data set's class names, or else class numbers."""
    largest = max(int(each.max()) for each in labels)
    if min(int(each.min()) for each in labels) < 0:
        raise DataError("some images of the data set have no label (-1): choose another split of it in data.options.")
    for key in _CLASSES:
        named = getattr(dataset, key, None)
        if isinstance(named, list | tuple) and len(named) > largest:
            names = tuple(each if isinstance(each, str) else str(each) for each in named)
            return names if len(set(names)) == len(names) else tuple(str(number) for number in range(len(names)))
    indices = getattr(dataset, "class_to_idx", None)
    if isinstance(indices, dict) and sorted(indices.values()) == list(range(len(indices))) and len(indices) > largest:
        return tuple(str(name) for name in sorted(indices, key=indices.__getitem__))
    count = max(largest + 1, int(options.get("num_classes", getattr(dataset, "num_classes", 0)) or 0), 2)
    return tuple(str(number) for number in range(count))


Made = ArraySource | FileSource | IndexedSource


def _source(dataset: Any, labels: Ids, root: Path | None) -> Made:
    """Return a source of files or pixels, if some samples match what the data set returns."""
    for found in (_files(dataset, labels, root), _array(dataset, labels)):
        if found is None:
            continue
        channels = found.images.shape[-1] if isinstance(found, ArraySource) else 3
        try:
            pairs = [(found.read(each), _pixels(dataset[each][0], channels)) for each in _compared(len(found))]
        except (BrokenImageError, OSError):
            if isinstance(found, FileSource):  # unreadable: the error appears when it is read
                return found
        else:
            if all(np.array_equal(ours, theirs) for ours, theirs in pairs):
                return found
    return IndexedSource(dataset, labels, 3)


def _files(dataset: Any, labels: Ids, root: Path | None) -> FileSource | None:
    pairs = _pairs(dataset, len(labels))
    listed = [getattr(dataset, key, None) for key in _PATHS] if pairs is None else [[path for path, _ in pairs]]
    paths = next((each for each in listed if isinstance(each, list) and len(each) == len(labels)), None)
    if paths is None or root is None or not all(isinstance(each, str | os.PathLike) for each in paths):
        return None
    whole = [os.path.relpath(os.path.join(os.curdir, each), root) for each in paths]
    return FileSource(root, (os.fsencode(each) for each in whole), labels, 3)


def _array(dataset: Any, labels: Ids) -> ArraySource | None:
    held = getattr(dataset, "data", None)
    if held is None or isinstance(held, list):
        return None
    pixels = np.asarray(held)
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or len(pixels) != len(labels):
        return None
    if pixels.ndim == 3:
        pixels = pixels[..., None]
    elif pixels.shape[-1] not in (1, 3) and pixels.shape[1] in (1, 3):
        pixels = pixels.transpose(0, 2, 3, 1)
    if pixels.shape[-1] not in (1, 3):
        return None
    return ArraySource(np.ascontiguousarray(pixels), labels, type(dataset).__name__)


def _pixels(image: Any, channels: int) -> Image:
    """Return pixels from what a data set returns, uint8 [H, W, C]."""
    from PIL import Image as Pillow

    if isinstance(image, Pillow.Image):
        return pixels_of(image, channels)
    raise ValueError(f"it returns {type(image).__name__}, not a Pillow image")


def _probe(source: Made) -> Probe:
    if isinstance(source, FileSource):
        return probe(source)
    if isinstance(source, ArraySource):
        return Probe(len(source), (source.images.shape[1], source.images.shape[2]), source.images.shape[-1] == 1)
    chosen = np.unique(np.linspace(0, len(source) - 1, 16).astype(np.int64)).tolist()
    sizes = set()
    for each in chosen:
        with suppress(BrokenImageError):  # reported when it is read
            sizes.add(source.read(each).shape[:2])
    return Probe(count=len(chosen), size=next(iter(sizes)) if len(sizes) == 1 else None, greyscale=False)


def _with_channels(source: Made, channels: int) -> SampleSource:
    if isinstance(source, ArraySource):
        return ArraySource(with_channels(source.images, channels), source.labels, source.name)
    source.channels = channels
    return source


def _digest(sources: Sequence[Made], datasets: Sequence[Any]) -> str:
    """Digest pixels, or file names and sizes; without either, labels and some images."""
    digest = hashlib.sha256()
    for source, made in zip(sources, datasets, strict=True):
        if isinstance(source, ArraySource):
            digest.update(array_digest(source).encode())
        elif isinstance(source, FileSource):
            for each in range(len(source)):
                size = 0
                with suppress(OSError):  # reported as a broken image when it is read
                    size = os.stat(source.path(each)).st_size
                digest.update(b"%s\0%d\n" % (source.names[each], size))
        else:
            digest.update(type(made).__name__.encode())
            for sample in _compared(len(source)):
                with suppress(BrokenImageError):
                    digest.update(source.read(sample).tobytes())
        digest.update(source.labels.tobytes())
    return digest.hexdigest()


def _left_out(sources: Sequence[Made], name: str, root: Path | None) -> tuple[str, ...]:
    """Return entries among torchvision's listed files that it does not list.

    Raises:
        DataError: If it lists a hidden file, which other sources never read.
    """
    names = {os.fsdecode(each.names[at]) for each in sources if isinstance(each, FileSource) for at in range(len(each))}
    hidden = next((each for each in sorted(names) if is_ignored_member(each)), None)
    if hidden is not None:
        raise DataError(
            f"data.dataset={PREFIX}{name} treats the hidden file {hidden!r} as an image: remove it, or train with "
            "data.dataset=image_folder, which ignores such files."
        )
    left_out = SkippedItems()
    if names and root is not None:
        folder = os.path.commonpath(map(os.path.dirname, names))
        for each in list_files(root / folder, left_out):
            if os.path.join(folder, each) not in names:
                left_out.add("files that torchvision does not list", os.path.join(folder, each))
    return left_out.summaries()
