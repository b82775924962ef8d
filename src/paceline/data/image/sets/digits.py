"""scikit-learn's handwritten digits: 1797 greyscale images of 8x8, available without a download.

Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
"""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np

from paceline.data.image.dataset import DatasetRequest, Statistics, StoredImages, pixel_images
from paceline.data.image.sets import PART, SPLIT
from paceline.data.image.source import ArraySource
from paceline.errors import DataError
from paceline.plugins.dataset_registry import dataset

SIZE = 8
CLASSES = tuple(str(digit) for digit in range(10))
# Statistics of all 1797 images, on the scale 0 … 1.
MEAN = (0.3053,)
STD = (0.3759,)


def read_digits() -> ArraySource:
    """Read all digits, uint8 [1797, 8, 8, 1], with their 17 grey levels scaled to 0 … 255.

    Raises:
        DataError: If scikit-learn is not installed, or lacks the file.
    """
    # Importing scikit-learn takes seconds; only its data file is needed.
    package = importlib.util.find_spec("sklearn")
    folders = [] if package is None else package.submodule_search_locations or []
    paths = [Path(folder, "datasets", "data", "digits.csv.gz") for folder in folders]
    path = next((each for each in paths if each.is_file()), None)
    if path is None:
        raise DataError(
            "The digits are part of scikit-learn, which is not installed here, or lacks its data: run "
            "pip install 'paceline[vision]', or choose another data.dataset."
        )
    with gzip.open(path, "rt", encoding="ascii") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.int64)
    # round(x * 255 / 16) in integers; halves round up
    grey = ((table[:, :-1] * 255 * 2 + 16) // 32).astype(np.uint8)
    return ArraySource(grey.reshape(-1, SIZE, SIZE, 1), table[:, -1], "digits")


@dataset("digits", keys=(*PART, *SPLIT))
def open_digits(request: DatasetRequest) -> StoredImages:
    """Open scikit-learn's digits, with a share of each class held out."""
    channels = request.channels or 1
    statistics = Statistics(MEAN * channels, STD * channels, "of the digits")
    return pixel_images(request, [read_digits()], classes=CLASSES, statistics=statistics)
