"""Which data set does the recipe name, and what is in it? Every `auto` is resolved here, with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from paceline.data.image import archives, cifar, digits, torchvision_sets
from paceline.data.image.columns import Asked
from paceline.data.image.dataset import ImageDataset
from paceline.data.image.downloads import download_archive
from paceline.data.image.folder import ImageFolder, open_image_folder
from paceline.data.image.huggingface import open_huggingface
from paceline.data.image.listing import Fault
from paceline.data.image.manifest import open_csv
from paceline.data.image.mapped import StoredImages
from paceline.data.image.packed import packed_images
from paceline.data.image.parquet import open_parquet
from paceline.data.image.pixels import array_digest, with_channels
from paceline.data.image.selection import select
from paceline.data.image.source import ArraySource, Image, SubsetSource
from paceline.data.image.splits import split_off, stratified_split
from paceline.data.image.synthetic import SyntheticSource
from paceline.data.image.webdataset import open_webdataset
from paceline.errors import DataError, RecipeError, did_you_mean
from paceline.recipe.data import Data
from paceline.references import call_reference, load_reference

LARGEST_SMALL_IMAGE = 64
_FOLDER_SIZE = 224
# Of ImageNet's training images, which pretrained models expect; the mean over channels for one channel.
_IMAGENET_MEAN = {3: (0.485, 0.456, 0.406), 1: (0.449,)}
_IMAGENET_STD = {3: (0.229, 0.224, 0.225), 1: (0.226,)}


def open_dataset(data: Data, fault: Fault | None = None) -> ImageDataset:
    """Open the data set that the recipe's `data` section names.

    Args:
        data: The section.
        fault: Told of what is wrong with the layout of an image folder, or the rows of a table, if the rest is wanted.

    Raises:
        DataError: If there is no such data set, or it cannot be read.
        RecipeError: If the section does not fit the data set.
    """
    opener = _OPENERS.get(data.dataset)
    if data.dataset in _FOLDER_OPENERS:
        dataset = _FOLDER_OPENERS[data.dataset](data, fault)
    elif opener is not None:
        dataset = _opened(opener, data)
    elif data.dataset.startswith(torchvision_sets.PREFIX):
        dataset = _opened(_open_torchvision, data)
    elif ":" in data.dataset:
        dataset = _from_factory(data)
    else:
        known = {**_OPENERS, **_FOLDER_OPENERS}
        raise DataError(
            f"data.dataset is {data.dataset!r}, but known are {', '.join(sorted(known))}, 'torchvision:NAME' and "
            f"'package.module:factory'.{did_you_mean(data.dataset, known)}"
        )
    return _normalised(data, select(data, dataset))


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
        is_split_off=True,
        digest=array_digest(source),
        mean=digits.MEAN * channels,
        std=digits.STD * channels,
        reasons={
            **_array_reasons("the digits", digits.SIZE, 1),
            "validation": split_off(data.validation_fraction),
        },
    )


def _open_cifar10(data: Data, fault: Fault | None) -> ImageDataset:
    path = _required_path(data)
    if data.download or archives.find_archive(path, "cifar10") is not None:
        return _open_archive(data)
    dataset = _open_folder(data, fault)
    mean, std = cifar.MEAN[dataset.channels], cifar.STD[dataset.channels]
    return replace(dataset, mean=mean, std=std, reasons={**dataset.reasons, **_CIFAR_MEAN})


def _open_archive(data: Data) -> ImageDataset:
    path = _required_path(data)
    kind = next(name for name in archives.ARCHIVES if name == data.dataset)
    if data.download:
        download_archive(path, kind)
    archive, name = archives.read_archive(path, kind), archives.PUBLISHED[kind]
    digest = array_digest(archive.train, archive.test)
    native = archive.train.size(0)
    train, channels = _channels(archive.train.images, data)
    validation, _ = _channels(archive.test.images, data)
    mean, std = archive.normalisation(channels)
    if kind == "cifar10":
        mean, std = cifar.MEAN[channels], cifar.STD[channels]
    return ImageDataset(
        name=kind,
        train=ArraySource(train, archive.train.labels, archive.train.name),
        validation=ArraySource(validation, archive.test.labels, archive.test.name),
        classes=archive.classes,
        channels=channels,
        image_size=_size(data, native[0]),
        native_size=native,
        digest=digest,
        mean=mean,
        std=std,
        reasons={
            **_array_reasons(name, native[0], archive.train.images.shape[-1]),
            **dict.fromkeys(("mean", "std"), f"of {name}'s training images"),
            **_own_split("the archive's test images"),
        },
    )


def _open_folder(data: Data, fault: Fault | None) -> ImageDataset:
    return _of_files(data, partial(open_image_folder, fault=fault))


def _open_csv(data: Data, fault: Fault | None) -> ImageDataset:
    opener = partial(open_csv, asked=Asked.of(data), fault=fault)
    return _opened(partial(_of_files, opener=opener), data)


def _open_parquet(data: Data, fault: Fault | None) -> ImageDataset:
    opener = partial(open_parquet, asked=Asked.of(data), fault=fault)
    return _opened(partial(_of_files, opener=opener), data)


def _open_torchvision(data: Data) -> ImageDataset:
    name = data.dataset.removeprefix(torchvision_sets.PREFIX)
    root = None if data.path is None else _required_path(data)
    opener = partial(torchvision_sets.open_torchvision, name, download=data.download, options=data.options)
    return _of_files(data, lambda _, **given: opener(root, **given), root or Path())


def _open_webdataset(data: Data) -> ImageDataset:
    return _of_files(data, open_webdataset)


def _open_huggingface(data: Data) -> ImageDataset:
    return _of_files(data, partial(open_huggingface, label_column=data.label_column, image_column=data.image_column))


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


def _of_files(data: Data, opener: Callable[..., ImageFolder | StoredImages], path: Path | None = None) -> ImageDataset:
    path = path or _required_path(data)
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
        is_split_off=folder.is_split_off,
        digest=folder.digest,
        mean=_IMAGENET_MEAN[folder.channels],
        std=_IMAGENET_STD[folder.channels],
        reasons={
            **({"path": folder.listing} if folder.listing else {}),
            "image_size": size_reason,
            "channels": f"of {probe.count} images tried, {'all' if probe.greyscale else 'not all'} are grey",
            "mean": "ImageNet's, which pretrained models expect",
            "std": "ImageNet's, which pretrained models expect",
            **({"validation": folder.split} if folder.is_split_off else _own_split(folder.split)),
        },
        left_out=folder.left_out,
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
    dataset = call_reference("data.dataset", data.dataset, factory, DataError, data)
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
    "cifar100": _open_archive,
    "mnist": _open_archive,
    "fashion_mnist": _open_archive,
}
# Of what may lie in folders, and then in folders that are laid out in another way.
_FOLDER_OPENERS = {
    "image_folder": _open_folder,
    "cifar10": _open_cifar10,
    "csv": _open_csv,
    "parquet": _open_parquet,
}

__all__ = ["LARGEST_SMALL_IMAGE", "ImageDataset", "open_dataset"]
