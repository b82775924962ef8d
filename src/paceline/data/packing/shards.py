"""Make one shard: images of one split, one after the other, into one Arrow file and a part of the index.

Images are stored as the files they are, as JPEG, or as pixels. A shard is a function of the source and the form alone,
so that any process can make any of them, twice if need be, with the same bytes. Its part of the index is written first
and the shard gets its name last: a shard that is there is whole.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image as Pillow
from PIL import ImageOps

from paceline.data.image.decode import BrokenImageError, decode, image_header
from paceline.data.image.sets.packed import UNFINISHED, Form, LeftOut, Shard
from paceline.data.image.source import Content, Ids, Image, SampleSource, encoded_source
from paceline.data.image.tables import require_pyarrow
from paceline.data.packing.origins import OriginSplit
from paceline.errors import PacelineError
from paceline.plain_json import load_json
from paceline.records.run_directory import sync_directory


@dataclass(frozen=True)
class Stored:
    """An image as it is stored.

    Attributes:
        content: Its bytes.
        height: Of the pixels that they stand for.
        width: Likewise.
    """

    content: Content
    height: int
    width: int


def stored(source: SampleSource, sample: int, form: Form) -> Stored:
    """Bring one image into a form; it has been decoded once when this returns.

    Raises:
        BrokenImageError: If it cannot be read.
    """
    if form.mode == "original":
        files = encoded_source(source)
        assert files is not None
        content = files.encoded(sample)
        height, width = _decoded(content, 3, source, sample).shape[:2]
        return Stored(content, height, width)
    files = encoded_source(source)
    if files is not None:
        content = files.encoded(sample)
        channels = form.channels if form.mode == "raw" else _channels_of(content)
        pixels = _decoded(content, channels, source, sample)
    else:
        pixels = source.read(sample)
    pixels = _fitted(pixels, form)
    height, width = pixels.shape[:2]
    if form.mode == "raw":
        return Stored(np.ascontiguousarray(pixels).tobytes(), height, width)
    return Stored(_jpeg(pixels, form), height, width)


def _decoded(content: Content, channels: int, source: SampleSource, sample: int) -> Image:
    try:
        return decode(bytes(content), channels)
    except BrokenImageError as error:
        raise BrokenImageError(source.path(sample), error.reason) from error


def _channels_of(content: Content) -> int:
    """A grey picture stays grey: its file is smaller, and it says so when it is opened."""
    head = image_header(io.BytesIO(content))
    return 1 if head is not None and head[1] else 3


def _fitted(pixels: Image, form: Form) -> Image:
    """Make an image smaller, or a square, as far as the form asks for it."""
    height, width = pixels.shape[:2]
    if form.size is not None:
        if (height, width) == (form.size, form.size):
            return pixels
        square = ImageOps.fit(_picture(pixels), (form.size, form.size), Pillow.Resampling.LANCZOS)
        return _array(square)
    if form.max_side is None or max(height, width) <= form.max_side:
        return pixels
    ratio = form.max_side / max(height, width)
    size = (max(1, round(width * ratio)), max(1, round(height * ratio)))
    return _array(_picture(pixels).resize(size, Pillow.Resampling.LANCZOS))


def _picture(pixels: Image) -> Pillow.Image:
    return Pillow.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


def _array(picture: Pillow.Image) -> Image:
    pixels = np.asarray(picture)
    return pixels if pixels.ndim == 3 else pixels[..., None]


def _jpeg(pixels: Image, form: Form) -> bytes:
    assert form.quality is not None
    out = io.BytesIO()
    # Colour at half the resolution, as cameras do and ImageNet's files are: a third less to decode.
    _picture(pixels).save(out, "JPEG", quality=form.quality, subsampling="4:2:0")
    return out.getvalue()


# What is held in memory before it is written: a record batch.
_BATCH_BYTES = 16 * 2**20
_BATCH_ROWS = 16384
_NOTED_EVERY = 64
_NUMBERS = ("label", "height", "width")
_COLUMNS = ("label", "name", "height", "width", "length", "sha256")


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
    """Write a shard and its part of the index; ``note`` is called now and then with the number of images done since.

    Raises:
        PackingError: If the disk refuses.
    """
    target = work.root / shard.file
    partial = target.with_name(f".{target.name}.partial")
    with reporting_disk_errors(target):
        with hashed_file(partial) as file, require_pyarrow().ipc.new_file(file, shard_schema(work)) as arrow_file:
            writer = _Writer(arrow_file, shard_schema(work))
            left_out = _write(writer, work, shard, note)
        facts = {"size": file.size, "sha256": file.sha256.hexdigest(), "left_out": list(map(asdict, left_out))}
        _write_part(part_path(work.root, shard), writer.rows, _offsets(partial, writer, work.form), facts)
        os.replace(partial, target)
        sync_directory(work.root)


def _write(writer: _Writer, work: Work, shard: Shard, note: Callable[[int], None]) -> list[LeftOut]:
    """Write the images of a shard; return those that cannot be read."""
    split, left_out, done = work.splits[shard.split], list[LeftOut](), 0
    for sample in range(shard.begin, shard.end):
        # Names are text; bytes of a file's name that are none are written out.
        name = split.name(sample).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        try:
            image = stored(split.source, sample, work.form)
        except BrokenImageError as error:
            left_out.append(LeftOut(split=shard.split, name=name, reason=error.reason))
        else:
            writer.add(image, int(split.source.labels[sample]), name)
        done += 1
        if done == _NOTED_EVERY:
            note(done)
            done = 0
    writer.flush()
    note(done)
    return left_out


class _Writer:
    """Writes images in record batches, and collects their rows of the index.

    Attributes:
        rows: Columns of the index.
        counts: How many images each record batch has.
    """

    def __init__(self, file: Any, schema: Any) -> None:
        self.rows: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        self.counts: list[int] = []
        self._file, self._schema = file, schema
        self._images: list[Content] = []
        self._bytes = 0

    def add(self, image: Stored, label: int, name: str) -> None:
        """Take an image; earlier ones are written first where they are enough for a record batch."""
        length = len(image.content)
        if self._bytes + length > _BATCH_BYTES or len(self._images) == _BATCH_ROWS:
            self.flush()
        self._images.append(image.content)
        self._bytes += length
        row = (label, name, image.height, image.width, length, hashlib.sha256(image.content).digest())
        for column, value in zip(self.rows.values(), row, strict=True):
            column.append(value)

    def flush(self) -> None:
        """Write the images that are held in memory."""
        if not self._images:
            return
        pa, first = require_pyarrow(), len(self.rows["label"]) - len(self._images)
        content = pa.array(self._images, pa.binary())
        names = pa.array(self.rows["name"][first:], pa.string())
        numbers = [pa.array(self.rows[each][first:], self._schema.field(each).type) for each in _NUMBERS]
        if "pixels" in self._schema.names:
            columns = [content, names, *numbers]
        else:
            columns = [pa.StructArray.from_arrays([content, names], ["bytes", "path"]), *numbers]
        self._file.write_batch(pa.record_batch(columns, schema=self._schema))
        self.counts.append(len(self._images))
        self._images, self._bytes = [], 0


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


def _offsets(path: Path, writer: _Writer, form: Form) -> Ids:
    """Where in the file each image begins, int64 [N]: asked of Arrow, which alone knows how it lays out its files."""
    arrow = require_pyarrow()
    lengths = np.array(writer.rows["length"], dtype=np.int64)
    found = [np.zeros(0, dtype=np.int64)]
    with arrow.memory_map(str(path)) as file:
        whole = file.read_buffer()
        opened = arrow.ipc.open_file(arrow.BufferReader(whole))
        first = 0
        for number, count in enumerate(writer.counts):
            batch = opened.get_batch(number)
            content = batch.column("pixels") if form.mode == "raw" else batch.column("image").field("bytes")
            data = content.buffers()[2]
            part = lengths[first : first + count]
            ends = np.cumsum(part)
            assert data.size >= ends[-1]
            found.append(data.address - whole.address + ends - part)
            first += count
    return np.concatenate(found)


def _write_part(path: Path, rows: dict[str, list[Any]], offsets: Ids, facts: dict[str, Any]) -> None:
    pa = require_pyarrow()
    types = {
        "label": pa.int64(),
        "name": pa.large_string(),
        "height": pa.int32(),
        "width": pa.int32(),
        "offset": pa.int64(),
        "length": pa.int64(),
        "sha256": pa.binary(32),
    }
    values = {**rows, "offset": offsets}
    table = pa.table({name: pa.array(values[name], kind) for name, kind in types.items()})
    table = table.replace_schema_metadata({"paceline": json.dumps(facts)})
    content = pa.BufferOutputStream()
    with pa.ipc.new_file(content, table.schema) as writer:
        writer.write_table(table)
    write_whole(path, content.getvalue())


class HashingFile(io.RawIOBase):
    """A new file for Arrow to write to, hashed on the way."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self.sha256 = hashlib.sha256()
        self.size = 0
        self._file = file

    def write(self, content: Any) -> int:
        """Write bytes."""
        view = memoryview(content)
        self.sha256.update(view)
        self.size += view.nbytes
        self._file.write(view)
        return view.nbytes

    def tell(self) -> int:
        """How much was written."""
        return self.size

    def writable(self) -> bool:
        """It is for writing, from beginning to end."""
        return True


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


