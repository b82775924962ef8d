"""Pack a source into a packed dataset, resume packing after any interruption, and verify the result.

The shards are planned in advance, from the source and the request alone. Each is written independently and gets its
name when complete, so that interrupted packing resumes with the missing ones. The bytes do not depend on interruptions
or the number of processes. One index of all shards and ``packed.json`` complete the dataset.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.image.decode import BrokenImageError
from paceline.data.image.sets.packed import (
    INDEX,
    MANIFEST,
    SPLITS,
    UNFINISHED,
    Column,
    ColumnType,
    Form,
    LeftOut,
    Mode,
    PackedDataset,
    PackedFile,
    PackedManifest,
    Shard,
    Split,
    open_packed,
)
from paceline.data.image.source import encoded_source
from paceline.data.tables import require_pyarrow
from paceline.errors import DataError
from paceline.host.system import lock_file
from paceline.parsing.plain_text import load_json
from paceline.parsing.units import format_bytes, format_count
from paceline.recipe.data import Data
from paceline.storage.cache import local_path
from paceline_data.packing.origins import OpenedOrigin, open_origin
from paceline_data.packing.shards import (
    Progress,
    encode_sample,
    file_digest,
    is_made,
    make_shards,
    read_part,
    reporting_disk_errors,
    whole_file,
)

_SHOWN = 10
_NUMBERS: dict[str, ColumnType] = {
    "label": "<i8",
    "height": "<i4",
    "width": "<i4",
    "shard": "<i4",
    "offset": "<i8",
    "length": "<i8",
}


def _assemble(
    root: Path, opened: OpenedOrigin, form: Form, shards: Sequence[Shard], *, skip_broken: bool
) -> PackedManifest:
    """Write the index and ``packed.json``, which completes the packed dataset.

    Raises:
        DataError: If images are unreadable and may not be skipped, or all of them are.
    """
    tables, facts = zip(*(read_part(root, shard) for shard in shards), strict=True)
    broken = tuple(LeftOut(**each) for known in facts for each in known["left_out"])
    if broken and not skip_broken:
        shown = "; ".join(f"{each.name} ({each.reason})" for each in broken[:_SHOWN])
        more = f" and {len(broken) - _SHOWN:,} more" if len(broken) > _SHOWN else ""
        raise DataError(
            f"{len(broken):,} image(s) of the source cannot be read: {shown}{more}; repair or remove them and pack "
            "into another DEST, or run the same command with --skip-broken, which leaves them out."
        )
    samples: dict[Split, int] = dict.fromkeys((shard.split for shard in shards), 0)
    for table, shard in zip(tables, shards, strict=True):
        samples[shard.split] += table.num_rows
    if not samples.get("train"):
        raise DataError("no training image of the source can be read: check that it is the right one.")
    index, columns = _write_index(root, tables, shards)
    rows = _index_arrays(root / INDEX, columns)
    heights, widths = rows["height"], rows["width"]
    is_uniform = bool((heights == heights[0]).all() and (widths == widths[0]).all())
    manifest = PackedManifest(
        origin=opened.origin,
        form=form,
        classes=opened.classes,
        samples=samples,
        native_size=(int(heights[0]), int(widths[0])) if is_uniform else None,
        digest=_content_digest(rows, opened.classes, form, samples),
        left_out=broken,
        index=index,
        columns=columns,
        shards=tuple(
            PackedFile(name=shard.file, size=known["size"], sha256=known["sha256"])
            for shard, known in zip(shards, facts, strict=True)
        ),
    )
    with whole_file(root / MANIFEST) as file:
        file.write(manifest.encode())
    return manifest


def _content_digest(
    rows: Mapping[str, np.ndarray[Any, Any]], classes: Sequence[str], form: Form, samples: Mapping[Split, int]
) -> str:
    """SHA-256 over all that a run can see of the images, which excludes their positions."""
    digest = hashlib.sha256(json.dumps([list(classes), asdict(form), dict(samples)], sort_keys=True).encode())
    for column in ("label", "height", "width", "name_ends", "name", "sha256"):
        digest.update(rows[column].tobytes())
    return digest.hexdigest()


def _index_arrays(path: Path, columns: Mapping[str, Column]) -> dict[str, np.ndarray[Any, Any]]:
    """Read the columns of an index into memory."""
    content = path.read_bytes()
    return {
        name: np.frombuffer(content, dtype=column.dtype, count=column.count, offset=column.offset)
        for name, column in columns.items()
    }


def _write_index(root: Path, tables: Sequence[Any], shards: Sequence[Shard]) -> tuple[PackedFile, dict[str, Column]]:
    """Write the index of all shards; return its file facts and the position of each column."""
    pa = require_pyarrow()
    counts = [table.num_rows for table in tables]
    numbers = pa.array(np.repeat(np.arange(len(shards), dtype=np.int32), counts))
    splits = pa.array(np.repeat([shard.split for shard in shards], counts), pa.string())
    table = pa.concat_tables([table.replace_schema_metadata(None) for table in tables])
    table = table.append_column("shard", numbers).append_column("split", splits).combine_chunks()
    with whole_file(root / INDEX) as file:
        with pa.ipc.new_file(file, table.schema) as writer:
            # One record batch, so that each column is contiguous.
            writer.write_table(table, max_chunksize=max(1, table.num_rows))
        file.flush()
        facts = PackedFile(name=INDEX, size=file.tell(), sha256=file_digest(Path(file.name)))
        with pa.memory_map(file.name) as mapped:
            return facts, _places(mapped.read_buffer())


def _places(whole: Any) -> dict[str, Column]:
    """Return the position of each column in the index, an Arrow buffer."""
    pa = require_pyarrow()
    batch = pa.ipc.open_file(pa.BufferReader(whole)).get_batch(0)
    rows = batch.num_rows
    buffers = {name: batch.column(name).buffers() for name in (*_NUMBERS, "name", "sha256")}
    _, ends, letters = buffers["name"]
    lengths = int(np.frombuffer(ends, dtype="<i8")[rows])
    placed: dict[str, tuple[Any, ColumnType, int]] = {
        **{name: (buffers[name][1], dtype, rows) for name, dtype in _NUMBERS.items()},
        "name_ends": (ends, "<i8", rows + 1),
        "name": (letters, "|u1", lengths),
        "sha256": (buffers["sha256"][1], "|u1", 32 * rows),
    }
    return {
        name: Column(dtype=dtype, offset=buffer.address - whole.address, count=count)
        for name, (buffer, dtype, count) in placed.items()
    }


def verify(root: Path, workers: int, progress: Progress) -> list[str]:
    """Read everything back; return a sentence for each file that is damaged.

    Args:
        root: The directory of the packed dataset.
        workers: Number of files to read concurrently.
        progress: Called with (bytes read, total bytes).

    Raises:
        DataError: If it cannot be opened.
    """
    packed = open_packed(root, check_index=False)  # damaged files are reported below
    manifest, done = packed.manifest, 0
    damaged = []
    with ThreadPoolExecutor(workers) as pool:
        digests = pool.map(lambda facts: file_digest(root / facts.name), manifest.files)
        for number, (facts, actual) in enumerate(zip(manifest.files, digests, strict=True)):
            done += facts.size
            progress(done, manifest.size_bytes)
            if actual != facts.sha256:
                damaged.append(number - 1)  # of the shards; the index comes first
    if -1 in damaged:
        # Without it the images cannot be located.
        return [f"{root / manifest.files[number + 1].name} is damaged" for number in damaged]
    rows = _index_arrays(root / INDEX, manifest.columns)
    damages = [_damage(packed, number) for number in damaged]
    if _content_digest(rows, manifest.classes, manifest.form, manifest.samples) != manifest.digest:
        damages.insert(0, f"{root / INDEX} does not belong to this packed dataset")
    return damages


def _damage(packed: PackedDataset, shard: int) -> str:
    """Return which images of a shard are damaged."""
    index = packed.index
    rows = np.flatnonzero(index.ranges.file == shard).tolist()
    broken = [row for row in rows if hashlib.sha256(packed.content[row]).digest() != index.sha256[row].tobytes()]
    where = f"{packed.root / packed.manifest.shards[shard].name} is damaged"
    if not broken:
        return f"{where}, but none of its {len(rows):,} images is: its labels or names, or Arrow's own data, are"
    names = ", ".join(index.name.text(row) for row in broken[:_SHOWN])
    more = f" and {len(broken) - _SHOWN:,} more" if len(broken) > _SHOWN else ""
    return f"{where}: {len(broken):,} of its {len(rows):,} images ({names}{more})"


_QUALITY = 90
_SMALLEST_SHARD, _LARGEST_SHARD = 2**24, 2**30
# Enough shards to keep many processes busy to the end, but not thousands of files.
_SHARDS = 64
_PLAN = "plan.json"
_LOCK = "lock"
_TRIED, _WEIGHED = 8, 1024  # images that are converted to estimate the size, and images that are only measured


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to pack, and how.

    Attributes:
        source: A file, a folder, a pattern of tars, or an address.
        destination: The directory of the packed dataset.
        kind: Kind of source; None to detect it.
        mode: Storage mode; None for ``original``, or ``raw`` if the source contains pixels.
        max_side: Longest side in pixels, for ``jpeg`` and ``raw``.
        quality: JPEG quality, for ``jpeg``.
        size: Side of the square crop of ``raw`` images.
        shard_bytes: Approximate size of a shard; None for automatic.
        workers: Threads that write shards.
        skip_broken: Whether to skip unreadable images.
        part: Selection from the source and its table columns, as in a recipe; None for all.
    """

    source: str
    destination: Path
    kind: str | None = None
    mode: Mode | None = None
    max_side: int | None = None
    quality: int | None = None
    size: int | None = None
    shard_bytes: int | None = None
    workers: int = 1
    skip_broken: bool = False
    part: Data | None = None


