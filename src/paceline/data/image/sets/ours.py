"""The data sets of images that every installation has. Another one of ours is another file in this folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline.data.image.dataset import DatasetRequest, StoredImages
from paceline.data.image.sets import archives, digits, synthetic
from paceline.data.image.sets.huggingface import open_huggingface
from paceline.data.image.sets.image_folder import open_image_folder
from paceline.data.image.sets.packed import packed_images
from paceline.data.image.sets.parquet import open_parquet
from paceline.data.image.sets.torchvision import PREFIX, open_torchvision
from paceline.data.image.sets.webdataset import open_webdataset
from paceline.data.image.tables import Asked, open_csv
from paceline.dataset_registry import Size, dataset

_PART = ("only_classes", "subset")
_SPLIT = ("validation_fraction", "split_by", "saved_split")
_FILES = ("path", *_PART, *_SPLIT)
_TABLE = ("image_column", "label_column")
_ARCHIVE = ("path", "download", *_PART)
_IMAGENET = Size("ImageNet", 1_281_167, 1000, 224)


@dataset("image_folder", keys=_FILES, size=_IMAGENET)
def image_folder(request: DatasetRequest) -> StoredImages:
    """A folder of class folders."""
    return open_image_folder(
        request.path,
        channels=request.channels,
        validation_fraction=request.data.validation_fraction,
        fault=request.fault,
    )


@dataset("csv", keys=(*_FILES, *_TABLE, "split_column"), size=_IMAGENET)
def csv(request: DatasetRequest) -> StoredImages:
    """A CSV or TSV file of paths and labels."""
    return open_csv(
        request.path,
        channels=request.channels,
        validation_fraction=request.data.validation_fraction,
        asked=Asked.of(request.data),
        fault=request.fault,
    )


@dataset("parquet", keys=(*_FILES, *_TABLE, "split_column"), size=_IMAGENET)
def parquet(request: DatasetRequest) -> StoredImages:
    """Parquet tables of images, or of their paths."""
    return open_parquet(
        request.path,
        channels=request.channels,
        validation_fraction=request.data.validation_fraction,
        asked=Asked.of(request.data),
        fault=request.fault,
        in_any_order=request.in_any_order,
    )


@dataset("packed", keys=_FILES, size=_IMAGENET)
def packed(request: DatasetRequest) -> StoredImages:
    """What ``paceline pack`` wrote."""
    return packed_images(request.path, channels=request.channels, validation_fraction=request.data.validation_fraction)


@dataset("webdataset", keys=_FILES, size=_IMAGENET)
def webdataset(request: DatasetRequest) -> StoredImages:
    """WebDataset tars."""
    return open_webdataset(
        request.path, channels=request.channels, validation_fraction=request.data.validation_fraction
    )


@dataset("huggingface", keys=(*_FILES, *_TABLE), size=_IMAGENET)
def huggingface(request: DatasetRequest) -> StoredImages:
    """A dataset of Hugging Face's on the local disk."""
    return open_huggingface(
        request.path,
        channels=request.channels,
        validation_fraction=request.data.validation_fraction,
        label_column=request.data.label_column,
        image_column=request.data.image_column,
        in_any_order=request.in_any_order,
    )


@dataset("digits", keys=(*_PART, *_SPLIT))
def handwritten_digits(request: DatasetRequest) -> StoredImages:
    """The digits that scikit-learn brings."""
    return digits.open_digits(request.channels, request.data.validation_fraction)


@dataset("cifar10", keys=(*_ARCHIVE, *_SPLIT), size=Size("CIFAR-10", 50_000, 10, 32))
def cifar10(request: DatasetRequest) -> StoredImages:
    """CIFAR-10 as it is published, or as an image folder."""
    if request.data.download or archives.find_archive(request.path, "cifar10") is not None:
        return archive(request)
    found = image_folder(request)
    return replace(found, statistics=archives.ARCHIVES["cifar10"].statistics(found.channels))


@dataset("fashion_mnist", keys=_ARCHIVE, size=Size("Fashion-MNIST", 60_000, 10, 28))
@dataset("mnist", keys=_ARCHIVE, size=Size("MNIST", 60_000, 10, 28))
@dataset("cifar100", keys=_ARCHIVE, size=Size("CIFAR-100", 50_000, 100, 32))
def archive(request: DatasetRequest) -> StoredImages:
    """A published archive, downloaded first if the recipe asks for that."""
    if request.data.download:
        archives.download(request.path, request.data.dataset)
    return archives.open_archive(request.path, request.data.dataset, request.channels)


@dataset("torchvision:NAME", keys=("path", "download", "options", *_PART))
def torchvision(request: DatasetRequest) -> StoredImages:
    """A data set of ``torchvision.datasets``."""
    data = request.data
    return open_torchvision(
        data.dataset.removeprefix(PREFIX),
        None if data.path is None else Path(data.path).expanduser(),
        channels=request.channels,
        validation_fraction=data.validation_fraction,
        download=data.download,
        options=data.options,
    )


@dataset("synthetic", keys=("samples", "classes"))
def noise(request: DatasetRequest) -> StoredImages:
    """Images of noise."""
    return synthetic.open_synthetic(request.data)
