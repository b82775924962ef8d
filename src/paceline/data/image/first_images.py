"""Which images does a network begin from whose first weights are made of the data?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from paceline.data.image.source import BrokenImageError, SampleSource
from paceline.data.image.transforms import View, evaluation_image
from paceline.errors import DataError


def first_images(source: SampleSource, view: View, count: int) -> torch.Tensor:
    """Images from all over a split, as evaluation shows them: the same ones in every process and at every resume.

    Sets often lie there class by class; the images taken are therefore evenly spaced. Broken ones are left out.

    Args:
        source: The split.
        view: The size they are shown at.
        count: How many to take, or all there are.

    Returns:
        uint8 [n, C, S, S].

    Raises:
        DataError: If none of them can be read.
    """
    ids = np.unique(np.linspace(0, len(source) - 1, min(count, len(source))).round().astype(np.int64))
    found = list(_whole(source, view, ids.tolist()))
    if not found:
        raise DataError(f"none of {len(ids)} training images could be read, from which the network was to begin.")
    return torch.stack(found)


def _whole(source: SampleSource, view: View, ids: list[int]) -> Iterator[torch.Tensor]:
    for sample in ids:
        try:
            image = source.read(sample)
        except BrokenImageError:
            continue  # told, and counted, when training comes to it
        yield evaluation_image(image, view.image_size, view.evaluation_crop, view.interpolation)
