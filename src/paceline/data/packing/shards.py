"""How is one shard made? Images of one split, one after the other, into one Arrow file and a part of the index.

A shard is a function of the source and the form alone, so that any process can make any of them, twice if need be, with
the same bytes. Its part of the index is written first and the shard gets its name last: a shard that is there is whole.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from paceline.data.image.arrow import require_pyarrow
from paceline.data.image.decode import BrokenImageError
from paceline.data.image.packed_layout import UNFINISHED, Form, LeftOut, Shard
from paceline.data.image.source import Ids
from paceline.data.packing.origins import OriginSplit
from paceline.data.packing.recoding import Stored, stored
from paceline.errors import PacelineError
from paceline.plain_json import load_json
from paceline.records.run_directory import sync_directory

# What is held in memory before it is written: a record batch.
_BATCH_BYTES = 16 * 2**20
_BATCH_ROWS = 16384
_NOTED_EVERY = 64


class PackingError(PacelineError):
    """The disk refused, or a process died; what is finished stays, and the same command goes on."""

    exit_code = 1


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every process that makes shards knows.

    Attributes:
        root: The directory of the packed dataset.
        splits: The source's.
        classes: Class names.
        form: How images are to be stored.
    """

    root: Path
    splits: dict[str, OriginSplit]
    classes: tuple[str, ...]
    form: Form


@dataclass
class _Rows:
    """What is collected for the index."""

    label: list[int] = field(default_factory=list)
    name: list[str] = field(default_factory=list)
    height: list[int] = field(default_factory=list)
    width: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    sha256: list[bytes] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def add(self, image: Stored, label: int, name: str) -> None:
        self.label.append(label)
        self.name.append(name)
        self.height.append(image.height)
        self.width.append(image.width)
        self.length.append(len(image.content))
        self.sha256.append(hashlib.sha256(image.content).digest())


def part_path(root: Path, shard: Shard) -> Path:
    """Where the shard's part of the index lies until all are put together."""
    return root / UNFINISHED / shard.file


def is_made(root: Path, shard: Shard) -> bool:
    """Whether a shard and its part of the index are there."""
    path, part = root / shard.file, part_path(root, shard)
    if not path.is_file() or not part.is_file():
        return False
    return path.stat().st_size == int(_metadata(part)["size"])


def _metadata(part: Path) -> dict[str, Any]:
    arrow = require_pyarrow()
    with arrow.memory_map(str(part)) as file:
        said: dict[str, Any] = load_json(arrow.ipc.open_file(file).schema.metadata[b"paceline"])
        return said


def read_part(root: Path, shard: Shard) -> tuple[Any, dict[str, Any]]:
    """Return a shard's part of the index as an Arrow table, and what is known of the shard."""
    arrow = require_pyarrow()
    path = part_path(root, shard)
    with open(path, "rb") as file:
        return arrow.ipc.open_file(file).read_all(), _metadata(path)


def make_shard(work: Work, shard: Shard, note: Callable[[int], None]) -> None:
    """Write a shard and its part of the index; ``note`` is told now and then how many images were done since.

    Raises:
        PackingError: If the disk refuses.
    """
    with reporting_disk_errors(work.root / shard.file):
        target = work.root / shard.file
        partial = target.with_name(f".{target.name}.partial")
        rows = _Rows()
        with hashed_file(partial) as file:
            batches = _write(file, work, shard, rows, note)
        offsets = _offsets(partial, batches, np.array(rows.length, dtype=np.int64), _content_column(work.form))
        facts = {
            "size": file.size,
            "sha256": file.sha256.hexdigest(),
            "left_out": [asdict(each) for each in rows.left_out],
        }
        _write_part(part_path(work.root, shard), rows, offsets, facts)
        os.replace(partial, target)
        sync_directory(work.root)


def _write(file: HashingFile, work: Work, shard: Shard, rows: _Rows, note: Callable[[int], None]) -> list[int]:
    """Write the images; return the number of rows of each record batch."""
    arrow = require_pyarrow()
    schema, split = shard_schema(work), work.splits[shard.split]
    batch = _Batch(arrow, schema, rows)
    done = 0
    with arrow.ipc.new_file(file, schema) as writer:
        for sample in range(shard.begin, shard.end):
            try:
                image = stored(split.source, sample, work.form)
            except BrokenImageError as error:
                rows.left_out.append(
                    LeftOut(split=shard.split, name=_printable(split.name(sample)), reason=error.reason)
                )
            else:
                if not batch.has_room_for(image):
                    writer.write_batch(batch.taken())
                rows.add(image, int(split.source.labels[sample]), _printable(split.name(sample)))
                batch.add(image)
            done += 1
            if done == _NOTED_EVERY:
                note(done)
                done = 0
        if batch.images:
            writer.write_batch(batch.taken())
    note(done)
    return batch.counts


class _Batch:
    """Images that are held in memory until there are enough of them for a record batch."""

    def __init__(self, arrow: ModuleType, schema: Any, rows: _Rows) -> None:
        self._arrow, self._schema, self._rows = arrow, schema, rows
        self._bytes = 0
        self.images: list[Stored] = []
        self.counts: list[int] = []

    def has_room_for(self, image: Stored) -> bool:
        """Whether another image belongs to it; the first always does."""
        wanted = self._bytes + len(image.content)
        return not self.images or (wanted <= _BATCH_BYTES and len(self.images) < _BATCH_ROWS)

    def add(self, image: Stored) -> None:
        """Take an image whose row was added last."""
        self.images.append(image)
        self._bytes += len(image.content)

    def taken(self) -> Any:
        """Return the record batch, and begin the next."""
        self.counts.append(len(self.images))
        found = _record_batch(
            self._arrow, self._schema, self.images, self._rows, len(self._rows.label) - len(self.images)
        )
        self.images, self._bytes = [], 0
        return found


