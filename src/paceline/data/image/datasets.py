"""Which data set does the recipe name, and what is in it? Every `auto` is resolved here, with its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from paceline.data.image import cifar, digits
from paceline.data.image.folder import ImageFolder, open_image_folder
from paceline.data.image.huggingface import open_huggingface
from paceline.data.image.listing import Fault, refuse
from paceline.data.image.mapped import StoredImages
from paceline.data.image.packed import packed_images
from paceline.data.image.pixels import array_digest, with_channels
from paceline.data.image.source import ArraySource, Image, SampleSource, SubsetSource
from paceline.data.image.splits import hold_out, split_off, stratified_split
from paceline.data.image.synthetic import SyntheticSource
from paceline.data.image.webdataset import open_webdataset
from paceline.errors import DataError, RecipeError, did_you_mean
from paceline.recipe.data import Data
from paceline.references import load_reference

LARGEST_SMALL_IMAGE = 64
_FOLDER_SIZE = 224
# Of ImageNet's training images, which pretrained models expect; the mean over channels for one channel.
_IMAGENET_MEAN = {3: (0.485, 0.456, 0.406), 1: (0.449,)}
_IMAGENET_STD = {3: (0.229, 0.224, 0.225), 1: (0.226,)}


@dataclass(frozen=True, kw_only=True)
class ImageDataset:
    """Labelled images in two splits, and how they are to be shown.

    Attributes:
        name: What the recipe calls it.
        train: Training images.
        validation: Held-out images.
        classes: Class names; a label is an index into them.
        channels: 1 or 3, of every image the sources give.
        image_size: Height and width the model sees, in pixels.
        holdout: Images of the training split that are not trained on, to choose by after training; None if there are
            none.
        native_size: Height and width of the stored images if all share them, else None.
        digest: Says whether two runs saw the same data; a hash of the content, or of file names and sizes.
        mean: Per-channel mean subtracted from pixels in [0, 1].
        std: Per-channel standard deviation they are divided by.
        reasons: Why a value that the recipe left open is what it is, by its name in the recipe; under
            ``validation`` where the held-out images come from; and why ``validation_fraction`` has no say in
            that, if it has none.
    """

    name: str
    train: SampleSource
    validation: SampleSource
    classes: tuple[str, ...]
    channels: int
    image_size: int
    holdout: SampleSource | None = None
    native_size: tuple[int, int] | None = None
    digest: str = ""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    reasons: Mapping[str, str] = field(default_factory=dict)


def open_dataset(data: Data, fault: Fault = refuse) -> ImageDataset:
    """Open the data set that the recipe's `data` section names.

    Args:
        data: The section.
        fault: Told of what is wrong with the layout of an image folder; raises unless the rest is wanted.

    Raises:
        DataError: If there is no such data set, or it cannot be read.
        RecipeError: If the section does not fit the data set.
    """
    opener = _OPENERS.get(data.dataset)
    if data.dataset in _FOLDER_OPENERS:
        dataset = _FOLDER_OPENERS[data.dataset](data, fault)
    elif opener is not None:
        dataset = _opened(opener, data)
    elif ":" in data.dataset:
        dataset = _from_factory(data)
    else:
        known = {**_OPENERS, **_FOLDER_OPENERS}
        raise DataError(
            f"data.dataset is {data.dataset!r}, but known are {', '.join(sorted(known))} and "
            f"'package.module:factory'.{did_you_mean(data.dataset, known)}"
        )
    return _normalised(data, _with_holdout(data, dataset))


def _opened(opener: Callable[[Data], ImageDataset], data: Data) -> ImageDataset:
    """Open it, and say in one sentence what damaged or unreadable files make of that."""
    try:
        return opener(data)
    except (OSError, ValueError, LookupError, RecursionError) as error:
        if data.path is None:
            raise
        raise DataError(
            f"data.path={data.path} cannot be read as data.dataset={data.dataset}: {type(error).__name__}: {error}; "
            "restore it, or correct the path."
        ) from error


def _with_holdout(data: Data, dataset: ImageDataset) -> ImageDataset:
    """Take away from the training images what a recipe holds out of them."""
    if data.holdout_fraction == 0:
        return dataset
    train, held_out = hold_out(dataset.train.labels, data.holdout_fraction)
    if len(held_out) == 0:
        raise RecipeError(
            f"data.holdout_fraction={data.holdout_fraction} holds nothing out: no class has two training images; leave "
            "it out."
        )
    return replace(dataset, train=SubsetSource(dataset.train, train), holdout=SubsetSource(dataset.train, held_out))


def _open_digits(data: Data) -> ImageDataset:
    source = digits.read_digits()
    train_ids, held_out_ids = stratified_split(source.labels, data.validation_fraction)
    images, channels = _channels(source.images, data)
    whole = ArraySource(images, source.labels, source.name)
    return ImageDataset(
        name="digits",
        train=SubsetSource(whole, train_ids),
        validation=SubsetSource(whole, held_out_ids),
        classes=digits.CLASSES,
        channels=channels,
        image_size=_size(data, digits.SIZE),
        native_size=(digits.SIZE, digits.SIZE),
        digest=array_digest(source),
        mean=digits.MEAN * channels,
        std=digits.STD * channels,
        reasons={
            **_array_reasons("the digits", digits.SIZE, 1),
            "validation": split_off(data.validation_fraction),
        },
    )


def _open_cifar10(data: Data, fault: Fault) -> ImageDataset:
    path = _required_path(data)
    archive = cifar.find_cifar_archive(path)
    if archive is None:
        dataset = _open_folder(data, fault)
        mean, std = cifar.MEAN[dataset.channels], cifar.STD[dataset.channels]
        return replace(dataset, mean=mean, std=std, reasons={**dataset.reasons, **_CIFAR_MEAN})
    train, validation = cifar.read_cifar10(archive)
    digest = array_digest(train, validation)
    train_images, channels = _channels(train.images, data)
    validation_images, _ = _channels(validation.images, data)
    return ImageDataset(
        name="cifar10",
        train=ArraySource(train_images, train.labels, train.name),
        validation=ArraySource(validation_images, validation.labels, validation.name),
        classes=cifar.CLASSES,
        channels=channels,
        image_size=_size(data, cifar.SIZE),
        native_size=(cifar.SIZE, cifar.SIZE),
        digest=digest,
        mean=cifar.MEAN[channels],
        std=cifar.STD[channels],
        reasons={
            **_array_reasons("CIFAR-10", cifar.SIZE, 3),
            **_CIFAR_MEAN,
            **_own_split("the archive's test images"),
        },
    )


def _open_folder(data: Data, fault: Fault) -> ImageDataset:
    return _of_files(data, partial(open_image_folder, fault=fault))


def _open_webdataset(data: Data) -> ImageDataset:
    return _of_files(data, open_webdataset)


def _open_huggingface(data: Data) -> ImageDataset:
    return _of_files(data, partial(open_huggingface, label_column=data.label_column))


def _open_packed(data: Data) -> ImageDataset:
    known: list[tuple[tuple[float, ...], tuple[float, ...]]] = []

    def opened(path: Path, *, channels: int | None, validation_fraction: float) -> StoredImages:
        folder, statistics = packed_images(path, channels=channels, validation_fraction=validation_fraction)
        known.extend([] if statistics is None else [statistics])
        return folder

    dataset = _of_files(data, opened)
    if not known:
        return dataset
    why = dict.fromkeys(("mean", "std"), "of the set that was packed")
    return replace(dataset, mean=known[0][0], std=known[0][1], reasons={**dataset.reasons, **why})


def _of_files(data: Data, opener: Callable[..., ImageFolder | StoredImages]) -> ImageDataset:
    path = _required_path(data)
    channels = None if data.channels == "auto" else data.channels
    folder = opener(path, channels=channels, validation_fraction=data.validation_fraction)
    image_size, size_reason = _folder_size(data, folder)
    probe = folder.probe
    return ImageDataset(
        name=data.dataset,
        train=folder.train,
        validation=folder.validation,
        classes=folder.classes,
        channels=folder.channels,
        image_size=image_size,
        native_size=probe.size,
        digest=folder.digest,
        mean=_IMAGENET_MEAN[folder.channels],
        std=_IMAGENET_STD[folder.channels],
        reasons={
            **({"path": folder.listing} if isinstance(folder, ImageFolder) else {}),
            "image_size": size_reason,
            "channels": f"of {probe.count} images tried, {'all' if probe.greyscale else 'not all'} are grey",
            "mean": "ImageNet's, which pretrained models expect",
            "std": "ImageNet's, which pretrained models expect",
            **({"validation": folder.split} if folder.is_split_off else _own_split(folder.split)),
        },
    )


def _folder_size(data: Data, folder: ImageFolder | StoredImages) -> tuple[int, str]:
    probe = folder.probe
    if data.image_size != "auto":
        return data.image_size, "as the recipe says"
    if probe.size is not None and probe.size[0] == probe.size[1] <= LARGEST_SMALL_IMAGE:
        return probe.size[0], f"all of {probe.count} images tried are {probe.size[0]}x{probe.size[0]}"
    return _FOLDER_SIZE, "the usual size for photographs; not all images are small squares of one size"


def _open_synthetic(data: Data) -> ImageDataset:
    channels = 3 if data.channels == "auto" else data.channels
    image_size = _FOLDER_SIZE if data.image_size == "auto" else data.image_size
    shape = (image_size, image_size, channels)
    held_out = max(1, data.samples // 10)
    return ImageDataset(
        name="synthetic",
        train=SyntheticSource(data.samples, data.classes, shape),
        validation=SyntheticSource(held_out, data.classes, shape, first=data.samples),
        classes=tuple(str(index) for index in range(data.classes)),
        channels=channels,
        image_size=image_size,
        native_size=(image_size, image_size),
        digest=f"noise {data.samples} {data.classes} {shape}",
        mean=(0.5,) * channels,
        std=(0.2887,) * channels,
        reasons={
            "image_size": "the usual size for photographs",
            "channels": "colour unless the recipe says otherwise",
            "mean": "of uniform noise",
            "std": "of uniform noise",
        },
    )


def _from_factory(data: Data) -> ImageDataset:
    factory = load_reference(data.dataset, DataError)
    dataset = factory(data)
    if not isinstance(dataset, ImageDataset):
        raise DataError(
            f"{data.dataset!r} returned {type(dataset).__name__}; it must return a "
            "paceline.data.image.datasets.ImageDataset."
        )
    return dataset


def _required_path(data: Data) -> Path:
    if data.path is None:
        raise DataError(f"data.dataset={data.dataset} needs to know where the data lies: set data.path.")
    return Path(data.path).expanduser()


def _channels(images: Image, data: Data) -> tuple[Image, int]:
    """Return the images with the channels that the recipe asks for, and how many those are."""
    wanted = images.shape[-1] if data.channels == "auto" else data.channels
    return with_channels(images, wanted), wanted


def _size(data: Data, native: int) -> int:
    return native if data.image_size == "auto" else data.image_size


def _array_reasons(name: str, size: int, channels: int) -> dict[str, str]:
    return {
        "image_size": f"{name} are {size}x{size}",
        "channels": f"{name} are {'greyscale' if channels == 1 else 'colour'}",
        "mean": f"of {name}",
        "std": f"of {name}",
    }


def _own_split(held_out: str) -> dict[str, str]:
    """Reasons of a data set with a split of its own."""
    return {"validation": held_out, "validation_fraction": f"the data has a split of its own, {held_out}"}


_CIFAR_MEAN = dict.fromkeys(("mean", "std"), "of CIFAR-10's training images")


def _normalised(data: Data, dataset: ImageDataset) -> ImageDataset:
    """Put the recipe's own mean and standard deviation in place of the data set's."""
    mean = dataset.mean if data.mean == "auto" else data.mean
    std = dataset.std if data.std == "auto" else data.std
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != dataset.channels:
            raise RecipeError(
                f"data.{name} has {len(values)} values, but the images have {dataset.channels} channels: "
                "give one value per channel, or 'auto'."
            )
    return replace(dataset, mean=mean, std=std)


_OPENERS = {
    "digits": _open_digits,
    "packed": _open_packed,
    "webdataset": _open_webdataset,
    "huggingface": _open_huggingface,
    "synthetic": _open_synthetic,
}
# Of what may lie in folders, and then in folders that are laid out in another way.
_FOLDER_OPENERS = {"image_folder": _open_folder, "cifar10": _open_cifar10}
