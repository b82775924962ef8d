"""How do finished shards become a dataset? By one index of all of them, and ``packed.json``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.image.arrow import require_pyarrow
from paceline.data.image.packed_layout import (
    INDEX,
    MANIFEST,
    SPLITS,
    Column,
    ColumnType,
    FileFacts,
    Form,
    LeftOut,
    Manifest,
    Origin,
    Shard,
    Split,
)
from paceline.data.packing.shards import hashed_file, read_part, write_whole
from paceline.errors import DataError

_SHOWN = 10
_NUMBERS: dict[str, ColumnType] = {
    "label": "<i8",
    "height": "<i4",
    "width": "<i4",
    "shard": "<i4",
    "offset": "<i8",
    "length": "<i8",
}


def left_out(root: Path, shards: Sequence[Shard]) -> list[LeftOut]:
    """Which images of the source could not be read."""
    return [LeftOut(**each) for shard in shards for each in read_part(root, shard)[1]["left_out"]]


def refuse_broken(broken: Sequence[LeftOut]) -> None:
    """Refuse a source with broken images.

    Raises:
        DataError: With the names of the first of them.
    """
    shown = "; ".join(f"{each.name} ({each.reason})" for each in broken[:_SHOWN])
    more = f" and {len(broken) - _SHOWN:,} more" if len(broken) > _SHOWN else ""
    raise DataError(
        f"{len(broken):,} image(s) of the source cannot be read: {shown}{more}; repair or remove them and pack into "
        "another DEST, or run the same command with --skip-broken, which leaves them out."
    )


def assemble(root: Path, shards: Sequence[Shard], origin: Origin, form: Form, classes: tuple[str, ...]) -> Manifest:
    """Write the index and ``packed.json``; from then on it is a packed dataset.

    Raises:
        DataError: If not a single image was read.
    """
    tables, facts = zip(*(read_part(root, shard) for shard in shards), strict=True)
    samples = {
        split: sum(table.num_rows for table, shard in zip(tables, shards, strict=True) if shard.split == split)
        for split in SPLITS
        if any(shard.split == split for shard in shards)
    }
    if not samples.get("train"):
        raise DataError("not a single training image of the source can be read: is it what you meant?")
    index, columns = _write_index(root, tables, shards)
    rows = index_arrays(root / INDEX, columns)
    heights, widths = rows["height"], rows["width"]
    alike = bool((heights == heights[0]).all() and (widths == widths[0]).all())
    manifest = Manifest(
        origin=origin,
        form=form,
        classes=classes,
        samples=samples,
        native_size=(int(heights[0]), int(widths[0])) if alike else None,
        digest=content_digest(rows, classes, form, samples),
        left_out=tuple(LeftOut(**each) for known in facts for each in known["left_out"]),
        index=index,
        columns=columns,
        shards=tuple(
            FileFacts(name=shard.file, size=known["size"], sha256=known["sha256"])
            for shard, known in zip(shards, facts, strict=True)
        ),
    )
    write_whole(root / MANIFEST, manifest.encode())
    return manifest


def content_digest(
    rows: Mapping[str, np.ndarray[Any, Any]], classes: Sequence[str], form: Form, samples: Mapping[Split, int]
) -> str:
    """SHA-256 over what a run can see of the images: not over where they lie.

    Args:
        rows: Columns of the index.
        classes: Class names.
        form: How images are stored.
        samples: Number of images of each split.
    """
    head = json.dumps([list(classes), asdict(form), dict(samples)], sort_keys=True)
    digest = hashlib.sha256(head.encode())
    for column in ("label", "height", "width", "name_ends", "name", "sha256"):
        digest.update(rows[column].tobytes())
    return digest.hexdigest()


def index_arrays(path: Path, columns: Mapping[str, Column]) -> dict[str, np.ndarray[Any, Any]]:
    """Read the columns of an index into memory."""
    content = path.read_bytes()
    return {
        name: np.frombuffer(content, dtype=column.dtype, count=column.count, offset=column.offset)
        for name, column in columns.items()
    }


def _write_index(root: Path, tables: Sequence[Any], shards: Sequence[Shard]) -> tuple[FileFacts, dict[str, Column]]:
    pa = require_pyarrow()
    counts = [table.num_rows for table in tables]
    numbers = pa.array(np.repeat(np.arange(len(shards), dtype=np.int32), counts))
    splits = pa.array(np.repeat([shard.split for shard in shards], counts), pa.string())
    table = pa.concat_tables([table.replace_schema_metadata(None) for table in tables]).combine_chunks()
    table = table.append_column("shard", numbers).append_column("split", splits)
    partial = root / f".{INDEX}.partial"
    with hashed_file(partial) as file, pa.ipc.new_file(file, table.schema) as writer:
        # One record batch, so that each column lies in one piece.
        writer.write_table(table.combine_chunks(), max_chunksize=max(1, table.num_rows))
    facts = FileFacts(name=INDEX, size=file.size, sha256=file.sha256.hexdigest())
    columns = _places(partial)
    partial.replace(root / INDEX)
    return facts, columns


def _places(path: Path) -> dict[str, Column]:
    """Where each column lies in the index's file."""
    pa = require_pyarrow()
    with pa.memory_map(str(path)) as file:
        whole = file.read_buffer()
        opened = pa.ipc.open_file(pa.BufferReader(whole))
        assert opened.num_record_batches == 1
        batch = opened.get_batch(0)

        def place(buffer: Any, dtype: ColumnType, count: int) -> Column:
            return Column(dtype=dtype, offset=buffer.address - whole.address, count=count)

        rows = batch.num_rows
        found = {name: place(batch.column(name).buffers()[1], dtype, rows) for name, dtype in _NUMBERS.items()}
        _, ends, blob = batch.column("name").buffers()
        letters = int(np.frombuffer(ends, dtype="<i8")[rows])
        found["name_ends"] = place(ends, "<i8", rows + 1)
        found["name"] = place(blob, "|u1", letters)
        found["sha256"] = place(batch.column("sha256").buffers()[1], "|u1", 32 * rows)
        return found
