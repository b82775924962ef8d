"""The files of a checkpoint's components: states as JSON with named tensors, and tensors as safetensors.

Nothing in these files can run code. A state is split into a JSON structure and named tensors. Plain JSON values
represent themselves, so that a person can read the structure; everything that JSON cannot express is an object with one
key that begins with ``$``: tuples, dictionaries with keys that are not plain strings, floats that are not finite (with
their exact bits), very large integers, and tensors.

Safetensors files are written here piece by piece, so that a save needs no second copy in memory and the digest is
computed while writing. A load needs none either: each tensor is read into its own memory, and hashed meanwhile.

If a component's tensors are sharded over processes, each process writes a file with its parts. The header of each file
gives the offsets of its tensors in the complete ones, under the key that torch.distributed.checkpoint reads: its
``HuggingFaceStorageReader`` opens such a folder too.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.checkpoint.durable import (
    PIECE_BYTES,
    FileFacts,
    open_regular_file,
    reporting_disk_errors,
    with_retries,
    write_file,
)
from paceline.errors import CheckpointError
from paceline.parsing.files import LFS_POINTER, LFS_START
from paceline.parsing.plain_text import load_json
from paceline.records.run_directory import sync_directory

SIZE_LIMIT_BYTES = 100_000_000  # limit for a manifest, and for a safetensors header
MAX_DIMENSIONS = 64  # of a tensor
_MOST_TENSORS = 2**18  # in one file; reading that many takes seconds even if all are empty

_MAX_PLAIN_BITS = 64  # longer integers are written as hexadecimal: JSON readers limit decimal digits

_PREFIX_BYTES = 8
_METADATA = "__metadata__"  # the only key that a safetensors header reserves
_RAW_DTYPES = "raw_dtypes"  # metadata entry: tensors whose dtype the format lacks, stored as bytes
_OFFSETS = "DCP_SHARDING_INFO"  # metadata entry: where the tensors of a part begin
_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "bool": "BOOL", "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_DTYPES = {code: name for name, code in _CODES.items()} | {
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_PICKLE_STARTS = (b"\x80", b"PK\x03\x04")  # a bare pickle; the zip archive of torch.save
# Other formats found under the name of a weights file, by their first bytes in lower case.
_OTHER_FORMATS = {
    LFS_START[:8]: LFS_POINTER,
    b"<!doctyp": "an HTML page: download the file itself",
    b"<html": "an HTML page: download the file itself",
    b"\x1f\x8b\x08": "compressed by gzip: unpack it first",
}


@dataclass(frozen=True)
class TensorSpec:
    """Dtype name (``bfloat16``) and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor | Part) -> TensorSpec:
        """Describe a tensor on any device; for a shard, describe the complete tensor."""
        values = tensor.tensor if isinstance(tensor, Part) else tensor
        return cls(str(values.dtype).removeprefix("torch."), tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Part:
    """This process's part of a tensor that is sharded over processes.

    Attributes:
        tensor: Its values; empty if another process holds and writes the same part.
        shape: Shape of the complete tensor.
        offsets: Start of the part in the complete tensor, in each dimension.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


# States as JSON and named tensors


def encode(state: Any, *, where: str = "state") -> tuple[Any, dict[str, Tensor | Part]]:
    """Split a state into a JSON-able structure and CPU tensors.

    The keys of a flat dictionary of tensors are the tensor names, unchanged. Tensors that are already on the CPU are
    not copied: write them before the state changes.

    Args:
        state: Nested dict, list, tuple, str, int, float, bool, None, tensors and parts of them.
        where: First word of the path in an error, usually the component's name.

    Raises:
        CheckpointError: If an object inside is of another type; the message has its path and type.
    """
    encoder = _Encoded(state, where)
    return encoder.structure, {name: map_tensors(tensor, _on_host) for name, tensor in encoder.tensors.items()}


def inventory(state: Any, *, where: str = "state") -> dict[str, TensorSpec]:
    """List the tensors of a state under their stored names, without copying any of them."""
    return {name: TensorSpec.of(tensor) for name, tensor in _Encoded(state, where).tensors.items()}


def map_tensors(state: Any, change: Callable[[Tensor], Any]) -> Any:
    """Rebuild the containers of a state with every tensor replaced by ``change(tensor)``."""
    if isinstance(state, Tensor):
        return change(state)
    if isinstance(state, Part):
        return replace(state, tensor=change(state.tensor))
    if isinstance(state, Mapping):
        return {key: map_tensors(value, change) for key, value in state.items()}
    return type(state)(map_tensors(value, change) for value in state) if type(state) in (list, tuple) else state


def decode(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild the state that :func:`encode` split.

    Raises:
        CheckpointError: If the structure names a tensor that is absent, or is not of this format.
    """
    try:
        return _decode(structure, tensors)
    except (KeyError, ValueError, TypeError, struct.error, RecursionError) as error:
        raise CheckpointError(f"the structure of a component is not valid: {error!r}") from error


class _Encoded:
    """A state split into its ``structure`` and its ``tensors`` by name."""

    def __init__(self, state: Any, where: str) -> None:
        self.where, self.tensors = where, dict[str, Tensor | Part]()
        try:
            self.structure = self._encode(state, ())
        except RecursionError:
            raise CheckpointError(
                f"{where} cannot be saved: it is nested too deeply or contains itself; give a flat state."
            ) from None

    def _encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, (Tensor, Part)):
            return {"$tensor": self._add(value, path)}
        if isinstance(value, dict):
            return self._encode_dict(value, path)
        # Check the exact type: a subclass (numpy.float64, an enum, a named tuple) would be restored as another type.
        kind = type(value)
        if kind is list or kind is tuple:
            items = [self._encode(item, (*path, index)) for index, item in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if kind is float and not math.isfinite(value):
            return {"$float": struct.pack(">d", value).hex()}
        if kind is int and value.bit_length() > _MAX_PLAIN_BITS:
            return {"$int": hex(value)}
        if value is None or kind in (str, bool, int, float):
            return value
        raise self._unsupported("the value", value, path)

    def _encode_dict(self, value: dict[Any, Any], path: tuple[Any, ...]) -> Any:
        for key in value:
            if type(key) not in (str, int):
                raise self._unsupported("the key", key, path)
        encoded = [(key, self._encode(item, (*path, key))) for key, item in value.items()]
        if all(type(key) is str and not key.startswith("$") for key in value):
            return dict(encoded)
        return {"$dict": [[self._encode(key, path), item] for key, item in encoded]}

    def _add(self, tensor: Tensor | Part, path: tuple[Any, ...]) -> str:
        plain = (tensor.tensor if isinstance(tensor, Part) else tensor).detach()
        is_dense = plain.layout is torch.strided and not plain.is_quantized and not plain.is_meta
        if type(plain) is not Tensor or not is_dense:
            raise self._unsupported("the tensor (only a dense, whole tensor with values can be saved)", tensor, path)
        # 'a.b' may be one key or two; a lone surrogate cannot be encoded as UTF-8.
        base = _utf8(".".join(map(str, path)) if path else "tensor")
        name, count = base, 1
        while name in self.tensors or name == _METADATA:
            count += 1
            name = f"{base}#{count}"
        self.tensors[name] = replace(tensor, tensor=plain) if isinstance(tensor, Part) else plain
        return name

    def _unsupported(self, label: str, value: Any, path: tuple[Any, ...]) -> CheckpointError:
        return CheckpointError(
            f"{'.'.join((self.where, *map(str, path)))} cannot be saved: {label} is of type "
            f"{type(value).__module__}.{type(value).__qualname__}, but a state holds only dict, list, tuple, str, int, "
            "float, bool, None and torch.Tensor; convert it in state_dict()."
        )


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def _decode(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    marker = next((key for key in node if key.startswith("$")), None)
    if marker is None:
        return {key: _decode(item, tensors) for key, item in node.items()}
    ((_, content),) = node.items()  # a marker has no sibling keys
    match marker:
        case "$tensor":
            return tensors[content]
        case "$tuple":
            return tuple(_decode(item, tensors) for item in content)
        case "$dict":
            return {_decode(key, tensors): _decode(item, tensors) for key, item in content}
        case "$float":
            return struct.unpack(">d", bytes.fromhex(content))[0]
        case "$int":
            return int(content, 16)
    raise ValueError(f"unknown mark {marker!r}")


# Tensors in a safetensors file


@dataclass(frozen=True)
class TensorFile:
    """The content of one safetensors file."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileFacts:
    """Write CPU tensors to a new file and wait until it is on the device.

    Raises:
        OSError: If the file exists, or the disk fails.
        CheckpointError: If there are too many.
    """
    if len(tensors) > _MOST_TENSORS:
        raise CheckpointError(f"{path} would hold {len(tensors)} tensors, more than the limit of {_MOST_TENSORS}.")
    # Widest elements first keeps every tensor aligned; then by name, so that equal states give equal files.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    raw = {name: TensorSpec.of(each).dtype for name, each in ordered if TensorSpec.of(each).dtype not in _CODES}
    extra = {_RAW_DTYPES: json.dumps(raw)} if raw else {}
    header: dict[str, Any] = {_METADATA: {**{_utf8(key): _utf8(value) for key, value in metadata.items()}, **extra}}
    offset = 0
    for name, tensor in ordered:
        size, width = tensor.numel() * tensor.dtype.itemsize, [tensor.dtype.itemsize] if name in raw else []
        code = _CODES.get(TensorSpec.of(tensor).dtype, "U8")
        header[name] = {"dtype": code, "shape": [*tensor.shape, *width], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % _PREFIX_BYTES)

    # One buffer for all tensors that are not contiguous: new memory costs a page fault for every few thousand bytes.
    buffer = np.empty(max((each.nbytes for _, each in ordered if not each.is_contiguous()), default=0), np.uint8)

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(_PREFIX_BYTES, "little")
        yield text
        for _, tensor in ordered:
            if tensor.is_contiguous():
                # A contiguous tensor of at most one element may have any stride, which view() would reject.
                yield tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data
                continue
            # Do not use torch here: in the writer thread it would start threads next to those that compute. While there
            # are more threads than cores, OpenMP does not let any of them spin, which slows down every operation.
            numbers = tensor.view(_SAME_WIDTH[tensor.dtype.itemsize]).numpy()
            contiguous = buffer[: numbers.nbytes].view(numbers.dtype).reshape(numbers.shape)
            np.copyto(contiguous, numbers)
            yield buffer[: numbers.nbytes].data

    return write_file(path, pieces())


def read_tensor_file(path: Path) -> TensorFile:
    """Read any safetensors file, written by Paceline or not.

    Raises:
        CheckpointError: If it is missing, damaged, or a pickle, which is never opened.
    """
    try:
        with reporting_disk_errors("read", path):
            return read_tensors(path)[0]
    except ValueError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}.", path=path) from error


@with_retries
def read_tensors(path: Path) -> tuple[TensorFile, FileFacts]:
    """Read a safetensors file, and describe the bytes that its tensors came from.

    Raises:
        OSError: If it cannot be read.
        ValueError: Naming the broken rule.
    """
    tensors, digest = {}, blake3()
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(_PREFIX_BYTES)
        start += file.read(_header_length(start, size))
        digest.update(start)
        header, metadata, raw = _parse_header(start, size)
        try:
            layout = list(_layout(header, len(start), size))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"its header does not describe its content ({error})") from error
        for name, dtype, shape, size_bytes in layout:
            content = torch.empty(size_bytes, dtype=torch.uint8)
            # Each piece is hashed while it is in the processor's cache.
            for piece in (content.numpy().data[at : at + PIECE_BYTES] for at in range(0, size_bytes, PIECE_BYTES)):
                if file.readinto(piece) != len(piece):
                    raise ValueError("it became shorter while it was read")
                digest.update(piece)
            tensors[name] = content.view(dtype).reshape(shape)
    for name, dtype_name in raw.items():
        dtype, stored = dtype_of(dtype_name), tensors.get(name)
        if stored is None:
            raise ValueError(f"it lists a dtype for {name!r}, but has no such tensor")
        if stored.dtype is not torch.uint8 or stored.ndim == 0 or stored.shape[-1] != dtype.itemsize:
            raise ValueError(f"it holds a tensor whose bytes do not match its dtype {dtype_name!r}")
        empty = torch.empty(stored.shape[:-1], dtype=dtype)
        tensors[name] = stored.view(dtype).squeeze(-1) if stored.numel() else empty
    metadata.pop(_RAW_DTYPES, None)
    return TensorFile(tensors, metadata), FileFacts(size, digest.hexdigest())


def _layout(header: Mapping[str, Any], start: int, file_size: int) -> Iterator[tuple[str, torch.dtype, list[int], int]]:
    """Yield each tensor's name, dtype, shape and bytes, after checking that they fill the file from ``start`` on."""
    end = start
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if (dtype_name := _DTYPES.get(entry["dtype"])) is None:
            raise ValueError(f"it holds a tensor of the unknown dtype {entry['dtype']!r}")
        dtype, shape = dtype_of(dtype_name), entry["shape"]
        # Checked before they are multiplied: products of very long numbers take hours.
        is_shape = len(shape) <= MAX_DIMENSIONS and all(type(side) is int and 0 <= side < 2**63 for side in shape)
        if not is_shape or type(shape) is not list or math.prod(side or 1 for side in shape) >= 2**63:
            raise ValueError(f"{name!r} has no shape of a tensor")
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        if entry["data_offsets"] != [begin - start, end - start] or end > file_size:
            raise ValueError(f"{name!r} is not where the tensor before it ends")
        yield name, dtype, shape, end - begin
    if end != file_size:
        raise ValueError(f"{file_size - end} bytes belong to no tensor")


@with_retries
def read_header(path: Path) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """List a file's tensors and metadata from its header only.

    Raises:
        OSError: If it cannot be read.
        ValueError: Naming the broken rule.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(_PREFIX_BYTES)
        header, metadata, raw = _parse_header(start + file.read(_header_length(start, size)), size)
    specs = {}
    for name, entry in header.items():
        code, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
        if not isinstance(shape, list) or not all(isinstance(side, int) for side in shape):
            raise ValueError(f"its entry for {name!r} has no shape")
        is_raw = name in raw
        dtype = raw[name] if is_raw else _DTYPES.get(str(code))
        if dtype is None:
            raise ValueError(f"its tensor {name!r} has the unknown dtype {code!r}")
        specs[name] = TensorSpec(dtype, tuple(shape[:-1] if is_raw else shape))
    return specs, metadata


def pickle_hint(start: bytes | bytearray, name: str = "") -> str:
    """Return a clause about pickles, or about programs, if a file looks like one; else an empty string."""
    if name.endswith((".pt2", ".onnx")):
        return (
            "; a torch.export or ONNX program has no weights that can be read by name: give the run it was "
            "exported from"
        )
    if start.startswith(_PICKLE_STARTS):
        return (
            "; it looks like a pickle (torch.save), which can run code and is never opened: convert it to safetensors"
        )
    return ""


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with this name.

    Raises:
        ValueError: If there is no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"it holds a tensor of the unknown dtype {name!r}")
    return dtype


def _utf8(text: str) -> str:
    # Lone surrogates have no UTF-8 form, and one invalid character must not cost a checkpoint.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _header_length(start: bytes | bytearray, file_size: int) -> int:
    if other := next(
        (description for begin, description in _OTHER_FORMATS.items() if start.lower().startswith(begin)), None
    ):
        raise ValueError(f"it is {other}")
    hint = pickle_hint(start)
    if len(start) < _PREFIX_BYTES:
        raise ValueError(f"it has {file_size} bytes, too few for a header{hint}")
    length = int.from_bytes(start[:_PREFIX_BYTES], "little")
    if length > SIZE_LIMIT_BYTES:
        raise ValueError(f"its header claims {length} bytes, more than the limit of {SIZE_LIMIT_BYTES}{hint}")
    if length > file_size - _PREFIX_BYTES:
        raise ValueError(f"its header claims {length} bytes, but the file has {file_size}{hint}")
    return length


def _parse_header(content: bytes | bytearray, file_size: int) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Return the entries of the tensors, the metadata, and the dtypes of tensors that are stored as bytes."""
    length = _header_length(content[:_PREFIX_BYTES], file_size)
    if (count := content.count(b'"data_offsets"')) > _MOST_TENSORS:  # before a large header is parsed
        raise ValueError(f"it lists {count} tensors, more than the limit of {_MOST_TENSORS}")
    try:
        header = load_json(content[_PREFIX_BYTES : _PREFIX_BYTES + length])
    except ValueError as error:
        raise ValueError(f"its header is not JSON{pickle_hint(content[:_PREFIX_BYTES])}") from error
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    metadata = _strings(header.pop(_METADATA, None) or {}, "metadata")
    try:
        raw = load_json(metadata.get(_RAW_DTYPES, "{}"))
    except ValueError as error:
        raise ValueError("its list of raw dtypes is not JSON") from error
    return header, metadata, _strings(raw, "list of raw dtypes")


def _strings(value: Any, label: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise ValueError(f"its {label} is not a JSON object of strings")
    return value


# Tensors that are sharded over processes


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
