"""What is a data set of images, once it is open?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.data.image.source import SampleSource


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
        mean: Per-channel mean subtracted from pixels in [0, 1].
        std: Per-channel standard deviation they are divided by.
        reasons: Why a value that the recipe left open is what it is, by its name in the recipe; under
            ``validation`` where the held-out images come from; and why ``validation_fraction`` has no say in
            that, if it has none.
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