def _printable(name: str) -> str:
    """Names are text; bytes of a file's name that are none are written out."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _content_column(form: Form) -> str:
    return "pixels" if form.mode == "raw" else "image"


def shard_schema(work: Work) -> Any:
    """The Arrow schema of a shard; where it holds image files, Hugging Face's library reads it as it is."""
    pa = require_pyarrow()
    fields = [("label", pa.int64()), ("height", pa.int32()), ("width", pa.int32())]
    said = {"form": asdict(work.form), "classes": work.classes}
    metadata = {"paceline": json.dumps(said)}
    if work.form.mode == "raw":
        fields = [("pixels", pa.binary()), ("name", pa.string()), *fields]
    else:
        fields = [("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), *fields]
        plain = {"dtype": "int32", "_type": "Value"}
        features = {
            "image": {"_type": "Image"},
            "label": {"names": list(work.classes), "_type": "ClassLabel"},
            "height": plain,
            "width": plain,
        }
        metadata["huggingface"] = json.dumps({"info": {"features": features}})
    return pa.schema(fields, metadata=metadata)


def _record_batch(pa: ModuleType, schema: Any, images: list[Stored], rows: _Rows, first: int) -> Any:
    content = pa.array([each.content for each in images], pa.binary())
    names = pa.array(rows.name[first:], pa.string())
    numbers = [
        pa.array(rows.label[first:], pa.int64()),
        pa.array(rows.height[first:], pa.int32()),
        pa.array(rows.width[first:], pa.int32()),
    ]
    if "pixels" in schema.names:
        return pa.record_batch([content, names, *numbers], schema=schema)
    image = pa.StructArray.from_arrays([content, names], ["bytes", "path"])
    return pa.record_batch([image, *numbers], schema=schema)


def _offsets(path: Path, counts: list[int], lengths: Ids, column: str) -> Ids:
    """Where in the file each image begins, int64 [N]: asked of Arrow, which alone knows how it lays out its files."""
    arrow = require_pyarrow()
    found = [np.zeros(0, dtype=np.int64)]
    with arrow.memory_map(str(path)) as file:
        whole = file.read_buffer()
        opened = arrow.ipc.open_file(arrow.BufferReader(whole))
        first = 0
        for number, count in enumerate(counts):
            content = opened.get_batch(number).column(column)
            data = (content.field("bytes") if column == "image" else content).buffers()[2]
            ends = np.cumsum(lengths[first : first + count])
            assert data.size >= ends[-1]
            found.append(data.address - whole.address + ends - lengths[first : first + count])
            first += count
    return np.concatenate(found)


def _write_part(path: Path, rows: _Rows, offsets: Ids, facts: dict[str, Any]) -> None:
    pa = require_pyarrow()
    columns = {
        "label": pa.array(rows.label, pa.int64()),
        "name": pa.array(rows.name, pa.large_string()),
        "height": pa.array(rows.height, pa.int32()),
        "width": pa.array(rows.width, pa.int32()),
        "offset": pa.array(offsets, pa.int64()),
        "length": pa.array(rows.length, pa.int64()),
        "sha256": pa.array(rows.sha256, pa.binary(32)),
    }
    table = pa.table(columns).replace_schema_metadata({"paceline": json.dumps(facts)})
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_directory(path.parent)


class HashingFile:
    """A new file for Arrow to write to, hashed on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self.sha256 = hashlib.sha256()
        self.size = 0
        self.closed = False
        self._file = file

    def write(self, content: Any) -> int:
        """Write bytes."""
        view = memoryview(content)
        self.sha256.update(view)
        self.size += view.nbytes
        self._file.write(view)
        return view.nbytes

    def flush(self) -> None:
        """Hand what was written to the system."""
        self._file.flush()

    def tell(self) -> int:
        """How much was written."""
        return self.size

    def writable(self) -> bool:
        """It is for writing."""
        return True

    def readable(self) -> bool:
        """And for nothing else."""
        return False

    def seekable(self) -> bool:
        """It is written from beginning to end."""
        return False

    def close(self) -> None:
        """Arrow is done with it; what was written is not on the disk yet."""


@contextmanager
def hashed_file(path: Path) -> Iterator[HashingFile]:
    """Open a new file that is hashed on the way; on the disk when the block ends. Raises OSError."""
    with open(path, "wb", buffering=2**20) as file:
        hashing = HashingFile(file)
        yield hashing
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def reporting_disk_errors(path: Path) -> Iterator[None]:
    """Turn what the disk says into a sentence.

    Raises:
        PackingError: With the original error as its cause.
    """
    try:
        yield
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "unknown error")
        advice = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the disk"
        raise PackingError(
            f"cannot write {str(path)!r}: {error.strerror or error} ({code}); {advice}, and run the same command "
            "again: what is finished stays."
        ) from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there as a whole or not at all, whatever happens; raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_directory(path.parent)
