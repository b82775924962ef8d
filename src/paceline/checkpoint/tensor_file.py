"""How are named tensors written to one safetensors file, and what must a file satisfy to be read?

The format is a length (8 bytes), a JSON header and the raw values: it holds no code. Files are written here
piece by piece, so that saving needs no second copy in memory and the digest is taken on the way; they are
read by the safetensors library, after the header's length has been checked.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from paceline.checkpoint.codec import TensorSpec
from paceline.checkpoint.durable import FileFacts, patient, reporting_disk_errors, write_file
from paceline.errors import CheckpointError
from paceline.files import LFS_POINTER, LFS_START
from paceline.plain_json import load_json

HEADER_LIMIT_BYTES = 100_000_000
_PREFIX_BYTES = 8
_RAW_DTYPES = "raw_dtypes"  # metadata entry: tensors whose dtype the format lacks, stored as bytes
_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "bool": "BOOL", "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_DTYPES = {code: name for name, code in _CODES.items()}
_PICKLE_STARTS = (b"\x80", b"PK\x03\x04")  # a bare pickle; the zip archive of torch.save
# What else is found under the name of a weights file, by its first bytes in small letters.
_OTHERS = {
    LFS_START[:8]: LFS_POINTER,
    b"<!doctyp": "an HTML page: download the file itself",
    b"<html": "an HTML page: download the file itself",
    b"\x1f\x8b": "compressed by gzip: unpack it first",
}


@dataclass(frozen=True)
class TensorFile:
    """The content of one safetensors file."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def write_tensor_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileFacts:
    """Write contiguous CPU tensors to a new file and wait until the device has it.

    Raises:
        OSError: If the file exists, or the disk refuses.
    """
    # Widest elements first keeps every tensor aligned; then by name, so that equal states give equal files.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    return write_file(path, _pieces(ordered, metadata))


def read_tensor_file(path: Path) -> TensorFile:
    """Read any safetensors file, written by Paceline or not.

    Raises:
        CheckpointError: If it is missing, damaged, or a pickle, which is never opened.
    """
    path = Path(path)
    try:
        with reporting_disk_errors("read", path):
            content = read_regular_file(path)
        return parse_tensor_file(content)
    except ValueError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}.") from error


def parse_tensor_file(content: bytes) -> TensorFile:
    """Build the tensors of a file from its bytes.

    Raises:
        ValueError: Naming the rule that is broken.
    """
    header = _header(content, len(content))
    try:
        tensors = load_safetensors(content)
    except (SafetensorError, KeyError, AssertionError, RuntimeError) as error:
        raise ValueError(f"its header does not describe its content ({error})") from error
    metadata = _metadata(header)
    for name, dtype in _raw_dtypes(metadata).items():
        if name not in tensors:
            raise ValueError(f"it gives the dtype of {name!r}, which it lacks")
        tensors[name] = _from_bytes(tensors[name], dtype)
    metadata.pop(_RAW_DTYPES, None)
    return TensorFile(tensors, metadata)


@patient
def read_header(path: Path) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """List the tensors of a file, and what it says of itself, from its header alone.

    Raises:
        OSError: If it cannot be read.
        ValueError: Naming the rule that is broken.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(_PREFIX_BYTES)
        length = _header_length(start, size)
        header = _header(start + file.read(length), size)
    metadata = _metadata(header)
    raw = _raw_dtypes(metadata)
    return {name: _spec(name, entry, raw) for name, entry in header.items() if name != "__metadata__"}, metadata


@patient
def read_regular_file(path: Path) -> bytes:
    """Read a whole file; a pipe or a device, which might never end, is refused as an :class:`OSError`."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(f"{path} is not a regular file")
    with open(path, "rb") as file:
        return file.read()


def pickle_hint(start: bytes, name: str = "") -> str:
    """Return a clause about pickles when a file begins like one, or is a program by its name; else an empty string."""
    if name.endswith((".pt2", ".onnx")):
        return "; a program of torch.export or ONNX has no weights to read by name: give the run that it was made from"
    if start.startswith(_PICKLE_STARTS):
        return (
            "; it looks like a pickle (torch.save), which can run code and is never opened: convert it to safetensors"
        )
    return ""