def write_whole(path: Path, content: Any) -> None:
    """Write bytes to a file so that it is there as a whole or not at all, whatever happens; raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_directory(path.parent)


Progress = Callable[[int, int], None]
"""Called now and then with (images done, images in all)."""

_CHECK_SECONDS = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def make_shards(work: Work, shards: Sequence[Shard], workers: int, progress: Progress) -> None:
    """Make shards that are missing.

    Args:
        work: What they are made of.
        shards: Those to make.
        workers: Processes.
        progress: Told how many images are done, and how many there are.

    Raises:
        PackingError: If the disk refuses, or a process dies.
    """
    total = sum(shard.end - shard.begin for shard in shards)
    progress(0, total)
    if workers == 1 or len(shards) < 2:
        done = 0

        def note(count: int) -> None:
            nonlocal done
            done += count
            progress(done, total)

        for shard in shards:
            make_shard(work, shard, note)
        return
    _make_beside(work, shards, min(workers, len(shards)), progress)


def _make_beside(work: Work, shards: Sequence[Shard], workers: int, progress: Progress) -> None:
    # Spawned processes would import everything again and be handed the list of files; macOS cannot fork safely.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    shared = _Shared(context, len(shards))
    total = sum(shard.end - shard.begin for shard in shards)
    with ProcessPoolExecutor(workers, context, _settle_in, (work, shared, os.getpid())) as pool:
        try:
            with _forking():
                futures = [pool.submit(_make, slot, shard) for slot, shard in enumerate(shards)]
            pending: Any = futures
            while pending:
                finished, pending = wait(pending, _CHECK_SECONDS, FIRST_EXCEPTION)
                progress(sum(shared.done), total)
                for future in finished:
                    future.result()
        except BaseException as error:
            shared.closing.value = 1  # whoever is in the middle of a shard need not finish it
            pool.shutdown(wait=True, cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise PackingError(
                    "a process that made shards has died, perhaps for want of memory; run the same command again, with "
                    "fewer --workers: what is finished stays."
                ) from error
            raise


@contextmanager
def _forking() -> Iterator[None]:
    """Start processes so that no signal comes between: what its handler raises while Python forks would be lost."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Shared:
    """What the processes tell one another; without locks, which a process that is killed would keep."""

    def __init__(self, context: BaseContext, shards: int) -> None:
        self.done: Any = context.RawArray("q", shards)
        self.closing: Any = context.RawValue("b", 0)


_here: tuple[Work, _Shared] | None = None


def _settle_in(work: Work, shared: _Shared, parent: int) -> None:
    global _here  # noqa: PLW0603 (a process of the pool is given its work once)
    _here = (work, shared)
    for number in _SIGNALS:
        # The parent hears them, and says what to do.
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_leave_in_time, args=(shared, parent), daemon=True).start()


def _leave_in_time(shared: _Shared, parent: int) -> None:
    """Leave when nobody waits for the shards any more: the parent was killed, or gives up."""
    while os.getppid() == parent and not shared.closing.value:
        time.sleep(_CHECK_SECONDS)
    os._exit(1)


def _make(slot: int, shard: Shard) -> None:
    assert _here is not None
    work, shared = _here

    def note(count: int) -> None:
        shared.done[slot] += count

    make_shard(work, shard, note)