def pack(request: Request, progress: Progress, say: Callable[[str], None]) -> tuple[PackedManifest, int]:
    """Pack a source, or resume packing it.

    Args:
        request: What to pack, and how.
        progress: Called with (images done, total images).
        say: Receives findings, one sentence each.

    Returns:
        The manifest, and the number of images that were already packed at the start.

    Raises:
        DataError: If the source does not support the request, or the destination contains something else.
        PackingError: If the disk fails; the same command resumes.
    """
    require_pyarrow()
    path = local_path(request.source, key="SOURCE")
    root, source = request.destination, Path(path).expanduser().resolve()
    if root.resolve() == source or (source.is_dir() and source in root.resolve().parents):
        raise DataError(
            f"DEST {str(root)!r} is inside SOURCE, which is only read: choose a directory elsewhere.", path=root
        )
    opened = open_origin(path, request.kind, request.part)
    form = _choose_form(request, opened)
    say(_described(request, opened, form))
    for sentence in opened.left_out:
        say(sentence)
    finished = _finished(root, opened, form)
    if finished is not None:
        return finished, finished.total
    if root.exists() and not root.is_dir():
        raise DataError(f"DEST {str(root)!r} is a file: choose a directory that is empty or new.", path=root)
    if root.is_dir() and not (root / UNFINISHED).is_dir() and any(root.iterdir()):
        raise DataError(
            f"DEST {str(root)!r} is not empty and is not a packed dataset: choose a directory that is empty or new.",
            path=root,
        )
    with reporting_disk_errors(root):
        (root / UNFINISHED).mkdir(parents=True, exist_ok=True)
        with _locked(root):
            shards = _cut(opened, form, request.shard_bytes)
            _keep_plan(root, opened, form, shards)
            missing = [shard for shard in shards if not is_made(root, shard)]
            _check_room(root, opened, form, missing)
            make_shards(root, opened, form, missing, min(request.workers, opened.readers), progress)
            manifest = _assemble(root, opened, form, shards, skip_broken=request.skip_broken)
            shutil.rmtree(root / UNFINISHED, ignore_errors=True)
    return manifest, opened.total - sum(shard.end - shard.begin for shard in missing)


