"""Images in parquet files, row group by row group: cheap in their order, and in no other."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.image.decode import BrokenImageError, decode
from paceline.data.image.huggingface import Columns, HuggingFaceFiles, checked_labels, require_pyarrow
from paceline.data.image.mapped import Names
from paceline.data.image.source import Ids, Image
from paceline.errors import DataError


class ParquetSource:
    """The images of one split; keeps the row group that was read last."""

    def __init__(self, files: HuggingFaceFiles, columns: Columns, split: str) -> None:
        """Read labels and names, and no image.

        Raises:
            DataError: If a label stands for no class.
        """
        arrow = require_pyarrow()
        self.channels = 3
        self._column = columns.image
        self._groups: list[tuple[Path, int]] = []
        starts, labels = [0], []
        names: list[str] = []
        for path in files.splits[split]:
            with arrow.parquet.ParquetFile(path) as opened:
                for group in range(opened.num_row_groups):
                    self._groups.append((path, group))
                    starts.append(starts[-1] + opened.metadata.row_group(group).num_rows)
                table = opened.read(columns=[columns.label, f"{columns.image}.path"])
            labels.append(table.column(columns.label).fill_null(-1).to_numpy().astype(np.int64))
            rows = table.column(columns.image).combine_chunks()
            has_path = rows.type.get_field_index("path") >= 0
            paths = rows.field("path").to_pylist() if has_path else [None] * len(rows)
            names += [name or f"{split}[{len(names) + row}]" for row, name in enumerate(paths)]
        self.labels: Ids = checked_labels(np.concatenate(labels), columns, split, files.root)
        self.names = Names.of(names)
        self._starts = np.array(starts, dtype=np.int64)
        self._loaded: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return len(self.labels)

    def encoded(self, sample: int) -> memoryview:
        """Return the content of image file ``sample``; raises BrokenImageError."""
        group = int(np.searchsorted(self._starts, sample, side="right")) - 1
        if self._loaded[0] != group:
            self._loaded = (group, self._load(group))
        content = self._loaded[1][sample - int(self._starts[group])].as_buffer()
        if content is None:
            raise BrokenImageError(self.path(sample), "its row names an image file in place of holding it")
        return memoryview(content)

    def read(self, sample: int) -> Image:
        """Decode image ``sample``; raises BrokenImageError."""
        try:
            return decode(bytes(self.encoded(sample)), self.channels)
        except BrokenImageError as error:
            raise BrokenImageError(self.path(sample), error.reason) from error

    def path(self, sample: int) -> str:
        """Return the sample's name."""
        return self.names[sample]

    def digest(self) -> str:
        """Over labels and names, and the files' names and sizes."""
        digest = hashlib.sha256()
        for path in dict.fromkeys(path for path, _ in self._groups):
            digest.update(f"{path.name}\0{path.stat().st_size}\n".encode())
        for part in (self.labels, self.names.ends, self.names.blob):
            digest.update(part.tobytes())
        return digest.hexdigest()

    def _load(self, group: int) -> Any:
        path, number = self._groups[group]
        arrow = require_pyarrow()
        try:
            with arrow.parquet.ParquetFile(path) as opened:
                table = opened.read_row_group(number, columns=[f"{self._column}.bytes"], use_threads=False)
        except (OSError, arrow.ArrowException) as error:
            raise DataError(f"{str(path)!r} cannot be read ({error}): download or make it again.") from error
        return table.column(self._column).combine_chunks().field("bytes")
