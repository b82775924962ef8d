"""A data set in many files (shards) for training in an order of a few files at a time."""

from __future__ import annotations

import contextlib
import glob
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.disk_cache import stamp_of
from paceline.data.shard_order import ShardSizes
from paceline.data.shards.formats import FORMATS, Rows, ShardFiles, open_shard
from paceline.data.shards.index import count_samples
from paceline.errors import DataError, StorageError, data_error
from paceline.parsing.arguments import folder, whole
from paceline.parsing.files import SkippedItems, has_extension, list_files
from paceline.storage.addresses import is_address
from paceline.storage.file_cache import FileCache
from paceline.storage.remote import run_concurrently


class Shards:
    """The samples in a folder of tars, JSON lines, parquet or MDS files, with ``len()`` and ``[i]``.

    :class:`paceline.Loop` and :func:`paceline.fit` read such a data set a window of shards at a time: shards are
    permuted, and then the samples within each ``window`` consecutive ones. The order is a pure function of (seed,
    epoch, position), whatever the ranks and workers, and resumes without any state. A larger window mixes better, and
    reads from more files at once.

    Samples are numbered through the shards in the order of their names. A sample of

    - a tar (WebDataset) is a dict of bytes by ending, such as ``jpg`` and ``cls``, with its name as ``__key__``;
    - ``.jsonl`` is the value of its line;
    - parquet and MDS is a dict by column.

    The number of samples in each file is counted once, and kept in the user's cache until the file changes.

    Args:
        path: A folder, also with subfolders; a pattern (``"corpus/train-*.tar"``, with ``**`` for subfolders); a list
            of files; or an address (``s3://bucket/corpus``), whose files are copied when they are needed, and deleted
            when space runs out.
        decode: Makes what ``[i]`` returns of a sample.
        window: Shards whose samples are mixed with one another. Each process keeps up to twice as many open; the rows
            of an open parquet file are in memory.
        skip_damaged: Whether to leave out shards that cannot be read; they are named in ``left_out``.

    Attributes:
        names: The shards that have samples.
        left_out: A sentence for each damaged shard, and each kind of file that is not read.
        shard_sizes: How many samples each has, and the window. A data set of your own with this attribute is read in
            the same way.

    Raises:
        DataError: If there are no shards, or one is damaged.

    Example:
        >>> corpus = Shards("corpus", decode=lambda sample: tokenize(sample["text"]), window=8)
        >>> loop = paceline.Loop("runs/corpus", corpus, batch_size=64, epochs=1)
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        *,
        decode: Callable[[Any], Any] | None = None,
        window: int = 16,
        skip_damaged: bool = False,
    ) -> None:
        window, skipped, damaged = whole("window", window, 1), SkippedItems(), list[str]()
        self._place = FileCache.of(path) if isinstance(path, str) and is_address(path) else _Files.of(path, skipped)
        names = sorted(each for each in self._place.names if has_extension(each, FORMATS))
        for each in self._place.names:
            if not has_extension(each, FORMATS) and each.rpartition("/")[2] != "index.json":
                skipped.add("files that are not shards", each)
        if not names:
            endings = ", ".join(f".{each}" for each in FORMATS)
            raise data_error(str(path), f"has no files that end in {endings}: correct the path.")

        def on_damaged(error: DataError) -> None:
            if not skip_damaged:
                raise error
            damaged.append(str(error))

        counts = count_samples(self._place, names, on_damaged)
        if not counts.any():
            raise data_error(str(path), f"has {len(names)} shards without any sample: correct the path.")
        self.names = [each for each, count in zip(names, counts, strict=True) if count]
        fetch = self._fetch if isinstance(self._place, FileCache) else None
        self.shard_sizes = ShardSizes(sizes=counts[counts > 0], window=window, fetch=fetch)
        self.left_out = (*damaged, *skipped.summaries())
        self._decode = decode
        self._opened: OrderedDict[int, Rows] = OrderedDict()

    def __len__(self) -> int:
        return int(self.shard_sizes.ends[-1])

    def __getitem__(self, sample: int) -> Any:
        """Return a sample; raises DataError if its shard is damaged, or has changed."""
        if not -len(self) <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self):,}")
        shard, row = self.shard_sizes.locate(sample % len(self))
        read = self._rows(shard)[row]
        return read if self._decode is None else self._decode(read)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker process needs: open files stay in this one."""
        return {**self.__dict__, "_opened": OrderedDict()}

    def __repr__(self) -> str:
        sizes = self.shard_sizes
        share = min(1.0, sizes.window * float(np.mean(sizes.sizes)) / len(self))
        return (
            f"Shards({len(self.names):,} files, {len(self):,} samples, mixed within windows of {sizes.window} files "
            f"({share:.1%} of an epoch))"
        )

    def _fetch(self, shards: list[int]) -> None:
        """Fetch shards before they are read; an error is raised by whoever reads them."""
        with contextlib.suppress(StorageError):
            run_concurrently(lambda shard: self._place.local(self.names[shard]), shards, threads=4, name="shards")

    def _rows(self, shard: int) -> Rows:
        if shard not in self._opened:
            rows = open_shard(self._place, self.names[shard])
            if len(rows) != self.shard_sizes.sizes[shard]:
                raise data_error(self.names[shard], "has changed since the data set was opened: start again.")
            # Two windows meet within a batch, and loader processes read batches ahead.
            while len(self._opened) >= 2 * self.shard_sizes.window:
                self._opened.popitem(last=False)
            self._opened[shard] = rows
        self._opened.move_to_end(shard)
        return self._opened[shard]


@dataclass
class _Files:
    """Shards on a disk of this host."""

    root: Path
    names: list[str] = field(repr=False)

    @classmethod
    def of(cls, path: str | Path | Sequence[str | Path], skipped: SkippedItems) -> ShardFiles:
        if isinstance(path, list | tuple):
            return cls(Path(), [os.path.abspath(folder("path", each)) for each in path])
        root = folder("path", path)
        if root.is_dir():
            return cls(root.resolve(), list_files(root, skipped))
        return cls(Path(), [str(root.resolve())] if root.exists() else glob.glob(os.path.abspath(root), recursive=True))

    def stamp(self, name: str) -> tuple[int, ...]:
        try:
            return stamp_of(self.root / name)
        except OSError as error:
            raise data_error(name, f"cannot be read ({error.strerror}): restore it.") from error

    def local(self, name: str) -> Path:
        return self.root / name