def _choose_form(request: Request, opened: OpenedOrigin) -> Form:
    """Determine the storage format of the images.

    Raises:
        DataError: If an option has no effect, or the source does not support the format.
    """
    mode = request.mode or ("original" if opened.has_files else "raw")
    if mode == "original" and not opened.has_files:
        raise DataError(
            f"--mode original keeps image files as they are, but {opened.origin.kind} holds pixels: use --mode raw, "
            "which is lossless there, or jpeg."
        )
    for option, value, modes in (
        ("--max-side", request.max_side, ("jpeg", "raw")),
        ("--quality", request.quality, ("jpeg",)),
        ("--size", request.size, ("raw",)),
    ):
        if value is not None and mode not in modes:
            mode_names = " or ".join(modes)
            raise DataError(
                f"{option} {value} has no effect with --mode {mode}: leave it out, or use --mode {mode_names}."
            )
    if request.size is not None and request.max_side is not None:
        raise DataError("--size makes squares and --max-side keeps the shape of each image: give one of them.")
    return Form(
        mode=mode,
        channels=opened.channels,
        max_side=request.max_side,
        quality=(request.quality or _QUALITY) if mode == "jpeg" else None,
        size=request.size,
    )


def _cut(opened: OpenedOrigin, form: Form, shard_bytes: int | None) -> list[Shard]:
    """Divide a source into shards by number of images: depends on the source, the form and the size alone."""
    each = _stored_bytes(opened, form)
    if shard_bytes is None:
        shard_bytes = int(min(max(each * opened.total / _SHARDS, _SMALLEST_SHARD), _LARGEST_SHARD))
    count = max(1, int(shard_bytes / each))
    return [
        Shard(split=name, number=number, begin=begin, end=min(begin + count, len(opened.splits[name])))
        for name in SPLITS
        if name in opened.splits
        for number, begin in enumerate(range(0, len(opened.splits[name]), count))
    ]


