"""A data set of images: what is asked of its opener, what the opener returns, and what a run then sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paceline.data.image.listing import Fault
from paceline.data.image.source import SampleSource, SubsetSource
from paceline.data.image.splits import split_off, stratified_split
from paceline.errors import DataError
from paceline.recipe.data import Data


@dataclass(frozen=True, kw_only=True)
class DatasetRequest:
    """What a data set is opened with.

    Attributes:
        data: The recipe's section.
        fault: Told of each defect of the layout or the rows, which is then left out; None to refuse them all.
        in_any_order: Whether images will be read in any order; packing reads them in theirs.
    """

    data: Data
    fault: Fault | None = None
    in_any_order: bool = True

    @property
    def path(self) -> Path:
        """Where the data lies.

        Raises:
            DataError: If the recipe does not say.
        """
        if self.data.path is None:
            raise DataError(f"data.dataset={self.data.dataset} needs to know where the data lies: set data.path.")
        return Path(self.data.path).expanduser()

    @property
    def channels(self) -> int | None:
        """Channels to decode to, 1 or 3; None for what the images have."""
        return None if self.data.channels == "auto" else self.data.channels


@dataclass(frozen=True)
class Probe:
    """What the heads of some images say.

    Attributes:
        count: Images looked at.
        size: Height and width if all of these have the same, else None.
        greyscale: Whether all of these are.
    """

    count: int
    size: tuple[int, int] | None
    greyscale: bool


class Statistics(NamedTuple):
    """Mean and standard deviation per channel, on the scale 0 … 1, and what they are of."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    told: str


@dataclass(frozen=True, kw_only=True)
class StoredImages:
    """The images of a data set, opened.

    Attributes:
        train: Training images.
        validation: Held-out images.
        classes: Class names; a label is an index into them.
        digest: Tells the data set from others: a hash of the content, or of file names and sizes.
        split: Where the held-out images come from, for people; empty if there is nothing to say.
        is_split_off: Whether they were split off the training images, of whose source both are parts.
        channels: What the images are decoded to: 1 or 3.
        probe: What some of the training images look like.
        statistics: Known mean and standard deviation; None for those that pretrained models expect.
        listing: How the images were found, or what reading them costs, for people.
        left_out: What is there and not used, a sentence for each kind.
    """

    train: SampleSource
    validation: SampleSource
    classes: tuple[str, ...]
    digest: str
    split: str
    is_split_off: bool
    channels: int
    probe: Probe
    statistics: Statistics | None = None
    listing: str = ""
    left_out: tuple[str, ...] = ()


def in_splits(
    sources: Sequence[SampleSource],
    held_out: str,
    validation_fraction: float,
    **facts: Any,
) -> StoredImages:
    """The training and the held-out images, or a share of each class held out where there are only training images.

    Args:
        sources: Training images, and held-out ones if the data has them.
        held_out: Where those come from, for people; of data without them, what else there is to say of splits.
        validation_fraction: Share of each class to hold out otherwise.
        **facts: Further attributes of :class:`StoredImages`.
    """
    is_split_off = len(sources) == 1
    if is_split_off:
        (whole,) = sources
        sources = [SubsetSource(whole, ids) for ids in stratified_split(whole.labels, validation_fraction)]
        held_out = "; ".join(each for each in (split_off(validation_fraction), held_out) if each)
    train, validation = sources
    return StoredImages(train=train, validation=validation, split=held_out, is_split_off=is_split_off, **facts)


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
        is_split_off: Whether the held-out images were split off the training images, of whose source both are parts.
        selection: What part of the data the recipe asks for, for the plan; empty if all of it.
        digest: Says whether two runs saw the same data; a hash of the content, or of file names and sizes.
        mean: Per-channel mean that is subtracted from pixels, on the scale 0 … 1.
        std: Per-channel standard deviation they are divided by.
        reasons: Why a value that the recipe left open is what it is, by its name in the recipe; under
            ``validation`` where the held-out images come from; and why ``validation_fraction`` has no effect, if it
            has none.
        left_out: What is there and not used, a sentence for each kind.
    """

    name: str
    train: SampleSource
    validation: SampleSource
    classes: tuple[str, ...]
    channels: int
    image_size: int
    holdout: SampleSource | None = None
    native_size: tuple[int, int] | None = None
    is_split_off: bool = False
    selection: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    reasons: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
