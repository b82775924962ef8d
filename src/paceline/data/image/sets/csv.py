"""Tables of paths and labels: CSV or TSV files."""

from __future__ import annotations

from paceline.data.image.dataset import DatasetRequest, StoredImages
from paceline.data.image.sets import IMAGENET, TABLE
from paceline.data.image.tables import ImageTable
from paceline.data.tables import CSV_ENDINGS, TableFile
from paceline.plugins.dataset_registry import dataset


@dataset("csv", endings=CSV_ENDINGS, keys=(*TABLE, "target_columns", "split_column"), size=IMAGENET)
def open_csv(request: DatasetRequest) -> StoredImages:
    """Read a table of paths and labels, and probe the headers of a few images.

    The first line names the columns, separated by commas, semicolons or tabs.

    Raises:
        DataError: If it cannot be read, or a column, a label or a path is missing.
    """
    return ImageTable(request.path, [TableFile(request.path, "csv")], request).open_paths()