def _stored_bytes(opened: OpenedOrigin, form: Form) -> float:
    """Estimate the bytes per image from evenly spread images."""
    if form.size is not None:
        return form.size**2 * form.channels
    source = opened.splits["train"]
    files = encoded_source(source)
    is_decoded = form.mode == "raw" and files is not None
    lengths: list[int] = []
    for sample in range(0, len(source), max(1, -(-len(source) // (_TRIED if is_decoded else _WEIGHED)))):
        with suppress(OSError, BrokenImageError):
            if is_decoded:
                lengths.append(len(encode_sample(source, sample, form)[0]))
            else:
                lengths.append(source.read(sample).nbytes if files is None else len(files.encoded(sample)))
    return max(1.0, float(np.mean(lengths or [1])))


def _described(request: Request, opened: OpenedOrigin, form: Form) -> str:
    counts = " and ".join(f"{format_count(len(source))} {name}" for name, source in opened.splits.items())
    how = {"original": "as they are", "jpeg": f"as JPEG of quality {form.quality}", "raw": "as pixels"}[form.mode]
    if form.max_side is not None:
        how += f", at most {form.max_side} pixels long"
    if form.size is not None:
        how += f", {form.size}x{form.size}"
    whose = "given" if request.kind is not None else "found"
    return (
        f"{request.source}: {opened.origin.kind} ({whose}), {counts} images of {len(opened.classes):,} classes, to be "
        f"stored {how}"
    )


def _finished(root: Path, opened: OpenedOrigin, form: Form) -> PackedManifest | None:
    """Return the destination's manifest, if it matches the request."""
    if not (root / MANIFEST).is_file():
        return None
    manifest = open_packed(root).manifest
    if manifest.form != form or manifest.origin != opened.origin or manifest.classes != opened.classes:
        raise DataError(
            f"{str(root)!r} holds another packed dataset (mode {manifest.form.mode}, from a source of kind "
            f"{manifest.origin.kind}), or the source has changed since: choose another DEST, or remove it.",
            path=root,
        )
    shutil.rmtree(root / UNFINISHED, ignore_errors=True)  # temporary files only take space now
    return manifest


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Prevent two commands from packing into one directory; the lock is released even after SIGKILL."""
    descriptor = os.open(root / UNFINISHED / _LOCK, os.O_CREAT | os.O_RDWR)
    try:
        lock_file(descriptor, wait=False)
    except BlockingIOError:
        os.close(descriptor)
        raise DataError(
            f"another process is packing into {str(root)!r}: wait for it, or choose another DEST.", path=root
        ) from None
    except OSError:
        pass  # a file system without locks: the check is best effort
    try:
        yield
    finally:
        os.close(descriptor)


def _keep_plan(root: Path, opened: OpenedOrigin, form: Form, shards: list[Shard]) -> None:
    """Record what is being packed here, or check that it matches."""
    plan: dict[str, Any] = {
        "the source": asdict(opened.origin),
        "its classes": list(opened.classes),
        "how images are stored": asdict(form),
        "the shards": [[shard.file, shard.begin, shard.end] for shard in shards],
    }
    plan = json.loads(json.dumps(plan))
    path = root / UNFINISHED / _PLAN
    try:
        before = load_json(path.read_bytes())
    except (FileNotFoundError, ValueError):
        before = None
    if before is None:
        with whole_file(path) as file:
            file.write(json.dumps(plan, indent=1).encode())
    elif before != plan:
        other = " and ".join(what for what in plan if before.get(what) != plan[what])
        raise DataError(
            f"{str(root)!r} holds an unfinished packed dataset ({other}: not as when it was started): repeat the "
            "original command, or remove the directory.",
            path=root,
        )
    for leftover in [*root.glob(".*.partial"), *(root / UNFINISHED).glob(".*.partial")]:
        leftover.unlink()


def _check_room(root: Path, opened: OpenedOrigin, form: Form, missing: list[Shard]) -> None:
    """Check the disk space before hours of work; the size of JPEGs is unknown."""
    if form.mode == "jpeg":
        return
    wanted = math.floor(_stored_bytes(opened, form) * sum(shard.end - shard.begin for shard in missing))
    free = shutil.disk_usage(root).free
    if wanted > free:
        raise DataError(
            f"{str(root)!r} would take about {format_bytes(wanted)} more, and its disk has {format_bytes(free)} free: "
            "free some space, choose another DEST, or store less (--mode jpeg, --max-side).",
            path=root,
        )
