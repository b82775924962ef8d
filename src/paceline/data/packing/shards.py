"""Make one shard: images of one split, one after the other, into one Arrow file and a part of the index.

Images are stored as the files they are, as JPEG, or as pixels. A shard is a function of the source and the form alone,
so that it can be made at any time, twice if need be, with the same bytes. Its part of the index is written first and
the shard gets its name last: a shard that is there is whole.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

import numpy as np
from PIL import Image as Pillow
from PIL import ImageOps

from paceline.data.image.decode import BrokenImageError, decode, image_header
from paceline.data.image.sets.packed import UNFINISHED, Form, LeftOut, Shard
from paceline.data.image.source import Content, Ids, Image, SampleSource, encoded_source
from paceline.data.image.tables import require_pyarrow
from paceline.data.packing.origins import OpenedOrigin
from paceline.errors import PacelineError
from paceline.plain_json import load_json
from paceline.records.run_directory import sync_directory


def stored(source: SampleSource, sample: int, form: Form) -> tuple[Content, int, int]:
    """Bring one image into a form: its bytes, and height and width of the pixels that they stand for.

    It has been decoded once when this returns.

    Raises:
        BrokenImageError: If it cannot be read.
    """
    files = encoded_source(source)
    if files is None:
        pixels = source.read(sample)
    else:
        content = files.encoded(sample)
        channels = form.channels if form.mode == "raw" else 3
        if form.mode == "jpeg" and (head := image_header(io.BytesIO(content))) is not None and head[1]:
            channels = 1  # a grey picture stays grey: its file is smaller, and it says so when it is opened
        try:
            pixels = decode(bytes(content), channels)
        except BrokenImageError as error:
            raise BrokenImageError(source.path(sample), error.reason) from error
        if form.mode == "original":
            return content, pixels.shape[0], pixels.shape[1]
    pixels = _fitted(pixels, form)
    height, width = pixels.shape[:2]
    if form.mode == "raw":
        return np.ascontiguousarray(pixels).tobytes(), height, width
    assert form.quality is not None
    out = io.BytesIO()
    # Colour at half the resolution, as cameras do and ImageNet's files are: a third less to decode.
    _picture(pixels).save(out, "JPEG", quality=form.quality, subsampling="4:2:0")
    return out.getvalue(), height, width


def _fitted(pixels: Image, form: Form) -> Image:
    """Make an image smaller, or a square, as far as the form asks for it."""
    height, width = pixels.shape[:2]
    if form.size is not None and (height, width) != (form.size, form.size):
        picture = ImageOps.fit(_picture(pixels), (form.size, form.size), Pillow.Resampling.LANCZOS)
    elif form.max_side is not None and max(height, width) > form.max_side:
        ratio = form.max_side / max(height, width)
        size = (max(1, round(width * ratio)), max(1, round(height * ratio)))
        picture = _picture(pixels).resize(size, Pillow.Resampling.LANCZOS)
    else:
        return pixels
    fitted = np.asarray(picture)
    return fitted if fitted.ndim == 3 else fitted[..., None]


def _picture(pixels: Image) -> Pillow.Image:
    return Pillow.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


# What is held in memory before it is written: a record batch.
_BATCH_BYTES = 16 * 2**20
_BATCH_ROWS = 16384
_CHECK_SECONDS = 0.2

Progress = Callable[[int, int], None]
"""Called now and then with (images done, images in all)."""


class PackingError(PacelineError):
    """The disk failed; finished parts are kept, and the same command resumes."""

    exit_code = 1


class _Stopped(Exception):  # noqa: N818 (no error: nobody waits for the shard any more)
    """Ends a thread in the middle of its shard."""


def _part_path(root: Path, shard: Shard) -> Path:
    """Where the shard's part of the index lies until all are put together."""
    return root / UNFINISHED / shard.file


def is_made(root: Path, shard: Shard) -> bool:
    """Whether a shard and its part of the index are there."""
    path = root / shard.file
    if not path.is_file() or not _part_path(root, shard).is_file():
        return False
    return path.stat().st_size == int(read_part(root, shard)[1]["size"])


def read_part(root: Path, shard: Shard) -> tuple[Any, dict[str, Any]]:
    """Return a shard's part of the index as an Arrow table, and what is known of the shard."""
    with open(_part_path(root, shard), "rb") as file:
        table = require_pyarrow().ipc.open_file(file).read_all()
    facts: dict[str, Any] = load_json(table.schema.metadata[b"paceline"])
    return table, facts


def make_shards(
    root: Path, opened: OpenedOrigin, form: Form, shards: Sequence[Shard], workers: int, progress: Progress
) -> None:
    """Make shards that are missing.

    Args:
        root: The directory of the packed dataset.
        opened: The source.
        form: How images are to be stored.
        shards: Those to make.
        workers: Threads.
        progress: Told how many images are done, and how many there are.

    Raises:
        PackingError: If the disk refuses.
    """
    total, done, closing = sum(shard.end - shard.begin for shard in shards), dict.fromkeys(shards, 0), Event()

    def make(shard: Shard) -> None:
        def note(count: int) -> None:
            done[shard] = count
            if closing.is_set():
                raise _Stopped

        _make_shard(root, opened, form, shard, note)

    progress(0, total)
    with ThreadPoolExecutor(workers) as pool:
        try:
            pending: set[Future[None]] = {pool.submit(make, shard) for shard in shards}
            while pending:
                finished, pending = wait(pending, _CHECK_SECONDS, FIRST_EXCEPTION)
                progress(sum(done.values()), total)
                for future in finished:
                    future.result()
        except BaseException:
            closing.set()  # whoever is in the middle of a shard need not finish it
            pool.shutdown(cancel_futures=True)
            raise


