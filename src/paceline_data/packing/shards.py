"""Write one shard: consecutive images of one split, in one Arrow file with a part of the index.

Images are stored as original files, as JPEG, or as pixels. A shard depends on the source and the form alone, so it can
be rewritten at any time with identical bytes. Its part of the index is written first and the shard gets its name last:
a shard that exists is complete.
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
from paceline.data.tables import require_pyarrow
from paceline.errors import PacelineError
from paceline.parsing.plain_text import load_json
from paceline.records.run_directory import sync_directory
from paceline_data.packing.origins import OpenedOrigin


def encode_sample(source: SampleSource, sample: int, form: Form) -> tuple[Content, int, int]:
    """Convert one image to a storage form; return its bytes and the height and width of its pixels.

    The image is decoded once, as a check.

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
            channels = 1  # keep grey pictures grey: the file is smaller, and readers detect it
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
    # 4:2:0 chroma subsampling, as in cameras and ImageNet's files: a third less decoding time.
    _picture(pixels).save(out, "JPEG", quality=form.quality, subsampling="4:2:0")
    return out.getvalue(), height, width


def _fitted(pixels: Image, form: Form) -> Image:
    """Downscale or crop an image to a square, as the form requires."""
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


# Buffered in memory before writing: a record batch.
_BATCH_BYTES = 16 * 2**20
_BATCH_ROWS = 16384
_CHECK_SECONDS = 0.2

Progress = Callable[[int, int], None]
"""Called periodically with (images done, total images)."""


class PackingError(PacelineError):
    """The disk failed; finished shards are kept, and the same command resumes."""

    exit_code = 1


class _Stopped(Exception):  # noqa: N818 (no error: nobody waits for the shard any more)
    """Stops a thread in the middle of its shard."""


def _part_path(root: Path, shard: Shard) -> Path:
    """Return the path of a shard's part of the index until all parts are merged."""
    return root / UNFINISHED / shard.file


def is_made(root: Path, shard: Shard) -> bool:
    """Whether a shard and its part of the index exist."""
    path = root / shard.file
    if not path.is_file() or not _part_path(root, shard).is_file():
        return False
    return path.stat().st_size == int(read_part(root, shard)[1]["size"])


def read_part(root: Path, shard: Shard) -> tuple[Any, dict[str, Any]]:
    """Return a shard's part of the index as an Arrow table, and facts about the shard."""
    with open(_part_path(root, shard), "rb") as file:
        table = require_pyarrow().ipc.open_file(file).read_all()
    facts: dict[str, Any] = load_json(table.schema.metadata[b"paceline"])
    return table, facts


def make_shards(
    root: Path, opened: OpenedOrigin, form: Form, shards: Sequence[Shard], workers: int, progress: Progress
) -> None:
    """Write missing shards.

    Args:
        root: The directory of the packed dataset.
        opened: The source.
        form: Storage format of images.
        shards: Shards to write.
        workers: Number of threads.
        progress: Called with (images done, total images).

    Raises:
        PackingError: If the disk fails.
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
            closing.set()  # other threads need not finish their shards
            pool.shutdown(cancel_futures=True)
            raise


def _make_shard(root: Path, opened: OpenedOrigin, form: Form, shard: Shard, note: Callable[[int], None]) -> None:
    """Write a shard and its part of the index; ``note`` is called with the count after each image."""
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
        Index columns, the number of images per record batch, and unreadable images.
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
    for count_written, sample in enumerate(range(shard.begin, shard.end), start=1):
        # Names are text; invalid bytes in file names are escaped.
        name = opened.name(source, sample).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        try:
            content, height, width = encode_sample(source, sample, form)
        except BrokenImageError as error:
            left_out.append(LeftOut(split=shard.split, name=name, reason=error.reason))
        else:
            if waiting and (size + len(content) > _BATCH_BYTES or len(waiting) == _BATCH_ROWS):
                flush()
                size = 0
            waiting.append(content)
            size += len(content)
            row = (int(source.labels[sample]), name, height, width, len(content), hashlib.sha256(content).digest())
            for column, value in zip(rows.values(), row, strict=True):
                column.append(value)
        note(count_written)
    if waiting:
        flush()
    return rows, counts, left_out


def _shard_schema(opened: OpenedOrigin, form: Form) -> Any:
    """Return the Arrow schema of a shard; Hugging Face's library can read shards of image files directly."""
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
    """Return the offset of each image in the file, int64 [N], from Arrow, which defines the file layout."""
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
    """Open a new file that gets its name at the end of the block, when it is complete and on disk. Raises OSError."""
    with open(path.with_name(f".{path.name}.partial"), "wb", buffering=2**20) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)
    sync_directory(path.parent)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read from the disk while bypassing the page cache if possible."""
    with open(path, "rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def reporting_disk_errors(path: Path) -> Iterator[None]:
    """Turn a disk error into a one-sentence error.

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
