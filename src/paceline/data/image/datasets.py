"""Open the data set that a recipe names, and resolve every ``auto`` of it with its reason."""

from __future__ import annotations

from dataclasses import replace

from paceline.data.image.dataset import DatasetRequest, ImageDataset, StoredImages
from paceline.data.image.listing import Fault
from paceline.data.image.selection import select
from paceline.dataset_registry import dataset_names, find_dataset
from paceline.errors import DataError, RecipeError, did_you_mean
from paceline.recipe.data import Data
from paceline.references import call_reference, is_reference, load_reference

LARGEST_SMALL_IMAGE = 64
_PHOTOGRAPH_SIZE = 224
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
    if is_reference(data.dataset):
        factory = load_reference(data.dataset, DataError)
        dataset = call_reference("data.dataset", data.dataset, factory, DataError, data)
        if not isinstance(dataset, ImageDataset):
            raise DataError(
                f"{data.dataset!r} returned {type(dataset).__name__}; it must return a "
                "paceline.data.image.datasets.ImageDataset."
            )
    else:
        dataset = _described(data, open_stored(DatasetRequest(data=data, fault=fault)))
    dataset = select(data, dataset)
    mean = dataset.mean if data.mean == "auto" else data.mean
    std = dataset.std if data.std == "auto" else data.std
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != dataset.channels:
            raise RecipeError(
                f"data.{name} has {len(values)} values, but the images have {dataset.channels} channels: "
                "give one value per channel, or 'auto'."
            )
    return replace(dataset, mean=mean, std=std)


def open_stored(request: DatasetRequest) -> StoredImages:
    """Open a data set of the registry, all of it.

    Raises:
        DataError: If there is none of that name, or it cannot be read.
    """
    data = request.data
    entry = find_dataset(data.dataset)
    if entry is None:
        known = dataset_names()
        raise DataError(
            f"data.dataset is {data.dataset!r}, but known are {', '.join(sorted(known))} and "
            f"'package.module:factory'.{did_you_mean(data.dataset, known)}"
        )
    try:
        found = entry.open(request)
    except (OSError, ValueError, LookupError, RecursionError) as error:
        if data.path is None:
            raise
        raise DataError(
            f"data.path={data.path} cannot be read as data.dataset={data.dataset}: {type(error).__name__}: {error}; "
            "restore it, or correct the path."
        ) from error
    if not isinstance(found, StoredImages):
        raise DataError(
            f"data.dataset={data.dataset}: its opener returned {type(found).__name__}; it must return a "
            "paceline.data.image.dataset.StoredImages."
        )
    return found


def _described(data: Data, stored: StoredImages) -> ImageDataset:
    """Resolve what the recipe leaves open."""
    probe, statistics, channels = stored.probe, stored.statistics, stored.channels
    grey = "all" if probe.greyscale else "not all"
    reasons = {"channels": f"of {probe.count} images tried, {grey} are grey"}
    if data.image_size != "auto":
        image_size, reasons["image_size"] = data.image_size, "as the recipe says"
    elif probe.size is not None and probe.size[0] == probe.size[1] <= LARGEST_SMALL_IMAGE:
        image_size = probe.size[0]
        reasons["image_size"] = f"all of {probe.count} images tried are {image_size}x{image_size}"
    else:
        image_size = _PHOTOGRAPH_SIZE
        reasons["image_size"] = "the usual size for photographs; not all images are small squares of one size"
    why = "ImageNet's, which pretrained models expect" if statistics is None else statistics.told
    reasons |= dict.fromkeys(("mean", "std"), why)
    if stored.listing:
        reasons["path"] = stored.listing
    if stored.split:
        reasons["validation"] = stored.split
    if stored.split and not stored.is_split_off:
        reasons["validation_fraction"] = f"the data has a split of its own, {stored.split}"
    return ImageDataset(
        name=data.dataset,
        train=stored.train,
        validation=stored.validation,
        classes=stored.classes,
        channels=channels,
        image_size=image_size,
        native_size=probe.size,
        is_split_off=stored.is_split_off,
        digest=stored.digest,
        mean=_IMAGENET_MEAN[channels] if statistics is None else statistics.mean,
        std=_IMAGENET_STD[channels] if statistics is None else statistics.std,
        reasons=reasons,
        left_out=stored.left_out,
    )


__all__ = ["LARGEST_SMALL_IMAGE", "ImageDataset", "open_dataset", "open_stored"]
