"""The data sets of images that every installation has: each file here registers its own."""

from __future__ import annotations

from paceline.dataset_registry import Size

# Keys of a recipe's ``data`` section that have an effect on a data set.
PART = ("only_classes", "subset")
SPLIT = ("validation_fraction", "split_by", "saved_split")
FILES = ("path", *PART, *SPLIT)
TABLE = (*FILES, "image_column", "label_column")

# What a data set of files is taken for where its files are not there.
IMAGENET = Size("ImageNet", 1_281_167, 1000, 224)
