"""Sharded saves: several processes, each with a part of the tensors, write one checkpoint together.

A sharded component has a folder with one file per process. The header of each file gives the offsets of its tensors in
the complete ones, under the key that torch.distributed.checkpoint reads: its ``HuggingFaceStorageReader`` opens such a
folder too.

No collective is needed: each process writes its files into the staging directory created by the first, and then a note
that lists them. The first waits for the notes; only it writes the manifest and renames the directory.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.checkpoint.durable import FileFacts, size_of, write_file
from paceline.checkpoint.format import Part, TensorFile, TensorSpec, dtype_of, read_header, write_tensor_file
from paceline.errors import CheckpointError
from paceline.plain_json import load_json
from paceline.records.run_directory import sync_directory

_OFFSETS = "DCP_SHARDING_INFO"
_POLL_SECONDS = 0.05

Files = dict[str, dict[str, FileFacts]]
"""Files with their facts, by component."""


@dataclass(frozen=True)
class Chunk:
    """A box within a tensor: its offset and size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects the box from the complete tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def overlap(self, other: Chunk) -> Chunk:
        """Return the intersection; its size is zero in a dimension without overlap."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = (min(mine.stop, its.stop) for mine, its in zip(self.slices, other.slices, strict=True))
        return Chunk(starts, tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True)))

    def within(self, outer: Chunk) -> Chunk:
        """Return the same box with offsets relative to an enclosing one."""
        return Chunk(tuple(mine - its for mine, its in zip(self.offsets, outer.offsets, strict=True)), self.sizes)


ChunkOf = Callable[[str, TensorSpec], Chunk | None]
"""Which part of a stored tensor is wanted; None for all of it."""


def write_parts(
    directory: Path, component: str, tensors: Mapping[str, Tensor | Part], header: Mapping[str, str], *, rank: int
) -> dict[str, FileFacts]:
    """Write a process's parts of a component; the first process also writes unsharded tensors.

    Returns:
        The files by their names in the checkpoint: one, or none if there is nothing to write.

    Raises:
        OSError: If the disk fails.
    """
    offsets, values = {}, {}
    for key, each in tensors.items():
        if isinstance(each, Part) and each.tensor.numel():
            offsets[key], values[key] = each.offsets, each.tensor
        elif isinstance(each, Tensor) and rank == 0:
            offsets[key], values[key] = (0,) * each.ndim, each
    if not values:
        return {}
    folder = directory / component
    folder.mkdir(exist_ok=True)
    file = folder / f"part-{rank:05d}.safetensors"
    entries = {key: {"saved_offsets": list(start)} for key, start in offsets.items()}
    facts = write_tensor_file(file, values, {**header, _OFFSETS: json.dumps(entries)})
    sync_directory(folder)
    return {f"{component}/{file.name}": facts}


def check_cover(specs: Mapping[str, TensorSpec], files: Iterable[tuple[Mapping[str, TensorSpec], Any]]) -> None:
    """Check that the tensors of one or several files make up the complete ones.

    Args:
        specs: The complete tensors.
        files: Tensors and metadata of each file.

    Raises:
        ValueError: Naming the tensor that does not fit, or is incomplete.
    """
    chunks: dict[str, list[Chunk]] = {key: [] for key in specs}
    for inventory, metadata in files:
        for key, chunk in _chunks_in_file(specs, inventory, metadata).items():
            if any(math.prod(chunk.overlap(other).sizes) > 0 for other in chunks[key]):
                raise ValueError(f"{key!r} has two parts in the same place")
            chunks[key].append(chunk)
    for key, spec in specs.items():
        covered, expected = sum(math.prod(chunk.sizes) for chunk in chunks[key]), math.prod(spec.shape)
        if expected and not chunks[key]:
            raise ValueError(f"{key!r} is absent, but the manifest lists {spec}")
        if covered != expected:
            raise ValueError(f"{key!r} has {expected} numbers, but its parts have {covered}")


def assemble(specs: Mapping[str, TensorSpec], files: Iterable[TensorFile]) -> dict[str, Tensor]:
    """Assemble complete tensors from the files of all processes.

    Raises:
        ValueError: Naming the tensor that does not fit, or is incomplete.
    """
    tensors: dict[str, Tensor] = {}
    headers = []
    for file in files:
        inventory = {key: TensorSpec.of(tensor) for key, tensor in file.tensors.items()}
        for key, chunk in _chunks_in_file(specs, inventory, file.metadata).items():
            if chunk.sizes == specs[key].shape:
                tensors[key] = file.tensors[key]
                continue
            if key not in tensors:
                tensors[key] = torch.empty(specs[key].shape, dtype=file.tensors[key].dtype)
            tensors[key][chunk.slices] = file.tensors[key]
        headers.append((inventory, file.metadata))
    for key, spec in specs.items():
        if key not in tensors:
            tensors[key] = torch.empty(spec.shape, dtype=dtype_of(spec.dtype))
    check_cover(specs, headers)
    return tensors


def read_chunks(files: Iterable[Path], specs: Mapping[str, TensorSpec], chunk_of: ChunkOf) -> dict[str, Tensor]:
    """Read only the requested parts of stored tensors, which may themselves be sharded or complete.

    Raises:
        ValueError: If a file differs from its checkpoint's description.
    """
    requested = {key: chunk_of(key, spec) or Chunk((0,) * len(spec.shape), spec.shape) for key, spec in specs.items()}
    result = {key: torch.empty(chunk.sizes, dtype=dtype_of(specs[key].dtype)) for key, chunk in requested.items()}
    for file in files:
        stored = _chunks_in_file(specs, *read_header(file))
        try:
            with safe_open(file, framework="pt") as content:
                for key, chunk in stored.items():
                    common, dtype = chunk.overlap(requested[key]), result[key].dtype
                    if math.prod(common.sizes):
                        part = common.within(chunk).slices
                        values = content.get_slice(key)[part] if part else content.get_tensor(key)
                        # Some are stored as bytes, which may begin at any address of the mapped file.
                        if values.dtype is not dtype:
                            values = values.clone(memory_format=torch.contiguous_format).view(dtype).squeeze(-1)
                        result[key][common.within(requested[key]).slices] = values
        except SafetensorError as error:
            raise ValueError(f"its header does not describe its content ({error})") from error
    return result


def _chunks_in_file(
    specs: Mapping[str, TensorSpec], inventory: Mapping[str, TensorSpec], metadata: Mapping[str, str]
) -> dict[str, Chunk]:
    """Return the boxes of a file's tensors in the complete ones; a file without offsets holds complete tensors."""
    try:
        offsets = load_json(metadata.get(_OFFSETS, "{}"))
        starts = {key: tuple(entry["saved_offsets"]) for key, entry in offsets.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"its header does not say where its tensors begin ({error!r})") from error
    chunks = {}
    for key, stored in inventory.items():
        start, spec = starts.get(key, (0,) * len(stored.shape)), specs.get(key)
        if not all(type(number) is int for number in start):
            raise ValueError(f"its header begins {key!r} where a tensor cannot begin")
        fits = spec is not None and stored.dtype == spec.dtype and len(start) == len(stored.shape) == len(spec.shape)
        if (
            spec is None
            or not fits
            or not all(
                begin >= 0 and begin + size <= length
                for begin, size, length in zip(start, stored.shape, spec.shape, strict=True)
            )
        ):
            suffix = f" from {list(start)} on" if any(start) else ""
            raise ValueError(f"{key!r} is {stored}{suffix}, but the manifest lists {spec or 'none'}")
        chunks[key] = Chunk(start, stored.shape)
    return chunks