def _make_shard(root: Path, opened: OpenedOrigin, form: Form, shard: Shard, note: Callable[[int], None]) -> None:
    """Write a shard and its part of the index; ``note`` is told after each image how many are done."""
    pa = require_pyarrow()
    with reporting_disk_errors(root / shard.file), whole_file(root / shard.file) as file:
        schema, written = _shard_schema(opened, form), Path(file.name)
        with pa.ipc.new_file(file, schema) as writer:
            rows, counts, left_out = _write(writer, schema, opened, shard, form, note)
        file.flush()
        known = {"size": file.tell(), "sha256": file_digest(written), "left_out": list(map(asdict, left_out))}
        offsets = _offsets(written, np.array(rows["length"], dtype=np.int64), counts, form)
        types = {
            "label": pa.int64(),
            "name": pa.large_string(),
            "height": pa.int32(),
            "width": pa.int32(),
            "offset": pa.int64(),
            "length": pa.int64(),
            "sha256": pa.binary(32),
        }
        index = pa.schema(types.items(), {"paceline": json.dumps(known)})
        with whole_file(_part_path(root, shard)) as part, pa.ipc.new_file(part, index) as writer:
            writer.write_table(pa.table({**rows, "offset": offsets}, index))


def _write(
    file: Any, schema: Any, opened: OpenedOrigin, shard: Shard, form: Form, note: Callable[[int], None]
) -> tuple[dict[str, list[Any]], list[int], list[LeftOut]]:
    """Write the images of a shard in record batches.

    Returns:
        Columns of the index, how many images each record batch has, and those that cannot be read.
    """
    pa, source = require_pyarrow(), opened.splits[shard.split]
    rows: dict[str, list[Any]] = {each: [] for each in ("label", "name", "height", "width", "length", "sha256")}
    waiting: list[Content] = []
    counts, left_out = list[int](), list[LeftOut]()

    def flush() -> None:
        last = {name: pa.array(rows[name][-len(waiting) :]) for name in ("name", "label", "height", "width")}
        columns = [pa.array(waiting, pa.binary()), last.pop("name")]
        if form.mode != "raw":
            columns = [pa.StructArray.from_arrays(columns, ["bytes", "path"])]
        columns += [numbers.cast(schema.field(name).type) for name, numbers in last.items()]
        file.write_batch(pa.record_batch(columns, schema=schema))
        counts.append(len(waiting))
        waiting.clear()

    size = 0
    for done, sample in enumerate(range(shard.begin, shard.end), start=1):
        # Names are text; bytes of a file's name that are none are written out.
        name = opened.name(source, sample).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        try:
            content, height, width = stored(source, sample, form)
        except BrokenImageError as error:
            left_out.append(LeftOut(split=shard.split, name=name, reason=error.reason))
        else:
            if waiting and (size + len(content) > _BATCH_BYTES or len(waiting) == _BATCH_ROWS):
                flush()
                size = 0
            waiting.append(content)
            size += len(content)
            digest = hashlib.sha256(content).digest()
            row = (int(source.labels[sample]), name, height, width, len(content), digest)
            for column, value in zip(rows.values(), row, strict=True):
                column.append(value)
        note(done)
    if waiting:
        flush()
    return rows, counts, left_out


def _shard_schema(opened: OpenedOrigin, form: Form) -> Any:
    """The Arrow schema of a shard; where it holds image files, Hugging Face's library reads it as it is."""
    pa = require_pyarrow()
    fields = [("label", pa.int64()), ("height", pa.int32()), ("width", pa.int32())]
    metadata = {"paceline": json.dumps({"form": asdict(form), "classes": opened.classes})}
    if form.mode == "raw":
        return pa.schema([("pixels", pa.binary()), ("name", pa.string()), *fields], metadata)
    plain = {"dtype": "int32", "_type": "Value"}
    features = {
        "image": {"_type": "Image"},
        "label": {"names": list(opened.classes), "_type": "ClassLabel"},
        "height": plain,
        "width": plain,
    }
    metadata["huggingface"] = json.dumps({"info": {"features": features}})
    return pa.schema([("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), *fields], metadata)


def _offsets(path: Path, lengths: Ids, counts: Sequence[int], form: Form) -> Ids:
    """Where in the file each image begins, int64 [N]: asked of Arrow, which alone knows how it lays out its files."""
    pa = require_pyarrow()
    with pa.memory_map(str(path)) as file:
        whole = file.read_buffer()
        opened = pa.ipc.open_file(pa.BufferReader(whole))
        begins = []
        for number in range(len(counts)):
            batch = opened.get_batch(number)
            content = batch.column("pixels") if form.mode == "raw" else batch.column("image").field("bytes")
            begins.append(content.buffers()[2].address - whole.address)
    before = np.cumsum(lengths) - lengths  # of the image, in the whole shard; and in its batch
    firsts = np.repeat(np.cumsum([0, *counts])[:-1], counts)
    offsets: Ids = np.repeat(np.array(begins, dtype=np.int64), counts) + before - before[firsts]
    return offsets


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that gets its name when the block ends: then it is whole and on the disk. Raises OSError."""
    with open(path.with_name(f".{path.name}.partial"), "wb", buffering=2**20) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)
    sync_directory(path.parent)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read from the disk as far as the system can be asked not to remember it."""
    with open(path, "rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def reporting_disk_errors(path: Path) -> Iterator[None]:
    """Turn a disk error into a sentence.

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
            "again: finished parts are kept."
        ) from error
