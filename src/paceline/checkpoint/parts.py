"""How do tensors of which each process holds a part lie in a checkpoint's files, and how do they come out again?

A component of which processes hold parts has a folder, with a file for each process. In the header of each stands where
its tensors begin in the whole ones, under the key that torch.distributed.checkpoint reads: its
``HuggingFaceStorageReader`` opens such a folder too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.checkpoint.codec import Part, TensorSpec
from paceline.checkpoint.durable import FileFacts
from paceline.checkpoint.tensor_file import TensorFile, read_header, write_tensor_file
from paceline.plain_json import load_json
from paceline.records.run_directory import sync_directory

_OFFSETS = "DCP_SHARDING_INFO"
_FILE = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)/part-\d{5}\.safetensors")


@dataclass(frozen=True)
class Chunk:
    """A box cut out of a tensor: where it begins and how large it is, in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """What takes it out of the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def overlap(self, other: Chunk) -> Chunk:
        """What both have in common; without a size where that is nothing."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = (
            min(start + size, begin + length)
            for start, size, begin, length in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        return Chunk(starts, tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True)))

    def within(self, outer: Chunk) -> Chunk:
        """The same box, counted from the beginning of one around it."""
        return Chunk(tuple(mine - its for mine, its in zip(self.offsets, outer.offsets, strict=True)), self.sizes)


ChunkOf = Callable[[str, TensorSpec], Chunk | None]
"""Which part of a stored tensor is wanted; None for all of it."""


def is_part_file(name: str, component: str) -> bool:
    """Whether a file of a manifest holds a process's part of a component."""
    match = _FILE.fullmatch(name)
    return match is not None and match[1] == component


def write_parts(
    directory: Path, component: str, tensors: Mapping[str, Tensor | Part], header: Mapping[str, str], *, rank: int
) -> dict[str, FileFacts]:
    """Write a process's parts of a component; the first process writes what is whole as well.

    Returns:
        The files by their names in the checkpoint: one, or none if there is nothing to write.

    Raises:
        OSError: If the disk refuses.
    """
    mine = {key: each for key, each in tensors.items() if _is_written(each, rank)}
    if not mine:
        return {}
    offsets = {key: {"saved_offsets": _offsets_of(each)} for key, each in mine.items()}
    values = {key: each.tensor if isinstance(each, Part) else each for key, each in mine.items()}
    folder = directory / component
    folder.mkdir(exist_ok=True)
    file = folder / f"part-{rank:05d}.safetensors"
    facts = write_tensor_file(file, values, {**header, _OFFSETS: json.dumps(offsets)})
    sync_directory(folder)
    return {f"{component}/{file.name}": facts}


def check_cover(specs: Mapping[str, TensorSpec], files: Iterable[tuple[Mapping[str, TensorSpec], Any]]) -> None:
    """See whether parts make up whole tensors.

    Args:
        specs: The whole ones.
        files: Of each file its tensors, and its header's metadata.

    Raises:
        ValueError: Naming the tensor that does not fit, or is not whole.
    """
    found: dict[str, list[Chunk]] = {key: [] for key in specs}
    for inventory, metadata in files:
        for key, chunk in _placed(specs, inventory, metadata).items():
            if any(_in_common(chunk, other) for other in found[key]):
                raise ValueError(f"{key!r} has two parts in the same place")
            found[key].append(chunk)
    for key, spec in specs.items():
        held = sum(math.prod(chunk.sizes) for chunk in found[key])
        if held != math.prod(spec.shape):
            raise ValueError(f"{key!r} has {math.prod(spec.shape)} numbers, but its parts have {held}")


def assemble(specs: Mapping[str, TensorSpec], files: Iterable[TensorFile]) -> dict[str, Tensor]:
    """Put whole tensors together from the files of all processes.

    Raises:
        ValueError: Naming the tensor that does not fit, or is not whole.
    """
    whole = {key: torch.empty(spec.shape, dtype=_dtype(spec)) for key, spec in specs.items()}
    seen = []
    for file in files:
        inventory = {key: TensorSpec.of(tensor) for key, tensor in file.tensors.items()}
        for key, chunk in _placed(specs, inventory, file.metadata).items():
            whole[key][chunk.slices] = file.tensors[key]
        seen.append((inventory, file.metadata))
    check_cover(specs, seen)
    return whole


def read_chunks(files: Iterable[Path], specs: Mapping[str, TensorSpec], chunk_of: ChunkOf) -> dict[str, Tensor]:
    """Take parts out of stored tensors, be these whole or in parts themselves; nothing else is read.

    Raises:
        ValueError: If a file is not what its checkpoint says.
    """
    wanted = {key: chunk_of(key, spec) or Chunk((0,) * len(spec.shape), spec.shape) for key, spec in specs.items()}
    taken = {key: torch.empty(chunk.sizes, dtype=_dtype(specs[key])) for key, chunk in wanted.items()}
    for file in files:
        held = _placed(specs, *read_header(file))
        try:
            with safe_open(file, framework="pt") as content:
                for key, here in held.items():
                    _take(content, key, here, wanted[key], taken[key])
        except SafetensorError as error:
            raise ValueError(f"its header does not describe its content ({error})") from error
    return taken


def _take(content: Any, key: str, held: Chunk, wanted: Chunk, taken: Tensor) -> None:
    if not wanted.sizes:
        taken.copy_(content.get_tensor(key))
        return
    common = held.overlap(wanted)
    if math.prod(common.sizes):
        taken[common.within(wanted).slices] = content.get_slice(key)[common.within(held).slices]


def _placed(
    specs: Mapping[str, TensorSpec], inventory: Mapping[str, TensorSpec], metadata: Mapping[str, str]
) -> dict[str, Chunk]:
    """Where a file's tensors lie in the whole ones; a file that does not say it holds whole ones."""
    starts = _starts(metadata)
    placed = {}
    for key, found in inventory.items():
        start = starts.get(key, (0,) * len(found.shape))
        spec = specs.get(key)
        if spec is None or found.dtype != spec.dtype or not _fits(start, found.shape, spec.shape):
            raise ValueError(f"{key!r} is {found} from {list(start)} on, but the manifest lists {spec or 'none'}")
        placed[key] = Chunk(start, found.shape)
    return placed


def _in_common(chunk: Chunk, other: Chunk) -> bool:
    return bool(math.prod(chunk.overlap(other).sizes))


def _starts(metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    try:
        offsets = load_json(metadata.get(_OFFSETS, "{}"))
        starts = {key: tuple(entry["saved_offsets"]) for key, entry in offsets.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"its header does not say where its tensors begin ({error!r})") from error
    if not all(type(number) is int for start in starts.values() for number in start):
        raise ValueError("its header begins a tensor where no tensor can begin")
    return starts


def _fits(start: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(start) == len(sizes) == len(shape) and all(
        begin >= 0 and begin + size <= whole for begin, size, whole in zip(start, sizes, shape, strict=True)
    )


def _dtype(spec: TensorSpec) -> torch.dtype:
    found = getattr(torch, spec.dtype, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"it holds a tensor of the unknown dtype {spec.dtype!r}")
    return found


def _is_written(each: Tensor | Part, rank: int) -> bool:
    return each.tensor.numel() > 0 if isinstance(each, Part) else rank == 0


def _offsets_of(each: Tensor | Part) -> list[int]:
    return list(each.offsets) if isinstance(each, Part) else [0] * each.ndim