@dataclass(frozen=True)
class ShardedSave:
    """One process's view of a save by several processes.

    Attributes:
        staging_dir: The hidden directory, which exists.
        rank: Rank of this process.
        world_size: Number of processes that write.
        patience_seconds: How long the first process waits while no other makes progress.
        cancelled: Set when the run has failed elsewhere: the notes may never come.
    """

    staging_dir: Path
    rank: int
    world_size: int
    patience_seconds: float
    cancelled: threading.Event = field(default_factory=threading.Event)

    def write_note(self, files: Files, *, error: str | None = None) -> None:
        """Report to the first process what this one has written, or why it failed.

        Raises:
            OSError: If the disk fails here too.
        """
        listed = {name: {file: facts.to_json() for file, facts in entry.items()} for name, entry in files.items()}
        note = self._note(self.rank)
        unfinished = note.with_suffix(".part")
        write_file(unfinished, [json.dumps({"error": error, "files": listed}).encode("ascii")])
        os.rename(unfinished, note)

    def gather_notes(self) -> Files:
        """Wait for the others' notes and remove them; return the files that all of them have written.

        Raises:
            CheckpointError: If a process could not write, or does not make progress.
        """
        files: Files = {}
        for rank in range(1, self.world_size):
            content = self._wait_for(rank)
            if content["error"] is not None:
                raise CheckpointError(f"rank {rank} could not write its part of the checkpoint: {content['error']}")
            for name, entry in content["files"].items():
                files.setdefault(name, {}).update({file: FileFacts.from_json(facts) for file, facts in entry.items()})
            self._note(rank).unlink()
        return files

    def _wait_for(self, rank: int) -> Mapping[str, Any]:
        note, size, since = self._note(rank), -1, time.monotonic()
        while not note.exists():
            if (now := size_of(self.staging_dir)) != size:
                size, since = now, time.monotonic()
            if self.cancelled.wait(_POLL_SECONDS):
                raise CheckpointError(
                    f"rank {rank} has not written its part of the checkpoint, and the run has failed."
                )
            if time.monotonic() - since > self.patience_seconds:
                raise CheckpointError(
                    f"rank {rank} has not written its part of the checkpoint in {self.staging_dir}, and nothing was "
                    f"written there for {self.patience_seconds:.0f} s; all hosts need to see the same run directory."
                )
        content: Mapping[str, Any] = load_json(note.read_bytes())
        return content

    def _note(self, rank: int) -> Path:
        return self.staging_dir / f"note-{rank:05d}.json"