def _pieces(ordered: list[tuple[str, Tensor]], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    header: dict[str, Any] = {}
    raw: dict[str, str] = {}
    offset = 0
    for name, tensor in ordered:
        spec = TensorSpec.of(tensor)
        size = tensor.numel() * tensor.dtype.itemsize
        shape = list(spec.shape)
        if spec.dtype not in _CODES:
            raw[name] = spec.dtype
            shape.append(tensor.dtype.itemsize)
        code = _CODES.get(spec.dtype, "U8")
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    extra = {_RAW_DTYPES: json.dumps(raw)} if raw else {}
    header = {"__metadata__": {**_writable(metadata), **extra}, **header}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % _PREFIX_BYTES)
    yield len(text).to_bytes(_PREFIX_BYTES, "little")
    yield text
    for _, tensor in ordered:
        # A contiguous tensor of at most one element may have any stride, which view() would refuse.
        yield tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def _writable(metadata: Mapping[str, str]) -> dict[str, str]:
    # Lone surrogates have no UTF-8 form, and one bad letter must not cost a checkpoint.
    return {
        key.encode("utf-8", "backslashreplace").decode(): value.encode("utf-8", "backslashreplace").decode()
        for key, value in metadata.items()
    }


def _from_bytes(stored: Tensor, dtype_name: str) -> Tensor:
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"it holds a tensor of the unknown dtype {dtype_name!r}")
    if stored.dtype is not torch.uint8 or stored.ndim == 0 or stored.shape[-1] != dtype.itemsize:
        raise ValueError(f"it holds a tensor whose bytes do not fit its dtype {dtype_name!r}")
    if stored.numel() == 0:
        return torch.empty(stored.shape[:-1], dtype=dtype)
    return stored.view(dtype).squeeze(-1)


def _header_length(start: bytes, file_size: int) -> int:
    if other := next((what for begin, what in _OTHERS.items() if start.lower().startswith(begin)), None):
        raise ValueError(f"it is {other}")
    hint = pickle_hint(start)
    if len(start) < _PREFIX_BYTES:
        raise ValueError(f"it has {file_size} bytes, too few for a header{hint}")
    length = int.from_bytes(start[:_PREFIX_BYTES], "little")
    if length > HEADER_LIMIT_BYTES:
        raise ValueError(f"its header claims {length} bytes, more than the limit of {HEADER_LIMIT_BYTES}{hint}")
    if length > file_size - _PREFIX_BYTES:
        raise ValueError(f"its header claims {length} bytes, but the file has {file_size}{hint}")
    return length


def _header(content: bytes, file_size: int) -> dict[str, Any]:
    length = _header_length(content[:_PREFIX_BYTES], file_size)
    try:
        header = load_json(content[_PREFIX_BYTES : _PREFIX_BYTES + length])
    except ValueError as error:
        raise ValueError(f"its header is not JSON{pickle_hint(content[:_PREFIX_BYTES])}") from error
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header


def _metadata(header: Mapping[str, Any]) -> dict[str, str]:
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata is not a JSON object of strings")
    return dict(metadata)


def _raw_dtypes(metadata: Mapping[str, str]) -> dict[str, str]:
    try:
        raw = load_json(metadata.get(_RAW_DTYPES, "{}"))
    except ValueError as error:
        raise ValueError("its list of raw dtypes is not JSON") from error
    if not isinstance(raw, dict) or not all(isinstance(value, str) for value in raw.values()):
        raise ValueError("its list of raw dtypes is not a JSON object of strings")
    return raw


def _spec(name: str, entry: Any, raw: Mapping[str, str]) -> TensorSpec:
    code, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
    if not isinstance(shape, list) or not all(isinstance(size, int) for size in shape):
        raise ValueError(f"its entry for {name!r} has no shape")
    if name in raw:
        return TensorSpec(raw[name], tuple(shape[:-1]))
    if code not in _DTYPES:
        raise ValueError(f"its tensor {name!r} has the unknown dtype {code!r}")
    return TensorSpec(_DTYPES[code], tuple(shape))
