"""The built-in image data sets: each file here registers its data sets."""

from __future__ import annotations

from paceline.plugins.dataset_registry import Size

# Keys of a recipe's ``data`` section that have an effect on a data set.
PART = ("only_classes", "subset")
SPLIT = ("validation_fraction", "split_by", "saved_split")
FILES = ("path", *PART, *SPLIT)
TABLE = (*FILES, "image_column", "label_column")

# Stands in for a data set of files if the files are missing.
IMAGENET = Size("ImageNet", 1_281_167, 1000, 224)
